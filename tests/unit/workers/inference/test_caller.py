"""Calls to other models: what reaches the queue, what the waiting thread gets, and what is left behind."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from qinfer.backends.base import AnsweredNotFound
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, InferRequest, OutgoingRequest, Response, outgoing_call
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    AlreadyExists,
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    PayloadTooLarge,
    QinferError,
    UnknownFailure,
    UnsupportedFeature,
)
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Entry, Lane, Payload
from qinfer.queue.lanes import Queue
from qinfer.submission.memory import PAYLOAD_MARGIN_S
from qinfer.tensors import Bytes, from_numpy
from qinfer.testing import FakeClock, eventually
from qinfer.wire.frame import decode_request, encode_request, encode_responses
from qinfer_workers.inference.calls.caller import FRESH_S, RECHECK_S, WorkerCaller
from tests.support.servers.servers import Database

LANE = Lane("back", 1)
CONFIG = """
backend: "stub" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""

LEVELS = """
backend: "stub" max_batch_size: 1 input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
dynamic_batching { priority_levels: 3 default_priority_level: 2 default_queue_policy { max_queue_size: 1 } }
"""

Answer = Callable[[InferRequest], Sequence[Response]]


def echo(request: InferRequest) -> Sequence[Response]:
    outputs = tuple(msgspec.structs.replace(tensor, name="y") for tensor in request.inputs)
    return [Response(request_id=request.id, model=request.model, version=request.version, outputs=outputs)]


class Store(ControlStore):
    """Counts how often the models are read, and may be away."""

    reads = 0
    away = False

    async def desired(self) -> dict[str, DesiredState]:
        self.reads += 1
        if self.away:
            raise BrokerUnavailable("the store is away")
        return await super().desired()


class Refusing(Queue):
    """A queue that learns afterwards that it could not take an entry."""

    def submit(
        self,
        lane: Lane,
        frame: Bytes,
        done: Callable[[Entry | QinferError], None],
        *,
        payload: Payload | None = None,
        limit: int = 0,
        tenant: str = "",
        endpoint: str = "",
    ) -> None:
        asyncio.get_running_loop().call_soon(done, BrokerUnavailable("the connection broke"))


class Scene:
    """A caller, and a worker that answers as it is told."""

    def __init__(self, tasks: asyncio.TaskGroup, delivery: Queue, store: Store, limits: LimitSettings | None) -> None:
        self.clock = FakeClock()
        self.delivery, self.store = delivery, store
        delivery.clock = ServerClock(self.clock)
        self.called: list[Lane] = []
        limits = limits or LimitSettings(wait_for_workers_s=0)
        catalog = Catalog(self.store, limits.model_copy(update={"max_timeout_s": 1000.0}))
        self.caller = WorkerCaller(delivery, catalog, "w1", tasks, limits, self.called.append)
        self.publish_responses: Answer = echo
        self.requests: list[InferRequest] = []

    async def model(self, name: str = "back", state: State = State.READY, config: str = CONFIG) -> None:
        """Makes a model known, as one live worker has it."""
        config = to_json(normalise(parse(f'name: "{name}" {config}'), name))
        await self.store.put_model(StoredModel(name, 7, config, (1,)))
        await self.store.set_desired(DesiredState(name, 7))
        models = {name: {1: VersionState(state, 7)}}
        await self.store.heartbeat(WorkerRecord(id=name, started_at=0.0, models=models), ttl_s=3600)

    async def work(self) -> None:
        """Answers what comes, until cancelled."""
        while True:
            for lease in await self.delivery.fetch([LANE], "w2", 8, 3600.0):
                request = decode_request(lease.frame)
                self.requests.append(request)
                await self.delivery.publish(request.reply_to, encode_responses(self.publish_responses(request)))
                await self.delivery.finish([lease.entry])

    async def call(self, request: OutgoingRequest | None = None, timeout_s: float = 30.0) -> Response:
        """Calls from a thread."""
        deadline_s = self.delivery.clock.now_s() + timeout_s
        return await asyncio.to_thread(self.caller.call, request or asked(), deadline_s)

    async def is_empty(self) -> bool:
        return await self.delivery.depth([LANE]) == [0]

    async def end(self) -> None:
        """Ends the caller as a worker does."""
        tasks = self.caller.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.caller.discard()


def asked(**fields: object) -> OutgoingRequest:
    inputs = (from_numpy("x", np.ones((1, 2), "<f4")),)
    return msgspec.structs.replace(OutgoingRequest(model="back", inputs=inputs), **fields)


@asynccontextmanager
async def scene(
    kind: type[Queue] = Queue, *, works: bool = True, limits: LimitSettings | None = None
) -> AsyncIterator[Scene]:
    async with Database() as database, asyncio.TaskGroup() as tasks:
        one = Scene(tasks, await database.delivery(kind), database.store(Store), limits)
        await one.model()
        worker = tasks.create_task(one.work()) if works else None
        yield one
        await one.end()
        if worker is not None:
            worker.cancel()


async def test_the_answer_comes_back() -> None:
    """With its outputs, and from the highest ready version where none was named."""
    async with scene() as one:
        response = await one.call()

        assert response.version == 1
        assert [tensor.name for tensor in response.outputs] == ["y"]
        await eventually(one.is_empty)


async def test_the_request_is_stamped_anew() -> None:
    """Whatever stamps it came with; the caller's own object stays as it was."""
    request = InferRequest(
        model="back",
        inputs=asked().inputs,
        id="mine",
        client_id="c",
        reply_to="reply:gateway",
        generation=3,
        attempt=2,
        tenant="t",
        trace="r",
    )
    async with scene() as one:
        await one.call(outgoing_call(request, ()), timeout_s=30.0)

        (sent,) = one.requests
    assert sent.id.endswith(".0.back")
    assert (sent.version, sent.generation, sent.attempt) == (1, 7, 0)
    assert sent.reply_to == "reply:worker-w1"
    assert sent.timeout_s == pytest.approx(30.0)
    assert (sent.tenant, sent.trace) == ("t", "r")
    assert (request.id, request.version, request.timeout_s) == ("mine", 0, 0.0)


@pytest.mark.parametrize(("own_s", "left_s", "expected_s"), [(5.0, 30.0, 5.0), (60.0, 30.0, 30.0), (0.0, 1e6, 1000.0)])
async def test_the_shortest_timeout_counts(own_s: float, left_s: float, expected_s: float) -> None:
    """The request's own, what is left to its caller, or the longest that the model allows."""
    async with scene() as one:
        await one.call(asked(timeout_s=own_s), timeout_s=left_s)

        assert one.requests[0].timeout_s == pytest.approx(expected_s)


async def test_many_threads_call_at_once() -> None:
    """Each gets its own answer."""
    async with scene() as one:
        requests = [asked(inputs=(from_numpy("x", np.full((1, 2), i, "<f4")),)) for i in range(50)]
        answers = await asyncio.gather(*[one.call(request) for request in requests])

        assert len({request.id for request in one.requests}) == 50
    assert [a.outputs[0].data for a in answers] == [r.inputs[0].data for r in requests]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "nobody"}, ModelNotFound("Request for unknown model: 'nobody' is not found")),
        ({"version": 9}, ModelNotFound("Request for unknown model: 'back' version 9 is not found")),
        ({"outputs": ("z",)}, InvalidRequest("unexpected inference output 'z' for model 'back'")),
    ],
)
async def test_what_is_refused_never_reaches_the_queue(fields: dict[str, object], expected: QinferError) -> None:
    """The model is unknown, or the request does not fit it."""
    async with scene() as one:
        with pytest.raises(type(expected)) as raised:
            await one.call(asked(**fields))

        assert raised.value.message == expected.message
        assert one.called == []
        assert one.requests == []


async def test_what_is_late_never_reaches_the_queue() -> None:
    """There is no time left for an answer."""
    async with scene() as one:
        with pytest.raises(DeadlineExceeded):
            await one.call(timeout_s=0.0)

        assert one.called == []


async def test_a_model_that_is_loading_is_not_ready() -> None:
    """A refusal that may pass."""
    async with scene() as one:
        await one.model("slow", State.LOADING)

        with pytest.raises(ModelNotReady):
            await one.call(asked(model="slow", version=1))


async def test_a_call_waits_for_a_worker() -> None:
    """As a client's request does; it is the worker's own view that tells that none has the model."""
    async with scene(works=False, limits=LimitSettings(wait_for_workers_s=30)) as one, asyncio.TaskGroup() as tasks:
        await one.model(state=State.LOADING)
        call = tasks.create_task(one.call())
        await eventually(lambda: one.called == [LANE], description="a call in the queue")
        worker = tasks.create_task(one.work())

        assert (await call).outputs
        worker.cancel()


async def test_a_call_fails_when_no_worker_comes() -> None:
    async with scene(works=False, limits=LimitSettings(wait_for_workers_s=0.05)) as one:
        await one.model(state=State.LOADING)

        with pytest.raises(ModelNotReady, match=r"no worker took the request for 'back' version 1 within 0\.05 s"):
            await one.call()

        await eventually(one.is_empty)


async def test_an_old_view_makes_no_call_wait() -> None:
    """Another look is taken first: the worker that is waited for may be there, or may have failed."""
    async with scene(limits=LimitSettings(wait_for_workers_s=30)) as one:
        await one.call()
        await one.model("late", State.LOADING)
        one.clock.advance(FRESH_S + 0.1)
        await one.call()
        await one.model("late", State.UNAVAILABLE)
        one.clock.advance(RECHECK_S + 0.1)

        with pytest.raises(ModelNotReady, match="'late' has no available versions"):
            await one.call(asked(model="late"))


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure("inference_failed", "boom"), InferenceFailed("model 'back' failed: boom")),
        (Failure("deadline_exceeded", "Request timeout expired"), DeadlineExceeded("Request timeout expired")),
        (Failure("invalid_request", "it changed"), InvalidRequest("it changed")),
        (Failure("model_not_found", "no such row"), AnsweredNotFound("no such row")),
        (Failure("already_exists", "twice"), AlreadyExists("twice")),
        (Failure("unsupported_feature", "not by me"), UnsupportedFeature("not by me")),
        (Failure("unknown", "odd"), UnknownFailure("odd")),
        (Failure("of a newer qinfer", "boom"), InferenceFailed("model 'back' failed: boom")),
    ],
)
async def test_a_failed_answer_is_raised(failure: Failure, expected: QinferError) -> None:
    """As what the called model's worker said, or as the model's failure."""
    async with scene() as one:
        one.publish_responses = lambda request: [Response(request_id=request.id, failure=failure)]

        with pytest.raises(type(expected)) as raised:
            await one.call()

        assert raised.value.message == expected.message


async def test_several_responses_are_a_failure() -> None:
    """Rather than one of them."""
    async with scene() as one:
        one.publish_responses = lambda request: [
            Response(request_id=request.id, final=False),
            Response(request_id=request.id, index=1),
        ]

        with pytest.raises(InferenceFailed, match="several responses"):
            await one.call()


async def test_one_attempt_is_followed() -> None:
    """Responses to others, of another attempt, and those that come twice are dropped."""

    def several(request: InferRequest) -> Sequence[Response]:
        answer = echo(request)[0]
        return [Response(request_id="unknown"), answer, answer, Response(request_id=request.id, attempt=2)]

    async with scene() as one:
        one.publish_responses = several

        first, second = await one.call(), await one.call()

        assert [(r.attempt, len(r.outputs)) for r in (first, second)] == [(1, 1), (1, 1)]


async def test_large_inputs_travel_beside_the_stream() -> None:
    """As a gateway's do."""
    async with scene(limits=LimitSettings(inline_max_bytes=7)) as one:  # there are 8
        submit, apart = one.delivery.submit, []

        def spied(lane: Lane, frame: Bytes, done: Any, *, payload: Payload | None = None, **_: object) -> None:
            assert len(frame) < 1000
            assert payload is not None
            apart.append((payload.request_id, decode_request(frame, payload.data).inputs, payload.ttl_s))
            submit(lane, encode_request(decode_request(frame, payload.data)), done)

        one.delivery.submit = spied  # type: ignore[method-assign]
        response = await one.call(timeout_s=30.0)

        ((request_id, inputs, ttl_s),) = apart
        assert (request_id, inputs[0].data) == (response.request_id, asked().inputs[0].data)
        assert ttl_s == pytest.approx(30.0 + PAYLOAD_MARGIN_S)


async def test_large_outputs_are_read_again_while_they_can_not_be_read() -> None:
    """Until the deadline: the answer was computed."""
    async with scene() as one:
        reads = 0

        async def take_result(lane: Lane, request_id: str, tenant: str = "", room: object = None) -> bytes | None:
            nonlocal reads
            reads += 1
            if reads == 1:
                raise BrokerUnavailable("the payload store can't be reached")
            return encode_responses(echo(one.requests[-1]))

        one.delivery.take_result = take_result  # type: ignore[method-assign]
        one.publish_responses = lambda request: [Response(request_id=request.id, stored=True)]

        assert (await one.call()).outputs
        assert reads == 2


@pytest.mark.parametrize("there", [(LANE,), ()])
async def test_large_outputs_are_read_from_where_they_are_stored(there: tuple[Lane, ...]) -> None:
    """They do not travel on the reply stream; without them there is no answer."""
    async with scene() as one:

        async def take_result(lane: Lane, request_id: str, tenant: str = "", room: object = None) -> bytes | None:
            return encode_responses(echo(one.requests[-1])) if lane in there else None

        one.delivery.take_result = take_result  # type: ignore[method-assign]
        one.publish_responses = lambda request: [Response(request_id=request.id, stored=True)]

        if there:
            assert (await one.call()).outputs
        else:
            with pytest.raises(InferenceFailed, match="the outputs were stored and are gone"):
                await one.call()


async def test_a_reply_that_can_not_be_decoded_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The next one is read."""
    async with scene() as one:
        await one.call()
        await one.delivery.publish("reply:worker-w1", b"\x01 no blob")

        assert (await one.call()).outputs
        assert "it can't be decoded" in caplog.text


async def test_what_nobody_answers_leaves_the_queue() -> None:
    """The thread learns that the deadline passed."""
    async with scene(works=False) as one:
        with pytest.raises(DeadlineExceeded):
            await one.call(timeout_s=0.05)
        await eventually(one.is_empty)
        assert one.called == [LANE]
        assert not one.caller.is_target("back", 1)


async def test_what_the_broker_refuses_is_raised() -> None:
    """The queue could not take the request."""
    async with scene(Refusing, works=False) as one:
        with pytest.raises(BrokerUnavailable, match="the connection broke"):
            await one.call()


async def test_a_worker_that_ends_frees_its_threads() -> None:
    """Whoever waits is told, its request leaves the queue, and further calls are refused."""
    async with scene(works=False) as one:
        waiting = asyncio.create_task(one.call())

        async def is_queued() -> bool:
            return await one.delivery.depth([LANE]) == [1]

        await eventually(is_queued)
        assert one.caller.is_target("back", 1)

        await one.end()

        with pytest.raises(Cancelled):
            await waiting
        assert await one.delivery.depth([LANE]) == [0]
        with pytest.raises(Cancelled):
            await one.call()


async def test_a_thread_that_outlives_the_loop_is_freed() -> None:
    """A worker whose event loop is gone takes no calls."""
    kept: list[WorkerCaller] = []

    async def lived() -> None:
        async with scene() as one:
            await one.call()
            kept.append(one.caller)

    thread = threading.Thread(target=asyncio.run, args=(lived(),))
    thread.start()
    await asyncio.to_thread(thread.join)

    with pytest.raises(Cancelled):
        kept[0].call(asked(), float("inf"))


async def test_the_event_loop_itself_can_not_call() -> None:
    """It would wait for itself."""
    async with scene() as one:
        with pytest.raises(InferenceFailed, match="event loop"):
            one.caller.call(asked(), float("inf"))


async def test_the_models_are_read_now_and_then() -> None:
    """Once for many calls, and again when the view is old."""
    async with scene() as one:
        for _ in range(5):
            await one.call()
        assert one.store.reads == 1

        one.clock.advance(FRESH_S + 0.1)
        await one.call()

        assert one.store.reads == 2


async def test_a_model_that_was_loaded_since_is_found() -> None:
    """A refusal is checked again, though not at each call."""
    async with scene() as one:
        for _ in range(3):
            with pytest.raises(ModelNotFound):
                await one.call(asked(model="new"))
        assert one.store.reads == 1
        await one.model("new", State.LOADING)
        one.clock.advance(RECHECK_S + 0.1)

        with pytest.raises(ModelNotReady):
            await one.call(asked(model="new", version=1))

        assert one.store.reads == 2


async def test_the_last_view_serves_while_the_store_is_away() -> None:
    """Without any view a call is refused."""
    async with scene() as one:
        one.store.away = True
        with pytest.raises(BrokerUnavailable):
            await one.call()
        one.store.away = False
        await one.call()
        one.store.away = True
        one.clock.advance(FRESH_S + 0.1)

        assert (await one.call()).outputs


async def test_a_call_waits_in_the_lane_of_its_priority_and_no_more_wait_than_may() -> None:
    """As a client's request does: each level has a lane, and each lane a place for one here."""
    async with scene(works=False) as one:
        await one.model("levels", config=LEVELS)
        lanes = [Lane("levels", 1, f"p{level}") for level in (1, 2, 3)]
        calls = [asyncio.create_task(one.call(asked(model="levels", priority=level))) for level in (1, 1, 1, 3)]

        async def are_told() -> bool:
            return sum(call.done() for call in calls) == 2

        await eventually(are_told)
        depths = await one.delivery.depth(lanes)
        await one.end()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)

        assert depths == [1, 0, 1]
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [*2 * ["Cancelled"], *2 * ["QueueFull"]]


async def test_a_head_that_is_too_large_is_refused() -> None:
    """A lane is bounded by its number of entries: what is large is a tensor."""
    async with scene() as one:
        with pytest.raises(PayloadTooLarge, match="send what is large as a tensor"):
            await one.call(asked(parameters={"text": "x" * 2_000_000}))

        assert one.requests == []
