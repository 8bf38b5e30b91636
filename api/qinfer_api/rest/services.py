"""What the routes need, made once by the composition root, and how they turn errors into replies."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.control.catalog import Catalog
from qinfer.errors import QinferError
from qinfer.settings import Settings
from qinfer_api.auth import Context, presented_key
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.fast import Reply, error_reply, failure_reply
from qinfer_api.requests import AsyncRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The use cases behind the routes.

    Attributes:
        settings: The gateway's settings.
        dispatcher: Takes infer requests.
        requests: Takes asynchronous ones.
        catalog: Knows the models.
        metrics: Returns the text of `/metrics`.
    """

    settings: Settings
    dispatcher: Dispatcher
    requests: AsyncRequests
    catalog: Catalog
    metrics: Callable[[], Awaitable[bytes]]


def context_of(request: Request) -> Context:
    """Returns who asks, as the headers tell it; `Dispatcher.authorize` checks it."""
    headers = request.headers
    key = presented_key(headers.get("authorization"), headers.get("x-api-key"))
    return Context(trace=headers.get("traceparent", ""), key=key)


def needs(services: Services, scope: Scope) -> Any:
    """Returns the dependency of routes that only callers with a scope may use."""

    async def check(request: Request) -> None:
        services.dispatcher.authorize(context_of(request), scope)

    return Depends(check)


def send(reply: Reply) -> HttpResponse:
    """Makes the HTTP response of a reply, with exactly the headers that the fast path writes."""
    response = HttpResponse(status_code=reply.status)
    response.body = reply.body
    name_values = (line.split(b": ", 1) for line in reply.head().splitlines())
    response.raw_headers = [(name, value) for name, value in name_values]
    return response


async def on_qinfer_error(request: Request, error: Exception) -> HttpResponse:
    """Answers an error of ours that a route raised."""
    response = send(failure_reply(error, v1=request.url.path.startswith("/v1/")))
    if isinstance(error, QinferError) and "content-encoding" in request.headers and response.status_code == 501:
        response.headers["accept-encoding"] = "gzip, deflate"  # tells what would have worked (reference §1.11)
    return response


async def on_unknown_route(request: Request, error: Exception) -> HttpResponse:
    """Answers a path or a method that does not exist, in the protocol's words."""
    status = getattr(error, "status_code", 404)
    message = {404: "Not Found", 405: "Method Not Allowed"}.get(status, str(getattr(error, "detail", error)))
    response = send(error_reply(status, message))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def on_defect(request: Request, error: Exception) -> HttpResponse:
    """Answers a foreign exception; starlette logs it."""
    return send(failure_reply(error))
