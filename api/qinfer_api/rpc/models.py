"""The calls about the server and its models: readiness, metadata, configuration, statistics (reference §2.1)."""

from typing import Any

import msgspec
from tritonclient.grpc import service_pb2 as pb

from qinfer.errors import ModelNotFound, ModelNotReady
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import from_json
from qinfer_api.about import is_model_ready, is_server_ready, model_metadata, server_metadata
from qinfer_api.http.infer import parse_version
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import Guard, Handler

_HEALTH, _METADATA, _CONFIG, _STATISTICS = "health", "metadata", "model-config", "statistics"


def model_calls(guard: Guard, services: Services) -> dict[str, Handler]:
    """Returns the handlers: name → handler."""
    catalog, settings = services.catalog, services.settings

    async def live(_: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ready(_: Any) -> Any:
        is_ready = is_server_ready(settings, catalog, draining=services.dispatcher.draining)
        return pb.ServerReadyResponse(ready=is_ready)

    async def model_ready(request: Any) -> Any:
        return pb.ModelReadyResponse(ready=_is_ready(catalog, request.name, _version(request)))

    async def metadata(_: Any) -> Any:
        about = server_metadata(settings)
        return pb.ServerMetadataResponse(name=about.name, version=about.version, extensions=about.extensions)

    async def of_model(request: Any) -> Any:
        about = model_metadata(catalog, request.name, _version(request))
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=about.name,
            versions=about.versions,
            platform=about.platform,
            inputs=[tensor(name=i.name, datatype=i.datatype, shape=i.shape) for i in about.inputs],
            outputs=[tensor(name=o.name, datatype=o.datatype, shape=o.shape) for o in about.outputs],
        )

    async def config(request: Any) -> Any:
        text = catalog.config_json(request.name, _version(request))
        return pb.ModelConfigResponse(config=from_json(text))

    async def statistics(request: Any) -> Any:
        found = await services.statistics.model_statistics(request.name, _version(request))
        return pb.ModelStatisticsResponse(
            model_stats=[pb.ModelStatistics(**msgspec.to_builtins(statistic)) for statistic in found]
        )

    return {
        "ServerLive": guard.unary(pb.ServerLiveRequest, live, _HEALTH, None),
        "ServerReady": guard.unary(pb.ServerReadyRequest, ready, _HEALTH, None),
        "ModelReady": guard.unary(pb.ModelReadyRequest, model_ready, _HEALTH, None),
        "ServerMetadata": guard.unary(pb.ServerMetadataRequest, metadata, _METADATA),
        "ModelMetadata": guard.unary(pb.ModelMetadataRequest, of_model, _METADATA),
        "ModelConfig": guard.unary(pb.ModelConfigRequest, config, _CONFIG),
        "ModelStatistics": guard.unary(pb.ModelStatisticsRequest, statistics, _STATISTICS),
    }


def _is_ready(catalog: Catalog, model: str, version: int) -> bool:
    """Returns whether a model that the server knows is ready; one that was unloaded is known.

    Raises:
        ModelNotFound: No such model or version.
    """
    try:
        return is_model_ready(catalog, model, version)
    except ModelNotReady:
        return False
    except ModelNotFound:
        if version or model not in catalog.known():
            raise
        return False


def _version(request: Any) -> int:
    return parse_version(request.version) if request.version else 0
