"""Bodies, for the routes: read with a limit, decompressed, decoded, encoded; and the description of those of infer.

Whatever takes long (decompression, a large body or reply) runs in a thread, off the event loop.
"""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive

from qinfer.core.messages import Response
from qinfer.errors import QinferError
from qinfer.tensors import Bytes
from qinfer.wire.kserve_types import InputParameters, OutputParameters
from qinfer.wire.outputs import OutputPlan
from qinfer_api.http.fast import MAX_FAST_BYTES
from qinfer_api.http.infer import (
    JSON_LENGTH_HEADER,
    Encoding,
    InferCodec,
    Reply,
    decompress,
    request_encoding,
    too_large,
)
from qinfer_api.json_types import decode_json
from qinfer_api.rest.openapi import Json, errors, header
from qinfer_api.rest.services import Services, send

T = TypeVar("T")

_Scalar = bool | int | float | str


# Of infer the schema only: `qinfer.wire` reads and writes these bodies, with exact numbers and Triton's errors.


class InferInput(msgspec.Struct, frozen=True):
    """An input of a model; `data`, or `parameters.binary_data_size` bytes after the JSON part.

    Attributes:
        datatype: Such as `FP32`, `INT64` or `BYTES`.
        data: The elements in row-major order, nested or flat.
    """

    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    datatype: str
    parameters: InputParameters | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class WantedOutput(msgspec.Struct, frozen=True):
    """An output that is wanted."""

    name: str
    parameters: OutputParameters | UnsetType = UNSET


class InferCall(msgspec.Struct, frozen=True):
    """A question to a model.

    Attributes:
        id: Echoed in the reply.
        parameters: `binary_data_output`, `priority`, `timeout` (µs), and your own.
        outputs: The outputs wanted; all of them if left out.

    Example:
        {"id": "42", "inputs": [{"name": "image", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 0.5, 0.5, 1.0]}]}
    """

    inputs: list[InferInput]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[WantedOutput] = []


class OutputTensor(msgspec.Struct, frozen=True):
    """An output of a model; `data`, or `parameters.binary_data_size` bytes after the JSON part."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, _Scalar] = {}
    data: list[Any] | UnsetType = UNSET


class InferBody(msgspec.Struct, frozen=True):
    """The answer of a model.

    Attributes:
        id: The request's id; left out if it had none.
        parameters: What the model says besides its outputs.

    Example:
        {"id": "42", "model_name": "digits", "model_version": "1",
         "outputs": [{"name": "label", "shape": [1], "datatype": "INT64", "data": [7]}]}
    """

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str = ""
    parameters: dict[str, _Scalar] = {}


_BINARY = {"schema": {"type": "string", "format": "binary"}}

JSON_LENGTH = header(
    JSON_LENGTH_HEADER,
    "Length of the JSON part when raw tensor bytes follow it; 0: the body is the data of the model's one input.",
    type="integer",
    minimum=0,
)
INFER_BODY: Json = {
    "required": True,
    "description": "JSON, or JSON followed by the raw bytes of each binary input. May be gzip or deflate encoded.",
    "content": {"application/json": {"schema": InferCall}, "application/octet-stream": _BINARY},
}
OUTPUTS: Json = {
    "description": f"The outputs. Binary outputs follow the JSON, whose length `{JSON_LENGTH_HEADER}` then tells.",
    "content": {"application/octet-stream": _BINARY, "application/json": {"schema": InferBody}},
}
INFER_ERRORS = errors(400, 401, 403, 404, 500, 501, 503)


async def read_body(request: Request, max_bytes: int) -> Bytes:
    """Reads the body, never more than `max_bytes` of it, and undoes its encoding.

    Raises:
        PayloadTooLarge: It is larger, as sent or decompressed.
        UnsupportedFeature: It is in an encoding that is not known.
    """
    encoding = request_encoding(request.headers.get("content-encoding"))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large(int(declared), max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large(None, max_bytes)
    return body if encoding is None else await asyncio.to_thread(decompress, body, encoding, max_bytes)


async def read_json(
    services: Services, request: Request, kind: type[T], *, prefix: str = "", may_be_empty: bool = False
) -> T:
    """Reads a body that is a JSON object: see `decode_json`; where it may be empty, no body is an empty object.

    Raises:
        PayloadTooLarge: It is larger than `http.max_input_bytes`.
        UnsupportedFeature: It is in an encoding that is not known.
        QinferError: As `decode_json`.
    """
    body = bytes(await read_body(request, services.settings.http.max_input_bytes))
    if not body and may_be_empty:
        body = b"{}"
    max_depth = services.settings.limits.max_json_depth
    if len(body) > MAX_FAST_BYTES:
        return await asyncio.to_thread(decode_json, body, kind, max_depth, prefix=prefix)
    return decode_json(body, kind, max_depth, prefix=prefix)


async def encoded_reply(codec: InferCodec, response: Response, client_id: str, plan: OutputPlan) -> Reply:
    """Encodes a response as the client asked for it; see `InferCodec.encode`."""
    if sum(output.nbytes for output in response.outputs) > MAX_FAST_BYTES:
        return await asyncio.to_thread(codec.encode, response, client_id, plan)
    return codec.encode(response, client_id, plan)


async def send_encoded(reply: Reply, encoding: Encoding | None) -> HttpResponse:
    """Makes the HTTP response of a reply, its body in an encoding that the client takes."""
    if encoding is None or reply.status != 200:
        return send(reply)
    if len(reply.body) > MAX_FAST_BYTES:
        return send(await asyncio.to_thread(reply.compressed, encoding))
    return send(reply.compressed(encoding))


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Awaits `work` for a client whose body was read; `None` when the client left first, and then `work` is cancelled.

    Raises:
        QinferError: What `work` raises.
    """

    async def caught() -> T | QinferError:
        try:
            return await work
        except QinferError as error:  # as a value: the group would wrap it
            return error

    async def watch(task: asyncio.Task[T | QinferError]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(caught())
        watcher = group.create_task(watch(task))
        await asyncio.wait([task])
        watcher.cancel()
    if task.cancelled():
        return None
    outcome = task.result()
    if isinstance(outcome, QinferError):
        raise outcome
    return outcome
