"""What `/metrics` shows of each live worker, as of its last heartbeat. Series of a worker end with it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info
from qinfer.observe.devices import GpuUse
from qinfer.observe.exposition import Family
from qinfer.observe.process_use import ProcessUse


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A live worker as the metrics show it, as of its last heartbeat.

    Attributes:
        device: What it runs on.
        executing: Requests in its batches.
        ready: Model versions that it has ready.
        renewals: Leases that it has renewed.
        leases_lost: Leases that it has lost.
        use: CPU time and memory; `None` = not known.
        gpus: Its GPUs, where they can be asked.
    """

    device: str
    executing: int
    ready: int = 0
    renewals: int = 0
    leases_lost: int = 0
    use: ProcessUse | None = None
    gpus: tuple[GpuUse, ...] = ()


def families(workers: Mapping[str, WorkerLoad]) -> Iterator[Family]:
    """Yields the metrics of workers.

    Args:
        workers: Worker id → its load.
    """
    up, used, total, busy = map(
        Family,
        (
            catalogue.WORKER_UP,
            catalogue.DEVICE_MEMORY_USED,
            catalogue.DEVICE_MEMORY_TOTAL,
            catalogue.DEVICE_UTILIZATION,
        ),
    )
    for worker, load in workers.items():
        up.add(1, worker=worker, device=load.device)
        for gpu in load.gpus:
            device = f"gpu {gpu.number}"
            used.add(gpu.memory_used_bytes, worker=worker, device=device)
            total.add(gpu.memory_total_bytes, worker=worker, device=device)
            busy.add(gpu.utilization, worker=worker, device=device)
    yield up
    for info, value in _OF_WORKERS:
        family = Family(info)
        for worker, load in workers.items():
            known = value(load)
            if known is not None:
                family.add(known, worker=worker)
        yield family
    yield from (used, total, busy)


_OF_WORKERS: tuple[tuple[Info, Callable[[WorkerLoad], float | None]], ...] = (
    (catalogue.WORKER_EXECUTING, lambda load: load.executing),
    (catalogue.WORKER_READY_MODELS, lambda load: load.ready),
    (catalogue.WORKER_RENEWALS, lambda load: load.renewals),
    (catalogue.WORKER_LEASES_LOST, lambda load: load.leases_lost),
    (catalogue.WORKER_CPU, lambda load: load.use and load.use.cpu_s),
    (catalogue.WORKER_MEMORY, lambda load: load.use and load.use.memory_bytes),
)
