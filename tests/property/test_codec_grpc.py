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
from qinfer.wire.kserve_grpc import DecodedRequest, Repetitions, cut_out, decode_infer, encode_infer, parse_infer
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


def _step(kinds: dict[str, tuple[str, Any]], order: list[str], data: bytes) -> bytes:
    """Returns the message of a step whose parameters are written in this order."""
    tensor = pb.ModelInferRequest(model_name="m", model_version="3")
    tensor.inputs.add(name="x", datatype="UINT8", shape=[1, len(data)])
    rest = pb.ModelInferRequest(raw_input_contents=[data])
    rest.outputs.add(name="y")
    parts = [pb.ModelInferRequest(parameters={name: pb.InferParameter(**dict([kinds[name]]))}) for name in order]
    return b"".join(part.SerializeToString() for part in (tensor, *parts, rest))


def _told(decode: Any, blob: bytes) -> object:
    try:
        return decode(blob)
    except RequestError as error:
        return type(error), error.message


def _decode(blob: bytes) -> Any:
    return decode_infer(parse_infer(blob), NO_REGIONS)


_NUMBERS = st.one_of(st.integers(-1, 200), st.integers(2**62, 2**63 - 1))
_IDS = st.one_of(
    st.tuples(st.just("int64_param"), _NUMBERS),
    st.tuples(st.just("uint64_param"), st.integers(2**63, 2**64 - 1)),
    st.tuples(st.just("string_param"), st.text(max_size=3)),
)
_STEPS = st.fixed_dictionaries(
    {"sequence_id": _IDS},
    optional={
        "sequence_start": st.tuples(st.just("bool_param"), st.booleans()),
        "sequence_end": st.tuples(st.just("bool_param"), st.booleans()),
        "qinfer_step": st.tuples(st.just("int64_param"), st.one_of(st.integers(-1, 300), st.just(2**53))),
        "own": st.tuples(st.just("bool_param"), st.booleans()),
    },
)


@given(st.lists(st.tuples(_STEPS, st.randoms(use_true_random=False), st.binary(min_size=1, max_size=2)), max_size=9))
def test_steps_are_decoded_from_what_they_share_as_protobuf_decodes_them(steps: list[Any]) -> None:
    """Whatever came before, in whichever order clients write the parameters."""
    repetitions = Repetitions()
    for kinds, chance, data in [step for step in steps for _ in range(3)]:
        order = list(kinds)
        chance.shuffle(order)
        blob = _step(kinds, order, data)
        found = repetitions.decode(blob)
        if isinstance(exact := _told(_decode, blob), DecodedRequest):
            assert found in (None, exact)
            parsed = parse_infer(blob)
            repetitions.learn(blob, parsed, decode_infer(parsed, NO_REGIONS))
        else:
            assert found is None


@given(_IDS.filter(lambda one: one[1] not in (0, "")), st.integers(1, 300), st.data())
def test_a_damaged_step_is_read_as_protobuf_reads_it(of: Any, number: int, data: st.DataObject) -> None:
    """Also if the message that it was made of is known."""
    kinds = {"qinfer_step": ("int64_param", number), "sequence_id": of, "sequence_start": ("bool_param", True)}
    blob, repetitions = _step(kinds, list(kinds), b"data"), Repetitions()
    for _ in range(2):
        parsed = parse_infer(blob)
        repetitions.learn(blob, parsed, decode_infer(parsed, NO_REGIONS))
    assert repetitions.decode(blob) == _decode(blob)

    position, byte = data.draw(st.integers(0, len(blob) - 1)), data.draw(st.integers(0, 255))
    damaged = blob[:position] + bytes([byte]) + blob[position + 1 :]

    assert (found := repetitions.decode(damaged)) is None or found == _decode(damaged)


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
