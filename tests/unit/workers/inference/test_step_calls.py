"""A step of an ensemble's request: submitted again while Redis is away, and bounded over all requests."""

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import (
    TIMED_OUT,
    BrokerUnavailable,
    DeadlineExceeded,
    DeadlineInfeasible,
    InferenceFailed,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    QueueFull,
)
from qinfer.models.ensemble_graph import PlanStep
from qinfer.submission.pending import ResponseSink
from qinfer.testing import eventually, stub_spec
from qinfer_workers.inference.ensembles.steps import AWAY, OF_STORED, StepCall, StepLimits, StepWay
from tests.support.timers import settle_loop

FIRST, SECOND = (PlanStep(model=stub_spec(), version=1, inputs=(), outputs={}) for _ in range(2))
GONE = Failure.from_error(BrokerUnavailable("away"))
FULL = Failure.from_error(QueueFull("full"))
EXPIRED = Failure.from_error(DeadlineExceeded(TIMED_OUT))


class Submitted:
    """A submitted step: its request, its sink, and what was done with it."""

    def __init__(self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> None:
        self.request, self.sink, self.timeout_s = request, sink, timeout_s
        self.is_taken = self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def took(self, nbytes: int) -> None:
        raise AssertionError("nothing is streamed", nbytes)

    async def give(self, failure: Failure | None = None, *, final: bool = True) -> None:
        """Gives a response."""
        self.sink.deliver(Response(request_id="s", failure=failure, final=final))
        await settle_loop()


class Scene:
    """Steps of requests, on a clock that the test moves."""

    def __init__(self, retried: frozenset[str] = AWAY, most: int = 0) -> None:
        self.submitted: list[Submitted] = []
        self.refusals: list[QinferError] = []
        self.looks = 0
        self.time_s = 1000.0
        self.way = StepWay(self, lambda: self.time_s, retried, StepLimits(most) if most else None)
        self.calls: dict[str, StepCall] = {}
        self.ends: list[str] = []

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> Submitted:
        assert timeout_s > 0
        if self.refusals:
            raise self.refusals.pop()
        request.generation, request.timeout_s = 7, timeout_s
        self.submitted.append(Submitted(request, sink, timeout_s))
        return self.submitted[-1]

    async def look_again(self) -> None:
        self.looks += 1

    async def begin(self, name: str = "a", step: PlanStep = FIRST, timeout_s: float = 60.0) -> "asyncio.Task[Response]":
        """Begins a step."""
        call = self.calls[name] = StepCall(
            self.way, step, OutgoingRequest(model="stub", id=name, inputs=(), timeout_s=2.5), self.time_s + timeout_s
        )
        task = asyncio.create_task(self._run(name, call))
        await settle_loop()
        return task

    async def _run(self, name: str, call: StepCall) -> Response:
        with call:
            response = await call.first()
            while not response.final:
                response = await call.next()
        self.ends.append(name)
        return response

    async def tries(self, count: int) -> Submitted:
        """Waits until steps were submitted so often."""
        await eventually(lambda: len(self.submitted) == count, description="another try")
        return self.submitted[-1]

    @property
    def names(self) -> list[str]:
        """The steps that were submitted."""
        return [one.request.id for one in self.submitted]


async def failure_of(running: Coroutine[Any, Any, Response] | asyncio.Task[Response]) -> Failure | None:
    async with asyncio.timeout(5.0):
        return (await running).failure


async def test_a_step_is_submitted_again() -> None:
    """The second submission gets the request without what the first one has written to it."""
    scene = Scene()
    running = await scene.begin()

    for count in (1, 2):
        scene.time_s += 1.0
        await scene.submitted[-1].give(GONE)
        await scene.tries(count + 1)
    await scene.submitted[-1].give()

    assert await failure_of(running) is None
    assert [one.timeout_s for one in scene.submitted] == [60.0, 59.0, 58.0]


async def test_a_step_that_can_not_be_submitted_at_first() -> None:
    scene = Scene()
    scene.refusals = [BrokerUnavailable("away"), BrokerUnavailable("away")]
    running = await scene.begin()

    await (await scene.tries(1)).give()

    assert await failure_of(running) is None


@pytest.mark.parametrize("refusal", [ModelNotFound("unknown"), ModelNotReady("loading")])
async def test_a_model_that_is_not_known_to_be_ready_is_looked_for_once_more(refusal: QinferError) -> None:
    """The gateway let the request in because it knew of the model; a worker that has just started may not yet."""
    scene = Scene()
    scene.refusals = [refusal]
    running = await scene.begin()
    await scene.submitted[-1].give()
    scene.refusals = [refusal, refusal]
    refused = await scene.begin("b")

    assert [await failure_of(running), await failure_of(refused)] == [None, Failure.from_error(refusal)]
    assert scene.looks == 2


async def test_a_step_that_has_ended_is_freed_without_the_garbage_collector(request: pytest.FixtureRequest) -> None:
    """At thousands of steps a second it would stop a worker for tens of milliseconds."""
    gc.disable()
    request.addfinalizer(gc.enable)
    scene = Scene()
    running = await scene.begin()
    await scene.submitted[-1].give()
    assert await failure_of(running) is None
    call = weakref.ref(scene.submitted[-1])

    scene.calls.clear()
    scene.submitted.clear()

    assert call() is None


@pytest.mark.parametrize("failure", [FULL, Failure.from_error(InferenceFailed("no"))])
async def test_other_failures_are_answers(failure: Failure) -> None:
    scene = Scene()
    running = await scene.begin()
    await scene.submitted[-1].give(GONE)

    await (await scene.tries(2)).give(failure)

    assert await failure_of(running) == failure


async def test_a_stream_that_has_begun_is_not_submitted_again() -> None:
    scene = Scene()
    running = await scene.begin()
    await scene.submitted[-1].give(final=False)

    await scene.submitted[-1].give(GONE)

    assert await failure_of(running) == GONE


@pytest.mark.parametrize(("retried", "expected"), [(AWAY, GONE), (OF_STORED, EXPIRED)])
async def test_no_time_is_left(retried: frozenset[str], expected: Failure) -> None:
    """The failure is the answer; a stored request, which would have waited longer, has expired."""
    scene = Scene(retried)
    running = await scene.begin(timeout_s=0.01)
    await scene.submitted[-1].give(GONE)
    scene.refusals = [BrokerUnavailable("away")]

    refused = await scene.begin(timeout_s=0.01)

    assert [await failure_of(running), await failure_of(refused)] == [expected, expected]


async def test_asynchronous_requests_wait_for_models_with_too_much_to_do() -> None:
    """Such a request waits as long as its deadline allows; then it expires, and does not fail."""
    scene = Scene(OF_STORED)
    running = await scene.begin()
    await scene.submitted[-1].give(FULL)
    step = await scene.tries(2)

    scene.time_s += 59.99
    await step.give(Failure.from_error(DeadlineInfeasible("too much", 1.0)))

    assert await failure_of(running) == EXPIRED


async def test_a_cancelled_step_is_not_submitted_again() -> None:
    scene = Scene()
    running = await scene.begin()
    await scene.submitted[-1].give(GONE)
    running.cancel()
    await scene.begin("b")

    await scene.submitted[-1].give(GONE)
    await scene.tries(3)

    assert scene.names == ["a", "b", "b"]


async def test_a_step_of_a_sequence_that_was_taken_stays_so() -> None:
    """Though nothing is known of the next try yet."""
    scene = Scene()
    await scene.begin()
    scene.submitted[-1].is_taken = True
    await scene.submitted[-1].give(GONE)

    assert scene.calls["a"].is_taken


async def test_a_cancelled_step_is_known_only_if_it_was_taken_or_not_submitted() -> None:
    scene = Scene(most=2)
    running = [await scene.begin(name) for name in "abc"]
    scene.submitted[0].is_taken = True
    for one in running:
        one.cancel()
    await settle_loop()

    assert [(call.is_known, call.is_taken) for call in scene.calls.values()] == [
        (True, True),
        (False, False),
        (True, False),
    ]


async def test_no_more_requests_of_a_step_are_in_flight_than_may() -> None:
    """Waiting requests go on in order, when one has ended; other steps have a bound of their own."""
    scene = Scene(most=2)
    for name in "abcd":
        await scene.begin(name)
    await scene.begin("other", SECOND)

    before = list(scene.names)
    await scene.submitted[1].give(final=False)
    between = list(scene.names)
    await scene.submitted[1].give()
    await scene.submitted[0].give()

    assert before == between == ["a", "b", "other"]
    assert scene.names == ["a", "b", "other", "c", "d"]


@pytest.mark.parametrize("cancelled", [0, 2], ids=["in flight", "parked"])
async def test_a_request_that_is_cancelled_leaves_its_place(cancelled: int) -> None:
    scene = Scene(most=2)
    begun = [await scene.begin(name) for name in "abcd"]

    begun[cancelled].cancel()
    await settle_loop()
    await scene.submitted[1].give()

    assert scene.names == (["a", "b", "d"] if cancelled else ["a", "b", "c", "d"])
    assert scene.submitted[0].is_cancelled is (not cancelled)


async def test_a_parked_request_has_the_time_that_is_left() -> None:
    """One that has none fails, and gives way to the next."""
    scene = Scene(most=1)
    await scene.begin("a")
    late = await scene.begin("b", timeout_s=1.0)
    await scene.begin("c")

    scene.time_s += 2.0
    await scene.submitted[0].give()

    assert await failure_of(late) == EXPIRED
    assert (scene.names, scene.submitted[-1].timeout_s) == (["a", "c"], 58.0)


async def test_a_parked_request_expires_though_none_ends() -> None:
    scene = Scene(most=1)
    await scene.begin("a")

    late = await scene.begin("b", timeout_s=0.001)

    assert await failure_of(late) == EXPIRED
    assert scene.names == ["a"]


async def test_a_request_that_is_refused_takes_no_place() -> None:
    scene = Scene(most=2)
    for _ in range(3):
        scene.refusals = [QueueFull("full")]
        assert await failure_of(await scene.begin("refused")) == FULL

    for name in "abc":
        await scene.begin(name)

    assert scene.names == ["a", "b"]
