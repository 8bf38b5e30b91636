"""What the routes need, made once by the composition root, and how they turn errors into replies."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.settings import Settings
from qinfer.errors import QinferError
from qinfer.models.catalog import Catalog
from qinfer.models.control import ModelControl
from qinfer.models.work import VersionWork
from qinfer_api.auth import Context, presented_key
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.forwarding import forwarded
from qinfer_api.http.infer import InferCodec, Reply, Target, error_reply, failure_reply, parse_version
from qinfer_api.http.protocol import SENT_HEADERS
from qinfer_api.jobs.service import BulkJobs
from qinfer_api.labeling.service import Labeling
from qinfer_api.observe.statistics import Statistics
from qinfer_api.requests.service import AsyncRequests
from qinfer_api.restrictions import Restrictions
from qinfer_api.server_settings import LogSettings, TraceSettings
from qinfer_api.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The use cases behind the routes.

    Attributes:
        settings: The gateway's settings.
        dispatcher: Takes infer requests.
        requests: Takes asynchronous ones.
        jobs: Takes bulk jobs.
        labeling: Takes what Label Studio calls.
        catalog: Knows the models.
        codec: Reads infer requests and makes replies.
        shared_memory: What clients on this host share with this process.
        forward: The names of the headers that become parameters of infer requests; `None` = none do.
        models: Loads and unloads them.
        statistics: Tells what they did.
        log_settings: What is logged.
        trace_settings: What is traced.
        restrictions: Which routes need a header.
        work: Returns the work of a model's versions: `control.work.read_work`.
        metrics: Returns the text of `/metrics`, of one scope or, if it is empty, all.
    """

    settings: Settings
    dispatcher: Dispatcher
    requests: AsyncRequests
    jobs: BulkJobs
    labeling: Labeling
    catalog: Catalog
    codec: InferCodec
    shared_memory: SharedMemory
    forward: re.Pattern[str] | None
    models: ModelControl
    statistics: Statistics
    work: Callable[[str], Awaitable[tuple[VersionWork, ...]]]
    log_settings: LogSettings
    trace_settings: TraceSettings
    restrictions: Restrictions
    metrics: Callable[[str], Awaitable[bytes]]


def context_of(request: Request) -> Context:
    """Returns who asks, as the headers tell it; `Dispatcher.authorize` checks it."""
    headers = request.headers
    key = presented_key(headers.get("authorization"), headers.get("x-api-key"))
    return Context(trace=headers.get("traceparent", ""), key=key)


def target_of(request: Request) -> Target:
    """Returns the model that a path names, and the version, if it names one.

    Raises:
        InvalidRequest: The version is no number.
    """
    path = request.path_params
    return Target(path["model"], parse_version(path["version"]) if "version" in path else 0)


def headers_forwarded(services: Services, request: Request) -> dict[str, str]:
    """Returns the headers of a request that become its parameters."""
    if services.forward is None:
        return {}
    return forwarded(services.forward, getattr(request.state, SENT_HEADERS, request.headers.raw))


def needs(services: Services, scope: Scope) -> Any:
    """Returns the dependency of routes that only callers with a scope may use."""

    async def check(request: Request) -> None:
        services.dispatcher.authorize(context_of(request), scope)

    return Depends(check)


def restricted(services: Services, group: str) -> list[Any]:
    """Returns the dependencies of routes of a group that the operator may restrict; none where it is not restricted."""
    if not services.restrictions.covers(group):
        return []

    async def check(request: Request) -> None:
        services.restrictions.check(group, request.headers.get)

    return [Depends(check)]


def send_json(body: object, status: int = 200) -> HttpResponse:
    """Makes the HTTP response of a body that is a struct, or several."""
    return send(Reply(status, msgspec.json.encode(body)))


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
