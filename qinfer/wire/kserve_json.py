"""The infer request and response of the KServe v2 protocol over HTTP: JSON, and Triton's binary tensor extension.

    request   JSON ‖ the bytes of each binary input, in the inputs' order (reference §1.6, §1.7)
    response  JSON ‖ the bytes of each binary output, in the outputs' order

Floats are printed as doubles in the shortest text that gives the same double again, as in Triton: shorter FP32 texts do
not survive a client that parses doubles (7.038531e-26 is rounded twice). NaN and Infinity travel as these words.
"""

import json
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import UNSET

from qinfer.core.messages import OutgoingRequest, Response, Scalar, SequenceFlags
from qinfer.errors import InvalidRequest, MalformedJson, OutputMismatch, PayloadTooLarge
from qinfer.tensors import DATATYPES, Bytes, Tensor, iter_bytes, pack_bytes
from qinfer.wire import kserve_exact
from qinfer.wire.json_pieces import GIANT_BYTES, STRUCT_CODES, Document, JsonBounds, LongArray
from qinfer.wire.json_scan import LARGE_BYTES, check_depth
from qinfer.wire.kserve_types import NAMES, UNPARSABLE, Input, InputParameters, Request, RequestedOutput, parse
from qinfer.wire.outputs import NO_REGIONS, OutputPlan, Regions, Special, prepare, read_special

_BOUNDS = JsonBounds()
_NULL = b"n"
_PIECE_ELEMENTS = 8192  # outputs with more elements are written in pieces
_BINARY_BYTES, _SMALL_TEXT_BYTES = 16 * 1024, 1024  # of bodies whose text is remembered
_ELEMENTS_AT_ONCE = 4096
_LONG_ELEMENTS = 32 * 1024
"""Outputs of more elements are written in a thread, which pauses after each piece: the event loop waits for its GIL."""

_PAUSE_S = 50e-6
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**31 - 1
_MAX_INT64 = 2**63 - 1


class ElementPacking(NamedTuple):
    """Converts elements and bytes; `pack` raises for elements out of range."""

    elements: int
    nbytes: int
    pack: Callable[..., bytes]
    unpack: Callable[[Bytes], tuple[Any, ...]]


@lru_cache(maxsize=1024)
def packing_of(datatype: str, shape: tuple[int, ...]) -> ElementPacking | None:
    """Returns the packing, if any: not of strings, 16-bit floats and empty tensors."""
    code = STRUCT_CODES.get(datatype)
    count = prod(shape) if len(shape) <= _MOST_DIMENSIONS else 0
    if code is None or not 0 < count <= _MOST_ELEMENTS:
        return None
    checked, native = struct.Struct(f"<{count}{code}"), struct.Struct(f"{count}{code}")
    return ElementPacking(count, native.size, checked.pack, native.unpack)  # native reads faster, unchecked


_NO_PARAMETERS = InputParameters()


class InferReply(msgspec.Struct, frozen=True, gc=False):
    """An encoded response; `json_length` is `None` if all is JSON."""

    body: bytes
    json_length: int | None = None
    tensors: Sequence[Bytes] = ()


def decode_infer(
    body: Bytes,
    json_length: int | None,
    model: str,
    version: int,
    bounds: JsonBounds = _BOUNDS,
    regions: Regions = NO_REGIONS,
) -> tuple[OutgoingRequest, OutputPlan]:
    """Decodes an infer request; `raw_request` decodes raw binary ones, of JSON length 0.

    `body` is uncompressed; binary inputs become views into it. Model and version (or 0) are the URL's.
    """
    text, tail = (body, b"") if json_length is None else _split(body, json_length)
    is_repeated = len(tail) >= _BINARY_BYTES and len(text) <= _SMALL_TEXT_BYTES
    known = _known_text(bytes(text), bounds.depth) if is_repeated else None
    if isinstance(known, _KnownText):
        if known.nbytes == len(tail):
            return known.request(model, version, tail)
        known = None
    said = _read_text(text, bounds) if known is None else (None, known)
    return _decode_parts(said, tail, model, version, bounds, regions)


def _decode_parts(
    said: tuple[Document | None, Request], tail: Bytes, model: str, version: int, bounds: JsonBounds, regions: Regions
) -> tuple[OutgoingRequest, OutputPlan]:
    document, parsed = said
    form = _PLAIN
    fields: dict[str, Any] = {}
    if parsed.parameters is not UNSET:
        form = kserve_exact.apply_parameters(parsed.parameters, fields)
    inputs = []
    position, left = 0, bounds.nbytes
    for entry in parsed.inputs:
        if document is not None and entry.data is not UNSET:
            data: Bytes = pack(entry, left)
            left -= len(data)
        elif entry.parameters is UNSET and entry.data is not UNSET:
            data = pack(entry)
        else:
            data, position = _from_elsewhere(entry, tail, position, model, regions)
        inputs.append(Tensor(entry.name, NAMES[type(entry)], entry.shape, data))
    if position != len(tail):
        raise InvalidRequest(f"unexpected additional input data for model '{model}'")
    if document is not None:
        document.check()
    outputs: tuple[str, ...] = ()
    plan = _plan_of(form)
    if parsed.outputs:
        outputs, plan = _plan(parsed.outputs, regions, form)
    request = OutgoingRequest(model=model, inputs=tuple(inputs), version=version, client_id=parsed.id, outputs=outputs)
    if fields:
        for name, value in fields.items():
            setattr(request, name, value)
    return request, plan


class _KnownText(NamedTuple):
    """The meaning of a text that clients repeat before large binary tensors."""

    client_id: str
    inputs: list[tuple[str, str, tuple[int, ...], slice]]
    nbytes: int
    outputs: tuple[str, ...]
    plan: OutputPlan
    sequence: SequenceFlags | None

    def request(self, model: str, version: int, tail: Bytes) -> tuple[OutgoingRequest, OutputPlan]:
        """Returns a request whose inputs are in `tail`."""
        inputs: tuple[Tensor, ...] = ()
        for name, datatype, shape, place in self.inputs:
            inputs += (Tensor(name, datatype, shape, tail[place]),)
        client_id, outputs = self.client_id, self.outputs
        request = OutgoingRequest(model=model, inputs=inputs, version=version, client_id=client_id, outputs=outputs)
        request.sequence = self.sequence
        return request, self.plan


@lru_cache(maxsize=256)
def _known_text(text: bytes, depth: int) -> _KnownText | Request:
    """Returns a text as parsed if it has data, shared memory, classes, or parameters of the model."""
    parsed, fields = _parsed(text, depth), dict[str, Any]()
    form = _PLAIN if parsed.parameters is UNSET else kserve_exact.apply_parameters(parsed.parameters, fields)
    sequence = fields.pop("sequence", None)
    if fields:
        return parsed
    inputs, position = [], 0
    for entry in parsed.inputs:
        parameters = _NO_PARAMETERS if entry.parameters is UNSET else entry.parameters
        size = parameters.binary_data_size
        if size is UNSET or entry.data is not UNSET or parameters.shared_memory_region is not UNSET:
            return parsed
        inputs.append((entry.name, NAMES[type(entry)], entry.shape, slice(position, position + size)))
        position += size
    for output in parsed.outputs:
        asked = output.parameters
        if asked is not UNSET and (asked.classification, asked.shared_memory_region) != (UNSET, UNSET):
            return parsed
    outputs, plan = _plan(parsed.outputs, NO_REGIONS, form) if parsed.outputs else ((), _plan_of(form))
    return _KnownText(parsed.id, inputs, position, outputs, plan, sequence)


def encode_infer(
    response: Response, client_id: str, plan: OutputPlan, regions: Regions = NO_REGIONS, *, apart: bool = False
) -> InferReply:
    """Encodes outputs, or tensors `apart`; `plan` is bound (`outputs.bind`)."""
    begin = b'{"id":%b,' % _encoder.encode(client_id) if client_id else b"{"
    parts: list[Bytes] = [begin, _reply_head(plan.endpoint or response.model, response.version)]
    if response.parameters:
        parts.insert(1, _parameters_json(response.parameters))
    outputs, placed = response.outputs, _NOWHERE
    if plan.special is not None:
        outputs, placed = prepare(response, plan, regions)
    tail: list[Bytes] = []
    separator = b""
    for tensor in outputs:
        head = _output_head(tensor.name, tensor.datatype, tensor.shape)
        if placed and tensor.name in placed:
            parts += (separator, head[:-1], b"}")
        elif plan.overrides.get(tensor.name, plan.binary):
            parts += (separator, head, b'"parameters":{"binary_data_size":%d}}' % len(tensor.data))
            if len(tensor.data):  # otherwise all is JSON, as in Triton
                tail.append(tensor.data)
        elif len(tensor.data) > _PIECE_ELEMENTS and tensor.datatype in STRUCT_CODES:
            long_text = _whole((*parts, separator, head, b'"data":'))
            _add_elements(long_text, tensor, strict=plan.strict)
            parts = [long_text, b"}"]
        else:
            parts += (separator, head, b'"data":', elements(tensor, strict=plan.strict), b"}")
        separator = b","
    parts.append(b"]}")
    text = b"".join(parts) if type(parts[0]) is bytes else cast(bytes, _whole(parts))  # bytes would be a copy
    if not tail:
        return InferReply(text)
    if apart:
        return InferReply(text, len(text), tail)
    return InferReply(b"".join((text, *tail)), len(text))


_NOWHERE: Collection[str] = ()
_JSON_PLAN = OutputPlan()
_STRICT_PLAN = OutputPlan(strict=True)
_BINARY_PLAN = OutputPlan(binary=True)
_PLAIN = kserve_exact.Form()


def _read_text(text: Bytes, bounds: JsonBounds) -> tuple[Document | None, Request]:
    return _parsed_large(text, bounds) if len(text) > LARGE_BYTES else (None, _parsed(bytes(text), bounds.depth))


def _parsed(text: bytes, depth: int) -> Request:
    if text.count(b"[") + text.count(b"{") > depth:
        check_depth(text, depth)
    try:
        return parse(text)
    except UNPARSABLE:
        return kserve_exact.read(text, depth)


def _parsed_large(text: Bytes, bounds: JsonBounds) -> tuple[Document, Request]:
    document = Document(text, bounds)
    if document.giants:
        name, size = next(iter(document.giants.items()))
        what = f"member '{name[:60]}' has {size} bytes"
        raise PayloadTooLarge(f"{what}, more than {GIANT_BYTES}; send what is large as a tensor")
    request = kserve_exact.build(document.value)
    if bounds.check is not None:
        for entry in request.inputs:
            bounds.check(entry.name, NAMES[type(entry)], entry.shape)
    return document, request


def _split(body: Bytes, json_length: int) -> tuple[Bytes, Bytes]:
    if not 0 <= json_length <= len(body):
        raise InvalidRequest(f"inference header size should be in range (0, {len(body)}), got: {json_length}")
    view = memoryview(body)
    text = view[:json_length]
    return text if json_length > LARGE_BYTES else bytes(text), view[json_length:]


def _from_elsewhere(entry: Input, tail: Bytes, position: int, model: str, regions: Regions) -> tuple[Bytes, int]:
    parameters = _NO_PARAMETERS if entry.parameters is UNSET else entry.parameters
    size = parameters.binary_data_size
    if size is UNSET or entry.data is not UNSET or parameters.shared_memory_region is not UNSET:
        return _without_binary(entry, parameters, regions), position
    end = position + size
    if end > len(tail):
        raise InvalidRequest(
            f"unexpected size for input '{entry.name}', expecting {end - len(tail)} additional bytes "
            f"for model '{model}'"
        )
    return tail[position:end], end


def _without_binary(entry: Input, parameters: InputParameters, regions: Regions) -> Bytes:
    region = parameters.shared_memory_region
    kserve_exact.check_one_source(entry.data, parameters.binary_data_size, region)
    if region is UNSET:
        return pack(entry)
    return regions.view(region, parameters.shared_memory_offset, parameters.shared_memory_byte_size)


def pack(entry: Input, most: int = _BOUNDS.nbytes) -> Bytes:
    """Converts JSON elements to bytes, at most `most`."""
    data: Any = entry.data
    datatype = NAMES[type(entry)]
    packing = None if isinstance(data, LongArray) else packing_of(datatype, entry.shape)
    if packing is not None and len(data) == packing.elements:
        try:
            return packing.pack(*data)
        except (struct.error, OverflowError):
            pass
    count = elements_of(entry.name, entry.shape)
    if not count:
        return b""
    if count * DATATYPES[datatype].itemsize > _MAX_INT64:
        raise InvalidRequest(f"byte size overflow for input '{entry.name}'")
    code = STRUCT_CODES.get(datatype)
    if code is None and datatype != "BYTES":
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {entry.name}"
        )
    if isinstance(data, LongArray):
        return data.tensor_bytes(entry.name, datatype, count, most, kserve_exact.flat)
    if code is None:
        return pack_bytes(element.encode() for element in data)
    if len(data) != count:
        raise MalformedJson("Unable to parse 'data': Shape does not match true shape of 'data' field")
    try:
        return struct.pack(f"<{count}{code}", *data)
    except (struct.error, OverflowError):
        raise InvalidRequest(
            f"Unable to parse 'data': input '{entry.name}' has a value outside the range of {datatype}"
        ) from None


def elements_of(name: str, shape: Sequence[int]) -> int:
    """Counts elements; raises `InvalidRequest` for impossible products."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_INT64:
            raise InvalidRequest(
                f"dimension {size} of input '{name}' causes total element count to exceed maximum size of {_MAX_INT64}"
            )
    return count


def _plan_of(form: kserve_exact.Form) -> OutputPlan:
    return _BINARY_PLAN if form.binary else _STRICT_PLAN if form.strict else _JSON_PLAN


def _plan(
    wanted: list[RequestedOutput], regions: Regions, form: kserve_exact.Form
) -> tuple[tuple[str, ...], OutputPlan]:
    overrides: dict[str, bool] = {}
    special: dict[str, Special] | None = None
    for output in wanted:
        parameters = output.parameters
        if parameters is UNSET:
            continue
        if parameters.binary_data is not UNSET:
            overrides[output.name] = parameters.binary_data
        if parameters.classification is not UNSET or parameters.shared_memory_region is not UNSET:
            given = {name: value for name, value in msgspec.structs.asdict(parameters).items() if value is not UNSET}
            found = read_special(given, regions)
            if found is not None:
                special = special or {}
                special[output.name] = found
    return tuple([output.name for output in wanted]), OutputPlan(form.binary, overrides, special, strict=form.strict)


_encoder = msgspec.json.Encoder()


@lru_cache(maxsize=1024)
def _reply_head(model: str, version: int) -> bytes:
    return _encoder.encode({"model_name": model, "model_version": str(version), "outputs": []})[1:-2]


def _parameters_json(parameters: Mapping[str, Scalar]) -> bytes:
    return b'"parameters":%b,' % _encoder.encode(parameters)


@lru_cache(maxsize=1024)
def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return _encoder.encode({"name": name, "datatype": datatype, "shape": shape})[:-1] + b","


def _whole(parts: Sequence[Bytes]) -> bytearray:
    """Joins the parts; does not copy a large bytearray."""
    whole = parts[0] if isinstance(parts[0], bytearray) else bytearray(parts[0])
    for part in parts[1:]:
        whole += part
    return whole


def elements(tensor: Tensor, *, strict: bool = False) -> bytes:
    """Converts tensor bytes to a flat JSON array; `strict` has null for NaN."""
    packing = packing_of(tensor.datatype, tensor.shape)
    if packing is not None and len(tensor.data) == packing.nbytes:
        if packing.elements > _PIECE_ELEMENTS:
            text = bytearray()
            _add_elements(text, tensor, strict=strict)
            return bytes(text)
        values: Sequence[Any] = packing.unpack(tensor.data)
    else:
        values = _unusual_elements(tensor)
    encoded = _encoder.encode(values)
    return encoded if strict or encoded.find(_NULL) < 0 else _with_words(values)


def _with_words(values: Sequence[Any]) -> bytes:
    """Writes words, where msgspec writes null."""
    return json.dumps(values, separators=(",", ":")).encode()


def _add_elements(text: bytearray, tensor: Tensor, *, strict: bool) -> None:
    """Adds the elements piece by piece, because objects take a multiple of memory."""
    if len(tensor.data) != prod(tensor.shape) * DATATYPES[tensor.datatype].itemsize:
        raise OutputMismatch(f"output tensor shape does not match size of output for '{tensor.name}'")
    values = memoryview(tensor.data).cast(STRUCT_CODES[tensor.datatype])  # type: ignore[call-overload]  # as below
    text += b"["
    for at in range(0, len(values), _ELEMENTS_AT_ONCE):
        if len(values) > _LONG_ELEMENTS:
            time.sleep(_PAUSE_S)
        piece = values[at : at + _ELEMENTS_AT_ONCE].tolist()
        encoded = _encoder.encode(piece)
        text += memoryview(encoded if strict or encoded.find(_NULL) < 0 else _with_words(piece))[1:-1]
        text += b","
    text[-1:] = b"]"


def _unusual_elements(tensor: Tensor) -> Sequence[Any]:
    code = STRUCT_CODES.get(tensor.datatype)
    if code is None:
        if tensor.datatype == "BYTES":
            return _strings(tensor)
        raise InvalidRequest(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    if len(tensor.data) != prod(tensor.shape) * DATATYPES[tensor.datatype].itemsize:
        raise OutputMismatch(f"output tensor shape does not match size of output for '{tensor.name}'")
    values: list[Any] = memoryview(tensor.data).cast(code).tolist()  # type: ignore[call-overload]  # any code
    return values


def _strings(tensor: Tensor) -> list[str]:
    try:
        elements = [str(element, "utf-8") for element in iter_bytes(tensor.data)]
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"output '{tensor.name}' holds bytes that are not UTF-8, which JSON can't carry; "
            "ask for it with the parameter 'binary_data': true"
        ) from None
    if len(elements) != prod(tensor.shape):
        raise OutputMismatch(f"output tensor shape does not match size of output for '{tensor.name}'")
    return elements
