"""Routes about one model: metadata, readiness, configuration."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.errors import ModelNotReady
from qinfer.repository.spec import ModelSpec, TensorSpec
from qinfer_api.http.fast import Reply, error_reply, parse_version
from qinfer_api.rest.schema import ModelMetadata, errors
from qinfer_api.rest.services import Services, needs, send


def model_routes(services: Services) -> APIRouter:
    """Returns the routes about models."""
    router = APIRouter(tags=["models"], default_response_class=HttpResponse)
    checked = [needs(services, Scope.INFER)]
    found: dict[str, Any] = {
        "responses": {200: {"model": ModelMetadata}, **errors(400, 401, 403, 404, 503)},
        "dependencies": checked,
    }
    shown: dict[str, Any] = {"responses": errors(400, 401, 403, 404, 503), "dependencies": checked}
    open_to_all: dict[str, Any] = {"responses": errors(400, 404, 503)}

    @router.get("/v2/models/{model}", **found)
    async def model_metadata(model: str) -> HttpResponse:
        """Describes a model, with the versions that are ready."""
        served = services.catalog.resolve(model, 0)
        return _metadata(served.spec, services.catalog.ready_versions(model))

    @router.get("/v2/models/{model}/versions/{version}", **found)
    async def version_metadata(model: str, version: str) -> HttpResponse:
        """Describes one version of a model."""
        served = services.catalog.resolve(model, parse_version(version))
        return _metadata(served.spec, (served.version,))

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
    try:
        services.dispatcher.resolve(model, version)
    except ModelNotReady:
        return send(error_reply(400, "Model version not ready"))
    return HttpResponse()


def _metadata(spec: ModelSpec, versions: tuple[int, ...]) -> HttpResponse:
    about = {
        "name": spec.name,
        "versions": [str(version) for version in versions],
        "platform": spec.platform or spec.backend,
        "inputs": [_tensor(tensor, spec) for tensor in spec.inputs],
        "outputs": [_tensor(tensor, spec) for tensor in spec.outputs],
    }
    return send(Reply(200, msgspec.json.encode(about)))


def _tensor(tensor: TensorSpec, spec: ModelSpec) -> dict[str, Any]:
    shape = [-1, *tensor.dims] if spec.max_batch_size > 0 else list(tensor.dims)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
