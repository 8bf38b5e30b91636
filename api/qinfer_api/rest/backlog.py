"""`GET /v1/models/{model}/backlog`: how much work a model has, for autoscalers (KEDA's metrics-api, `work_s`)."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response as HttpResponse

from qinfer.control.api_keys import Scope
from qinfer.control.work import LaneWork, VersionWork
from qinfer_api.http.replies import Reply
from qinfer_api.rest.schema import errors
from qinfer_api.rest.services import Services, needs, restricted, send


class LaneBacklog(BaseModel):
    """What a lane holds."""

    lane: str
    partition: int
    entries: int = Field(description="Requests that wait and those in flight; of a bulk lane: shards.")
    oldest_age_s: float = Field(description="How long the oldest one has been in the queue; 0 = none is.")


class VersionBacklog(BaseModel):
    """The work of one version."""

    version: int
    requests: int = Field(description="That wait or are in flight, asynchronous ones too.")
    rows: int = Field(description="Of these requests, by the mean of all so far, and `bulk_rows`.")
    bulk_rows: int = Field(description="That open bulk jobs have yet to do.")
    rows_per_s: float = Field(description="What one worker does; 0 = not known yet.")
    work_s: float = Field(description="Seconds that one worker would need for `rows`.")
    oldest_age_s: float = Field(description="Of the requests.")
    workers: int = Field(description="Live workers that have this version ready.")
    lanes: list[LaneBacklog]


class Backlog(BaseModel):
    """The work of a model, over all its versions and lanes."""

    model: str
    requests: int
    rows: int
    work_s: float = Field(description="0 only where there is nothing to do.")
    oldest_age_s: float
    workers: int = Field(description="Live workers that have a version of it ready.")
    versions: list[VersionBacklog]


def backlog_routes(services: Services) -> APIRouter:
    """Returns the route that autoscalers ask."""
    router = APIRouter(
        tags=["models"], dependencies=[*restricted(services, "statistics"), needs(services, Scope.INFER)]
    )
    about: dict[str, Any] = {
        "response_class": HttpResponse,
        "responses": {200: {"model": Backlog}, **errors(400, 401, 403, 404, 503)},
    }

    @router.get("/v1/models/{model}/backlog", **about)
    async def backlog(model: str) -> HttpResponse:
        """Tells how much work a model has; right without a worker, too."""
        found = await services.work(model)
        if not found:
            services.catalog.status(model)  # a model that has no version has no work; an unknown one is an error
        return send(Reply(200, msgspec.json.encode(backlog_of(model, found))))

    return router


def backlog_of(model: str, found: Sequence[VersionWork]) -> dict[str, Any]:
    """Returns the JSON of a model's work, as `Backlog` has it; times are whole milliseconds."""
    return {
        "model": model,
        "requests": sum(one.requests for one in found),
        "rows": sum(one.rows for one in found),
        "work_s": _up(sum(one.work_s for one in found)),
        "oldest_age_s": round(max((one.oldest_age_s for one in found), default=0.0), 3),
        "workers": len({worker for one in found for worker in one.workers}),
        "versions": [_version(one) for one in found],
    }


def _version(work: VersionWork) -> dict[str, Any]:
    return {
        "version": work.version,
        "requests": work.requests,
        "rows": work.rows,
        "bulk_rows": work.bulk_rows,
        "rows_per_s": round(work.rows_per_s, 3),
        "work_s": _up(work.work_s),
        "oldest_age_s": round(work.oldest_age_s, 3),
        "workers": len(work.workers),
        "lanes": [_lane(lane) for lane in work.lanes],
    }


def _lane(work: LaneWork) -> dict[str, Any]:
    return {
        "lane": work.lane.name,
        "partition": work.lane.partition,
        "entries": work.entries,
        "oldest_age_s": round(work.oldest_age_s, 3),
    }


def _up(seconds: float) -> float:
    """Rounds up: what little work there is must not look like none."""
    return math.ceil(seconds * 1000) / 1000
