"""The workers: their states, memory, executions and the end of their logs; the drain of one."""

from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.errors import WorkerNotFound
from qinfer.models.state import WorkerRecord
from qinfer_api.console.visit import PAGE_ROWS, Pages, Visit


def workers_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    return [
        pages.route("/workers", workers, Scope.VIEWER),
        pages.route("/workers/{worker}", worker, Scope.VIEWER, {"drain": (_drain_worker, Scope.ADMIN)}),
    ]


async def workers(visit: Visit) -> Response:
    """Shows live workers, their models, memory and long executions."""
    state = await visit.parts.live.now()
    rows = [one for one in visit.parts.services.catalog.workers() if visit.query("q").lower() in _words(one)]
    return visit.render(
        "workers.html",
        "Workers",
        "workers",
        state=state,
        rows=[(one, _memory_of(one)) for one in rows[:PAGE_ROWS]],
        total=len(rows),
        gateways=await visit.parts.store.live_processes("gateway"),
        bulk_workers=await visit.parts.store.live_processes("bulk"),
    )


async def worker(visit: Visit) -> Response:
    """Shows one worker, and to administrators the end of its log, which outlives it."""
    worker_id, parts = visit.name("worker"), visit.parts
    found = next((one for one in parts.services.catalog.workers() if one.id == worker_id), None)
    log = await parts.store.worker_log(worker_id) if visit.user.is_admin else []
    if found is None and not (log or visit.done):
        raise WorkerNotFound(f"no worker '{worker_id[:200]}' is alive, and no log of it is left")
    return visit.render(
        "worker.html",
        worker_id,
        "workers",
        at_s=(await parts.live.now()).at_s,
        worker_id=worker_id,
        worker=found,
        memory={} if found is None else _memory_of(found),
        log=log,
    )


def _words(record: WorkerRecord) -> str:
    return " ".join((record.id, record.host, record.device, *record.models)).lower()


def _memory_of(record: WorkerRecord) -> dict[str, dict[int, int]]:
    return {
        model: {version: sum(use.nbytes for use in uses) for version, uses in versions.items()}
        for model, versions in record.memory.items()
    }


async def _drain_worker(visit: Visit) -> str:
    await visit.parts.services.models.drain_worker(visit.name("worker"), visit.user.name)
    return (
        "The worker drains: it takes no more work, finishes what executes, and ends. "
        "A supervisor starts another one in its place."
    )
