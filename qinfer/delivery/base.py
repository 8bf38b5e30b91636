"""The delivery contract: what a queue must promise, whatever it is made of (DESIGN.md §2).

    submit ──▶ lane ──fetch──▶ lease ──▶ publish ──▶ finish          finish is the only terminal transition
                 ▲                │
                 └── release, reclaim (a dead owner's)

The promises, each a test in `tests/contract/`:

1. An entry whose `submit` was confirmed is fetched at least once, unless it is finished first.
2. Between two `fetch`es by different consumers an entry has one owner; `renew` keeps it, raises no delivery count, and
   never takes an entry back from a new owner.
3. `release` gives an entry to the `fetch` of any consumer within half a second, its delivery count as it was before.
4. `reclaim` takes entries whose owner has not renewed for the lease time, and marks them `suspect`.
5. `finish` removes an entry, delivered or not, whoever owns it; to finish it again is no error.
6. So `depth` is always waiting + in flight.
7. `publish` to a reply stream that no longer exists does not create it, and says so.
8. `listen` delivers what was published while the connection was down; consumers drop what they saw before.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from qinfer.clock import ServerClock
from qinfer.errors import QinferError
from qinfer.tensors import Bytes


class Lane(msgspec.Struct, frozen=True, cache_hash=True):
    """One stream of a model version's queue.

    Attributes:
        model: The model's name.
        version: Its version, > 0.
        name: An opaque lane name: `p1` … `p8`, `bulk`, …
        partition: The queue partition; the lanes of one partition share a cluster slot.
    """

    model: str
    version: int
    name: str = "p1"
    partition: int = 0


class Entry(msgspec.Struct, frozen=True):
    """The address of one request in the queue: its lane, and the id that the broker gave it."""

    lane: Lane
    entry_id: str

    @property
    def enqueued_s(self) -> float:
        """When it was enqueued, in the broker's time: the id begins with its milliseconds."""
        return int(self.entry_id.partition("-")[0]) / 1000


class Lease(msgspec.Struct, frozen=True):
    """A fetched entry that one consumer owns until it finishes, releases or loses it.

    Attributes:
        entry: Which entry.
        consumer: Who owns it.
        frame: The bytes that were submitted.
        deliveries: How often it has been handed out, this time included.
        suspect: It was reclaimed from an owner that died with it: run it alone.
    """

    entry: Entry
    consumer: str
    frame: bytes
    deliveries: int = 1
    suspect: bool = False


class Delivery(Protocol):
    """The port. Lanes passed to one call must be of one model version and partition.

    Every coroutine raises `BrokerUnavailable` when the broker can't be reached in time.
    """

    clock: ServerClock
    """The broker's time, kept current by the adapter."""

    def submit(self, lane: Lane, frame: Bytes, done: Callable[[Entry | QinferError], None]) -> None:
        """Appends an entry; never blocks. All submits of one event-loop tick leave in one write.

        Args:
            lane: Where to.
            frame: The encoded request.
            done: Called once, on the event loop, with the entry, or with why it may not have been enqueued (it may: a
                caller that submits again must tell its answers apart by request id).

        Raises:
            BrokerUnavailable: At once, when the connection is down or its buffer full.
        """
        ...

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """Creates the lanes and their consumer group where they do not exist, starting at their first entry."""
        ...

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """Takes up to `count` entries: released ones first, then lanes in the order given.

        Waits up to `wait_s` seconds for the first when there is none, and then may return fewer than there are. Reads
        of one model version share a connection: do not call it concurrently for the same lanes.
        """
        ...

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renews leases; blocking, for a thread of its own, over a connection of its own.

        Returns:
            The leases that are lost: finished by another, or owned by another.

        Raises:
            BrokerUnavailable: Nothing is known; try again before the lease time ends.
        """
        ...

    async def reclaim(self, lanes: Sequence[Lane], consumer: str, idle_s: float, count: int) -> list[Lease]:
        """Takes up to `count` entries whose owner has not renewed them for `idle_s` seconds, as suspects.

        They may have been `consumer`'s own: its connection broke while a fetch's reply was on the way. A consumer that
        still holds one, because its renewals failed for so long, drops the second lease.
        """
        ...

    async def release(self, leases: Sequence[Lease]) -> None:
        """Gives back entries that did not begin to execute; entries meanwhile owned by another stay theirs."""
        ...

    async def finish(self, entries: Sequence[Entry]) -> None:
        """Removes entries from their lanes, with their payloads."""
        ...

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """Appends encoded responses to a reply stream.

        Returns:
            False when that stream is gone: nobody waits for the responses.
        """
        ...

    async def listen(
        self, owner: str, deliver: Callable[[bytes], None], ready: Callable[[], None] | None = None
    ) -> None:
        """Reads the reply stream of `owner` until cancelled: creates it, calls `deliver` with each blob, trims it.

        Survives reconnects: reads again from the start, so that blobs may come twice.

        Args:
            owner: Whose replies; `reply_address(owner)` is where to send them.
            deliver: Called with each blob, on the event loop.
            ready: Called once the stream exists: no reply to what is submitted from then on is lost.
        """
        ...

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        """Returns how many entries each lane holds, waiting and in flight."""
        ...

    async def close(self) -> None:
        """Closes the connections; what was submitted and is unconfirmed fails with `BrokerUnavailable`."""
        ...


def reply_address(owner: str) -> str:
    """Returns the `reply_to` of a process: `reply:<owner>`."""
    return f"reply:{owner}"
