"""The live workers and the models they should have: clocks, frames, and what is not READY. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from qinfer.cli.checks.redis_server import clock
from qinfer.cli.checks.report import Finding, ok, problem, warning
from qinfer.models.readiness import assess
from qinfer.models.state import Desired, State, StoredModel, WorkerRecord
from qinfer.wire.frame import FRAME_VERSION

_SHOWN = 5


def examine_workers(
    workers: Sequence[WorkerRecord], bulk_workers: Sequence[str], beats: Sequence[str], *, needs_bulk: bool
) -> Iterator[Finding]:
    """Yields the findings about the workers.

    Args:
        workers: The live ones.
        bulk_workers: The live bulk workers.
        beats: The live processes that have Celery's beat in them.
        needs_bulk: Bulk jobs can be submitted.
    """
    if workers:
        draining = sum(worker.draining for worker in workers)
        drains = f", {draining} draining" if draining else ""
        yield ok("workers", f"{len(workers)} live{drains}")
    else:
        yield warning(
            "workers", "none is live: requests wait in their lanes", "start python -m qinfer_workers.inference"
        )
    for worker in workers:
        finding = clock("clock of a worker", worker.clock_offset_s, f"Redis minus {worker.id}")
        if finding.remedy:
            yield finding
    yield from _frames(workers)
    if needs_bulk and not bulk_workers:
        yield warning("bulk workers", "none is live: bulk jobs wait", "start python -m qinfer_workers.jobs")
    elif bulk_workers:
        yield ok("bulk workers", f"{len(bulk_workers)} live")
    if bulk_workers and not beats:
        remedy = "start python -m qinfer_workers.jobs.beat, or set QINFER_BULK__BEAT=true for bulk workers"
        yield warning("beat", "none is live: nobody looks for bulk jobs that are stuck or expired", remedy)


def examine_models(
    desired: Mapping[str, Desired], stored: Mapping[str, StoredModel], workers: Sequence[WorkerRecord]
) -> Iterator[Finding]:
    """Yields the findings about the models that should be loaded."""
    statuses = assess(desired, stored, workers)
    lacking = [
        (f"{name} {version}", state.state, state.reason)
        for name, status in statuses.items()
        for version, state in sorted(status.versions.items())
        if state.state is not State.READY and not status.error
    ]
    lacking += [(name, State.UNAVAILABLE, status.error) for name, status in statuses.items() if status.error]
    for what, state, reason in lacking[:_SHOWN]:
        make = problem if state is State.UNAVAILABLE and workers else warning
        yield make("models", f"{what} is {state.value}: {reason}", "look at it: qinfer models list; correct its files")
    if len(lacking) > _SHOWN:
        yield warning("models", f"{len(lacking) - _SHOWN} more are not READY", "qinfer models list shows them")
    if not lacking:
        yield ok(
            "models", f"all {len(statuses)} that should be loaded are READY" if statuses else "none should be loaded"
        )


def _frames(workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
    """Compares what workers read with what a gateway of this version writes, and with one another."""
    behind = [worker.id for worker in workers if FRAME_VERSION not in worker.frame_versions]
    if behind:
        yield problem(
            "frame versions",
            f"{', '.join(behind[:_SHOWN])} can't read frames of version {FRAME_VERSION}, which this qinfer writes",
            "upgrade the workers before the gateways",
        )
    elif len({worker.frame_versions for worker in workers}) > 1:
        yield warning("frame versions", "workers of several versions of qinfer are live", "end the upgrade")
    elif workers:
        yield ok("frame versions", f"all workers read version {FRAME_VERSION}")
