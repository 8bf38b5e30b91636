"""`POST …/infer` through FastAPI: large, compressed, chunked or otherwise special requests.

The body never meets pydantic: it is read with a limit, decompressed, and handed to the functions of `http/infer.py`.
Whatever takes long (decompression, a large body or reply) runs in a thread, off the event loop.
"""

import asyncio

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive

from qinfer.core.api_keys import Scope
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import QinferError
from qinfer.models.catalog import Served
from qinfer.tensors import Bytes
from qinfer.wire.outputs import OutputPlan
from qinfer_api.http.fast import MAX_FAST_BYTES
from qinfer_api.http.infer import JSON_LENGTH_HEADER, FutureSink, Target, response_encoding, with_headers
from qinfer_api.requests.routes import ACCEPTED, PREFER, submit
from qinfer_api.rest.openapi import operation
from qinfer_api.rest.services import (
    INFER_BODY,
    INFER_ERRORS,
    JSON_LENGTH,
    OUTPUTS,
    Services,
    context_of,
    encoded_reply,
    headers_forwarded,
    read_body,
    read_preferences,
    send_encoded,
    target_of,
)

_INFER = operation("Run a model", {200: OUTPUTS, 202: ACCEPTED, **INFER_ERRORS}, JSON_LENGTH, PREFER, takes=INFER_BODY)


def infer_routes(services: Services) -> APIRouter:
    """Returns the infer routes."""
    router = APIRouter(tags=["inference"])

    @router.post("/v2/models/{model}/versions/{version}/infer", name="infer_version", **_INFER)
    @router.post("/v2/models/{model}/infer", name="infer", **_INFER)
    async def infer(request: Request) -> HttpResponse:
        """Runs a model on the tensors of the request: its highest ready version, or that of the path."""
        return await _infer(services, target_of(request), request)

    return router


async def _infer(services: Services, target: Target, request: Request) -> HttpResponse:
    """Reads, submits, waits, answers; what is refused before the wait is raised to the error handler."""
    dispatcher, headers = services.dispatcher, request.headers
    preferences = read_preferences(headers.getlist("prefer"))
    if preferences.is_async:
        return await submit(services, target, request, preferences)
    sink = FutureSink()
    try:
        context = dispatcher.authorize(context_of(request), Scope.INFER)
        served = dispatcher.resolve(target.model, target.version)  # before a large body is read for nothing
        body = await read_body(request, services.settings.http.max_input_bytes)
        decoding = (services, served, target, body, headers.get(JSON_LENGTH_HEADER))
        if len(body) > MAX_FAST_BYTES or services.codec.shares_memory:
            decoded, plan = await asyncio.to_thread(_decode, *decoding)
        else:
            decoded, plan = _decode(*decoding)
        with_headers(decoded, headers_forwarded(services, request))
        pending = dispatcher.submit(context, decoded, sink)
    except ClientDisconnect:
        return HttpResponse()  # nobody reads it
    except QinferError as error:
        raise dispatcher.refuse(target.model, target.version, error) from None
    try:
        response = await _answer(sink, request.receive)
    finally:
        dispatcher.cancel(pending)  # does nothing once it is answered
    if response is None:
        return HttpResponse()
    reply = await encoded_reply(services.codec, response, decoded.client_id, plan)
    return await send_encoded(reply, response_encoding(headers.get("accept-encoding")))


async def _answer(sink: FutureSink, receive: Receive) -> Response | None:
    """Waits for the response; `None` when the client left first."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        sink.response.cancel()

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        await asyncio.wait([sink.response])
        watcher.cancel()
    return None if sink.response.cancelled() else sink.response.result()


def _decode(
    services: Services, served: Served, target: Target, body: Bytes, json_length: str | None
) -> tuple[InferRequest, OutputPlan]:
    """Decodes and checks a body; both take long for a large one."""
    decoded, plan = services.codec.decode(target, body, json_length, served)
    services.dispatcher.check(decoded, served)
    return decoded, plan
