"""What `/metrics` shows of the shared store: one pass over the models, and what is still known when Redis is away."""

import asyncio
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from qinfer.control.base import ControlStore, WorkerRecord
from qinfer.control.catalog import Catalog
from qinfer.delivery.base import Delivery, Lane
from qinfer.delivery.jobs import bulk_lanes
from qinfer.errors import BrokerUnavailable
from qinfer.observability.metrics import Snapshot, WorkerLoad

_TOGETHER = 16  # reads at once: each takes a connection


async def read_stats(store: ControlStore, versions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, int]]:
    """Reads the statistics of model versions.

    Raises:
        BrokerUnavailable: The store can't be reached.
    """
    found: dict[tuple[str, int], dict[str, int]] = {}
    for begin in range(0, len(versions), _TOGETHER):
        group = versions[begin : begin + _TOGETHER]
        fields = await asyncio.gather(*(store.stats(model, version) for model, version in group))
        found.update(zip(group, fields, strict=True))
    return found


async def take_snapshot(catalog: Catalog, store: ControlStore, delivery: Delivery) -> Snapshot:
    """Reads the statistics and depths of all model versions; without the store, tells what the catalog still knows."""
    ready = catalog.readiness()
    records = catalog.workers()
    workers = {w.id: WorkerLoad(device=w.device, executing=w.executing) for w in records}
    load_s = _load_times(records, ready)
    lanes = [catalog.lanes(model, version) for model, version in ready]
    try:
        with_jobs = {model for model, _ in await delivery.jobs.models()}
        bulk = [bulk_lanes(model, version) for model, version in ready if model in with_jobs]
        depths = await asyncio.gather(*(delivery.depth(group) for group in lanes))
        shards = await asyncio.gather(*(delivery.depth(group) for group in bulk))
        stats = await read_stats(store, list(ready))
    except BrokerUnavailable:
        return Snapshot(store_up=False, ready=ready, workers=workers, load_s=load_s)
    return Snapshot(
        stats=stats,
        depth=_by_lane(lanes, depths),
        shards=_by_lane(bulk, shards),
        ready=ready,
        workers=workers,
        executing=_executing(records),
        load_s=load_s,
    )


def _by_lane(lanes: Sequence[Sequence[Lane]], counts: Sequence[Sequence[int]]) -> dict[tuple[str, int, str], int]:
    return {
        (lane.model, lane.version, lane.name): count
        for group, of_group in zip(lanes, counts, strict=True)
        for lane, count in zip(group, of_group, strict=True)
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
