"""Progress of a load, state and speed of each model version: pure functions of desired state and live workers.

A load has succeeded when one worker that places the model is READY at the generation, for every version; failed when
all live workers that place it have failed; else it goes on.

READY = desired, and loaded by a live worker, at the desired generation or, while that one is loading or
when it fails to load, at an earlier one: a reload makes no gap. So a version that the new generation leaves out is
shown as long as a worker serves it: workers retire it when they have loaded what replaces it, unless it is pinned.
An ensemble is READY only while all models that it uses are.
A model with `min_workers` 0 is READY without a live worker too, and while its first one loads: its requests wait in the
queue.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

from qinfer.models.state import Desired, State, StoredModel, Use, VersionState, WorkerRecord


def is_placed(model: str, globs: Sequence[str]) -> bool:
    """Tells whether a worker with these globs should load the model; case matters."""
    return any(fnmatchcase(model, glob) for glob in globs)


PENDING_REASON = "its configuration is being completed by a worker"


class Progress(Enum):
    """The progress of a load."""

    READY = "ready"
    FAILED = "failed"
    WAITING = "waiting"


class Outcome(NamedTuple):
    """The progress of a load, and the reason why it is not READY."""

    progress: Progress
    reason: str = ""


def outcome(stored: StoredModel, workers: Iterable[WorkerRecord]) -> Outcome:
    """Returns the outcome of the load of a configuration so far."""
    if stored.error:
        return Outcome(Progress.FAILED, stored.error)
    assigned = [worker for worker in workers if is_placed(stored.model, worker.places)]
    if not assigned:
        if stored.min_workers == 0 and not stored.pending:
            return Outcome(Progress.READY)
        return Outcome(Progress.WAITING, "no live worker places it")
    parts = [_version(stored, version, assigned) for version in stored.versions]
    for progress in (Progress.FAILED, Progress.WAITING):
        found = [part.reason for part in parts if part.progress is progress]
        if found:
            return Outcome(progress, "".join(found) if progress is Progress.FAILED else found[0])
    return Outcome(Progress.READY)


def _version(stored: StoredModel, version: int, assigned: Sequence[WorkerRecord]) -> Outcome:
    states = [worker.state_of(stored.model, version) for worker in assigned]
    if not stored.pending and any(state is not None and _is_ready(state, stored.generation) for state in states):
        return Outcome(Progress.READY)
    failures = [state.reason for state in states if state is not None and _has_failed(state, stored.generation)]
    if len(failures) == len(assigned):
        return Outcome(Progress.FAILED, f"version {version} is at UNAVAILABLE state: Internal: {failures[0]};")
    return Outcome(Progress.WAITING, PENDING_REASON if stored.pending else f"version {version} is still being loaded")


def _is_ready(state: VersionState, generation: int) -> bool:
    return state.state is State.READY and state.generation == generation


def _has_failed(state: VersionState, generation: int) -> bool:
    return state.tried >= generation and bool(state.reason)


_RANK = (State.READY, State.LOADING, State.UNLOADING, State.UNAVAILABLE)
_NO_WORKER = "no live worker has loaded it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model as all live workers together have it.

    Attributes:
        model: Its name.
        generation: The generation that is desired.
        versions: Version → the best state that a worker has it in, with its generation and the reason.
        failed: The versions that no live worker could load.
        error: Why the model can't be loaded at all; empty when it can.
    """

    model: str
    generation: int
    versions: Mapping[int, VersionState] = field(default_factory=dict)
    failed: tuple[int, ...] = ()
    error: str = ""

    @property
    def ready_versions(self) -> tuple[int, ...]:
        """The versions that can be asked, ascending."""
        return tuple(sorted(v for v, state in self.versions.items() if state.state is State.READY))

    @property
    def is_ready(self) -> bool:
        """Tells whether every version of the model can be asked."""
        return bool(self.versions) and len(self.ready_versions) == len(self.versions)

    @property
    def loadable_versions(self) -> tuple[int, ...]:
        """The versions that can be asked or will be once a worker has loaded them, ascending."""
        return () if self.error else tuple(sorted(v for v in self.versions if v not in self.failed))


class Capacity(NamedTuple):
    """The speed that a version's backlog is worked off with.

    Attributes:
        rps: Requests a second, of all live workers together, at best; 0 = unknown.
        start_s: Seconds that a worker took to load it; 0 while a worker has it loaded, and where it was not measured.
        workers: Live workers that have it loaded.
    """

    rps: float = 0.0
    start_s: float = 0.0
    workers: int = 0

    def behind(self, part: float) -> "Capacity":
        """Returns what is left where others take a part of the speed; a hundredth at the least."""
        return self if not part else self._replace(rps=self.rps * max(1.0 - part, 0.01))


def assess(
    desired: Mapping[str, Desired], stored: Mapping[str, StoredModel], workers: Iterable[WorkerRecord]
) -> dict[str, ModelStatus]:
    """Returns the status of every model that is desired to be loaded, by name."""
    records = list(workers)
    statuses = {
        model: _status(wish, stored.get(model), records) for model, wish in sorted(desired.items()) if wish.load
    }
    users = [model for model in statuses if model in stored and stored[model].uses]
    while any(_lower(stored[model], statuses) for model in users):
        pass  # an ensemble that is not READY any more may be a step of another
    return statuses


def failed_loads(statuses: Iterable[ModelStatus], workers: Iterable[WorkerRecord]) -> dict[tuple[str, int], bool]:
    """Returns (model, version) → whether a live worker failed to load the newest of it; version 0 = it has none.

    An earlier generation may serve on.
    """
    records = list(workers)
    failed: dict[tuple[str, int], bool] = {}
    for status in statuses:
        for version in status.versions or (0,):
            states = [state for worker in records if (state := worker.state_of(status.model, version)) is not None]
            failed[status.model, version] = bool(status.error) or any(
                _has_failed(state, status.generation) for state in states
            )
    return failed


def have_begun(statuses: Iterable[ModelStatus]) -> bool:
    """Tells whether a model can be asked, or none is left that may still be loaded."""
    models = list(statuses)
    return any(model.ready_versions for model in models) or not any(model.loadable_versions for model in models)


def lacking(ensemble: str, use: Use, statuses: Mapping[str, ModelStatus]) -> str:
    """Says what an ensemble lacks of a model that it uses, with Triton's text; empty = nothing."""
    status = statuses.get(use.model)
    who = f"ensemble '{ensemble}' depends on '{use.model}'"
    if status is None or not status.ready_versions:
        return f"{who} which has no loaded version"
    if use.version and use.version not in status.ready_versions:
        return f"{who} whose required version {use.version} is not loaded"
    return ""


def _lower(model: StoredModel, statuses: dict[str, ModelStatus]) -> bool:
    """Makes an ensemble UNAVAILABLE that lacks a model which it uses; returns whether it was READY."""
    status = statuses[model.model]
    reason = next(filter(None, (lacking(model.model, use, statuses) for use in model.uses)), "")
    if not reason or not status.ready_versions:
        return False
    versions = {
        version: VersionState(State.UNAVAILABLE, state.generation, reason) if state.state is State.READY else state
        for version, state in status.versions.items()
    }
    statuses[model.model] = replace(status, versions=versions)
    return True


def _status(wish: Desired, stored: StoredModel | None, workers: list[WorkerRecord]) -> ModelStatus:
    if stored is None:
        return ModelStatus(model=wish.model, generation=wish.generation, error="its configuration is not stored")
    # The configuration is written first: for a moment it may be newer than the wish, and is what workers will load.
    generation = max(wish.generation, stored.generation)
    waits = stored.min_workers == 0 and not stored.error and not stored.pending
    versions: dict[int, VersionState] = {}
    failed: list[int] = []
    for version in (*stored.versions, *_left_out(stored, workers)):
        best = _best(wish.model, version, generation, workers)
        if stored.pending and (best is None or best.state is not State.READY):
            best = VersionState(State.LOADING, generation, PENDING_REASON)
        if best is not None and best.state is State.UNAVAILABLE:
            failed.append(version)
        if waits and (best is None or best.state in (State.LOADING, State.UNLOADING)):
            best = VersionState(State.READY, generation)
        versions[version] = best or VersionState(State.UNAVAILABLE, generation, _NO_WORKER)
    return ModelStatus(
        model=wish.model, generation=generation, versions=versions, failed=tuple(failed), error=stored.error
    )


def _left_out(stored: StoredModel, workers: list[WorkerRecord]) -> list[int]:
    """Returns the versions that are served and not among those of the present configuration."""
    served = {
        version
        for worker in workers
        for version, state in worker.models.get(stored.model, {}).items()
        if state.state is State.READY and (state.generation < stored.generation or state.pinned)
    }
    return sorted(served.difference(stored.versions))


def _best(model: str, version: int, generation: int, workers: list[WorkerRecord]) -> VersionState | None:
    """Returns the best state that a live worker reports of a version; `None` when none reports on it."""
    reported = [
        state
        for worker in workers
        if (state := worker.state_of(model, version)) is not None and state.generation <= generation
    ]
    return min(reported, key=lambda state: (_RANK.index(state.state), -state.generation, state.unready), default=None)


def capacity_of(workers: Iterable[WorkerRecord], model: str, version: int) -> Capacity:
    """Sums up the best speeds of the workers that have a version READY; unknown while one has measured too little."""
    ready = [worker for worker in workers if worker.is_ready(model, version)]
    speeds = [worker.best_speeds.get(model, {}).get(version, 0.0) for worker in ready]
    return Capacity(sum(speeds) if all(speeds) else 0.0, 0.0, len(speeds))
