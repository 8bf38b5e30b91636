"""The agreement of answers, and how seldom it is measured."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qinfer.cli.analyze.accuracy import Accuracy, agreement
from qinfer.cli.analyze.space import Candidate
from qinfer.cli.request_data import DataRequest
from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, from_numpy, numpy_dtype

FULL = Candidate(1, 8, 0.0, 1, "onnxruntime")
MIXED = FULL._replace(precision="mixed")


def tensor(values: Any, datatype: str = "FP32", name: str = "y") -> Tensor:
    return from_numpy(name, np.array(values, numpy_dtype(datatype)), datatype)


@pytest.mark.parametrize(
    ("first", "other", "datatype", "expected"),
    [
        ([[0.1, 0.9], [0.8, 0.2]], [[0.4, 0.6], [0.7, 0.3]], "FP32", 1.0),
        ([[0.1, 0.9], [0.8, 0.2]], [[0.6, 0.4], [0.7, 0.3]], "FP32", 0.5),
        ([[1], [2], [3], [4]], [[1], [2], [3], [5]], "INT64", 0.75),
        ([[b"a"], [b"b"]], [[b"a"], [b"c"]], "BYTES", 0.5),
        ([[100.0]], [[99.0]], "FP32", 0.99),
        ([[[1.0, 2.0], [3.0, 4.0]]], [[[1.0, 2.0], [3.0, 3.0]]], "FP32", 0.75),
        ([[1.0]], [[float("nan")]], "FP32", 0.0),
        ([[float("nan")]], [[float("nan")]], "FP32", 1.0),
        ([[0.0]], [[0.0]], "FP32", 1.0),
        ([[1.0]], [[1.0, 2.0]], "FP32", 0.0),
        (2.0, 1.0, "FP32", 0.5),
    ],
)
def test_labels_agree_by_rows_and_other_floats_by_distance(
    first: Any, other: Any, datatype: str, expected: float
) -> None:
    found = agreement([((tensor(first, datatype),), (tensor(other, datatype),))])

    assert found == pytest.approx(expected)


def test_the_worst_output_decides() -> None:
    good, bad = tensor([[1]], "INT64", "good"), tensor([[1]], "INT64", "bad")

    assert agreement([((good, bad), (good, tensor([[2]], "INT64", "bad")))]) == 0.0
    with pytest.raises(InvalidRequest, match="outputs differ: bad"):
        agreement([((good, bad), (good,))])


def test_each_computation_is_compared_once_with_the_present_one() -> None:
    """Instances and batches can't change answers."""
    loads: list[Candidate] = []
    asked: list[Candidate] = []

    def infer(model: str, inputs: Any, parameters: Any) -> Any:
        asked.append(loads[-1])
        value = inputs["x"].data[0] % 2 if loads[-1].precision == "full" else 0
        return SimpleNamespace(tensors=(tensor([[value]], "INT64"),))

    requests = [DataRequest([tensor([[n]], "UINT8", "x")]) for n in range(4)]
    accuracy = Accuracy(SimpleNamespace(infer=infer), [("m", requests)], {"m": FULL})  # type: ignore[arg-type]

    def found(candidate: Candidate) -> float:
        loads.append(candidate)
        return accuracy.of({"m": candidate}, lambda candidates: loads.append(candidates["m"]))

    assert [found(one) for one in (FULL, MIXED, MIXED._replace(instances=4), FULL._replace(max_batch=1))] == [
        1.0,
        0.5,
        0.5,
        1.0,
    ]
    assert [one.precision for one in asked] == ["full"] * 4 + ["mixed"] * 4
