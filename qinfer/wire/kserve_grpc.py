"""The infer request of the KServe v2 protocol over gRPC (reference §2.2).

Inputs arrive as `raw_input_contents`, in the inputs' order, or as typed `contents`; one request uses one of the two.
Inputs in shared memory are skipped in both.
"""

from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest
from qinfer.tensors import Bytes, Tensor, pack_bytes
from qinfer.wire.kserve_grpc_parameters import apply_request_parameters, plan_outputs, shared_memory_of
from qinfer.wire.outputs import OutputPlan, Regions
from qinfer.wire.protobuf_wire import cut_out, malformed, values_of

_RAW_FIELD = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_COPY_MAX_BYTES = 16 * 1024  # up to here protobuf's own copies cost less than walking over the message

_TYPED = {  # field of InferTensorContents → the datatypes that it may hold, the one it is called first
    "bool_contents": ("BOOL",),
    "int_contents": ("INT32", "INT16", "INT8"),
    "int64_contents": ("INT64",),
    "uint_contents": ("UINT32", "UINT16", "UINT8"),
    "uint64_contents": ("UINT64",),
    "fp32_contents": ("FP32",),
    "fp64_contents": ("FP64",),
}
_PACKED = ("BOOL", "FP32", "FP64")  # protobuf writes a list of these as tensors do
_CHUNK = 64 * 1024  # elements that are converted at once: other threads get their turn in between
_ELEMENTS = {
    "INT8": "|i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "|u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
}


class Message(NamedTuple):
    """An infer request that was parsed and not yet looked at: the message, and its raw inputs beside it."""

    fields: Any
    raw: list[Bytes]


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


def parse_infer(blob: bytes) -> Message:
    """Parses a ModelInferRequest; large raw inputs become views into `blob`.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        if len(blob) <= _COPY_MAX_BYTES:
            fields = pb.ModelInferRequest.FromString(blob)
            return Message(fields, list(fields.raw_input_contents))
        rest, raw = cut_out(blob, _RAW_FIELD)
        return Message(pb.ModelInferRequest.FromString(rest), list(raw))
    except DecodeError:
        raise malformed() from None


def decode_infer(message: Message, regions: Regions) -> Decoded:
    """Decodes a parsed request.

    Args:
        message: The request.
        regions: The shared memory that clients registered.

    Raises:
        InvalidRequest: A field is wrong, or inputs and data do not match.
        QinferError: A region is not registered or too small, or shared memory is off.
    """
    fields, raw = message
    model: str = fields.model_name
    inputs: list[Tensor] = []
    position = 0
    for entry in fields.inputs:
        data: Bytes
        if entry.parameters and (region := shared_memory_of(entry)) is not None:
            if entry.HasField("contents"):
                raise InvalidRequest(
                    f"unexpected 'content' provided when using shared memory for input tensor '{entry.name}' "
                    f"for model '{model}'"
                )
            data = regions.view(*region)
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
    plan = _DEFAULT_PLAN
    if fields.outputs:
        request.outputs, plan = plan_outputs(fields.outputs, regions)
    return Decoded(request, fields.model_version, plan, empty_final)


_DEFAULT_PLAN = OutputPlan()


def _typed(entry: Any, raw: list[Bytes], model: str) -> Bytes:
    """Turns an input's typed contents into tensor bytes."""
    if not entry.HasField("contents"):
        raise _no_data(entry.name, model)
    if raw:
        raise InvalidRequest(
            f"contents field must not be specified when using raw_input_contents for '{entry.name}' for model '{model}'"
        )
    filled = entry.contents.ListFields()
    if not filled:
        return b""
    unexpected = f"unexpected explicit tensor data for input tensor '{entry.name}' for model '{model}'"
    if len(filled) > 1:
        raise InvalidRequest(f"{unexpected}, binary data was already supplied.")
    field, values = filled[0]
    held = _TYPED.get(field.name, ("BYTES",))
    if entry.datatype not in held:
        raise InvalidRequest(f"{unexpected} of type '{held[0]}', expected datatype '{entry.datatype}'")
    if entry.datatype == "BYTES":
        return pack_bytes(values)
    if entry.datatype in _PACKED:
        return values_of(entry.contents.SerializeToString())
    # A number that the datatype can't hold keeps its low bytes, as with Triton.
    wide, narrow = _ELEMENTS[held[0]], _ELEMENTS[entry.datatype]
    starts = range(0, len(values), _CHUNK)
    return b"".join(
        [np.array(values[at : at + _CHUNK], dtype=wide).astype(narrow, copy=False).tobytes() for at in starts]
    )


def _no_data(name: str, model: str) -> InvalidRequest:
    return InvalidRequest(f"unable to find data for input tensor '{name}' for model '{model}' in request.")
