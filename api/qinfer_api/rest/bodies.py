"""Bodies of infer requests and replies, for the routes: read with a limit, decompressed, decoded, encoded.

Whatever takes long (decompression, a large body or reply) runs in a thread, off the event loop.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive

from qinfer.codec.outputs import OutputPlan
from qinfer.errors import QinferError
from qinfer.messages import Response
from qinfer.tensors import Bytes
from qinfer_api.http.compression import Encoding, decompress, request_encoding, too_large
from qinfer_api.http.fast import MAX_FAST_BYTES
from qinfer_api.http.infer import InferCodec
from qinfer_api.http.replies import Reply
from qinfer_api.rest.services import send

T = TypeVar("T")


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
