"""`/v2/logging` and `…/trace/setting`: settings that clients change while the server runs (reference §1.16, §1.17)."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer_api.observe.trace_values import TraceChanges
from qinfer_api.rest.bodies import read_json
from qinfer_api.rest.openapi import answer, body, errors, operation
from qinfer_api.rest.services import Services, needs, restricted, send_json
from qinfer_api.server_settings import LogChanges, LogValues, TraceValues

_LOG, _TRACE = {200: answer("The settings.", LogValues)}, {200: answer("The settings.", TraceValues)}
_LOG_READ = operation("", {**_LOG, **errors(401, 403, 503)})
_LOG_UPDATE = operation("", {**_LOG, **errors(400, 401, 403, 500, 501, 503)}, takes=body(LogChanges))
_TRACE_READ = operation("", {**_TRACE, **errors(400, 401, 403, 503)})
_TRACE_UPDATE = operation("", {**_TRACE, **errors(400, 401, 403, 500, 501, 503)}, takes=body(TraceChanges))


def settings_routes(services: Services) -> APIRouter:
    """Returns the routes of the logging and trace extensions; reading takes the scope `infer`, changing `admin`."""
    router = APIRouter(tags=["server"])
    log, trace = services.log_settings, services.trace_settings
    of_log, of_trace = restricted(services, "logging"), restricted(services, "trace")
    reading, changing = needs(services, Scope.INFER), needs(services, Scope.ADMIN)

    @router.get("/v2/logging", dependencies=[*of_log, reading], **_LOG_READ)
    async def log_settings() -> HttpResponse:
        """Tells what the processes of the server log."""
        return send_json(await log.read())

    @router.post("/v2/logging", dependencies=[*of_log, changing], **_LOG_UPDATE)
    async def update_log_settings(request: Request) -> HttpResponse:
        """Changes what all processes of the server log; what is left out or `null` stays."""
        return send_json(await log.update(await read_json(services, request, dict[str, Any])))

    @router.get("/v2/trace/setting", dependencies=[*of_trace, reading], **_TRACE_READ)
    async def trace_settings() -> HttpResponse:
        """Tells what is to be traced."""
        return send_json(await trace.read())

    @router.post("/v2/trace/setting", dependencies=[*of_trace, changing], **_TRACE_UPDATE)
    async def update_trace_settings(request: Request) -> HttpResponse:
        """Changes what is to be traced; `null` is the value at the start."""
        return send_json(await trace.update(await read_json(services, request, dict[str, Any])))

    @router.get("/v2/models/{model}/trace/setting", dependencies=[*of_trace, reading], **_TRACE_READ)
    async def model_trace_settings(model: str) -> HttpResponse:
        """Tells what is to be traced of a model."""
        return send_json(await trace.read(model))

    @router.post("/v2/models/{model}/trace/setting", dependencies=[*of_trace, changing], **_TRACE_UPDATE)
    async def update_model_trace_settings(model: str, request: Request) -> HttpResponse:
        """Changes what is to be traced of a model; `null` is the server's value."""
        return send_json(await trace.update(await read_json(services, request, dict[str, Any]), model))

    return router
