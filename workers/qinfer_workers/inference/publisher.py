"""Publishes answers first, then takes their entries off the queue.

Answers for waiting callers are published to `reply_to`, one blob for each process, in chunks of at most 1 MiB, and then
finished. Small answers for one process leave in the turn that executed them; a task publishes them again if that fails.
An asynchronous request is settled: one step stores the answer and removes the entry. A dead letter is buried, then
answered in one of the two ways.

While Redis is away, the publisher retries until the lease is lost; the entry's new owner answers then.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from qinfer.batching.execution import TOLD, WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, MemoryReference, Response, Timing
from qinfer.core.retry import OutageLog, pause_s
from qinfer.errors import BrokerUnavailable, ErrorCode, PayloadTooLarge, QinferError, QueueFull, QuotaExceeded
from qinfer.observe.stats import ModelCounts, StatsTally
from qinfer.queue.entries import (
    CHUNK_BYTES,
    STORED_TTL_S,
    Entry,
    EntryAddress,
    Lane,
    Lease,
    RequestExecution,
    RequestOutcome,
    RequestState,
    Settlement,
    delayed_name,
)
from qinfer.queue.lanes import Queue
from qinfer.queue.values import MOVED_AT_ONCE_BYTES
from qinfer.wire.frame import NOTHING_KEPT, encode_responses
from qinfer_workers.inference.reply_memory import KeptResponses, ReplyMemory, SentResponses
from qinfer_workers.inference.tracing import Spans

logger = logging.getLogger(__name__)


Place = tuple[Lane, str]


class HeldWork(Protocol):
    """A request or a shard that a worker holds; compared by identity."""

    @property
    def lease(self) -> Lease:
        """The lease on the entry of this work."""
        ...

    @property
    def deadline_s(self) -> float:
        """The instant on Redis' clock at which the caller stops waiting."""
        ...

    def lose(self) -> None:
        """Notes that the lease is lost."""
        ...


class Renewals(Protocol):
    """Renews the leases of a keeper."""

    async def run(self, keeper: "LeaseKeeper") -> None:
        """Renews until cancelled; reports to `LeaseKeeper.renewed`."""
        ...

    def ask(self) -> None:
        """Renews all held leases at once."""
        ...


class OwnerLease(NamedTuple):
    """The lease of an owner of sequences."""

    keys: Sequence[bytes]
    ended: Callable[[], None] = lambda: None


class LeaseKeeper:
    """Tracks which leases were renewed, and which are lost; other threads may call only `held`."""

    def __init__(
        self,
        renewals: Renewals,
        clock: ServerClock,
        lease_s: float,
        lanes: Callable[[], Iterable[Lane]],
        on_lost: Callable[[HeldWork], None],
    ) -> None:
        self.lanes = lanes
        self.renewals = self.losses = 0
        self.owners: dict[str, OwnerLease] = {}
        self._renewals = renewals
        self._clock = clock
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._held: dict[HeldWork, float] = {}
        self._lock = threading.Lock()
        self._renewed_at = time.monotonic()
        self._failing: dict[Lane, float] = {}
        """Lanes whose last renewal failed → when one last succeeded."""
        self._renewed = asyncio.Event()

    async def run(self) -> None:
        """Renews until cancelled."""
        await self._renewals.run(self)

    async def watch(self, lanes: Collection[Lane]) -> None:
        """Waits until later leases will be renewed, even while a model holds the GIL."""
        asked_s = time.monotonic()
        while self._renewed_at < asked_s or not self.can_renew(lanes):
            self._renewals.ask()
            await self._renewed.wait()

    def can_renew(self, lanes: Iterable[Lane]) -> bool:
        """Returns whether leases on these lanes can be renewed."""
        is_fresh = self._renewed_at > time.monotonic() - self._lease_s
        return is_fresh and (not self._failing or self._failing.keys().isdisjoint(lanes))

    def hold(self, items: Iterable[HeldWork]) -> None:
        """Starts to renew leases."""
        now_s = time.monotonic()
        with self._lock:
            for item in items:
                self._held[item] = now_s

    def drop(self, items: Iterable[HeldWork]) -> None:
        """Stops renewing leases."""
        with self._lock:
            for item in items:
                self._held.pop(item, None)

    def holds(self, entry: Entry) -> bool:
        """Returns whether this worker holds an entry."""
        place = entry.lane, entry.entry_id
        return any(place_of(item) == place for item in self.held())

    def held(self) -> list[HeldWork]:
        """Returns the held items; for any thread."""
        with self._lock:
            return list(self._held)

    def held_before(self, instant_s: float) -> list[HeldWork]:
        """Returns the items held since before a monotonic instant."""
        with self._lock:
            return [item for item, since_s in self._held.items() if since_s < instant_s]

    def held_s(self, item: HeldWork) -> float:
        """Returns how long an item has been held, in seconds; 0 = it is not held."""
        now_s = time.monotonic()
        with self._lock:
            return now_s - self._held.get(item, now_s)

    def cancel(self, places: Collection[Place]) -> None:
        """Drops items of cancelled entries."""
        for item in self.held():
            if place_of(item) in places:
                self.drop([item])
                self._on_lost(item)

    def wanted(self) -> list[tuple[HeldWork, float]]:
        """Returns the items to renew, and until when (monotonic): one lease time after the deadline."""
        now_s = time.monotonic()
        ends = ((item, self._clock.to_monotonic_s(item.deadline_s) + self._lease_s) for item in self.held())
        return [(item, end_s) for item, end_s in ends if end_s > now_s]

    def is_sure(self, items: Iterable[HeldWork]) -> bool:
        """Returns whether no lease of these items can have ended unnoticed, as in a SIGSTOP."""
        since_s = time.monotonic() - self._lease_s
        return self._renewed_at > since_s and (
            not self._failing or all(self._sure_at(item) > since_s for item in items)
        )

    async def confirm(self, items: Iterable[HeldWork]) -> None:
        """Waits until each item was renewed after now, or is lost."""
        asked_s = time.monotonic()
        items = list(items)
        while any(self._sure_at(item) < asked_s for item in items):
            self._renewals.ask()
            await self._renewed.wait()

    def renewed(self, began_s: float, lost: Collection[Place], failed: Collection[Lane] = (), count: int = 0) -> None:
        """Takes a renewal's outcome; `failed` lanes could not be asked."""
        self.renewals += count
        self._failing = {lane: self._failing.get(lane, self._renewed_at) for lane in failed}
        self._renewed_at = began_s
        self._renewed.set()  # wakes current waiters only
        self._renewed.clear()
        if not lost:
            return
        found = 0
        for item in self.held():
            if place_of(item) not in lost or not self._is_older(item, began_s):
                continue  # finished meanwhile, or released and fetched again
            self.drop([item])
            logger.debug("lease lost", extra={"entry_id": item.lease.entry.entry_id})
            self._on_lost(item)
            found += 1
        self.losses += found
        if found:  # mostly because callers left
            logger.info("leases lost", extra={"count": found})

    def _sure_at(self, item: HeldWork) -> float:
        return self._failing.get(item.lease.entry.lane, self._renewed_at)

    def _is_older(self, item: HeldWork, began_s: float) -> bool:
        return self._held.get(item, began_s + 1) <= began_s


def place_of(item: HeldWork) -> Place:
    """Returns the place of an item's entry."""
    return item.lease.entry.lane, item.lease.entry.entry_id


CANCELS_EVERY_S = 0.2

HELD_S = 0.1


class CancelWatch:
    """Drops the items of a worker that were cancelled, within half a second.

    It looks at items held for a while, so that fast models cost nothing.
    """

    def __init__(self, queue: Queue, keeper: LeaseKeeper) -> None:
        self._queue = queue
        self._keeper = keeper
        self._read: dict[tuple[str, int], str] = {}
        self._outage = OutageLog(logger, "cancelled requests not read", "cancelled requests are read again")

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(CANCELS_EVERY_S)
            try:
                await self.check_cancels()
                self._outage.over()
            except QinferError as error:
                self._outage.failed(error.message)

    async def check_cancels(self) -> None:
        """Looks once."""
        partitions: dict[tuple[str, int], list[HeldWork]] = {}
        for item in self._keeper.held_before(time.monotonic() - HELD_S):
            lane = item.lease.entry.lane
            partitions.setdefault((lane.model, lane.partition), []).append(item)
        self._read = {place: mark for place, mark in self._read.items() if place in partitions}
        for (model, partition), items in partitions.items():
            since = min([item.lease.entry.enqueued_s for item in items])
            after = self._read.get((model, partition), str(int(since * 1000) - 1))
            found = await self._queue.marks.list_cancelled(model, partition, after)
            if found:
                self._read[model, partition] = found[-1][0]
                self._keeper.cancel([(lane, entry_id) for _, lane, entry_id in found])


FINISH_DELAY_S = 0.01
"""A write costs more than its content, so it waits this long for the next answers.

After a crash in between, the items execute again, and the gateway ignores the second answer.
"""

FINISH_COUNT = 16
"""Fewer finished items wait up to half of `FINISH_DELAY_S`."""

_Work = Callable[[], Awaitable[None]]
_After = Callable[[Sequence[WorkItem]], None]
_Answer = tuple[WorkItem, Response]
_LetterMaker = Callable[[], Awaitable[tuple[Lease, bytes]]]
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
_TICK_S = 0.001  # resolution of an event loop's clock


class Publisher:
    """The `Outlet` of the worker's batchers."""

    def __init__(self, queue: Queue, keeper: LeaseKeeper, tasks: asyncio.TaskGroup, spans: Spans | None = None) -> None:
        self._queue = queue
        self._keeper = keeper
        self._tasks = tasks
        self._spans = spans
        self._now_s = queue.clock.now_s
        self.durations = ModelCounts()
        self._open: set[asyncio.Task[None]] = set()
        self._unconfirmed = 0
        """Writes of `_publish_now` whose reply has not come."""
        self._confirmed = asyncio.Event()
        self._published: list[WorkItem] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._finish_at_s = 0.0
        self._later: dict[WorkItem, asyncio.TimerHandle] = {}
        self._large: Counter[tuple[str, int]] = Counter()
        """Bytes of large answers not yet in Redis."""
        self._caught_up = asyncio.Event()
        self._outage = OutageLog(logger, "answers not written to Redis, trying again", "answers are written again")
        self._closed = False
        self.memory: ReplyMemory | None = None

    def hold(self, items: Sequence[WorkItem]) -> None:
        """Renews the leases of items that no batcher has taken."""
        self._keeper.hold(items)

    def publish_responses(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        """Publishes responses and finishes entries; settles asynchronous requests."""
        begin_ns = time.perf_counter_ns()
        if [True for item in items if not item.request.reply_to]:
            self._answer_mixed(items, responses, begin_ns)
        else:
            self._publish_soon(items, responses, begin_ns)
        if len(self._published) >= FINISH_COUNT or self._loop.time() >= self._finish_at_s - FINISH_DELAY_S / 2:
            self._finish_now()

    def is_behind(self, model: str, version: int) -> bool:
        """Returns whether answers that wait for Redis stop fetches of a version."""
        return self._large[model, version] > MOVED_AT_ONCE_BYTES

    async def catch_up(self, model: str, version: int) -> None:
        """Waits until `is_behind` is false."""
        while self.is_behind(model, version):
            self._caught_up.clear()
            await self._caught_up.wait()

    @contextmanager
    def _waits(self, lane: Lane, nbytes: int) -> Iterator[None]:
        key = lane.model, lane.version
        self._large[key] += nbytes
        try:
            yield
        finally:
            self._large[key] -= nbytes
            self._caught_up.set()

    def give_back(self, items: Sequence[WorkItem]) -> None:
        """Releases unexecuted items; suspects stay suspects."""
        self.spawn(lambda: self._queue.release([item.lease for item in items]), items, self._keeper.drop)

    def delay(self, items: Sequence[WorkItem]) -> None:
        """Moves items to their `.delayed` lanes."""
        by_lane: dict[str, list[WorkItem]] = {}
        for item in items:
            by_lane.setdefault(item.lease.entry.lane.name, []).append(item)
        for name, group in by_lane.items():
            leases = [item.lease for item in group]
            self.spawn(partial(self._queue.delay, leases, delayed_name(name)), group, self._keeper.drop)

    def bury(
        self,
        lease: Lease,
        error: QinferError,
        tally: StatsTally,
        answer: _Answer | None = None,
        letter: _LetterMaker | None = None,
    ) -> None:
        """Buries an entry as `letter` has it, then answers a waiting caller."""
        request_id = answer[1].request_id if answer else ""
        items = [answer[0]] if answer else []
        self._keeper.hold(items)
        tries, kept, frame = 0, lease, b""

        async def work() -> None:
            nonlocal tries, kept, frame, letter
            if letter is not None:
                (kept, frame), letter = await letter(), None
            tries += 1
            is_buried = await self._queue.bury(kept, request_id, error.code.value, error.message, frame)
            self._keeper.drop(items)  # may take longer than a lease
            if is_buried:
                tally.buried()
            elif tries == 1:
                return
            if answer is None:
                return
            item, response = answer
            if item.request.reply_to:
                await self._queue.publish(item.request.reply_to, encode_responses([response]))
            else:
                # The queue can't count them any more.
                await self._queue.requests.settle([settlement_of(item, response, attempt=lease.deliveries - 1)])

        self.spawn(work, held=items)

    def discard(self, item: WorkItem) -> None:
        """Finishes an entry without an answer."""
        self._keeper.drop([item])
        self.spawn(lambda: self._queue.finish([item.lease.entry]))

    def release_later(self, item: WorkItem, delay_s: float) -> None:
        """Releases an unreadable entry after a delay."""
        self._keeper.hold([item])
        self._later[item] = self._loop.call_later(delay_s, self._release, item)

    async def finish_accepted(self) -> None:
        """Waits for all accepted work; releases delayed entries now."""
        for item in list(self._later):
            self._release(item)
        await self.flush()

    async def flush(self) -> None:
        """Waits for accepted work, except delayed releases."""
        while self._open or self._published or self._unconfirmed:
            self._finish_now()
            if self._open:
                await asyncio.wait(self._open)
            elif self._unconfirmed:
                self._confirmed.clear()
                await self._confirmed.wait()

    def close(self) -> None:
        """Stops; leases of unfinished entries expire."""
        self._closed = True
        for timer in self._later.values():
            timer.cancel()
        for task in self._open:
            task.cancel()

    def _release(self, item: WorkItem) -> None:
        self._later.pop(item).cancel()
        self.give_back([item])

    def _answer_mixed(self, items: Sequence[WorkItem], responses: Sequence[Response], begin_ns: int) -> None:
        by_id = {item.request.id: item for item in items if not item.request.reply_to}
        answers = [(by_id[r.request_id], r) for r in responses if r.final and r.request_id in by_id]
        stored = list(by_id.values())
        self.spawn(self.recorded(stored, lambda: self._settle_requests(answers, begin_ns)), stored)
        waiting = [item for item in items if item.request.reply_to]
        if waiting:
            theirs = [response for response in responses if response.request_id not in by_id]
            self._publish_soon(waiting, theirs, begin_ns)

    def _publish_soon(self, items: Sequence[WorkItem], responses: Sequence[Response], begin_ns: int) -> None:
        work = partial(self._publish, items, responses, begin_ns)
        recorded = self.recorded(items, work)  # a span ends with its coroutine
        if recorded is not work or not self._publish_now(items, responses, begin_ns):
            self.spawn(recorded, items, self.finish_soon)

    def _publish_now(self, items: Sequence[WorkItem], responses: Sequence[Response], begin_ns: int) -> bool:
        """Writes small answers for one process without a task; false = a task must publish them."""
        by_address = _by_address(items, responses)
        if self._closed or len(by_address) != 1 or not self._keeper.is_sure(items):
            return False
        ((address, group),) = by_address.items()
        if [True for one in group if one.index or not one.final]:  # the responses of a stream keep their order
            return False
        nbytes = sum([one.nbytes for one in group])
        if nbytes > CHUNK_BYTES or (self.memory is not None and self.memory.may_take(nbytes)):
            return False
        confirmed = partial(self._on_published, items, responses, begin_ns)
        try:
            self._queue.publish_now(address, encode_responses(group), confirmed)
        except Exception:  # noqa: BLE001  the task waits for the connection, and ends the worker by other errors
            return False
        self._unconfirmed += 1
        return True

    def _on_published(
        self, items: Sequence[WorkItem], responses: Sequence[Response], begin_ns: int, reply: object
    ) -> None:
        """Finishes answered entries; after an error, a task publishes again, because the answers may be nowhere."""
        self._unconfirmed -= 1
        self._confirmed.set()
        if self._closed:
            return
        if isinstance(reply, QinferError):
            self.spawn(partial(self._publish, items, responses, begin_ns), items, self.finish_soon)
            return
        if reply is None:
            logger.debug("no caller reads the reply stream", extra={"reply_to": items[0].request.reply_to})
        self._count_published(items, begin_ns)
        self.finish_soon(items)

    async def _publish(self, items: Sequence[WorkItem], responses: Sequence[Response], begin_ns: int) -> None:
        if not self._keeper.is_sure(items):
            await self._keeper.confirm(items)
        if not _are_lost(items):
            await self.publish(items, responses, begin_ns)

    async def publish(self, items: Sequence[WorkItem], responses: Sequence[Response], begin_ns: int) -> None:
        """Publishes responses without checking leases; `begin_ns` = they were ready."""
        kept: list[tuple[str, KeptResponses | SentResponses]] = []
        try:
            for address, group, nbytes in _chunks(items, responses):
                if nbytes > CHUNK_BYTES:
                    await self._send(address, [await self._store(items, group[0])])
                elif self.memory is None:
                    await self._send(address, group)
                elif (one := self.memory.keep(address, group, nbytes)) is not None:
                    kept.append((address, one))
                    await self._send(address, group, one.references)
                elif (sent := self.memory.send(address, group, nbytes)) is not None:
                    kept.append((address, sent))
                else:
                    await self._send(address, group)
            self._count_published(items, begin_ns)
            for address, waiting in kept:
                if left := await waiting.unconfirmed():
                    await self._send(address, left)
        finally:
            for _, waiting in kept:
                waiting.release()

    async def _send(
        self, address: str, responses: Sequence[Response], kept: Mapping[str, MemoryReference] = NOTHING_KEPT
    ) -> None:
        if not await self._queue.publish(address, encode_responses(responses, kept)):
            logger.debug("no caller reads the reply stream", extra={"reply_to": address})

    async def _store(self, items: Sequence[WorkItem], response: Response) -> Response:
        item = next(item for item in items if item.request.id == response.request_id)
        lane, tenant = item.lease.entry.lane, item.request.tenant
        blob = await asyncio.to_thread(encode_responses, [response])  # copying takes long
        try:
            with self._waits(lane, len(blob)):
                await self._queue.store_result(lane, response.request_id, blob, STORED_TTL_S, tenant)
        except (PayloadTooLarge, QuotaExceeded) as error:
            return _failed_response(response, error)
        return msgspec.structs.replace(response, outputs=(), stored=True)

    async def _settle_requests(self, answers: Sequence[_Answer], begin_ns: int) -> None:
        items = [item for item, _ in answers]
        if not self._keeper.is_sure(items):
            await self._keeper.confirm(items)
        answers = [answer for answer in answers if not answer[0].lost]
        items = [item for item, _ in answers]
        if not items:
            return
        now_s = self._now_s()
        settlements = [self._executed(settlement_of(item, answer), item, answer, now_s) for item, answer in answers]
        # Large settlements keep their leases.
        large = [each for each in settlements if not self._queue.requests.ends_at_once(each)]
        if not large:
            self._keeper.drop(items)
        try:
            with self._waits(items[0].lease.entry.lane, sum([len(each.outcome.blob) for each in large])):
                await self._settle_all(answers, settlements)
        except (BrokerUnavailable, QueueFull):
            self._keeper.hold(item for item in items if not item.lost)
            raise
        self._keeper.drop(items)
        self._count_published(items, begin_ns)

    def _executed(self, settlement: Settlement, item: WorkItem, response: Response, now_s: float) -> Settlement:
        """Adds the execution of a request that ends now."""
        timing, began_s, spent_s = response.timing or Timing(), 0.0, 0.0
        if response.timing is not None:
            began_s = item.enqueued_s + timing.queue_ns / 1e9
            spent_s = (timing.input_ns + timing.infer_ns + timing.output_ns) / 1e9
        execution = RequestExecution(
            worker=item.lease.consumer,
            fetched_at=min(now_s - self._keeper.held_s(item), began_s or now_s),
            began_at=began_s,
            ended_at=began_s + spent_s,
            rows=item.rows,
            batch_rows=timing.batch_size,
        )
        outcome = msgspec.structs.replace(settlement.outcome, execution=execution)
        return msgspec.structs.replace(settlement, outcome=outcome)

    async def _settle_all(self, answers: Sequence[_Answer], settlements: Sequence[Settlement]) -> None:
        try:
            await self._queue.requests.settle(settlements)
        except PayloadTooLarge as error:  # it does not name the settlement: try each
            if len(answers) > 1:
                for answer, settlement in zip(answers, settlements, strict=True):
                    await self._settle_all([answer], [settlement])
                return
            ((item, response),) = answers
            await self._queue.requests.settle([settlement_of(item, _failed_response(response, error))])

    def finish_soon(self, items: Sequence[WorkItem]) -> None:
        """Finishes published items with the next batches'."""
        if not self._published:
            self._finish_at_s = self._loop.time() + FINISH_DELAY_S
            if self._timer is None:
                self._timer = self._loop.call_at(self._finish_at_s, self._finish_due)
        self._published.extend(items)

    def _finish_due(self) -> None:
        self._timer = None
        if self._published and self._loop.time() + _TICK_S < self._finish_at_s:
            self._timer = self._loop.call_at(self._finish_at_s, self._finish_due)
        else:
            self._finish_now()

    def _finish_now(self) -> None:
        if self._published:
            items, self._published = self._published, []
            self._keeper.drop(items)  # a renewal after the finish would find their leases lost
            self.spawn(lambda: self._queue.finish([item.lease.entry for item in items if not item.lost]), items)

    def _count_published(self, items: Sequence[WorkItem], begin_ns: int) -> None:
        lane = items[0].lease.entry.lane
        self.durations.published(lane.model, lane.version, time.perf_counter_ns() - begin_ns)

    def recorded(self, items: Sequence[WorkItem], work: _Work) -> _Work:
        """Returns work with spans, if requests are traced."""
        return work if self._spans is None else self._spans.around(items, work)

    def spawn(
        self,
        work: _Work,
        items: Sequence[WorkItem] = (),
        after: _After | None = None,
        *,
        held: Sequence[WorkItem] = (),
    ) -> "asyncio.Task[None] | None":
        """Starts work, repeated while Redis is away; `None` = closed."""
        if self._closed:
            return None
        task = self._tasks.create_task(self._insist(work, items, after, held or items))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def _insist(
        self, work: _Work, items: Sequence[WorkItem], after: _After | None, held: Sequence[WorkItem]
    ) -> None:
        """Readers drop duplicates."""
        failures = 0
        while not _are_lost(items):
            try:
                await work()
                if failures:
                    self._outage.over()
                break
            except (BrokerUnavailable, QueueFull) as error:
                self._outage.failed(error.message)
            except QinferError:
                extra = {"items": len(held), "request_ids": [item.request.id for item in held[:TOLD]]}
                logger.exception("refused by Redis", extra=extra)
                self._keeper.drop(held)
                return
            failures += 1
            await asyncio.sleep(pause_s(failures, _FIRST_RETRY_S, _LAST_RETRY_S))
        if after is not None:
            after(items)


def _are_lost(items: Sequence[WorkItem]) -> bool:
    return bool(items) and items[0].lost and all(item.lost for item in items)


def _failed_response(response: Response, error: QinferError) -> Response:
    return msgspec.structs.replace(response, outputs=(), failure=Failure.from_error(error))


def _chunks(items: Sequence[WorkItem], responses: Sequence[Response]) -> Iterator[tuple[str, Sequence[Response], int]]:
    """Yields address, responses and bytes of each chunk; more than `CHUNK_BYTES` are of one response."""
    for address, group in _by_address(items, responses).items():
        total = sum([len(tensor.data) for response in group for tensor in response.outputs])
        if total <= CHUNK_BYTES:
            yield address, group, total
            continue
        begin = size = 0
        for end, response in enumerate(group):
            nbytes = response.nbytes
            if size + nbytes > CHUNK_BYTES:
                if end > begin:
                    yield address, group[begin:end], size
                begin, size = end, 0
            if nbytes > CHUNK_BYTES:
                yield address, group[end : end + 1], nbytes
                begin, nbytes = end + 1, 0
            size += nbytes
        if begin < len(group):
            yield address, group[begin:], size


def _by_address(items: Sequence[WorkItem], responses: Sequence[Response]) -> dict[str, Sequence[Response]]:
    address = items[0].request.reply_to
    if not [True for item in items if item.lost or item.request.reply_to != address]:
        return {address: responses}
    address_of = {item.request.id: item.request.reply_to for item in items if not item.lost}
    groups: dict[str, list[Response]] = {}
    for response in responses:
        address = address_of.get(response.request_id, "")
        if address:
            groups.setdefault(address, []).append(response)
    return dict(groups)


_STATES = {
    ErrorCode.DEADLINE_EXCEEDED.value: RequestState.EXPIRED,
    ErrorCode.CANCELLED.value: RequestState.CANCELLED,
}


def settlement_of(item: WorkItem, response: Response, *, attempt: int | None = None) -> Settlement:
    """Returns an asynchronous request's settlement; attempt 0 = the queue counts deliveries."""
    request, failure = item.request, response.failure
    if attempt is None:
        attempt = response.attempt if response.timing is not None else 0
    blob = encode_responses([response])
    if failure is None:
        outcome = RequestOutcome(state=RequestState.SUCCEEDED, blob=blob, attempt=attempt)
    else:
        state = _STATES.get(failure.code, RequestState.FAILED)
        outcome = RequestOutcome(state=state, blob=blob, code=failure.code, message=failure.message, attempt=attempt)
    return Settlement(
        address=EntryAddress(request.model, request.partition, request.id),
        outcome=outcome,
        entry=item.lease.entry,
        tenant=request.tenant,
    )
