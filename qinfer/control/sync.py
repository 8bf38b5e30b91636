"""`qinfer models sync`: makes the desired state what the repository holds. Idempotent; several may run at once.

Order matters: lanes first, so that an admitted request always has a queue; then the configuration, then the wish for
it, so that whoever sees a wish finds its configuration. A run that is cut off is completed by the next.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from qinfer.control.base import ControlStore, Desired, StoredModel
from qinfer.control.lanes import lanes_of
from qinfer.delivery.base import Delivery
from qinfer.errors import QinferError
from qinfer.repository.config import to_json, to_spec
from qinfer.repository.local import RepositoryModel
from qinfer.settings import LimitSettings

_ANY_LIMITS = LimitSettings()  # nothing that depends on them is read here


class Repository(Protocol):
    """Where models come from; `LocalRepository` is one."""

    def scan(self) -> Sequence[RepositoryModel]:
        """Reads every model; blocking."""
        ...


class SyncedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a sync did with one model.

    Attributes:
        model: Its name.
        generation: Its generation now.
        versions: The versions that will be loaded.
        changed: The model is new, changed or gone.
        removed: The repository no longer has it.
        error: Why it can't be loaded; empty when it can.
    """

    model: str
    generation: int
    versions: tuple[int, ...] = ()
    changed: bool = False
    removed: bool = False
    error: str = ""


async def sync(repository: Repository, store: ControlStore, delivery: Delivery) -> list[SyncedModel]:
    """Writes what the repository holds as the desired state, and wakes everyone if anything changed.

    Raises:
        SettingsError: The repository can't be read; nothing is changed then.
        BrokerUnavailable: The store or the queue can't be reached; the next sync completes this one.
    """
    found = await asyncio.to_thread(repository.scan)
    desired = await store.desired()
    synced = [await _sync_model(model, desired.get(model.name), store, delivery) for model in found]
    for name in sorted(desired.keys() - {model.name for model in found}):
        await store.forget(name)
        synced.append(SyncedModel(model=name, generation=desired[name].generation, changed=True, removed=True))
    if any(model.changed for model in synced):
        await store.wake()
    return synced


async def _sync_model(
    model: RepositoryModel, wish: Desired | None, store: ControlStore, delivery: Delivery
) -> SyncedModel:
    spec = None if model.config is None else to_spec(model.config, _ANY_LIMITS)
    if spec is not None:
        for version in model.versions:
            await delivery.ensure(lanes_of(spec, version))
    stored, changed = await _store(model, wish, store, int(delivery.clock.now_s() * 1000))
    if wish is None or wish.generation < stored.generation or not wish.load:
        await store.set_desired(Desired(model.name, stored.generation))
        changed = True
    return SyncedModel(
        model=model.name, generation=stored.generation, versions=stored.versions, changed=changed, error=stored.error
    )


async def _store(
    model: RepositoryModel, wish: Desired | None, store: ControlStore, now_ms: int
) -> tuple[StoredModel, bool]:
    """Stores the configuration under a new generation if it differs from what is stored; returns it and whether it did.

    A generation is at least the milliseconds since the epoch: a model that went and came back must not get a generation
    that a worker still has loaded from before. Of two syncs at once the slower finds its generation taken, and looks
    again.
    """
    for _ in range(10):
        current = await store.model(model.name)
        previous = max(current.generation if current else 0, wish.generation if wish else 0)
        new = _stored(model, max(previous + 1, now_ms))
        if current is not None and msgspec.structs.replace(current, generation=new.generation) == new:
            return current, False
        if await store.put_model(new):
            return new, True
    raise QinferError(f"model '{model.name}' is being changed by others all the time; run the sync again")


def _stored(model: RepositoryModel, generation: int) -> StoredModel:
    return StoredModel(
        model=model.name,
        generation=generation,
        config="" if model.config is None else to_json(model.config),
        versions=model.versions,
        content_hash=model.content_hash,
        error=model.error,
        min_workers=1 if model.config is None else to_spec(model.config, _ANY_LIMITS).min_workers,
    )
