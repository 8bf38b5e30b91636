"""Infer requests and responses as protobuf, against the protocol's texts and the real client."""

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc._utils import _get_inference_request

from qinfer.core.messages import Response, SequenceFlags
from qinfer.errors import InvalidRequest, UnsupportedFeature
from qinfer.tensors import Bytes, Tensor, from_numpy, pack_bytes, to_numpy
from qinfer.wire import kserve_grpc
from qinfer.wire.kserve_grpc import (
    DecodedRequest,
    Repetitions,
    decode_infer,
    encode_infer,
    encode_streamed,
    encode_streamed_error,
    parse_infer,
)
from qinfer.wire.outputs import NO_REGIONS, OutputPlan, Special

PLAIN = OutputPlan()


class Memory:
    """A region `r` of 64 bytes."""

    def __init__(self) -> None:
        self.data = bytearray(range(64))

    def check(self, name: str, offset: int, byte_size: int) -> None:
        assert name == "r"
        if offset + byte_size > 64:
            raise InvalidRequest("out of bounds")

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        self.check(name, offset, byte_size)
        return memoryview(bytes(self.data[offset : offset + byte_size]))

    def write(self, name: str, offset: int, data: Bytes) -> None:
        self.data[offset : offset + len(data)] = data


def _request(**fields: Any) -> Any:
    return pb.ModelInferRequest(model_name="m", **fields)


def _input(datatype: str = "FP32", shape: Any = (2,), **more: Any) -> Any:
    return pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape, **more)


def _contents(**fields: Any) -> Any:
    return pb.InferTensorContents(**fields)


def _decode(message: Any, regions: Any = NO_REGIONS) -> DecodedRequest:
    return decode_infer(parse_infer(message.SerializeToString()), regions)


def _client_request(inputs: list[InferInput], **options: Any) -> Any:
    defaults = {
        "model_name": "m", "model_version": "", "request_id": "", "outputs": None, "sequence_id": 0,
        "sequence_start": False, "sequence_end": False, "priority": 0, "timeout": None,
    }  # fmt: skip
    return _get_inference_request(inputs=inputs, **{**defaults, "parameters": None, **options})


def _reply(response: Response, client_id: str = "", plan: OutputPlan = PLAIN, regions: Any = NO_REGIONS) -> Any:
    return pb.ModelInferResponse.FromString(b"".join(encode_infer(response, client_id, plan, regions)))


def _response(*outputs: Tensor, **more: Any) -> Response:
    return Response(request_id="r", model="m", version=3, outputs=outputs, **more)


@pytest.mark.parametrize("size", [4, 40_000])
def test_a_request_of_the_client_arrives_whole(size: int) -> None:
    """What tritonclient builds is read: small requests, and large ones whose tensors are cut out before parsing."""
    array = np.arange(size, dtype=np.float32).reshape(1, size)
    first, second = InferInput("x", [1, size], "FP32"), InferInput("t", [2], "BYTES")
    first.set_data_from_numpy(array)
    second.set_data_from_numpy(np.array([b"a", b""], dtype=object))
    outputs = [InferRequestedOutput("y"), InferRequestedOutput("z", class_count=3)]

    decoded = _decode(
        _client_request(
            [first, second],
            request_id="i",
            model_version="2",
            outputs=outputs,
            sequence_id=7,
            sequence_start=True,
            priority=2,
            timeout=1500,
            parameters={"a": 1, "b": "c", "d": True, "e": 0.5},
        )
    )

    request = decoded.request
    assert (request.model, decoded.version, request.client_id) == ("m", "2", "i")
    assert np.array_equal(to_numpy(request.inputs[0]), array)
    assert to_numpy(request.inputs[1]).tolist() == [b"a", b""]
    assert request.outputs == ("y", "z")
    assert decoded.plan == OutputPlan(special={"z": Special(classes=3)})
    assert (request.sequence, request.priority, request.timeout_s) == (SequenceFlags(7, start=True), 2, 0.0015)
    assert request.parameters == {"a": 1, "b": "c", "d": True, "e": 0.5}
    assert not decoded.empty_final


def test_large_tensors_are_not_copied() -> None:
    """The inputs of a large request are views into the message that came from the network."""
    blob = _request(inputs=[_input(shape=[10_000])], raw_input_contents=[bytes(40_000)]).SerializeToString()

    data = decode_infer(parse_infer(blob), NO_REGIONS).request.inputs[0].data

    assert isinstance(data, memoryview)
    assert data.obj is blob


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -3.4028234663852886e38]),
        ("FP64", "fp64_contents", [0.1, 1.7976931348623157e308]),
        ("BYTES", "bytes_contents", [b"\xff", b""]),
    ],
)
def test_typed_contents_of_every_datatype(datatype: str, field: str, values: list[Any]) -> None:
    """The extremes of each datatype pass through its typed field."""
    decoded = _decode(_request(inputs=[_input(datatype, contents=_contents(**{field: values}))]))

    assert to_numpy(decoded.request.inputs[0]).tolist() == values


@pytest.mark.parametrize(
    ("datatype", "field", "numpy"),
    [("INT16", "int_contents", "<i2"), ("UINT64", "uint64_contents", "<u8"), ("FP32", "fp32_contents", "<f4")],
)
def test_typed_contents_of_many_elements(datatype: str, field: str, numpy: str) -> None:
    """They are converted in pieces, of which none is lost."""
    values = np.arange(150_000).astype(numpy)
    contents = _contents(**{field: values.tolist()})
    decoded = _decode(_request(inputs=[_input(datatype, shape=[150_000], contents=contents)]))

    assert bytes(decoded.request.inputs[0].data) == values.tobytes()


def test_fields_that_are_not_known_do_not_count_as_contents() -> None:
    """A newer client may send them, before or behind those that are known."""
    known, unknown = _contents(fp32_contents=[1.5, 2]).SerializeToString(), b"\x78\x05"
    for blob in (known + unknown, unknown + known):
        decoded = _decode(_request(inputs=[_input(contents=pb.InferTensorContents.FromString(blob))]))

        assert to_numpy(decoded.request.inputs[0]).tolist() == [1.5, 2]


def test_a_typed_number_too_large_keeps_its_low_bytes() -> None:
    """As with Triton, which copies them."""
    decoded = _decode(_request(inputs=[_input("UINT8", contents=_contents(uint_contents=[258, 1]))]))

    assert decoded.request.inputs[0].data == b"\x02\x01"


def _with_parameters(**parameters: Any) -> Any:
    values = {name: pb.InferParameter(**{kind: value}) for name, (kind, value) in parameters.items()}
    return _request(inputs=[_input(contents=_contents())], parameters=values)


@pytest.mark.parametrize("kind", ["int64_param", "uint64_param"])
def test_both_kinds_of_integers_are_taken(kind: str) -> None:
    """Clients differ in which they send."""
    request = _decode(
        _with_parameters(
            priority=(kind, 1), timeout=(kind, 5), sequence_id=(kind, 9), qinfer_step=(kind, 3), n=(kind, 4)
        )
    ).request

    assert (request.priority, request.timeout_s, request.sequence) == (1, 5e-6, SequenceFlags(9, step=3))
    assert request.parameters == {"n": 4}


def test_the_final_response_of_a_decoupled_model_can_be_asked_for() -> None:
    """The one parameter of Triton's own that clients may send."""
    assert _decode(_with_parameters(triton_enable_empty_final_response=("bool_param", True))).empty_final


RAW = {"raw_input_contents": [bytes(8)]}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (_request(inputs=[_input()]), "unable to find data for input tensor 'x' for model 'm' in request."),
        (
            _request(inputs=[_input(), _input()], **RAW),
            "unable to find data for input tensor 'x' for model 'm' in request.",
        ),
        (
            _request(inputs=[_input(contents=_contents(fp32_contents=[1, 2]))], **RAW),
            "contents field must not be specified when using raw_input_contents for 'x' for model 'm'",
        ),
        (_request(**RAW), "unexpected additional input data for model 'm'"),
        (
            _request(inputs=[_input("FP16", contents=_contents(fp32_contents=[1, 2]))]),
            "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'FP32', "
            "expected datatype 'FP16'",
        ),
        (
            _request(inputs=[_input(contents=_contents(fp32_contents=[1], fp64_contents=[1]))]),
            "unexpected explicit tensor data for input tensor 'x' for model 'm', binary data was already supplied.",
        ),
        (
            _with_parameters(sequence_id=("bool_param", True)),
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            _with_parameters(sequence_start=("int64_param", 1)),
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        (
            _with_parameters(sequence_id=("int64_param", 1), qinfer_step=("string_param", "1")),
            "invalid value type for 'qinfer_step' parameter, expected int64_param.",
        ),
        (
            _with_parameters(sequence_id=("int64_param", 1), qinfer_step=("int64_param", 0)),
            "parameter 'qinfer_step' is '0'; number the requests of a sequence 1, 2, …",
        ),
        (
            _with_parameters(qinfer_step=("int64_param", 1)),
            "parameter 'qinfer_step' numbers the requests of a sequence: send 'sequence_id' with it",
        ),
        (_with_parameters(priority=("int64_param", -1)), "invalid value for 'priority', expected value >= 0."),
        (_with_parameters(timeout=("string_param", "1")), "invalid value type for 'timeout' parameter, expected int64"),
        (_with_parameters(timeout=("int64_param", -1)), "invalid value for 'timeout', expected value >= 0."),
        (
            _with_parameters(triton_x=("int64_param", 1)),
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
            "with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
        (
            _with_parameters(triton_enable_empty_final_response=("int64_param", 1)),
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
        (
            _with_parameters(big=("uint64_param", 2**63)),
            "invalid value type for 'big' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            _request(inputs=[_input()], parameters={"none": pb.InferParameter()}, **RAW),
            "invalid value type for 'none' parameter, expected int64_param, bool_param, or string_param.",
        ),
    ],
)
def test_what_is_wrong_is_told_in_tritons_words(message: Any, text: str) -> None:
    """Clients and upstream's tests look for these texts."""
    with pytest.raises(InvalidRequest) as error:
        _decode(message)

    assert error.value.message.startswith(text)


def _placed(kind: Any = pb.ModelInferRequest.InferInputTensor, **parameters: Any) -> Any:
    values = {f"shared_memory_{name}": pb.InferParameter(**value) for name, value in parameters.items()}
    more = {"datatype": "UINT8", "shape": [4]} if kind is pb.ModelInferRequest.InferInputTensor else {}
    return kind(name="x", parameters=values, **more)


WHERE = {"region": {"string_param": "r"}, "offset": {"int64_param": 8}, "byte_size": {"int64_param": 4}}


def test_inputs_in_shared_memory_are_skipped_in_the_raw_contents() -> None:
    """The data of the others follow one another."""
    message = _request(inputs=[_placed(**WHERE), _input("UINT8")], raw_input_contents=[b"\x01\x02"])

    first, second = _decode(message, Memory()).request.inputs

    assert (bytes(first.data), bytes(second.data)) == (bytes([8, 9, 10, 11]), b"\x01\x02")


def test_outputs_in_shared_memory_leave_an_empty_entry() -> None:
    """The reply has one entry for each output, and the region has the bytes."""
    memory = Memory()
    output = _placed(pb.ModelInferRequest.InferRequestedOutputTensor, **WHERE)
    plan = _decode(_request(inputs=[_input(contents=_contents())], outputs=[output]), memory).plan
    tensors = (Tensor("x", "UINT8", (2,), b"ab"), Tensor("y", "UINT8", (1,), b"c"))

    reply = _reply(_response(*tensors), plan=plan, regions=memory)

    assert list(reply.raw_output_contents) == [b"", b"c"]
    assert memory.data[8:10] == b"ab"


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"offset": WHERE["offset"]}, "can not be specified without 'shared_memory_region' parameter for tensor 'x'"),
        ({**WHERE, "region": {"int64_param": 1}}, "for tensor 'x', expected string_param."),
        ({**WHERE, "offset": {"int64_param": -1}}, "for tensor 'x', expected int64_param."),
        ({"region": WHERE["region"]}, "must be specified along with 'shared_memory_region' parameter for tensor 'x'"),
    ],
)
def test_shared_memory_parameters_are_checked(parameters: Any, text: str) -> None:
    """All three belong together, with their types."""
    with pytest.raises(InvalidRequest, match="shared_memory") as error:
        _decode(_request(inputs=[_placed(**parameters)]), Memory())

    assert text in error.value.message


def test_shared_memory_is_refused_where_it_is_off() -> None:
    """With Triton's text."""
    with pytest.raises(UnsupportedFeature, match="Client shared memory is disabled"):
        _decode(_request(inputs=[_placed(**WHERE)]))


def test_a_reply_is_read_by_the_client() -> None:
    """Every output is raw: the client's `as_numpy` reads nothing else."""
    x, text = np.array([[1.5, 2.5]], dtype=np.float32), np.array([b"one", b""], dtype=object)
    empty = np.zeros((0, 3), dtype=np.int64)
    tensors = (from_numpy("x", x), from_numpy("t", text), from_numpy("e", empty))

    reply = _reply(_response(*tensors, parameters={"a": "b", "c": 1, "d": True, "e": 0.5}), "the id")
    result = InferResult(reply)

    assert (reply.model_name, reply.model_version, reply.id) == ("m", "3", "the id")
    assert np.array_equal(result.as_numpy("x"), x)
    assert result.as_numpy("t").tolist() == text.tolist()
    assert result.as_numpy("e").shape == (0, 3)
    parameters = {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in reply.parameters.items()}
    assert parameters == {"a": "b", "c": 1, "d": True, "e": 0.5}


def test_a_reply_without_id_has_none() -> None:
    """The id is the client's own or absent."""
    assert _reply(_response()).id == ""


def test_classes_are_ranked() -> None:
    """An output whose classes are wanted travels as BYTES."""
    plan = OutputPlan(special={"y": Special(classes=1, labels=("cat", "dog"), batched=True)})

    reply = _reply(_response(from_numpy("y", np.array([[0.25, 0.75]], np.float32))), plan=plan)

    assert (reply.outputs[0].datatype, list(reply.outputs[0].shape)) == ("BYTES", [1, 1])
    assert reply.raw_output_contents[0] == pack_bytes([b"0.750000:1:dog"])


@pytest.mark.parametrize("size", [1, 127, 128, 16_384, 3_000_000])
@pytest.mark.parametrize("final", [True, False])
def test_streamed_replies_say_whether_they_are_the_last(size: int, *, final: bool) -> None:
    """Lengths of one to four bytes are written as protobuf reads them."""
    parts = encode_infer(_response(Tensor("y", "UINT8", (size,), bytes(size))), "i", PLAIN, NO_REGIONS)

    reply = pb.ModelStreamInferResponse.FromString(b"".join(encode_streamed(parts, final=final)))

    assert reply.infer_response.parameters["triton_final_response"].bool_param is final
    assert len(reply.infer_response.raw_output_contents[0]) == size
    assert reply.error_message == ""


def test_streamed_errors_name_their_request() -> None:
    """The client finds the request that failed by its id."""
    reply = pb.ModelStreamInferResponse.FromString(encode_streamed_error("broken", "i"))

    assert (reply.error_message, reply.infer_response.id) == ("broken", "i")


@pytest.mark.parametrize("size", [8, 602_112])
def test_messages_that_differ_in_their_data_are_decoded_alike(size: int) -> None:
    """Whoever reads them: protobuf, or what it left behind."""
    repetitions = Repetitions()
    for number in range(4):
        message = pb.ModelInferRequest(model_name="m", model_version="2", raw_input_contents=[bytes([number]) * size])
        message.inputs.add(name="x", datatype="UINT8", shape=[1, size])
        message.outputs.add(name="y")
        blob = message.SerializeToString()
        parsed = parse_infer(blob)
        decoded = decode_infer(parsed, NO_REGIONS)

        assert repetitions.decode(blob) == (decoded if number > 1 else None)
        repetitions.learn(blob, parsed, decoded)


def test_large_messages_of_strings_are_not_remembered() -> None:
    """Each string is checked, which is not done on the event loop."""
    repetitions = Repetitions()
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[pack_bytes([b"x" * 100]) * 3000])
    message.inputs.add(name="x", datatype="BYTES", shape=[3000])
    blob = message.SerializeToString()
    for _ in range(3):
        parsed = parse_infer(blob)
        repetitions.learn(blob, parsed, decode_infer(parsed, NO_REGIONS))

    assert repetitions.decode(blob) is None


@pytest.mark.parametrize("special", ["id", "parameter", "two inputs", "typed", "no data"])
def test_special_messages_are_not_remembered(special: str) -> None:
    repetitions = Repetitions()
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    if special == "id":
        message.id = "mine"
    elif special == "parameter":
        message.parameters["a"].int64_param = 1
    elif special == "two inputs":
        message.inputs.add(name="x2", datatype="FP32", shape=[1])
    if special == "typed":
        message.inputs[0].contents.fp32_contents.append(1.0)
    else:
        data = b"" if special == "no data" else bytes(4)
        message.raw_input_contents.extend([data] * len(message.inputs))
    blob = message.SerializeToString()
    for _ in range(3):
        parsed = parse_infer(blob)
        repetitions.learn(blob, parsed, decode_infer(parsed, NO_REGIONS))

    assert repetitions.decode(blob) is None


def test_data_that_only_seems_to_end_a_message_is_not_taken_for_it() -> None:
    """Fields may come in any order: here the data comes first, and the name of the model ends like it."""
    repetitions = Repetitions()
    data = b"modl"
    last = pb.ModelInferRequest(raw_input_contents=[data]).SerializeToString()
    begin = pb.ModelInferRequest()
    begin.inputs.add(name="x", datatype="UINT8", shape=[4])
    name = last.decode()
    blob = last + begin.SerializeToString() + pb.ModelInferRequest(model_name=name).SerializeToString()
    for _ in range(3):
        parsed = parse_infer(blob)
        repetitions.learn(blob, parsed, decode_infer(parsed, NO_REGIONS))

    assert repetitions.decode(blob) is None
    assert decode_infer(parse_infer(blob), NO_REGIONS).request.model == name


def test_there_is_an_end_of_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose the shapes, as many as they like."""
    monkeypatch.setattr(kserve_grpc, "_MAX_REMEMBERED", 3)
    repetitions = Repetitions()
    known = 0
    for size in range(1, 10):
        message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(size)])
        message.inputs.add(name="x", datatype="UINT8", shape=[size])
        blob = message.SerializeToString()
        for _ in range(2):
            parsed = parse_infer(blob)
            repetitions.learn(blob, parsed, decode_infer(parsed, NO_REGIONS))
        assert repetitions.decode(blob) is not None
        known = len(repetitions._known)

    assert known <= 3
