"""Labeling against whatever users and models may send: a request or prediction that holds, or qinfer's own error."""

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.labeling.mapping import Mapping
from qinfer.labeling.rules import parse_label_config
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import DATATYPES, to_numpy

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
dims = st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=3).map(tuple)
numbers = st.floats(width=32) | st.sampled_from([0.0, 0.25, 0.5, 1.0, 100.0])

CHOICE = {"type": "choices", "from_name": "c", "to_name": "t", "scores": "P", "labels": ["a", "b"]}


@given(
    value=json_values,
    kind=st.sampled_from(["text", "bytes", "tensor", "file"]),
    datatype=st.sampled_from(sorted(DATATYPES)),
    shape=dims,
    batch=st.sampled_from([0, 4]),
)
@example(value=[[1, 2], [3]], kind="tensor", datatype="FP32", shape=(-1,), batch=4)
@example(value="\ud800", kind="text", datatype="BYTES", shape=(1,), batch=0)
@example(value=math.nan, kind="tensor", datatype="INT8", shape=(1,), batch=0)
def test_any_field_makes_a_whole_tensor_or_is_refused(
    value: object, kind: str, datatype: str, shape: tuple[int, ...], batch: int
) -> None:
    """Its bytes fill its shape, which is the input's."""
    mapping = Mapping(name="n", model="m", inputs={"X": {"field": "x", "kind": kind}}, results=[CHOICE])
    inputs = (TensorSpec(name="X", datatype=datatype, dims=shape),)
    spec = ModelSpec(name="m", backend="b", max_batch_size=batch, inputs=inputs, outputs=())
    task = {"data": {"x": value}}

    with suppress(InvalidRequest):
        files = dict.fromkeys(mapping.files(task), b"ab")
        (tensor,) = mapping.request(task, spec, files).inputs
        assert to_numpy(tensor).shape == tensor.shape
        rest = tensor.shape[1:] if batch else tensor.shape
        assert all(dim in (-1, size) for dim, size in zip(shape, rest, strict=True))


@st.composite
def detections(draw: st.DrawFn) -> dict[str, Any]:
    """Returns a detector's outputs, mostly of one count."""
    count = draw(st.integers(0, 4))
    boxes = draw(st.lists(numbers, min_size=4 * count, max_size=4 * count + draw(st.sampled_from([0, 0, 0, 1]))))
    scores = draw(st.lists(numbers, min_size=count, max_size=count))
    grid = draw(st.lists(numbers, min_size=2 * count, max_size=2 * count))
    classes = draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    size = draw(st.lists(st.sampled_from([0.0, 100.0, math.inf]), min_size=2, max_size=2))
    return {
        "B": np.array(boxes, np.float32),
        "S": np.array(scores, np.float32),
        "G": np.array(grid, np.float32),
        "C": np.array(classes, np.int64),
        "Z": np.array(size, np.float32),
    }


@given(
    outputs=detections(),
    kind=st.sampled_from(["xyxy", "xywh", "cxcywh", "yxyx"]),
    units=st.sampled_from(["pixel", "fraction", "percent"]),
    activation=st.sampled_from(["none", "sigmoid", "softmax"]),
    is_grid=st.booleans(),
)
def test_any_outputs_make_a_prediction_that_label_studio_takes(
    outputs: dict[str, Any], kind: str, units: str, activation: str, *, is_grid: bool
) -> None:
    """Every box is within its image, every score within 0 … 1, and nothing is NaN."""
    rule = {"type": "rectanglelabels", "from_name": "b", "to_name": "i", "boxes": "B"}
    is_grid = is_grid or activation == "softmax"
    rule |= {"scores": "G"} if is_grid else {"scores": "S", "label": "C"}
    rule |= {"format": kind, "units": units, "activation": activation}
    mapping = Mapping(name="n", model="m", results=[{**rule, "labels": ["x", "y"], "size": "Z"}])

    with suppress(OutputMismatch):
        made = mapping.prediction_of({"data": {}}, outputs, "m:1")
        assert b"null" not in msgspec.json.encode(made.as_json())
        assert 0 <= made.score <= 1
        for item in made.result:
            value = item["value"]
            assert 0 <= item["score"] <= 1
            assert 0 <= value["x"] < value["x"] + value["width"] <= 100.0001
            assert 0 <= value["y"] < value["y"] + value["height"] <= 100.0001


@given(st.text(alphabet=st.sampled_from('<>/!DOCTYPE="ab& ;[]?-\ud800é\0'), max_size=40))
def test_any_text_is_a_label_config_or_refused(text: str) -> None:
    """Nothing else comes of it."""
    with suppress(InvalidRequest):
        parse_label_config(text)
