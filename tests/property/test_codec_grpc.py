"""Infer messages under Hypothesis: values survive, and rubbish is a `RequestError` at worst."""

import contextlib
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tritonclient.grpc import InferInput, InferResult
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, RequestError
from qinfer.tensors import DATATYPES, from_numpy, to_numpy
from qinfer.wire.kserve_grpc import cut_out, decode_infer, encode_infer, parse_infer
from qinfer.wire.outputs import NO_REGIONS, OutputPlan

NUMPY = {d.name: np.dtype(d.numpy) for d in DATATYPES.values() if d.numpy}
TYPED = {
    "b": "bool_contents", "i1": "int_contents", "i2": "int_contents", "i4": "int_contents", "i8": "int64_contents",
    "u1": "uint_contents", "u2": "uint_contents", "u4": "uint_contents", "u8": "uint64_contents",
    "f4": "fp32_contents", "f8": "fp64_contents",
}  # fmt: skip
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Any array of any datatype, scalars and empty ones included."""
    name = draw(st.sampled_from([*NUMPY, "BYTES"]))
    if name == "BYTES":
        return draw(npst.arrays(np.dtype(object), SHAPES, elements=st.binary(max_size=8)))
    return draw(npst.arrays(NUMPY[name], SHAPES))


def _same(one: Any, other: Any) -> bool:
    if one.dtype == object:
        return one.shape == other.shape and [bytes(e) for e in one.ravel()] == [bytes(e) for e in other.ravel()]
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@given(arrays(), st.integers(0, 20_000))
def test_arrays_survive_a_round_trip(array: Any, padding: int) -> None:
    """Array → the client's request → tensor → reply → the client's array is the identity, small or large."""
    tensor = from_numpy("x", array)
    request = pb.ModelInferRequest(model_name="m", id="i" * padding)  # large ones are cut up before they are parsed
    given_input = InferInput("x", list(array.shape), tensor.datatype)
    given_input.set_data_from_numpy(array)
    request.inputs.append(given_input._get_tensor())
    request.raw_input_contents.append(given_input._get_content() or b"")

    decoded = decode_infer(parse_infer(request.SerializeToString()), NO_REGIONS).request
    response = Response(request_id="r", model="m", version=1, outputs=decoded.inputs)
    reply = b"".join(encode_infer(response, "", OutputPlan(), NO_REGIONS))

    assert _same(to_numpy(decoded.inputs[0]), array)
    read = InferResult(pb.ModelInferResponse.FromString(reply)).as_numpy("x")
    assert _same(np.asarray(read), array)


@given(arrays().filter(lambda array: array.dtype != np.float16))
def test_arrays_survive_as_typed_contents(array: Any) -> None:
    """Array → typed contents → tensor is the identity; FP16 has none."""
    tensor = from_numpy("x", array)
    field = "bytes_contents" if array.dtype == object else TYPED[array.dtype.str[1:].replace("b1", "b")]
    contents = pb.InferTensorContents(**{field: array.ravel().tolist()})
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype=tensor.datatype, shape=array.shape, contents=contents)

    decoded = decode_infer(parse_infer(request.SerializeToString()), NO_REGIONS).request

    assert _same(to_numpy(decoded.inputs[0]), array)


@given(st.binary(max_size=200), st.booleans())
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", True)
def test_rubbish_is_refused(blob: bytes, is_large: bool) -> None:  # noqa: FBT001  # drawn
    """No message makes the decoder fail with anything but an error of ours."""
    if is_large:
        blob = blob + pb.ModelInferRequest(id="x" * 20_000).SerializeToString()
    with contextlib.suppress(RequestError):
        decode_infer(parse_infer(blob), NO_REGIONS)


@given(st.lists(st.binary(max_size=300), max_size=5), st.text(max_size=20), st.data())
def test_what_is_cut_out_is_all_there(raw: list[bytes], text: str, data: st.DataObject) -> None:
    """A field that is cut out and the rest make the message; a message that is cut off is noticed or is shorter."""
    message = pb.ModelInferRequest(model_name=text, raw_input_contents=raw)
    blob = message.SerializeToString()

    rest, found = cut_out(blob, 7)

    assert [bytes(value) for value in found] == raw
    assert pb.ModelInferRequest.FromString(rest) == pb.ModelInferRequest(model_name=text)
    with contextlib.suppress(InvalidRequest):
        shorter, _ = cut_out(blob[: data.draw(st.integers(0, len(blob)))], 7)
        assert len(shorter) <= len(blob)
