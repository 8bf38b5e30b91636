"""The janitor, a role of every gateway without a leader: ends expired requests and delivers webhooks.

- Asynchronous requests past their deadline expire, even without workers.
- Synchronous requests of a dead gateway stay in their lanes; without a worker, the janitor finishes them after their
  time.
- Webhooks are taken, as many as can be delivered at once.
- `JobJanitor` looks after bulk jobs, `SequenceJanitor` after sequences.
- Expired objects of dead processes are deleted from the payload store.

Several gateways may do the same work: each step is idempotent.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from qinfer.core.retry import OutageLog
from qinfer.errors import TIMED_OUT, Cancelled, DeadlineExceeded, DeliveryError, QinferError, QueueFull
from qinfer.models.catalog import Catalog
from qinfer.models.spec import LANE_NAMES
from qinfer.observe.stats import GatewayTally
from qinfer.queue import keys
from qinfer.queue.dead_letters import head_of
from qinfer.queue.deliveries import DeliveryItem
from qinfer.queue.entries import Entry, Lane, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_rest
from qinfer.queue.sequences.ownership import AT_ONCE
from qinfer_api.requests.records import failed_outcome
from qinfer_api.requests.webhooks import Webhooks

logger = logging.getLogger(__name__)

ORPHAN_GRACE_S = 1.0
"""A synchronous request's own gateway may finish it until then."""

SWEEP_OBJECTS_EVERY_S = 60.0

SWEEP_AGAIN_S = 1.0

# The only partition, until models are spread over several.
_PARTITION = 0
_BATCH = 200
_MODELS = 100
_ORPHANS = 20
_ORPHANS_EVERY_S = 5.0
_TOGETHER = 16  # models with sequences, at once
_COUNTED = {Cancelled.code, DeadlineExceeded.code}  # counted by the gateway of the request


class Janitor:
    """Runs the janitor's rounds; each gateway has one."""

    def __init__(
        self,
        delivery: Queue,
        catalog: Catalog,
        tally: GatewayTally,
        sweep_every_s: float,
        webhooks: Webhooks,
        advance_jobs: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._delivery = delivery
        self._catalog = catalog
        self._tally = tally
        self._sweep_every_s = sweep_every_s
        self._webhooks = webhooks
        self._advance_jobs = advance_jobs
        self._sequences = SequenceJanitor(delivery, catalog, tally)
        # Models that may have requests; a removed model may have requests left.
        self._models: dict[str, None] = {}
        # Models that were unreachable in this round, and the reason.
        self._away: dict[str, QinferError] = {}
        # Lane → the entry at which the search for orphans continues.
        self._places: dict[Lane, str] = {}
        self._orphans_at_s = 0.0

    async def run(self) -> None:
        """Sweeps until cancelled."""
        async with self._webhooks, asyncio.TaskGroup() as group:
            group.create_task(self._sweep(), name="sweep the payload store")
            if self._advance_jobs is not None:
                words = ("bulk jobs can't be looked after now", "bulk jobs are looked after again")
                group.create_task(self._again(self._advance_jobs, *words), name="look after bulk jobs")
            words = ("sequences can't be looked after now", "sequences are looked after again")
            group.create_task(self._again(self._sequences.round, *words), name="look after sequences")
            words = ("requests can't be swept now", "requests are swept again")
            await self._again(partial(self._round, group), *words)

    async def _again(self, work: Callable[[], Awaitable[None]], broken: str, mended: str) -> None:
        outage = OutageLog(logger, broken, mended)
        while True:
            await asyncio.sleep(self._sweep_every_s * random.uniform(0.75, 1.25))  # noqa: S311 - rounds drift apart
            try:
                with outage.noted():
                    await work()
            except Exception as error:  # noqa: BLE001 - the boundary: one record must not cost the gateway
                outage.failed(type(error).__name__, error)

    async def _round(self, group: asyncio.TaskGroup) -> None:
        now_s = asyncio.get_running_loop().time()
        await self.expire()
        if now_s >= self._orphans_at_s:
            self._orphans_at_s = now_s + _ORPHANS_EVERY_S
            await self.finish_orphans()
        for item in await self.take_webhooks():
            group.create_task(self._deliver(item))
        for error in self._away.values():
            raise error

    async def expire(self) -> int:
        """Expires late requests of reachable models; returns how many it expired."""
        count = 0
        self._away.clear()
        for models in self._groups():
            ended = await asyncio.gather(*map(self._expire, models), return_exceptions=True)
            for model, outcome in zip(models, ended, strict=True):
                if isinstance(outcome, DeliveryError | QueueFull):
                    self._away[model] = outcome
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    count += outcome
        return count

    async def finish_orphans(self) -> int:
        """Finishes late synchronous entries without a worker; returns how many it finished."""
        count = 0
        for (model, version), is_ready in self._catalog.readiness().items():
            if model in self._away or (is_ready and self._catalog.capacity(model, version).workers):
                continue
            for shares in await self._delivery.shares(self._catalog.lanes(model, version)):
                for share in shares:
                    count += await self._finish_orphans(share.lane)
        unloaded = [(model, version) for model, version in self._catalog.unloaded() if model not in self._away]
        left = [Lane(model, version, name) for model, version in unloaded for name in LANE_NAMES]
        for shares in await self._delivery.shares(left):
            for share in shares:
                if share.entries:
                    count += await self._finish_orphans(share.lane)
        return count

    async def take_webhooks(self) -> list[DeliveryItem]:
        """Takes as many webhooks as can be delivered now."""
        taken: list[DeliveryItem] = []
        names = [keys.ENDPOINTS, *(model for model in self._known() if model not in self._away)]
        start = random.randrange(len(names))  # noqa: S311 - fairness
        for model in (*names[start:], *names[:start]):
            room = self._webhooks.free - len(taken)
            if room <= 0:
                break
            taken += await self._delivery.deliveries.take_due(model, _PARTITION, self._webhooks.kind, room)
        return taken

    async def _sweep(self) -> None:
        outage = OutageLog(logger, "expired objects can't be deleted now", "expired objects are deleted again")
        while True:
            found = 0
            with outage.noted(DeliveryError):
                found = await self._delivery.sweep()
            pause_s = SWEEP_AGAIN_S if found else SWEEP_OBJECTS_EVERY_S
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311 - rounds drift apart

    async def _expire(self, model: str) -> int:
        requests, count = self._delivery.requests, 0
        while True:
            late = await requests.due(model, _PARTITION, _BATCH)
            if not late:
                return count
            error = DeadlineExceeded(TIMED_OUT)
            settlements = [
                Settlement(address=address, outcome=failed_outcome(address, RequestState.EXPIRED, error))
                for address in late
            ]
            firsts = await requests.settle(settlements)
            ended = [address for address, is_first in zip(late, firsts, strict=True) if is_first]
            for record in await asyncio.gather(*map(requests.record, ended)):
                self._tally.failed(model, record.version if record is not None else 0, error.code)
                if record is not None:
                    self._tally.count_ended(model, record.version, error.code)
            count += len(ended)

    async def _finish_orphans(self, lane: Lane) -> int:
        age_s = self._shortest_s(lane) + ORPHAN_GRACE_S
        count = 0
        while True:
            found = await self._delivery.oldest(lane, age_s, _ORPHANS, self._places.get(lane, ""))
            self._places[lane] = found[-1][0].entry_id if len(found) == _ORPHANS else ""
            now_s = self._delivery.clock.now_s()
            over = [entry for entry, frame in found if _is_over(entry, frame, now_s)]
            if over:
                await self._delivery.finish(over)
                for _ in over:
                    self._tally.failed(lane.model, lane.version, DeadlineExceeded.code)
                    self._tally.count_ended(lane.model, lane.version, DeadlineExceeded.code)
            count += len(over)
            if len(over) < _ORPHANS:
                break
        if count:
            logger.info("orphaned requests finished", extra={"model": lane.model, "count": count})
        return count

    def _shortest_s(self, lane: Lane) -> float:
        try:
            spec = self._catalog.accepting(lane.model, lane.version).spec
        except QinferError:
            return 0.0
        return spec.default_timeout_s

    async def _deliver(self, item: DeliveryItem) -> None:
        with suppress(DeliveryError, QueueFull):  # it comes again
            await self._webhooks.deliver(item)

    def _known(self) -> list[str]:
        self._models |= dict.fromkeys(self._catalog.known())
        return list(self._models)

    def _groups(self) -> Iterable[Sequence[str]]:
        names = self._known()
        return (names[start : start + _MODELS] for start in range(0, len(names), _MODELS))


def _is_over(entry: Entry, frame: bytes, now_s: float) -> bool:
    """Asynchronous requests expire by their record."""
    request = head_of(frame)
    return (
        request is not None and bool(request.reply_to) and entry.enqueued_s + request.timeout_s + ORPHAN_GRACE_S < now_s
    )


class SequenceJanitor:
    """Looks after sequences; one per gateway.

    A dead worker's sequences wait for another owner; `explicit` ones end. One without an owner ends at the deadline of
    its steps, or when nothing of it has waited for a while. Steps of ended lives get their stored response, or the
    failure.
    """

    def __init__(self, queue: Queue, catalog: Catalog, tally: GatewayTally) -> None:
        self._queue = queue
        self._catalog = catalog
        self._tally = tally
        self._models: dict[str, None] = {}  # a removed model may have sequences left
        self._together = asyncio.Semaphore(_TOGETHER)

    async def round(self) -> None:
        """Looks after all models' sequences; raises if some are unreachable."""
        self._models |= dict.fromkeys(self._catalog.stateful())
        outcomes = await asyncio.gather(*map(self.look_after, self._models), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def look_after(self, model: str) -> None:
        """Looks after the sequences of a model."""
        sequences = self._queue.sequences(model, _PARTITION)
        async with self._together:
            while await sequences.reap() == AT_ONCE:
                pass
            while await sequences.sweep() == AT_ONCE:
                pass
            for request, failure in await answer_rest(self._queue, sequences):
                if failure.code not in _COUNTED:
                    self._tally.count_ended(model, request.version, failure.code)
                logger.info("step not executed", extra={"model": model, "request_id": request.id, "code": failure.code})
