"""`GET /v1/models/{model}/backlog`: the work of a model, for autoscalers (KEDA's metrics-api, `work_s`)."""

import math
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.scaling.work import LaneWork, SequenceWork, VersionWork
from qinfer_api.rest.openapi import describe_response, errors, operation
from qinfer_api.rest.services import Services, guarded, send_json


class LaneBacklog(msgspec.Struct, frozen=True):
    """The work of one lane.

    Attributes:
        entries: Requests waiting or in flight; in a bulk lane, shards.
        oldest_age_s: The time that the oldest entry has been in the queue; 0 = the lane is empty.
    """

    lane: str
    partition: int
    entries: int
    oldest_age_s: float


class VersionBacklog(msgspec.Struct, frozen=True):
    """The work of one version.

    Attributes:
        requests: Requests waiting or in flight, including asynchronous requests.
        rows: Rows of these requests, by the mean so far, plus `bulk_rows`.
        bulk_rows: Remaining rows of open bulk jobs.
        rows_per_s: Speed of one worker; 0 = unknown.
        work_s: Seconds that one worker would need for `rows`; 0 while the version is paused.
        oldest_age_s: Age of the oldest request.
        workers: Live workers that have this version ready.
    """

    version: int
    requests: int
    rows: int
    bulk_rows: int
    rows_per_s: float
    work_s: float
    oldest_age_s: float
    workers: int
    lanes: list[LaneBacklog]


class SequenceBacklog(msgspec.Struct, frozen=True):
    """The sequences of a stateful model, over all its versions.

    Attributes:
        open: Sequences that have begun and not ended, including waiting sequences.
        waiting: Sequences that wait for a worker with a free slot.
        workers: Workers needed for all open sequences.
    """

    open: int = 0
    waiting: int = 0
    workers: int = 0


class Backlog(msgspec.Struct, frozen=True):
    """The work of a model, over all its versions and lanes.

    Attributes:
        work_s: Seconds that one worker would need for it; 0 only without work, or while the model is paused.
        workers: Live workers that have a version of it ready.
        sequences: The work of sequences; all numbers are 0 for a model without sequences.
    """

    model: str
    requests: int
    rows: int
    work_s: float
    oldest_age_s: float
    workers: int
    versions: list[VersionBacklog]
    sequences: SequenceBacklog


_BACKLOG = operation("", {200: describe_response("The work.", Backlog), **errors(400, 401, 403, 404, 503)})


def backlog_routes(services: Services) -> APIRouter:
    """Returns the route for autoscalers."""
    router = APIRouter(tags=["models"], dependencies=guarded(services, "statistics", Scope.VIEWER))

    @router.get("/v1/models/{model}/backlog", **_BACKLOG)
    async def backlog(model: str) -> HttpResponse:
        """Returns the work of a model, even if no worker is alive."""
        services.requests.check_up(model)
        found = await services.reporting.work(model)
        if not found:
            services.catalog.status(model)
        return send_json(backlog_of(model, found, await services.reporting.sequences(model)))

    return router


def backlog_of(model: str, found: Sequence[VersionWork], sequences: SequenceWork | None = None) -> Backlog:
    """Returns a model's work, in whole milliseconds."""
    return Backlog(
        model=model,
        requests=sum(one.requests for one in found),
        rows=sum(one.rows for one in found),
        work_s=_up(sum(one.work_s for one in found)),
        oldest_age_s=round(max((one.oldest_age_s for one in found), default=0.0), 3),
        workers=len({worker for one in found for worker in one.workers}),
        versions=[_version(one) for one in found],
        sequences=_sequences(sequences),
    )


def _version(work: VersionWork) -> VersionBacklog:
    return VersionBacklog(
        version=work.version,
        requests=work.requests,
        rows=work.rows,
        bulk_rows=work.bulk_rows,
        rows_per_s=round(work.rows_per_s, 3),
        work_s=_up(work.work_s),
        oldest_age_s=round(work.oldest_age_s, 3),
        workers=len(work.workers),
        lanes=[_lane(lane) for lane in work.lanes],
    )


def _sequences(work: SequenceWork | None) -> SequenceBacklog:
    return SequenceBacklog() if work is None else SequenceBacklog(work.open, work.waiting, work.workers)


def _lane(work: LaneWork) -> LaneBacklog:
    return LaneBacklog(work.lane.name, work.lane.partition, work.entries, round(work.oldest_age_s, 3))


def _up(seconds: float) -> float:
    return math.ceil(seconds * 1000) / 1000
