"""A gateway's reports: metrics, statistics, settings that clients change, and the load in replies.

`/metrics` shows what it can while Redis is away. A scrape reads new dead letters for their versions, and all only after
some were removed.

Replies may carry load metrics of ORCA (Open Request Cost Aggregation): the load of a language model's key-value cache.
As Triton does (server `src/orca_http.cc`), two numbers are computed from TensorRT-LLM's gauges, which are cached.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from qinfer.bridge.reports import BridgeReports, families
from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.queue.jobs import Jobs
from qinfer.labeling.tasks import LabelTasks
from qinfer.models.catalog import Catalog
from qinfer.models.state import SCALED_DOWN, SCALED_UP
from qinfer.models.store import EVERY_MODEL, ControlStore, CountPushes, Underway, concerns, follow_log_settings
from qinfer.observe.catalogue import MetricScope
from qinfer.observe.exposition import (
    GAUGE,
    OPENMETRICS,
    OPENMETRICS_TYPE,
    Family,
    ModelSeries,
    labels_of,
    merged,
    model_families,
    render,
    series_of,
)
from qinfer.observe.host import HostMeter, read_use
from qinfer.observe.latencies import SlidingWindow
from qinfer.observe.stats import LABELING, GatewayTally, Objective, add
from qinfer.observe.triton_metrics import MetricsChoice
from qinfer.queue import nodes
from qinfer.queue.dead_letters import DeadLetters
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.scaling.work import SequenceWork, VersionWork, read_backlogs, read_sequences, read_work
from qinfer.submission.memory import TensorMemory
from qinfer.traffic.tally import TargetTally
from qinfer_api.about import SharedLogSettings, SharedTraceSettings
from qinfer_api.observe.metrics import MetricsSnapshot, scopes_of, shown_metrics
from qinfer_api.observe.statistics import Statistics
from qinfer_api.observe.trace_file import TraceFile, start_of
from qinfer_api.stages import TenantTally

LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"

LOAD_HEADER = "endpoint-load-metrics"

KV_CACHE_FAMILY = "nv_trt_llm_kv_cache_block_metrics"

READ_EVERY_S = 1.0
"""Workers write changed metrics once a second."""

_WITHIN_S = 0.25
_TYPE = "kv_cache_block_type"


class CacheLoad(NamedTuple):
    """A key-value cache: the used share of blocks, and the tokens that fit."""

    utilization: float
    capacity: int

    def shown(self, form: str) -> str:
        """Returns the reply header's value, or empty."""
        if form == "json":
            named = {"kv_cache_utilization": self.utilization, "max_token_capacity": self.capacity}
            return "JSON " + msgspec.json.encode({"named_metrics": named}).decode()
        if form == "text":
            capacity = f"named_metrics.max_token_capacity={self.capacity}"
            return f"TEXT named_metrics.kv_cache_utilization={self.utilization:.6f}, {capacity}"
        return ""


class EndpointLoad:
    """Returns the load of models; each gateway has one."""

    def __init__(self, catalog: Catalog, store: ControlStore) -> None:
        self._catalog = catalog
        self._store = store
        self._reading = asyncio.Lock()
        self._gauges: list[ModelSeries] = []
        self._read_at_s = float("-inf")

    async def load_header(self, model: str, form: str) -> dict[str, str]:
        """Returns the reply header with a model's load, if any."""
        async with self._reading:
            if time.monotonic() - self._read_at_s >= READ_EVERY_S:
                self._gauges = await self._read_gauges()
                self._read_at_s = time.monotonic()
        load = load_of(self._gauges, model)
        value = "" if load is None else load.shown(form)
        return {LOAD_HEADER: value} if value else {}

    async def _read_gauges(self) -> list[ModelSeries]:
        try:
            async with asyncio.timeout(_WITHIN_S):
                records = await self._store.model_metrics([record.id for record in self._catalog.workers()])
        except (BrokerUnavailable, TimeoutError):
            return []
        return await asyncio.to_thread(_gauges_in, records)


def _gauges_in(records: Iterable[bytes | None]) -> list[ModelSeries]:
    return merged(one for one in series_of(records) if (one.name, one.kind) == (KV_CACHE_FAMILY, GAUGE))


def load_of(gauges: Iterable[ModelSeries], model: str) -> CacheLoad | None:
    """Returns the load in a model's gauges, or in all gauges for a model without its own."""
    known = [(dict(one.labels), one.values[0]) for one in gauges]
    own = [(labels, value) for labels, value in known if labels.get("model") == model]
    blocks = {labels[_TYPE]: value for labels, value in own or known if _TYPE in labels}
    used, most, tokens = (blocks.get(name, math.nan) for name in ("used", "max", "tokens_per"))
    if not all(math.isfinite(value) and value >= 0 for value in (used, most, tokens, most * tokens)):
        return None
    return CacheLoad(used / most if most else 0.0, int(most * tokens))


logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.25
AHEAD_S = 3 * ASK_EVERY_S
"""How far questions may run ahead of one every `ASK_EVERY_S` seconds, in seconds."""
ASK_WITHIN_S = 0.25


class FreshCounts:
    """Asks the workers, before a read of statistics, to add their counts; concurrent reads share one question.

    A gateway asks at most four questions a second on average, but up to four in a row after a pause, because a
    measuring client reads before and after a short load. A read waits at most a quarter of a second for the answers.
    """

    def __init__(self, catalog: Catalog, store: ControlStore) -> None:
        self._catalog = catalog
        self._pushes = CountPushes(store.client)
        self._lock = asyncio.Lock()
        self._wanted: dict[str, int] = {}  # model → its last read
        self._reads = 0
        self._answered = 0  # the last answered read
        self.underway: dict[str, Underway] = {}
        # The time at which the questions so far average one every ASK_EVERY_S.
        self._even_at_s = 0.0

    async def added(self, model: str = EVERY_MODEL) -> None:
        """Waits until the model's workers have added their counts, or until the limits of time are reached."""
        if not self._hosts({model}):
            return
        self._reads += 1
        read = self._wanted[model] = self._reads
        async with self._lock:
            if self._answered >= read:
                return
            await asyncio.sleep(max(self._even_at_s - AHEAD_S - time.monotonic(), 0.0))
            self._even_at_s = max(self._even_at_s, time.monotonic()) + ASK_EVERY_S
            reads, models = self._reads, set(self._wanted)
            await self._request_counts(models)
            self._answered = reads
            self._wanted = {name: last for name, last in self._wanted.items() if last > reads}

    async def _request_counts(self, models: set[str]) -> None:
        self.underway = {}
        try:
            question, workers = await self._pushes.ask(models), self._hosts(models)
            found = await self._pushes.answers(question, workers, ASK_WITHIN_S)
            if not found.keys() >= workers:
                logger.debug("statistics read before all workers have added theirs")
            self.underway = {worker: one for worker, one in found.items() if one is not None}
        except BrokerUnavailable:
            logger.debug("workers not asked for their counts")

    def _hosts(self, models: set[str]) -> set[str]:
        return {worker.id for worker in self._catalog.workers() if concerns(models, worker.models)}


# Few dead letters at once, because Redis serves no other client meanwhile.
_PAGE = 20
_PAGES = 25
"""A model's pages per scrape; dead letters beyond them count as version 0."""


class _Read(NamedTuple):
    last: str
    versions: Counter[int]


class DeadLetterCounts:
    """Counts dead letters by model version, for `/metrics`."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters
        self._known: dict[str, _Read] = {}

    async def read(self, models: Iterable[str]) -> dict[tuple[str, int], int]:
        """Counts dead letters by (model, version); version 0 = unread."""
        names = list(models)
        counts = await asyncio.gather(*(self._letters.count(name) for name in names))
        found: dict[tuple[str, int], int] = {}
        for name, versions in zip(names, await asyncio.gather(*map(self._of, names, counts)), strict=True):
            found.update({(name, version): count for version, count in versions.items()})
        return found

    async def _of(self, model: str, count: int) -> Counter[int]:
        if not count:
            self._known.pop(model, None)
            return Counter()
        known = await self._read_on(model, *self._known.get(model, _Read("", Counter())))
        if known.versions.total() > count:  # some were removed
            known = await self._read_on(model, "", Counter())
        self._known[model] = known
        versions = +known.versions
        if count > versions.total():
            versions[0] = count - versions.total()
        return versions

    async def _read_on(self, model: str, last: str, before: Counter[int]) -> _Read:
        versions = before.copy()
        for _ in range(_PAGES):
            page = await self._letters.list(model, after=last, count=_PAGE)
            versions.update(letter.lane.version for letter in page)
            if page:
                last = page[-1].id
            if len(page) < _PAGE:
                break
        return _Read(last, versions)


ANSWERS_WITHIN_S = 3.0
"""A slower store counts as away: scrapers wait five seconds."""

_OPEN_STATES = ("validating", "planning", "running", "finalizing", "cancelling")
_ENDED_STATES = ("completed", "failed", "cancelled", "expired")


async def take_snapshot(
    catalog: Catalog,
    store: ControlStore,
    delivery: Queue,
    letters: DeadLetterCounts,
    underway: Mapping[str, Underway] = MappingProxyType({}),
) -> MetricsSnapshot:
    """Reads the whole snapshot in few round trips; without the store, only the catalog."""
    jobs = Jobs(delivery)
    known = MetricsSnapshot(
        ready=catalog.readiness(),
        load_failed=catalog.load_failures(),
        workers=catalog.workers(),
        underway=underway,
    )
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            work, stats, waiting, states, (scalers, scaled, routes), own = await asyncio.gather(
                read_work(store, delivery, jobs.open_rows),
                store.all_stats(list(known.ready)),
                letters.read(catalog.known()),
                jobs.states(),
                asyncio.gather(store.scalers(), store.scaler_counts(), BridgeReports(store.client).routes()),
                _of_models(store, [worker.id for worker in known.workers]),
            )
            labeling = await _unfinished(LabelTasks(delivery), stats)
            stateful = await store.models(catalog.stateful())
            sequences, backlogs = await asyncio.gather(
                read_sequences(delivery, stateful), read_backlogs(delivery, stateful)
            )
    except (BrokerUnavailable, TimeoutError):
        return replace(known, store_up=False, features=list(families({})))
    return replace(
        known,
        waiting_steps=backlogs,
        stats=stats,
        work=work,
        letters=dict.fromkeys(known.ready, 0) | waiting,
        sequences=sequences,
        jobs=dict.fromkeys((*_OPEN_STATES, *_ENDED_STATES), 0) | dict(states),
        scaled={direction: scaled.get(direction, 0) for direction in (SCALED_UP, SCALED_DOWN)},
        wanted_workers=sum(scaler.target for scaler in scalers) if scalers else None,
        features=[*families(routes), *own],
        labeling=labeling,
    )


async def _of_models(store: ControlStore, workers: Collection[str]) -> list[Family]:
    records = await store.model_metrics(workers)
    return await asyncio.to_thread(lambda: model_families(series_of(records)))


async def _unfinished(tasks: LabelTasks, counted: Mapping[tuple[str, int], Mapping[str, int]]) -> dict[str, int]:
    models = sorted({model for (model, _), fields in counted.items() if any(map(fields.get, LABELING))})
    return dict(zip(models, await asyncio.gather(*map(tasks.unfinished, models)), strict=True))


FLUSH_EVERY_S = 1.0


class Reporting:
    """Reports about this gateway and the system."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        store: ControlStore,
        delivery: Queue,
        tally: GatewayTally,
        traces: TraceFile | None = None,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._delivery = delivery
        self._tally = tally
        self._settings = settings.metrics
        self._is_caching = settings.cache.plan is not None
        self._usual = Objective(settings.metrics.slo_latency_s, settings.metrics.slo_target)
        self.tenants: TenantTally | None = None
        self.memory: TensorMemory | None = None
        self.targets: TargetTally | None = None
        self._host = HostMeter()
        self._letters = DeadLetterCounts(delivery.dead_letters)
        self._nodes = nodes.Nodes(delivery.router, settings.redis)
        self._window = SlidingWindow()
        self._unsent: dict[tuple[str, int], dict[str, int]] = {}
        self._flushing = asyncio.Lock()  # the later would add counts twice
        self._fresh = FreshCounts(catalog, store)
        self.statistics = Statistics(catalog, store, self._added)
        self.load = EndpointLoad(catalog, store)
        self.log_settings = SharedLogSettings(store, settings.log)
        self._traces = traces
        self.trace_settings = SharedTraceSettings(store, catalog, traces, start_of(settings.trace))

    async def metrics(self, scope: str = "", accept: str = "") -> tuple[bytes, str]:
        """Returns `/metrics` and its content type; empty = Prometheus' text, as Triton's.

        If requests are traced, a client that accepts OpenMetrics gets it, with exemplars.
        """
        openmetrics = OPENMETRICS in accept and self._tally.has_exemplars
        scopes = scopes_of(scope)
        if MetricScope.CLUSTER in scopes:
            await self._added()
            snapshot, found = await asyncio.gather(
                take_snapshot(self._catalog, self._store, self._delivery, self._letters, self._fresh.underway),
                self._nodes.read(),
            )
            shares = await self._shares_of_tenants(snapshot)
            features = [*snapshot.features, *nodes.families(found), *shares]
            snapshot = replace(snapshot, objectives=self._catalog.objectives(self._usual), features=features)
        else:
            snapshot = MetricsSnapshot(store_up=await self._is_store_up())
        if MetricScope.PROCESS in scopes:
            host, use = await asyncio.to_thread(lambda: (self._host.read(), read_use()))
            snapshot = replace(snapshot, host=host, use=use)
        wanted = self._wanted(snapshot)
        more = [
            one for tally in (self.tenants, self.targets, self.memory) if tally is not None for one in tally.families()
        ]
        shown = shown_metrics(self._tally, snapshot, scopes, wanted, more=more)
        text = await asyncio.to_thread(render, shown, as_openmetrics=openmetrics)
        return text, OPENMETRICS_TYPE if openmetrics else ""

    async def _shares_of_tenants(self, snapshot: MetricsSnapshot) -> Sequence[Family]:
        if self.tenants is None or not snapshot.store_up:
            return ()
        lanes = [Lane(*key, name) for key, name in snapshot.lanes()]
        found: list[tuple[Mapping[str, str], Sequence[str], int, float]] = []
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                for lane, shares in zip(lanes, await self._delivery.shares(lanes, named=True), strict=True):
                    labels = {"lane": lane.name, **labels_of((lane.model, lane.version))}
                    owned = [share for share in shares if share.tenants]
                    weights = sum(share.weight for share in owned)
                    found += [(labels, each.tenants, each.entries, each.weight / weights) for each in owned]
        except (BrokerUnavailable, TimeoutError):
            return ()
        return list(self.tenants.of_shares(found))

    async def work(self, model: str) -> tuple[VersionWork, ...]:
        """Returns the work of a model's versions."""
        return await read_work(self._store, self._delivery, Jobs(self._delivery).open_rows, model=model)

    async def sequences(self, model: str) -> SequenceWork | None:
        """Returns a stateful model's sequences."""
        return next(iter(await read_sequences(self._delivery, await self._store.models([model]))), None)

    def _wanted(self, snapshot: MetricsSnapshot) -> MetricsChoice:
        settings, quantiles, specs = self._settings, self._settings.quantiles, self._catalog.specs()
        return MetricsChoice(
            counters=settings.counter_latencies,
            quantiles=quantiles,
            histogram=settings.histogram_latencies,
            recent=self._window.move(time.monotonic(), snapshot.stats) if quantiles and snapshot.stats else {},
            cached={model for model, spec in specs.items() if spec.is_cached and self._is_caching},
            tags={model: spec.metric_tags for model, spec in specs.items() if spec.metric_tags},
        )

    async def _added(self, model: str = "") -> None:
        await self._fresh.added(model)
        await self.flush()

    async def _is_store_up(self) -> bool:
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await self._store.settings()
        except (BrokerUnavailable, TimeoutError):
            return False
        return True

    async def run(self) -> None:
        """Follows log settings and adds statistics, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(follow_log_settings(self._store, self.log_settings.first))
            group.create_task(self._flush_again_and_again())
            if self._traces is not None:
                group.create_task(self._traces.follow(self._store))

    async def flush(self) -> None:
        """Adds ended requests to the statistics; keeps them on failure."""
        async with self._flushing:
            for key, deltas in self._tally.refusals.drain().items():
                add(self._unsent.setdefault(key, {}), deltas)
            for key in list(self._unsent):
                try:
                    await self._store.add_stats(*key, self._unsent[key])
                except BrokerUnavailable:  # other tasks log the outage
                    return
                del self._unsent[key]

    async def _flush_again_and_again(self) -> None:
        while True:
            self._tally.aim(self._catalog.objectives(self._usual))
            await asyncio.sleep(FLUSH_EVERY_S)
            await self.flush()
