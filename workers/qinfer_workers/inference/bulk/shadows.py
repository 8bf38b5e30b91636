"""Shadows of a worker: copies of answered requests, executed while a device is idle.

Their lane is read only while an endpoint declares the version a shadow. Shadows execute in turns of the arbiter, of at
most `bulk.batch_ms`, never together with online requests. Shadows of dead workers are dropped.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from qinfer.backends.base import Backend
from qinfer.batching.assemble import assemble
from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import Execution, Responder, WorkItem
from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError
from qinfer.queue.entries import Lane, shadow_lane
from qinfer.traffic.endpoints import Role, why_no_shadow
from qinfer.traffic.store import EndpointStore
from qinfer_workers.inference.bulk.arbiter import BatchSize, DeviceArbiter, JobBatcher, Turn
from qinfer_workers.inference.bulk.shard_loop import ShardContext, cancel_once
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.intake import LeaseIntake
from qinfer_workers.inference.publisher import Publisher

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5

_WAIT_S = 1.0
_RETRY_S = 0.5
_MOST_LEFT = 100

Key = tuple[str, int]


class ShadowLoops:
    """A worker's shadow loops; for the event loop."""

    def __init__(
        self, context: ShardContext, batch_s: float, endpoints: EndpointStore, publisher: Publisher, intake: LeaseIntake
    ) -> None:
        self.queue = context.delivery
        self.publisher, self.intake, self.context = publisher, intake, context
        self._batch_s = batch_s
        self._endpoints = endpoints
        self._declared: frozenset[Key] = frozenset()
        self.paused: Callable[[str, int], bool] = lambda _model, _version: False
        """Tells whether a version's lanes are not read."""
        self._loops: dict[Key, ShadowLoop] = {}

    async def follow_declarations(self) -> None:
        """Follows the endpoints' declarations until cancelled."""
        outage = OutageLog(logger, "declarations of shadows not read", "declarations of shadows are read again")
        while True:
            with outage.noted():
                declared = (await self._endpoints.read()).endpoints.values()
                targets = [target for endpoint in declared for target in endpoint.targets]
                self._declared = frozenset(target.place for target in targets if target.role is Role.SHADOW)
                for key, loop in self._loops.items():
                    self._update_gate(key, loop)
            await asyncio.sleep(LOOK_EVERY_S)

    def serve(self, batcher: JobBatcher, arbiter: DeviceArbiter, tasks: asyncio.TaskGroup) -> None:
        """Executes a version's shadows from now on."""
        spec, key = batcher.model.spec, (batcher.model.spec.name, batcher.model.version)
        if not isinstance(batcher, Batcher) or why_no_shadow(spec) or self.context.hurry.is_set():
            return
        loop = self._loops.get(key)
        if loop is None:
            loop = self._loops[key] = ShadowLoop(self, batcher, arbiter)
            self._update_gate(key, loop)
        loop.size = BatchSize(spec.max_batch_size, self._batch_s)
        if loop.task is None:
            loop.task = tasks.create_task(loop.run())

    async def retire(self, batcher: JobBatcher) -> None:
        """Releases a version's shadows, and fetches no more."""
        loop = self._loops.pop((batcher.model.spec.name, batcher.model.version), None)
        if loop is not None:
            await _cancel_loops([loop])
            await self.queue.close_reader([loop.lane])

    async def pause_shadows(self) -> None:
        """Releases waiting shadows and ends executing shadows, until `serve`."""
        await _cancel_loops(self._loops.values())

    def tasks(self) -> "list[asyncio.Task[None]]":
        """Returns the tasks of all loops."""
        return [loop.task for loop in self._loops.values() if loop.task is not None]

    def _update_gate(self, key: Key, loop: "ShadowLoop") -> None:
        is_open = key in self._declared and not self.paused(*key)
        (loop.is_open.set if is_open else loop.is_open.clear)()


class ShadowLoop:
    """A version's shadow loop; without a task it is paused.

    `is_open` is set while an endpoint declares the version as a shadow.
    """

    def __init__(self, shadows: ShadowLoops, batcher: Batcher, arbiter: DeviceArbiter) -> None:
        self.lane: Lane = shadow_lane(batcher.model.spec.name, batcher.model.version)
        self.size = BatchSize(1, 1.0)
        self.is_open = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._shadows = shadows
        self._batcher = batcher
        self._arbiter = arbiter
        self._waiting: list[WorkItem] = []
        self._look_at_s = 0.0
        self._outage = OutageLog(logger, "no shadows fetched", "shadows are fetched again")

    async def run(self) -> None:
        """Serves until cancelled, then releases waiting shadows."""
        try:
            while True:
                await self.is_open.wait()
                with self._outage.noted():  # an outage or a refusal, which may pass
                    await self._step()
                if self._outage.is_out:
                    await asyncio.sleep(_RETRY_S)
        finally:
            waiting, self._waiting = [item for item in self._waiting if not item.lost], []
            if waiting:
                self._shadows.publisher.give_back(waiting)

    async def _step(self) -> None:
        keeper = self._shadows.context.keeper
        if not keeper.can_renew([self.lane]):
            await keeper.watch([self.lane])
        await self._drop_leftovers()
        if not self._waiting:
            await self._fetch(1, _WAIT_S)
        if self._waiting:
            async with self._arbiter.turn(self._batcher) as turn:
                await self._use(turn)

    async def _drop_leftovers(self) -> None:
        queue, context, now_s = self._shadows.queue, self._shadows.context, time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + context.lease_s
        left = await queue.reclaim([self.lane], context.worker_id, context.lease_s, _MOST_LEFT)
        if left:
            logger.info("shadows of dead workers dropped", extra={"count": len(left)})
            await queue.finish([lease.entry for lease in left])

    async def _fetch(self, count: int, wait_s: float) -> None:
        context, intake = self._shadows.context, self._shadows.intake
        leases = await self._shadows.queue.fetch([self.lane], context.worker_id, count, wait_s)
        ready, external = intake.items(self._batcher, leases)
        context.keeper.hold([*ready, *external])
        self._waiting += ready
        if external:
            self._waiting += await intake.complete(self._batcher, external)

    async def _use(self, turn: Turn) -> None:
        self.size.share(is_shared=turn.is_shared)
        if (room := self.size.rows - sum(item.rows for item in self._waiting)) > 0:
            await self._fetch(room, 0.0)
        items = self._next_batch()
        if not items:
            return
        model, begin_ns = self._batcher.model, time.perf_counter_ns()
        rows = [item.rows for item in items]
        ragged = frozenset(tensor.name for tensor in model.spec.inputs if tensor.ragged)
        try:
            batch = assemble([item.request for item in items], rows, ragged)
        except QinferError as error:
            self._again(items, error)
            return
        execution = Execution(items, batch, time.perf_counter_ns() - begin_ns, model.caller, apart=len(items) == 1)
        await self._lend(execution, Responder(model.spec, model.version, model.observer))
        self.size.observe(sum(rows), (time.perf_counter_ns() - begin_ns) / 1e9)

    def _next_batch(self) -> list[WorkItem]:
        model, now_s = self._batcher.model, self._shadows.queue.clock.now_s()
        chosen: list[WorkItem] = []
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            if item.lost:
                continue
            if item.deadline_s <= now_s:
                self._shadows.publisher.discard(item)
            elif item.request.generation != model.generation and not self._shadows.intake.fits(self._batcher, item):
                continue
            elif not chosen or (model.spec.max_batch_size and self._joins(item, chosen)):
                chosen.append(item)
            else:
                self._waiting.append(item)
        return chosen

    def _joins(self, item: WorkItem, chosen: list[WorkItem]) -> bool:
        first = chosen[0]
        has_room = item.rows + sum(each.rows for each in chosen) <= self.size.rows
        return has_room and item.key == first.key and not (item.alone or first.alone)

    async def _lend(self, execution: Execution, responder: Responder) -> None:
        """Waits for the execution, even if cancelled, unless `hurry` is set."""
        batcher, executor = self._batcher, self._batcher.model.executor
        assert isinstance(executor, ThreadExecutor), "all models with lanes have thread executors"
        back = asyncio.get_running_loop().create_future()

        def ended(_: object) -> None:
            if batcher.model.executor is executor:
                batcher.lend(-1)
            self._answer_items(execution, responder)
            back.set_result(None)

        batcher.lend(1)
        executor.lend(_BorrowedDevice(execution), ended)
        try:
            await asyncio.shield(back)
        except asyncio.CancelledError:
            hurry = asyncio.ensure_future(self._shadows.context.hurry.wait())
            await asyncio.wait((back, hurry), return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            raise

    def _answer_items(self, execution: Execution, responder: Responder) -> None:
        shadows = self._shadows
        begin_s = shadows.queue.clock.now_s() - (time.perf_counter_ns() - execution.begin_ns) / 1e9
        if execution.error is not None and (again := execution.unanswered):
            self._again(again, execution.error)
        items, responses = responder.build_responses(execution, begin_s, self._batcher.tally)
        if items:
            shadows.publisher.publish_responses(items, responses)

    def _again(self, items: list[WorkItem], error: QinferError) -> None:
        if len(items) == 1:
            self._batcher.fail(items, error)
            return
        for item in items:
            item.alone = True
        self._waiting += items


class _BorrowedDevice:
    def __init__(self, execution: Execution) -> None:
        self.run: Callable[[Backend], None] = partial(Execution.run, execution)


async def _cancel_loops(loops: Iterable[ShadowLoop]) -> None:
    await cancel_once([loop.task for loop in loops if loop.task is not None])
    for loop in loops:
        loop.task = None
