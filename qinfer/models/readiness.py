"""State, load progress, speed and pins of model versions: pure functions of desired state and worker records.

A load succeeds when, for every version, a worker that places the model is READY at the generation. It fails when all
live workers that place the model have failed.

A version is READY while a live worker has it at the desired generation, or at an earlier one until the new one is
loaded. A dropped version stays visible while a worker serves it. An ensemble is READY only while all its models are. A
model with `min_workers` 0 is READY even without a worker.

Pins keep model versions loaded for their holders: workers load a pinned version even if the version policy has dropped
it, but offer it only to callers who name it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from qinfer.models.state import DesiredState, ModelUse, State, StoredModel, VersionState, WorkerRecord

APART = "~"
"""The beginning of names of models that only workers of their own load."""


def is_placed(model: str, globs: Sequence[str]) -> bool:
    """Tells whether a worker loads the model; `*` is for all models but those that are apart."""
    return any(fnmatchcase(model, glob) and model.startswith(APART) <= glob.startswith(APART) for glob in globs)


PENDING_REASON = "its configuration is being completed by a worker"


class LoadProgress(Enum):
    """The progress of a load."""

    READY = "ready"
    FAILED = "failed"
    WAITING = "waiting"


class LoadOutcome(NamedTuple):
    """The progress of a load, and its reason."""

    progress: LoadProgress
    reason: str = ""


def outcome(stored: StoredModel, workers: Iterable[WorkerRecord]) -> LoadOutcome:
    """Returns the progress of loading a configuration."""
    if stored.error:
        return LoadOutcome(LoadProgress.FAILED, stored.error)
    assigned = [worker for worker in workers if is_placed(stored.model, worker.places)]
    if not assigned:
        if stored.min_workers == 0 and not stored.pending:
            return LoadOutcome(LoadProgress.READY)
        return LoadOutcome(LoadProgress.WAITING, "no live worker places it")
    parts = [_version(stored, version, assigned) for version in stored.versions]
    for progress in (LoadProgress.FAILED, LoadProgress.WAITING):
        found = [part.reason for part in parts if part.progress is progress]
        if found:
            return LoadOutcome(progress, "".join(found) if progress is LoadProgress.FAILED else found[0])
    return LoadOutcome(LoadProgress.READY)


def _version(stored: StoredModel, version: int, assigned: Sequence[WorkerRecord]) -> LoadOutcome:
    states = [worker.state_of(stored.model, version) for worker in assigned]
    if not stored.pending and any(state is not None and _is_ready(state, stored.generation) for state in states):
        return LoadOutcome(LoadProgress.READY)
    failures = [state.reason for state in states if state is not None and _has_failed(state, stored.generation)]
    if len(failures) == len(assigned):
        return LoadOutcome(LoadProgress.FAILED, f"version {version} is at UNAVAILABLE state: Internal: {failures[0]};")
    return LoadOutcome(
        LoadProgress.WAITING, PENDING_REASON if stored.pending else f"version {version} is still being loaded"
    )


def _is_ready(state: VersionState, generation: int) -> bool:
    return state.state is State.READY and state.generation == generation


def _has_failed(state: VersionState, generation: int) -> bool:
    return state.tried >= generation and bool(state.reason)


_RANK = (State.READY, State.LOADING, State.UNLOADING, State.UNAVAILABLE)
_NO_WORKER = "no live worker has loaded it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model's state over all live workers.

    Attributes:
        versions: Version → the best of its states on all workers.
        error: The reason why no version of the model can be loaded.
    """

    model: str
    generation: int
    versions: Mapping[int, VersionState] = field(default_factory=dict)
    failed: tuple[int, ...] = ()
    error: str = ""

    @property
    def ready_versions(self) -> tuple[int, ...]:
        """The READY versions, ascending."""
        return tuple(sorted(v for v, state in self.versions.items() if state.state is State.READY))

    @property
    def is_ready(self) -> bool:
        """Tells whether every version of the model is READY."""
        return bool(self.versions) and len(self.ready_versions) == len(self.versions)

    @property
    def loadable_versions(self) -> tuple[int, ...]:
        """The versions that are, or may become, READY, ascending."""
        return () if self.error else tuple(sorted(v for v in self.versions if v not in self.failed))


class Capacity(NamedTuple):
    """The speed of live workers.

    Attributes:
        start_s: The load time, if no worker has it loaded; 0 = unknown.
    """

    rps: float = 0.0
    start_s: float = 0.0
    workers: int = 0

    def behind(self, part: float) -> "Capacity":
        """Returns the capacity less `part`; at least a hundredth."""
        return self if not part else self._replace(rps=self.rps * max(1.0 - part, 0.01))


def assess(
    desired: Mapping[str, DesiredState], stored: Mapping[str, StoredModel], workers: Iterable[WorkerRecord]
) -> dict[str, ModelStatus]:
    """Returns the status of desired models, by name."""
    records = list(workers)
    statuses = {
        model: _status(wish, stored.get(model), records) for model, wish in sorted(desired.items()) if wish.load
    }
    users = [model for model in statuses if model in stored and stored[model].uses]
    while any(_lower(stored[model], statuses) for model in users):
        pass  # an ensemble that stops being READY may be a step of another
    return statuses


def failed_loads(statuses: Iterable[ModelStatus], workers: Iterable[WorkerRecord]) -> dict[tuple[str, int], bool]:
    """Returns whether the newest load failed on a worker; version 0 = unknown."""
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
    """Tells whether a model is READY, or none can be."""
    models = list(statuses)
    return any(model.ready_versions for model in models) or not any(model.loadable_versions for model in models)


def lacking(ensemble: str, use: ModelUse, statuses: Mapping[str, ModelStatus]) -> str:
    """Returns, in Triton's words, why an ensemble can't use a model."""
    status = statuses.get(use.model)
    who = f"ensemble '{ensemble}' depends on '{use.model}'"
    if status is None or not status.ready_versions:
        return f"{who} which has no loaded version"
    if use.version and use.version not in status.ready_versions:
        return f"{who} whose required version {use.version} is not loaded"
    return ""


def _lower(model: StoredModel, statuses: dict[str, ModelStatus]) -> bool:
    """Makes the ready versions of an ensemble UNAVAILABLE if a step lacks a model; returns whether it did."""
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


def _status(wish: DesiredState, stored: StoredModel | None, workers: list[WorkerRecord]) -> ModelStatus:
    if stored is None:
        return ModelStatus(model=wish.model, generation=wish.generation, error="its configuration is not stored")
    # The configuration is written first.
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
    served = {
        version
        for worker in workers
        for version, state in worker.models.get(stored.model, {}).items()
        if state.state is State.READY and (state.generation < stored.generation or state.pinned)
    }
    return sorted(served.difference(stored.versions))


def _best(model: str, version: int, generation: int, workers: list[WorkerRecord]) -> VersionState | None:
    reported = [
        state
        for worker in workers
        if (state := worker.state_of(model, version)) is not None and state.generation <= generation
    ]
    return min(reported, key=lambda state: (_RANK.index(state.state), -state.generation, state.unready), default=None)


def capacity_of(workers: Iterable[WorkerRecord], model: str, version: int) -> Capacity:
    """Returns the sum of the best speeds; unknown while one is."""
    ready = [worker for worker in workers if worker.is_ready(model, version)]
    speeds = [worker.best_speeds.get(model, {}).get(version, 0.0) for worker in ready]
    return Capacity(sum(speeds) if all(speeds) else 0.0, 0.0, len(speeds))


EXECUTED = "sha256:"
"""The prefix of an executed hash."""


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A model version that its holder still needs.

    Attributes:
        content_hash: The hash when the version was pinned (`is_executed`); empty = any content.
        expires_at: Seconds on Redis' clock.
    """

    model: str
    version: int
    content_hash: str = ""
    reason: str
    holder: str
    expires_at: float

    @property
    def id(self) -> str:
        """The id of the pin."""
        return f"{self.reason}/{self.holder}/{self.model}/{self.version}"


class ExecutedVersion(msgspec.Struct, frozen=True, array_like=True):
    """A model version and the hash of its content; `asked` is the version in a step's configuration."""

    model: str
    version: int
    content_hash: str
    asked: int = 0


def is_executed(content_hash: str) -> bool:
    """Tells whether a hash is of executed content."""
    return content_hash.startswith(EXECUTED)


def executed_hash(workers: Iterable[WorkerRecord], model: str, version: int) -> str:
    """Returns a version's hash on live workers; empty while they disagree or lack it."""
    hashes = {state.executed_hash for state in _newest(workers, model, version)}
    return hashes.pop() if len(hashes) == 1 else ""


def _newest(workers: Iterable[WorkerRecord], model: str, version: int) -> list[VersionState]:
    states = [state for worker in workers if (state := worker.state_of(model, version)) is not None]
    ready = [state for state in states if state.state is State.READY]
    newest = max((state.generation for state in ready), default=0)
    return [state for state in ready if state.generation == newest]


def executed(workers: Sequence[WorkerRecord], model: str, version: int) -> tuple[ExecutedVersion, ...]:
    """Returns the content of a version and its steps; empty as for `executed_hash`."""
    own = executed_hash(workers, model, version)
    steps = {state.steps for state in _newest(workers, model, version)}
    if not own or len(steps) != 1:
        return ()
    found = [ExecutedVersion(model, version, own)]
    found += [
        ExecutedVersion(step.model, step.version, executed_hash(workers, step.model, step.version), step.asked)
        for step in steps.pop()
    ]
    return tuple(found) if all(one.content_hash for one in found) else ()


def joint_hash(executes: Sequence[ExecutedVersion]) -> str:
    """Returns one hash of a version and its steps."""
    if len(executes) == 1:
        return executes[0].content_hash
    text = "\n".join([f"{one.model}/{one.asked}/{one.version}\t{one.content_hash}" for one in executes])
    return f"{EXECUTED}{hashlib.sha256(text.encode()).hexdigest()}"


def kept_by_pins(pins: Iterable[Pin], stored: StoredModel) -> Mapping[int, frozenset[str]]:
    """Returns allowed contents of versions that only pins keep."""
    kept: dict[int, frozenset[str]] = {}
    for pin in pins:
        if pin.model == stored.model and pin.version not in stored.versions:
            kept[pin.version] = kept.get(pin.version, frozenset()) | {pin.content_hash}
    return kept


def why_lost(pin: Pin, workers: Iterable[WorkerRecord], wish: DesiredState | None = None) -> str:
    """Returns why no worker can keep a version; empty = one may."""
    if wish is not None and not wish.load:
        return f"version {pin.version} of model '{pin.model}' can't be kept: the model was unloaded"
    states = [state for worker in workers if (state := worker.state_of(pin.model, pin.version)) is not None]
    if any(_may_be(pin, state) for state in states):
        return ""
    reasons = sorted({state.reason or "its files or configuration have changed" for state in states})
    return f"version {pin.version} of model '{pin.model}' can't be kept: {reasons[0]}" if reasons else ""


def _may_be(pin: Pin, state: VersionState) -> bool:
    if state.state is not State.READY:
        return state.state is not State.UNAVAILABLE
    is_known = state.executed_hash and is_executed(pin.content_hash)
    return not is_known or state.executed_hash == pin.content_hash
