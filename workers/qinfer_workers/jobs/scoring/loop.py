"""Fetches the shards of one model version, and has each seen through (`errand`).

One shard is scored at a time. The next is fetched when the last rows of one are scored in a moment, so that its first
rows are read meanwhile, and it begins while the part of the one before is still being committed; nothing else is
hoarded that an idle worker could run.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from qinfer.core.retry import OutageLog, pause_s
from qinfer.errors import QinferError
from qinfer.queue.base import Lane, Lease
from qinfer_workers.jobs.scoring.desk import Begin, Desk
from qinfer_workers.jobs.scoring.errand import Errand

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_PUT_OFF_S = 1.0
_LAST_PUT_OFF_S = 30.0


class BulkLoop:
    """See the module docstring; its `run` is cancelled to stop it, and has released by then what it held.

    Args:
        desk: What it shares with the other loops.
        lanes: The bulk lanes of the model version, in order.
        begin: Makes the run of a shard.
        is_open: Set while there are jobs that have not ended; else nothing is asked of the broker.
    """

    def __init__(self, desk: Desk, lanes: Sequence[Lane], begin: Begin, is_open: asyncio.Event) -> None:
        self._desk = desk
        self._lanes = lanes
        self._begin = begin
        self._is_open = is_open
        self._reclaim_at_s = 0.0
        self._put_offs = 0  # in a row
        self._outage = OutageLog(logger, "no shards fetched", "shards are fetched again")
        self._errands: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            while True:
                await self._is_open.wait()
                await self._desk.hands.ready()
                try:
                    await self._step()
                    self._outage.over()
                except QinferError as error:  # the broker's state, or its refusal: either may pass
                    self._outage.failed(error.message)
                    await asyncio.sleep(_RETRY_S)
        finally:
            for task in self._errands:
                task.cancel()
            if self._errands:
                await asyncio.wait(self._errands)

    async def _step(self) -> None:
        """Looks for a suspect when it is time, else for a shard; returns when the model is free for the next."""
        desk, now_s = self._desk, time.monotonic()
        if not desk.keeper.can_renew(self._lanes):
            await desk.keeper.watch(self._lanes)
        if now_s >= self._reclaim_at_s:
            self._reclaim_at_s = now_s + desk.lease_s / 2
            if leases := await self._reclaim():
                await desk.delivery.release(leases)  # they stay suspects; it may take a while until hands are empty
                await self._run_suspect()
                return
        for lease in await desk.delivery.fetch(self._lanes, desk.worker_id, 1, desk.max_wait_s):
            if desk.hands.take():
                await self._see_through(lease)
            else:
                await desk.delivery.release([lease])

    async def _run_suspect(self) -> None:
        async with self._desk.hands.alone():
            for lease in await self._reclaim():
                about = {"entry_id": lease.entry.entry_id, "deliveries": lease.deliveries}
                logger.warning("shard reclaimed", extra=about)
                self._desk.hands.take(is_suspect=True)
                await self._see_through(lease)

    async def _reclaim(self) -> list[Lease]:
        desk = self._desk
        leases = await desk.delivery.reclaim(self._lanes, desk.worker_id, desk.lease_s, 1)
        return [lease for lease in leases if not desk.keeper.holds(lease.entry)]

    async def _see_through(self, lease: Lease) -> None:
        """Runs a shard that is in hand; returns when it is scored in a moment, and the one before has ended."""
        errand = Errand(self._desk, lease, self._begin)
        before = list(self._errands)
        task = asyncio.create_task(self._do(errand))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        await errand.free.wait()
        if before:
            await asyncio.wait(before)
        if errand.was_put_off:  # what it needs is away: others may need it, too
            await asyncio.wait([task])

    async def _do(self, errand: Errand) -> None:
        try:
            await errand.do(pause_s(self._put_offs + 1, _PUT_OFF_S, _LAST_PUT_OFF_S))
        except Exception:  # the loop boundary: the lease will end, and count as an execution
            logger.exception("shard not seen through")
        finally:
            self._desk.hands.put()
        self._put_offs = self._put_offs + 1 if errand.was_put_off else 0
