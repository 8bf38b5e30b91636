"""The catalog of models: a view of the control store, rebuilt off the request path.

`refresh` replaces the whole view. While the store can't be reached, the last view serves on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qinfer.core.retry import OutageLog
from qinfer.core.settings import LimitSettings
from qinfer.errors import BrokerUnavailable, ModelNotFound, ModelNotReady, QinferError
from qinfer.models.config.config import from_json, to_json, to_spec
from qinfer.models.dependents import kind_of_ensemble, labels_of
from qinfer.models.installation import InstallationGuard, InstallationState
from qinfer.models.readiness import (
    PENDING_REASON,
    Capacity,
    ModelStatus,
    assess,
    capacity_of,
    failed_loads,
    have_begun,
    is_placed,
)
from qinfer.models.spec import ModelSpec, Routes, lanes_of
from qinfer.models.state import Pauses, State, StoredModel, VersionState, WorkerRecord, pause_of
from qinfer.models.store import ControlStore
from qinfer.observe.stats import Objective
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue

logger = logging.getLogger(__name__)

_REMIND_S = 600.0  # between log lines about one failing model

_REFRESH_S = 2.0
_RETRY_S = 1.0
_BEAT_S = 5.0
"""The longest wait for heartbeats after a loss of data."""
_UNKNOWN = Capacity()
_AFTER_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """A model version that accepts requests.

    Attributes:
        generation: The generation of `spec`; a worker that has another one checks requests again.
        wait_s: Seconds that an online request may wait for a worker to load the version; 0 = a worker has loaded it,
            or requests must not wait.
    """

    spec: ModelSpec
    version: int
    generation: int
    lane: Lane
    routes: Routes
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _CatalogView:
    served: Mapping[tuple[str, int], ServedVersion] = field(default_factory=dict)
    asked: Mapping[tuple[str, int], ServedVersion] = field(default_factory=dict)
    accepting: Mapping[tuple[str, int], ServedVersion] = field(default_factory=dict)
    capacities: Mapping[tuple[str, int], Capacity] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    statuses: Mapping[str, ModelStatus] = field(default_factory=dict)
    stored: Mapping[str, StoredModel] = field(default_factory=dict)
    workers: tuple[WorkerRecord, ...] = ()
    pauses: Pauses = field(default_factory=dict)


class Catalog:
    """The models that accept requests.

    Without a `queue`, gateways restore lost data. `missed` gets the seconds since the first failed refresh, `shown` the
    versions that `asked` returns.
    """

    def __init__(self, store: ControlStore, limits: LimitSettings, queue: Queue | None = None) -> None:
        self._store = store
        self._limits = limits
        self._guard = InstallationGuard(store, queue)
        self.missed: Callable[[float], None] = lambda _: None
        self.shown: Callable[[Mapping[tuple[str, int], ServedVersion]], None] = lambda _: None
        self._is_whole = True
        self._beaten_by_s = 0.0
        self._view = _CatalogView()
        self._refreshed = False
        self._started = False
        self._refreshing = asyncio.Lock()
        self._specs: dict[str, tuple[StoredModel, ModelSpec]] = {}
        self._unusable: dict[str, StoredModel] = {}
        self._changes = ChangeLog()
        self._seen_versions: dict[str, set[int]] = {}
        """Model → all versions ever seen."""

    async def refresh(self) -> bool:
        """Replaces the view, unless the store has lost data; returns whether it did."""
        async with self._refreshing:
            workers = tuple(await self._store.workers())  # first: they must not be ahead of the configurations
            now = await self._read_models(workers)
            if now is None:
                return False
            desired, stored = now.desired, now.stored
            statuses = assess(desired, stored, workers)
            capacities = await self._capacities(statuses, workers)
            waits_s = await self._waits_s(statuses, capacities)
            served, accepting = self._servable_models(statuses, stored, waits_s)
            self._changes.log(self._view.statuses, statuses)
            self._seen_versions = {
                name: self._seen_versions.get(name, set()).union(statuses[name].versions if name in statuses else ())
                for name in (*stored, *statuses)
            }
            pauses = await self._store.pauses()
            asked = {
                key: each
                for key, each in ({key: each for key, each in accepting.items() if each.wait_s} | served).items()
                if pause_of(pauses, each.spec.name, each.version) is None
            }
            self._view = _CatalogView(
                served=served,
                asked=asked,
                accepting=accepting,
                capacities=capacities,
                known=tuple(sorted(desired)),
                statuses=statuses,
                stored=stored,
                workers=workers,
                pauses=pauses,
            )
            self.shown(asked)
            self._refreshed = True
            self._started = self._started or have_begun(statuses.values())
            return True

    async def _read_models(self, workers: Sequence[WorkerRecord]) -> InstallationState | None:
        now = await self._guard.read()
        if now is None:
            self._is_whole, self._beaten_by_s = False, time.monotonic() + _BEAT_S
        elif not self._is_whole:
            have_beaten = {worker.id for worker in self._view.workers} <= {worker.id for worker in workers}
            self._is_whole = have_beaten or time.monotonic() >= self._beaten_by_s
        return now if self._is_whole else None

    async def run(self) -> None:
        """Refreshes the view when woken, and periodically."""
        outage = OutageLog(logger, "control store unreachable, serving the last view", "control store reachable again")
        while True:
            try:
                await self._store.wait(_REFRESH_S)
                await self.refresh()
            except BrokerUnavailable as error:
                outage.failed(error.message)
                self.missed(outage.lasts_s)
                await asyncio.sleep(_RETRY_S)
            else:
                outage.over()

    def resolve(self, model: str, version: int) -> ServedVersion:
        """Returns a READY version, 0 = the highest; or raises `ModelNotFound` or `ModelNotReady` (reference §1.3)."""
        served = self._view.served.get((model, version))
        if served is None:
            raise self._refusal(model, version)
        return served

    def says_ready(self, model: str, version: int) -> bool:
        """Tells whether the model's own `is_ready` agrees, too."""
        served = self.resolve(model, version)
        state = self._view.statuses[model].versions.get(served.version)
        return state is None or not state.unready

    def find(self, model: str, version: int) -> ServedVersion | None:
        """Returns `None` where `resolve` raises."""
        return self._view.served.get((model, version))

    def asked(self, model: str, version: int) -> ServedVersion:
        """Returns a version as `resolve`, or one that loads within `ServedVersion.wait_s`; not a paused one."""
        served = self._view.asked.get((model, version))
        if served is None:
            raise self._paused(model, version) or self._reason(model, version)
        return served

    def unpaused(self, model: str, version: int) -> ServedVersion:
        """Returns a version as `resolve`; raises `ModelNotReady` if it is paused."""
        served = self.resolve(model, version)
        if (refusal := self._paused(model, version)) is not None:
            raise refusal
        return served

    def pauses(self) -> Pauses:
        """Returns the pauses by model and version."""
        return self._view.pauses

    def accepting(self, model: str, version: int) -> ServedVersion:
        """Returns the version for an asynchronous request; 0 = the highest READY one, else the highest loadable one."""
        view = self._view
        served = view.served.get((model, version)) or view.accepting.get((model, version))
        if served is None:
            raise self._reason(model, version)
        return served

    def capacity(self, model: str, version: int) -> Capacity:
        """Returns a version's speed, perhaps of a future worker."""
        return self._view.capacities.get((model, version), _UNKNOWN)

    def spec(self, model: str) -> ModelSpec | None:
        """Returns the newest usable configuration of a desired model."""
        known = self._specs.get(model)
        return None if known is None else known[1]

    def versions(self, model: str) -> tuple[int, ...]:
        """Returns all versions, ascending."""
        stored, status = self._view.stored.get(model), self._view.statuses.get(model)
        return tuple(sorted({*(stored.versions if stored else ()), *(status.versions if status else ())}))

    def known(self) -> tuple[str, ...]:
        """Returns all models, including those that are not loaded."""
        return self._view.known

    def status(self, model: str) -> ModelStatus:
        """Returns a model's state, or raises `ModelNotFound`."""
        status = self._view.statuses.get(model)
        if status is None:
            raise self._refusal(model, 0)
        return status

    def ready_versions(self, model: str) -> tuple[int, ...]:
        """Returns the READY versions, ascending."""
        status = self._view.statuses.get(model)
        return () if status is None else status.ready_versions

    def readiness(self) -> dict[tuple[str, int], bool]:
        """Returns whether each version is READY."""
        return {
            (model, version): version in status.ready_versions
            for model, status in self._view.statuses.items()
            for version in status.versions
        }

    def load_failures(self) -> dict[tuple[str, int], bool]:
        """Returns whether each version's newest load failed."""
        return failed_loads(self._view.statuses.values(), self._view.workers)

    def objectives(self, usual: Objective) -> dict[tuple[str, int], Objective]:
        """Returns each version's latency objective, by default `usual`."""
        return {
            (model, version): Objective(spec.slo_latency_s or usual.latency_s, spec.slo_target or usual.target)
            for model, (_, spec) in self._specs.items()
            if (status := self._view.statuses.get(model)) is not None
            for version in status.versions
        }

    def named(self, model: str, version: int) -> tuple[str, int]:
        """Returns labels for metrics: unknown names make no series."""
        status = self._view.statuses.get(model)
        if status is None:
            return (model, 0) if model in self._view.stored else ("", 0)
        return model, version if version in status.versions else max(status.versions, default=0)

    def unloaded(self) -> list[tuple[str, int]]:
        """Returns unloaded versions, which may still have queued requests."""
        view = self._view
        return [
            (of.model, version)
            for of in view.stored.values()
            if of.model not in view.statuses
            for version in of.versions
        ]

    def specs(self) -> dict[str, ModelSpec]:
        """Returns the configurations of desired models."""
        return {model: spec for model, (_, spec) in self._specs.items()}

    def stateful(self) -> list[str]:
        """Returns the names of stateful models."""
        return [name for name, spec in self.specs().items() if spec.is_stateful]

    def lanes(self, model: str, version: int) -> tuple[Lane, ...]:
        """Returns a version's online lanes in reading order."""
        known = self._specs.get(model)
        return (Lane(model, version),) if known is None else lanes_of(known[1], version)

    def config_json(self, model: str, version: int) -> str:
        """Returns a normalised configuration, or raises as `resolve`."""
        self.resolve(model, version)
        stored, spec = self._specs[model]
        if not spec.steps:
            return stored.config
        config = from_json(stored.config)
        config.model_transaction_policy.decoupled = spec.decoupled
        return to_json(config)

    def is_server_ready(self) -> bool:
        """Tells whether the server is ready by the strict rule: all models READY, no lost data (reference §1.3)."""
        return self._refreshed and self._is_whole and all(status.is_ready for status in self._view.statuses.values())

    def has_started(self) -> bool:
        """Tells whether the server is ready by the other rule: a model was READY, or none could load."""
        return self._started

    def workers(self) -> list[WorkerRecord]:
        """Returns the live workers."""
        return list(self._view.workers)

    def _servable_models(
        self,
        statuses: Mapping[str, ModelStatus],
        stored: Mapping[str, StoredModel],
        waits_s: Mapping[tuple[str, int], float],
    ) -> tuple[dict[tuple[str, int], ServedVersion], dict[tuple[str, int], ServedVersion]]:
        served: dict[tuple[str, int], ServedVersion] = {}
        accepting: dict[tuple[str, int], ServedVersion] = {}
        specs: dict[str, tuple[StoredModel, ModelSpec]] = {}
        for model, status in statuses.items():
            spec = self._spec(stored.get(model), stored)
            if spec is None:
                served.update(self._still_served(status))
                if model in self._specs:
                    specs[model] = self._specs[model]
                continue
            specs[model] = (stored[model], spec)
            newest = stored[model].generation
            for version in status.ready_versions:
                generation = status.versions[version].generation
                last = self._view.served.get((model, version))
                if last is None or last.generation != generation:  # the spec of a reload's old generation stays
                    last = _served(spec, version, newest)
                _offer(served, last, status)
            for version in status.loadable_versions:
                last, wait_s = self._view.accepting.get((model, version)), waits_s.get((model, version), 0.0)
                if last is None or (last.generation, last.wait_s) != (newest, wait_s) or last.spec is not spec:
                    last = _served(spec, version, newest, wait_s)
                _offer(accepting, last, status)
        self._specs = specs
        return served, accepting

    def _still_served(self, status: ModelStatus) -> dict[tuple[str, int], ServedVersion]:
        kept: dict[tuple[str, int], ServedVersion] = {}
        for version in status.ready_versions:
            last = self._view.served.get((status.model, version))
            if last is not None and last.generation == status.versions[version].generation:
                _offer(kept, last, status)
        return kept

    async def _capacities(
        self, statuses: Mapping[str, ModelStatus], workers: tuple[WorkerRecord, ...]
    ) -> dict[tuple[str, int], Capacity]:
        versions = [(model, version) for model, status in statuses.items() for version in status.versions]
        capacities = {key: capacity_of(workers, *key) for key in versions}
        speeds = await self._store.speeds([key for key, capacity in capacities.items() if not capacity.workers])
        for key, speed in speeds.items():
            capacities[key] = Capacity(speed.best_rps, speed.load_s)
        return capacities

    async def _waits_s(
        self, statuses: Mapping[str, ModelStatus], capacities: Mapping[tuple[str, int], Capacity]
    ) -> dict[tuple[str, int], float]:
        waiting = [
            (status.model, version)
            for status in statuses.values()
            for version in status.loadable_versions
            if version not in status.ready_versions
        ]
        least_s = self._limits.wait_for_workers_s
        if not waiting or not least_s:
            return {}
        globs = [glob for scaler in await self._store.scalers() for glob in scaler.places]
        waits_s = dict.fromkeys(waiting, least_s)
        for key in waiting:
            if is_placed(key[0], globs):
                start_s = capacities[key].start_s or self._limits.cold_start_s
                waits_s[key] = max(least_s, start_s + _AFTER_START_S)
        return waits_s

    def _spec(self, stored: StoredModel | None, others: Mapping[str, StoredModel]) -> ModelSpec | None:
        if stored is None or stored.error or stored.pending:
            return None
        known = self._specs.get(stored.model)
        known = known if known is not None and known[0] == stored else None
        if known is not None and not stored.uses:
            return known[1]
        try:
            kind = kind_of_ensemble(stored, others)
            if known is not None and (known[1].decoupled, known[1].sequences) == kind:
                return known[1]
            spec = to_spec(from_json(stored.config), self._limits, labels_of(stored, others))
            return replace(spec, **kind._asdict()) if spec.steps else spec
        except QinferError as error:  # one model of a newer qinfer must not take the others down
            if self._unusable.get(stored.model) != stored:
                self._unusable[stored.model] = stored
                logger.error("stored configuration unusable", extra={"model": stored.model, "error": error.message})
            return None

    def _paused(self, model: str, version: int) -> ModelNotReady | None:
        served = self._view.served.get((model, version)) or self._view.accepting.get((model, version))
        pause = None if served is None else pause_of(self._view.pauses, model, served.version)
        if served is None or pause is None:
            return None
        why = f": {pause.reason}" if pause.reason else ""
        return ModelNotReady(
            f"model '{model}' version {served.version} is paused{why}; try again when it is resumed, or store the "
            "request, which waits: POST /v1/models/<model>/requests"
        )

    def _reason(self, model: str, version: int) -> ModelNotFound | ModelNotReady:
        refusal, status = self._refusal(model, version), self._view.statuses.get(model)
        if status is None or (version and version not in status.versions):
            return refusal
        one = version or max(status.versions, default=0)
        state = status.versions.get(one)  # a damaged configuration may have no version
        is_known = state is not None and (one in status.failed or state.reason == PENDING_REASON)
        reason = status.error or (state.reason if state is not None and is_known else "")
        return ModelNotReady(f"{refusal.message}: {reason}" if reason else refusal.message)

    def _refusal(self, model: str, version: int) -> ModelNotFound | ModelNotReady:
        who = f"Request for unknown model: '{model}'"
        status, stored = self._view.statuses.get(model), self._view.stored.get(model)
        if status is None and stored is None:
            return ModelNotFound(f"{who} is not found")
        if not version:
            return ModelNotFound(f"{who} has no available versions")
        known = status.versions if status is not None else stored.versions if stored is not None else ()
        if version not in known and version not in self._seen_versions.get(model, ()):
            return ModelNotFound(f"{who} version {version} is not found")
        return ModelNotReady(f"{who} version {version} is not at ready state")


def _served(spec: ModelSpec, version: int, generation: int, wait_s: float = 0.0) -> ServedVersion:
    routes = Routes(spec, version)
    lane = routes.default.lane
    return ServedVersion(spec=spec, version=version, generation=generation, lane=lane, routes=routes, wait_s=wait_s)


def _offer(to: dict[tuple[str, int], ServedVersion], version: ServedVersion, status: ModelStatus) -> None:
    """Adds a version; the last one that is not `pinned` answers requests without a version."""
    to[status.model, version.version] = version
    if not status.versions[version.version].pinned:
        to[status.model, 0] = version


class ChangeLog:
    """Logs state changes; a repeated failure for the same reason only every `_REMIND_S`."""

    def __init__(self) -> None:
        self._outages: dict[tuple[str, int], OutageLog] = {}

    def log(self, old: Mapping[str, ModelStatus], new: Mapping[str, ModelStatus]) -> None:
        """Logs the differences."""
        for model, status in new.items():
            before = old.get(model)
            if before == status:
                continue
            if status.error and (before is None or before.error != status.error):
                self._outage(model, 0, "model can't be loaded", logging.ERROR).failed(status.error)
            for version, state in status.versions.items():
                if before is None or before.versions.get(version) != state:
                    self._state(model, version, state)
        for model in old.keys() - new.keys():
            logger.info("model gone", extra={"model": model})
            for key in [key for key in self._outages if key[0] == model]:
                del self._outages[key]

    def _state(self, model: str, version: int, state: VersionState) -> None:
        told, about = state.state.value, {"model": model, "version": version}
        if state.state is State.UNAVAILABLE and state.reason:
            self._outage(model, version, "model version state", logging.INFO, told).failed(state.reason)
        elif state.state is not State.LOADING or (model, version) not in self._outages:
            logger.info("model version state", extra={**about, "state": told, "reason": state.reason})
        if state.state is State.READY:
            self._outages.pop((model, version), None)

    def _outage(self, model: str, version: int, event: str, level: int, state: str = "") -> OutageLog:
        about = {"version": version, "state": state} if version else {}
        fresh = OutageLog(logger, event, level=level, remind_s=_REMIND_S, model=model, **about)  # type: ignore[arg-type]  # its other keywords
        return self._outages.setdefault((model, version), fresh)
