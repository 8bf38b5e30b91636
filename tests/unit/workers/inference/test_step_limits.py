"""The bound on the requests of a step that are in flight, over all requests of an ensemble."""

import numpy as np
import pytest

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import TIMED_OUT, DeadlineExceeded, QueueFull
from qinfer.models.ensemble_graph import PlanStep
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import from_numpy
from qinfer.testing import stub_spec
from qinfer_workers.inference.ensembles.limits import StepLimits
from tests.support.timers import Clock

EXPIRED = Failure.from_error(DeadlineExceeded(TIMED_OUT))
FIRST, SECOND = (PlanStep(model=stub_spec(), version=1, inputs=(), outputs={}) for _ in range(2))


class Step:
    """A request of a step, its sink, and whether it was cancelled."""

    is_taken = True

    def __init__(self, name: str, sink: ResponseSink, timeout_s: float) -> None:
        self.name, self.sink, self.timeout_s = name, sink, timeout_s
        self.is_cancelled = False
        self.taken_bytes = 0

    def cancel(self) -> None:
        self.is_cancelled = True

    def took(self, nbytes: int) -> None:
        self.taken_bytes += nbytes


class Scene:
    """Requests that submit steps with a bound of two, and what became of them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.limits = StepLimits(2, self.clock.monotonic_s, self.clock.call_later)
        self.submitted: list[Step] = []
        self.came: dict[str, list[Response]] = {}
        self.is_full = False

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> Step:
        del step
        if self.is_full:
            raise QueueFull("full")
        self.submitted.append(Step(request.id, sink, timeout_s))
        return self.submitted[-1]

    def begin(self, name: str, step: PlanStep = FIRST, timeout_s: float = 9.0) -> Step:
        """Has another request of the ensemble submit a step."""
        scene = self

        class Taker:
            no_stream = ""

            def deliver(self, response: Response) -> None:
                scene.came.setdefault(name, []).append(response)

        request = OutgoingRequest(model="m", id=name, inputs=(from_numpy("x", np.zeros(1, "<f4")),))
        return self.limits.over(self).submit_step(step, request, Taker(), timeout_s)  # type: ignore[return-value]

    def publish_responses(self, name: str, *, final: bool = True) -> None:
        """Answers a step."""
        (step,) = (each for each in self.submitted if each.name == name)
        step.sink.deliver(Response(request_id=name, final=final))

    @property
    def names(self) -> list[str]:
        """The steps that were submitted."""
        return [step.name for step in self.submitted]


def test_no_more_requests_of_a_step_are_in_flight_than_may() -> None:
    """Those that wait go on in order, when one has ended; other steps have a bound of their own."""
    scene = Scene()
    for name in "abcd":
        scene.begin(name)
    scene.begin("other", SECOND)

    before = list(scene.names)
    scene.publish_responses("b", final=False)
    scene.publish_responses("b")
    scene.publish_responses("a")

    assert before == ["a", "b", "other"]
    assert scene.names == ["a", "b", "other", "c", "d"]
    assert [response.final for response in scene.came["b"]] == [False, True]


@pytest.mark.parametrize("cancelled", ["a", "c"], ids=["in flight", "parked"])
def test_a_request_that_is_cancelled_leaves_its_place(cancelled: str) -> None:
    scene = Scene()
    begun = {name: scene.begin(name) for name in "abcd"}

    begun[cancelled].cancel()
    begun[cancelled].cancel()
    scene.publish_responses("b")

    assert scene.names == (["a", "b", "c", "d"] if cancelled == "a" else ["a", "b", "d"])
    assert scene.submitted[0].is_cancelled == (cancelled == "a")


def test_a_parked_request_has_the_time_that_is_left() -> None:
    """One that has none fails, though its timer is late, and gives way to the next."""
    scene = Scene()
    for name, timeout_s in (("a", 9.0), ("b", 9.0), ("c", 1.0), ("d", 9.0)):
        scene.begin(name, timeout_s=timeout_s)

    scene.clock.now_s += 2.0
    scene.publish_responses("a")

    assert scene.came["c"][0].failure == EXPIRED
    assert (scene.names, scene.submitted[-1].timeout_s) == (["a", "b", "d"], 7.0)


def test_a_parked_request_expires_though_none_ends() -> None:
    """Once; it does not go on when others have ended, and those that have gone on or left do not expire here."""
    scene = Scene()
    for name in "abcde":
        parked = scene.begin(name, timeout_s=1.0 if name in "de" else 0.5)
    parked.cancel()

    scene.clock.move_to(scene.clock.now_s + 0.5)
    before = dict(scene.came)
    scene.publish_responses("a")
    scene.clock.move_to(scene.clock.now_s + 9.0)
    scene.publish_responses("b")

    assert [response.failure for response in before.pop("c")] == [EXPIRED]
    assert before == {}
    assert scene.names == ["a", "b", "d"]
    assert list(scene.came) == ["c", "a", "b"]


def test_a_request_that_is_refused_takes_no_place() -> None:
    scene = Scene()
    scene.is_full = True
    for _ in range(3):
        with pytest.raises(QueueFull):
            scene.begin("refused")
    scene.is_full = False

    for name in "abc":
        scene.begin(name)

    assert scene.names == ["a", "b"]


def test_thousands_that_fail_at_once_do_not_recurse() -> None:
    scene = Scene()
    for number in range(5000):
        scene.begin(str(number))
    scene.is_full = True

    scene.publish_responses("0")

    assert sum(response.failure is not None for came in scene.came.values() for response in came) == 4998


def test_what_is_taken_of_a_step_is_told() -> None:
    scene = Scene()
    limited = scene.begin("a")

    limited.took(4)

    assert (scene.submitted[0].taken_bytes, limited.is_taken) == (4, True)
