"""Answers out, entries off the queue: publish first, then finish (DESIGN.md §2.2).

A batch's responses travel as one blob for each process that waits, in chunks of at most 1 MiB. While Redis is away the
publisher tries again for as long as the leases hold; a lease that is lost makes the answer somebody else's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from qinfer.batching.execution import Pending
from qinfer.codec.frame import encode_responses
from qinfer.delivery.base import Delivery, Lease
from qinfer.errors import BrokerUnavailable, QinferError, QueueFull
from qinfer.messages import Response
from qinfer.tensors import Bytes
from qinfer_workers.inference.leases import LeaseKeeper

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
FINISH_DELAY_S = 0.01
"""How long published items wait at most to be finished in one write with the next answers: nobody waits for it, and to
wake Redis costs more than what it is woken for. After a crash in between others execute them again, unseen: the gateway
has followed the first attempt."""

_Work = Callable[[], Awaitable[None]]
_After = Callable[[Sequence[Pending]], None]
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0


class Publisher:
    """The `Outlet` of the worker's batchers.

    Args:
        delivery: Where to publish and finish.
        keeper: Holds the items' leases; they are dropped when their entries are to be finished.
        tasks: Owns the tasks.
    """

    def __init__(self, delivery: Delivery, keeper: LeaseKeeper, tasks: asyncio.TaskGroup) -> None:
        self._delivery = delivery
        self._keeper = keeper
        self._tasks = tasks
        self._open: set[asyncio.Task[None]] = set()
        self._published: list[Pending] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def answer(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        """Publishes responses, then finishes the items' entries."""
        self._spawn(lambda: self._publish(items, responses), items, self._finish_soon)
        self._finish_now()

    def give_back(self, items: Sequence[Pending]) -> None:
        """Releases items that did not begin to execute."""
        self._spawn(lambda: self._delivery.release([item.lease for item in items]), items, self._keeper.drop)

    def discard(self, lease: Lease) -> None:
        """Finishes an entry that nobody can answer."""
        self._spawn(lambda: self._delivery.finish([lease.entry]))

    def release_later(self, lease: Lease, delay_s: float) -> None:
        """Releases an entry that this worker can't read; not at once, or it would be the next to fetch it."""
        release = self._delivery.release
        asyncio.get_running_loop().call_later(delay_s, self._spawn, lambda: release([lease]))

    async def settle(self) -> None:
        """Waits until everything handed over is done."""
        while self._open or self._published:
            self._finish_now()
            await asyncio.wait(self._open)

    def close(self) -> None:
        """Takes nothing more and abandons what is not done: its leases will end, and pass to another worker."""
        self._closed = True
        for task in self._open:
            task.cancel()

    async def _publish(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        for address, blob in _blobs(items, responses):
            if not await self._delivery.publish(address, blob):
                logger.debug("nobody waits any more", extra={"reply_to": address})

    def _finish_soon(self, items: Sequence[Pending]) -> None:
        """Finishes published items together with those of the next batches."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FINISH_DELAY_S, self._finish_now)
        self._published.extend(items)

    def _finish_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._published:
            items, self._published = self._published, []
            self._keeper.drop(items)  # before they are finished: a renewal just after would find their leases lost
            self._spawn(lambda: self._finish(items), items)

    async def _finish(self, items: Sequence[Pending]) -> None:
        await self._delivery.finish([item.lease.entry for item in items if not item.lost])

    def _spawn(self, work: _Work, items: Sequence[Pending] = (), after: _After | None = None) -> None:
        if self._closed:
            return
        task = self._tasks.create_task(self._insist(work, items, after))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _insist(self, work: _Work, items: Sequence[Pending], after: _After | None) -> None:
        """Does the work, again and again while Redis is away; what comes twice, its readers drop.

        Ends in vain when every lease is lost: to finish such items again does no harm. What is refused for another
        reason is left to the end of its leases.
        """
        pause_s = _FIRST_RETRY_S
        while not items or not all(item.lost for item in items):
            try:
                await work()
                break
            except (BrokerUnavailable, QueueFull) as error:
                logger.warning("broker unavailable, trying again", extra={"reason": error.message})
            except QinferError:
                logger.exception("refused by the broker", extra={"items": len(items)})
                self._keeper.drop(items)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LAST_RETRY_S)
        if after is not None:
            after(items)


def _blobs(items: Sequence[Pending], responses: Sequence[Response]) -> Iterator[tuple[str, Bytes]]:
    """Encodes what each waiting process gets; nobody waits on the other end of an asynchronous request."""
    for address, group in _by_address(items, responses).items():
        begin = size = 0
        for end, response in enumerate(group):
            nbytes = 0
            for tensor in response.outputs:
                nbytes += tensor.nbytes
            if size and size + nbytes > CHUNK_BYTES:
                yield address, encode_responses(group[begin:end])
                begin, size = end, 0
            size += nbytes
        yield address, encode_responses(group[begin:])


def _by_address(items: Sequence[Pending], responses: Sequence[Response]) -> dict[str, Sequence[Response]]:
    """Sorts responses by who waits for them: mostly one gateway, which waits for all of a batch."""
    address = items[0].request.reply_to
    for item in items:
        if item.lost or item.request.reply_to != address:
            break
    else:
        return {address: responses} if address else {}
    address_of = {item.request.id: item.request.reply_to for item in items if not item.lost}
    groups: dict[str, list[Response]] = {}
    for response in responses:
        address = address_of.get(response.request_id, "")
        if address:
            groups.setdefault(address, []).append(response)
    return dict(groups)
