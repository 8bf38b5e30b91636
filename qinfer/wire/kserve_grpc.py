"""The infer requests and responses of the KServe v2 protocol over gRPC (reference §2.2, §2.3).

Inputs come as `raw_input_contents`, in the inputs' order, or as typed `contents`, never both; inputs in shared memory
are in neither. All outputs are raw, because Triton's client reads no other outputs.

Tensor bytes, and large typed contents (`typed_contents.py`), are cut out of a message before protobuf parses it;
in replies, they follow what protobuf prints, and are copied once.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from qinfer.core.messages import OutgoingRequest, Response, Scalar, SequenceFlags
from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import DATATYPES, Bytes, Tensor, pack_bytes
from qinfer.wire.frame import Repeats
from qinfer.wire.kserve_exact import SEQUENCE_KEYS, STEP, STRICT_JSON, apply_parameters
from qinfer.wire.kserve_json import elements_of
from qinfer.wire.outputs import OutputPlan, Regions, prepare, read_special
from qinfer.wire.protos import grpc_service_pb2 as pb
from qinfer.wire.typed_contents import LENGTH, MAX_FIELDS, TYPED, TypedContents, fields_of, malformed, varint


def cut_out(message: Bytes, field: int) -> tuple[Bytes, list[memoryview]]:
    """Takes a `bytes` field (up to number 15) out of a message."""
    view, kept, wanted = memoryview(message), 0, field << 3 | LENGTH
    rest: list[Bytes] = []
    found: list[memoryview] = []
    for count, (start, tag, begin, end) in enumerate(fields_of(message), 1):
        if count > MAX_FIELDS:
            raise InvalidRequest(f"the request has more than {MAX_FIELDS} inputs, outputs and parameters")
        if tag == wanted:
            rest.append(view[kept:start])
            found.append(view[begin:end])
            kept = end
    if not found:
        return message, found
    rest.append(view[kept:])
    return b"".join(rest), found


def values_of(message: bytes) -> memoryview:
    """Returns the only field's value: packed numbers are little-endian bytes."""
    _, position = varint(message, 0)
    size, position = varint(message, position)
    return memoryview(message)[position : position + size]


@lru_cache(maxsize=1024)
def prefix(field: int, size: int) -> bytes:
    """Returns tag and length; field numbers go up to 15."""
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
_KINDS = {
    "sequence_id": ("int64_param or string_param", (*_INTEGERS, "string_param")),
    "sequence_start": ("bool_param", ("bool_param",)),
    "sequence_end": ("bool_param", ("bool_param",)),
    STEP: ("int64_param", _INTEGERS),
    STRICT_JSON: ("bool_param", ("bool_param",)),  # of HTTP
    "priority": ("int64_param or uint64_param", _INTEGERS),
    "timeout": ("int64_param", _INTEGERS),
}


class RegionPart(NamedTuple):
    """A part of a shared memory region."""

    region: str
    offset: int
    byte_size: int


def apply_request_parameters(parameters: Mapping[str, Any], request: OutgoingRequest) -> bool:
    """Writes parameters into a request's fields; returns `DecodedRequest.empty_final`."""
    known: dict[str, Any] = {}
    custom: dict[str, Scalar] = {}
    empty_final = False
    for name, parameter in parameters.items():
        kind, value = _parameter_value(parameter)
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


def shared_memory_of(tensor: Any) -> RegionPart | None:
    """Returns a tensor's shared memory, if any."""
    parameters = tensor.parameters
    where = f"for tensor '{tensor.name}'"
    if "shared_memory_region" not in parameters:
        for name in ("shared_memory_offset", "shared_memory_byte_size"):
            if name in parameters:
                raise InvalidRequest(f"'{name}' can not be specified without 'shared_memory_region' parameter {where}")
        return None
    kind, region = _parameter_value(parameters["shared_memory_region"])
    if kind != "string_param":
        raise InvalidRequest(f"invalid value type for 'shared_memory_region' parameter {where}, expected string_param.")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter {where}"
        )
    numbers = [0, 0]
    for position, name in enumerate(("shared_memory_offset", "shared_memory_byte_size")):
        if name in parameters:
            kind, number = _parameter_value(parameters[name])
            if kind not in _INTEGERS or number < 0:
                raise InvalidRequest(f"invalid value type for '{name}' parameter {where}, expected int64_param.")
            numbers[position] = number
    return RegionPart(region, *numbers)


def plan_outputs(outputs: Iterable[Any], regions: Regions) -> tuple[tuple[str, ...], OutputPlan]:
    """Returns the requested outputs, and their plan."""
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
    """Returns an `InferParameter`'s fields."""
    if isinstance(value, bool):
        return {"bool_param": value}
    if isinstance(value, int):
        return {"int64_param" if value < 2**63 else "uint64_param": value}
    return {"double_param" if isinstance(value, float) else "string_param": value}


def _classes(parameter: Any) -> int:
    kind, count = _parameter_value(parameter)
    if kind not in _INTEGERS:
        raise InvalidRequest("invalid value type for 'classification' parameter, expected int64_param")
    if count <= 0:
        raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
    return int(count)


def _parameter_value(parameter: Any) -> tuple[str, Any]:
    kind = parameter.WhichOneof("parameter_choice") or ""
    return kind, getattr(parameter, kind) if kind else None


def _known(name: str, kind: str, value: Any) -> Any:
    expected, kinds = _KINDS[name]
    if kind not in kinds:
        raise InvalidRequest(f"invalid value type for '{name}' parameter, expected {expected}.")
    if name == "sequence_id" and kind == "int64_param":
        return value % 2**64  # as Triton reads it
    if kind == "int64_param" and value < 0:
        raise InvalidRequest(f"invalid value for '{name}', expected value >= 0.")
    return value


MAX_HEAD_BYTES = 2**20
"""A large message without its inputs' data."""

MAX_TYPED_BYTES = 64 * 2**20
LARGE_BYTES = 256 * 1024
"""Larger typed contents bypass protobuf."""

_INPUTS_FIELD = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_CONTENTS_FIELD = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER
_RAW_INPUTS_FIELD = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_COPY_MAX_BYTES = 16 * 1024  # below this, copies by protobuf are cheaper

_PACKED = ("BOOL", "FP32", "FP64")


class ParsedRequest(NamedTuple):
    """A parsed request with its inputs."""

    fields: Any
    raw: list[Bytes]
    typed: Mapping[int, Bytes] = {}

    @property
    def typed_bytes(self) -> int:
        """The size of the large typed contents."""
        return sum(map(len, self.typed.values()))


class DecodedRequest(msgspec.Struct):
    """A decoded infer request, whose own `version` is still 0.

    With `empty_final`, a decoupled model that ends without a last response sends an empty one (reference §2.3).
    """

    request: OutgoingRequest
    version: str
    plan: OutputPlan
    empty_final: bool


def parse_infer(blob: Bytes) -> ParsedRequest:
    """Parses a ModelInferRequest; large inputs are views into `blob`."""
    try:
        if len(blob) <= _COPY_MAX_BYTES:
            fields = pb.ModelInferRequest.FromString(bytes(blob))
            return ParsedRequest(fields, list(fields.raw_input_contents))
        rest, raw = cut_out(blob, _RAW_INPUTS_FIELD)
        typed: dict[int, Bytes] = {}
        if len(rest) > LARGE_BYTES:
            rest = _without_contents(rest, typed)
        return ParsedRequest(pb.ModelInferRequest.FromString(bytes(rest)), list(raw), typed)
    except DecodeError:
        raise malformed() from None


def _without_contents(message: Bytes, typed: dict[int, Bytes]) -> bytes:
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


def decode_infer(message: ParsedRequest, regions: Regions, max_bytes: int = MAX_TYPED_BYTES) -> DecodedRequest:
    """Decodes a request; `max_bytes` limits large typed contents."""
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
    request = OutgoingRequest(model=model, inputs=tuple(inputs), client_id=fields.id)
    empty_final = False
    if fields.parameters:
        empty_final = apply_request_parameters(fields.parameters, request)
    plan = _PLAIN
    if fields.outputs:
        request.outputs, plan = plan_outputs(fields.outputs, regions)
    return DecodedRequest(request, fields.model_version, plan, empty_final)


_MAX_REMEMBERED = 1024
_MOST_LEARNT_BYTES = 8 * 2**20
_MAX_BEGIN_BYTES = 1024
_MOST_LAYOUTS = 24
"""The layouts that are kept of messages of one size: as many as four parameters have orders."""

_PARAMETERS = pb.ModelInferRequest.PARAMETERS_FIELD_NUMBER << 3 | LENGTH
_MAP_KEY, _MAP_VALUE = 1 << 3 | LENGTH, 2 << 3 | LENGTH


class _KnownMessage(NamedTuple):
    model: str
    version: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]

    def request(self, blob: Bytes, begin: int) -> DecodedRequest:
        """Returns the request whose data begins there."""
        model, version, name, datatype, shape, outputs = self
        data = blob[begin:] if len(blob) <= _COPY_MAX_BYTES else memoryview(blob)[begin:]
        request = OutgoingRequest(model=model, inputs=(Tensor(name, datatype, shape, data),), outputs=outputs)
        return DecodedRequest(request, version, _PLAIN, empty_final=False)


class Repetitions:
    """Decodes messages that differ from earlier messages only in their data, without protobuf.

    Such messages have one raw input, at their end, and no id. Only steps of sequences have parameters, and also differ
    in their sequence and number (`_StepMessages`). One thread reads, others may learn.
    """

    def __init__(self) -> None:
        self._begins: dict[int, int] = {}  # message size → the data's start
        self._models: dict[int, tuple[str, str]] = {}  # message size → the last model and version
        self._known: dict[bytes, _KnownMessage] = {}
        self._repeats = Repeats()
        self._steps = _StepMessages(self._repeats)

    def decode(self, blob: Bytes) -> DecodedRequest | None:
        """Decodes a known message, or returns `None`."""
        begin = self._begins.get(len(blob))
        known = None if begin is None else self._known.get(bytes(blob[:begin]))
        if known is None or begin is None:
            return self._steps.decode(blob)
        return known.request(blob, begin)

    def expected(self, size: int) -> tuple[str, str, int] | None:
        """Returns model, version and the data's start of a message of so many bytes, if known."""
        begin = self._begins.get(size)
        return None if begin is None else (*self._models[size], begin)

    def learn(self, blob: Bytes, message: ParsedRequest, decoded: DecodedRequest) -> None:
        """Remembers a message, if others may repeat it."""
        fields, raw, _ = message
        request = decoded.request
        if len(raw) != 1 or len(request.inputs) != 1 or request.inputs[0].data is not raw[0]:
            return
        if fields.id or decoded.plan is not _PLAIN:
            return
        if len(blob) > LARGE_BYTES and (request.inputs[0].datatype == "BYTES" or len(blob) > _MOST_LEARNT_BYTES):
            return  # each string is checked; the comparison below takes long
        begin, tensor = len(blob) - len(raw[0]), request.inputs[0]
        if begin > _MAX_BEGIN_BYTES:
            return
        known = _KnownMessage(
            request.model, decoded.version, tensor.name, tensor.datatype, tensor.shape, request.outputs
        )
        if fields.parameters:
            if request.sequence is not None and set(fields.parameters) <= SEQUENCE_KEYS.keys():
                self._steps.learn(blob, begin, request.sequence, known)
            return
        key = bytes(blob[:begin])
        if not self._repeats.has(key) or not _ends_with_data(key, blob, raw[0]):
            return
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
            self._begins.clear()
            self._models.clear()
        self._begins[len(blob)] = begin
        self._models[len(blob)] = request.model, decoded.version
        self._known[key] = known


class _StepLayout(NamedTuple):
    """The places of a step's sequence ID and number (empty = not numbered), of the rest, and of the data.

    `known` has the meanings of the rest.
    """

    of: slice
    step: slice
    rest: tuple[slice, ...]
    begin: int
    known: dict[bytes, "_KnownStep"]

    def common(self, blob: Bytes) -> bytes:
        return b"".join(map(blob.__getitem__, self.rest))

    def flags(self, blob: Bytes, known: "_KnownStep") -> SequenceFlags | None:
        """Returns the flags of a message, unless they can't be read from their places."""
        of, step, is_numbered = self.of, self.step, self.step.start < self.step.stop
        try:
            name = str(blob[of], "utf-8") if known.is_text else _number_of(bytes(blob[of]))
        except UnicodeDecodeError:
            return None
        number = _number_of(bytes(blob[step])) if is_numbered else 0
        if not name or number >= 2**53 or (is_numbered and not number):
            return None
        return SequenceFlags(name, known.start, known.end, number)


class _KnownStep(NamedTuple):
    message: _KnownMessage
    is_text: bool
    start: bool
    end: bool


@lru_cache(maxsize=8192)
def _number_of(digits: bytes) -> int:
    """Returns the number that these bytes are; 0 = it ends before or behind them."""
    if digits[-1] >= 0x80:
        return 0
    value, stop = varint(digits, 0)
    return value % 2**64 if stop == len(digits) else 0


class _StepMessages:
    """Decodes messages of steps that differ from earlier ones only in sequence, number and data.

    They have no other parameters than those of sequences, which clients write in any order.
    """

    def __init__(self, repeats: Repeats) -> None:
        self._layouts: dict[int, tuple[_StepLayout, ...]] = {}  # message size → its layouts
        self._repeats = repeats
        self._count = 0

    def decode(self, blob: Bytes) -> DecodedRequest | None:
        for layout in self._layouts.get(len(blob), ()):
            known = layout.known.get(layout.common(blob))
            if known is not None and (flags := layout.flags(blob, known)) is not None:
                decoded = known.message.request(blob, layout.begin)
                decoded.request.sequence = flags
                return decoded
        return None

    def learn(self, blob: Bytes, begin: int, flags: SequenceFlags, message: _KnownMessage) -> None:
        """Remembers a message whose data begins there, if others may repeat it."""
        layout = _step_layout(blob, begin)
        if layout is None:
            return
        key, known = layout.common(blob), _KnownStep(message, isinstance(flags.id, str), flags.start, flags.end)
        if layout.flags(blob, known) != flags or not self._repeats.has(key):
            return
        if not _ends_with_data(bytes(blob[:begin]), blob, blob[begin:]):
            return
        self._count += 1
        if self._count > _MAX_REMEMBERED:
            self._count = 1
            self._layouts.clear()
        layouts = self._layouts.get(len(blob), ())
        same = next((one for one in layouts if one[:-1] == layout[:-1]), layout)
        same.known[key] = known
        if same is layout:
            self._layouts[len(blob)] = (layout, *layouts[: _MOST_LAYOUTS - 1])


def _step_layout(blob: Bytes, begin: int) -> _StepLayout | None:
    """Returns the layout of a step's message, unless it is written in an unusual way."""
    values: dict[str, slice] = {}
    try:
        for _, tag, at, stop in fields_of(blob):
            if tag == _PARAMETERS:
                (_, key, *name), (_, value, first, last) = fields_of(blob, at, stop)
                ((_, _, *place),) = fields_of(blob, first, last)
                text = str(blob[slice(*name)], "utf-8")
                if (key, value) != (_MAP_KEY, _MAP_VALUE) or text in values:
                    return None
                values[text] = slice(*place)
    except (InvalidRequest, ValueError):
        return None
    of, step = values["sequence_id"], values.get(STEP, slice(begin, begin))
    one, other = sorted((of, step), key=lambda place: place.start)
    rest = slice(one.start), slice(one.stop, other.start), slice(other.stop, begin)
    return _StepLayout(of, step, rest if step.start < step.stop else rest[:2], begin, {})


def _ends_with_data(begin: bytes, blob: Bytes, data: Bytes) -> bool:
    """Returns whether other data at the end would change nothing else."""
    other = bytes(len(data)) if any(data) else b"\1" * len(data)
    whole, changed = pb.ModelInferRequest.FromString(bytes(blob)), pb.ModelInferRequest.FromString(begin + other)
    is_read = changed.raw_input_contents == [other] and other != data
    whole.ClearField("raw_input_contents")
    changed.ClearField("raw_input_contents")
    return is_read and whole == changed


def _typed(entry: Any, raw: list[Bytes], model: str) -> Bytes:
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
    # Too large numbers keep their low bytes, as in Triton.
    wide, narrow = DATATYPES[TYPED[field][0]].numpy, DATATYPES[entry.datatype].numpy
    return np.array(values, dtype=wide).astype(narrow, copy=False).tobytes()


def _large(entry: Any, contents: TypedContents, raw: list[Bytes], model: str, most: int) -> Bytes:
    _check_typed(entry, contents.field, raw, model, is_mixed=contents.is_mixed)
    if not contents.field:
        return b""
    return contents.tensor_bytes(entry.name, entry.datatype, elements_of(entry.name, entry.shape), most)


def _check_typed(entry: Any, field: int, raw: list[Bytes], model: str, *, is_mixed: bool) -> None:
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
_described = attrgetter("name", "datatype", "shape")


def encode_infer(response: Response, client_id: str, plan: OutputPlan, regions: Regions) -> list[Bytes]:
    """Encodes a ModelInferResponse, in pieces; `plan` is bound."""
    outputs, placed = response.outputs, _NOWHERE
    if plan.special is not None:
        outputs, placed = prepare(response, plan, regions)
    model, version, parameters = plan.endpoint or response.model, response.version, response.parameters
    parts: list[Bytes] = [_head(model, version, tuple(map(_described, outputs)))]
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
    """Encodes a ModelStreamInferResponse around the pieces of `encode_infer`."""
    response = [*response, _FINAL_PARAMETER[final]]
    size = sum([len(part) for part in response])
    return [prefix(_RESPONSE_FIELD, size), *response]


def encode_streamed_error(message: str, client_id: str) -> bytes:
    """Encodes a ModelStreamInferResponse for a failure."""
    reply = pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=client_id))
    return bytes(reply.SerializeToString())


@lru_cache(maxsize=1024)
def _head(model: str, version: int, outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
    reply = pb.ModelInferResponse(model_name=model, model_version=str(version))
    for name, datatype, shape in outputs:
        reply.outputs.add(name=name, datatype=datatype, shape=shape)
    return bytes(reply.SerializeToString())


_FINAL_PARAMETER = {
    final: bytes(pb.ModelInferResponse(parameters={_FINAL: pb.InferParameter(bool_param=final)}).SerializeToString())
    for final in (False, True)
}
