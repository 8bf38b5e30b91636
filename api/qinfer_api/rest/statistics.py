"""`…/stats`: what models did so far (reference §1.13)."""

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer_api.http.infer import parse_version
from qinfer_api.http.replies import Reply
from qinfer_api.rest.control_schema import ModelStats
from qinfer_api.rest.schema import errors
from qinfer_api.rest.services import Services, needs, restricted, send


def statistics_routes(services: Services) -> APIRouter:
    """Returns the routes of the statistics extension."""
    router = APIRouter(
        tags=["models"], dependencies=[*restricted(services, "statistics"), needs(services, Scope.INFER)]
    )
    about: dict[str, Any] = {
        "response_class": HttpResponse,
        "responses": {200: {"model": ModelStats}, **errors(400, 401, 403, 503)},
    }

    @router.get("/v2/models/stats", **about)
    async def statistics() -> HttpResponse:
        """Tells what all ready model versions did; counters are about a second old, and only grow."""
        return await _shown(services, "", 0)

    @router.get("/v2/models/{model}/stats", **about)
    async def model_statistics(model: str) -> HttpResponse:
        """Tells what the ready versions of a model did."""
        return await _shown(services, model, 0)

    @router.get("/v2/models/{model}/versions/{version}/stats", **about)
    async def version_statistics(model: str, version: str) -> HttpResponse:
        """Tells what one version of a model did."""
        return await _shown(services, model, parse_version(version))

    return router


async def _shown(services: Services, model: str, version: int) -> HttpResponse:
    found = await services.statistics.model_statistics(model, version)
    return send(Reply(200, msgspec.json.encode({"model_stats": found})))
