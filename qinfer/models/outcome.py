"""What has become of a load that was asked for: a pure function of the stored configuration and the live workers.

It has succeeded when one worker that places the model is READY at the generation, for every version; failed when all
live workers that place it have failed; else it goes on (DESIGN.md §5).
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from qinfer.models.placement import is_placed
from qinfer.models.state import State, StoredModel, VersionState, WorkerRecord

PENDING_REASON = "its configuration is being completed by a worker"


class Progress(Enum):
    """How far a load is."""

    READY = "ready"
    FAILED = "failed"
    WAITING = "waiting"


class Outcome(NamedTuple):
    """How far a load is, and why it is not READY."""

    progress: Progress
    reason: str = ""


def outcome(stored: StoredModel, workers: Iterable[WorkerRecord]) -> Outcome:
    """Tells what has become of the load of a configuration."""
    if stored.error:
        return Outcome(Progress.FAILED, stored.error)
    assigned = [worker for worker in workers if is_placed(stored.model, worker.places)]
    if not assigned:
        if stored.min_workers == 0 and not stored.pending:
            return Outcome(Progress.READY)
        return Outcome(Progress.WAITING, "no live worker places it")
    parts = [_version(stored, version, assigned) for version in stored.versions]
    for progress in (Progress.FAILED, Progress.WAITING):
        for part in parts:
            if part.progress is progress:
                return part
    return Outcome(Progress.READY)


def _version(stored: StoredModel, version: int, assigned: Sequence[WorkerRecord]) -> Outcome:
    states = [worker.models.get(stored.model, {}).get(version) for worker in assigned]
    if not stored.pending and any(state is not None and _is_ready(state, stored.generation) for state in states):
        return Outcome(Progress.READY)
    failures = [state.reason for state in states if state is not None and _has_failed(state, stored.generation)]
    if len(failures) == len(assigned):
        return Outcome(Progress.FAILED, failures[0])
    return Outcome(Progress.WAITING, PENDING_REASON if stored.pending else f"version {version} is still being loaded")


def _is_ready(state: VersionState, generation: int) -> bool:
    return state.state is State.READY and state.generation == generation


def _has_failed(state: VersionState, generation: int) -> bool:
    return state.tried >= generation and bool(state.reason)
