"""All calls but inference (reference §1.14 … §1.17, §2.1), and `grpc.health.v1.Health`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest, ModelNotFound, ModelNotReady, UnsupportedFeature
from qinfer.models.config.config import from_json
from qinfer.models.control import ModelControl
from qinfer.tensors import Bytes
from qinfer.traffic.routing import Endpoints
from qinfer.wire.protos import grpc_service_pb2 as pb
from qinfer.wire.protos import health_pb2
from qinfer_api.about import (
    LogValues,
    SharedLogSettings,
    SharedTraceSettings,
    endpoint_entries,
    is_model_ready,
    is_server_ready,
    model_config,
    model_metadata,
    server_metadata,
)
from qinfer_api.http.infer import parse_version
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import CallGuard, parse, read
from qinfer_api.rpc.headers import Method
from qinfer_api.rpc.protocol import GrpcCall
from qinfer_api.shared_memory import CudaRegion, SharedMemory

_HEALTH, _METADATA, _CONFIG, _STATISTICS = "health", "metadata", "model-config", "statistics"


def model_calls(guard: CallGuard, services: Services) -> dict[str, Method]:
    """Returns the methods by name."""
    catalog, settings, endpoints = services.catalog, services.settings, services.dispatcher.endpoints

    async def live(_: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ready(_: Any) -> Any:
        is_ready = is_server_ready(settings, catalog, draining=services.dispatcher.draining)
        return pb.ServerReadyResponse(ready=is_ready)

    async def model_ready(request: Any) -> Any:
        return pb.ModelReadyResponse(ready=_is_ready(endpoints, request.name, _version(request)))

    async def metadata(_: Any) -> Any:
        return _message(pb.ServerMetadataResponse, server_metadata(settings))

    async def of_model(request: Any) -> Any:
        return _message(pb.ModelMetadataResponse, model_metadata(endpoints, request.name, _version(request)))

    async def config(request: Any) -> Any:
        text = model_config(endpoints, request.name, _version(request))
        return pb.ModelConfigResponse(config=from_json(text))

    async def statistics(request: Any) -> Any:
        found = await services.reporting.statistics.model_statistics(request.name, _version(request))
        return pb.ModelStatisticsResponse(model_stats=[_message(pb.ModelStatistics, one) for one in found])

    return {
        "ServerLive": guard.question(pb.ServerLiveRequest, live, _HEALTH, None),
        "ServerReady": guard.question(pb.ServerReadyRequest, ready, _HEALTH, None),
        "ModelReady": guard.question(pb.ModelReadyRequest, model_ready, _HEALTH, None),
        "ServerMetadata": guard.question(pb.ServerMetadataRequest, metadata, _METADATA),
        "ModelMetadata": guard.question(pb.ModelMetadataRequest, of_model, _METADATA),
        "ModelConfig": guard.question(pb.ModelConfigRequest, config, _CONFIG),
        "ModelStatistics": guard.question(pb.ModelStatisticsRequest, statistics, _STATISTICS),
    }


def _is_ready(endpoints: Endpoints, model: str, version: int) -> bool:
    try:
        return is_model_ready(endpoints, model, version)
    except ModelNotReady:
        return False
    except ModelNotFound:
        if version or model not in endpoints.catalog.known():
            raise
        return False


def _message(kind: Any, body: object) -> Any:
    return kind(**msgspec.to_builtins(body))


def _version(request: Any) -> int:
    return parse_version(request.version) if request.version else 0


_KNOWN = ("", "inference.GRPCInferenceService")


_WATCH_EVERY_S = 1.0


def health_calls(guard: CallGuard, services: Services) -> dict[str, Method]:
    """Returns `grpc.health.v1.Health`, which is also served during a shutdown."""
    admit = partial(guard.admit, _HEALTH, None, even_draining=True)
    reply, statuses = health_pb2.HealthCheckResponse, health_pb2.HealthCheckResponse.ServingStatus

    def status() -> Any:
        is_ready = is_server_ready(services.settings, services.catalog, draining=services.dispatcher.draining)
        return statuses.SERVING if is_ready else statuses.NOT_SERVING

    async def check(blob: Bytes, _: GrpcCall) -> Bytes:
        service = parse(health_pb2.HealthCheckRequest, blob).service
        if service not in _KNOWN:
            raise ModelNotFound(f"service '{service[:100]}' is not known; ask for ''")
        return bytes(reply(status=status()).SerializeToString())

    async def watch(call: GrpcCall, blob: Bytes) -> None:
        is_known = parse(health_pb2.HealthCheckRequest, blob).service in _KNOWN
        last = None
        while not call.is_closed:
            now = status() if is_known else statuses.SERVICE_UNKNOWN
            if now != last:
                last = now
                await call.write((reply(status=now).SerializeToString(),))
            await asyncio.sleep(_WATCH_EVERY_S)

    def start_watch(call: GrpcCall, blob: Bytes) -> None:
        call.run(watch(call, blob), has_deadline=True)

    return {
        "Check": guard.unary(check, _HEALTH, None)._replace(admit=admit),
        "Watch": guard.method(start_watch, _HEALTH, None)._replace(admit=admit, is_awaited=False),
    }


_REPOSITORY = "model-repository"
_FILE = "file:"


def repository_calls(guard: CallGuard, models: ModelControl, endpoints: Endpoints) -> dict[str, Method]:
    """Returns the methods by name."""

    async def index(request: Any) -> Any:
        _check_repository(request)
        found = [*await models.index(ready=request.ready), *endpoint_entries(endpoints, ready=request.ready)]
        return pb.RepositoryIndexResponse(
            models=[_message(pb.RepositoryIndexResponse.ModelIndex, entry) for entry in found]
        )

    async def load(request: Any) -> Any:
        _check_repository(request)
        config, files = await asyncio.to_thread(_overrides, request.parameters)  # the files are copied
        await models.load(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def unload(request: Any) -> Any:
        _check_repository(request)
        dependents = False
        for name, parameter in request.parameters.items():
            if name == "unload_dependents":
                dependents = _of_kind(name, parameter, "bool_param")
        await models.unload(request.model_name, unload_dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    return {
        "RepositoryIndex": guard.question(pb.RepositoryIndexRequest, index, _REPOSITORY),
        "RepositoryModelLoad": guard.question(pb.RepositoryModelLoadRequest, load, _REPOSITORY, Scope.ADMIN),
        "RepositoryModelUnload": guard.question(pb.RepositoryModelUnloadRequest, unload, _REPOSITORY, Scope.ADMIN),
    }


def _check_repository(request: Any) -> None:
    if request.repository_name:
        raise UnsupportedFeature("'repository_name' specification is not supported")


def _overrides(parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, parameter in parameters.items():
        if name == "config":
            config = _of_kind(name, parameter, "string_param")
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _of_kind(name, parameter, "bytes_param")
        else:
            raise InvalidRequest(f"unrecognized load parameter '{name[:100]}'; 'config' and 'file:…' are known")
    return config, files


def _of_kind(name: str, parameter: Any, kind: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise InvalidRequest(f"invalid value type for load parameter '{name[:100]}', expected {kind}.")
    return getattr(parameter, kind)


_LEVELS = "trace_level"
_LOG_KINDS = {
    "log_file": "string_param",
    "log_info": "bool_param",
    "log_warning": "bool_param",
    "log_error": "bool_param",
    "log_verbose_level": "uint32_param",
    "log_format": "string_param",
}


def settings_calls(guard: CallGuard, trace: SharedTraceSettings, log: SharedLogSettings) -> dict[str, Method]:
    """Returns the methods; calls without settings read them."""

    async def trace_setting(request: Any) -> Any:
        model = request.model_name
        changes = {name: _trace_value(name, list(value.value)) for name, value in request.settings.items()}
        shown = await (trace.update(changes, model) if changes else trace.read(model))
        setting = pb.TraceSettingResponse.SettingValue
        return pb.TraceSettingResponse(
            settings={
                n: setting(value=[v] if isinstance(v, str) else v) for n, v in msgspec.structs.asdict(shown).items()
            }
        )

    async def log_settings(request: Any) -> Any:
        changes = {name: _log_value(name, value) for name, value in request.settings.items() if name in _LOG_KINDS}
        shown = await (log.update(changes) if changes else log.read())
        return pb.LogSettingsResponse(settings=_logged(shown))

    return {
        "TraceSetting": guard.question(pb.TraceSettingRequest, trace_setting, "trace", is_change=_has_settings),
        "LogSettings": guard.question(pb.LogSettingsRequest, log_settings, "logging", is_change=_has_settings),
    }


def _has_settings(request: Any) -> bool:
    return bool(request.settings)


def _trace_value(name: str, values: list[str]) -> object:
    if not values:
        return None
    if name == _LEVELS:
        return values
    if len(values) > 1:
        raise InvalidRequest(f"expect only 1 value for '{name[:100]}', got {len(values)}")
    return values[0]


def _log_value(name: str, value: Any) -> object:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        return None
    if kind != _LOG_KINDS[name]:
        raise InvalidRequest(f"invalid value type for '{name}' setting, expected {_LOG_KINDS[name]}.")
    return getattr(value, kind)


def _logged(shown: LogValues) -> dict[str, Any]:
    setting = pb.LogSettingsResponse.SettingValue
    return {name: setting(**{_LOG_KINDS[name]: value}) for name, value in msgspec.structs.asdict(shown).items()}


_MEMORY = "shared-memory"


def shared_memory_calls(guard: CallGuard, memory: SharedMemory) -> dict[str, Method]:
    """Returns the methods by name."""

    async def status(request: Any, own: SharedMemory) -> Any:
        kind = pb.SystemSharedMemoryStatusResponse
        regions = {region.name: _message(kind.RegionStatus, region) for region in own.status(request.name)}
        return kind(regions=regions)

    async def register(request: Any, own: SharedMemory) -> Any:
        own.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def unregister(request: Any, own: SharedMemory) -> Any:
        own.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(request: Any, own: SharedMemory) -> Any:
        kind = pb.CudaSharedMemoryStatusResponse
        regions = {region.name: _message(kind.RegionStatus, region) for region in own.cuda_status(request.name)}
        return kind(regions=regions)

    async def cuda_register(request: Any, own: SharedMemory) -> Any:
        about = request.raw_handle, request.device_id, request.byte_size
        await asyncio.to_thread(own.register_cuda, request.name, *about)
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_unregister(request: Any, own: SharedMemory) -> Any:
        await asyncio.to_thread(own.unregister, request.name, CudaRegion)
        return pb.CudaSharedMemoryUnregisterResponse()

    def of_caller(request: Any, use_case: Callable[[Any, SharedMemory], Awaitable[Any]]) -> Method:
        async def serve(blob: Bytes, call: GrpcCall) -> Bytes:
            reply = await use_case(await read(request, blob), memory.for_tenant(call.context.tenant))
            return bytes(reply.SerializeToString())

        return guard.unary(serve, _MEMORY)

    return {
        "SystemSharedMemoryStatus": of_caller(pb.SystemSharedMemoryStatusRequest, status),
        "SystemSharedMemoryRegister": of_caller(pb.SystemSharedMemoryRegisterRequest, register),
        "SystemSharedMemoryUnregister": of_caller(pb.SystemSharedMemoryUnregisterRequest, unregister),
        "CudaSharedMemoryStatus": of_caller(pb.CudaSharedMemoryStatusRequest, cuda_status),
        "CudaSharedMemoryRegister": of_caller(pb.CudaSharedMemoryRegisterRequest, cuda_register),
        "CudaSharedMemoryUnregister": of_caller(pb.CudaSharedMemoryUnregisterRequest, cuda_unregister),
    }
