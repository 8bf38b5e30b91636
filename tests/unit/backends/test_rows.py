"""How a backend answers the items of a batch by `respond_rows`: their outputs, then their states."""

import numpy as np
import pytest

from qinfer.backends.base import Batch, cut_rows, respond_rows
from qinfer.core.messages import InferRequest
from qinfer.errors import InferenceFailed, OutputMismatch
from qinfer.tensors import from_numpy, to_numpy
from tests.support.backends import Answers

OUTPUTS = {
    "state": np.array([[1], [2]], dtype="<f4"),
    "y": np.array([[3], [4]], dtype="<f4"),
    "z": np.array([[5], [6]], dtype="<f4"),
}


def batch(*wanted: tuple[str, ...], states: tuple[str, ...] = ()) -> Batch:
    """Returns a batch of one request of one row for each of these `outputs`."""
    requests = [InferRequest(model="m", inputs=(), outputs=outputs) for outputs in wanted]
    return Batch(requests=requests, rows=[1] * len(requests), inputs={}, states=states)


def test_states_follow_the_outputs_that_an_item_wants() -> None:
    answers = Answers()

    respond_rows(batch((), ("z",), states=("state",)), answers, OUTPUTS, {})

    assert [tensor.name for tensor in answers.outputs(0)] == ["y", "z", "state"]
    assert [tensor.name for tensor in answers.outputs(1)] == ["z", "state"]
    assert answers.array(1, 1).tolist() == [[2.0]]


def test_a_state_that_is_wanted_as_an_output_comes_twice() -> None:
    answers = Answers()

    respond_rows(batch(("state",), ("y",), states=("state",)), answers, OUTPUTS, {})

    assert [tensor.name for tensor in answers.outputs(0)] == ["state", "state"]


def test_a_missing_state_fails_the_batch() -> None:
    with pytest.raises(OutputMismatch, match="the model returned no output 'other'"):
        respond_rows(batch((), (), states=("other",)), Answers(), OUTPUTS, {})


def test_strings_are_cut_by_their_lengths() -> None:
    words = np.array([["", "é"], ["ab", "c\0"], ["d", ""]], object)

    first, second = cut_rows(from_numpy("w", words), [1, 2])
    assert [to_numpy(first).tolist(), to_numpy(second).tolist()] == [
        [[b"", "é".encode()]],
        [[b"ab", b"c\0"], [b"d", b""]],
    ]
    assert [one.shape for one in cut_rows(from_numpy("w", words[:, :0]), [1, 2])] == [(1, 0), (2, 0)]


def test_a_request_can_not_be_rescheduled_where_there_are_no_iterations() -> None:
    with pytest.raises(InferenceFailed, match="iterative_sequence"):
        Answers().reschedule(0)
