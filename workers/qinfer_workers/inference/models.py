"""The models that this worker serves: loads and unloads instances to match the desired state.

Everything is re-read at start, when woken and every 10 s. The old generation serves until the new one is loaded, or
longer if that fails. A pinned version that its policy has dropped is loaded again only with its pinned hash. A sequence
pins the version that it began with, an ensemble those that it was loaded with.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from qinfer.core.clock import ServerClock
from qinfer.core.retry import OutageLog, pause_s
from qinfer.core.settings import LimitSettings, WorkerSettings
from qinfer.errors import BrokerUnavailable, ModelLoadFailed, QinferError
from qinfer.models.config import config
from qinfer.models.installation import InstallationState, is_gone, put_completion
from qinfer.models.readiness import PENDING_REASON, Pin, is_placed, kept_by_pins
from qinfer.models.spec import ModelSpec
from qinfer.models.state import DesiredState, Pauses, State, StoredModel, VersionState, pause_of
from qinfer.models.store import ControlStore
from qinfer.observe.stats import LOAD_FAILURES, ModelCounts
from qinfer_workers.inference.ensembles.plans import EnsemblePlanner, NotYet, PlannedEnsemble
from qinfer_workers.inference.executor import in_thread
from qinfer_workers.inference.loader import LoadChange, LoadedVersion, Loader, LoadKind

logger = logging.getLogger(__name__)

REREAD_S = 10.0
_REREAD = 20
"""News may be lost, so each look reads as many models again."""
RELOAD_S = 30.0
LONGEST_RELOAD_S = 240.0
_RETRY_S = 1.0

Key = tuple[str, int]

T = TypeVar("T")


def by_model(values: Mapping[Key, T]) -> dict[str, dict[int, T]]:
    """Returns model → version → value."""
    nested: dict[str, dict[int, T]] = {}
    for (model, version), value in values.items():
        nested.setdefault(model, {})[version] = value
    return nested


class VersionHost(Protocol):
    """Serves loaded models, as `worker.Worker` does."""

    def serve(self, loaded: LoadedVersion) -> None:
        """Serves a model version, in place of its earlier generation."""
        ...

    def resize(self, loaded: LoadedVersion, surplus: int) -> None:
        """Changes the number of instances, under a new generation."""
        ...

    async def retire(self, model: str, version: int, is_wanted: Callable[[], bool]) -> bool:
        """Answers waiting requests and unloads a version; returns false if the version is wanted again."""
        ...


class WantedVersions(NamedTuple):
    """A stored model to be loaded.

    `kept` maps versions that only pins keep to their hashes (`pins.kept_by_pins`).
    """

    stored: StoredModel
    kept: Mapping[int, frozenset[str]]

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions to be loaded."""
        return (*self.stored.versions, *self.kept)


class PausedVersions:
    """The versions whose lanes this worker does not read."""

    def __init__(self) -> None:
        self._pauses: Pauses = {}
        self._changed = asyncio.Event()

    def follow_pauses(self, pauses: Pauses) -> None:
        """Takes the present pauses."""
        if pauses != self._pauses:
            self._pauses = pauses
            self._changed.set()
            self._changed = asyncio.Event()

    def has(self, model: str, version: int) -> bool:
        """Tells whether a version is paused."""
        return bool(self._pauses) and pause_of(self._pauses, model, version) is not None

    async def resumed(self, model: str, version: int) -> None:
        """Waits until a version is not paused."""
        while self.has(model, version):
            await self._changed.wait()


class Models:
    """Keeps the loaded models equal to the desired state."""

    def __init__(
        self,
        store: ControlStore,
        settings: WorkerSettings,
        limits: LimitSettings,
        loader: Loader,
        host: VersionHost,
    ) -> None:
        self._store = store
        self._globs: Sequence[str] = settings.models
        self._limits = limits
        self._loader = loader
        self._host = host
        self._slots = asyncio.Semaphore(settings.load_threads)
        self._planner = EnsemblePlanner(store, limits)
        self._looked = asyncio.Event()
        self._seen = InstallationState()
        self._loss = OutageLog(logger, "Redis has lost its data", "Redis has data again")
        self._wanted: dict[str, WantedVersions] = {}
        self._settled: dict[str, WantedVersions] = {}
        """The last desired states that the worker has tried to reach."""
        self._again_at: dict[str, float] = {}
        self._tries: Counter[Key] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = 0
        self._loaded: dict[Key, LoadedVersion] = {}
        self._load_s: dict[Key, float] = {}
        self._states: dict[Key, VersionState] = {}
        self.counts = ModelCounts()
        self.paused = PausedVersions()

    def states(self) -> dict[str, dict[int, VersionState]]:
        """Returns model → version → state."""
        return by_model(self._states)

    def load_times(self) -> dict[str, dict[int, float]]:
        """Returns model → version → load seconds, including waits."""
        return by_model(self._load_s)

    async def run(self, changed: Callable[[], None]) -> None:
        """Follows the desired state until cancelled; calls `changed` after changes."""
        self._changed = changed
        outage = OutageLog(logger, "desired state unknown", "desired state known again")
        is_news = True
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    is_whole = await self._read_desired(is_news=is_news)
                    outage.over()
                    self._looked.set()
                    self._looked = asyncio.Event()
                    self._start_tasks(tasks)
                    is_news = await self._store.wait(REREAD_S if is_whole else _RETRY_S) or not is_whole
                except BrokerUnavailable as error:
                    is_news = True
                    outage.failed(error.message)
                    await asyncio.sleep(_RETRY_S)

    async def _read_desired(self, *, is_news: bool) -> bool:
        """Returns false if Redis lost its data, which must unload nothing.

        Without news, few models are read, in turns.
        """
        installation = await self._store.installation()
        now = InstallationState(installation=installation, desired=await self._store.desired())
        if is_gone(self._seen, now):
            self._loss.failed("models stay until a gateway has written again what they should be")
            return False
        self._loss.over()
        self._seen = now
        mine = [name for name, wish in now.desired.items() if wish.load and is_placed(name, self._globs)]
        found = await self._store.models(mine if is_news else self._due(mine, now.desired))
        self.paused.follow_pauses(await self._store.pauses())
        pins = await self._store.pins()
        before = {name: self._wanted[name].stored for name in mine if name in self._wanted}
        self._wanted = {
            name: WantedVersions(stored, kept_by_pins(pins, stored)) for name, stored in {**before, **found}.items()
        }
        return True

    def _due(self, mine: Sequence[str], desired: Mapping[str, DesiredState]) -> list[str]:
        first, self._turn = self._turn, (self._turn + _REREAD) % max(len(mine), 1)
        turns = {mine[(first + number) % len(mine)] for number in range(min(_REREAD, len(mine)))}
        known = {name: wanted.stored.generation for name, wanted in self._wanted.items()}
        pending = {name for name, wanted in self._wanted.items() if wanted.stored.pending} | turns
        return [name for name in mine if name in pending or known.get(name) != desired[name].generation]

    def _start_tasks(self, tasks: asyncio.TaskGroup) -> None:
        known = {*self._wanted, *self._settled, *(name for name, _ in self._states)}
        for name in known - self._tasks.keys():
            if not self._is_settled(name):
                self._tasks[name] = tasks.create_task(self._reconcile(name))

    def _is_settled(self, name: str) -> bool:
        wanted = self._wanted.get(name)
        if wanted is None:
            return not any(model == name for model, _ in self._states)
        is_due = name in self._again_at and asyncio.get_running_loop().time() >= self._again_at[name]
        return wanted == self._settled.get(name) and not is_due

    async def _reconcile(self, name: str) -> None:
        try:
            while not self._is_settled(name):
                wanted = self._wanted.get(name)
                self._again_at.pop(name, None)
                await self._make_so(name, wanted)
                self._settled.pop(name, None)
                if wanted is not None:
                    self._settled[name] = wanted
        except BrokerUnavailable as error:  # the next look starts it again
            logger.warning("model not loaded or unloaded, trying again", extra={"model": name, "reason": error.message})
        finally:
            del self._tasks[name]

    async def _make_so(self, name: str, wanted: WantedVersions | None) -> None:
        """Loads first, then unloads, so that there is no gap."""
        if wanted is not None and wanted.stored.pending:
            await self._complete_config(wanted.stored)
            return
        if wanted is not None and not await self._load_all(name, wanted):
            return
        versions = () if wanted is None else wanted.versions
        async with asyncio.TaskGroup() as unloads:
            for key in [key for key in self._states if key[0] == name and key[1] not in versions]:
                unloads.create_task(self._unload(key))

    async def _load_all(self, name: str, wanted: WantedVersions) -> bool:
        stored = wanted.stored
        async with asyncio.TaskGroup() as loads:
            results = [loads.create_task(self._load((name, version), stored)) for version in stored.versions]
            for version, hashes in wanted.kept.items():
                loaded = self._loaded.get((name, version))
                if loaded is None or not loaded.executes(hashes):
                    loads.create_task(self._load((name, version), stored, hashes))
        if stored.error or not all(result.result() for result in results):
            return False
        for key in [(name, version) for version in wanted.kept]:
            if (state := self._states.get(key)) and not state.pinned:
                self._states[key] = replace(state, pinned=True)
                self._changed()
        return True

    async def _load(self, key: Key, model: StoredModel, hashes: frozenset[str] = frozenset()) -> bool:
        name, version = key
        extra = {"model": name, "version": version, "generation": model.generation}
        began_s = time.monotonic()
        self._show_loading(key, model.generation)
        try:
            if model.error:
                raise ModelLoadFailed(model.error)
            spec = config.to_spec(config.from_json(model.config), self._limits, model.labels)
            serving = self._loaded.get(key)
            planned = await self._plan(spec, key, model.generation) if spec.steps else None
            if planned is not None:
                spec = planned.plan.spec
            elif spec.steps:
                return False
            async with self._slots:
                change = await in_thread(
                    f"load-{name}", lambda: self._loader.load(spec, version, model, serving, hashes, planned)
                )
        except Exception as error:
            if isinstance(error, QinferError) and error.__cause__ is None:
                logger.error("load failed", extra={**extra, "error": error.message})
            else:
                logger.exception("load failed", extra=extra)
            self._fail(key, model.generation, error)
            if hashes and name not in self._again_at:  # files or memory may come back
                self._try_later(key)
            return False
        if name not in self._wanted and change.kind is not LoadKind.SAME:  # unloaded meanwhile
            await in_thread(f"unload-{name}", lambda: self._loader.discard(change))
            if serving is None:
                del self._states[key]
                self._changed()
            return True
        self._apply_change(key, change)
        self._tries.pop(key, None)
        if change.kind is LoadKind.NEW:
            self._load_s[key] = time.monotonic() - began_s
        loaded = change.loaded
        self._states[key] = VersionState(
            State.READY,
            model.generation,
            tried=model.generation,
            executed_hash=loaded.executed_hash,
            pinned=bool(hashes),
            steps=loaded.steps,
        )
        logger.info("model ready", extra={**extra, "change": change.kind.value})
        self._changed()
        return True

    async def _plan(self, spec: ModelSpec, key: Key, generation: int) -> PlannedEnsemble | None:
        """Returns `None` if the ensemble is no longer wanted."""
        while (wanted := self._wanted.get(key[0])) is not None and wanted.stored.generation == generation:
            looked = self._looked
            try:
                return await self._planner.plan_loaded(spec)
            except NotYet as error:
                self._show_loading(key, generation, error.message)
            except BrokerUnavailable:
                logger.warning("ensemble not planned yet: redis is away", extra={"model": spec.name})
            await looked.wait()
        return None

    def _apply_change(self, key: Key, change: LoadChange) -> None:
        if change.kind is LoadKind.NEW:
            self._host.serve(change.loaded)
        else:
            self._host.resize(change.loaded, change.surplus)
        self._loaded[key] = change.loaded

    def _show_loading(self, key: Key, generation: int, reason: str = "") -> None:
        before = self._states.get(key)
        if before is None or before.state is not State.READY:
            self._states[key] = VersionState(State.LOADING, generation, reason)
            self._changed()

    def _try_later(self, key: Key) -> None:
        self._tries[key] += 1
        wait_s = pause_s(self._tries[key], RELOAD_S, LONGEST_RELOAD_S)
        self._again_at[key[0]] = asyncio.get_running_loop().time() + wait_s

    def _fail(self, key: Key, generation: int, error: Exception) -> None:
        reason = error.message if isinstance(error, QinferError) else f"{type(error).__name__}: {error}"
        self.counts.add(*key, LOAD_FAILURES)
        if isinstance(error, QinferError) and error.retryable:
            self._try_later(key)
        before = self._states[key]
        if before.state is State.READY:
            self._states[key] = replace(before, reason=reason, tried=generation)
        else:
            self._states[key] = VersionState(State.UNAVAILABLE, generation, reason, generation)
        self._changed()

    async def _unload(self, key: Key) -> None:
        name, version = key
        before = self._states[key]
        if before.state is State.READY:
            self._states[key] = VersionState(State.UNLOADING, before.generation, tried=before.tried)
            self._changed()
            if not await self._host.retire(name, version, lambda: self._is_wanted(key)):
                self._states[key] = before
                self._changed()
                return
            self._loaded.pop(key, None)
            self._load_s.pop(key, None)
            logger.info("model unloaded", extra={"model": name, "version": version})
        del self._states[key]
        self._changed()

    def _is_wanted(self, key: Key) -> bool:
        wanted = self._wanted.get(key[0])
        return wanted is not None and key[1] in wanted.versions

    async def _complete_config(self, model: StoredModel) -> None:
        for version in model.versions:
            self._show_loading((model.model, version), model.generation, PENDING_REASON)
        try:
            async with self._slots:
                completion = await in_thread(f"complete-{model.model}", lambda: self._loader.complete(model))
        except Exception as error:  # the boundary to backends
            logger.exception("configuration not completed", extra={"model": model.model})
            for version in model.versions:
                self._fail((model.model, version), model.generation, error)
            return
        await put_completion(model, completion, self._store)


PIN_EVERY_S = 20.0

_PIN_TTL_S = 60.0


class VersionPins:
    """Keeps a worker's pins for one reason; `versions` returns versions → the hash to execute (empty = any)."""

    def __init__(
        self,
        store: ControlStore,
        clock: ServerClock,
        worker_id: str,
        reason: str,
        versions: Callable[[], Mapping[Key, str]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._holder = worker_id
        self._reason = reason
        self._versions = versions
        self._pinned: set[Key] = set()
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    def changed(self) -> None:
        """Triggers a write."""
        self._changed.set()

    async def run(self) -> None:
        """Writes the pins until cancelled."""
        outage = OutageLog(logger, f"pins of {self._reason} not renewed", f"pins of {self._reason} are renewed again")
        while True:
            self._changed.clear()
            try:
                await self.write()
                outage.over()
            except QinferError as error:
                outage.failed(error.message)
            try:
                async with asyncio.timeout(PIN_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def write(self) -> None:
        """Writes needed pins, removes others, wakes readers."""
        async with self._writing:
            versions = self._versions()
            is_news = versions.keys() != self._pinned
            for key, content_hash in versions.items():
                self._pinned.add(key)
                await self._put(key, content_hash, _PIN_TTL_S)
            for key in self._pinned - versions.keys():
                await self._put(key, "", 0.0)
                self._pinned.discard(key)
            if is_news:
                await self._store.wake()

    async def _put(self, key: Key, content_hash: str, ttl_s: float) -> None:
        pin = Pin(
            model=key[0],
            version=key[1],
            content_hash=content_hash,
            reason=self._reason,
            holder=self._holder,
            expires_at=self._clock.now_s() + ttl_s,
        )
        await self._store.put_pin(pin, ttl_s)
