"""The delivery port in one process's memory: for tests, notebooks and trying things out; nothing outlives it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from qinfer.core.clock import Clock, ServerClock, SystemClock
from qinfer.errors import QinferError, QueueFull
from qinfer.jobs.queue.jobs import Jobs
from qinfer.labeling.tasks import LabelTasks
from qinfer.queue.base import Entry, Lane, LaneSize, Lease, Payload, reply_address
from qinfer.queue.dead_letters import DeadLetters
from qinfer.queue.deliveries import Deliveries
from qinfer.queue.memory_dead_letters import MemoryDeadLetters
from qinfer.queue.memory_jobs import MemoryJobs
from qinfer.queue.memory_lanes import MemoryLanes
from qinfer.queue.memory_requests import MemoryRequests
from qinfer.queue.requests import Requests
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)


class MemoryDelivery:
    """`Delivery` without a broker. Everyone who shares the queue shares the object.

    Args:
        clock: The monotonic clock; a `FakeClock` makes leases end when a test says so.
    """

    deliveries: Deliveries  # of Redis only
    label_tasks: LabelTasks

    def __init__(self, clock: Clock | None = None) -> None:
        monotonic = clock or SystemClock()
        self.clock = ServerClock(monotonic)
        self._lanes = MemoryLanes(self.clock, monotonic.monotonic_s)
        self._letters = MemoryDeadLetters(self._lanes, self.clock)
        self.dead_letters: DeadLetters = self._letters
        requests = MemoryRequests(self._lanes, self.clock, self.publish)
        jobs = MemoryJobs(self._lanes, self.clock, self._letters.bury, requests.tell_job)
        requests.on_job_told = jobs.told
        self.requests: Requests = requests  # type: ignore[assignment]  # this adapter is on its way out
        self.jobs: Jobs = jobs  # type: ignore[assignment]  # as above
        self._replies: dict[str, asyncio.Queue[bytes]] = {}

    def submit(
        self,
        lane: Lane,
        frame: Bytes,
        done: Callable[[Entry | QinferError], None],
        *,
        payload: Payload | None = None,
        limit: int = 0,
    ) -> None:
        """See `Delivery.submit`."""
        answer: Entry | QinferError
        try:
            answer = self._lanes.add(lane, frame, payload, limit).entry
        except QueueFull as error:
            answer = error
        asyncio.get_running_loop().call_soon(done, answer)

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """See `Delivery.ensure`."""
        self._lanes.ensure(lanes)

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """See `Delivery.fetch`."""
        until_s = asyncio.get_running_loop().time() + wait_s
        await asyncio.sleep(0)  # as with a broker, others get their turn
        while True:
            self._lanes.arrived.clear()
            leases = self._lanes.take(lanes, consumer, count)
            if leases:
                return leases
            try:
                async with asyncio.timeout_at(until_s):
                    await self._lanes.arrived.wait()
            except TimeoutError:
                return []

    async def leave(self, lanes: Sequence[Lane]) -> None:
        """See `Delivery.leave`: nothing is kept."""

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """See `Delivery.renew`."""
        return [lease for lease in leases if not self._lanes.renew(lease)]

    async def reclaim(self, lanes: Sequence[Lane], consumer: str, idle_s: float, count: int) -> list[Lease]:
        """See `Delivery.reclaim`."""
        return self._lanes.reclaim(lanes, consumer, idle_s, count)

    async def release(self, leases: Sequence[Lease]) -> None:
        """See `Delivery.release`."""
        for lease in leases:
            self._lanes.release(lease)

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        """See `Delivery.withdraw`."""
        return [self._withdraw(entry) for entry in entries]

    async def delay(self, leases: Sequence[Lease], name: str) -> None:
        """See `Delivery.delay`."""
        for lease in leases:
            self._lanes.move(lease, name)

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str) -> bool:
        """See `Delivery.bury`."""
        return self._letters.bury(lease, request_id, code, reason)

    async def payload(self, entry: Entry, request_id: str) -> bytes | None:
        """See `Delivery.payload`."""
        return self._lanes.value(("payload", entry.lane.model, entry.lane.partition, request_id))

    async def store_result(self, lane: Lane, request_id: str, blob: Bytes, ttl_s: float) -> None:
        """See `Delivery.store_result`."""
        self._lanes.put(("result", lane.model, lane.partition, request_id), blob, ttl_s)

    async def take_result(self, lane: Lane, request_id: str) -> bytes | None:
        """See `Delivery.take_result`."""
        return self._lanes.pop(("result", lane.model, lane.partition, request_id))

    async def finish(self, entries: Sequence[Entry]) -> None:
        """See `Delivery.finish`."""
        for entry in entries:
            self._lanes.remove(entry)

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """See `Delivery.publish`."""
        replies = self._replies.get(reply_to)
        if replies is None:
            return False
        replies.put_nowait(bytes(blob))
        return True

    async def listen(
        self, owner: str, deliver: Callable[[bytes], None], ready: Callable[[], None] | None = None
    ) -> None:
        """See `Delivery.listen`."""
        replies = self._replies.setdefault(reply_address(owner), asyncio.Queue())
        if ready is not None:
            ready()
        try:
            while True:
                blob = await replies.get()
                try:
                    deliver(blob)
                except Exception:  # the loop boundary: one bad blob must not cost the others' callers their answers
                    logger.exception("a reply could not be delivered")
        finally:
            self._replies.pop(reply_address(owner), None)

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        """See `Delivery.depth`."""
        return [self._lanes.depth(lane) for lane in lanes]

    async def in_flight(self, lanes: Sequence[Lane]) -> list[int]:
        """See `Delivery.in_flight`."""
        return [self._lanes.in_flight(lane) for lane in lanes]

    async def sizes(self, lanes: Sequence[Lane]) -> list[LaneSize]:
        """See `Delivery.sizes`."""
        return [self._lanes.size(lane) for lane in lanes]

    async def oldest(self, lane: Lane, age_s: float, count: int, after: str = "") -> list[tuple[Entry, bytes]]:
        """See `Delivery.oldest`."""
        return [(item.entry, item.frame) for item in self._lanes.oldest(lane, age_s, count, after)]

    async def sweep(self) -> int:
        """See `Delivery.sweep`: everything is in memory, and ends by itself."""
        return 0

    async def close(self) -> None:
        """See `Delivery.close`: there is nothing to close, and others may share the object."""

    def _withdraw(self, entry: Entry) -> bool:
        item = self._lanes.get(entry)
        if item is None or item.owner:
            return False
        self._lanes.remove(entry)
        return True
