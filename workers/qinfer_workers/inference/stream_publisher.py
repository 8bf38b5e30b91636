"""Publishes the streams of decoupled models, in order for each caller.

For waiting callers, one task for each process publishes all that has come, up to 1 MiB at a time. Another for each
asynchronous request stores response after response. `Publisher` handles the final ones.

An entry is marked before its first response leaves: a worker that reclaims it must not execute it again. Models that
repeat the same responses need no mark.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from qinfer.batching.execution import WorkItem
from qinfer.batching.streams import Sent, WorkerStreams
from qinfer.core.messages import Failure
from qinfer.core.settings import LimitSettings
from qinfer.errors import BrokerUnavailable, PayloadTooLarge, QinferError, QueueFull, StreamBroken
from qinfer.queue.entries import CHUNK_BYTES
from qinfer.queue.lanes import Queue
from qinfer.wire.frame import encode_responses
from qinfer_workers.inference.publisher import LeaseKeeper, Publisher

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
