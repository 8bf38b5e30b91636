"""Records of the queue: addresses, leases, asynchronous requests and their limits."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

import msgspec

from qinfer.errors import InvalidRequest
from qinfer.tensors import Bytes

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

DELAYED = ".delayed"

FULL = "Exceeds maximum queue size"
"""Triton's text (reference §3.3)."""

CHUNK_BYTES = 2**20
"""Larger outputs travel beside the reply stream."""

STORED_TTL_S = 120.0

BULK_LANES = ("bulk1", "bulk2", "bulk3")
"""The lanes of shards, in read order."""

SHADOW_LANE = "shadow"
"""The lane of shadow requests."""

_SHARE = "~"
_REPLY = "reply:"


class Lane(msgspec.Struct, frozen=True, cache_hash=True):
    """One stream of a model version's queue.

    Version 0 has steps of a sequence, for any version. Names are `p1` … `p32`, `p2.delayed`, `bulk1` … `bulk3`,
    `shadow`, `seq`, `seq@<worker>`; the stream of a share is named like `p1~3`.
    """

    model: str
    version: int
    name: str = "p1"
    partition: int = 0


class Entry(msgspec.Struct, frozen=True):
    """The address of one request in the queue.

    The stream id begins with Redis' milliseconds; `origin` is the id in the first lane of a moved entry, `payload_id`
    the request whose payload is stored beside it.
    """

    lane: Lane
    entry_id: str
    origin: str = ""
    payload_id: str = ""

    @property
    def enqueued_s(self) -> float:
        """The first enqueue, on Redis' clock."""
        return int((self.origin or self.entry_id).partition("-")[0]) / 1000


class Lease(msgspec.Struct, frozen=True):
    """A fetched entry that one consumer owns until it finishes, releases or loses it.

    A `suspect` may have killed its former owner: run it alone.
    """

    entry: Entry
    consumer: str
    frame: bytes
    deliveries: int = 1
    suspect: bool = False


class LaneSize(msgspec.Struct, frozen=True):
    """Entries of a lane; the age counts from the first enqueue."""

    entries: int = 0
    oldest_age_s: float = 0.0


class Share(msgspec.Struct, frozen=True):
    """A stream of a lane; `tenants` and `waiting` are set only on request."""

    lane: Lane
    entries: int
    weight: int = 1
    tenants: tuple[str, ...] = ()
    waiting: int = 0


class Payload(msgspec.Struct, frozen=True):
    """Tensors beside the stream (claim check)."""

    request_id: str
    data: Bytes
    ttl_s: float


def reply_address(owner: str) -> str:
    """Returns the `reply_to` of a process."""
    return f"{_REPLY}{owner}"


def process_at(address: str) -> str:
    """Returns the process of a `reply_to`."""
    return address.removeprefix(_REPLY)


def worker_owner(worker_id: str) -> str:
    """Returns the name of a worker that waits for replies, and reads memory."""
    return f"worker-{worker_id}"


def bulk_lanes(model: str, version: int, partition: int = 0) -> tuple[Lane, ...]:
    """Returns a model version's bulk lanes in read order."""
    return tuple(Lane(model, version, name, partition) for name in BULK_LANES)


def shadow_lane(model: str, version: int, partition: int = 0) -> Lane:
    """Returns a model version's shadow lane."""
    return Lane(model, version, SHADOW_LANE, partition)


@lru_cache(maxsize=65536)
def share_of(lane: Lane, number: int) -> Lane:
    """Returns a lane's share; 0 is the lane itself."""
    return Lane(lane.model, lane.version, f"{lane.name}{_SHARE}{number}", lane.partition) if number else lane


def undivided(name: str) -> str:
    """Returns the lane's name in the name of a stream."""
    return name.partition(_SHARE)[0]


def divided_of(stream: Lane) -> tuple[Lane, int]:
    """Returns a stream's lane, and the share's number."""
    name, _, number = stream.name.partition(_SHARE)
    return (Lane(stream.model, stream.version, name, stream.partition), int(number)) if number else (stream, 0)


def delayed_name(name: str) -> str:
    """Returns the name of the `.delayed` lane of a lane or share."""
    return undivided(name) + DELAYED


def grouped(items: Iterable[T], key: Callable[[T], K]) -> Iterable[tuple[K, list[T]]]:
    """Groups items by key."""
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
    """Returns lane, consumer and suspect flag: leases of one script call share them."""
    return lease.entry.lane, lease.consumer, lease.suspect


def by_lane(entries: Sequence[Entry]) -> Iterable[tuple[Lane, list[Entry]]]:
    """Groups entries by lane."""
    lane = entries[0].lane if entries else None
    if lane is not None and not [True for entry in entries if entry.lane is not lane]:
        return ((lane, list(entries)),)
    return grouped(entries, lambda entry: entry.lane)


MARGIN_S = 86400.0
"""How much longer a record lives than the request's own times, because a sweep may come late."""

MAX_WATCHERS = 64
"""The most processes that are notified of one request's end."""

MAX_NOTES_BYTES = 8192

MAX_OUTBOX_NAME = 200


class RequestState(StrEnum):
    """The state of an asynchronous request; succeeded, failed, expired and cancelled are terminal."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the state is final."""
        return self not in (RequestState.QUEUED, RequestState.RUNNING)


class EntryAddress(msgspec.Struct, frozen=True):
    """The address of a request's keys."""

    model: str
    partition: int
    id: str


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be accepted.

    Attributes:
        tombstone_ttl_s: How long its id is known after the result.
        client_id: The `id` of the body, echoed in the result.
        outbox: It gets the end, instead of a webhook, and is trimmed by age: keep its requests equally long.
        reports_start: Without workers' reports of starts, the entries that they hold count as waiting.
        share: The tenant whose stored results may take all free memory; empty = no limit.
    """

    address: EntryAddress
    lane: Lane
    frame: Bytes
    timeout_s: float
    payload: Bytes = b""
    body_hash: str = ""
    result_ttl_s: float = 3600.0
    tombstone_ttl_s: float = 86400.0
    tenant: str = ""
    client_id: str = ""
    plan: bytes = b""
    decoupled: bool = False
    idempotency_key: str = ""
    idempotency_ttl_s: float = 86400.0
    webhook: str = ""
    outbox: str = ""
    notes: bytes = b""
    watcher: str = ""
    limit: int = 0
    reports_start: bool = False
    endpoint: str = ""
    share: str = ""


class AcceptOutcome(msgspec.Struct, frozen=True):
    """The outcome of an `accept`; a `body_hash` other than that of the request is a conflict."""

    id: str
    is_new: bool
    body_hash: str = ""


class RequestExecution(msgspec.Struct, frozen=True, array_like=True):
    """The last execution of a request; instants are seconds in Redis' time.

    Attributes:
        fetched_at: The time at which the worker took it.
        began_at: The time at which its batch was begun; 0 = it was not executed.
        rows: Its rows, of the `batch_rows` of its batch.
    """

    worker: str
    fetched_at: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    rows: int = 0
    batch_rows: int = 0


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request.

    `blob` is its encoded final response; `attempt` is 0 if it was not executed.
    """

    state: RequestState
    blob: Bytes
    code: str = ""
    message: str = ""
    attempt: int = 0
    execution: RequestExecution | None = None


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be settled; without `entry`, its record names the entry."""

    address: EntryAddress
    outcome: RequestOutcome
    entry: Entry | None = None
    tenant: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a request, `RUNNING` while the `worker` holds it; instants are seconds in Redis' time, 0 = not yet.

    `expires_at` is the end of the result; `responses` and `stored_bytes` count those before the final one.
    """

    address: EntryAddress
    state: RequestState
    version: int
    tenant: str = ""
    client_id: str = ""
    attempts: int = 0
    created_at: float = 0.0
    deadline_at: float = 0.0
    finished_at: float = 0.0
    expires_at: float = 0.0
    code: str = ""
    message: str = ""
    plan: bytes = b""
    decoupled: bool = False
    responses: int = 0
    stored_bytes: int = 0
    has_result: bool = False
    webhook: str = ""
    webhook_state: str = ""
    worker: str = ""
    execution: RequestExecution | None = None


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended, as a delivery of a named outbox; `id` is the id of the delivery.

    After the request's expiry `record` is `None`; without a result `blob` is `None`.
    """

    id: str
    request_id: str
    record: RequestRecord | None = None
    notes: bytes = b""
    blob: bytes | None = None
    attempts: int = 1


def check_outbox(acceptance: Acceptance) -> None:
    """Raises `InvalidRequest` for a forbidden outbox or notes."""
    outbox, size = acceptance.outbox, len(acceptance.notes)
    if acceptance.webhook and outbox:
        raise InvalidRequest(f"a request of outbox '{outbox}' can have no webhook; choose one of the two")
    if size > MAX_NOTES_BYTES:
        raise InvalidRequest(
            f"the notes of a request take {size} bytes, more than {MAX_NOTES_BYTES}; keep them shorter"
        )
    if len(outbox) > MAX_OUTBOX_NAME:
        raise InvalidRequest(f"the name of outbox '{outbox}' is longer than {MAX_OUTBOX_NAME} characters; shorten it")
    if size and not outbox:
        raise InvalidRequest("a request has notes and no outbox, so that no program would read them; name an outbox")
