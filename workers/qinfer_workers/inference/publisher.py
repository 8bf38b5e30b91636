"""Answers out, entries off the queue: publish first, then finish, one task a batch (DESIGN.md §2.2).

A batch's responses travel as one blob for each process that waits, in chunks of at most 1 MiB. While Redis is away the
publisher tries again for as long as the leases hold; a lease that is lost makes the answer somebody else's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from qinfer.batching.execution import Pending
from qinfer.codec.frame import encode_responses
from qinfer.delivery.base import Delivery, Lease
from qinfer.errors import BrokerUnavailable
from qinfer.messages import Response
from qinfer.tensors import Bytes
from qinfer_workers.inference.leases import LeaseKeeper

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**20
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0


class Publisher:
    """The `Outlet` of the worker's batchers.

    Args:
        delivery: Where to publish and finish.
        keeper: Holds the items' leases; they are dropped when their entries are done with.
        tasks: Owns the tasks.
    """

    def __init__(self, delivery: Delivery, keeper: LeaseKeeper, tasks: asyncio.TaskGroup) -> None:
        self._delivery = delivery
        self._keeper = keeper
        self._tasks = tasks
        self._open: set[asyncio.Task[None]] = set()
        self._closed = False

    def answer(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        """Publishes responses, then finishes the items' entries."""
        self._spawn(lambda: self._answer(items, responses), items)

    def give_back(self, items: Sequence[Pending]) -> None:
        """Releases items that did not begin to execute."""
        self._spawn(lambda: self._delivery.release([item.lease for item in items]), items)

    def discard(self, lease: Lease) -> None:
        """Finishes an entry that nobody can answer."""
        self._spawn(lambda: self._delivery.finish([lease.entry]), ())

    def release_later(self, lease: Lease, delay_s: float) -> None:
        """Releases an entry that this worker can't read; not at once, or it would be the next to fetch it."""
        release = self._delivery.release
        asyncio.get_running_loop().call_later(delay_s, self._spawn, lambda: release([lease]), ())

    async def settle(self) -> None:
        """Waits until everything handed over is done."""
        while self._open:
            await asyncio.wait(self._open)

    def close(self) -> None:
        """Takes nothing more and abandons what is not done: its leases will end, and pass to another worker."""
        self._closed = True
        for task in self._open:
            task.cancel()

    async def _answer(self, items: Sequence[Pending], responses: Sequence[Response]) -> None:
        for address, blob in _blobs(items, responses):
            if not await self._delivery.publish(address, blob):
                logger.debug("nobody waits any more", extra={"reply_to": address})
        await self._delivery.finish([item.lease.entry for item in items if not item.lost])

    def _spawn(self, work: Callable[[], Awaitable[None]], items: Sequence[Pending]) -> None:
        if self._closed:
            return
        task = self._tasks.create_task(self._insist(work, items))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _insist(self, work: Callable[[], Awaitable[None]], items: Sequence[Pending]) -> None:
        """Does the work, again and again while Redis is away; what comes twice, its readers drop."""
        pause_s = _FIRST_RETRY_S
        try:
            while not items or not all(item.lost for item in items):
                try:
                    return await work()
                except BrokerUnavailable as error:
                    logger.warning("broker unavailable, trying again", extra={"reason": error.message})
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LAST_RETRY_S)
        finally:
            self._keeper.drop(items)


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
