"""What `/metrics` shows of the shared store: one pass over everything, and what is still known when Redis is away."""

import asyncio
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from qinfer.bridge.metrics import families
from qinfer.bridge.reports import BridgeReports
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.queue.records import BULK_LANES
from qinfer.labeling.tasks import LabelTasks
from qinfer.models.catalog import Catalog
from qinfer.models.state import SCALED_DOWN, SCALED_UP, ControlStore, State, WorkerRecord
from qinfer.models.work import VersionWork, read_work
from qinfer.observe.metrics import Snapshot, WorkerLoad
from qinfer.observe.process_use import ProcessUse
from qinfer.observe.stats import LABELING
from qinfer.queue.base import Delivery
from qinfer_api.observe.dead_letter_counts import LetterCounts

ANSWERS_WITHIN_S = 3.0
"""A store that does not answer within it counts as away: whoever scrapes may wait for five seconds only."""

_OPEN_STATES = ("validating", "planning", "running", "finalizing", "cancelling")
_ENDED_STATES = ("completed", "failed", "cancelled", "expired")
_LaneKey = tuple[str, int, str]


async def read_stats(store: ControlStore, versions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, int]]:
    """Reads the statistics of model versions.

    Raises:
        BrokerUnavailable: The store can't be reached.
    """
    return await store.all_stats(versions)


async def take_snapshot(
    catalog: Catalog, store: ControlStore, delivery: Delivery, letters: LetterCounts | None = None
) -> Snapshot:
    """Reads statistics, depths and counts, in a few round trips; without the store, tells what the catalog still knows.

    Args:
        catalog: Knows models and workers.
        store: Where statistics and heartbeats are.
        delivery: The queue.
        letters: Counts the dead letters; `None` = they are read all.
    """
    ready, records = catalog.readiness(), catalog.workers()
    letters = letters or LetterCounts(delivery.dead_letters)
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            work, stats, waiting, jobs, (scalers, scaled, routes) = await asyncio.gather(
                read_work(store, delivery),
                read_stats(store, list(ready)),
                letters.read(catalog.known()),
                delivery.jobs.states(),
                asyncio.gather(store.scalers(), store.scaler_counts(), BridgeReports(store.client).routes()),
            )
            labeling = await _unfinished(delivery.label_tasks, stats)
    except (BrokerUnavailable, TimeoutError):
        return Snapshot(
            store_up=False,
            ready=ready,
            workers=_loads(records),
            executing=_executing(records),
            load_s=_load_times(records, ready),
            features=list(families({})),
        )
    depth, shards, ages_s = _by_lane(work)
    return Snapshot(
        stats=stats,
        depth=depth,
        shards=shards,
        ages_s=ages_s,
        rows={(of.model, of.version): of.rows for of in work},
        work_s={(of.model, of.version): of.work_s for of in work},
        ready=ready,
        workers=_loads(records),
        executing=_executing(records),
        load_s=_load_times(records, ready),
        letters=dict.fromkeys(ready, 0) | waiting,
        jobs=dict.fromkeys((*_OPEN_STATES, *_ENDED_STATES), 0) | dict(jobs),
        scaled={direction: scaled.get(direction, 0) for direction in (SCALED_UP, SCALED_DOWN)},
        wanted_workers=sum(scaler.target for scaler in scalers) if scalers else None,
        features=list(families(routes)),
        labeling=labeling,
    )


async def _unfinished(tasks: LabelTasks, counted: Mapping[tuple[str, int], Mapping[str, int]]) -> dict[str, int]:
    """Counts the labeling tasks that are not over, of models that have had any."""
    models = sorted({model for (model, _), fields in counted.items() if any(map(fields.get, LABELING))})
    return dict(zip(models, await asyncio.gather(*map(tasks.unfinished, models)), strict=True))


def _by_lane(work: Iterable[VersionWork]) -> tuple[Counter[_LaneKey], Counter[_LaneKey], dict[_LaneKey, float]]:
    """Returns what lanes hold, online ones and bulk ones, and how old it is; a lane's partitions count as one."""
    depth: Counter[_LaneKey] = Counter()
    shards: Counter[_LaneKey] = Counter()
    ages_s: dict[_LaneKey, float] = {}
    for of in work:
        for lane in of.lanes:
            key = of.model, of.version, lane.lane.name
            (shards if lane.lane.name in BULK_LANES else depth)[key] += lane.entries
            ages_s[key] = max(ages_s.get(key, 0.0), lane.oldest_age_s)
    return depth, shards, ages_s


def _loads(records: Iterable[WorkerRecord]) -> dict[str, WorkerLoad]:
    """Returns what the metrics show of each worker."""
    return {
        record.id: WorkerLoad(
            device=record.device,
            executing=record.executing,
            ready=sum(state.state is State.READY for of in record.models.values() for state in of.values()),
            renewals=record.renewals,
            leases_lost=record.leases_lost,
            use=ProcessUse(record.cpu_s, record.memory_bytes) if record.memory_bytes else None,
            gpus=record.gpus,
        )
        for record in records
    }


def _executing(records: Iterable[WorkerRecord]) -> Counter[tuple[str, int]]:
    """Adds up what all workers execute."""
    executing: Counter[tuple[str, int]] = Counter()
    for record in records:
        for model, versions in record.busy.items():
            for version, count in versions.items():
                executing[model, version] += count
    return executing


def _load_times(records: Iterable[WorkerRecord], shown: Container[tuple[str, int]]) -> dict[tuple[str, int], float]:
    """Returns the longest of the workers' last loads, of the versions to be shown."""
    times: dict[tuple[str, int], float] = {}
    for record in records:
        for model, versions in record.load_s.items():
            for version, seconds in versions.items():
                key = model, version
                if key in shown:
                    times[key] = max(times.get(key, 0.0), seconds)
    return times
