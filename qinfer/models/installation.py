"""Models in Redis: how they are written, and restored after a loss (ADR 0015).

Lanes come first, so that an admitted request has a queue; the configuration precedes the desired state, so that a
reader of that state finds it. The next writer completes an interrupted write.

Only a runtime can complete some configurations, such as those of Python models: they are stored as `pending`, and a
worker completes each content once.

`qinfer:installation` holds a random id for as long as Redis has its data; another id or none means a loss. A node of a
cluster has lost its data if all desired states or a model's configuration are missing, which qinfer never removes. A
failover to an older replica is no loss.

One gateway restores its last snapshot: it replaces the id with a claim, which expires if the gateway dies. Each model
gets a generation above all that were seen.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from qinfer.core.messages import IdFactory
from qinfer.errors import BrokerUnavailable, ModelLoadFailed, QinferError
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


logger = logging.getLogger(__name__)

_CLAIM = "restoring:"
_CLAIM_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationState:
    """The state that only Redis keeps; `installation` is the id of the data."""

    installation: str = ""
    desired: Mapping[str, DesiredState] = field(default_factory=dict)
    stored: Mapping[str, StoredModel] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The missing parts of an earlier snapshot; `whole` = all data, the queue's too."""

    whole: bool
    wishes: tuple[str, ...]
    configs: tuple[str, ...]
    settings: tuple[str, ...]


def loss(before: InstallationState, now: InstallationState) -> Loss | None:
    """Returns what Redis lost since `before`; a lost setting alone, as after a failover, does not count."""
    if not before.installation or is_claimed(before.installation):
        return None
    is_other = now.installation != before.installation
    wishes = _gone(before.desired, now.desired, is_other=is_other)
    found = Loss(
        whole=is_other,
        wishes=wishes,
        configs=tuple(sorted((before.stored.keys() - now.stored.keys()).intersection({*now.desired, *wishes}))),
        settings=_gone(before.settings, now.settings, is_other=is_other),
    )
    return found if is_other or found.wishes or found.configs else None


def _gone(before: Mapping[str, object], now: Mapping[str, object], *, is_other: bool) -> tuple[str, ...]:
    return tuple(sorted(before.keys() - now.keys())) if is_other or not now else ()


def is_claimed(installation: str) -> bool:
    """Tells whether a gateway is restoring the data."""
    return installation.startswith(_CLAIM)


def is_gone(before: InstallationState, now: InstallationState) -> bool:
    """Tells whether the desired state is lost."""
    if not before.installation:
        return False
    if not now.installation or is_claimed(now.installation):
        return True
    return now.installation == before.installation and bool(before.desired) and not now.desired


async def refuse_lost(store: ControlStore) -> None:
    """Raises `BrokerUnavailable` while data is lost."""
    installation = await store.installation()
    if not installation or is_claimed(installation):
        raise BrokerUnavailable("Redis has lost its data, and models are being restored; try again")


async def read_snapshot(store: ControlStore) -> InstallationState:
    """Returns the present snapshot."""
    installation = await store.installation()  # first: data is restored before its claim ends
    desired = await store.desired()
    return InstallationState(
        installation=installation,
        desired=desired,
        stored=await store.models(sorted(desired)),
        settings=await store.settings(),
    )


class InstallationGuard:
    """Reads the state in Redis; with a queue, restores lost parts."""

    def __init__(self, store: ControlStore, queue: Queue | None = None) -> None:
        self._store = store
        self._queue = queue
        self._new_id = IdFactory().ulid
        self._whole = InstallationState()
        self._is_told = False

    async def read(self) -> InstallationState | None:
        """Reads the state; begins to restore lost parts and returns `None`."""
        now = await read_snapshot(self._store)
        if self._queue is None:
            if is_gone(self._whole, now):
                return None
            kept = {name: was for name, was in self._whole.stored.items() if name in now.desired}
            now = replace(now, stored={**kept, **now.stored})
        elif not await self._check_snapshot(now, self._queue):
            return None
        elif not now.installation:
            now = replace(now, installation=await self._store.exchange_installation("", self._new_id()))
        self._whole, self._is_told = now, False
        return now

    async def _check_snapshot(self, now: InstallationState, queue: Queue) -> bool:
        before = self._whole
        if is_claimed(now.installation):
            return not before.installation
        found = await self._confirmed(loss(before, now))
        if found is None:
            return True
        self._log_loss(found)
        if not (found.wishes or found.configs or found.settings):
            return True
        await self._restore(now, found, queue)
        return False

    async def _confirmed(self, found: Loss | None) -> Loss | None:
        if found is None or found.whole:
            return found
        wishes = await self._store.wished() if found.wishes else set()
        configs = [name for name in found.configs if not await self._store.has_model(name)]
        kept = replace(found, wishes=() if wishes else found.wishes, configs=tuple(configs))
        return kept if kept.wishes or kept.configs else None

    def _log_loss(self, found: Loss) -> None:
        if self._is_told:
            return
        self._is_told = True
        logger.error(
            "Redis has lost its data; this gateway restores the part that it knows",
            extra={
                "lost": "requests, results, jobs and statistics" if found.whole else "a part, as of a cluster's node",
                "models": found.wishes,
                "configurations": found.configs,
                "settings": found.settings,
                "installation": self._whole.installation,
            },
        )

    async def _restore(self, now: InstallationState, found: Loss, queue: Queue) -> None:
        before, installation = self._whole, now.installation or self._new_id()
        claim = _CLAIM + self._new_id()
        if await self._store.exchange_installation(now.installation, claim, _CLAIM_S) != claim:
            return
        for name in sorted({*found.wishes, *found.configs}):
            await self._restore_model(now.desired.get(name) or before.desired[name], queue)
        missing = before.settings.keys() - (await self._store.settings()).keys()
        for name in missing.intersection(found.settings):
            await self._store.put_setting(name, before.settings[name])
        if await self._store.exchange_installation(claim, installation) == installation:
            logger.warning("the known part of Redis' data is restored", extra={"installation": installation})
        await self._store.wake()

    async def _restore_model(self, wish: DesiredState, queue: Queue) -> None:
        """Restores a model and its desired state; a value written meanwhile stays."""
        known, generation = self._whole.stored.get(wish.model), wish.generation
        if known is not None and not await self._store.has_model(wish.model):
            newest = max(generation, known.generation) + 1
            generation = max(newest, int(queue.clock.now_s() * 1000))
            await ensure_lanes(known, queue)
            await self._store.put_model(msgspec.structs.replace(known, generation=generation))
        await self._store.set_desired(msgspec.structs.replace(wish, generation=generation))
