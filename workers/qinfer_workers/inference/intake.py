"""Lease → pending item: what has to be true of an entry before it may be batched."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import Pending
from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.retry import OutageLog
from qinfer.errors import CorruptEntry, InferenceFailed, InvalidRequest, QinferError
from qinfer.models.validate import validate
from qinfer.queue.base import Lease
from qinfer.queue.redis import Delivery
from qinfer.wire.frame import PayloadApart, RequestReader, decode_request
from qinfer.wire.versions import NewerVersion
from qinfer_workers.inference.publisher import Publisher

logger = logging.getLogger(__name__)


PAUSE_S = 1.0
"""What this worker can't read now is released after so long; at once, it would be the next to fetch it."""

LEAST_DELIVERIES = 2
"""An entry that was in a batch when its worker died has one delivery that says nothing about it."""


class Taken(NamedTuple):
    """What became of leases: items that can run, and those whose tensors are still beside the stream."""

    whole: list[Pending]
    apart: list[Pending]


class Intake:
    """Makes the pending items of one worker.

    Args:
        delivery: Where payloads are.
        publisher: Takes what can't be executed.
        max_deliveries: An entry that was handed out more often is not tried again.
    """

    def __init__(self, delivery: Delivery, publisher: Publisher, max_deliveries: int) -> None:
        self._delivery = delivery
        self._publisher = publisher
        self._most = max(max_deliveries, LEAST_DELIVERIES)
        self._reader = RequestReader()
        self._outage = OutageLog(logger, "payloads not read, trying again", "payloads are read again")

    def items(self, batcher: Batcher, leases: Iterable[Lease]) -> Taken:
        """Decodes leases; those that can't be executed are buried, answered or released, and left out."""
        taken = Taken([], [])
        generation = batcher.model.generation
        for lease in leases:
            try:
                request = self._reader.decode(lease.frame)
            except PayloadApart as apart:
                request = apart.request
            except CorruptEntry as error:
                self._unreadable(batcher, lease, error)
                continue
            item = self._pending(batcher, lease, request)
            if lease.deliveries > 1 and not self._is_tried(batcher, item):
                continue
            if request.payload:
                taken.apart.append(item)
            elif request.generation == generation:
                self._measure(batcher, item)
                taken.whole.append(item)
            elif self.fits(batcher, item):
                taken.whole.append(item)
        return taken

    async def complete(self, batcher: Batcher, apart: Sequence[Pending]) -> list[Pending]:
        """Reads the tensors of items that came without; those that are not to be executed are left out.

        What is gone was cancelled or has expired: there is nobody to answer. Cancelled, it gives all back.
        """
        reads = [asyncio.ensure_future(self._payload(batcher, item)) for item in apart]
        try:
            payloads = await asyncio.gather(*reads)
        except asyncio.CancelledError:
            await asyncio.wait(reads)
            left = [
                item for item, read in zip(apart, reads, strict=True) if read.cancelled() or read.result() is not None
            ]
            self._publisher.give_back(left)
            raise
        # From here on nothing is awaited: the model may be another one after each time.
        return [
            item
            for item, payload in zip(apart, payloads, strict=True)
            if payload is not None and not item.lost and self._complete(batcher, item, payload)
        ]

    def put_off(self, apart: Iterable[Pending]) -> None:
        """Leaves items whose tensors can't be read now to another worker, or to this one after a while."""
        for item in apart:
            self._publisher.release_later(item, PAUSE_S)

    def is_readable(self, batcher: Batcher, lease: Lease) -> bool:
        """Tells whether an entry is none of a newer qinfer's; such a one is released, for another worker."""
        try:
            decode_request(lease.frame)
        except NewerVersion:
            self._release_newer(batcher, lease)
            return False
        except (PayloadApart, CorruptEntry):
            pass
        return True

    def fits(self, batcher: Batcher, item: Pending) -> bool:
        """Checks an item that was admitted under another generation; one that does not fit any more is answered."""
        try:
            item.rows = validate(item.request, batcher.model.spec)
        except InvalidRequest as error:
            batcher.fail([item], error)
            return False
        batcher.classify(item)
        return True

    def _is_tried(self, batcher: Batcher, item: Pending) -> bool:
        """Counts an item that was handed out before; gives up, and tells so, what was too often."""
        batcher.tally.redelivered()
        if item.lease.deliveries <= self._most:
            return True
        text = f"the request was given up: {item.lease.deliveries - 1} executions did not end"
        self._bury(batcher, item, InferenceFailed(text))
        return False

    def _unreadable(self, batcher: Batcher, lease: Lease, error: CorruptEntry) -> None:
        """Releases an entry of a newer qinfer's, and buries one that is damaged."""
        if isinstance(error, NewerVersion):
            self._release_newer(batcher, lease)
            return
        logger.error("corrupt entry", extra={**_told(lease), "reason": error.message})
        self._publisher.bury(lease, error, batcher.tally)

    def _pending(self, batcher: Batcher, lease: Lease, request: InferRequest) -> Pending:
        enqueued_s = lease.entry.enqueued_s
        return Pending(
            rows=1,
            key=None,
            enqueued_s=enqueued_s,
            deadline_s=enqueued_s + (request.timeout_s or batcher.model.spec.default_timeout_s),
            alone=lease.suspect,
            lease=lease,
            request=request,
        )

    def _measure(self, batcher: Batcher, item: Pending) -> None:
        """Sets what the tensors say."""
        inputs = item.request.inputs
        if inputs and (shape := inputs[0].shape) and batcher.model.spec.max_batch_size:
            item.rows = shape[0]
        batcher.classify(item)

    def _release_newer(self, batcher: Batcher, lease: Lease) -> None:
        logger.warning("frame of a newer qinfer released", extra=_told(lease))
        unknown = InferRequest(model=batcher.model.spec.name, inputs=())
        self._publisher.release_later(self._pending(batcher, lease, unknown), PAUSE_S)

    async def _payload(self, batcher: Batcher, item: Pending) -> bytes | None:
        """Reads an item's tensors; one that can't be read now is released, one whose tensors are gone is finished.

        One whose tensors should be there and are not is given up: somebody deleted them from the payload store.
        """
        try:
            payload = await self._delivery.payload(item.lease.entry, item.request.id)
        except CorruptEntry as error:
            self._bury(batcher, item, error)
            return None
        except QinferError as error:
            self._outage.failed(error.message)
            self.put_off([item])
            return None
        self._outage.over()
        if payload is None:
            self._publisher.discard(item)
        return payload

    def _complete(self, batcher: Batcher, item: Pending, payload: bytes) -> bool:
        try:
            item.request = decode_request(item.lease.frame, payload)
        except CorruptEntry as error:
            self._bury(batcher, item, error)
            return False
        if item.request.generation != batcher.model.generation:
            return self.fits(batcher, item)
        self._measure(batcher, item)
        return True

    def _bury(self, batcher: Batcher, item: Pending, error: QinferError) -> None:
        """Gives an item up: it becomes a dead letter, and its caller is told why."""
        deliveries, failure = item.lease.deliveries, Failure.of(error)
        extra = {**_told(item.lease), "request_id": item.request.id, "deliveries": deliveries, "code": failure.code}
        logger.error("given up", extra=extra)
        batcher.tally.failed(failure.code)
        response = Response(
            request_id=item.request.id,
            model=batcher.model.spec.name,
            version=batcher.model.version,
            failure=failure,
            attempt=deliveries,
        )
        self._publisher.bury(item.lease, error, batcher.tally, (item, response))


def _told(lease: Lease) -> dict[str, object]:
    """Returns what a log line about an entry says."""
    entry = lease.entry
    return {"model": entry.lane.model, "version": entry.lane.version, "entry_id": entry.entry_id}


MOST = 16
"""Where the tensors of so many requests are on their way, no more are read until some have come."""

SLOW_S = 0.25
"""For so long they count as if they were here; a store that takes longer holds up nobody but those who need it."""

STALLED_S = 2.0
"""Where there are `MOST` and none came for so long, requests are fetched that need no tensors to be read."""


class Readings:
    """The tasks that read the tensors of one model version's requests."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[None], tuple[int, float]] = {}
        self._changed_s = 0.0

    def __bool__(self) -> bool:
        """Tells whether anything is on its way."""
        return bool(self._open)

    @property
    def is_full(self) -> bool:
        """Whether no more should be read now."""
        return sum(count for count, _ in self._open.values()) >= MOST

    def add(self, task: "asyncio.Task[None]", count: int) -> None:
        """Takes a task that reads the tensors of `count` requests, and hands them over."""
        self._changed_s = time.monotonic()
        self._open[task] = count, self._changed_s
        task.add_done_callback(self._ended)

    async def room(self, count: int) -> int:
        """Returns how many of `count` requests may be fetched besides; where none may, it waits first, and returns 0.

        Args:
            count: How many there would be room for if nothing were on its way.
        """
        now_s = time.monotonic()
        fresh = [(number, began_s) for number, began_s in self._open.values() if now_s - began_s < SLOW_S]
        left = count - sum(number for number, _ in fresh)
        wait_s = 0.0
        if self.is_full:
            wait_s = self._changed_s + STALLED_S - now_s
        elif left <= 0:
            wait_s = min(began_s for _, began_s in fresh) + SLOW_S - now_s
        if wait_s <= 0:
            return max(left, 1)
        await asyncio.wait(self.tasks(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return 0

    async def stop(self) -> None:
        """Cancels what has not come; the requests are given back."""
        if tasks := self.tasks():
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def tasks(self) -> "list[asyncio.Task[None]]":
        """Returns the tasks that have not ended."""
        return list(self._open)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._open[task]
        self._changed_s = time.monotonic()
