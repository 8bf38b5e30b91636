"""Answers of a model with `preserve_ordering`, between a catalog, a queue and sinks, without HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, cast

import pytest

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.core.settings_sections import CachePlan
from qinfer.errors import BrokerUnavailable, InvalidRequest, QinferError, QueueFull
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import ModelSpec, Routes, TensorSpec
from qinfer.observe.stats import GatewayTally, ModelCounts
from qinfer.queue.entries import Entry, Lane
from qinfer.queue.lanes import Queue
from qinfer.submission.pending import Inner, PendingCall
from qinfer.submission.response_cache import Flight, ResponseCache
from qinfer.tensors import Bytes, Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import encode_responses
from qinfer_api.auth import ANONYMOUS
from qinfer_api.dispatcher import Dispatcher


def tensor(name: str, value: int = 0) -> Tensor:
    return Tensor(name, "UINT8", (1,), bytes([value]))


class Models:
    """A catalog of models `x` → `y`: `ordered` and `plain`, both of versions 1 and 2."""

    def asked(self, model: str, version: int) -> ServedVersion:
        spec = ModelSpec(
            name=model,
            backend="stub",
            inputs=(TensorSpec(name="x", datatype="UINT8", dims=(1,)),),
            outputs=(TensorSpec(name="y", datatype="UINT8", dims=(1,)),),
            preserves_order=model == "ordered",
            is_cached=True,
        )
        lane = Lane(model, version)
        return ServedVersion(spec=spec, version=version, generation=1, lane=lane, routes=Routes(spec, version))

    def lanes(self, model: str, version: int) -> tuple[Lane, ...]:
        return (Lane(model, version),)

    def capacity(self, model: str, version: int) -> Capacity:
        return Capacity()


class StubQueue:
    """A queue that keeps what it gets."""

    router = None

    def __init__(self) -> None:
        self.receipts: list[Callable[[Entry | QinferError], None]] = []
        self.outputs: dict[str, bytes] = {}

    def submit(self, lane: Lane, frame: Bytes, done: Callable[[Entry | QinferError], None], **_: Any) -> None:
        self.receipts.append(done)

    async def take_result(self, lane: Lane, request_id: str, tenant: str, room: Any) -> bytes:
        blob = self.outputs.pop(request_id)
        await room(len(blob))
        return blob

    async def drop_result(self, lane: Lane, request_id: str) -> None:
        self.outputs.pop(request_id, None)

    async def cancel(self, entries: Sequence[Entry]) -> None:
        """Does nothing."""


class Sink:
    no_stream = ""

    def __init__(self, name: str, answered: list[str]) -> None:
        self.name, self.answered = name, answered
        self.responses: list[Response] = []

    def deliver(self, response: Response) -> None:
        self.responses.append(response)
        self.answered.append(self.name)


class Broken(Sink):
    """A sink with a defect, which takes only failures."""

    def deliver(self, response: Response) -> None:
        if response.failure is None:
            raise RuntimeError("a defect")
        super().deliver(response)


class Setup:
    """A gateway's dispatcher.

    Attributes:
        answered: The names of the requests whose callers were answered, in order.
    """

    def __init__(self, **limits: Any) -> None:
        self.queue, self.tally = StubQueue(), GatewayTally()
        self.answered: list[str] = []
        self.sinks: dict[str, Sink] = {}
        self.dispatcher = Dispatcher(
            cast(Queue, self.queue), cast(Catalog, Models()), self.tally, LimitSettings(**limits), "me"
        )
        self.table = self.dispatcher.submission.pending

    def submit(
        self, name: str, model: str = "ordered", version: int = 1, *, kind: type[Sink] = Sink, **fields: Any
    ) -> PendingCall:
        sink = self.sinks[name] = kind(name, self.answered)
        asked_s = fields.pop("asked_s", None)
        request = OutgoingRequest(model=model, version=version, **{"inputs": (tensor("x"),), **fields})
        return self.dispatcher.submit(ANONYMOUS, request, sink, asked_s=asked_s)

    def respond(self, *requests: PendingCall, **fields: Any) -> None:
        for pending in requests:
            response = Response(request_id=pending.request_id, version=1, outputs=(tensor("y"),), **fields)
            self.table.receive(encode_responses([response]))


async def test_answers_leave_in_the_order_of_the_requests() -> None:
    """In whichever order they come: each one waits for those before it."""
    setup = Setup()
    a, b, c = (setup.submit(name) for name in "abc")

    setup.respond(c, b)
    assert setup.answered == []
    setup.respond(a)

    assert setup.answered == ["a", "b", "c"]
    assert [len(sink.responses) for sink in setup.sinks.values()] == [1, 1, 1]


async def test_other_models_and_versions_do_not_wait() -> None:
    setup = Setup()
    setup.submit("first")
    plain, other = setup.submit("plain", "plain"), setup.submit("other", version=2)

    setup.respond(other, plain)

    assert setup.answered == ["other", "plain"]


async def test_models_without_the_setting_keep_their_own_sinks() -> None:
    """Their requests pass nothing that orders."""
    setup = Setup()

    pending = setup.submit("plain", "plain")

    assert pending.sink is setup.sinks["plain"]


async def test_failures_have_their_turn() -> None:
    """Of a request that did not reach the queue, and of one that expired."""
    setup = Setup()
    a, b = setup.submit("a"), setup.submit("b", asked_s=0.001)
    c = setup.submit("c")
    setup.queue.receipts[2](BrokerUnavailable("away"))
    await eventually(lambda: b not in setup.table, description="the deadline")

    assert (c in setup.table, setup.answered) == (False, [])
    setup.respond(a)

    assert setup.answered == ["a", "b", "c"]
    failures = [setup.sinks[name].responses[0].failure for name in "bc"]
    assert [failure and failure.code for failure in failures] == ["deadline_exceeded", "broker_unavailable"]


async def test_a_cancelled_request_holds_no_other() -> None:
    """Wherever its place is; no worker counts it."""
    setup = Setup()
    a, b, c, d = (setup.submit(name) for name in "abcd")
    setup.respond(d)

    setup.dispatcher.cancel(b)
    setup.dispatcher.cancel(a)
    assert setup.answered == []
    setup.respond(c)

    assert setup.answered == ["c", "d"]
    assert setup.tally.refusals.drain()["ordered", 1]["refusals:cancelled"] == 2


async def test_an_answer_whose_caller_left_before_its_turn_is_dropped() -> None:
    """Its worker has counted it; no other does."""
    setup = Setup()
    a, b = setup.submit("a"), setup.submit("b")
    setup.respond(b)

    setup.dispatcher.cancel(b)
    setup.dispatcher.cancel(b)
    setup.respond(a)
    setup.dispatcher.cancel(a)

    assert setup.answered == ["a"]
    assert setup.tally.refusals.drain() == {}


async def test_a_refused_request_has_no_place() -> None:
    setup = Setup()
    a = setup.submit("a")

    with pytest.raises(InvalidRequest):
        setup.submit("refused", inputs=(tensor("unknown"),))
    b = setup.submit("b")
    setup.respond(b, a)

    assert setup.answered == ["a", "b"]


async def test_answers_that_wait_are_bounded() -> None:
    """As requests without an answer are; those of other models have room."""
    setup = Setup(max_in_flight=2)
    setup.submit("a")
    setup.respond(setup.submit("b"))

    with pytest.raises(QueueFull):
        setup.submit("c")
    setup.submit("plain", "plain")


async def test_a_sink_that_raises_harms_no_other() -> None:
    """It is told of an internal error in its turn."""
    setup = Setup()
    a, b, c = setup.submit("a"), setup.submit("b", kind=Broken), setup.submit("c")

    setup.respond(c, b, a)

    assert setup.answered == ["a", "b", "c"]
    (response,) = setup.sinks["b"].responses
    assert response.failure is not None
    assert response.failure.code == "internal"


async def test_a_lost_reply_stream_fails_all_in_their_order() -> None:
    setup = Setup()
    pending = [setup.submit(name) for name in "abcd"]
    setup.respond(pending[2])

    setup.table.lose_all()

    assert setup.answered == ["a", "b", "c", "d"]
    assert [setup.sinks[name].responses[0].failure is None for name in "abcd"] == [False, False, True, False]


def flight_of(caller: PendingCall) -> PendingCall:
    """Returns the execution that a request waits for."""
    assert isinstance(caller.shared, Flight)
    assert caller.shared.pending is not None
    return caller.shared.pending


async def test_a_cached_answer_waits_for_its_turn() -> None:
    """It is there while its request is submitted."""
    setup = Setup()
    cache = ResponseCache(CachePlan(kind="local", size_bytes=10_000), cast(Queue, setup.queue), ModelCounts(), 100)
    setup.dispatcher.submission.set_cache(cache)
    first = setup.submit("first")
    setup.respond(flight_of(first))
    a = setup.submit("a", inputs=(tensor("x", 1),))

    setup.submit("b")
    assert setup.answered == ["first"]
    setup.respond(flight_of(a))

    assert setup.answered == ["first", "a", "b"]
    assert setup.sinks["b"].responses[0].cache == "hit"


class Lent:
    """Memory of an answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def lend(self, pending: PendingCall, nbytes: int) -> Self:
        self.asked.append(pending.request_id)
        return self

    def become(self, size: int) -> None:
        """Does nothing."""

    def watch(self, arrived: object, late: object) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""


@pytest.fixture
async def cleaning() -> AsyncIterator[Setup]:
    setup = Setup()
    running = asyncio.create_task(setup.table.run())
    yield setup
    running.cancel()
    await asyncio.wait([running])


async def test_large_outputs_ask_for_memory_in_their_turn(cleaning: Setup) -> None:
    """Those before them may need it."""
    setup, lent = cleaning, Lent()
    setup.table.lend = lent.lend
    a, b = setup.submit("a"), setup.submit("b")
    response = Response(request_id=b.request_id, version=1, outputs=(tensor("y"),))
    setup.queue.outputs[b.request_id] = encode_responses([response])
    setup.table.receive(encode_responses([Response(request_id=b.request_id, version=1, stored=True)]))
    await eventually(lambda: b.turn is not None, description="the wait for its turn")
    assert lent.asked == []

    setup.respond(a)

    await eventually(lambda: setup.answered == ["a", "b"], description="the answers")
    assert lent.asked == [b.request_id]


async def test_executions_that_belong_to_no_caller_are_behind_none() -> None:
    assert not Inner().is_behind()
