"""Infer requests and responses as JSON and binary data, against the protocol's texts and the real client."""

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from qinfer.core.messages import OutgoingRequest, Response, SequenceFlags
from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.tensors import DATATYPES, Tensor, from_numpy, pack_bytes, to_numpy
from qinfer.wire.json_pieces import JsonBounds
from qinfer.wire.kserve_json import _decode_parts, _parsed, decode_infer, elements, encode_infer
from qinfer.wire.outputs import NO_REGIONS, OutputPlan

JSON_PLAN = OutputPlan()


def _input(datatype: str = "FP32", shape: Any = (2,), **more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": shape, "datatype": datatype, **more}


def _body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def _decode(body: bytes, json_length: int | None = None) -> tuple[OutgoingRequest, OutputPlan]:
    return decode_infer(body, json_length, "m", 0)


def _data(body: bytes) -> list[Any]:
    values: list[Any] = to_numpy(_decode(body)[0].inputs[0]).tolist()
    return values


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 2**16 - 1]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("INT16", [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FP32", [0.5, -3.4028234663852886e38]),
        ("FP64", [0.1, 1.7976931348623157e308]),
    ],
)
def test_json_data_of_every_datatype(datatype: str, values: list[Any]) -> None:
    """The extremes of each datatype pass through JSON both ways."""
    assert _data(_body(_input(datatype, data=values))) == values

    tensor = _decode(_body(_input(datatype, data=values)))[0].inputs[0]
    reply = encode_infer(Response(request_id="r", model="m", version=1, outputs=(tensor,)), "", JSON_PLAN)
    assert json.loads(reply.body)["outputs"][0]["data"] == values


def test_json_strings() -> None:
    """BYTES elements are UTF-8 strings, both ways."""
    body = _body(_input("BYTES", data=["", "é\u0000\U0001f600"]))

    tensor = _decode(body)[0].inputs[0]

    assert tensor.data == pack_bytes([b"", "é\u0000\U0001f600".encode()])
    reply = encode_infer(Response(request_id="r", outputs=(tensor,)), "", JSON_PLAN)
    assert json.loads(reply.body)["outputs"][0]["data"] == ["", "é\u0000\U0001f600"]


@pytest.mark.parametrize(
    "data", [[[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [1, 2, 3, 4], [[1, 2, 3, 4]], [1, [2, [3, 4]]]]
)
def test_nested_data_is_row_major(data: list[Any]) -> None:
    """Nested data means its elements in order; the nesting itself need not match the shape (nor does with Triton)."""
    assert _data(_body(_input("INT32", shape=[2, 2], data=data))) == [[1, 2], [3, 4]]


def test_the_order_of_fields_does_not_matter() -> None:
    """The datatype may come after the data."""
    assert _data(b'{"inputs":[{"data":[1,2.5],"datatype":"FP32","shape":[2],"name":"x"}]}') == [1.0, 2.5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NaN", float("nan")),
        ("-NaN", float("nan")),
        ("Inf", float("inf")),
        ("Infinity", float("inf")),
        ("-Inf", float("-inf")),
        ("-Infinity", float("-inf")),
    ],
)
def test_special_numbers_are_read_as_triton_reads_them(text: str, expected: float) -> None:
    """The words of rapidjson for NaN and infinity are numbers; nothing within strings is touched."""
    body = b'{"id":"NaN \\" Inf","inputs":[{"name":"Inf","shape":[2],"datatype":"FP32","data":[1,%b]}]}' % text.encode()

    request, _ = _decode(body)

    assert (request.client_id, request.inputs[0].name) == ('NaN " Inf', "Inf")
    assert np.array_equal(to_numpy(request.inputs[0]), np.array([1, expected], "f4"), equal_nan=True)


def test_special_numbers_are_written_as_triton_writes_them() -> None:
    """NaN and infinities are words in the reply; the text null in a string stays what it is."""
    outputs = (
        from_numpy("y", np.array([1.5, np.nan, np.inf, -np.inf], "f4")),
        from_numpy("s", np.array(["null"])),
        from_numpy("i", np.array([7])),
    )

    body = encode_infer(Response(request_id="r", outputs=outputs), "", JSON_PLAN).body

    assert b"[1.5,NaN,Infinity,-Infinity]" in body
    assert b'["null"]' in body
    assert b"[7]" in body


def test_every_fp32_survives_a_client_that_parses_doubles() -> None:
    """The printed doubles give the same FP32 back, also where the shorter FP32 text would not."""
    bits = np.random.default_rng(1).integers(0, 0x7F800000, 5_000, dtype="u4")
    values = np.append(bits.view("f4"), np.float32(7.038531e-26))

    body = encode_infer(Response(request_id="r", outputs=(from_numpy("y", values),)), "", JSON_PLAN).body

    assert np.array_equal(np.array(json.loads(body)["outputs"][0]["data"]).astype("f4"), values)


def test_empty_tensors() -> None:
    """A shape with a zero has no bytes, whatever the data says (Triton does not look at it)."""
    assert _decode(_body(_input(shape=[0, 4], data=[])))[0].inputs[0].data == b""
    assert _decode(_body(_input(shape=[0, 4], data=["ignored"])))[0].inputs[0].data == b""


def test_the_request_is_carried_over() -> None:
    """Id, parameters and outputs land where they belong."""
    body = _body(
        _input(data=[1, 2]),
        id="mine",
        parameters={
            "priority": 3,
            "timeout": 2_500_000,
            "sequence_id": 9,
            "sequence_start": True,
            "a": "text",
            "b": 1,
            "c": 0.5,
            "d": False,
        },
        outputs=[{"name": "y"}, {"name": "z", "parameters": {"binary_data": True, "custom": 1}}],
    )

    request, plan = decode_infer(body, None, "m", 4)

    assert request == OutgoingRequest(
        model="m",
        version=4,
        client_id="mine",
        inputs=(Tensor("x", "FP32", (2,), struct.pack("<2f", 1, 2)),),
        outputs=("y", "z"),
        parameters={"a": "text", "b": 1, "c": 0.5, "d": False},
        priority=3,
        timeout_s=2.5,
        sequence=SequenceFlags(9, start=True),
    )
    assert (plan.is_binary("y"), plan.is_binary("z")) == (False, True)


def test_a_step_of_a_sequence_has_a_number() -> None:
    """It is not told to the model."""
    request, _ = _decode(_body(_input(data=[1, 2]), parameters={"sequence_id": 9, "qinfer_step": 2**53 - 1, "a": 1}))

    assert request.sequence == SequenceFlags(9, step=2**53 - 1)
    assert request.parameters == {"a": 1}


def test_no_sequence_is_what_zero_means() -> None:
    """Sequence id 0 or "" is no sequence; a string is one."""
    assert _decode(_body(_input(data=[1, 2]), parameters={"sequence_id": 0}))[0].sequence is None
    assert _decode(_body(_input(data=[1, 2]), parameters={"sequence_id": ""}))[0].sequence is None
    assert _decode(_body(_input(data=[1, 2]), parameters={"sequence_id": "s"}))[0].sequence == SequenceFlags("s")


def test_binary_output_default_and_overrides() -> None:
    """`binary_data_output` is the default of every output, `binary_data` its own."""
    _, plan = _decode(
        _body(
            _input(data=[1, 2]),
            parameters={"binary_data_output": True},
            outputs=[{"name": "y"}, {"name": "z", "parameters": {"binary_data": False}}],
        )
    )

    assert (plan.is_binary("y"), plan.is_binary("z"), plan.is_binary("other")) == (True, False, True)


def test_binary_inputs_are_views_into_the_body() -> None:
    """Several binary inputs follow the JSON in order, a JSON input between them; none is copied."""
    header = _body(
        _input("INT32", parameters={"binary_data_size": 8}),
        _input("FP32", data=[1, 2]) | {"name": "j"},
        _input("BYTES", shape=[1], parameters={"binary_data_size": 5}) | {"name": "s"},
        _input("FP16", shape=[0], parameters={"binary_data_size": 0}) | {"name": "e"},
    )
    body = header + struct.pack("<2i", 1, -2) + pack_bytes([b"\xff"])

    x, j, s, e = _decode(body, len(header))[0].inputs

    assert (to_numpy(x).tolist(), to_numpy(j).tolist(), to_numpy(s).tolist()) == ([1, -2], [1.0, 2.0], [b"\xff"])
    assert e.nbytes == 0
    assert isinstance(x.data, memoryview)
    assert x.data.obj is body


def test_replies_name_their_fields_in_tritons_order() -> None:
    """The whole JSON text of a reply, mixed JSON and binary."""
    outputs = (
        from_numpy("y", np.array([[1.5, 2]], "f4")),
        from_numpy("z", np.array([1, 2], "i4")),
        from_numpy("b", np.array([True, False])),
    )
    response = Response(request_id="r", model="m", version=3, outputs=outputs)

    reply = encode_infer(response, "mine", OutputPlan(binary=False, overrides={"z": True}))

    text = (
        b'{"id":"mine","model_name":"m","model_version":"3","outputs":['
        b'{"name":"y","datatype":"FP32","shape":[1,2],"data":[1.5,2.0]},'
        b'{"name":"z","datatype":"INT32","shape":[2],"parameters":{"binary_data_size":8}},'
        b'{"name":"b","datatype":"BOOL","shape":[2],"data":[true,false]}]}'
    )
    assert reply.body == text + struct.pack("<2i", 1, 2)
    assert reply.json_length == len(text)


def test_binary_outputs_without_elements_leave_all_in_json() -> None:
    """Nothing follows the JSON, so that the reply says nothing of its length, as Triton's."""
    empty = Response(request_id="r", model="m", version=1, outputs=(Tensor("y", "BYTES", (1, 0), b""),))

    reply = encode_infer(empty, "", OutputPlan(binary=True))

    assert reply.json_length is None
    assert reply.body.endswith(b'"shape":[1,0],"parameters":{"binary_data_size":0}}]}')


def test_an_empty_id_is_left_out() -> None:
    """Triton omits `id` when the request had none."""
    reply = encode_infer(Response(request_id="r", model="m", version=1), "", JSON_PLAN)

    assert reply.body == b'{"model_name":"m","model_version":"1","outputs":[]}'
    assert reply.json_length is None


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (Tensor("y", "FP16", (1,), bytes(2)), InvalidRequest, "sending FP16 data via JSON is not supported"),
        (Tensor("y", "BF16", (1,), bytes(2)), InvalidRequest, "sending BF16 data via JSON is not supported"),
        (Tensor("y", "BYTES", (1,), pack_bytes([b"\xff"])), InvalidRequest, "'binary_data': true"),
        (Tensor("y", "BYTES", (2,), pack_bytes([b"a"])), OutputMismatch, "output tensor shape does not match"),
        (Tensor("y", "FP32", (2,), bytes(7)), OutputMismatch, "output tensor shape does not match"),
    ],
)
def test_outputs_that_json_cannot_carry(tensor: Tensor, error: type[Exception], text: str) -> None:
    """Such outputs are refused by name, and go through as binary data."""
    with pytest.raises(error, match=text):
        encode_infer(Response(request_id="r", outputs=(tensor,)), "", JSON_PLAN)

    assert encode_infer(Response(request_id="r", outputs=(tensor,)), "", OutputPlan(binary=True)).json_length


def test_binary_outputs_may_be_apart() -> None:
    """Tensors apart are not copied; joined, they are the usual reply."""
    outputs = (Tensor("y", "UINT8", (3,), b"abc"), Tensor("e", "UINT8", (0,), b""), Tensor("z", "UINT8", (1,), b"d"))
    response = Response(request_id="r", model="m", version=1, outputs=outputs)

    whole = encode_infer(response, "", OutputPlan(binary=True))
    apart = encode_infer(response, "", OutputPlan(binary=True), apart=True)

    assert list(apart.tensors) == [b"abc", b"d"]
    assert (b"".join((apart.body, *apart.tensors)), apart.json_length) == (whole.body, whole.json_length)


ARRAYS = {
    "FP32": np.array([[0.1, -2.5, 3e10]], "f4"),
    "FP64": np.array([[0.1, -2.5, 3e100]], "f8"),
    "FP16": np.array([[0.1, -2.5]], "f2"),
    "INT32": np.array([[1, -2], [3, 4]], "i4"),
    "UINT64": np.array([2**64 - 1], "u8"),
    "BOOL": np.array([[True], [False]]),
    "BYTES": np.array([["a", "é", ""]], dtype=object),
    "BF16": np.array([[1.0, -2.5]], "f4"),
}


@pytest.mark.parametrize("binary", [True, False])
def test_requests_of_the_real_client(binary: bool) -> None:  # noqa: FBT001  # a test parameter
    """What `tritonclient` encodes decodes to the arrays it was given, all inputs in one request."""
    inputs = []
    for datatype, array in ARRAYS.items():
        if datatype in ("FP16", "BF16") and not binary:
            continue
        tensor = InferInput(datatype.lower(), list(array.shape), datatype)
        given = array.astype(ml_dtypes.bfloat16) if datatype == "BF16" else array  # what the client takes since 2.70
        inputs.append(tensor.set_data_from_numpy(given, binary_data=binary))
    outputs = [InferRequestedOutput("y", binary_data=binary)]

    body, json_length = InferenceServerClient.generate_request_body(
        inputs, outputs=outputs, request_id="42", priority=1, timeout=7, parameters={"k": "v"}
    )
    request, plan = _decode(body, json_length)

    assert (request.client_id, request.outputs, plan.is_binary("y")) == ("42", ("y",), binary)
    assert (request.priority, request.timeout_s, request.parameters) == (1, 7e-6, {"k": "v"})
    assert len(request.inputs) == len(inputs)
    for tensor in request.inputs:
        expected = ARRAYS[tensor.datatype]
        if tensor.datatype == "BYTES":
            expected = np.array([e.encode() for e in expected.ravel()], dtype=object).reshape(expected.shape)
        assert np.array_equal(to_numpy(tensor), expected)


@pytest.mark.parametrize("binary", [True, False])
def test_replies_for_the_real_client(binary: bool) -> None:  # noqa: FBT001  # a test parameter
    """`tritonclient` reads every output back from what we encode."""
    outputs = tuple(
        from_numpy(datatype.lower(), array, "BF16" if datatype == "BF16" else None)
        for datatype, array in ARRAYS.items()
        if binary or datatype not in ("FP16", "BF16")
    )
    reply = encode_infer(Response(request_id="r", model="m", version=1, outputs=outputs), "42", OutputPlan(binary))

    result = InferenceServerClient.parse_response_body(reply.body, header_length=reply.json_length)

    assert result.get_response()["id"] == "42"
    for tensor in outputs:
        expected = to_numpy(tensor)
        got = result.as_numpy(tensor.name)
        if tensor.datatype == "BYTES" and not binary:
            got = np.array([e.encode() for e in got.ravel()], dtype=object).reshape(got.shape)
        assert np.array_equal(got, expected), tensor.name


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "FP32"])
@pytest.mark.parametrize("count", [65_536, 65_537, 200_000])
def test_long_outputs_are_written_in_pieces_of_which_none_is_lost(datatype: str, count: int) -> None:
    values = np.arange(count).astype(DATATYPES[datatype].numpy)

    text = elements(from_numpy("y", values))

    assert json.loads(text) == values.tolist()


def test_a_long_output_with_special_numbers() -> None:
    values = np.zeros(200_000, "<f4")
    values[100_000] = np.nan

    assert elements(from_numpy("y", values)).count(b"NaN") == 1
    assert elements(from_numpy("y", values), strict=True).count(b"null") == 1


LARGE = 20_000


def _binary(size: int = LARGE, **parameters: Any) -> dict[str, Any]:
    return _input("UINT8", (size,), parameters={"binary_data_size": size, **parameters})


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"id": "mine"},
        {"parameters": {"binary_data_output": True}},
        {"parameters": {"strict_json": True}},
        {"parameters": {"priority": 2, "timeout": 5_000_000, "mine": 1}},
        {"parameters": {"sequence_id": 5, "sequence_start": True}},
        {"outputs": [{"name": "y"}]},
        {"outputs": [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}]},
        {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        {"outputs": [{"name": "y", "parameters": {"binary_data": True}}], "parameters": {"binary_data_output": True}},
    ],
)
@pytest.mark.parametrize("inputs", [(_binary(),), (_binary(8), _binary()), (_input(data=[1.0, 2.0]), _binary())])
def test_a_text_that_is_repeated_before_large_tensors_says_the_same(
    inputs: tuple[dict[str, Any], ...], said: dict[str, Any]
) -> None:
    """Each request has its own bytes; what one does with its fields does not reach the next."""
    text = _body(*inputs, **said)
    size = sum(one.get("parameters", {}).get("binary_data_size", 0) for one in inputs)
    seen = []
    for number in range(3):
        tail = bytes([number]) * size
        request, plan = _decode(text + tail, len(text))
        expected = _decode_parts((None, _parsed(text, 100)), tail, "m", 0, JsonBounds(), NO_REGIONS)
        assert (request, plan) == expected
        assert request.inputs[-1].data == tail[-LARGE:]
        assert type(request.sequence) is type(expected[0].sequence)
        seen.append(request)
        request.parameters, request.timeout_s = {"left": "behind"}, 3.0
    assert len({id(one) for one in seen}) == 3


@pytest.mark.parametrize("left", [-1, 1])
def test_a_repeated_text_with_other_bytes_is_refused(left: int) -> None:
    """Also after it was seen with the right ones."""
    text = _body(_binary())
    for _ in range(2):
        _decode(text + bytes(LARGE), len(text))

    with pytest.raises(InvalidRequest, match="additional"):
        _decode(text + bytes(LARGE + left), len(text))
