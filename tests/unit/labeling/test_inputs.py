"""Fields of tasks → input tensors."""

import base64
from typing import Any

import pytest

from qinfer.errors import InvalidRequest
from qinfer.labeling.mapping import Mapping
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, to_numpy

RESULTS = [
    {"type": "textarea", "from_name": "w", "to_name": "t", "text": "OUT"},
    {"type": "choices", "from_name": "c", "to_name": "t", "label": "OUT", "score": "S"},
]


def request(
    source: dict[str, Any],
    value: object,
    datatype: str = "BYTES",
    dims: tuple[int, ...] = (1,),
    *,
    batched: bool = True,
    files: dict[str, bytes] | None = None,
) -> Tensor:
    """Makes the one input of a model of one value."""
    mapping = Mapping(name="n", model="m", inputs={"X": {"field": "x", **source}}, results=RESULTS)
    spec = ModelSpec(
        name="m",
        backend="b",
        inputs=(TensorSpec(name="X", datatype=datatype, dims=dims),),
        outputs=(),
        max_batch_size=8 * batched,
    )
    (tensor,) = mapping.request({"id": 1, "data": {"x": value}}, spec, files or {}).inputs
    return tensor


def test_a_request_asks_for_what_is_used() -> None:
    """Only those outputs travel; version and priority are the mapping's."""
    mapping = Mapping(
        name="n", model="m", version=3, priority=2, inputs={"B": {"field": "b"}, "A": {"field": "$a"}}, results=RESULTS
    )
    spec = ModelSpec(
        name="m",
        backend="b",
        inputs=(TensorSpec(name="A", datatype="BYTES", dims=(1,)), TensorSpec(name="B", datatype="BYTES", dims=(1,))),
        outputs=(),
    )

    made = mapping.request({"data": {"a": "é", "b": 1.5}}, spec)

    assert (made.model, made.version, made.priority, made.outputs) == ("m", 3, 2, ("OUT", "S"))
    assert [(each.name, each.shape, to_numpy(each).tolist()) for each in made.inputs] == [
        ("A", (1,), ["é".encode()]),
        ("B", (1,), [b"1.5"]),
    ]


@pytest.mark.parametrize(
    ("dims", "batched", "value", "shape"),
    [
        ((1,), True, "a", (1, 1)),
        ((1,), False, "a", (1,)),
        ((-1,), True, ["a", "b"], (1, 2)),
        ((-1, 1), True, ["a", "b"], (1, 2, 1)),
        ((-1, -1), False, ["a", "b"], (1, 2)),
        ((2,), True, ["a", "b"], (1, 2)),
    ],
)
def test_text(dims: tuple[int, ...], batched: bool, value: object, shape: tuple[int, ...]) -> None:  # noqa: FBT001
    """One text, or a list of them, in the input's shape."""
    made = request({}, value, dims=dims, batched=batched)

    assert made.shape == shape
    assert to_numpy(made).ravel().tolist() == [b"a", b"b"][: len(value)]  # type: ignore[arg-type]  # both have one


@pytest.mark.parametrize(
    ("datatype", "dims", "value", "expected"),
    [
        ("FP32", (1,), 0.5, [[0.5]]),
        ("FP32", (2, 2), [[1, 2], [3, 4]], [[[1, 2], [3, 4]]]),
        ("FP32", (2, 2), [1, 2, 3, 4], [[[1, 2], [3, 4]]]),
        ("BF16", (1,), 1.5, [[1.5]]),
        ("INT8", (-1,), [-128, 127], [[-128, 127]]),
        ("INT64", (1,), 3.0, [[3]]),
        ("BOOL", (2,), [True, False], [[True, False]]),
        ("UINT64", (1,), 2**64 - 1, [[2**64 - 1]]),
        ("BYTES", (-1,), ["a", "b"], [[b"a", b"b"]]),
    ],
)
def test_numbers(datatype: str, dims: tuple[int, ...], value: object, expected: list[Any]) -> None:
    """Numbers and lists of them, in the input's datatype."""
    made = request({"kind": "tensor"}, value, datatype, dims)

    assert to_numpy(made).tolist() == expected
    assert made.datatype == datatype


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_bytes(prefix: str) -> None:
    """Base64, as data: URIs have it too; a vector of UINT8, or an element of BYTES."""
    text = prefix + base64.b64encode(b"\x00\xff\x01").decode()

    assert to_numpy(request({"kind": "bytes"}, text)).tolist() == [[b"\x00\xff\x01"]]
    vector = request({"kind": "bytes"}, text, "UINT8", (-1,))
    assert (vector.shape, to_numpy(vector).tolist()) == ((1, 3), [[0, 255, 1]])


def test_files() -> None:
    """The caller fetches what is named, each once."""
    mapping = Mapping(
        name="n",
        model="m",
        inputs={"X": {"field": "x.url", "kind": "file"}, "Y": {"field": "x.url", "kind": "file"}, "T": {"field": "t"}},
        results=RESULTS,
    )

    assert mapping.files({"data": {"x": {"url": "s3://a"}}}) == ("s3://a",)
    assert mapping.files({"data": {}}) == ()
    assert to_numpy(request({"kind": "file"}, "u", files={"u": b"abc"})).tolist() == [[b"abc"]]


@pytest.mark.parametrize(
    ("source", "datatype", "dims", "value", "said"),
    [
        ({}, "BYTES", (1,), None, "input 'X': field 'x' of the task's data is null"),
        ({"field": "x.url"}, "BYTES", (1,), {"url": None}, "field 'x.url' of the task's data is null"),
        ({"field": "x.url"}, "BYTES", (1,), None, "field 'x' of the task's data is null"),
        ({"field": "x.url"}, "BYTES", (1,), {}, "has no field 'x.url'; it has x"),
        ({}, "BYTES", (1,), {"a": 1}, "input 'X': its field holds {'a': 1}, not text"),
        ({}, "BYTES", (1,), True, "holds True, not text"),
        ({}, "BYTES", (1,), ["a", "b"], r"shape \[1\] can't have the 2 elements"),
        ({}, "BYTES", (1,), [], "can't have the 0 elements"),
        ({}, "FP32", (1,), "a", "kind text can't make it"),
        ({"kind": "tensor"}, "FP32", (1,), "a", "holds 'a', not numbers"),
        ({"kind": "tensor"}, "FP32", (2,), [1, [2]], "not numbers in even lists"),
        ({"kind": "tensor"}, "FP32", (1,), [], "not numbers in even lists"),
        ({"kind": "tensor"}, "FP32", (1,), 1e300, "which FP32 can't"),
        ({"kind": "tensor"}, "INT8", (1,), 200, "which INT8 can't"),
        ({"kind": "tensor"}, "UINT64", (1,), 2**70, "not numbers"),
        ({"kind": "tensor"}, "INT64", (1,), 0.5, "which INT64 can't"),
        ({"kind": "tensor"}, "INT64", (3,), [1, 2], r"shape \[3\] can't have the 2 elements"),
        ({"kind": "tensor"}, "BYTES", (1,), 1, "not text in even lists"),
        ({"kind": "bytes"}, "BYTES", (1,), "%%%", "not base64"),
        ({"kind": "bytes"}, "BYTES", (1,), "data:text/plain,abc", "not base64"),
        ({"kind": "bytes"}, "FP32", (1,), "AAAA", "kind bytes can't make it"),
        ({"kind": "bytes"}, "UINT8", (2,), "AAAA", "can't have the 3 elements"),
        ({"kind": "file"}, "BYTES", (1,), "u", "was not fetched"),
        ({"kind": "file"}, "BYTES", (1,), 7, "holds 7, not text"),
    ],
)
def test_what_does_not_fit(
    source: dict[str, Any], datatype: str, dims: tuple[int, ...], value: object, said: str
) -> None:
    """The message names input or field, and the value."""
    with pytest.raises(InvalidRequest, match=said):
        request(source, value, datatype, dims)


def test_inputs_that_may_be_left_out() -> None:
    """An optional input whose field is missing is; a field that the model does not know is refused."""
    spec = ModelSpec(
        name="m", backend="b", inputs=(TensorSpec(name="X", datatype="FP32", dims=(1,), optional=True),), outputs=()
    )
    source = {"field": "x", "kind": "tensor"}

    known = Mapping(name="n", model="m", inputs={"X": source}, results=RESULTS)
    assert known.request({"data": {}}, spec).inputs == ()
    with pytest.raises(InvalidRequest, match="has no input 'Y'"):
        Mapping(name="n", model="m", inputs={"Y": source}, results=RESULTS).request({"data": {"x": 1}}, spec)
    with pytest.raises(InvalidRequest, match="no object 'data'"):
        known.request(
            {}, ModelSpec(name="m", backend="b", inputs=(TensorSpec(name="X", datatype="FP32", dims=(1,)),), outputs=())
        )
