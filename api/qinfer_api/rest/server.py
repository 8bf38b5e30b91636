"""Routes about the server itself: metadata, health, metrics."""

import msgspec
from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

import qinfer
from qinfer.control.api_keys import Scope
from qinfer.observability.metrics import CONTENT_TYPE
from qinfer_api.http.fast import Reply, error_reply
from qinfer_api.rest.schema import ServerMetadata, errors
from qinfer_api.rest.services import Services, needs, send

EXTENSIONS = ["model_configuration", "binary_tensor_data", "parameters"]
"""Extensions of the protocol that are there; perf_analyzer, for one, asks for what is listed."""


def server_routes(services: Services) -> APIRouter:
    """Returns the routes about the server."""
    router = APIRouter(tags=["server"])

    @router.get(
        "/v2",
        responses={200: {"model": ServerMetadata}, **errors(401, 403)},
        response_class=HttpResponse,
        dependencies=[needs(services, Scope.INFER)],
    )
    async def server_metadata() -> HttpResponse:
        """Tells the server's name, version and protocol extensions."""
        about = {"name": services.settings.server_id, "version": qinfer.__version__, "extensions": EXTENSIONS}
        return send(Reply(200, msgspec.json.encode(about)))

    @router.get("/v2/health/live", responses=errors(503), response_class=HttpResponse)
    async def live() -> HttpResponse:
        """Answers 200 while the gateway runs; 503 while it shuts down."""
        return _exiting() if services.dispatcher.draining else HttpResponse()

    @router.get("/v2/health/ready", responses=errors(400, 503), response_class=HttpResponse)
    async def ready() -> HttpResponse:
        """Answers 200 when every model is ready, 400 when one is not; 503 while the gateway shuts down."""
        if services.dispatcher.draining:
            return _exiting()
        return HttpResponse(status_code=200 if services.catalog.is_server_ready() else 400)

    @router.get("/metrics", response_class=HttpResponse, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> HttpResponse:
        """Gives the metrics in Prometheus text format."""
        return HttpResponse(await services.metrics(), media_type=CONTENT_TYPE)

    return router


def _exiting() -> HttpResponse:
    return send(error_reply(503, "Server exiting", 1))
