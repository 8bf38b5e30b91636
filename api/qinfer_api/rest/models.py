"""Routes about models: metadata, readiness, configuration, and statistics (reference §1.4, §1.5, §1.13)."""

from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.errors import Overloaded
from qinfer_api.about import ModelMetadata, is_model_ready, model_metadata
from qinfer_api.http.infer import Reply, error_reply, parse_version
from qinfer_api.rest.openapi import answer, errors, operation
from qinfer_api.rest.services import Services, needs, restricted, send, send_json
from qinfer_api.statistics import ModelStats

_METADATA = operation("", {200: answer("The metadata.", ModelMetadata), **errors(400, 401, 403, 404, 503)})
_READY = operation("", {200: answer("It is ready."), **errors(400, 403, 404, 503)})
_CONFIG = operation("", {200: answer("The configuration.", {"type": "object"}), **errors(400, 401, 403, 404, 503)})
_STATISTICS = operation("", {200: answer("The statistics.", ModelStats), **errors(400, 401, 403, 503)})


def statistics_routes(services: Services) -> APIRouter:
    """Returns the routes of the statistics extension."""
    router = APIRouter(
        tags=["models"], dependencies=[*restricted(services, "statistics"), needs(services, Scope.INFER)]
    )

    @router.get("/v2/models/stats", **_STATISTICS)
    async def statistics() -> HttpResponse:
        """Tells what all ready model versions did; counters are about a second old, and only grow."""
        return await _statistics(services, "", 0)

    @router.get("/v2/models/{model}/stats", **_STATISTICS)
    async def model_statistics(model: str) -> HttpResponse:
        """Tells what the ready versions of a model did."""
        return await _statistics(services, model, 0)

    @router.get("/v2/models/{model}/versions/{version}/stats", **_STATISTICS)
    async def version_statistics(model: str, version: str) -> HttpResponse:
        """Tells what one version of a model did."""
        return await _statistics(services, model, parse_version(version))

    return router


def model_routes(services: Services) -> APIRouter:
    """Returns the other routes about models."""
    router = APIRouter(tags=["models"])
    infer, open_to_all = needs(services, Scope.INFER), restricted(services, "health")
    found, shown = [*restricted(services, "metadata"), infer], [*restricted(services, "model-config"), infer]

    @router.get("/v2/models/{model}", dependencies=found, **_METADATA)
    async def metadata(model: str) -> HttpResponse:
        """Describes a model, with the versions that are ready."""
        return send_json(model_metadata(services.catalog, model, 0))

    @router.get("/v2/models/{model}/versions/{version}", dependencies=found, **_METADATA)
    async def version_metadata(model: str, version: str) -> HttpResponse:
        """Describes one version of a model."""
        return send_json(model_metadata(services.catalog, model, parse_version(version)))

    @router.get("/v2/models/{model}/ready", dependencies=open_to_all, **_READY)
    async def model_ready(model: str) -> HttpResponse:
        """Answers 200 when a version of the model is ready."""
        return _ready(services, model, 0)

    @router.get("/v2/models/{model}/versions/{version}/ready", dependencies=open_to_all, **_READY)
    async def version_ready(model: str, version: str) -> HttpResponse:
        """Answers 200 when this version of the model is ready."""
        return _ready(services, model, parse_version(version))

    @router.get("/v2/models/{model}/config", dependencies=shown, **_CONFIG)
    async def model_config(model: str) -> HttpResponse:
        """Gives the complete, normalised model configuration."""
        return send(Reply(200, services.catalog.config_json(model, 0).encode()))

    @router.get("/v2/models/{model}/versions/{version}/config", dependencies=shown, **_CONFIG)
    async def version_config(model: str, version: str) -> HttpResponse:
        """Gives the complete, normalised model configuration."""
        return send(Reply(200, services.catalog.config_json(model, parse_version(version)).encode()))

    return router


def _ready(services: Services, model: str, version: int) -> HttpResponse:
    if services.dispatcher.draining:
        raise Overloaded("Server exiting")
    if not is_model_ready(services.catalog, model, version):
        return send(error_reply(400, "Model version not ready"))
    return HttpResponse()


async def _statistics(services: Services, model: str, version: int) -> HttpResponse:
    return send_json(ModelStats(await services.statistics.model_statistics(model, version)))
