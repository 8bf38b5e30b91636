"""Streams: what leaves, in which order, how much of it, and how a stream ends."""

import asyncio
import time

import pytest

from qinfer.backends.base import Batch, Context
from qinfer.batching.streams import StreamedExecution, Window
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, Credit
from qinfer.errors import Cancelled, InferenceFailed, OutputMismatch
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from tests.support.open_streams import StreamBench, outputs

COST = 8 + RESPONSE_OVERHEAD_BYTES


def test_a_window_counts_what_is_on_its_way() -> None:
    window = Window(1000)
    window.sent(100)
    window.sent(200)

    assert window.on_way_bytes == 300 + 2 * RESPONSE_OVERHEAD_BYTES
    assert window.took(100) == 100
    assert window.on_way_bytes == 200 + RESPONSE_OVERHEAD_BYTES
    assert window.took(300) == 200
    assert window.on_way_bytes == 0


def test_credits_are_cumulative() -> None:
    """One that is lost, late, repeated or too large does no harm."""
    window = Window(1000)
    for _ in range(3):
        window.sent(100)

    assert [window.took(taken) for taken in (200, 200, 100, 10_000, 0)] == [200, 0, 0, 100, 0]
    assert window.on_way_bytes == 0


def test_a_response_larger_than_the_window_passes_alone() -> None:
    window = Window(10)

    assert window.fits(1000)
    window.sent(1000)
    assert not window.fits(1)
    assert window.fits(0)
    window.took(1000)
    assert window.fits(1000)


async def test_responses_leave_in_the_order_of_their_indexes() -> None:
    bench = StreamBench()
    execution = bench.execution(2)

    execution.respond(0, outputs(), final=False)
    execution.respond(1, outputs(), final=False)
    execution.respond(0, (), parameters={"x": 1})
    await bench.turn()

    assert [(r.request_id, r.index, r.final, r.credit_to) for _, r in bench.sent] == [
        ("r0", 0, False, "reply:worker-w"),
        ("r1", 0, False, "reply:worker-w"),
        ("r0", 1, True, ""),
    ]
    assert bench.sent[-1][1].parameters == {"x": 1}
    assert bench.open == ["r1"]


async def test_a_thread_waits_for_room() -> None:
    bench = StreamBench(window_bytes=2 * COST)
    execution = bench.execution()

    def send() -> None:
        for _ in range(5):
            execution.respond(0, outputs(), final=False)
        execution.respond(0, ())

    sending = asyncio.create_task(asyncio.to_thread(send))
    for taken in (1, 2, 3):
        await eventually(lambda taken=taken: len(bench.sent) == taken + 1)  # type: ignore[misc]  # bound at once
        bench.table.credit([Credit("r0", 1, 8 * taken)])
    await sending

    await bench.turn()
    assert [r.index for r in bench.responses()] == [0, 1, 2, 3, 4, 5]


async def test_an_item_that_was_lost_before_its_execution_began_has_no_stream() -> None:
    """A worker that stops waits until no stream is open."""
    bench = StreamBench()
    execution = bench.execution()
    (item,) = execution.items
    item.lose()
    bench.table.lose(item)

    stream = bench.table.open(item, execution)
    await bench.table.wait_closed()

    assert stream.is_over
    assert stream.closed.is_set()


async def test_a_stream_that_is_over_keeps_no_instance_when_its_item_is_executed_again() -> None:
    """An instance ends when all streams that it has had are closed."""
    bench = StreamBench()
    execution = bench.execution()
    (item,) = execution.items
    assert bench.table.reopen_stream(item, execution) is execution.streams[0]

    bench.table.lose(item)
    again = bench.table.reopen_stream(item, execution)

    assert again.is_over
    assert again.closed.is_set()


async def test_credits_of_others_are_dropped() -> None:
    bench = StreamBench(window_bytes=COST)
    execution = bench.execution()
    taken: list[int] = []
    execution.on_taken(0, taken.append)
    execution.offer(0, outputs(), final=False)

    bench.table.credit([Credit("r0", 2, 8), Credit("other", 1, 8)])
    assert taken == []
    bench.table.credit([Credit("r0", 1, 8)])

    assert taken == [8]


async def test_a_model_that_is_asked_to_end_may_go_on() -> None:
    bench = StreamBench(window_bytes=2 * COST)
    execution = bench.execution(2)
    execution.offer(0, outputs(), final=False)

    bench.table.credit([Credit("r0", 1, 8, cancelled=True)])
    cancelled = [execution.cancelled(item) for item in range(2)]
    execution.offer(0, outputs(), final=False)
    execution.offer(0, Cancelled("as asked"))

    await bench.turn()
    assert cancelled == [True, False]
    assert [(r.final, r.failure and r.failure.message) for r in bench.responses()] == [
        (False, None), (False, None), (True, "as asked"),
    ]  # fmt: skip


async def test_an_ensemble_that_is_asked_to_end_ends() -> None:
    bench = StreamBench()
    execution = bench.execution()
    stream = bench.table.open(execution.items[0], Ensemble(execution))
    stream.send(outputs(), final=False)

    bench.table.credit([Credit("r0", 1, 8, cancelled=True)])

    await bench.turn()
    assert [(r.final, r.failure and r.failure.code) for r in bench.responses()] == [(False, None), (True, "cancelled")]


class Ensemble:
    """A source that asks for nothing."""

    can_ask = False

    def __init__(self, execution: StreamedExecution) -> None:
        self.responder, self.timing, self.count = execution.responder, execution.timing, execution.count


async def test_what_was_taken_before_is_told_at_once() -> None:
    bench = StreamBench()
    execution = bench.execution()
    taken: list[int] = []
    execution.offer(0, outputs(), final=False)
    bench.table.credit([Credit("r0", 1, 8)])

    execution.on_taken(0, taken.append)

    assert taken == [8]


async def test_nothing_more_is_awaited_from_a_stream_that_has_ended() -> None:
    """A thread of the model may send the final response just before the next execution of its request begins."""
    bench = StreamBench()
    execution = bench.execution()
    execution.offer(0, outputs())
    told: list[int] = []

    execution.on_taken(0, told.append)

    assert told == [0]


async def test_a_thread_that_waits_is_told_of_a_cancelled_caller() -> None:
    bench = StreamBench(window_bytes=1)
    execution = bench.execution()
    told: list[int] = []
    execution.on_taken(0, told.append)
    execution.respond(0, outputs(), final=False)
    sending = asyncio.create_task(asyncio.to_thread(execution.respond, 0, outputs(), final=False))

    execution.items[0].lose()
    bench.table.lose(execution.items[0])

    with pytest.raises(Cancelled):
        await sending
    assert execution.cancelled(0)
    assert told == [0]
    assert bench.open == []
    await bench.turn()
    assert bench.sent == []


async def test_nothing_comes_after_the_final_response() -> None:
    bench = StreamBench()
    execution = bench.execution()
    execution.respond(0, ())

    with pytest.raises(OutputMismatch, match="after its final response"):
        execution.respond(0, outputs(), final=False)


async def test_a_caller_that_takes_nothing_is_cancelled() -> None:
    bench = StreamBench(window_bytes=1, stall_s=0.0)
    execution = bench.execution()
    execution.offer(0, outputs(), final=False)
    await bench.turn()

    bench.table._check_streams()
    await bench.turn()

    assert [r.failure and r.failure.code for r in bench.responses()] == [None, "cancelled"]
    assert bench.responses()[-1].final
    with pytest.raises(Cancelled):
        execution.offer(0, (), final=True)


async def test_a_stream_ends_at_its_deadline() -> None:
    bench = StreamBench()
    bench.execution()
    bench.now_s = 1000.0

    bench.table._check_streams()
    await bench.turn()

    assert [r.failure and r.failure.code for r in bench.responses()] == ["deadline_exceeded"]


async def test_outputs_that_do_not_fit_end_the_stream() -> None:
    bench = StreamBench()
    execution = bench.execution()

    execution.respond(0, (Tensor("z", "FP32", (1, 2), bytes(8)),), final=False)
    await bench.turn()

    (response,) = bench.responses()
    assert response.failure is not None
    assert (response.failure.code, response.final) == ("output_mismatch", True)


async def test_a_failure_ends_only_its_own_stream() -> None:
    bench = StreamBench()
    execution = bench.execution(2)

    execution.respond(0, InferenceFailed("broken"))
    execution.respond(1, outputs(3))
    await bench.turn()

    assert bench.open == []
    assert [r.failure is None for r in (bench.responses("r0")[0], bench.responses("r1")[0])] == [False, True]
    assert bench.tally.drain()["success_count"] == 1


async def test_responses_are_counted_by_index() -> None:
    """As Triton tells them (reference §1.13); the histogram has the first response of each request."""
    bench = StreamBench()
    bench.tally.with_histogram = True
    execution = bench.execution(2)

    execution.respond(0, outputs(3), final=False)
    execution.respond(0, outputs(3), final=False)
    execution.respond(0, ())
    execution.respond(1, InferenceFailed("broken"))
    await bench.turn()

    counted = bench.tally.drain()
    assert {field: count for field, count in counted.items() if field.startswith("response:")} == {
        "response:0:success": 1,
        "response:0:compute_infer": 1,
        "response:0:compute_output": 1,
        "response:1:success": 1,
        "response:1:compute_infer": 1,
        "response:1:compute_output": 1,
        "response:2:empty_response": 1,
        "response:0:fail": 1,
    }
    assert sum(count for field, count in counted.items() if field.startswith("first_response_ms:")) == 1
    assert counted["response_ns:1:success"] + counted["response_ns:0:success"] <= counted["infer_ns"]


async def test_streams_to_a_process_that_is_gone_end() -> None:
    bench = StreamBench()
    execution = bench.execution(2)
    execution.items[1].request.reply_to = "reply:other"

    bench.table.cancel_streams_to("reply:g")
    await bench.turn()

    assert bench.open == ["r1"]


class Naive:
    """A backend that sends one response to each item, within `execute`, and lets everything through that is raised."""

    short_on_loop = False

    def load(self, *_: object) -> None: ...

    def execute(self, batch: Batch, ctx: Context) -> None:
        for item in range(len(batch.requests)):
            ctx.respond(item, outputs(), final=False)
        for item in range(len(batch.requests)):
            ctx.respond(item, ())

    def unload(self) -> None: ...


async def test_a_cancelled_caller_does_not_cancel_the_others_of_its_batch() -> None:
    """What has sent nothing runs again, and what has sent a part fails; neither is told that it was cancelled."""
    bench = StreamBench()
    execution = bench.execution(3)
    execution.items[1].lose()

    execution.run(Naive())
    await bench.turn()
    execution.leave_open()

    assert [item.request.id for item in execution.unanswered] == ["r2"]
    assert [r.failure and r.failure.code for r in bench.responses("r0")] == [None, "inference_failed"]
    assert bench.responses("r2") == []


async def test_a_model_that_raises_has_untouched_requests_run_again() -> None:
    bench = StreamBench()
    execution = bench.execution(2)

    class Raising(Naive):
        def execute(self, batch: Batch, ctx: Context) -> None:
            ctx.respond(0, outputs(), final=False)
            raise ValueError("broken")

    execution.run(Raising())
    await bench.turn()

    assert [item.request.id for item in execution.unanswered] == ["r1"]
    assert [r.failure and r.failure.message for r in bench.responses("r0")] == [None, "broken"]


async def test_a_stream_is_unread_once_its_window_waits_too_long() -> None:
    """For longer than what is on its way would take at the least rate."""
    bench = StreamBench(window_bytes=COST)
    (stream,) = bench.execution().streams
    assert not stream.unread_s(time.monotonic() + 1000)

    stream.send(outputs(), final=False)

    assert not stream.unread_s(time.monotonic())
    assert stream.unread_s(time.monotonic() + 1000) > 900


async def test_a_caller_that_drips_is_as_slow_as_one_that_does_not_read() -> None:
    bench = StreamBench(window_bytes=4 * COST)
    (stream,) = bench.execution().streams
    for _ in range(4):
        stream.send(outputs(), final=False)
    stream._full_since_s -= 1000

    bench.table.credit([Credit("r0", 1, 8)])

    assert stream.unread_s(time.monotonic()) > 900


async def test_a_caller_that_has_taken_all_is_not_slow() -> None:
    bench = StreamBench(window_bytes=COST)
    (stream,) = bench.execution().streams
    stream.send(outputs(), final=False)

    bench.table.credit([Credit("r0", 1, 8)])

    assert not stream.unread_s(time.monotonic() + 1000)
