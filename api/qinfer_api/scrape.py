"""What `/metrics` shows of the shared store: one pass over the models, and what is still known when Redis is away."""

import asyncio
from collections.abc import Sequence

from qinfer.control.base import ControlStore
from qinfer.control.catalog import Catalog
from qinfer.delivery.base import Delivery
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
    workers = {w.id: WorkerLoad(device=w.device, executing=w.executing) for w in catalog.workers()}
    lanes = [catalog.lanes(model, version) for model, version in ready]
    try:
        depths = await asyncio.gather(*(delivery.depth(group) for group in lanes))
        stats = await read_stats(store, list(ready))
    except BrokerUnavailable:
        return Snapshot(store_up=False, ready=ready, workers=workers)
    return Snapshot(
        stats=stats,
        depth={
            (lane.model, lane.version, lane.name): depth
            for group, counts in zip(lanes, depths, strict=True)
            for lane, depth in zip(group, counts, strict=True)
        },
        ready=ready,
        workers=workers,
    )
