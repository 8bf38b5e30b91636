"""Routes about models: metadata, readiness, configuration, and statistics (reference §1.4, §1.5, §1.13)."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.errors import Overloaded
from qinfer_api.about import ModelMetadata, is_model_ready, model_metadata
from qinfer_api.http.infer import Reply, error_reply
from qinfer_api.observe.statistics import ModelStats
from qinfer_api.rest.openapi import answer, errors, operation
from qinfer_api.rest.services import Services, needs, restricted, send, send_json, target_of

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
        return send_json(ModelStats(await services.statistics.model_statistics()))

    @router.get("/v2/models/{model}/versions/{version}/stats", name="version_statistics", **_STATISTICS)
    @router.get("/v2/models/{model}/stats", name="model_statistics", **_STATISTICS)
    async def model_statistics(request: Request) -> HttpResponse:
        """Tells what the ready versions of a model did, or that of the path."""
        return send_json(ModelStats(await services.statistics.model_statistics(*target_of(request))))

    return router


def model_routes(services: Services) -> APIRouter:
    """Returns the other routes about models."""
    router = APIRouter(tags=["models"])
    infer, open_to_all = needs(services, Scope.INFER), restricted(services, "health")
    found, shown = [*restricted(services, "metadata"), infer], [*restricted(services, "model-config"), infer]

    @router.get("/v2/models/{model}/versions/{version}", name="version_metadata", dependencies=found, **_METADATA)
    @router.get("/v2/models/{model}", name="metadata", dependencies=found, **_METADATA)
    async def metadata(request: Request) -> HttpResponse:
        """Describes a model, with the versions that are ready, or the version of the path."""
        return send_json(model_metadata(services.catalog, *target_of(request)))

    @router.get("/v2/models/{model}/versions/{version}/ready", name="version_ready", dependencies=open_to_all, **_READY)
    @router.get("/v2/models/{model}/ready", name="model_ready", dependencies=open_to_all, **_READY)
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
