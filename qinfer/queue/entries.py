"""Records of the queue: where a request is, who holds it, and what is stored beside it."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec

from qinfer.tensors import Bytes

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

DELAYED = ".delayed"
"""Ends the name of the lane for what waited too long in the lane whose name comes before it."""

FULL = "Exceeds maximum queue size"
"""Why `submit` refuses what is beyond its limit; Triton's text (reference §3.3)."""


BULK_LANES = ("bulk1", "bulk2", "bulk3")
"""The lanes of shards in the order in which they are read: jobs of high, normal and low priority."""


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


def reply_address(owner: str) -> str:
    """Returns the `reply_to` of a process: `reply:<owner>`."""
    return f"reply:{owner}"


def bulk_lanes(model: str, version: int, partition: int = 0) -> tuple[Lane, ...]:
    """Returns the bulk lanes of a model version in the order in which they are read."""
    return tuple(Lane(model, version, name, partition) for name in BULK_LANES)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> Iterable[tuple[K, list[T]]]:
    """Returns the items with the same key together."""
    groups: dict[K, list[T]] = {}
    for item in items:
        its_key = key(item)
        group = groups.get(its_key)
        if group is None:
            groups[its_key] = [item]
        else:
            group.append(item)
    return groups.items()


def owner_of(lease: Lease) -> tuple[Lane, str, bool]:
    """Returns what the leases of one script call have in common: lane, consumer, whether they are suspects."""
    return lease.entry.lane, lease.consumer, lease.suspect


def by_lane(entries: Sequence[Entry]) -> Iterable[tuple[Lane, list[Entry]]]:
    """Returns the entries of each lane together; mostly all are of one."""
    lane = entries[0].lane if entries else None
    if lane is not None and not [True for entry in entries if entry.lane is not lane]:
        return ((lane, list(entries)),)
    return grouped(entries, lambda entry: entry.lane)
