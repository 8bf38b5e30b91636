"""The shard loops of a worker, one for each model version.

Without bulk jobs, they cost one short command four times a second, and pyarrow is not imported; a worker without
pyarrow takes no shards.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from qinfer.core.retry import OutageLog
from qinfer.core.settings import Settings
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.queue.jobs import Jobs
from qinfer.queue.entries import bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.traffic.store import EndpointStore
from qinfer_workers.inference.bulk.arbiter import BatchSize, DeviceArbiter, JobBatcher
from qinfer_workers.inference.bulk.ensembles import EnsembleParts
from qinfer_workers.inference.bulk.shadows import ShadowLoops
from qinfer_workers.inference.bulk.shard_loop import ScoredVersion, ShardContext, ShardLoop, ShardSlots, cancel_once
from qinfer_workers.inference.executor import in_thread
from qinfer_workers.inference.intake import LeaseIntake
from qinfer_workers.inference.loader import LoadedVersion
from qinfer_workers.inference.publisher import LeaseKeeper, Publisher
from qinfer_workers.inference.tracing import Spans

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25

_LEFT_S = 86400.0

Key = tuple[str, int]


class ShardService:
    """A worker's shard loops, started and stopped with its models; for the event loop."""

    def __init__(self, settings: Settings, delivery: Queue, keeper: LeaseKeeper, worker_id: str) -> None:
        self._settings = settings.bulk
        self._stores = settings.stores
        self._context = ShardContext(
            delivery=delivery,
            jobs=Jobs(delivery),
            keeper=keeper,
            worker_id=worker_id,
            slots=ShardSlots(),
            lease_s=settings.worker.lease_s,
            max_wait_s=settings.worker.max_wait_s,
        )
        self.counts = self._context.counts
        self._arbiter = DeviceArbiter()
        self._served: dict[Key, ScoredVersion] = {}
        self._spool = Path(settings.bulk.spool_dir or tempfile.gettempdir())
        self._shadows: ShadowLoops | None = None
        self._is_paused = False
        self.paused: Callable[[str, int], bool] = lambda _model, _version: False
        """Tells whether a version's lanes are not read."""
        self.is_prepared = asyncio.Event()
        """Set once a model has jobs."""

    def start(
        self, tasks: asyncio.TaskGroup, ensembles: EnsembleParts, readers: ExaminerPool, spans: Spans | None = None
    ) -> "asyncio.Task[None]":
        """Looks for jobs in a task, to be cancelled."""
        self._tasks, self._ensembles, self._readers = tasks, ensembles, readers
        self._context = replace(self._context, spans=spans)
        return tasks.create_task(self._follow_jobs())

    def start_shadows(
        self, endpoints: EndpointStore, publisher: Publisher, intake: LeaseIntake
    ) -> "asyncio.Task[None]":
        """Looks for shadows in a task, to be cancelled."""
        self._shadows = ShadowLoops(self._context, self._settings.batch_ms / 1000, endpoints, publisher, intake)
        self._shadows.paused = self.paused
        return self._tasks.create_task(self._shadows.follow_declarations())

    async def _follow_jobs(self) -> None:
        if not self._settings.enabled:
            return
        outage = OutageLog(logger, "bulk jobs not listed", "bulk jobs are listed again")
        while True:
            models: set[str] = set()
            with outage.noted():  # the loops report more
                models = {model for model, _ in await self._context.jobs.models()}
            if not self.is_prepared.is_set() and any(model in models for model, _ in self._served):
                if not await in_thread("bulk-prepare", self._prepare):
                    return
                self.is_prepared.set()
            for (model, version), served in self._served.items():
                is_open = model in models and not self.paused(model, version)
                (served.is_open.set if is_open else served.is_open.clear)()
            await asyncio.sleep(LOOK_EVERY_S)

    def _prepare(self) -> bool:
        try:
            import qinfer_workers.inference.bulk.shard_run  # noqa: F401  here, in a thread of its own
            from qinfer_workers.inference.bulk.shard_files import clear_spool
        except ImportError as error:
            logger.error("no bulk jobs here: pip install 'qinfer-ml[bulk]'", extra={"missing": error.name})
            return False
        clear_spool(self._spool, time.time() - _LEFT_S)
        return True

    def serve(self, batcher: JobBatcher, loaded: LoadedVersion) -> None:
        """Takes a version's shards from now on."""
        self._arbiter.place(batcher, loaded.devices)
        key = (loaded.spec.name, loaded.version)
        known = self._served.get(key)
        size = BatchSize(loaded.spec.max_batch_size, self._settings.batch_ms / 1000)
        if known is None:
            known = ScoredVersion(
                batcher=batcher,
                loaded=loaded,
                arbiter=self._arbiter,
                size=size,
                clock=self._context.delivery.clock,
                hurry=self._context.hurry,
                spool=self._spool,
                read_bytes=self._settings.max_read_bytes,
                stores=self._stores,
                readers=self._readers,
                ensembles=self._ensembles,
            )
            self._served[key] = known
        elif loaded.identity != known.loaded.identity:
            known.size = size
        known.loaded = loaded
        self._start_loop(known)
        self._serve_shadows(known)

    def _serve_shadows(self, served: ScoredVersion) -> None:
        if self._shadows is not None and not self._is_paused:
            self._shadows.serve(served.batcher, self._arbiter, self._tasks)

    async def retire(self, batcher: JobBatcher) -> None:
        """Releases a version's shards and shadows, and fetches no more."""
        if self._shadows is not None:
            await self._shadows.retire(batcher)
        served = self._served.pop((batcher.model.spec.name, batcher.model.version), None)
        if served is not None:
            await _cancel_loops([served])
            await self._context.delivery.close_reader(bulk_lanes(served.loaded.spec.name, served.loaded.version))
        self._arbiter.remove_batcher(batcher)

    async def pause(self) -> None:
        """Releases all shards and shadows at the next batch, until `resume`."""
        self._is_paused = True
        if self._shadows is not None:
            await self._shadows.pause_shadows()
        await _cancel_loops(self._served.values())

    def resume(self) -> None:
        """Ends a pause."""
        self._is_paused = False
        for served in self._served.values():
            self._start_loop(served)
            self._serve_shadows(served)

    def hurry(self) -> None:
        """Stops waiting for executions, which count."""
        self._context.hurry.set()

    def loops(self) -> "list[asyncio.Task[None]]":
        """Returns the tasks of all loops."""
        shards = [served.loop for served in self._served.values() if served.loop is not None]
        return [*shards, *(self._shadows.tasks() if self._shadows is not None else ())]

    def _start_loop(self, served: ScoredVersion) -> None:
        is_over = self._is_paused or self._context.hurry.is_set()
        if is_over or not self._settings.enabled or served.loop is not None:
            return
        lanes = bulk_lanes(served.loaded.spec.name, served.loaded.version)
        loop = ShardLoop(self._context, lanes, served.make_run, served.is_open)
        served.loop = self._tasks.create_task(loop.run())


async def _cancel_loops(served: Collection[ScoredVersion]) -> None:
    await cancel_once([one.loop for one in served if one.loop is not None])
    for one in served:
        one.loop = None
