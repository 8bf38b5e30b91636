"""The identity of the data in Redis, and its restoration after a loss (ADR 0015).

`qinfer:installation` holds a random id for as long as Redis has its data; another id or none means a loss. A node of a
cluster has lost its data if all desired states or a model's configuration are missing, which qinfer never removes. A
failover to an older replica is no loss.

One gateway restores its last snapshot: it replaces the id with a claim, which expires if the gateway dies. Each model
gets a generation above all that were seen.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from qinfer.core.messages import IdFactory
from qinfer.errors import BrokerUnavailable
from qinfer.models.state import DesiredState, StoredModel
from qinfer.models.store import ControlStore
from qinfer.models.writing import ensure_lanes
from qinfer.queue.lanes import Queue

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
