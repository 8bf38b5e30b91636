"""Asynchronous requests to decoupled models, on a real Redis: each response is stored once, whichever worker dies."""

import pytest

from qinfer.core.messages import Response
from qinfer.queue.entries import EntryAddress, RequestOutcome, RequestState, Settlement
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses
from tests.support.inline_workers import InlineWorkers, value
from tests.support.streaming_backend import DECOUPLED, ENDLESS, RESUMES, StreamingBackend

LEASE_S = 0.5


@pytest.fixture
def streams(scene: InlineWorkers) -> InlineWorkers:
    scene.backend = StreamingBackend
    return scene


def model(scene: InlineWorkers, worker_id: str = "w1") -> StreamingBackend:
    """Returns the only instance of a worker."""
    (backend,) = scene.backends[worker_id]
    assert isinstance(backend, StreamingBackend)
    return backend


async def stored(scene: InlineWorkers, address: EntryAddress) -> list[Response]:
    """Returns all stored responses, read page by page."""
    found: list[Response] = []
    while page := await scene.delivery.requests.responses.read(address, len(found)):
        found += [response for blob in page for response in decode_responses(blob)]
    return found


async def came(scene: InlineWorkers, address: EntryAddress, count: int) -> None:
    """Waits until so many responses are stored."""

    async def are_stored() -> bool:
        return len(await stored(scene, address)) == count

    await eventually(are_stored, description=f"{count} stored responses")


async def values(scene: InlineWorkers, address: EntryAddress) -> list[float]:
    return [value(response) for response in await stored(scene, address)]


async def test_responses_are_stored_as_they_come(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    address = await streams.accept(3.0)

    for count in (1, 2, 3):
        model(streams).let(1)
        await came(streams, address, count)
    record = await streams.delivery.requests.record(address)
    model(streams).let(1)
    ended = await streams.ended(address)

    assert record is not None
    assert (record.state, record.responses) == (RequestState.RUNNING, 3)
    assert (ended.state, ended.responses, ended.attempts) == (RequestState.SUCCEEDED, 3, 1)
    assert await values(streams, address) == [0.0, 1.0, 2.0]
    final = await streams.result(address)
    assert (final.outputs, final.index, final.final) == ((), 3, True)
    await streams.queued(0)


async def test_many_responses_at_once(streams: InlineWorkers) -> None:
    """They are stored several at a time, and none of them twice."""
    await streams.model(more=DECOUPLED)
    await streams.worker()
    addresses = [await streams.accept(count) for count in (0.0, 1.0, 300.0)]

    await eventually(lambda: "w1" in streams.backends, description="a worker")
    model(streams).let(304)
    for address in addresses:
        await streams.ended(address)

    assert [await values(streams, address) for address in addresses] == [[], [0.0], [float(n) for n in range(300)]]
    await streams.queued(0)


async def test_a_worker_that_dies_in_the_middle_breaks_the_stream(streams: InlineWorkers) -> None:
    """The request fails with an error that is worth repeating, and keeps what was stored."""
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=LEASE_S)
    address = await streams.accept(5.0)
    model(streams).let(2)
    await came(streams, address, 2)
    await streams.kill()

    await streams.worker("w2", lease_s=LEASE_S)
    record = await streams.ended(address)

    assert (record.state, record.code, record.responses) == (RequestState.FAILED, "stream_broken", 2)
    assert model(streams, "w2").sizes == []
    assert await values(streams, address) == [0.0, 1.0]
    await streams.queued(0)


async def test_a_model_that_resumes_goes_on_where_it_was(streams: InlineWorkers) -> None:
    """It is executed again; what is stored already is skipped."""
    await streams.model(more=RESUMES)
    await streams.worker(lease_s=LEASE_S)
    address = await streams.accept(4.0)
    model(streams).let(2)
    await came(streams, address, 2)
    await streams.kill()

    await streams.worker("w2", lease_s=LEASE_S)
    model(streams, "w2").let(5)
    record = await streams.ended(address)

    assert (record.state, record.attempts, record.responses) == (RequestState.SUCCEEDED, 2, 4)
    assert await values(streams, address) == [0.0, 1.0, 2.0, 3.0]
    assert model(streams, "w2").sent == 4
    await streams.queued(0)


async def test_responses_beyond_the_bound_fail_the_request(streams: InlineWorkers) -> None:
    streams.limits = streams.limits.model_copy(update={"stream_result_bytes": 300})
    await streams.model(more=DECOUPLED)
    await streams.worker()
    address = await streams.accept(ENDLESS)
    model(streams).let(1)
    await came(streams, address, 1)

    model(streams).let(100)
    record = await streams.ended(address)

    assert (record.state, record.code) == (RequestState.FAILED, "payload_too_large")
    assert "more than 300 bytes" in record.message
    assert 0 < record.responses < 5
    await streams.queued(0)


async def test_a_cancelled_request_stores_nothing_more(streams: InlineWorkers) -> None:
    """Its model is told."""
    await streams.model(more=DECOUPLED)
    await streams.worker()
    address = await streams.accept(ENDLESS)
    model(streams).let(2)
    await came(streams, address, 2)

    cancelled = RequestOutcome(state=RequestState.CANCELLED, blob=b"", code="cancelled")
    assert await streams.delivery.requests.settle([Settlement(address=address, outcome=cancelled)]) == [True]

    def is_told() -> bool:
        model(streams).let(1)
        return bool(model(streams).errors)

    await eventually(is_told, description="the model is told")
    assert await values(streams, address) == [0.0, 1.0]
    await streams.queued(0)
