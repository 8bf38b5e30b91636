"""Streams under any interleaving of responses, credits, cancellations and lost leases."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from qinfer.batching.streams import StreamedExecution
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, Credit
from qinfer.errors import Cancelled, OutputMismatch
from tests.support.open_streams import StreamBench, outputs

WINDOW_BYTES = 1200
COUNT = 3

numbers = st.integers(0, COUNT - 1)
steps = st.one_of(
    st.tuples(st.just("send"), numbers, st.integers(0, 100)),
    st.tuples(st.just("end"), numbers, st.integers(0, 3)),
    st.tuples(st.just("take"), numbers, st.integers(0, 1000)),
    st.tuples(st.just("lose"), numbers, st.just(0)),
    st.tuples(st.just("cancel"), numbers, st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
)


@given(st.lists(steps, max_size=40))
def test_each_stream_is_in_order_bounded_and_ends_once(done: Sequence[tuple[str, int, int]]) -> None:
    """No index is missing or repeated, a window and one response are never exceeded, and each item ends once."""
    asyncio.run(_run(done))


async def _run(done: Sequence[tuple[str, int, int]]) -> None:
    bench = StreamBench(WINDOW_BYTES)
    execution = bench.execution(COUNT)
    taken, largest = [0] * COUNT, 0
    for what, number, amount in done:
        item, stream = execution.items[number], execution.streams[number]
        if what == "send" and stream._window.fits(8 * amount):
            largest = max(largest, 8 * amount + RESPONSE_OVERHEAD_BYTES)
            _send(bench, number, amount, final=False)
        elif what == "end" and stream._window.fits(8 * amount):
            largest = max(largest, 8 * amount + RESPONSE_OVERHEAD_BYTES)
            _send(bench, number, amount, final=True)
        elif what == "take":
            left = sum(tensor.nbytes for response in bench.responses(item.request.id) for tensor in response.outputs)
            taken[number] = min(amount, left)  # it may be an old credit
            bench.table.credit([Credit(item.request.id, 1, taken[number])])
        elif what == "lose":
            item.lose()
            bench.table.lose(item)
        elif what == "cancel":
            bench.table.cancel(item, Cancelled("test"))
        elif what == "turn":
            await bench.turn()
        assert all(each._window.on_way_bytes <= max(WINDOW_BYTES, largest) for each in execution.streams)
    for number, item in enumerate(execution.items):
        if not item.lost:
            _send(bench, number, 0, final=True)
    await bench.turn()
    _check(bench, execution)


def _check(bench: StreamBench, execution: StreamedExecution) -> None:
    assert bench.open == []
    for item in execution.items:
        responses = bench.responses(item.request.id)
        assert [response.index for response in responses] == list(range(len(responses)))
        assert sum(response.final for response in responses) == (not item.lost or any(r.final for r in responses))
        assert not any(response.final for response in responses[:-1])


def _send(bench: StreamBench, number: int, rows: int, *, final: bool) -> None:
    stream = bench.table._open.get((f"r{number}", 1))
    if stream is None:
        return
    try:
        stream.send(outputs(rows) if rows else (), final=final)
    except (Cancelled, OutputMismatch):
        return
