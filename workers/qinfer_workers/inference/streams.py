"""The streams of decoupled models: published in order for each caller, and ended if unread while other tenants wait.

For waiting callers, one task for each process publishes all that has come, up to 1 MiB at a time. Another for each
asynchronous request stores response after response. `Publisher` handles the final ones.

An entry is marked before its first response leaves: a worker that reclaims it must not execute it again. Models that
repeat the same responses need no mark.

Streams that their tenant does not read hold instances. The tenant with the most unread streams loses some, and gets no
more while it has its share. Without other tenants, streams end after `QINFER_LIMITS__STREAM_STALL_S`. A batch of an
iterative model advances as a whole, so an unread stream also delays others' requests that have begun.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from qinfer.backends.python_host.streams import OPEN_STREAMS
from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import WorkItem
from qinfer.batching.sequences.iterations import IterativeBatcher
from qinfer.batching.sequences.steps import PATIENCE_S, turns
from qinfer.batching.streams import LEAST_RATE, ItemStream, Sent, StreamedExecution, WorkerStreams
from qinfer.core.messages import Failure
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    BrokerUnavailable,
    Cancelled,
    PayloadTooLarge,
    QinferError,
    QueueFull,
    QuotaExceeded,
    StreamBroken,
)
from qinfer.queue.dead_letters import head_of
from qinfer.queue.entries import CHUNK_BYTES, Share
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.records import SlotShare
from qinfer.wire.frame import encode_responses
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher
from qinfer_workers.inference.publisher import LeaseKeeper, Publisher
from qinfer_workers.inference.serving import Serving

logger = logging.getLogger(__name__)

_MAX_RESPONSES = 1000


class StreamPublisher:
    """Publishes streams; `resumes` = the model repeats its responses. A mark outlives its request by `mark_s`."""

    streams: WorkerStreams

    def __init__(
        self,
        queue: Queue,
        keeper: LeaseKeeper,
        publisher: Publisher,
        resumes: Callable[[WorkItem], bool],
        limits: LimitSettings,
        mark_s: float,
    ) -> None:
        self._queue = queue
        self._keeper = keeper
        self._publisher = publisher
        self._resumes = resumes
        self._limits = limits
        self._mark_s = mark_s
        self._waiting: dict[str, deque[Sent]] = {}

    def send(self, sent: Sequence[Sent]) -> None:
        """Publishes responses in order, and responses that wait meanwhile together."""
        for each in sent:
            request = each[0].request
            name = request.reply_to or request.id
            waiting = self._waiting.get(name)
            if waiting is None:
                waiting = self._waiting[name] = deque()
                self._publisher.spawn(lambda name=name: self._publish_waiting(name))  # type: ignore[misc]  # bound at once
            waiting.append(each)

    async def _publish_waiting(self, name: str) -> None:
        waiting = self._waiting[name]
        while waiting:
            group = _first_of(waiting)
            live = [each for each in group if not each[0].lost]
            try:
                if live:
                    await self._publish_group(name, live)
            except (BrokerUnavailable, QueueFull):
                raise
            except QinferError:
                logger.exception("refused by Redis", extra={"request_ids": [item.request.id for item, _ in live]})
                self._drop([item for item, _ in live])
            for _ in group:
                waiting.popleft()
        del self._waiting[name]

    async def _publish_group(self, name: str, group: Sequence[Sent]) -> None:
        items = list(dict.fromkeys([item for item, _ in group]))
        if not self._keeper.is_sure(items):
            await self._keeper.confirm(items)
            group = [each for each in group if not each[0].lost]
        if not group:
            return
        await self._mark(group)
        begin_ns = time.perf_counter_ns()
        if items[0].request.reply_to:
            is_there = await self._queue.publish(name, encode_responses([response for _, response in group]))
            if not is_there:
                logger.debug("no caller reads the reply stream", extra={"reply_to": name})
                self.streams.cancel_streams_to(name)
            self._publisher.finish_soon([item for item, response in group if response.final])
            await self._unmark(group)
        else:
            await self._store_responses(group)
        lane = items[0].lease.entry.lane
        self._publisher.durations.published(lane.model, lane.version, time.perf_counter_ns() - begin_ns)

    async def _mark(self, group: Sequence[Sent]) -> None:
        """Marks entries whose first response, but not the last, leaves."""
        first = [item for item, response in group if not (response.index or response.final or self._resumes(item))]
        if not first:
            return
        now_s, marks = self._queue.clock.now_s(), self._queue.marks
        await asyncio.gather(
            *(marks.mark_sent(item.lease.entry, max(item.deadline_s - now_s, 0.0) + self._mark_s) for item in first)
        )

    async def _unmark(self, group: Sequence[Sent]) -> None:
        ended = [item.lease.entry for item, last in group if last.final and last.index and not self._resumes(item)]
        if ended:
            await self._queue.marks.remove_marks(ended)

    async def _store_responses(self, group: Sequence[Sent]) -> None:
        item, last = group[-1]
        others = group[:-1] if last.final else group
        error = await self._store(others) if others else None
        if error is not None:
            last = msgspec.structs.replace(last, outputs=(), failure=Failure.from_error(error))
        if last.final and not item.lost:
            self._publisher.publish_responses([item], [last])

    async def _store(self, group: Sequence[Sent]) -> QinferError | None:
        item, first = group[0]
        lease, blobs = item.lease, [encode_responses([response]) for _, response in group]
        resumes, most = self._resumes(item), self._limits.stream_result_bytes
        stored = self._queue.requests.responses
        try:
            is_wanted = await stored.append(lease, item.request.id, first.index, blobs, resumes=resumes, max_bytes=most)
        except (StreamBroken, PayloadTooLarge) as error:
            self.streams.cancel(item, error)
            return error
        if is_wanted:
            self.streams.stored(item, sum([response.nbytes for _, response in group]))
        else:
            self._drop([item])
        return None

    def _drop(self, items: Sequence[WorkItem]) -> None:
        """Ends streams silently."""
        self._keeper.drop(items)
        for item in items:
            item.lose()
            self.streams.lose(item)


def _first_of(waiting: "deque[Sent]") -> list[Sent]:
    group: list[Sent] = []
    size = 0
    for each in waiting:
        size += each[1].nbytes
        if group and (size > CHUNK_BYTES or len(group) == _MAX_RESPONSES):
            break
        group.append(each)
    return group


_SLOWER = f"the caller took less than {LEAST_RATE // 1024} KiB/s"
UNREAD = f"{_SLOWER} while requests of other tenants waited for the model; read faster, or ask for less"
REFUSED = (
    f"responses of model '{{}}' hold its instances because they are read slower than {LEAST_RATE // 1024} KiB/s, and "
    "other tenants use it; read them, or end these requests, before you send others"
)
_GUESTS = 16
_KNOWN_S = 2.0

Key = tuple[str, int]


class UnreadStreams:
    """Decides which unread streams end; used on the event loop."""

    def __init__(self, queue: Queue, tasks: asyncio.TaskGroup, serving_of: Callable[[Key], Serving | None]) -> None:
        self._queue = queue
        self._tasks = tasks
        self._serving_of = serving_of
        self._looking: set[Key] = set()
        self._full: dict[Key, tuple[set[str], float]] = {}
        """Tenants without a further instance, and until when."""

    def found(self, streams: Sequence[ItemStream]) -> None:
        """Looks for tenants that wait for the models of unread streams."""
        by_key: dict[Key, list[ItemStream]] = {}
        for stream in streams:
            if stream.item.request.tenant:
                by_key.setdefault((stream.item.request.model, stream.item.request.version), []).append(stream)
        for key, group in by_key.items():
            if key not in self._looking:
                self._looking.add(key)
                self._tasks.create_task(self._check_model(key, group))

    def refused(self, batcher: Batcher | IterativeBatcher, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Answers items of tenants whose unread streams have their share; returns the other items."""
        spec = batcher.model.spec
        tenants, until_s = self._full.get((spec.name, batcher.model.version), (set(), 0.0))
        over = [item for item in items if item.request.tenant in tenants] if time.monotonic() < until_s else []
        if over:
            batcher.fail(over, QuotaExceeded(REFUSED.format(spec.name)))
        return [item for item in items if item not in over]

    async def _check_model(self, key: Key, streams: list[ItemStream]) -> None:
        try:
            serving = self._serving_of(key)
            if serving is None or isinstance(serving.batcher, EnsembleBatcher):
                return
            found = await self._queue.shares(serving.lanes, named=True)
            shares = [share for group in found for share in group]
            self._decide(key, serving.batcher, streams, shares, await self._guests(shares))
        except QinferError:
            return
        finally:
            self._looking.discard(key)

    async def _guests(self, shares: Sequence[Share]) -> set[str]:
        """Returns tenants with an entry in another's stream."""
        guests: set[str] = set()
        if len({tenant for share in shares for tenant in share.tenants}) > 1:
            for share in shares:
                first = await self._queue.oldest(share.lane, 0.0, _GUESTS) if share.waiting else ()
                heads = [head_of(frame) for _, frame in first]
                guests |= {head.tenant for head in heads if head is not None and head.tenant not in share.tenants}
        return guests

    def _decide(
        self,
        key: Key,
        batcher: Batcher | IterativeBatcher,
        streams: list[ItemStream],
        shares: Sequence[Share],
        guests: set[str],
    ) -> None:
        """Ends streams of tenants that hold more than tenants that wait."""
        count, now_s = batcher.model.executor.count, time.monotonic()
        holding = [stream for stream in streams if stream.holds_instance]
        unread = Counter(tenant for tenant, _ in {(stream.item.request.tenant, stream.source) for stream in holding})
        seen = {tenant for share in shares for tenant in share.tenants}
        # as in `SharedLimit`
        full = {tenant for tenant, its in unread.items() if its >= count - unread.total() and seen - {tenant}}
        self._full[key] = full, now_s + _KNOWN_S
        if isinstance(batcher, IterativeBatcher):
            holding = _end_blocking(batcher, holding)
        running = [one for one in batcher.expected_ends if one.begin_ns and not one.end_ns]
        if len(running) < count:
            return
        held = Counter(tenant for one in running for tenant in _tenants(one.items))
        if not holding and len(streams) >= OPEN_STREAMS // 2:  # a process with that many takes no batch
            holding = streams
            held.update(stream.item.request.tenant for stream in streams)
        unread_s = {stream: stream.unread_s(now_s) for stream in holding}
        here = _tenants(batcher.waiting)
        for turn in turns(_shares(held, shares, here | guests), {one.item.request.tenant for one in holding}):
            victim = max((one for one in unread_s if one.item.request.tenant == turn.giver), key=unread_s.__getitem__)
            del unread_s[victim]
            victim.cancel(Cancelled(UNREAD))


def _tenants(items: Iterable[WorkItem]) -> set[str]:
    return {item.request.tenant for item in items}


def _end_blocking(batcher: IterativeBatcher, holding: Sequence[ItemStream]) -> list[ItemStream]:
    """Ends unread streams that delay requests of other tenants; returns the other streams."""
    waiting, left = batcher.waiting, list[ItemStream]()
    for stream in holding:
        unread = _tenants(one.item for one in holding if one.source is stream.source)
        batch = stream.source.items if isinstance(stream.source, StreamedExecution) else ()
        if _tenants(item for item in (*batch, *waiting) if not item.lost) - unread:
            stream.cancel(Cancelled(UNREAD))
        else:
            left.append(stream)
    return left


def _shares(held: "Counter[str]", shares: Sequence[Share], others: Iterable[str]) -> list[SlotShare]:
    waiting = set(others)
    weights: dict[str, int] = {}
    for share in shares:
        weights.update(dict.fromkeys(share.tenants, share.weight))
        if share.waiting and share.tenants:  # tenants of a shared stream can't be told apart
            waiting.add(next((tenant for tenant in share.tenants if tenant not in held), share.tenants[0]))
    return [
        SlotShare(tenant, weights.get(tenant, 1), held[tenant], PATIENCE_S if tenant in waiting else -1.0)
        for tenant in sorted({*held, *waiting})
    ]
