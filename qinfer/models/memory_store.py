"""The control store in this process's memory: for notebooks, tests, and everything in one process."""

import asyncio
from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary

from qinfer.bridge.metrics import RouteTotals
from qinfer.bridge.reports import BridgeReport, RouteUse, merged
from qinfer.core.clock import Clock, SystemClock
from qinfer.models.state import Desired, ScalerRecord, Speed, StoredModel, WorkerRecord
from qinfer.observe import stats


class MemoryControlStore:
    """A `ControlStore` that gateway and worker of one process share.

    Args:
        clock: Tells when heartbeats are over.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._desired: dict[str, Desired] = {}
        self._models: dict[str, StoredModel] = {}
        self._workers: dict[str, tuple[float, WorkerRecord]] = {}
        self._stats: dict[tuple[str, int], dict[str, int]] = {}
        self._completions: dict[str, str] = {}
        self._settings: dict[str, str] = {}
        self._speeds: dict[tuple[str, int], Speed] = {}
        self._signs: dict[tuple[str, str], float] = {}
        self._scalers: dict[str, tuple[float, ScalerRecord]] = {}
        self._scaler_counts: dict[str, int] = {}
        self._bridges: dict[str, tuple[float, int, Mapping[str, RouteUse]]] = {}
        self._routes: dict[str, dict[str, int]] = {}
        self._wakes = 0
        self._woken = asyncio.Event()
        self._seen: WeakKeyDictionary[asyncio.Task[object], int] = WeakKeyDictionary()

    async def desired(self) -> dict[str, Desired]:
        """Returns the desired state of every model."""
        return dict(self._desired)

    async def set_desired(self, desired: Desired) -> None:
        """Writes the desired state of one model; an older generation never replaces a newer one."""
        current = self._desired.get(desired.model)
        if current is None or current.generation <= desired.generation:
            self._desired[desired.model] = desired

    async def model(self, name: str) -> StoredModel | None:
        """Returns a model's stored configuration."""
        return self._models.get(name)

    async def models(self, names: Collection[str]) -> dict[str, StoredModel]:
        """Returns the stored configurations of those models that have one, by name."""
        return {name: self._models[name] for name in names if name in self._models}

    async def put_model(self, stored: StoredModel) -> bool:
        """Stores a model's configuration, unless one of the same or a newer generation is stored already."""
        current = self._models.get(stored.model)
        if current is not None and current.generation >= stored.generation:
            return False
        self._models[stored.model] = stored
        return True

    async def heartbeat(self, record: WorkerRecord, ttl_s: float) -> None:
        """Writes a worker's record; it disappears `ttl_s` seconds after the last write."""
        self._workers[record.id] = (self._clock.monotonic_s() + ttl_s, record)

    async def retire(self, worker_id: str) -> None:
        """Removes a worker's record at once."""
        self._workers.pop(worker_id, None)

    async def workers(self) -> list[WorkerRecord]:
        """Returns the records of all live workers."""
        now_s = self._clock.monotonic_s()
        self._workers = {id_: entry for id_, entry in self._workers.items() if entry[0] > now_s}
        return [record for _, record in self._workers.values()]

    async def sign(self, program: str, process: str, ttl_s: float) -> None:
        """Tells that a process of a program lives; holds for `ttl_s` seconds."""
        self._signs[program, process] = self._clock.monotonic_s() + ttl_s

    async def signs(self, program: str) -> list[str]:
        """Returns the processes of a program whose last `sign` still holds, sorted."""
        now_s = self._clock.monotonic_s()
        return sorted(process for (of, process), ends_s in self._signs.items() if of == program and ends_s > now_s)

    async def put_scaler(self, record: ScalerRecord, counts: Mapping[str, int], ttl_s: float) -> None:
        """Writes an autoscaler's record, and adds to what all of them counted."""
        self._scalers[record.id] = (self._clock.monotonic_s() + ttl_s, record)
        stats.add(self._scaler_counts, counts)

    async def scalers(self) -> list[ScalerRecord]:
        """Returns the records of all live autoscalers, by id."""
        now_s = self._clock.monotonic_s()
        self._scalers = {id_: entry for id_, entry in self._scalers.items() if entry[0] > now_s}
        return [record for _, (_, record) in sorted(self._scalers.items())]

    async def scaler_counts(self) -> dict[str, int]:
        """Returns what all autoscalers counted; the counts only grow."""
        return dict(self._scaler_counts)

    async def put_bridge(self, report: BridgeReport, ttl_s: float) -> None:
        """Writes what a bridge has in hand, and adds what it counted, once."""
        _, last, _ = self._bridges.get(report.process, (0.0, 0, {}))
        if report.number < last:
            return
        self._bridges[report.process] = (self._clock.monotonic_s() + ttl_s, report.number, report.uses)
        for route, counts in report.counts.items():
            stats.add(self._routes.setdefault(route, {}), counts if report.number > last else {})

    async def routes(self) -> dict[str, RouteTotals]:
        """Returns what all bridges say of each route."""
        now_s = self._clock.monotonic_s()
        live = [uses for ends_s, _, uses in self._bridges.values() if ends_s > now_s]
        return merged({route: dict(counts) for route, counts in self._routes.items()}, live)

    async def put_speed(self, model: str, version: int, speed: Speed) -> None:
        """Stores how fast a worker found a model version to be."""
        self._speeds[model, version] = speed

    async def speeds(self, versions: Collection[tuple[str, int]]) -> dict[tuple[str, int], Speed]:
        """Returns what `put_speed` stored last of those versions that have it."""
        return {key: self._speeds[key] for key in versions if key in self._speeds}

    async def put_completion(self, content_hash: str, completed: str) -> None:
        """Stores what a runtime completed; the first one stays."""
        self._completions.setdefault(content_hash, completed)

    async def completion(self, content_hash: str) -> str | None:
        """Returns what `put_completion` stored."""
        return self._completions.get(content_hash)

    async def put_setting(self, name: str, value: str) -> None:
        """Stores a setting that clients change."""
        self._settings[name] = value

    async def settings(self) -> dict[str, str]:
        """Returns what `put_setting` stored."""
        return dict(self._settings)

    async def wake(self) -> None:
        """Wakes everyone who waits in `wait`."""
        self._wakes += 1
        self._woken.set()
        self._woken = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Returns when `wake` was called since the last `wait`, or after `timeout_s` seconds.

        What a reader has seen is kept by task: gateway and worker share this store, and each must see every wake.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._seen.get(task, 0) == self._wakes:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._woken.wait()
            except TimeoutError:
                return
        self._seen[task] = self._wakes

    async def add_stats(self, model: str, version: int, deltas: Mapping[str, int]) -> None:
        """Adds to the statistics of a model version; they only grow."""
        stats.add(self._stats.setdefault((model, version), {}), deltas)

    async def stats(self, model: str, version: int) -> dict[str, int]:
        """Returns the statistics of a model version."""
        return dict(self._stats.get((model, version), {}))

    async def all_stats(self, versions: Collection[tuple[str, int]]) -> dict[tuple[str, int], dict[str, int]]:
        """Returns the statistics of several versions, each of them."""
        return {key: await self.stats(*key) for key in versions}

    async def some_stats(
        self, versions: Collection[tuple[str, int]], fields: Collection[str]
    ) -> dict[tuple[str, int], dict[str, int]]:
        """Returns these fields of the statistics of several versions, where there are any."""
        known = {key: self._stats.get(key, {}) for key in versions}
        return {key: {name: of[name] for name in fields if name in of} for key, of in known.items()}

    async def close(self) -> None:
        """Does nothing: there is no connection."""
