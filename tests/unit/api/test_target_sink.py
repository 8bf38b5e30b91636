"""What the sink of a request to an endpoint counts, by who has answered."""

import pytest

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.traffic.observed import TargetCounts
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.tally import TargetTally
from qinfer_api.target_sink import TargetSink
from tests.unit.traffic.test_observed import counts_of


class Sink:
    """A sink that takes everything."""

    no_stream = ""

    def deliver(self, response: Response) -> None:
        pass


def counted(answer: Response) -> tuple[TargetTally, TargetCounts, TargetCounts]:
    """Returns the counts of a request for version 4, and what they are evidence of: of that version, and of stable."""
    tally, canary, stable = TargetTally(Endpoints(None), "g"), counts_of(), counts_of(is_stable=True)  # type: ignore[arg-type]
    tally.observed.by_target = {("e", "m:4"): canary, ("e", "m:3"): stable}
    request = InferRequest(model="m", version=4, inputs=(), endpoint="e")
    TargetSink(tally, Sink(), request).deliver(answer)
    return tally, canary, stable


def test_its_own_targets_answer_is_evidence() -> None:
    tally, canary, stable = counted(Response(request_id="r", model="m", version=4))

    assert (tally.requests("e", "m", 4), tally.requests("e", "m", 3)) == (1, 0)
    assert canary.take()[0]["canary|errors||requests"] == 1
    assert stable.take() == ({}, [])


@pytest.mark.parametrize("failure", [None, Failure("inference_failed", "boom")], ids=["answered", "failed"])
def test_an_answer_of_another_version_is_counted_as_its(failure: Failure | None) -> None:
    """It had waited for a target that was rolled back: that says nothing about either."""
    tally, canary, stable = counted(Response(request_id="r", model="m", version=3, failure=failure))

    assert (tally.requests("e", "m", 4), tally.requests("e", "m", 3)) == (0, 1)
    assert (canary.take(), stable.take()) == (({}, []), ({}, []))
