"""Decoupled models in a worker, on a real Redis: responses that leave one by one, windows, marks, cancellation."""

import asyncio

import pytest

from qinfer.core.messages import Credit, Failure, Response
from qinfer.queue.entries import RequestOutcome, RequestState, Settlement, reply_address
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_credits, encode_request, encode_responses
from tests.support.inline_workers import InlineWorkers, value
from tests.support.streaming_backend import DECOUPLED, ENDLESS, RESUMES, StreamingBackend


@pytest.fixture
def streams(scene: InlineWorkers) -> InlineWorkers:
    scene.backend = StreamingBackend
    return scene


def model(scene: InlineWorkers, worker_id: str = "w1") -> StreamingBackend:
    """Returns the only instance of a worker."""
    (backend,) = scene.backends[worker_id]
    assert isinstance(backend, StreamingBackend)
    return backend


async def open_stream(scene: InlineWorkers, count: float) -> tuple[str, "asyncio.Future[Response]"]:
    """Submits a request; returns its id and its final response to come."""
    request = scene.request(count)
    return request.id, scene.submit_frame(request.id, encode_request(request))


async def came(scene: InlineWorkers, request_id: str, count: int) -> list[Response]:
    """Waits for so many responses."""
    await eventually(lambda: len(scene.responses.get(request_id, ())) >= count, description=f"{count} responses")
    return scene.responses[request_id]


async def took(scene: InlineWorkers, response: Response, taken_bytes: int) -> None:
    """Gives credit for what was taken of a stream."""
    credit = Credit(response.request_id, response.attempt, taken_bytes)
    assert await scene.delivery.publish(response.credit_to, encode_credits([credit]))


async def told(scene: InlineWorkers, worker_id: str = "w1") -> None:
    """Waits until sending raises, and lets the model send until then."""

    def is_told() -> bool:
        model(scene, worker_id).let(1)
        return bool(model(scene, worker_id).errors)

    await eventually(is_told, description="the model is told")


async def test_responses_leave_one_by_one(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    name, final = await open_stream(streams, 3)

    for count in (1, 2, 3):
        model(streams).let(1)
        await came(streams, name, count)
        assert not final.done()
        await streams.queued(1)
    model(streams).let(1)
    await final

    responses = streams.responses[name]
    assert [(r.index, r.final, r.attempt) for r in responses] == [
        (0, False, 1),
        (1, False, 1),
        (2, False, 1),
        (3, True, 1),
    ]
    assert [value(r) for r in responses[:3]] == [0.0, 1.0, 2.0]
    assert responses[3].outputs == ()
    assert [r.credit_to for r in responses] == ["reply:worker-w1"] * 3 + [""]
    await streams.queued(0)


async def test_an_open_stream_holds_no_instance(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    first, first_end = await open_stream(streams, 1)
    await streams.started()

    second, second_end = await open_stream(streams, 1)
    await streams.started()
    model(streams).let(4)
    await asyncio.gather(first_end, second_end)

    for name in (first, second):
        assert [r.index for r in streams.responses[name]] == [0, 1]


async def test_a_model_waits_while_the_window_is_used_up(streams: InlineWorkers) -> None:
    streams.limits = streams.limits.model_copy(update={"stream_window_bytes": 2 * (8 + 256)})
    await streams.model(more=DECOUPLED)
    await streams.worker()
    name, final = await open_stream(streams, 6)
    model(streams).let(7)

    first = (await came(streams, name, 2))[0]
    assert not first.final
    await asyncio.sleep(0.1)  # nothing tells that nothing comes
    assert len(streams.responses[name]) == 2
    await took(streams, first, 8)
    await came(streams, name, 3)
    await asyncio.sleep(0.1)  # as above
    assert len(streams.responses[name]) == 3
    for taken in (2, 3, 4, 5, 6):
        await came(streams, name, min(taken + 1, 6))  # the worker ignores credit for responses that it has not sent
        await took(streams, first, 8 * taken)
    await final

    assert [(r.index, r.failure) for r in streams.responses[name]] == [(index, None) for index in range(7)]


async def test_a_caller_that_takes_nothing_is_cancelled(streams: InlineWorkers) -> None:
    streams.limits = streams.limits.model_copy(update={"stream_window_bytes": 1, "stream_stall_s": 0.2})
    await streams.model(more=DECOUPLED)
    await streams.worker()
    _, final = await open_stream(streams, ENDLESS)
    model(streams).let(2)

    failure = (await final).failure

    assert failure is not None
    assert failure.code == "cancelled"
    assert "took no response for 0.2 s" in failure.message
    await streams.queued(0)
    await eventually(lambda: len(model(streams).errors) == 1, description="the model is told")


async def test_an_error_after_the_first_response_ends_the_stream(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    model(streams).raises = True
    name, final = await open_stream(streams, 1)

    last = await final

    assert last.failure is not None
    assert (last.failure.code, last.index) == ("inference_failed", 1)
    assert len(streams.responses[name]) == 2
    await streams.queued(0)


async def test_what_has_sent_a_part_is_not_executed_again(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=0.5)
    name, final = await open_stream(streams, 5)
    model(streams).let(2)
    await came(streams, name, 2)
    await streams.kill()

    await streams.worker("w2", lease_s=0.5)
    last = await final

    assert last.failure is not None
    assert (last.failure.code, last.failure.retryable, last.attempt, last.index) == ("stream_broken", True, 2, 0)
    assert model(streams, "w2").sizes == []
    await streams.queued(0)


async def test_what_has_sent_nothing_is_executed_again(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=0.5)
    name, final = await open_stream(streams, 1)
    await streams.started()
    await streams.kill()

    await streams.worker("w2", lease_s=0.5)
    model(streams, "w2").let(2)
    await final

    assert [(r.attempt, r.index) for r in streams.responses[name]] == [(2, 0), (2, 1)]


async def test_a_model_that_resumes_is_executed_again(streams: InlineWorkers) -> None:
    await streams.model(more=RESUMES)
    await streams.worker(lease_s=0.5)
    name, final = await open_stream(streams, 3)
    model(streams).let(2)
    await came(streams, name, 2)
    await streams.kill()

    await streams.worker("w2", lease_s=0.5)
    model(streams, "w2").let(4)
    await final

    numbers = [(r.attempt, r.index) for r in streams.responses[name]]
    assert numbers == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]


async def test_a_cancelled_request_ends_at_once(streams: InlineWorkers) -> None:
    """The model is told within half a second, long before its lease is renewed again."""
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=60.0)
    name, final = await open_stream(streams, ENDLESS)
    model(streams).let(1)
    await came(streams, name, 1)

    await streams.delivery.cancel(streams.entries)

    await told(streams)
    assert model(streams).errors[0].code == "cancelled"
    assert not final.done()
    await streams.queued(0)


async def test_streams_to_a_process_that_is_gone_are_cancelled(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    request = streams.request(ENDLESS)
    request.reply_to = reply_address("gone")
    streams.submit_frame(request.id, encode_request(request))

    await told(streams)

    await streams.queued(0)


async def test_a_drain_waits_for_open_streams(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    name, final = await open_stream(streams, 1)
    model(streams).let(1)
    await came(streams, name, 1)

    stopping = asyncio.create_task(streams.stop())
    await asyncio.sleep(0.1)  # nothing tells that nothing happens
    assert not stopping.done()
    model(streams).let(1)
    await stopping

    assert (await final).index == 1
    await streams.queued(0)


async def test_what_a_dead_worker_held_runs_beside_open_streams(streams: InlineWorkers) -> None:
    """Streams may take minutes: nothing waits for them but a drain."""
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=0.5)
    lost, final = await open_stream(streams, 0)
    await streams.started()
    await streams.kill()
    await streams.worker("w2", lease_s=0.5)
    beside, _ = await open_stream(streams, ENDLESS)
    await streams.started("w2", 2)

    async def is_answered() -> bool:
        model(streams, "w2").let(1)
        return final.done()

    await eventually(is_answered, description="the request of the dead worker")

    assert [(r.attempt, r.final) for r in streams.responses[lost]] == [(2, True)]
    await streams.delivery.cancel(streams.entries)
    await told(streams, "w2")
    assert not any(response.final for response in streams.responses[beside])


async def test_a_model_is_unloaded_once_its_streams_have_ended(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    name, final = await open_stream(streams, 1)
    model(streams).let(1)
    await came(streams, name, 1)
    old = model(streams)

    await streams.model(more=DECOUPLED, mode="add")
    await streams.ready()
    assert old.loaded
    old.let(1)
    assert (await final).index == 1

    await eventually(lambda: not old.loaded, description="the old instance is unloaded")


async def test_responses_of_an_asynchronous_request_are_stored(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker()
    address = await streams.accept(3.0)
    model(streams).let(4)

    record = await streams.ended(address)

    blobs = await streams.delivery.requests.responses.read(address, 0)
    assert [value(response) for blob in blobs for response in decode_responses(blob)] == [0.0, 1.0, 2.0]
    assert record.state == "succeeded"
    await streams.queued(0)


async def test_a_cancelled_asynchronous_request_ends_its_stream(streams: InlineWorkers) -> None:
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=60.0)
    address = await streams.accept(ENDLESS)
    await streams.started()

    blob = encode_responses([Response(request_id=address.id, failure=Failure("cancelled", "test"))])
    outcome = RequestOutcome(state=RequestState.CANCELLED, blob=blob, code="cancelled", message="test")
    assert await streams.delivery.requests.settle([Settlement(address=address, outcome=outcome)]) == [True]

    await told(streams)


async def test_an_asynchronous_request_stores_no_more_than_it_may(streams: InlineWorkers) -> None:
    streams.limits = streams.limits.model_copy(update={"stream_result_bytes": 1000})
    await streams.model(more=DECOUPLED)
    await streams.worker()
    address = await streams.accept(ENDLESS)

    await told(streams)

    record = await streams.ended(address)
    assert (record.state, record.code) == ("failed", "payload_too_large")


async def test_a_stream_whose_lease_is_lost_ends_without_a_word(streams: InlineWorkers) -> None:
    """Another worker answers; the model is told that nobody waits."""
    await streams.model(more=DECOUPLED)
    await streams.worker(lease_s=1.0, renew_every_s=0.1)
    name, final = await open_stream(streams, ENDLESS)
    model(streams).let(1)
    await came(streams, name, 1)

    await streams.delivery.finish(streams.entries)
    await told(streams)

    assert model(streams).errors[0].code == "cancelled"
    assert not final.done()
