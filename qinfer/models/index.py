"""The index of models (reference §1.14): what the repositories have, and the state of what was ever loaded."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from qinfer.models.readiness import ModelStatus, assess
from qinfer.models.state import Desired, State, StoredModel, WorkerRecord

UNLOADED = "unloaded"


class IndexEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version of a model; a model that was never loaded has its name only.

    Attributes:
        name: The model's name.
        version: One of its versions; empty for a model that was never loaded, or can't be.
        state: The version's state; empty for a model that was never loaded.
        reason: Why it is not READY.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


def index_of(
    names: Iterable[str],
    desired: Mapping[str, Desired],
    stored: Mapping[str, StoredModel],
    workers: Iterable[WorkerRecord],
    *,
    ready: bool = False,
) -> list[IndexEntry]:
    """Returns the index, by name and version.

    Args:
        names: The models of the repositories.
        desired: The desired state.
        stored: The stored configurations.
        workers: The live workers.
        ready: Only versions that are READY.
    """
    records = list(workers)
    statuses = assess(desired, stored, records)
    entries: list[IndexEntry] = []
    for name in sorted({*names, *desired}):
        if name in statuses:
            entries.extend(_loaded(statuses[name]))
        elif name in stored:
            entries.extend(_unloaded(stored[name], records))
        else:
            entries.append(IndexEntry(name))
    return [entry for entry in entries if not ready or entry.state == State.READY]


def _loaded(status: ModelStatus) -> Iterator[IndexEntry]:
    if not status.versions:
        yield IndexEntry(status.model, "", State.UNAVAILABLE, status.error)
    for version, state in sorted(status.versions.items()):
        is_ready = state.state is State.READY
        yield IndexEntry(status.model, str(version), state.state, "" if is_ready else state.reason)


def _unloaded(stored: StoredModel, workers: list[WorkerRecord]) -> Iterator[IndexEntry]:
    """Yields the versions of a model that should not be loaded; one that a worker still has is UNLOADING."""
    states = [item for worker in workers for item in worker.models.get(stored.model, {}).items()]
    held = {version for version, state in states if state.state is not State.UNAVAILABLE}
    for version in stored.versions:
        if version in held:
            yield IndexEntry(stored.model, str(version), State.UNLOADING)
        else:
            yield IndexEntry(stored.model, str(version), State.UNAVAILABLE, UNLOADED)
