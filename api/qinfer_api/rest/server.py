"""Routes about the server itself: metadata, health, metrics."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.observability.metrics import CONTENT_TYPE
from qinfer_api import about
from qinfer_api.http.replies import Reply, error_reply
from qinfer_api.rest.schema import ServerMetadata, errors
from qinfer_api.rest.services import Services, needs, restricted, send

_SCOPE = "cluster: of the whole installation; process: of this gateway; both where it is left out."


def server_routes(services: Services) -> APIRouter:
    """Returns the routes about the server."""
    router = APIRouter(tags=["server"], default_response_class=HttpResponse)
    health = restricted(services, "health")

    @router.get(
        "/v2",
        responses={200: {"model": ServerMetadata}, **errors(401, 403)},
        dependencies=[*restricted(services, "metadata"), needs(services, Scope.INFER)],
    )
    async def server_metadata() -> HttpResponse:
        """Tells the server's name, version and protocol extensions."""
        return send(Reply(200, msgspec.json.encode(about.server_metadata(services.settings))))

    @router.get("/v2/health/live", responses=errors(403, 503), dependencies=health)
    async def live() -> HttpResponse:
        """Answers 200 while the gateway runs; 503 while it shuts down."""
        return _exiting() if services.dispatcher.draining else HttpResponse()

    not_ready: dict[int | str, dict[str, Any]] = {400: {"description": "A model is not ready; no body."}}

    @router.get("/v2/health/ready", responses={**not_ready, **errors(403, 503)}, dependencies=health)
    async def ready() -> HttpResponse:
        """Answers 200 when every model is ready, 400 when one is not; 503 while the gateway shuts down."""
        if services.dispatcher.draining:
            return _exiting()
        is_ready = about.is_server_ready(services.settings, services.catalog, draining=False)
        return HttpResponse(status_code=200 if is_ready else 400)

    @router.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **errors(400)})
    async def metrics(scope: Annotated[str, Query(description=_SCOPE, examples=["cluster"])] = "") -> HttpResponse:
        """Gives the metrics in Prometheus text format."""
        return HttpResponse(await services.metrics(scope), media_type=CONTENT_TYPE)

    return router


def _exiting() -> HttpResponse:
    return send(error_reply(503, "Server exiting", 1))
