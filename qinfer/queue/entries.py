"""Records of the queue: addresses of entries, leases, and the records and limits of asynchronous requests."""

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
"""The suffix of the lane for entries that waited too long in the lane of the name before it."""

FULL = "Exceeds maximum queue size"
"""The error of a `submit` beyond its limit; Triton's text (reference §3.3)."""

CHUNK_BYTES = 2**20
"""Outputs of one response above this size travel beside the reply stream."""

STORED_TTL_S = 120.0
"""Seconds that such outputs are kept for their reader, which normally takes them immediately."""

BULK_LANES = ("bulk1", "bulk2", "bulk3")
"""The lanes of shards for jobs of high, normal and low priority, in read order."""

SHADOW_LANE = "shadow"
"""The lane of shadow requests, which are executed while the device is otherwise idle."""

_SHARE = "~"
"""Separates the lane's name from the number of the share in a stream's name."""


class Lane(msgspec.Struct, frozen=True, cache_hash=True):
    """One stream of a model version's queue.

    Attributes:
        model: The model's name.
        version: The version, > 0; 0 = steps of a sequence, for any version.
        name: The lane's name: `p1` … `p32`, `p2.delayed`, `bulk1` … `bulk3`, `shadow`, `seq`, `seq@<worker>`; with a
            share number the stream of some tenants, such as `p1~3`.
        partition: The queue partition; its lanes share a cluster slot.
    """

    model: str
    version: int
    name: str = "p1"
    partition: int = 0


class Entry(msgspec.Struct, frozen=True):
    """The address of one request in the queue.

    Attributes:
        entry_id: The stream id that Redis gave it; begins with Redis' milliseconds.
        origin: Its id in its first lane if it was moved; else empty.
        payload_id: The id of the request whose payload is stored beside it; empty without one.
    """

    lane: Lane
    entry_id: str
    origin: str = ""
    payload_id: str = ""

    @property
    def enqueued_s(self) -> float:
        """The instant of the first enqueue, in Redis' time."""
        return int((self.origin or self.entry_id).partition("-")[0]) / 1000


class Lease(msgspec.Struct, frozen=True):
    """A fetched entry that one consumer owns until it finishes, releases or loses it.

    Attributes:
        deliveries: How often it has been handed out, this time included.
        suspect: It was reclaimed from an owner that may have died executing it: run it alone.
    """

    entry: Entry
    consumer: str
    frame: bytes
    deliveries: int = 1
    suspect: bool = False


class LaneSize(msgspec.Struct, frozen=True):
    """The size of a lane, waiting and in flight; the age counts from the first enqueue, and is 0 for an empty lane."""

    entries: int = 0
    oldest_age_s: float = 0.0


class Share(msgspec.Struct, frozen=True):
    """A stream of a lane with its size.

    Attributes:
        lane: The stream; the first share of a lane is the lane itself.
        entries: The entries that it holds, waiting and in flight.
        weight: The sum of its tenants' weights.
        tenants: Its tenants in order, if they were asked for.
        waiting: The entries that no consumer holds, if they were asked for.
    """

    lane: Lane
    entries: int
    weight: int = 1
    tenants: tuple[str, ...] = ()
    waiting: int = 0


class Payload(msgspec.Struct, frozen=True):
    """Tensors beside the stream (claim check): stored under the request's id for `ttl_s` seconds."""

    request_id: str
    data: Bytes
    ttl_s: float


def reply_address(owner: str) -> str:
    """Returns the `reply_to` of a process: `reply:<owner>`."""
    return f"reply:{owner}"


def bulk_lanes(model: str, version: int, partition: int = 0) -> tuple[Lane, ...]:
    """Returns the bulk lanes of a model version in read order."""
    return tuple(Lane(model, version, name, partition) for name in BULK_LANES)


def shadow_lane(model: str, version: int, partition: int = 0) -> Lane:
    """Returns the lane of a model version's shadow requests."""
    return Lane(model, version, SHADOW_LANE, partition)


@lru_cache(maxsize=65536)  # one call per request
def share_of(lane: Lane, number: int) -> Lane:
    """Returns the stream of a lane's share; share 0 is the lane itself."""
    return Lane(lane.model, lane.version, f"{lane.name}{_SHARE}{number}", lane.partition) if number else lane


def undivided(name: str) -> str:
    """Returns the name of the lane to which a stream of this name belongs."""
    return name.partition(_SHARE)[0]


def divided_of(stream: Lane) -> tuple[Lane, int]:
    """Returns the lane of a stream, and the number of the share."""
    name, _, number = stream.name.partition(_SHARE)
    return (Lane(stream.model, stream.version, name, stream.partition), int(number)) if number else (stream, 0)


def delayed_name(name: str) -> str:
    """Returns the name of the lane for entries that waited too long in a lane or a share of it."""
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
    """Returns the lane, the consumer and the suspect flag, which all leases of one script call share."""
    return lease.entry.lane, lease.consumer, lease.suspect


def by_lane(entries: Sequence[Entry]) -> Iterable[tuple[Lane, list[Entry]]]:
    """Groups entries by lane; usually all have the same lane."""
    lane = entries[0].lane if entries else None
    if lane is not None and not [True for entry in entries if entry.lane is not lane]:
        return ((lane, list(entries)),)
    return grouped(entries, lambda entry: entry.lane)


MARGIN_S = 86400.0
"""Seconds that a record outlives the request's own times, because it may be swept long after its deadline."""

MAX_WATCHERS = 64
"""The most processes that are notified of one request's end: the latest that asked."""

MAX_NOTES_BYTES = 8192
"""The longest `notes` of a request; Redis keeps them as long as its record."""

MAX_OUTBOX_NAME = 200
"""The longest name of an outbox, in characters."""


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


class Address(msgspec.Struct, frozen=True):
    """The address of a request's keys; the id is unique within the partition."""

    model: str
    partition: int
    id: str


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be accepted.

    Attributes:
        frame: The encoded request; its `reply_to` is empty.
        payload: Its tensors if they do not travel in the frame; else empty.
        body_hash: Identifies the content, to tell a repetition from another request.
        timeout_s: Seconds from now, in Redis' time, to its deadline.
        result_ttl_s: How long the result can be read after the end.
        tombstone_ttl_s: How long after that the request is still known.
        client_id: The `id` of the body, echoed in the result.
        plan: The encoded `OutputPlan` of the result.
        decoupled: The model is decoupled: the result is a list of responses.
        idempotency_key: The hash of the caller's key; empty without one.
        webhook: The URL that is notified of its end; empty = no notification. Excludes an outbox.
        outbox: The outbox of its partition that its end is appended to, for a reader of `endings`; empty = none, or the
            one for webhooks. All requests of an outbox should have the same times, because it is trimmed by age.
        notes: Opaque bytes for the reader of the outbox, at most `MAX_NOTES_BYTES`.
        watcher: The reply address that is notified of its end, so that its reader reads the outbox; empty = no watcher.
        limit: The lane refuses the request when this many entries wait in it; 0 = no limit.
        is_told: The model's workers report executing entries: other entries that they hold count as waiting.
        endpoint: The endpoint that it came by, if `Moves` may move it while it waits.
        share: The tenant whose stored results may take as much memory as is free; empty = memory is not shared.
    """

    address: Address
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
    is_told: bool = False
    endpoint: str = ""
    share: str = ""


class Accepted(msgspec.Struct, frozen=True):
    """The outcome of an `accept`.

    Attributes:
        id: The id of the new request, or of the earlier one.
        is_new: Whether it was enqueued now.
        body_hash: The hash of the request that has this id: a hash other than the given one is a conflict.
    """

    id: str
    is_new: bool
    body_hash: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request.

    Attributes:
        state: A terminal state.
        blob: Its encoded final response (`codec.frame.encode_responses`), outputs or failure.
        code: The error code of a failure; else empty.
        message: The text of a failure; else empty.
        attempt: The execution that ended it; 0 = it was not executed.
    """

    state: RequestState
    blob: Bytes
    code: str = ""
    message: str = ""
    attempt: int = 0


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be settled; without `entry` its record says where it is in the queue."""

    address: Address
    outcome: Outcome
    entry: Entry | None = None
    tenant: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a request; instants are seconds in Redis' time, 0 = not yet.

    Attributes:
        state: RUNNING while a worker holds it.
        client_id: The `id` of its body.
        attempts: How often a worker has taken it.
        deadline_at: When it expires.
        expires_at: When its result expires.
        plan: The encoded `OutputPlan` of its result.
        decoupled: Its result is a list of responses.
        responses: The number of responses stored before the final one.
        stored_bytes: Their total size.
        has_result: Whether its result can still be read.
        webhook: The URL that is notified of its end.
        webhook_state: `` | pending | delivered | failed.
    """

    address: Address
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


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended, as a delivery of a named outbox.

    Attributes:
        id: The delivery's own id, for `Deliveries.done`.
        record: The request's record; `None` after it expired: the delivery is then void.
        notes: The request's notes; if it was accepted again after its end, the later ones.
        blob: Its `Outcome.blob`; `None` when it is gone or never existed.
        attempts: How often the delivery was handed out, this time included.
    """

    id: str
    request_id: str
    record: RequestRecord | None = None
    notes: bytes = b""
    blob: bytes | None = None
    attempts: int = 1


def check_outbox(acceptance: Acceptance) -> None:
    """Raises `InvalidRequest` for an outbox with a webhook, a name or notes that are too long, or notes without an
    outbox.
    """
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
        raise InvalidRequest("a request has notes and no outbox, so that nobody would read them; name an outbox")
