"""`/v2/logging` and `…/trace/setting`: settings that clients change while the server runs (reference §1.16, §1.17)."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer_api.http.replies import Reply
from qinfer_api.rest.control_schema import LOG_READ, LOG_UPDATE, TRACE_READ, TRACE_UPDATE
from qinfer_api.rest.json_body import read_object
from qinfer_api.rest.services import Services, needs, restricted, send


def settings_routes(services: Services) -> APIRouter:
    """Returns the routes of the logging and trace extensions; reading takes the scope `infer`, changing `admin`."""
    router = APIRouter(tags=["server"])
    log, trace = services.log_settings, services.trace_settings
    of_log, of_trace = restricted(services, "logging"), restricted(services, "trace")
    reading, changing = needs(services, Scope.INFER), needs(services, Scope.ADMIN)

    @router.get("/v2/logging", dependencies=[*of_log, reading], **LOG_READ)
    async def log_settings() -> HttpResponse:
        """Tells what the processes of the server log."""
        return _json(await log.read())

    @router.post("/v2/logging", dependencies=[*of_log, changing], **LOG_UPDATE)
    async def update_log_settings(request: Request) -> HttpResponse:
        """Changes what all processes of the server log; what is left out or `null` stays."""
        return _json(await log.update(await read_object(services, request)))

    @router.get("/v2/trace/setting", dependencies=[*of_trace, reading], **TRACE_READ)
    async def trace_settings() -> HttpResponse:
        """Tells what is to be traced."""
        return _json(await trace.read())

    @router.post("/v2/trace/setting", dependencies=[*of_trace, changing], **TRACE_UPDATE)
    async def update_trace_settings(request: Request) -> HttpResponse:
        """Changes what is to be traced; `null` is the value at the start."""
        return _json(await trace.update(await read_object(services, request)))

    @router.get("/v2/models/{model}/trace/setting", dependencies=[*of_trace, reading], **TRACE_READ)
    async def model_trace_settings(model: str) -> HttpResponse:
        """Tells what is to be traced of a model."""
        return _json(await trace.read(model))

    @router.post("/v2/models/{model}/trace/setting", dependencies=[*of_trace, changing], **TRACE_UPDATE)
    async def update_model_trace_settings(model: str, request: Request) -> HttpResponse:
        """Changes what is to be traced of a model; `null` is the server's value."""
        return _json(await trace.update(await read_object(services, request), model))

    return router


def _json(shown: object) -> HttpResponse:
    return send(Reply(200, msgspec.json.encode(shown)))
