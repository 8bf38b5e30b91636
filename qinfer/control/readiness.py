"""What state each model version is in: a pure function of desired state, stored configurations and live workers.

READY = desired, and loaded by a live worker (DESIGN.md §5), at the desired generation or, while that one is loading or
when it fails to load, at an earlier one: a reload makes no gap.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qinfer.control.base import Desired, State, StoredModel, VersionState, WorkerRecord

_RANK = (State.READY, State.LOADING, State.UNLOADING, State.UNAVAILABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model as all live workers together have it.

    Attributes:
        model: Its name.
        generation: The generation that is desired.
        versions: Version → the best state that a worker has it in, with its generation and the reason.
        error: Why the model can't be loaded at all; empty when it can.
    """

    model: str
    generation: int
    versions: Mapping[int, VersionState] = field(default_factory=dict)
    error: str = ""

    @property
    def ready_versions(self) -> tuple[int, ...]:
        """The versions that can be asked, ascending."""
        return tuple(sorted(v for v, state in self.versions.items() if state.state is State.READY))

    @property
    def is_ready(self) -> bool:
        """Tells whether every version of the model can be asked."""
        return bool(self.versions) and len(self.ready_versions) == len(self.versions)


def assess(
    desired: Mapping[str, Desired], stored: Mapping[str, StoredModel], workers: Iterable[WorkerRecord]
) -> dict[str, ModelStatus]:
    """Returns the status of every model that is desired to be loaded, by name."""
    records = list(workers)
    return {model: _status(wish, stored.get(model), records) for model, wish in sorted(desired.items()) if wish.load}


def _status(wish: Desired, stored: StoredModel | None, workers: list[WorkerRecord]) -> ModelStatus:
    if stored is None:
        return ModelStatus(model=wish.model, generation=wish.generation, error="its configuration is not stored")
    # The configuration is written first: for a moment it may be newer than the wish, and is what workers will load.
    generation = max(wish.generation, stored.generation)
    versions = {version: _version(wish.model, version, generation, workers) for version in stored.versions}
    return ModelStatus(model=wish.model, generation=generation, versions=versions, error=stored.error)


def _version(model: str, version: int, generation: int, workers: list[WorkerRecord]) -> VersionState:
    reported = [
        state
        for worker in workers
        if (state := worker.models.get(model, {}).get(version)) is not None and state.generation <= generation
    ]
    if not reported:
        return VersionState(State.UNAVAILABLE, generation, "no live worker has loaded it")
    return min(reported, key=lambda state: (_RANK.index(state.state), -state.generation))
