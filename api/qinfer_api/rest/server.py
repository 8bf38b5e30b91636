"""Routes about the server itself: metadata, health, metrics."""

from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.observe.metrics import CONTENT_TYPE
from qinfer_api import about
from qinfer_api.http.infer import error_reply
from qinfer_api.rest.openapi import answer, errors, operation, query
from qinfer_api.rest.services import Services, needs, restricted, send, send_json

_METADATA = operation("", {200: answer("The metadata.", about.ServerMetadata), **errors(401, 403)})
_LIVE = operation("", {200: answer("It is running."), **errors(403, 503)})
_READY = operation(
    "", {200: answer("Every model is ready."), 400: answer("A model is not ready; no body."), **errors(403, 503)}
)
_SCOPE = query(
    "scope",
    "cluster: of the whole installation; process: of this gateway; both where it is left out.",
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
