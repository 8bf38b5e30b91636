"""The janitor's work on bulk jobs: it fills their lanes, and asks Celery to finish them. Gateways need no leader.

A *notice* is a delivery that says that a job's state may have to change: nothing is left to run, too many rows failed,
or no shard of a cancelled job waits or runs. The janitor confirms it after the last step, so the notice comes again
after a failure; steps are idempotent.
"""

import asyncio
import logging
from collections.abc import Callable

from qinfer.jobs.job import ENDED_EARLY, JobState
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import TOP_UP_COUNT, JobRecord, Standing, why_failed
from qinfer.models.catalog import Catalog
from qinfer.queue.deliveries import JOBS, DeliveryItem
from qinfer.queue.lanes import Queue

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0

_FOLLOWING: dict[str, JobState] = {
    JobState.RUNNING: JobState.FINALIZING,
    JobState.CANCELLING: JobState.CANCELLED,
}
_NOTICES = 50
_LATEST = 100
_TOGETHER = 16
# Few, because a call of Celery's broker may hang and keep its thread.
_SENDING = 2


class JobJanitor:
    """Each gateway has one. `finalise` blocks, and may be called twice for a job."""

    def __init__(self, delivery: Queue, catalog: Catalog, finalise: Callable[[str], None]) -> None:
        self._jobs = Jobs(delivery)
        self._deliveries = delivery.deliveries
        self._catalog = catalog
        self._finalise = finalise
        self._together = asyncio.Semaphore(_TOGETHER)
        self._sending = asyncio.Semaphore(_SENDING)
        # Models and partitions that may have notices; it forgets none, because an ended job may have a notice left.
        self._places: dict[tuple[str, int], None] = {}
        self._has_looked_back = False
        self._look_at_s = 0.0

    async def round(self) -> None:
        """Handles notices, and every `LOOK_EVERY_S` all running jobs."""
        now_s = asyncio.get_running_loop().time()
        await self.attend()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            await self.fill_lanes()

    async def attend(self) -> int:
        """Handles the due notices, and returns their number; failed ones come again."""
        outcomes: list[BaseException | None] = []
        for model, partition in await self._known():
            notices = await self._deliveries.take_due(model, partition, JOBS, _NOTICES)
            outcomes += await asyncio.gather(*map(self._act_on, notices), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return len(outcomes)

    async def fill_lanes(self) -> None:
        """Fills the lanes of running jobs, in the order in which jobs are served."""
        for record in await self._jobs.unfinished():
            if record.state == JobState.RUNNING:
                await self._fill(record)

    async def _known(self) -> list[tuple[str, int]]:
        if not self._has_looked_back:
            latest = (await self._jobs.list(count=_LATEST)).records
            self._places |= dict.fromkeys((record.model, record.partition) for record in latest)
            self._has_looked_back = True
        self._places |= dict.fromkeys(await self._jobs.models())
        return list(self._places)

    async def _act_on(self, notice: DeliveryItem) -> None:
        async with self._together:
            record = await self._jobs.get(notice.text)
            standing = None if record is None else await self._fill(record)
            state = await self._next(record, standing) if record is not None and standing is not None else ""
            if state == JobState.FINALIZING or state in ENDED_EARLY:
                async with self._sending:
                    await asyncio.to_thread(self._finalise, notice.text)
            await self._deliveries.done(notice.model, notice.partition, JOBS, [notice.id])

    async def _fill(self, record: JobRecord) -> Standing | None:
        workers = self._catalog.capacity(record.model, record.version).workers
        while True:
            standing = await self._jobs.advance(record.id, workers=workers)
            if standing is None or standing.moved < TOP_UP_COUNT:
                return standing

    async def _next(self, record: JobRecord, standing: Standing) -> str:
        if standing.state == JobState.RUNNING and standing.has_failed:
            outcomes = await self._jobs.outcomes(record.id)
            error = why_failed(outcomes.values(), record.max_errors, record.shards)
            await self._jobs.stop(record.id, JobState.FAILED, error=error, in_hand=True)
            return JobState.FAILED
        following = _FOLLOWING.get(standing.state)
        if following and standing.is_settled and await self._jobs.move(record.id, {standing.state}, following):
            logger.info("job state changed", extra={"job_id": record.id, "state": following})
            return following
        return standing.state
