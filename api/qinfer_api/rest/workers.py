"""Routes of workers: which are alive, the last lines of a worker's log, and the drain of one."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.models.state import WorkerRecord
from qinfer.observe.logs import RecentLine
from qinfer_api.requests.records import written
from qinfer_api.rest.openapi import describe_response, errors, operation
from qinfer_api.rest.services import Services, caller, check_up, guarded, send_json


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker.

    Attributes:
        state: `ready`, `loading`, `trouble` if a model could not be loaded, or `draining`.
        executing: Requests in its batches.
        memory_bytes: Resident memory, with that of its child processes; 0 = unknown.

    """

    id: str
    host: str
    device: str
    state: str
    started_at: str
    executing: int
    memory_bytes: int


_GONE = "No worker with this id is alive."
_LIST = operation("", {200: describe_response("The workers.", list[WorkerState]), **errors(401, 403, 503)})
_LOG = operation(
    "Read the end of a worker's log",
    {200: describe_response("The lines, newest first.", list[RecentLine]), **errors(401, 403, 404, 503, s404=_GONE)},
)
_DRAIN = operation(
    "Drain a worker", {202: describe_response("It was asked."), **errors(401, 403, 404, 503, s404=_GONE)}
)


def worker_routes(services: Services) -> APIRouter:
    """Returns the routes of workers."""
    router = APIRouter(tags=["server"])

    @router.get("/v1/workers", dependencies=guarded(services, "statistics", Scope.VIEWER), **_LIST)
    async def list_workers() -> HttpResponse:
        """Returns the live workers, as of their last heartbeats."""
        return send_json([shown_worker(one) for one in services.catalog.workers()])

    @router.get("/v1/workers/{worker}/log", dependencies=guarded(services, "logging", Scope.ADMIN), **_LOG)
    async def read_worker_log(worker: str) -> HttpResponse:
        """Returns the last warnings and errors of a worker, at most 50 and 64 KiB, up to an hour after its end.

        Long texts are cut, and passwords are left out. A traceback is the model's own, and may quote its inputs.
        """
        check_up(services)
        return send_json(await services.models.worker_log(worker))

    @router.post(
        "/v1/workers/{worker}/drain", dependencies=guarded(services, "model-repository", Scope.ADMIN), **_DRAIN
    )
    async def drain_worker(worker: str, request: Request) -> HttpResponse:
        """Drains a worker as SIGTERM does: it takes no more work, finishes what executes, and ends.

        It begins within a heartbeat, a second. Its waiting requests go to other workers. A supervisor, such as
        `qinfer up` or Kubernetes, starts another worker in its place.
        """
        check_up(services)
        principal = caller(request).principal
        await services.models.drain_worker(worker, "" if principal is None else principal.key_id)
        return HttpResponse(status_code=202)

    return router


def shown_worker(worker: WorkerRecord) -> WorkerState:
    """Returns the part of a heartbeat that is shown."""
    return WorkerState(
        id=worker.id,
        host=worker.host,
        device=worker.device,
        state=worker.condition,
        started_at=written(worker.started_at),
        executing=worker.executing,
        memory_bytes=worker.memory_bytes,
    )
