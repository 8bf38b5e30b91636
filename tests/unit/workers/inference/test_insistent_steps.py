"""Steps that are submitted again while Redis is away."""

import gc
import weakref

import pytest

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import (
    TIMED_OUT,
    BrokerUnavailable,
    DeadlineExceeded,
    DeadlineInfeasible,
    InferenceFailed,
    QueueFull,
)
from qinfer.models.ensemble_graph import PlanStep
from qinfer.submission.pending import ResponseSink
from qinfer.testing import eventually, stub_spec
from qinfer_workers.inference.ensembles.insistent import RetryingSteps

STEP = PlanStep(model=stub_spec(), version=1, inputs=(), outputs={})
AWAY = Failure.from_error(BrokerUnavailable("away"))


class Way:
    """A way of steps to the test, which is away as often as it says."""

    def __init__(self, *, refusals: int = 0) -> None:
        self.refusals = refusals
        self.requests: list[OutgoingRequest] = []
        self.sink: ResponseSink
        self.is_taken = False
        self.cancelled = 0
        self.submitted: Way | None = None

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> "Way":
        assert timeout_s > 0
        if self.refusals:
            self.refusals -= 1
            raise BrokerUnavailable("away")
        request.generation, request.timeout_s, self.sink = 7, timeout_s, sink
        self.requests.append(request)
        return self.submitted or self

    def cancel(self) -> None:
        self.cancelled += 1

    def took(self, nbytes: int) -> None:
        raise AssertionError("nothing comes", nbytes)

    def fails(self, failure: Failure = AWAY) -> None:
        self.sink.deliver(Response(request_id="s", failure=failure))


class Taker:
    """The sink of a step."""

    no_stream = ""

    def __init__(self) -> None:
        self.came: list[Response] = []

    def deliver(self, response: Response) -> None:
        self.came.append(response)


def asked() -> OutgoingRequest:
    return OutgoingRequest(model="stub", inputs=(), timeout_s=2.5)


async def test_a_step_is_submitted_again() -> None:
    """As it was: what the submission has written to it is not."""
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)
    left: list[float] = []

    for count in (2, 3):
        way.fails()
        await eventually(lambda: len(way.requests) == count, description="another try")  # noqa: B023 - called at once
        left.append(way.requests[-1].timeout_s)
    way.sink.deliver(Response(request_id="s"))

    assert [response.failure for response in taker.came] == [None]
    assert all(50 < timeout_s < 60 for timeout_s in left)


async def test_a_step_that_has_ended_is_freed_without_the_garbage_collector(request: pytest.FixtureRequest) -> None:
    """At thousands of steps a second it would stop a worker for tens of milliseconds."""
    gc.disable()
    request.addfinalizer(gc.enable)
    way, sent, taker = Way(), Way(), Taker()
    way.submitted = sent
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)
    sent.sink = way.sink  # what was submitted refers to its sink; the way does so no longer
    del way.sink
    sent.sink.deliver(Response(request_id="s"))
    sink = weakref.ref(taker)

    way.submitted = None
    del sent, taker

    assert sink() is None


async def test_a_step_that_can_not_be_submitted_at_first() -> None:
    way, taker = Way(refusals=2), Taker()

    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)

    await eventually(lambda: bool(way.requests), description="it is submitted")
    assert taker.came == []


async def test_other_failures_are_answers() -> None:
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)

    way.fails(Failure.from_error(QueueFull("full")))

    assert [response.failure for response in taker.came] == [Failure.from_error(QueueFull("full"))]


async def test_a_stream_that_has_begun_is_not_submitted_again() -> None:
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)
    way.sink.deliver(Response(request_id="s", final=False))

    way.fails()

    assert [response.final for response in taker.came] == [False, True]


async def test_no_time_is_left() -> None:
    """Then the failure is the answer, or the refusal of the first try."""
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 0.01)
    way.fails()

    with pytest.raises(BrokerUnavailable):
        RetryingSteps(Way(refusals=1), is_stored=False).submit_step(STEP, asked(), taker, 0.01)

    assert [response.failure for response in taker.came] == [AWAY]


async def test_an_asynchronous_request_without_time_left_has_expired() -> None:
    """That Redis is away is not why it ends: it would have waited longer."""
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=True).submit_step(STEP, asked(), taker, 0.01)
    way.fails()

    with pytest.raises(DeadlineExceeded):
        RetryingSteps(Way(refusals=1), is_stored=True).submit_step(STEP, asked(), taker, 0.01)

    assert [response.failure for response in taker.came] == [Failure.from_error(DeadlineExceeded(TIMED_OUT))]


async def test_what_is_cancelled_is_not_submitted_again() -> None:
    way, taker = Way(), Taker()
    submitted = RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)
    way.fails()

    submitted.cancel()
    other = Taker()
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), other, 60.0)
    way.fails()

    await eventually(lambda: len(way.requests) == 3, description="the other one, which failed later, is tried again")
    assert taker.came == []


async def test_a_step_of_a_sequence_that_was_taken_stays_so() -> None:
    """Though nothing is known of the next try yet."""
    way, taker = Way(), Taker()
    submitted = RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)
    way.is_taken = True
    way.fails()

    assert submitted.is_taken


async def test_a_failure_of_a_later_try() -> None:
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=False).submit_step(STEP, asked(), taker, 60.0)
    way.fails()
    await eventually(lambda: len(way.requests) == 2, description="another try")

    way.fails(Failure.from_error(InferenceFailed("no")))

    assert [response.failure for response in taker.came] == [Failure.from_error(InferenceFailed("no"))]


async def test_asynchronous_requests_wait_for_models_with_too_much_to_do() -> None:
    """As long as their deadline allows; then they expire, and do not fail."""
    way, taker = Way(), Taker()
    RetryingSteps(way, is_stored=True).submit_step(STEP, asked(), taker, 60.0)
    way.fails(Failure.from_error(QueueFull("full")))
    await eventually(lambda: len(way.requests) == 2, description="another try")
    RetryingSteps(way, is_stored=True).submit_step(STEP, asked(), taker, 0.01)

    way.fails(Failure.from_error(DeadlineInfeasible("too much", 1.0)))

    assert [response.failure and response.failure.code for response in taker.came] == ["deadline_exceeded"]
