"""Tensors in traces: what is kept of them, and how it is written."""

import numpy as np
import pytest

from qinfer.tensors import Tensor, from_numpy, pack_bytes
from qinfer_api.observe import trace_file
from qinfer_api.observe.trace_file import INPUT, copy_tensors, weight_of, written


def data_of(tensor: Tensor) -> str:
    ((activity, kept),) = copy_tensors(INPUT, [tensor])
    shown = written(7, activity, kept)
    assert (shown["id"], shown["activity"], shown["tensor"]["dtype"]) == (7, "TENSOR_QUEUE_INPUT", tensor.datatype)
    assert shown["tensor"]["shape"] == ",".join(map(str, tensor.shape))
    return str(shown["tensor"]["data"])


@pytest.mark.parametrize(
    ("tensor", "data"),
    [
        (from_numpy("x", np.array([[0.1, -2]], "<f4")), "0.1,-2.0"),
        (from_numpy("x", np.array([2**63 - 1, -1], "<i8")), "9223372036854775807,-1"),
        (from_numpy("x", np.array([True, False])), "1,0"),
        (from_numpy("x", np.array([0.5], "<f2")), "0.5"),
        (Tensor("x", "BF16", (1,), b"\x80\x3f"), "1.0"),
        (Tensor("x", "BYTES", (3,), pack_bytes([b"a,b", b'"', b"\xff"])), '"a,b","\\"","\ufffd"'),
        (Tensor("x", "FP32", (0,), b""), ""),
    ],
)
def test_every_kind_of_tensor(tensor: Tensor, data: str) -> None:
    """Numbers as they are, strings in quotes."""
    assert data_of(tensor) == data


def test_of_large_tensors_the_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole elements only; what is kept holds no larger buffer."""
    monkeypatch.setattr(trace_file, "MOST_BYTES", 10)
    numbers = from_numpy("x", np.arange(1000, dtype="<f4"))
    texts = Tensor("x", "BYTES", (3,), pack_bytes([b"ab", b"cdefgh", b"i"]))

    assert data_of(numbers) == "0.0,1.0"
    assert data_of(texts) == '"ab"'
    ((_, kept),) = copy_tensors(INPUT, [numbers])
    assert (type(kept.data), len(kept.data)) == (bytes, 10)


def test_tensors_weigh_as_much_as_they_take() -> None:
    """A trace without any is about 256 bytes."""
    taken = copy_tensors(INPUT, [from_numpy("x", np.zeros(256, "<f4")), from_numpy("y", np.zeros(64, "<f4"))])

    assert (weight_of([]), weight_of(taken)) == (0, 5)
