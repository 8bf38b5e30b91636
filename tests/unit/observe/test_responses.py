"""The responses of decoupled models in the statistics."""

import msgspec
import pytest

from qinfer.core.messages import Failure, Response
from qinfer.observe.stats import MOST_INDEXES, ResponseEnd, StatsTally, add, end_of
from qinfer.tensors import Tensor
from qinfer_api.observe.statistics import model_statistics

ZERO = {"count": 0, "ns": 0}


def test_each_index_has_its_ends() -> None:
    """As reference §1.13 has it: of a response with outputs the times, too."""
    tally, totals = StatsTally(), dict[str, int]()
    tally.responses.responded(0, ResponseEnd.SUCCESS, 100)
    tally.responses.responded(0, ResponseEnd.SUCCESS, 50)
    tally.responses.responded(1, ResponseEnd.EMPTY, 7)
    add(totals, tally.drain())
    tally.responses.responded(1, ResponseEnd.CANCEL, 9)
    tally.responses.responded(10, ResponseEnd.FAIL, 11)
    add(totals, tally.drain())

    shown = msgspec.to_builtins(model_statistics("m", 1, totals))["response_stats"]

    nothing = dict.fromkeys(("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"), ZERO)
    both = {"count": 2, "ns": 150}
    assert shown == {
        "0": nothing | {"success": both, "compute_infer": both, "compute_output": {"count": 2, "ns": 0}},
        "1": nothing | {"empty_response": {"count": 1, "ns": 7}, "cancel": {"count": 1, "ns": 9}},
        "10": nothing | {"fail": {"count": 1, "ns": 11}},
    }
    assert tally.drain() == {}


def test_the_number_of_fields_is_bounded() -> None:
    """A stream of a day does not fill Redis with statistics."""
    tally = StatsTally()

    tally.responses.responded(MOST_INDEXES, ResponseEnd.SUCCESS, 1)
    assert not tally.drain()

    tally.responses.responded(MOST_INDEXES - 1, ResponseEnd.SUCCESS, 1)
    assert list(model_statistics("m", 1, tally.drain()).response_stats) == [str(MOST_INDEXES - 1)]


@pytest.mark.parametrize(
    ("response", "end"),
    [
        (Response(request_id="r", outputs=(Tensor("y", "FP32", (1,), bytes(4)),)), ResponseEnd.SUCCESS),
        (Response(request_id="r", parameters={"tokens": 3}), ResponseEnd.SUCCESS),
        (Response(request_id="r"), ResponseEnd.EMPTY),
        (Response(request_id="r", failure=Failure("cancelled", "gone")), ResponseEnd.CANCEL),
        (Response(request_id="r", failure=Failure("inference_failed", "no")), ResponseEnd.FAIL),
    ],
    ids=["outputs", "parameters", "empty", "cancelled", "failed"],
)
def test_how_a_response_ends(response: Response, end: ResponseEnd) -> None:
    assert end_of(response) == end
