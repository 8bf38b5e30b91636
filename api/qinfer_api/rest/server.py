"""Routes about the server and its models: metadata, health, metrics, configuration, statistics, changeable settings.

The settings are those of logging and tracing, which clients change while the server runs (reference §1.3 … §1.5, §1.13,
§1.16, §1.17).
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.errors import Overloaded
from qinfer.observe.metrics import CONTENT_TYPE
from qinfer_api import about
from qinfer_api.about import ModelMetadata, is_model_ready, model_metadata
from qinfer_api.http.infer import Reply, error_reply
from qinfer_api.observe.statistics import ModelStats
from qinfer_api.observe.trace_file import TraceChanges
from qinfer_api.rest.openapi import answer, body, errors, operation, query
from qinfer_api.rest.services import Services, needs, read_json, restricted, send, send_json, target_of
from qinfer_api.server_settings import LogChanges, LogValues, TraceValues

_METADATA = operation("", {200: answer("The metadata.", about.ServerMetadata), **errors(401, 403)})
_LIVE = operation("", {200: answer("It is running."), **errors(403, 503)})
_READY = operation(
    "", {200: answer("Every model is ready."), 400: answer("A model is not ready; no body."), **errors(403, 503)}
)
_SCOPE = query(
    "scope",
    "cluster: of the whole installation; process: of this gateway; both if omitted.",
    type="string",
    default="",
    examples=["cluster"],
)
_METRICS = operation("", {200: answer("The metrics.", {"type": "string"}, kind="text/plain"), **errors(400)}, _SCOPE)


def server_routes(services: Services) -> APIRouter:
    """Returns the routes about the server."""
    router = APIRouter(tags=["server"])
    health = restricted(services, "health")

    @router.get("/v2", dependencies=[*restricted(services, "metadata"), needs(services, Scope.INFER)], **_METADATA)
    async def server_metadata() -> HttpResponse:
        """Tells the server's name, version and protocol extensions."""
        return send_json(about.server_metadata(services.settings))

    @router.get("/v2/health/live", dependencies=health, **_LIVE)
    async def live() -> HttpResponse:
        """Answers 200 while the gateway runs; 503 while it shuts down."""
        return _exiting() if services.dispatcher.draining else HttpResponse()

    @router.get("/v2/health/ready", dependencies=health, **_READY)
    async def ready() -> HttpResponse:
        """Answers 200 when every model is ready, 400 when one is not; 503 while the gateway shuts down."""
        if services.dispatcher.draining:
            return _exiting()
        is_ready = about.is_server_ready(services.settings, services.catalog, draining=False)
        return HttpResponse(status_code=200 if is_ready else 400)

    @router.get("/metrics", **_METRICS)
    async def metrics(scope: str = "") -> HttpResponse:
        """Gives the metrics in Prometheus text format."""
        return HttpResponse(await services.metrics(scope), media_type=CONTENT_TYPE)

    return router


def _exiting() -> HttpResponse:
    return send(error_reply(503, "Server exiting", 1))


_DESCRIBE = operation("", {200: answer("The metadata.", ModelMetadata), **errors(400, 401, 403, 404, 503)})
_IS_READY = operation("", {200: answer("It is ready."), **errors(400, 403, 404, 503)})
_CONFIG = operation("", {200: answer("The configuration.", {"type": "object"}), **errors(400, 401, 403, 404, 503)})
_STATISTICS = operation("", {200: answer("The statistics.", ModelStats), **errors(400, 401, 403, 503)})


def statistics_routes(services: Services) -> APIRouter:
    """Returns the routes of the statistics extension."""
    router = APIRouter(
        tags=["models"], dependencies=[*restricted(services, "statistics"), needs(services, Scope.INFER)]
    )

    @router.get("/v2/models/stats", **_STATISTICS)
    async def statistics() -> HttpResponse:
        """Returns the statistics of all ready model versions; counters are about a second old, and never decrease."""
        return send_json(ModelStats(await services.statistics.model_statistics()))

    @router.get("/v2/models/{model}/versions/{version}/stats", name="version_statistics", **_STATISTICS)
    @router.get("/v2/models/{model}/stats", name="model_statistics", **_STATISTICS)
    async def model_statistics(request: Request) -> HttpResponse:
        """Returns the statistics of the ready versions of a model, or of the version in the path."""
        return send_json(ModelStats(await services.statistics.model_statistics(*target_of(request))))

    return router


def model_routes(services: Services) -> APIRouter:
    """Returns the other routes about models."""
    router = APIRouter(tags=["models"])
    infer, open_to_all = needs(services, Scope.INFER), restricted(services, "health")
    found, shown = [*restricted(services, "metadata"), infer], [*restricted(services, "model-config"), infer]

    @router.get("/v2/models/{model}/versions/{version}", name="version_metadata", dependencies=found, **_DESCRIBE)
    @router.get("/v2/models/{model}", name="metadata", dependencies=found, **_DESCRIBE)
    async def metadata(request: Request) -> HttpResponse:
        """Describes a model, with the versions that are ready, or the version of the path."""
        return send_json(model_metadata(services.catalog, *target_of(request)))

    @router.get(
        "/v2/models/{model}/versions/{version}/ready", name="version_ready", dependencies=open_to_all, **_IS_READY
    )
    @router.get("/v2/models/{model}/ready", name="model_ready", dependencies=open_to_all, **_IS_READY)
    async def model_ready(request: Request) -> HttpResponse:
        """Answers 200 when a version of the model, or that of the path, is ready."""
        target = target_of(request)
        if services.dispatcher.draining:
            raise Overloaded("Server exiting")
        if not is_model_ready(services.catalog, *target):
            return send(error_reply(400, "Model version not ready"))
        return HttpResponse()

    @router.get("/v2/models/{model}/versions/{version}/config", name="version_config", dependencies=shown, **_CONFIG)
    @router.get("/v2/models/{model}/config", name="model_config", dependencies=shown, **_CONFIG)
    async def model_config(request: Request) -> HttpResponse:
        """Gives the complete, normalised model configuration."""
        return send(Reply(200, services.catalog.config_json(*target_of(request)).encode()))

    return router


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
        """Returns the log settings of all processes of the server."""
        return send_json(await log.read())

    @router.post("/v2/logging", dependencies=[*of_log, changing], **_LOG_UPDATE)
    async def update_log_settings(request: Request) -> HttpResponse:
        """Changes the log settings of all processes of the server; omitted and `null` fields do not change."""
        return send_json(await log.update(await read_json(services, request, dict[str, Any])))

    @router.get("/v2/trace/setting", dependencies=[*of_trace, reading], **_TRACE_READ)
    async def trace_settings() -> HttpResponse:
        """Returns the trace settings."""
        return send_json(await trace.read())

    @router.post("/v2/trace/setting", dependencies=[*of_trace, changing], **_TRACE_UPDATE)
    async def update_trace_settings(request: Request) -> HttpResponse:
        """Changes the trace settings; `null` resets a setting to its value at the start."""
        return send_json(await trace.update(await read_json(services, request, dict[str, Any])))

    @router.get("/v2/models/{model}/trace/setting", dependencies=[*of_trace, reading], **_TRACE_READ)
    async def model_trace_settings(model: str) -> HttpResponse:
        """Returns the trace settings of a model."""
        return send_json(await trace.read(model))

    @router.post("/v2/models/{model}/trace/setting", dependencies=[*of_trace, changing], **_TRACE_UPDATE)
    async def update_model_trace_settings(model: str, request: Request) -> HttpResponse:
        """Changes the trace settings of a model; `null` resets a setting to the server's value."""
        return send_json(await trace.update(await read_json(services, request, dict[str, Any]), model))

    return router
