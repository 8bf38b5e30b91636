"""Routes about one model: metadata, readiness, configuration."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.errors import Overloaded
from qinfer_api.about import is_model_ready, model_metadata
from qinfer_api.http.infer import parse_version
from qinfer_api.http.replies import Reply, error_reply
from qinfer_api.rest.schema import ModelMetadata, errors
from qinfer_api.rest.services import Services, needs, restricted, send


def model_routes(services: Services) -> APIRouter:
    """Returns the routes about models."""
    router = APIRouter(tags=["models"], default_response_class=HttpResponse)
    infer = needs(services, Scope.INFER)
    found: dict[str, Any] = {
        "responses": {200: {"model": ModelMetadata}, **errors(400, 401, 403, 404, 503)},
        "dependencies": [*restricted(services, "metadata"), infer],
    }
    shown: dict[str, Any] = {
        "responses": errors(400, 401, 403, 404, 503),
        "dependencies": [*restricted(services, "model-config"), infer],
    }
    open_to_all: dict[str, Any] = {
        "responses": errors(400, 403, 404, 503),
        "dependencies": restricted(services, "health"),
    }

    @router.get("/v2/models/{model}", **found)
    async def metadata(model: str) -> HttpResponse:
        """Describes a model, with the versions that are ready."""
        return send(Reply(200, msgspec.json.encode(model_metadata(services.catalog, model, 0))))

    @router.get("/v2/models/{model}/versions/{version}", **found)
    async def version_metadata(model: str, version: str) -> HttpResponse:
        """Describes one version of a model."""
        return send(Reply(200, msgspec.json.encode(model_metadata(services.catalog, model, parse_version(version)))))

    @router.get("/v2/models/{model}/ready", **open_to_all)
    async def model_ready(model: str) -> HttpResponse:
        """Answers 200 when a version of the model is ready."""
        return _ready(services, model, 0)

    @router.get("/v2/models/{model}/versions/{version}/ready", **open_to_all)
    async def version_ready(model: str, version: str) -> HttpResponse:
        """Answers 200 when this version of the model is ready."""
        return _ready(services, model, parse_version(version))

    @router.get("/v2/models/{model}/config", **shown)
    async def model_config(model: str) -> HttpResponse:
        """Gives the complete, normalised model configuration."""
        return send(Reply(200, services.catalog.config_json(model, 0).encode()))

    @router.get("/v2/models/{model}/versions/{version}/config", **shown)
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
