"""Python values as the tensors of a model, and back."""

from typing import Any

import numpy as np
import pytest

from qinfer.client.values import from_tensors, to_tensors
from qinfer.errors import InvalidRequest
from qinfer.tensors import from_numpy, to_numpy

PORTS = [
    {"name": "text", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "x", "data_type": "TYPE_FP32", "dims": [2]},
    {"name": "k", "data_type": "TYPE_INT8", "dims": [1]},
    {"name": "b", "data_type": "TYPE_BF16", "dims": [1]},
]
CONFIG: dict[str, Any] = {"name": "m", "max_batch_size": 4, "input": PORTS, "output": PORTS, "parameters": {}}
WHOLE = CONFIG | {"max_batch_size": 0, "parameters": {"qinfer.base64": {"string_value": "text"}}}


def test_batches_and_items_become_tensors() -> None:
    batch, is_one = to_tensors(CONFIG, {"text": ["é", b"\xff"], "x": np.ones((2, 2)), "k": None, "b": [1.5, 2]})
    item, is_item = to_tensors(CONFIG, {"text": "é", "x": [1, 2], "k": np.int8(3)})
    whole, _ = to_tensors(WHOLE, {"text": "é"})

    assert {name: (tensor.datatype, tensor.shape) for name, tensor in batch.items()} == {
        "text": ("BYTES", (2, 1)),
        "x": ("FP32", (2, 2)),
        "b": ("BF16", (2, 1)),
    }
    assert to_numpy(batch["text"]).tolist() == [["é".encode()], [b"\xff"]]
    assert [tensor.shape for tensor in item.values()] == [(1, 1), (1, 2), (1, 1)]
    assert to_numpy(to_tensors(CONFIG, {"k": [np.int64(3), 4.0]})[0]["k"]).tolist() == [[3], [4]]
    assert (whole["text"].shape, is_one, is_item) == ((1,), False, True)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"k": [128]}, "input 'k' can't be read as INT8"),
        ({"k": np.array([300])}, "input 'k' can't be read as INT8: 300 does not fit"),
        ({"k": [1.5]}, "input 'k' can't be read as INT8: 1.5 instead of an integer"),
        ({"k": ["a"]}, "input 'k' can't be read as INT8"),
        ({"text": [None]}, "input 'text' can't be read as BYTES: null instead of a text"),
        ({"x": [1e300, 1.0]}, "input 'x' can't be read as FP32: 1e[+]300 does not fit"),
        ({"x": [[1], [1, 2]]}, "input 'x' can't be read as FP32"),
        ({"x": 1}, "input 'x' has 0 dimensions"),
        ({"x": [[[1, 2]]]}, "input 'x' has 3 dimensions"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        to_tensors(CONFIG, values)


def test_outputs_become_values() -> None:
    text, x = np.array([["é"], ["a"]], object), np.ones((2, 2), np.float32)
    one = (from_numpy("text", text[:1]), from_numpy("x", x[:1]), from_numpy("k", np.array([[3]], np.int8)))

    batch = from_tensors(CONFIG, (from_numpy("text", text), from_numpy("x", x)), is_one=False)
    item = from_tensors(CONFIG, one, is_one=True)
    whole = from_tensors(WHOLE, (from_numpy("text", text[0]),), is_one=False)

    assert (batch["text"], batch["x"].tolist()) == (["é", "a"], [[1, 1], [1, 1]])
    assert (item["text"], item["x"].tolist(), item["k"]) == ("é", [1, 1], 3)
    assert whole == {"text": "é".encode()}
