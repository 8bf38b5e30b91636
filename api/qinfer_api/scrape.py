"""What `/metrics` shows of the shared store: one pass over the models, and what is still known when Redis is away."""

import asyncio

from qinfer.control.base import ControlStore
from qinfer.control.catalog import Catalog
from qinfer.delivery.base import Delivery
from qinfer.errors import BrokerUnavailable
from qinfer.observability.metrics import Snapshot, WorkerLoad


async def take_snapshot(catalog: Catalog, store: ControlStore, delivery: Delivery) -> Snapshot:
    """Reads the statistics and depths of all model versions; without the store, tells what the catalog still knows."""
    ready = catalog.readiness()
    workers = {w.id: WorkerLoad(device=w.device, executing=w.executing) for w in catalog.workers()}
    lanes = [catalog.lanes(model, version) for model, version in ready]
    try:
        depths = await asyncio.gather(*(delivery.depth(group) for group in lanes))
        stats = await asyncio.gather(*(store.stats(model, version) for model, version in ready))
    except BrokerUnavailable:
        return Snapshot(store_up=False, ready=ready, workers=workers)
    return Snapshot(
        stats=dict(zip(ready, stats, strict=True)),
        depth={
            (lane.model, lane.version, lane.name): depth
            for group, counts in zip(lanes, depths, strict=True)
            for lane, depth in zip(group, counts, strict=True)
        },
        ready=ready,
        workers=workers,
    )
