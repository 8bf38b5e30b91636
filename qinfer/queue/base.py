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
9. `submit` with a limit enqueues nothing beyond it: so many entries wait in a lane, those in flight not counted.
10. `withdraw` removes an entry that waits, and leaves one alone that a consumer holds.
11. `delay` moves an entry to another lane of its partition in one step; when it was enqueued stays known.
12. `bury` moves an entry to the dead letters in one step, frame and payload, with why and how often it was tried.
13. `oldest` shows what has been in a lane for so long, and changes nothing.

Asynchronous requests, whose terminal step does more, are in `requests`; dead letters in `dead_letters`; the shards of
bulk jobs, which are entries like all others but for their terminal step, in `jobs`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.errors import QinferError
from qinfer.tensors import Bytes

if TYPE_CHECKING:  # they need `Lane` and `Entry`
    from qinfer.jobs.queue.jobs import Jobs
    from qinfer.labeling.tasks import LabelTasks
    from qinfer.queue.dead_letters import DeadLetters
    from qinfer.queue.deliveries import Deliveries
    from qinfer.queue.requests import Requests


DELAYED = ".delayed"
"""Ends the name of the lane for what waited too long in the lane whose name comes before it."""

FULL = "Exceeds maximum queue size"
"""Why `submit` refuses what is beyond its limit; Triton's text (reference §3.3)."""


class Lane(msgspec.Struct, frozen=True, cache_hash=True):
    """One stream of a model version's queue.

    Attributes:
        model: The model's name.
        version: Its version, > 0.
        name: An opaque lane name: `p1` … `p8`, `p2.delayed`, `bulk1` … `bulk3`
        partition: The queue partition; the lanes of one partition share a cluster slot.
    """

    model: str
    version: int
    name: str = "p1"
    partition: int = 0


class Entry(msgspec.Struct, frozen=True):
    """The address of one request in the queue: its lane, and the id that the broker gave it.

    Attributes:
        lane: The lane it is in.
        entry_id: Its id there; begins with the broker's milliseconds.
        origin: The id it had in its first lane, if it was moved; empty otherwise.
        payload_id: The id of the request whose payload is stored with it; empty without one.
    """

    lane: Lane
    entry_id: str
    origin: str = ""
    payload_id: str = ""

    @property
    def enqueued_s(self) -> float:
        """When it was enqueued first, in the broker's time."""
        return int((self.origin or self.entry_id).partition("-")[0]) / 1000


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


class LaneSize(msgspec.Struct, frozen=True):
    """How much a lane holds, waiting and in flight.

    Attributes:
        entries: How many entries.
        oldest_age_s: How long ago its oldest one was enqueued first; 0 when it is empty.
    """

    entries: int = 0
    oldest_age_s: float = 0.0


class Payload(msgspec.Struct, frozen=True):
    """Tensors beside the stream (claim check): stored under the request's id, for `ttl_s` seconds."""

    request_id: str
    data: Bytes
    ttl_s: float


class Delivery(Protocol):
    """The port. Lanes passed to one call must be of one model version and partition.

    Every coroutine raises `BrokerUnavailable` when the broker can't be reached in time.
    """

    clock: ServerClock
    """The broker's time, kept current by the adapter."""

    requests: "Requests"
    """Asynchronous requests in the same queue."""

    dead_letters: "DeadLetters"
    """What `bury` has put away."""

    deliveries: "Deliveries"
    """What is to be told or done later, beside the lanes."""

    jobs: "Jobs"
    """Bulk jobs, whose shards are entries of this queue."""

    label_tasks: "LabelTasks"
    """Tasks of labeling projects, whose requests are entries of this queue."""

    def submit(
        self,
        lane: Lane,
        frame: Bytes,
        done: Callable[[Entry | QinferError], None],
        *,
        payload: Payload | None = None,
        limit: int = 0,
    ) -> None:
        """Appends an entry; never blocks. All submits of one event-loop tick leave in one write.

        Args:
            lane: Where to.
            frame: The encoded request.
            done: Called once, on the event loop, with the entry, or with why it may not have been enqueued (it may: a
                caller that submits again must tell its answers apart by request id). `QueueFull` = it was not.
            payload: Tensors that do not travel in the frame; stored first, removed with the entry.
            limit: Refuse it when so many entries wait in the lane and its `.delayed` lane; 0 = no limit.

        Raises:
            BrokerUnavailable: At once, when the connection is down or its buffer full.
        """
        ...

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """Creates the lanes and their consumer group where they do not exist, starting at their first entry."""
        ...

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """Takes up to `count` entries, lanes in the order given; of each lane, released ones first.

        Waits up to `wait_s` seconds for the first when there is none, and then may return fewer than there are. Reads
        of one model version share a connection, those of its bulk lanes another one: call it for either one at a time.
        """
        ...

    async def leave(self, lanes: Sequence[Lane]) -> None:
        """Frees what `fetch` keeps for these lanes, of which no fetch is under way; another may come later."""
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
        """Gives back entries that did not begin to execute; entries meanwhile owned by another stay theirs.

        Suspects stay suspects: `reclaim` returns them, at once, and `fetch` does not.
        """
        ...

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        """Removes those entries that wait, undelivered or released, with their payloads; tells which were removed."""
        ...

    async def delay(self, leases: Sequence[Lease], name: str) -> None:
        """Moves leased entries to the end of the lane called `name` in their partition, as never delivered.

        They have new addresses then, which the records of asynchronous requests know and submitters do not: to `finish`
        the old one removes the payload, if any, and leaves the rest to the entry's deadline.
        """
        ...

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str) -> bool:
        """Moves an entry to the dead letters; `request_id` is empty where the frame can't be decoded.

        Returns:
            False when the entry was gone or owned by another: nothing was done.
        """
        ...

    async def payload(self, entry: Entry, request_id: str) -> bytes | None:
        """Returns the payload stored with an entry; `None` when it is gone, as the entry is then."""
        ...

    async def store_result(self, lane: Lane, request_id: str, blob: Bytes, ttl_s: float) -> None:
        """Stores outputs too large for a reply stream, for `take_result`."""
        ...

    async def take_result(self, lane: Lane, request_id: str) -> bytes | None:
        """Returns what `store_result` stored, and removes it once it has been read; `None` when it is gone.

        Raises:
            BrokerUnavailable: It can't be read now; it is still there.
        """
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

    async def in_flight(self, lanes: Sequence[Lane]) -> list[int]:
        """Returns how many entries of each lane a consumer holds; those given back or never taken wait instead."""
        ...

    async def sizes(self, lanes: Sequence[Lane]) -> list[LaneSize]:
        """Returns how many entries each lane holds and how old its first is, of any models; in one round trip."""
        ...

    async def oldest(self, lane: Lane, age_s: float, count: int, after: str = "") -> list[tuple[Entry, bytes]]:
        """Returns up to `count` entries with their frames that came into a lane more than `age_s` ago, oldest first.

        Waiting or in flight; nothing about them changes.

        Args:
            lane: The lane.
            age_s: How old they are at least.
            count: How many at most.
            after: The `entry_id` to begin behind.
        """
        ...

    async def sweep(self) -> int:
        """Deletes what processes that died left in an object store, once it has expired; a bounded number at a time.

        Several may do so at once.

        Returns:
            How many objects were deleted.
        """
        ...

    async def close(self) -> None:
        """Closes the connections; what was submitted and is unconfirmed fails with `BrokerUnavailable`."""
        ...


def reply_address(owner: str) -> str:
    """Returns the `reply_to` of a process: `reply:<owner>`."""
    return f"reply:{owner}"
