"""The infer requests and responses of the KServe v2 protocol over gRPC, single and streamed (reference §2.2, §2.3).

Inputs arrive as `raw_input_contents`, in the inputs' order, or as typed `contents`; one request uses one of the two.
Inputs in shared memory are skipped in both. Replies are put together from encoded pieces: the part that describes the
outputs is the same for many requests and is kept, and the tensors' bytes are copied once, into the reply. All outputs
are raw: Triton's client reads no others.

Tensor bytes are cut out of a message before protobuf parses it (`message_fields.py`), and put in after it was printed;
so are typed contents, if they are large (`typed_contents.py`).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import DATATYPES, Bytes, Tensor, pack_bytes
from qinfer.wire.frame import Repeats
from qinfer.wire.kserve_exact import STEP, STRICT_JSON, apply_parameters
from qinfer.wire.kserve_json import elements_of
from qinfer.wire.message_fields import FIXED_BYTES, LENGTH, MAX_FIELDS, VARINT, malformed, varint
from qinfer.wire.outputs import OutputPlan, Regions, prepare, read_special
from qinfer.wire.protos import grpc_service_pb2 as pb
from qinfer.wire.typed_contents import TYPED, TypedContents


def cut_out(message: Bytes, field: int) -> tuple[Bytes, list[memoryview]]:
    """Takes all values of a `bytes` field out of a message.

    Args:
        message: The encoded message; the values become views into it.
        field: The field's number, at most 15.

    Returns:
        The message without the field, and the field's values in order.

    Raises:
        InvalidRequest: The message is cut off, holds what protobuf does not know, or more than `MAX_FIELDS` fields.
    """
    view, end, position, kept = memoryview(message), len(message), 0, 0
    wanted = field << 3 | LENGTH
    rest: list[Bytes] = []
    found: list[memoryview] = []
    count = 0
    try:
        while position < end:
            count += 1
            if count > MAX_FIELDS:
                raise InvalidRequest(f"the request has more than {MAX_FIELDS} inputs, outputs and parameters")
            start = position
            tag, position = varint(message, position)
            kind = tag & 7
            if kind == LENGTH:
                size, position = varint(message, position)
            elif kind == VARINT:
                size, position = 0, varint(message, position)[1]
            else:
                size = FIXED_BYTES[kind]
            if tag == wanted:
                rest.append(view[kept:start])
                found.append(view[position : position + size])
                kept = position + size
            position += size
    except (IndexError, KeyError):
        raise malformed() from None
    if position != end:
        raise malformed()
    if not found:
        return message, found
    rest.append(view[kept:])
    return b"".join(rest), found


def values_of(message: bytes) -> memoryview:
    """Returns the value of the only field of a message, a field with a length.

    The packed form of numbers of fixed size, and of booleans, is their bytes in little-endian order.
    """
    _, position = varint(message, 0)
    size, position = varint(message, position)
    return memoryview(message)[position : position + size]


def prefix(field: int, size: int) -> bytes:
    """Returns what stands before a value of `size` bytes of the field with this number, at most 15."""
    if size < 0x80:
        return bytes((field << 3 | LENGTH, size))
    parts = [field << 3 | LENGTH]
    while size > 0x7F:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    parts.append(size)
    return bytes(parts)


_PLAIN = OutputPlan()
_EMPTY_FINAL = "triton_enable_empty_final_response"
_INTEGERS = ("int64_param", "uint64_param")
_KINDS = {  # what Triton's messages call for, and what is taken: both kinds of integers everywhere
    "sequence_id": ("int64_param or string_param", (*_INTEGERS, "string_param")),
    "sequence_start": ("bool_param", ("bool_param",)),
    "sequence_end": ("bool_param", ("bool_param",)),
    STEP: ("int64_param", _INTEGERS),
    STRICT_JSON: ("bool_param", ("bool_param",)),  # of HTTP: no model sees it here either
    "priority": ("int64_param or uint64_param", _INTEGERS),
    "timeout": ("int64_param", _INTEGERS),
}


class Region(NamedTuple):
    """A part of a shared memory region: its name, and where in it."""

    region: str
    offset: int
    byte_size: int


def apply_request_parameters(parameters: Mapping[str, Any], request: InferRequest) -> bool:
    """Writes the parameters of a request into its fields.

    Args:
        parameters: Name → `InferParameter`.
        request: Gets priority, timeout, sequence and the custom parameters.

    Returns:
        Whether a decoupled model that ends without a last response gives an empty one.

    Raises:
        InvalidRequest: A parameter has the wrong type or value, or a name that is reserved.
    """
    known: dict[str, Any] = {}
    custom: dict[str, Scalar] = {}
    empty_final = False
    for name, parameter in parameters.items():
        kind, value = _value(parameter)
        if name in _KINDS:
            known[name] = _known(name, kind, value)
        elif name == _EMPTY_FINAL:
            if kind != "bool_param":
                raise InvalidRequest(f"invalid value type for '{name}' parameter, expected bool_param.")
            empty_final = bool(value)
        elif name.startswith("triton_"):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {_EMPTY_FINAL}"
            )
        elif value is None or (kind == "uint64_param" and value >= 2**63):
            raise InvalidRequest(
                f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
            )
        else:
            custom[name] = value
    fields: dict[str, Any] = {}
    apply_parameters(known, fields)
    for name, value in fields.items():
        setattr(request, name, value)
    if custom:
        request.parameters = custom
    return empty_final


def shared_memory_of(tensor: Any) -> Region | None:
    """Returns the region that an input or an output is in; `None` when it is in none.

    Raises:
        InvalidRequest: The three parameters have wrong types or values, or one is missing.
    """
    parameters = tensor.parameters
    where = f"for tensor '{tensor.name}'"
    if "shared_memory_region" not in parameters:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in parameters:
                raise InvalidRequest(f"'{name}' can not be specified without 'shared_memory_region' parameter {where}")
        return None
    kind, region = _value(parameters["shared_memory_region"])
    if kind != "string_param":
        raise InvalidRequest(f"invalid value type for 'shared_memory_region' parameter {where}, expected string_param.")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter {where}"
        )
    numbers = [0, 0]
    for position, name in enumerate(("shared_memory_offset", "shared_memory_byte_size")):
        if name in parameters:
            kind, number = _value(parameters[name])
            if kind not in _INTEGERS or number < 0:
                raise InvalidRequest(f"invalid value type for '{name}' parameter {where}, expected int64_param.")
            numbers[position] = number
    return Region(region, *numbers)


def plan_outputs(outputs: Iterable[Any], regions: Regions) -> tuple[tuple[str, ...], OutputPlan]:
    """Returns the names of the outputs that are asked for, and how they are given back.

    Args:
        outputs: The requested outputs.
        regions: The shared memory that clients registered.

    Raises:
        InvalidRequest: A parameter of an output has the wrong type or value, or they contradict each other.
        QinferError: A region is not registered or too small, or shared memory is off.
    """
    names, special = [], {}
    for output in outputs:
        names.append(output.name)
        if not output.parameters:
            continue
        wanted: dict[str, Any] = {}
        region = shared_memory_of(output)
        if region is not None:
            wanted = {f"shared_memory_{field}": value for field, value in region._asdict().items()}
        if "classification" in output.parameters:
            wanted["classification"] = _classes(output.parameters["classification"])
        found = read_special(wanted, regions)
        if found is not None:
            special[output.name] = found
    return tuple(names), OutputPlan(special=special) if special else _PLAIN


def to_parameter(value: Scalar) -> dict[str, Scalar]:
    """Returns what an `InferParameter` is made of, for a parameter of a response."""
    if isinstance(value, bool):
        return {"bool_param": value}
    if isinstance(value, int):
        return {"int64_param" if value < 2**63 else "uint64_param": value}
    return {"double_param" if isinstance(value, float) else "string_param": value}


def _classes(parameter: Any) -> int:
    kind, count = _value(parameter)
    if kind not in _INTEGERS:
        raise InvalidRequest("invalid value type for 'classification' parameter, expected int64_param")
    if count <= 0:
        raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
    return int(count)


def _value(parameter: Any) -> tuple[str, Any]:
    kind = parameter.WhichOneof("parameter_choice") or ""
    return kind, getattr(parameter, kind) if kind else None


def _known(name: str, kind: str, value: Any) -> Any:
    expected, kinds = _KINDS[name]
    if kind not in kinds:
        raise InvalidRequest(f"invalid value type for '{name}' parameter, expected {expected}.")
    if name == "sequence_id" and kind == "int64_param":
        return value % 2**64  # ids are unsigned: Triton reads the same bits
    if kind == "int64_param" and value < 0:
        raise InvalidRequest(f"invalid value for '{name}', expected value >= 0.")
    return value


MAX_HEAD_BYTES = 2**20
"""The bytes that a large message may have without the data of its inputs."""

MAX_TYPED_BYTES = 64 * 2**20
LARGE_BYTES = 256 * 1024
"""The largest typed contents that protobuf parses, in bytes."""

_INPUTS_FIELD = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_CONTENTS_FIELD = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_RAW_INPUTS_FIELD = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_COPY_MAX_BYTES = 16 * 1024  # up to here protobuf's own copies cost less than walking over the message

_PACKED = ("BOOL", "FP32", "FP64")  # protobuf writes a list of these as tensors do


class Message(NamedTuple):
    """An infer request that was parsed and not yet looked at.

    Attributes:
        fields: The message, without what is beside it.
        raw: Its raw inputs.
        typed: The typed contents of its inputs by their places, if they are large.
    """

    fields: Any
    raw: list[Bytes]
    typed: Mapping[int, Bytes] = {}

    @property
    def typed_bytes(self) -> int:
        """The size of the typed contents that are large."""
        return sum(map(len, self.typed.values()))


class Decoded(NamedTuple):
    """A decoded infer request.

    Attributes:
        request: The request; its version is still 0.
        version: The version asked for, as text; empty = the highest ready one.
        plan: How its outputs are given back.
        empty_final: A decoupled model that ends without a last response gives an empty one (reference §2.3).
    """

    request: InferRequest
    version: str
    plan: OutputPlan
    empty_final: bool


def parse_infer(blob: Bytes) -> Message:
    """Parses a ModelInferRequest; large inputs become views into `blob`.

    Raises:
        InvalidRequest: It is none.
        PayloadTooLarge: It has too much that is no tensor.
    """
    try:
        if len(blob) <= _COPY_MAX_BYTES:
            fields = pb.ModelInferRequest.FromString(bytes(blob))
            return Message(fields, list(fields.raw_input_contents))
        rest, raw = cut_out(blob, _RAW_INPUTS_FIELD)
        typed: dict[int, Bytes] = {}
        if len(rest) > LARGE_BYTES:
            rest = _without_contents(rest, typed)
        return Message(pb.ModelInferRequest.FromString(bytes(rest)), list(raw), typed)
    except DecodeError:
        raise malformed() from None


def _without_contents(message: Bytes, typed: dict[int, Bytes]) -> bytes:
    """Takes the typed contents of all inputs out of a large message; an input that had some keeps empty ones."""
    rest, inputs = cut_out(message, _INPUTS_FIELD)
    parts: list[Bytes] = [rest]
    for place, one in enumerate(inputs):
        shell, contents = cut_out(one, _CONTENTS_FIELD)
        if contents:
            typed[place] = contents[0] if len(contents) == 1 else b"".join(contents)
            shell = b"".join((shell, prefix(_CONTENTS_FIELD, 0)))
        parts += (prefix(_INPUTS_FIELD, len(shell)), shell)
    head = b"".join(parts)
    if len(head) > MAX_HEAD_BYTES:
        raise PayloadTooLarge(
            f"the request takes {len(head)} bytes without the data of its inputs, more than {MAX_HEAD_BYTES}; send "
            "what is large as a tensor"
        )
    return head


def decode_infer(message: Message, regions: Regions, max_bytes: int = MAX_TYPED_BYTES) -> Decoded:
    """Decodes a parsed request.

    Args:
        message: The request.
        regions: The shared memory that clients registered.
        max_bytes: The bytes of all its tensors together that come as large typed contents.

    Raises:
        InvalidRequest: A field is wrong, or inputs and data do not match.
        PayloadTooLarge: Typed contents take more bytes as tensors.
        QinferError: A region is not registered or too small, or shared memory is off.
    """
    fields, raw, typed = message
    model: str = fields.model_name
    inputs: list[Tensor] = []
    position = 0
    for place, entry in enumerate(fields.inputs):
        data: Bytes
        if entry.parameters and (region := shared_memory_of(entry)) is not None:
            if entry.HasField("contents"):
                raise InvalidRequest(
                    f"unexpected 'content' provided when using shared memory for input tensor '{entry.name}' "
                    f"for model '{model}'"
                )
            data = regions.view(*region)
        elif typed and place in typed:
            data = _large(entry, TypedContents(typed[place]), raw, model, max_bytes)
            max_bytes -= len(data)
        elif not raw or entry.HasField("contents"):
            data = _typed(entry, raw, model)
        elif position < len(raw):
            data, position = raw[position], position + 1
        else:
            raise _no_data(entry.name, model)
        inputs.append(Tensor(entry.name, entry.datatype, tuple(entry.shape), data))
    if position != len(raw):
        raise InvalidRequest(f"unexpected additional input data for model '{model}'")
    request = InferRequest(model=model, inputs=tuple(inputs), client_id=fields.id)
    empty_final = False
    if fields.parameters:
        empty_final = apply_request_parameters(fields.parameters, request)
    plan = _PLAIN
    if fields.outputs:
        request.outputs, plan = plan_outputs(fields.outputs, regions)
    return Decoded(request, fields.model_version, plan, empty_final)


_MAX_REMEMBERED = 1024
_MAX_BEGIN_BYTES = 1024


class _Known(NamedTuple):
    """The request of a message without its data, and the version asked for."""

    model: str
    version: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]


class Repetitions:
    """Decodes messages that differ from earlier ones in their data only, without protobuf.

    A client asks one model in one way: its messages begin with the same bytes, and end with the data of their input. A
    message is remembered when it comes for the second time and has one raw input, at its end, no id and no parameters.
    """

    def __init__(self) -> None:
        self._begins: dict[int, int] = {}  # by a message's size: where its data begins
        self._known: dict[bytes, _Known] = {}
        self._repeats = Repeats()

    def decode(self, blob: Bytes) -> Decoded | None:
        """Decodes a message as `decode_infer` does; `None` = none like it is known."""
        begin = self._begins.get(len(blob))
        if begin is None:
            return None
        known = self._known.get(bytes(blob[:begin]))
        if known is None:
            return None
        model, version, name, datatype, shape, outputs = known
        data = blob[begin:] if len(blob) <= _COPY_MAX_BYTES else memoryview(blob)[begin:]
        request = InferRequest(model=model, inputs=(Tensor(name, datatype, shape, data),), outputs=outputs)
        return Decoded(request, version, _PLAIN, empty_final=False)

    def learn(self, blob: Bytes, message: Message, decoded: Decoded) -> None:
        """Remembers a message, if others may be like it."""
        fields, raw, _ = message
        request = decoded.request
        if len(raw) != 1 or len(request.inputs) != 1 or request.inputs[0].data is not raw[0]:
            return
        if fields.id or fields.parameters or decoded.plan is not _PLAIN:
            return
        begin = len(blob) - len(raw[0])
        key = bytes(blob[:begin])
        if begin > _MAX_BEGIN_BYTES or not self._repeats.has(key) or not _ends_with_data(key, blob, raw[0]):
            return
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
            self._begins.clear()
        tensor = request.inputs[0]
        self._begins[len(blob)] = begin
        self._known[key] = _Known(
            request.model, decoded.version, tensor.name, tensor.datatype, tensor.shape, request.outputs
        )


def _ends_with_data(begin: bytes, blob: Bytes, data: Bytes) -> bool:
    """Tells whether what follows the begin of a message is its data, and nothing else: other data is read as such."""
    other = bytes(len(data)) if any(data) else b"\1" * len(data)
    whole, changed = pb.ModelInferRequest.FromString(bytes(blob)), pb.ModelInferRequest.FromString(begin + other)
    is_read = changed.raw_input_contents == [other] and other != data
    whole.ClearField("raw_input_contents")
    changed.ClearField("raw_input_contents")
    return is_read and whole == changed


def _typed(entry: Any, raw: list[Bytes], model: str) -> Bytes:
    """Turns an input's typed contents into tensor bytes."""
    if not entry.HasField("contents"):
        raise _no_data(entry.name, model)
    filled = entry.contents.ListFields()
    field = filled[0][0].number if filled else 0
    _check_typed(entry, field, raw, model, is_mixed=len(filled) > 1)
    if not filled:
        return b""
    values = filled[0][1]
    if entry.datatype == "BYTES":
        return pack_bytes(values)
    if entry.datatype in _PACKED:
        return values_of(entry.contents.SerializeToString())
    # A number that the datatype can't hold keeps its low bytes, as with Triton.
    wide, narrow = DATATYPES[TYPED[field][0]].numpy, DATATYPES[entry.datatype].numpy
    return np.array(values, dtype=wide).astype(narrow, copy=False).tobytes()


def _large(entry: Any, contents: TypedContents, raw: list[Bytes], model: str, most: int) -> Bytes:
    """Turns an input's large typed contents into tensor bytes."""
    _check_typed(entry, contents.field, raw, model, is_mixed=contents.is_mixed)
    if not contents.field:
        return b""
    return contents.tensor_bytes(entry.name, entry.datatype, elements_of(entry.name, entry.shape), most)


def _check_typed(entry: Any, field: int, raw: list[Bytes], model: str, *, is_mixed: bool) -> None:
    """Checks the typed contents of an input: `field` is that which is filled, 0 where all are empty."""
    if raw:
        raise InvalidRequest(
            f"contents field must not be specified when using raw_input_contents for '{entry.name}' for model '{model}'"
        )
    unexpected = f"unexpected explicit tensor data for input tensor '{entry.name}' for model '{model}'"
    if is_mixed:
        raise InvalidRequest(f"{unexpected}, binary data was already supplied.")
    if field and entry.datatype not in TYPED[field]:
        raise InvalidRequest(f"{unexpected} of type '{TYPED[field][0]}', expected datatype '{entry.datatype}'")


def _no_data(name: str, model: str) -> InvalidRequest:
    return InvalidRequest(f"unable to find data for input tensor '{name}' for model '{model}' in request.")


_ID_FIELD = pb.ModelInferResponse.ID_FIELD_NUMBER
_RAW_OUTPUTS_FIELD = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_RESPONSE_FIELD = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER

_NOWHERE: frozenset[str] = frozenset()
_FINAL = "triton_final_response"


def encode_infer(response: Response, client_id: str, plan: OutputPlan, regions: Regions) -> list[Bytes]:
    """Encodes a response that carries outputs as a ModelInferResponse.

    Args:
        response: The response; its failure, if any, is not looked at.
        client_id: The request's `id`, echoed unless empty.
        plan: How its outputs are given back, as `bind` returned it.
        regions: The shared memory that clients registered.

    Returns:
        The message, in pieces.

    Raises:
        QinferError: An output can't be given back as the request wants it.
    """
    outputs, placed = response.outputs, _NOWHERE
    if plan.special is not None:
        outputs, placed = prepare(response, plan, regions)
    model, version, parameters = plan.endpoint or response.model, response.version, response.parameters
    parts: list[Bytes] = [_head(model, version, tuple([(o.name, o.datatype, o.shape) for o in outputs]))]
    if client_id:
        text = client_id.encode()
        parts += (prefix(_ID_FIELD, len(text)), text)
    if parameters:
        named = {name: pb.InferParameter(**to_parameter(value)) for name, value in parameters.items()}
        parts.append(pb.ModelInferResponse(parameters=named).SerializeToString())
    for output in outputs:
        data = b"" if output.name in placed else output.data
        parts += (prefix(_RAW_OUTPUTS_FIELD, len(data)), data)
    return parts


def encode_streamed(response: list[Bytes], *, final: bool) -> list[Bytes]:
    """Encodes a ModelStreamInferResponse that carries a response, in pieces.

    Args:
        response: What `encode_infer` returned.
        final: It is the last response to its request.
    """
    response = [*response, _FINAL_PARAMETER[final]]
    size = sum([len(part) for part in response])
    return [prefix(_RESPONSE_FIELD, size), *response]


def encode_streamed_error(message: str, client_id: str) -> bytes:
    """Encodes a ModelStreamInferResponse for a failure, with the id of the request that failed."""
    reply = pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=client_id))
    return bytes(reply.SerializeToString())


@lru_cache(maxsize=1024)
def _head(model: str, version: int, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
    """Returns what describes a response, without id and data."""
    reply = pb.ModelInferResponse(model_name=model, model_version=str(version))
    for name, datatype, shape in outputs:
        reply.outputs.add(name=name, datatype=datatype, shape=shape)
    return bytes(reply.SerializeToString())


_FINAL_PARAMETER = {
    final: bytes(pb.ModelInferResponse(parameters={_FINAL: pb.InferParameter(bool_param=final)}).SerializeToString())
    for final in (False, True)
}
