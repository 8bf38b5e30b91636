"""Writes a model into the control store: lanes, configuration, then desired state.

Lanes come first, so that an admitted request has a queue; the configuration precedes the desired state, so that a
reader of that state finds it. The next writer completes an interrupted write.

Only a runtime can complete some configurations, such as those of Python models: they are stored as `pending`, and a
worker completes each content once.
"""

import hashlib
from typing import NamedTuple

import msgspec

from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.config.to_spec import MIN_WORKERS
from qinfer.models.spec import lanes_of
from qinfer.models.state import DesiredState, StoredModel
from qinfer.models.store import ControlStore
from qinfer.queue.entries import bulk_lanes
from qinfer.queue.lanes import Queue

_ATTEMPTS = 10


class WrittenModel(NamedTuple):
    """The stored model, and whether it was written now."""

    stored: StoredModel
    changed: bool


async def write_model(
    model: StoredModel,
    wish: DesiredState | None,
    store: ControlStore,
    delivery: Queue,
    *,
    anew: bool = False,
    min_workers: int = 1,
) -> WrittenModel:
    """Stores a changed model and its desired state; with `anew`, an unchanged model too."""
    new = await _as_stored(model, store, min_workers)
    await ensure_lanes(new, delivery)
    written = await _store(new, wish, store, int(delivery.clock.now_s() * 1000), anew=anew)
    if wish is None or wish.generation < written.stored.generation or not wish.load:
        is_dependent = wish is not None and wish.dependent
        await store.set_desired(DesiredState(model.model, written.stored.generation, dependent=is_dependent))
        return WrittenModel(written.stored, changed=True)
    return written


async def ensure_lanes(stored: StoredModel, delivery: Queue) -> None:
    """Makes the lanes of a model's versions, if known."""
    if stored.pending or stored.error:
        return
    spec = to_spec(from_json(stored.config))
    for version in stored.versions:
        await delivery.ensure((*lanes_of(spec, version), *bulk_lanes(stored.model, version)))


async def _as_stored(model: StoredModel, store: ControlStore, min_workers: int) -> StoredModel:
    if model.config and not model.pending:
        config = from_json(model.config)
        if MIN_WORKERS in config.parameters:
            min_workers = int(config.parameters[MIN_WORKERS].string_value)
    stored = msgspec.structs.replace(model, min_workers=min_workers)
    completion = await find_completion(stored, store) if stored.pending else None
    return stored if completion is None else completed(stored, completion)


async def _store(
    new: StoredModel, wish: DesiredState | None, store: ControlStore, now_ms: int, *, anew: bool
) -> WrittenModel:
    """Stores a model; of two writers, the slower finds its generation taken, and looks again.

    A generation is at least the milliseconds since the epoch: a removed model that returns must not get one that a
    worker still has loaded.
    """
    for _ in range(_ATTEMPTS):
        current = await store.model(new.model)
        previous = max(current.generation if current else 0, wish.generation if wish else 0)
        stored = msgspec.structs.replace(new, generation=max(previous + 1, now_ms))
        if current is not None and not anew and has_same_content(current, stored):
            return WrittenModel(current, changed=False)
        if await store.put_model(stored):
            return WrittenModel(stored, changed=True)
    raise QinferError(f"model '{new.model}' is changed by others all the time; try again")


def has_same_content(one: StoredModel, other: StoredModel) -> bool:
    """Tells whether two models differ only in generation."""
    return msgspec.structs.replace(one, generation=other.generation) == other


class Completion(msgspec.Struct, frozen=True):
    """The result of a completion; an error holds until the content changes."""

    config: str = ""
    error: str = ""


def completion_key(stored: StoredModel) -> str:
    """Returns the key of a pending model's content."""
    return hashlib.sha256(f"{stored.content_hash}\n{stored.config}".encode()).hexdigest()


def completed(stored: StoredModel, completion: Completion) -> StoredModel:
    """Returns a pending model with its completion."""
    if completion.error:
        return msgspec.structs.replace(stored, pending="", config="", error=completion.error)
    try:
        parameters = to_spec(from_json(completion.config)).parameters
    except ModelLoadFailed as error:
        return msgspec.structs.replace(stored, pending="", config="", error=error.message)
    min_workers = int(parameters.get(MIN_WORKERS, stored.min_workers))
    return msgspec.structs.replace(stored, pending="", config=completion.config, min_workers=min_workers)


async def find_completion(stored: StoredModel, store: ControlStore) -> Completion | None:
    """Returns a pending model's completion, if any."""
    text = await store.completion(completion_key(stored))
    return None if text is None else msgspec.json.decode(text, type=Completion)


async def put_completion(stored: StoredModel, completion: Completion, store: ControlStore) -> None:
    """Stores a completion, then the model; several workers may do so at once."""
    await store.put_completion(completion_key(stored), msgspec.json.encode(completion).decode())
    first = await find_completion(stored, store)  # the first result counts
    done = completed(stored, first or completion)
    if await store.put_model(msgspec.structs.replace(done, generation=stored.generation + 1)):
        await store.wake()
