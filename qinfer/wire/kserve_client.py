"""The infer request and response of the KServe v2 protocol for clients: the reverse of `kserve_json`.

Replies may mix binary and JSON outputs, as other servers' do.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from qinfer.core.messages import Response, Scalar
from qinfer.errors import InvalidRequest, OutputMismatch, UnsupportedDatatype
from qinfer.tensors import Bytes, Tensor, datatype, element_count, from_numpy, pack_bytes, to_numpy

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"
"""Length of a body's uncompressed JSON."""


class _InputJson(msgspec.Struct, gc=False):
    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, int] | UnsetType = UNSET
    data: msgspec.Raw | UnsetType = UNSET


class _RequestJson(msgspec.Struct):
    inputs: list[_InputJson]
    id: str | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET
    outputs: list[dict[str, str]] | UnsetType = UNSET


class _OutputJson(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] = {}
    data: Any = UNSET


class _ReplyJson(msgspec.Struct):
    outputs: list[_OutputJson]
    model_name: str = ""
    model_version: str = ""
    id: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_ReplyJson)


def encode_request(
    inputs: Sequence[Tensor],
    *,
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Scalar] | None = None,
    client_id: str = "",
    binary: bool = True,
) -> tuple[bytes, int]:
    """Encodes an infer request; returns its body, and the `JSON_LENGTH_HEADER`.

    Without `outputs`, the server returns all outputs. With `binary`, tensors travel as raw bytes, both ways.
    """
    merged: dict[str, Any] = {name: _scalar(name, value) for name, value in (parameters or {}).items()}
    if binary:
        merged["binary_data_output"] = True
    header = _RequestJson(
        inputs=[_input(tensor, binary=binary) for tensor in inputs],
        id=client_id or UNSET,
        parameters=merged or UNSET,
        outputs=[{"name": name} for name in outputs] or UNSET,
    )
    try:
        text = _encoder.encode(header)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request can't be written as JSON: {error}; parameters are plain scalars") from None
    return (b"".join((text, *(tensor.data for tensor in inputs))) if binary else text), len(text)


def decode_response(body: Bytes, json_length: int | None) -> tuple[Response, str]:
    """Decodes a reply and its `id`; binary outputs are views into `body`."""
    view = memoryview(body)
    length = len(view) if json_length is None else json_length
    if not 0 <= length <= len(view):
        raise OutputMismatch(f"a reply of {len(view)} bytes says that {json_length} of them are JSON; it was cut off")
    reply = _decode_reply(bytes(view[:length]))
    outputs = []
    position = length
    for entry in reply.outputs:
        size = entry.parameters.get("binary_data_size")
        if size is None:
            outputs.append(_tensor_of_json(entry))
            continue
        if not isinstance(size, int) or not 0 <= size <= len(view) - position:
            raise OutputMismatch(f"output '{entry.name}' of {size} bytes does not fit into the reply; it was cut off")
        outputs.append(Tensor(entry.name, entry.datatype, entry.shape, view[position : position + size]))
        position += size
    version = int(reply.model_version) if reply.model_version.isdecimal() else 0
    return Response(request_id="", model=reply.model_name, version=version, outputs=tuple(outputs)), reply.id


def _scalar(name: str, value: Scalar) -> Any:
    if not isinstance(name, str) or not isinstance(value, str | int | float):
        what = f"parameter {name!r} is of type {type(value).__name__}"
        raise InvalidRequest(f"{what}; parameters are plain scalars by name: text, bool, int or float")
    if isinstance(value, float) and not math.isfinite(value):
        return msgspec.Raw(json.dumps(value).encode())
    return value


def _input(tensor: Tensor, *, binary: bool) -> _InputJson:
    if binary:
        return _InputJson(tensor.name, tensor.shape, tensor.datatype, {"binary_data_size": tensor.nbytes})
    return _InputJson(tensor.name, tensor.shape, tensor.datatype, data=msgspec.Raw(_elements(tensor)))


def _elements(tensor: Tensor) -> bytes:
    """Encodes the elements as JSON, with NaN and infinities as in Triton."""
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidRequest(f"'{tensor.name}' is {tensor.datatype}, which JSON can't carry; send it as binary data")
    values = to_numpy(tensor).ravel().tolist()
    if tensor.datatype == "BYTES":
        values = [value.decode(errors="replace") for value in values]
    return json.dumps(values, separators=(",", ":")).encode()


def _decode_reply(text: bytes) -> _ReplyJson:
    try:
        try:
            return _decoder.decode(text)
        except msgspec.DecodeError:
            return msgspec.convert(json.loads(text), _ReplyJson)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise OutputMismatch(f"the reply is not an inference response: {error}") from None


def _tensor_of_json(entry: _OutputJson) -> Tensor:
    try:
        kind = datatype(entry.datatype)
        if kind.name == "BYTES":
            texts = np.array(entry.data, dtype=object).ravel().tolist()
            if len(texts) != element_count(entry.shape):
                raise ValueError(f"{len(texts)} elements for the shape {list(entry.shape)}")
            return Tensor(entry.name, "BYTES", entry.shape, pack_bytes(text.encode() for text in texts))
        array = np.asarray(entry.data, dtype=kind.numpy or "<f4").reshape(entry.shape)
        return from_numpy(entry.name, array, kind.name)
    except (UnsupportedDatatype, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise OutputMismatch(f"output '{entry.name}' can't be read as {entry.datatype}: {error}") from None
