"""What the sink of a request to an endpoint counts, by who has answered."""

import math
from typing import Any

import pytest

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import ErrorCode
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.tally import TargetCounts, TargetTally
from qinfer_api.endpoints.shadows import TargetSink
from tests.unit.traffic.test_observed import counts_of


class Sink:
    """A sink that takes everything."""

    no_stream = ""

    def deliver(self, response: Response) -> None:
        pass


def counted(
    answer: Response, *, assigned: bool = True, **fields: Any
) -> tuple[TargetTally, TargetCounts, TargetCounts]:
    """Returns the counts of a request for version 4, and what they are evidence of: of that version, and of stable."""
    tally, canary, stable = TargetTally(Endpoints(None), "g"), counts_of(), counts_of(is_stable=True)  # type: ignore[arg-type]
    tally.observed.by_target = {("e", "m:4"): canary, ("e", "m:3"): stable}
    request = OutgoingRequest(model="m", version=4, inputs=(), endpoint="e", tenant="acme", assigned=assigned)
    TargetSink(tally, Sink(), request, **fields).deliver(answer)
    return tally, canary, stable


def test_its_own_targets_answer_is_evidence() -> None:
    tally, canary, stable = counted(Response(request_id="r", model="m", version=4))

    assert (tally.requests("e", "m", 4), tally.requests("e", "m", 3)) == (1, 0)
    assert canary.new_counts()[0]["canary|errors||requests|acme"] == 1
    assert stable.new_counts() == ({}, [])


@pytest.mark.parametrize("failure", [None, Failure("inference_failed", "boom")], ids=["answered", "failed"])
def test_an_answer_to_who_named_its_target_is_counted_and_no_evidence(failure: Failure | None) -> None:
    answer = Response(request_id="r", model="m", version=4, failure=failure)
    tally, canary, _ = counted(answer, assigned=False)

    assert tally.requests("e", "m", 4) == 1
    assert canary.new_counts() == ({}, [])


@pytest.mark.parametrize(("given_s", "bad"), [(0.002, None), (3.0, 1), (math.inf, 1)])
def test_a_deadline_shorter_than_stables_answers_take_is_its_callers(given_s: float, bad: int | None) -> None:
    """In a plan that has no check of the latency, too."""
    late = Failure(ErrorCode.DEADLINE_EXCEEDED, "late")
    answer = Response(request_id="r", model="m", version=4, failure=late)
    _, canary, _ = counted(answer, given_s=given_s)

    assert canary.new_counts()[0].get("canary|errors||bad|acme") == bad


@pytest.mark.parametrize("failure", [None, Failure("inference_failed", "boom")], ids=["answered", "failed"])
def test_an_answer_of_another_version_is_counted_as_its(failure: Failure | None) -> None:
    """It had waited for a target that was rolled back: that says nothing about either."""
    tally, canary, stable = counted(Response(request_id="r", model="m", version=3, failure=failure))

    assert (tally.requests("e", "m", 4), tally.requests("e", "m", 3)) == (0, 1)
    assert (canary.new_counts(), stable.new_counts()) == (({}, []), ({}, []))
