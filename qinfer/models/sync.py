"""`qinfer models sync`: writes the repository's models as the desired state. Idempotent; several may run at once.

A model that becomes unreadable or wrong stays while a worker serves it: half-written files must not take it down. A
removed model is unloaded, and so is one that two repositories have.

A gateway and `qinfer up` begin with `start`: a sync, or in mode `explicit` the loads in the settings.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelNotFound, SettingsError
from qinfer.models.dependents import in_order, missing_uses, renew_users, wanted_for_another
from qinfer.models.installation import write_model
from qinfer.models.repository.open import Repositories
from qinfer.models.state import DesiredState, ErrorKind, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue

logger = logging.getLogger(__name__)

ALL = "*"
"""Loads every model."""

_TOLD = 5
_EMPTY = (
    "the model repository has no model, but {count} should be served ({names}); nothing was changed. Is it mounted? "
    "To unload all of them: qinfer models sync --may-empty"
)


class EmptyRepository(SettingsError):
    """The repository has no model, while models are desired."""


class SyncedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sync for one model; `error` says why it can't be loaded."""

    model: str
    generation: int
    versions: tuple[int, ...] = ()
    changed: bool = False
    removed: bool = False
    error: str = ""


async def sync(
    repository: Repositories, store: ControlStore, delivery: Queue, *, min_workers: int = 1, may_empty: bool = True
) -> list[SyncedModel]:
    """Writes the repository's models as the desired state, and wakes the workers if anything changed.

    With `may_empty`, an empty repository, perhaps one that is not mounted, unloads all models; otherwise it raises
    `SettingsError`. After `BrokerUnavailable`, the next sync completes this one.
    """
    found = await asyncio.to_thread(repository.scan)
    desired = await store.desired()
    if not found and not may_empty and (served := sorted(name for name, wish in desired.items() if wish.load)):
        raise EmptyRepository(_EMPTY.format(count=len(served), names=", ".join(served[:_TOLD])))
    workers = await store.workers()
    synced = [
        await _sync_model(model, desired.get(model.model), workers, store, delivery, min_workers)
        for model in in_order(found)
    ]
    for name in sorted(desired.keys() - {model.model for model in found}):
        if desired[name].load:
            await store.set_desired(msgspec.structs.replace(desired[name], load=False))
            synced.append(SyncedModel(model=name, generation=desired[name].generation, changed=True, removed=True))
    await _reload_dependents(synced, store)
    return sorted(synced, key=lambda model: (model.removed, model.model))


async def _reload_dependents(synced: Sequence[SyncedModel], store: ControlStore) -> None:
    changed = {model.model for model in synced if model.changed}
    if changed:
        await renew_users(changed, store, without=changed)
        await store.wake()


async def start(
    repository: Repositories,
    store: ControlStore,
    delivery: Queue,
    settings: RepositorySettings,
    *,
    again: bool = False,
) -> list[SyncedModel]:
    """Writes the desired state for a start in the present control mode, or raises `SettingsError`.

    In mode `explicit`, `again` (of `qinfer up`) also loads models that were unloaded before.
    """
    if settings.control_mode != "explicit":
        return await _sync_at_start(repository, store, delivery, settings, again=again)
    desired, workers = await store.desired(), await store.workers()
    synced: list[SyncedModel] = []
    named = await asyncio.to_thread(_names_to_load, repository, settings.load_models)
    names = [name for name in named if again or name not in desired]
    for model in await asyncio.to_thread(_with_uses, repository, names):
        wish = desired.get(model.model)
        if model.model not in named:
            if wish is not None and wish.load:
                continue
            wish = wanted_for_another(model.model, wish)
        synced.append(await _sync_model(model, wish, workers, store, delivery, settings.min_workers))
    await _reload_dependents(synced, store)
    return synced


async def _sync_at_start(
    repository: Repositories, store: ControlStore, delivery: Queue, settings: RepositorySettings, *, again: bool
) -> list[SyncedModel]:
    """Syncs; a gateway that joins others and finds no model leaves theirs, except in mode `poll`."""
    may_empty = again or settings.control_mode == "poll"
    try:
        return await sync(repository, store, delivery, min_workers=settings.min_workers, may_empty=may_empty)
    except EmptyRepository as error:
        logger.warning("models left unchanged", extra={"reason": error.message})
        return []


def _names_to_load(repository: Repositories, named: tuple[str, ...]) -> list[str]:
    if ALL not in named:
        return list(dict.fromkeys(named))
    if len(named) > 1:
        raise SettingsError(
            f"QINFER_REPOSITORY__LOAD_MODELS (--load-model) has '{ALL}' among other names: give it alone, or the names"
        )
    return repository.names()


def _with_uses(repository: Repositories, names: Sequence[str]) -> list[StoredModel]:
    found, unknown = {name: _read_model(repository, name) for name in names}, set[str]()
    while missing := missing_uses(list(found.values()), {*found, *unknown}):
        for name in missing:
            try:
                found[name] = repository.read(name)
            except ModelNotFound:
                unknown.add(name)
    return in_order(found.values())


def _read_model(repository: Repositories, name: str) -> StoredModel:
    try:
        return repository.read(name)
    except ModelNotFound:
        raise SettingsError(
            f"QINFER_REPOSITORY__LOAD_MODELS (--load-model) names '{name}', which no model repository has"
        ) from None


async def _sync_model(
    model: StoredModel,
    wish: DesiredState | None,
    workers: Iterable[WorkerRecord],
    store: ControlStore,
    delivery: Queue,
    min_workers: int,
) -> SyncedModel:
    if model.error and wish is not None and wish.load and any(worker.serves(model.model) for worker in workers):
        kept = await store.model(model.model)
        if kept is not None and model.error_kind == ErrorKind.NOT_UNIQUE:
            return await _unload(kept, wish, model.error, store)
        if kept is not None and not kept.error:
            return SyncedModel(
                model=model.model,
                generation=kept.generation,
                versions=kept.versions,
                error=f"{model.error}; the model loaded before stays in service",
            )
    if model.error_kind == ErrorKind.NOT_UNIQUE and wish is not None and not wish.load:
        return SyncedModel(model=model.model, generation=wish.generation, error=model.error)
    anew = wish is not None and not wish.load  # a worker may still have the generation of before the unload
    stored, changed = await write_model(model, wish, store, delivery, anew=anew, min_workers=min_workers)
    return SyncedModel(
        model=model.model, generation=stored.generation, versions=stored.versions, changed=changed, error=stored.error
    )


async def _unload(kept: StoredModel, wish: DesiredState, reason: str, store: ControlStore) -> SyncedModel:
    failed = msgspec.structs.replace(kept, generation=kept.generation + 1, error=reason)
    await store.put_model(failed)
    await store.set_desired(msgspec.structs.replace(wish, load=False))
    return SyncedModel(model=kept.model, generation=kept.generation, versions=kept.versions, changed=True, error=reason)
