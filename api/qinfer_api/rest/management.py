"""Routes other than inference (reference §1.3 … §1.5, §1.13 … §1.17)."""

import asyncio
import base64
import binascii
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest, MalformedJson, Overloaded, UnsupportedFeature
from qinfer.models.state import ModelPause
from qinfer.observe.exposition import CONTENT_TYPE
from qinfer.wire.bodies import ModelIndexEntry, ModelMetadata, index_body
from qinfer_api import about
from qinfer_api.about import LogChanges, LogValues, TraceValues, is_model_ready, model_metadata
from qinfer_api.http.infer import HttpReply, error_reply
from qinfer_api.observe.statistics import ModelStats
from qinfer_api.observe.trace_file import TraceChanges
from qinfer_api.receiving import AGAIN_S
from qinfer_api.requests.records import written
from qinfer_api.rest.openapi import Json, body, describe_response, errors, operation, query
from qinfer_api.rest.services import Services, caller, guarded, read_body, read_json, send, send_json, target_of
from qinfer_api.shared_memory import CudaRegion, Region
from qinfer_api.status import decode_json

_DONE = HttpReply(200, b"")

_METADATA = operation("", {200: describe_response("The metadata.", about.ServerMetadata), **errors(401, 403)})
_LIVE = operation("", {200: describe_response("It is running."), **errors(403, 503)})
_READY = operation(
    "",
    {
        200: describe_response("It may get requests."),
        400: describe_response("Not yet, or a model is not ready; no body."),
        **errors(403, 503),
    },
)
_SCOPE = query(
    "scope",
    "cluster: of the whole installation; process: of this gateway; both if omitted.",
    type="string",
    default="",
    examples=["cluster"],
)
_METRICS = operation(
    "", {200: describe_response("The metrics.", {"type": "string"}, kind="text/plain"), **errors(400)}, _SCOPE
)


def server_routes(services: Services) -> APIRouter:
    """Returns the routes about the server."""
    router = APIRouter(tags=["server"])
    health = guarded(services, "health")

    @router.get("/v2", dependencies=guarded(services, "metadata", Scope.VIEWER), **_METADATA)
    async def server_metadata() -> HttpResponse:
        """Returns the server's name, version and protocol extensions."""
        return send_json(about.server_metadata(services.settings))

    @router.get("/v2/health/live", dependencies=health, **_LIVE)
    async def live() -> HttpResponse:
        """Returns 200 while the gateway runs; 503 while it shuts down."""
        return _exiting() if services.dispatcher.draining else HttpResponse()

    @router.get("/v2/health/ready", dependencies=health, **_READY)
    async def ready() -> HttpResponse:
        """Returns 200 once a model is ready, in strict mode while all are; 400 otherwise, 503 while shutting down."""
        if services.dispatcher.draining:
            return _exiting()
        is_ready = about.is_server_ready(services.settings, services.catalog, draining=False)
        return HttpResponse(status_code=200 if is_ready else 400)

    @router.get("/metrics", **_METRICS)
    async def metrics(request: Request, scope: str = "") -> HttpResponse:
        """Returns the metrics in Prometheus text format."""
        text, kind = await services.reporting.metrics(scope, request.headers.get("accept", ""))
        return HttpResponse(text, media_type=kind or CONTENT_TYPE)

    return router


def _exiting() -> HttpResponse:
    return send(error_reply(503, "Server exiting", AGAIN_S))


_DESCRIBE = operation("", {200: describe_response("The metadata.", ModelMetadata), **errors(400, 401, 403, 404, 503)})
_IS_READY = operation("", {200: describe_response("It is ready."), **errors(400, 403, 404, 503)})
_CONFIG = operation(
    "", {200: describe_response("The configuration.", {"type": "object"}), **errors(400, 401, 403, 404, 503)}
)
_STATISTICS = operation("", {200: describe_response("The statistics.", ModelStats), **errors(400, 401, 403, 503)})


def statistics_routes(services: Services) -> APIRouter:
    """Returns the routes of the statistics extension."""
    router = APIRouter(tags=["models"], dependencies=guarded(services, "statistics", Scope.VIEWER))

    @router.get("/v2/models/stats", **_STATISTICS)
    async def statistics() -> HttpResponse:
        """Returns the statistics of all ready model versions; counters never decrease."""
        return send_json(ModelStats(await services.reporting.statistics.model_statistics()))

    @router.get("/v2/models/{model}/versions/{version}/stats", name="version_statistics", **_STATISTICS)
    @router.get("/v2/models/{model}/stats", name="model_statistics", **_STATISTICS)
    async def model_statistics(request: Request) -> HttpResponse:
        """Returns the statistics of the ready versions of a model, or of the version in the path."""
        return send_json(ModelStats(await services.reporting.statistics.model_statistics(*target_of(request))))

    return router


def model_routes(services: Services) -> APIRouter:
    """Returns the other routes about models."""
    router = APIRouter(tags=["models"])
    health, found = guarded(services, "health"), guarded(services, "metadata", Scope.VIEWER)
    shown = guarded(services, "model-config", Scope.VIEWER)

    @router.get("/v2/models/{model}/versions/{version}", name="version_metadata", dependencies=found, **_DESCRIBE)
    @router.get("/v2/models/{model}", name="metadata", dependencies=found, **_DESCRIBE)
    async def metadata(request: Request) -> HttpResponse:
        """Describes a model, with the versions that are ready, or the version in the path."""
        return send_json(model_metadata(services.dispatcher.endpoints, *target_of(request)))

    @router.get("/v2/models/{model}/versions/{version}/ready", name="version_ready", dependencies=health, **_IS_READY)
    @router.get("/v2/models/{model}/ready", name="model_ready", dependencies=health, **_IS_READY)
    async def model_ready(request: Request) -> HttpResponse:
        """Returns 200 if a version of the model, or the version in the path, is ready."""
        target = target_of(request)
        if services.dispatcher.draining:
            raise Overloaded("Server exiting")
        if not is_model_ready(services.dispatcher.endpoints, *target):
            return send(error_reply(400, "Model version not ready"))
        return HttpResponse()

    @router.get("/v2/models/{model}/versions/{version}/config", name="version_config", dependencies=shown, **_CONFIG)
    @router.get("/v2/models/{model}/config", name="model_config", dependencies=shown, **_CONFIG)
    async def model_config(request: Request) -> HttpResponse:
        """Returns the complete, normalised model configuration."""
        return send(HttpReply(200, about.model_config(services.dispatcher.endpoints, *target_of(request)).encode()))

    return router


_LOG, _TRACE = (
    {200: describe_response("The settings.", LogValues)},
    {200: describe_response("The settings.", TraceValues)},
)
_LOG_READ = operation("", {**_LOG, **errors(401, 403, 503)})
_LOG_UPDATE = operation("", {**_LOG, **errors(400, 401, 403, 500, 501, 503)}, takes=body(LogChanges))
_TRACE_READ = operation("", {**_TRACE, **errors(400, 401, 403, 503)})
_TRACE_UPDATE = operation("", {**_TRACE, **errors(400, 401, 403, 500, 501, 503)}, takes=body(TraceChanges))


def settings_routes(services: Services) -> APIRouter:
    """Returns the routes of the logging and trace extensions."""
    router = APIRouter(tags=["server"])
    log, trace = services.reporting.log_settings, services.reporting.trace_settings
    log_read, log_change = (guarded(services, "logging", scope) for scope in (Scope.INFER, Scope.ADMIN))
    trace_read, trace_change = (guarded(services, "trace", scope) for scope in (Scope.INFER, Scope.ADMIN))

    @router.get("/v2/logging", dependencies=log_read, **_LOG_READ)
    async def log_settings() -> HttpResponse:
        """Returns the log settings of all processes of the server."""
        return send_json(await log.read())

    @router.post("/v2/logging", dependencies=log_change, **_LOG_UPDATE)
    async def update_log_settings(request: Request) -> HttpResponse:
        """Changes the log settings of all processes of the server; omitted and `null` fields do not change."""
        return send_json(await log.update(await read_json(services, request, dict[str, Any])))

    @router.get("/v2/trace/setting", dependencies=trace_read, **_TRACE_READ)
    async def trace_settings() -> HttpResponse:
        """Returns the trace settings."""
        return send_json(await trace.read())

    @router.post("/v2/trace/setting", dependencies=trace_change, **_TRACE_UPDATE)
    async def update_trace_settings(request: Request) -> HttpResponse:
        """Changes the trace settings; `null` resets a setting to its value at the start."""
        return send_json(await trace.update(await read_json(services, request, dict[str, Any])))

    @router.get("/v2/models/{model}/trace/setting", dependencies=trace_read, **_TRACE_READ)
    async def model_trace_settings(model: str) -> HttpResponse:
        """Returns the trace settings of a model."""
        return send_json(await trace.read(model))

    @router.post("/v2/models/{model}/trace/setting", dependencies=trace_change, **_TRACE_UPDATE)
    async def update_model_trace_settings(model: str, request: Request) -> HttpResponse:
        """Changes the trace settings of a model; `null` resets a setting to the server's value."""
        return send_json(await trace.update(await read_json(services, request, dict[str, Any]), model))

    return router


class PauseCall(msgspec.Struct, frozen=True):
    """Why a model is paused; callers of the model see it.

    Example:
        {"reason": "the feature store is down"}
    """

    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class PauseState(msgspec.Struct, frozen=True, kw_only=True):
    """A paused model or version.

    Attributes:
        version: The version; 0 = all versions of the model.
        since: The time at which it was paused.
        by: The id of the API key; empty where keys are not required.
    """

    model: str
    version: int
    since: str
    by: str
    reason: str


_PAUSES = operation(
    "List the pauses", {200: describe_response("The pauses.", list[PauseState]), **errors(401, 403, 503)}
)
_PAUSED = {200: describe_response("The pauses of the model.", list[PauseState]), **errors(400, 401, 403, 404, 503)}
_PAUSE = operation("Pause a model", _PAUSED, takes=body(PauseCall, required=False))
_RESUME = operation("Resume a model", _PAUSED)


def pause_routes(services: Services) -> APIRouter:
    """Returns the routes that pause and resume models."""
    router, models = APIRouter(tags=["models"]), services.models
    reading: Any = {"dependencies": guarded(services, "model-repository", Scope.VIEWER)}
    controlling: Any = {"dependencies": guarded(services, "model-repository", Scope.ADMIN)}
    one, version = "/v1/models/{model}", "/v1/models/{model}/versions/{version}"

    async def shown(model: str = "") -> HttpResponse:
        return send_json([_shown_pause(pause) for pause in await models.pauses(model)])

    @router.get("/v1/pauses", name="pauses", **reading, **_PAUSES)
    async def list_pauses() -> HttpResponse:
        """Lists the paused models and versions."""
        return await shown()

    @router.post(f"{version}/pause", name="pause_version", **controlling, **_PAUSE)
    @router.post(f"{one}/pause", name="pause", **controlling, **_PAUSE)
    async def pause(request: Request) -> HttpResponse:
        """Pauses all versions of a model, or the version in the path, until it is resumed, also over restarts.

        Synchronous requests are refused with 503. Stored requests are accepted and wait, as those that wait already;
        their deadlines go on. Workers end what they have begun, and take neither requests nor shards.
        """
        target, call = target_of(request), await read_json(services, request, PauseCall, may_be_empty=True)
        principal = caller(request).principal
        by = "" if principal is None else principal.key_id
        since = services.requests.now_s()
        await models.pause(
            ModelPause(model=target.model, version=target.version, since=since, by=by, reason=call.reason)
        )
        return await shown(target.model)

    @router.post(f"{version}/resume", name="resume_version", **controlling, **_RESUME)
    @router.post(f"{one}/resume", name="resume", **controlling, **_RESUME)
    async def end_pause(request: Request) -> HttpResponse:
        """Ends the pause of a model, or of the version in the path; the answer has the pauses that remain.

        A pause of the model and those of its versions are apart.
        """
        target = target_of(request)
        await models.end_pause(target.model, target.version)
        return await shown(target.model)

    return router


def _shown_pause(pause: ModelPause) -> PauseState:
    at = written(pause.since)
    return PauseState(model=pause.model, version=pause.version, since=at, by=pause.by, reason=pause.reason)


_FILE = "file:"
_UNPARSED = "Unable to parse "

_LOAD_PARAMETERS: Json = {
    "properties": {"config": {"type": "string", "description": "A model configuration in JSON."}},
    "additionalProperties": {"type": "string", "description": "`file:<version>/<name>`: the file in base64."},
}


class IndexCall(msgspec.Struct, frozen=True):
    """A query of the index.

    Attributes:
        ready: Only versions that are ready.

    Example:
        {"ready": true}
    """

    ready: bool = False


class LoadCall(msgspec.Struct, frozen=True):
    r"""Parameters of loading a model.

    Example:
        {"parameters": {"config": "{\"max_batch_size\": 16}"}}
    """

    parameters: Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_LOAD_PARAMETERS)] = {}


class UnloadParameters(msgspec.Struct, frozen=True):
    """Parameters of unloading a model."""

    unload_dependents: bool = False


class UnloadCall(msgspec.Struct, frozen=True):
    """Parameters of unloading a model.

    Example:
        {"parameters": {"unload_dependents": false}}
    """

    parameters: UnloadParameters = UnloadParameters()


_REFUSALS = errors(400, 401, 403, 500, 501, 503)
_INDEX = operation(
    "List the models",
    {200: describe_response("The models.", list[ModelIndexEntry]), **_REFUSALS},
    takes=body(IndexCall, required=False),
)
_LOAD = operation("Load a model", {200: describe_response("Done."), **_REFUSALS}, takes=body(LoadCall, required=False))
_UNLOAD = operation(
    "Unload a model", {200: describe_response("Done."), **_REFUSALS}, takes=body(UnloadCall, required=False)
)


def repository_routes(services: Services) -> APIRouter:
    """Returns the routes of the model repository extension."""
    router = APIRouter(tags=["model repository"])
    reading: Any = {"dependencies": guarded(services, "model-repository", Scope.VIEWER)}
    controlling: Any = {"dependencies": guarded(services, "model-repository", Scope.ADMIN)}

    @router.post("/v2/repository/models/{model}/load", name="repository_load", **controlling, **_LOAD)
    async def load(model: str, request: Request) -> HttpResponse:
        """Loads or reloads a model; answers when it is ready."""
        call = await read_json(services, request, LoadCall, may_be_empty=True)
        await services.models.load(model, *await asyncio.to_thread(_overrides, call.parameters))
        return send(_DONE)

    @router.post("/v2/repository/models/{model}/unload", name="repository_unload", **controlling, **_UNLOAD)
    async def unload(model: str, request: Request) -> HttpResponse:
        """Unloads a model: it accepts no more requests, and waiting requests are still answered."""
        call = await read_json(services, request, UnloadCall, prefix=_UNPARSED, may_be_empty=True)
        await services.models.unload(model, unload_dependents=call.parameters.unload_dependents)
        return send(_DONE)

    @router.post("/v2/repository/{repository}/models/{model}/load", include_in_schema=False, **controlling)
    @router.post("/v2/repository/{repository}/models/{model}/unload", include_in_schema=False, **controlling)
    async def in_repository() -> HttpResponse:
        """Refuses: models have one name over all repositories."""
        raise UnsupportedFeature("'repository_name' specification is not supported")

    @router.post("/v2/repository/index", name="repository_index", **reading, **_INDEX)
    @router.post("/v2/repository/{repository}/index", **reading, include_in_schema=False)
    async def index(request: Request) -> HttpResponse:
        """Lists the models of the repositories, with the state of those that were ever loaded."""
        call = await read_json(services, request, dict[str, Any], may_be_empty=True)
        ready = call.get("ready", False)
        if not isinstance(ready, bool):
            raise MalformedJson("Invalid value for 'ready': expected a boolean")
        found = await services.models.index(ready=ready)
        return send_json(index_body([*found, *about.endpoint_entries(services.dispatcher.endpoints, ready=ready)]))

    return router


_MAX_ENCODED = 2**31 - 1


def _overrides(parameters: dict[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise MalformedJson(f"'{name[:100]}': attempt to access JSON non-string as string")
        if name == "config":
            config = value
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _decoded(name, value)
        else:
            raise InvalidRequest(f"unrecognized load parameter '{name[:100]}'; 'config' and 'file:…' are known")
    return config, files


def _decoded(name: str, text: str) -> bytes:
    if len(text) > _MAX_ENCODED:
        raise InvalidRequest(f"'{name[:100]}' exceeds the maximum allowed data size limit INT_MAX")
    try:
        return base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"load parameter '{name[:100]}' is not base64; encode the file's bytes with it") from None


_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_MAX_BODY_BYTES = 64 * 1024


class RegionCall(msgspec.Struct, frozen=True):
    """A region to register.

    Attributes:
        key: The name of the shared memory object, as `shm_open` takes it.
        offset: Start of the region in the object, in bytes.

    Example:
        {"key": "/images", "byte_size": 1048576}
    """

    key: str
    byte_size: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class CudaHandle(msgspec.Struct, frozen=True):
    """A CUDA handle, in base64."""

    b64: str = ""


class CudaRegionCall(msgspec.Struct, frozen=True):
    """A region of CUDA's memory."""

    raw_handle: CudaHandle
    device_id: Annotated[int, msgspec.Meta(ge=0)]
    byte_size: Annotated[int, msgspec.Meta(ge=1)]


_CALL = "Shared memory register request"
_OK, _REFUSED = {200: describe_response("Done.")}, errors(400, 401, 403, 500, 501)
_STATUS, _CUDA_STATUS = (
    operation(
        "Look at shared memory regions",
        {200: describe_response("The regions; none where client memory is off.", kind), **errors(400, 401, 403, 404)},
    )
    for kind in (list[Region], list[CudaRegion])
)
_ACTION = operation("Unregister shared memory regions", {**_OK, **errors(400, 401, 403, 501)})
_REGISTER = operation("Register a system shared memory region", {**_OK, **_REFUSED}, takes=body(RegionCall))
_REGISTER_CUDA = operation("Register a CUDA shared memory region", {**_OK, **_REFUSED}, takes=body(CudaRegionCall))


def shared_memory_routes(services: Services) -> APIRouter:
    """Returns the shared memory routes."""
    router = APIRouter(tags=["shared memory"], dependencies=guarded(services, "shared-memory", Scope.INFER))
    _add_system(router, services)
    _add_cuda(router, services)
    return router


def _add_system(router: APIRouter, services: Services) -> None:
    memory = services.codec.memory

    @router.get(f"{_SYSTEM}/status", name="system_regions", **_STATUS)
    async def system_regions(request: Request) -> HttpResponse:
        """Lists the registered regions of the caller's tenant."""
        return send_json(memory.for_tenant(caller(request).tenant).status())

    @router.get(f"{_SYSTEM}/region/{{region}}/status", name="system_region", **_STATUS)
    async def system_region(region: str, request: Request) -> HttpResponse:
        """Returns one region."""
        return send_json(memory.for_tenant(caller(request).tenant).status(region))

    @router.post(f"{_SYSTEM}/register", include_in_schema=False)
    async def register_nothing() -> HttpResponse:
        """Refuses: a region needs a name."""
        memory.register("", "", 0, 0)
        return send(_DONE)

    @router.post(f"{_SYSTEM}/region/{{region}}/register", name="register_system_region", **_REGISTER)
    async def register_system_region(region: str, request: Request) -> HttpResponse:
        """Opens a shared memory object of this host under a name."""
        memory.check_allowed()
        depth = services.settings.limits.max_json_depth
        decode = partial(decode_json, kind=RegionCall, max_depth=depth, call=_CALL)
        call = await read_body(services, request, _MAX_BODY_BYTES, decode)
        own = memory.for_tenant(caller(request).tenant)
        await asyncio.to_thread(own.register, region, call.key, call.offset, call.byte_size)
        return send(_DONE)

    @router.post(f"{_SYSTEM}/unregister", name="unregister_system_regions", **_ACTION)
    async def unregister_system_regions(request: Request) -> HttpResponse:
        """Unregisters all regions of the caller's tenant."""
        memory.for_tenant(caller(request).tenant).unregister()
        return send(_DONE)

    @router.post(f"{_SYSTEM}/region/{{region}}/unregister", name="unregister_system_region", **_ACTION)
    async def unregister_system_region(region: str, request: Request) -> HttpResponse:
        """Unregisters a region; succeeds also if it is not registered."""
        memory.for_tenant(caller(request).tenant).unregister(region)
        return send(_DONE)


def _add_cuda(router: APIRouter, services: Services) -> None:
    memory = services.codec.memory

    @router.get(f"{_CUDA}/status", name="cuda_regions", **_CUDA_STATUS)
    async def cuda_regions(request: Request) -> HttpResponse:
        """Lists the registered GPU memory regions of the caller's tenant."""
        return send_json(memory.for_tenant(caller(request).tenant).cuda_status())

    @router.post(f"{_CUDA}/region/{{region}}/unregister", name="unregister_cuda_region", **_ACTION)
    @router.post(f"{_CUDA}/unregister", name="unregister_cuda_regions", **_ACTION)
    async def unregister_cuda_regions(request: Request) -> HttpResponse:
        """Unregisters one GPU memory region, or all of the caller's tenant."""
        own = memory.for_tenant(caller(request).tenant)
        await asyncio.to_thread(own.unregister, request.path_params.get("region", ""), CudaRegion)
        return send(_DONE)

    @router.get(f"{_CUDA}/region/{{region}}/status", name="cuda_region", **_CUDA_STATUS)
    async def cuda_region(region: str, request: Request) -> HttpResponse:
        """Returns one GPU memory region."""
        return send_json(memory.for_tenant(caller(request).tenant).cuda_status(region))

    @router.post(f"{_CUDA}/register", include_in_schema=False)
    @router.post(f"{_CUDA}/region/{{region}}/register", name="register_cuda_region", **_REGISTER_CUDA)
    async def register_cuda_region(request: Request) -> HttpResponse:
        """Registers memory on a GPU of this host, by the CUDA handle that its owner has made."""
        own, region = memory.for_tenant(caller(request).tenant), request.path_params.get("region", "")
        await asyncio.to_thread(own.check_cuda, region)
        depth = services.settings.limits.max_json_depth
        decode = partial(decode_json, kind=CudaRegionCall, max_depth=depth, call=_CALL)
        call = await read_body(services, request, _MAX_BODY_BYTES, decode)
        handle = b""
        with suppress(ValueError):
            handle = base64.b64decode(call.raw_handle.b64)
        await asyncio.to_thread(own.register_cuda, region, handle, call.device_id, call.byte_size)
        return send(_DONE)
