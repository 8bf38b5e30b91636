"""Records of the queue: where an entry is and who holds it, and the records and limits of asynchronous requests."""

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
"""Ends the name of the lane for what waited too long in the lane whose name comes before it."""

FULL = "Exceeds maximum queue size"
"""Why `submit` refuses what is beyond its limit; Triton's text (reference §3.3)."""

CHUNK_BYTES = 2**20
"""Outputs of one response above this travel beside the reply stream."""

STORED_TTL_S = 120.0
"""How long such outputs wait for the process that was told of them: it takes them at once, unless it is cut off."""

BULK_LANES = ("bulk1", "bulk2", "bulk3")
"""The lanes of shards in the order in which they are read: jobs of high, normal and low priority."""

SHADOW_LANE = "shadow"
"""The lane of shadows, which are executed while the device has nothing else to do."""

_SHARE = "~"
"""Goes before the number of a share in the name of its stream."""


class Lane(msgspec.Struct, frozen=True, cache_hash=True):
    """One stream of a model version's queue.

    Attributes:
        model: The model's name.
        version: Its version, > 0; 0 = the steps of a sequence, of whichever version.
        name: An opaque lane name: `p1` … `p32`, `p2.delayed`, `bulk1` … `bulk3`, `shadow`, `seq`, `seq@<worker>`; of a
            share of one, the stream of some of its tenants, such as `p1~3`.
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


class Share(msgspec.Struct, frozen=True):
    """A stream of a lane, with what it holds.

    Attributes:
        lane: The stream; the first one of a lane is the lane itself.
        entries: How many entries it holds, waiting and in flight.
        weight: That of its tenants together.
        tenants: Whose it is, as far as was asked for, in order.
        waiting: How many of the entries no consumer holds, where that was asked for.
    """

    lane: Lane
    entries: int
    weight: int = 1
    tenants: tuple[str, ...] = ()
    waiting: int = 0


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


def shadow_lane(model: str, version: int, partition: int = 0) -> Lane:
    """Returns the lane of the shadows of a model version."""
    return Lane(model, version, SHADOW_LANE, partition)


@lru_cache(maxsize=65536)  # one call per request
def share_of(lane: Lane, number: int) -> Lane:
    """Returns the stream of a share of a lane; share 0 is the lane itself."""
    return Lane(lane.model, lane.version, f"{lane.name}{_SHARE}{number}", lane.partition) if number else lane


def undivided(name: str) -> str:
    """Returns the name of the lane that a stream of this name is a share of, or is."""
    return name.partition(_SHARE)[0]


def divided_of(stream: Lane) -> tuple[Lane, int]:
    """Returns the lane that a stream is a share of, or is, and the number of the share."""
    name, _, number = stream.name.partition(_SHARE)
    return (Lane(stream.model, stream.version, name, stream.partition), int(number)) if number else (stream, 0)


def delayed_name(name: str) -> str:
    """Returns the name of the lane for what waited too long in a lane or a share of it."""
    return undivided(name) + DELAYED


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


MARGIN_S = 86400.0
"""A request is known so much longer than its times need: nobody may be there to sweep at its deadline."""

MAX_WATCHERS = 64
"""Maximum number of processes that are notified of one request's end: the latest that asked."""

MAX_NOTES_BYTES = 8192
"""The longest `notes` of a request: they are kept in Redis as long as its record."""

MAX_OUTBOX_NAME = 200
"""The longest name of an outbox, in characters."""


class RequestState(StrEnum):
    """Where an asynchronous request is; succeeded, failed, expired and cancelled are terminal."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether it will never change again."""
        return self not in (RequestState.QUEUED, RequestState.RUNNING)


class Address(msgspec.Struct, frozen=True):
    """Where a request's keys are: its model, partition and id. The id is unique within the partition."""

    model: str
    partition: int
    id: str


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a request that is being accepted.

    Attributes:
        address: Its id and where it lives.
        lane: The lane it goes to.
        frame: The encoded request; its `reply_to` is empty.
        payload: Its tensors, where they do not travel in the frame; empty otherwise.
        body_hash: Identifies the request's content, to tell a repetition from another request.
        timeout_s: From now, in the broker's time, to its deadline.
        result_ttl_s: How long its result can be read once it has ended.
        tombstone_ttl_s: How long after that it is known that there was one.
        tenant: Whose request it is.
        client_id: The `id` of the body, echoed in the result.
        plan: How the result is to be encoded: the encoded `OutputPlan`.
        decoupled: Whether it is for a decoupled model: its result is a list of responses.
        idempotency_key: The hash of the caller's key; empty without one.
        idempotency_ttl_s: How long the key is remembered.
        webhook: Where to tell its end; empty = nowhere. Not together with an outbox.
        outbox: Which outbox its end goes to, in its partition, for whoever asks for its `endings`; empty = none, or
            that of the webhooks. All requests of an outbox should be kept equally long: it is trimmed by that.
        notes: For whoever reads the outbox: opaque, at most `MAX_NOTES_BYTES`.
        watcher: A reply address that is notified of its end, so that its reader reads the outbox. Empty = none.
        limit: The lane takes no more when so many entries wait in it; 0 = no limit.
        is_told: The model's workers say which entries execute: those that they hold besides wait, too.
        endpoint: The endpoint that it came by, if `Moves` may move it while it waits.
        share: The tenant whose stored results may take as much memory as is free; empty = no other shares it.
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
    """Outcome of an `accept`.

    Attributes:
        id: The request's id: the one given, or of the request that was there before.
        is_new: Whether it was enqueued now.
        body_hash: That of the request with this id: another one than was given is a conflict.
    """

    id: str
    is_new: bool
    body_hash: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended.

    Attributes:
        state: One of the terminal states.
        blob: Its encoded final response (`codec.frame.encode_responses`), outputs or failure.
        code: The failure's error code; empty after success.
        message: The failure's text; empty after success.
        attempt: The execution that ended it; 0 = it was not executed.
    """

    state: RequestState
    blob: Bytes
    code: str = ""
    message: str = ""
    attempt: int = 0


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """One request to be settled; `entry` is where it is in the queue, `None` = where its record says."""

    address: Address
    outcome: Outcome
    entry: Entry | None = None
    tenant: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a request; instants in seconds of the broker's time, 0 = not yet.

    Attributes:
        address: Its id and where it lives.
        state: Where it is; RUNNING while a worker holds it.
        version: The model version it was accepted for.
        tenant: Whose request it is.
        client_id: The `id` of its body.
        attempts: How often a worker has taken it.
        created_at: When it was accepted.
        deadline_at: When it expires.
        finished_at: When it ended.
        expires_at: When its result will be gone.
        code: The failure's error code.
        message: The failure's text.
        plan: How its result is to be encoded.
        decoupled: Whether its result is a list of responses.
        responses: How many of them are stored before the final one.
        stored_bytes: How many bytes they are together.
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
    """A delivery through an outbox that a program named: a request that ended.

    Attributes:
        id: The delivery's own id, for `Deliveries.done`.
        request_id: The request's id.
        record: What is known of the request; `None` when its time is over, so that there is nothing to tell any more.
        notes: What was given with it. Where it was accepted again after its end, those of that time.
        blob: Its `Outcome.blob`; `None` when it is gone, or was never there.
        attempts: How often it was handed out, this time included.
    """

    id: str
    request_id: str
    record: RequestRecord | None = None
    notes: bytes = b""
    blob: bytes | None = None
    attempts: int = 1


def check_outbox(acceptance: Acceptance) -> None:
    """Checks the outbox of a request.

    Raises:
        InvalidRequest: It has a webhook too, its name or its notes are too long, or there are notes and no outbox.
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
