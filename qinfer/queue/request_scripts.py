"""The scripts of asynchronous requests: a function for each, which spells its keys and arguments and reads its reply.

accept, settle   each.lua with accept.lua, settle.lua: for several requests of one partition in one step
find             find.lua, for one that was accepted before
record           record.lua
due              due.lua
endings          endings.lua

An acceptance or a settlement is passed with its payload or result as a `Value`: given, or staged before.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from qinfer.queue import keys, scripts
from qinfer.queue.base import DELAYED, Lane
from qinfer.queue.connection import Argument, packable
from qinfer.queue.deliveries import WEBHOOKS, Kind
from qinfer.queue.request_records import (
    MARGIN_S,
    MAX_WATCHERS,
    Acceptance,
    Accepted,
    Address,
    Ending,
    RequestRecord,
    RequestState,
    Settlement,
)
from qinfer.queue.scripts import Call, Words, ttl_ms
from qinfer.queue.values import LARGE_BYTES
from qinfer.tensors import Bytes
from qinfer.wire.versions import Record

AT_ONCE = 32
"""So many requests one script takes at most: a millisecond of Redis, for which all others wait."""

AT_ONCE_BYTES = 2**20
"""Their values have so many bytes at most, but for a single one."""

RECORD_FIELDS = (
    *(b"state", b"version", b"attempts", b"webhook", b"webhook_state", b"accepted", b"failure"),
    *(b"created_at", b"deadline_at", b"finished_at", b"expires_at"),
)
"""The fields that `record_of` reads, in its order; the state is the first."""

_ACCEPT = scripts.load("each", "waiting", "now_ms", "drop", "deliveries", "requests/known", "requests/accept")
_SETTLE = scripts.load("each", "now_ms", "drop", "deliveries", "requests/settle")
_FIND = scripts.load("requests/find", "now_ms", "deliveries", "requests/known")
_RECORD = scripts.load("requests/record")
_DUE = scripts.load("requests/due", "now_ms")
_ENDINGS = scripts.load("requests/endings", "now_ms", "deliveries")


class _Accepted(msgspec.Struct, array_like=True, frozen=True):
    """What a record keeps of a request from the start, and no script reads."""

    tenant: str
    client_id: str
    plan: bytes


class _Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why a request failed; a request that succeeded has none."""

    code: str
    message: str


_ACCEPTED = Record(_Accepted, "the record of a request")
_FAILURE = Record(_Failure, "the failure of a request")
_NO_FAILURE = _Failure("", "")


class Value(NamedTuple):
    """A payload or a result as a script takes it.

    Attributes:
        place: none | given | staged.
        data: The bytes, where they are given.
        staged: The name that they were stored under, where they are staged.
    """

    place: bytes
    data: Bytes
    staged: str


class AcceptReply(NamedTuple):
    """What became of an acceptance.

    Attributes:
        what: new | known | full | gone: its staged payload is.
        id: The id of the request, or of the one that was there before, and
        body_hash: the hash of its body.
        objects: Names of objects that nothing refers to now.
    """

    what: str
    id: str
    body_hash: str
    objects: Sequence[bytes]


class SettleReply(NamedTuple):
    """What became of a settlement.

    Attributes:
        what: first | late | gone: its staged result is, and nothing was done.
        watchers: Reply addresses that are to be told.
        objects: Names of objects that nothing refers to now.
    """

    what: str
    watchers: Sequence[str]
    objects: Sequence[bytes]


async def accept(call: Call, requests: Sequence[tuple[Acceptance, Value]]) -> list[AcceptReply]:
    """Stores and enqueues requests of one partition, unless they are known or their lane is full."""
    words = [_acceptance(acceptance, payload) for acceptance, payload in requests]
    return [
        AcceptReply(what.decode(), known_id.decode(), body_hash.decode(), objects)
        for what, known_id, body_hash, objects in await scripts.run_each(call, _ACCEPT, words)
    ]


async def settle(call: Call, requests: Sequence[tuple[Settlement, Value]]) -> list[SettleReply]:
    """Ends requests of one partition, unless they have ended; removes their entries in any case."""
    words = [_settlement(settlement, result) for settlement, result in requests]
    return [
        SettleReply(what.decode(), watchers.decode().split(), objects)
        for what, watchers, objects in await scripts.run_each(call, _SETTLE, words)
    ]


async def find(
    call: Call, address: Address, body_hash: str, tenant: str, idempotency_key: str, notes: bytes | None
) -> Accepted | None:
    """Finds a request that was accepted before, by id or key; of one with the same body the end is told again."""
    names = [record_key(address)]
    if idempotency_key:
        names.append(keys.idempotency(address.model, address.partition, tenant, idempotency_key).encode())
    found = await scripts.run(call, _FIND, names, address.id, body_hash, *(() if notes is None else (notes,)))
    return None if found is None else Accepted(found[0].decode(), is_new=False, body_hash=found[1].decode())


async def record(call: Call, address: Address, watcher: str = "") -> RequestRecord | None:
    """Reads what is known of a request, and notes who wants to be told of its end; `None` = nothing is."""
    names = (record_key(address), result_name(address).encode())
    prefix = keys.prefix(address.model, address.partition)
    arguments = (prefix, keys.GROUP, keys.RELEASED, keys.SUSPECTS, watcher, MAX_WATCHERS)
    found = await scripts.run(call, _RECORD, names, *arguments, *RECORD_FIELDS)
    if found is None:
        return None
    values, has_result, is_held, deliveries = found
    return record_of(address, values, has_result=bool(has_result), is_held=bool(is_held), deliveries=deliveries)


async def due(call: Call, model: str, partition: int, count: int) -> list[Address]:
    """Names requests whose deadline has passed, the oldest first."""
    ids = await scripts.run(call, _DUE, [keys.due(model, partition).encode()], count)
    return [Address(model, partition, found.decode()) for found in ids]


async def endings(call: Call, model: str, partition: int, kind: Kind, count: int) -> list[tuple[Ending, bool]]:
    """Takes requests that ended from an outbox; returns with each whether its result is too large to come with it."""
    name, prefix = keys.deliveries(model, partition, kind.name).encode(), keys.prefix(model, partition)
    arguments = (count, int(kind.pause_s * 1000), prefix, LARGE_BYTES, *RECORD_FIELDS)
    return [_ending(model, partition, reply) for reply in await scripts.run(call, _ENDINGS, [name], *arguments)]


def given(name: str, data: Bytes) -> Value:
    """Returns a value that is passed to the script, which stores it under `name`."""
    return Value(b"given" if data else b"none", data, keys.staged(name, ""))


def parts_of(addresses: Sequence[Address], sizes: Sequence[int]) -> list[list[int]]:
    """Cuts requests into parts for one script each.

    Args:
        addresses: Of the requests.
        sizes: Of their values, in bytes.

    Returns:
        The numbers of the requests of each part, which are of one partition.
    """
    parts: list[list[int]] = []
    open_parts: dict[tuple[str, int], tuple[list[int], int]] = {}
    for number, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        place = address.model, address.partition
        part, part_bytes = open_parts.get(place, ([], 0))
        if not part or len(part) == AT_ONCE or part_bytes + size > AT_ONCE_BYTES:
            part, part_bytes = [], 0
            parts.append(part)
        part.append(number)
        open_parts[place] = part, part_bytes + size
    return parts


def record_key(address: Address) -> bytes:
    """Returns the key of a request's record."""
    return keys.request(address.model, address.partition, address.id).encode()


def payload_name(address: Address) -> str:
    """Returns the name of a request's payload."""
    return keys.payload(address.model, address.partition, address.id)


def result_name(address: Address) -> str:
    """Returns the name of a request's result."""
    return keys.result(address.model, address.partition, address.id)


def record_of(
    address: Address, values: Sequence[bytes | None], *, has_result: bool, is_held: bool = False, deliveries: int = 0
) -> RequestRecord:
    """Reads a record.

    Args:
        address: Whose it is.
        values: Those of `RECORD_FIELDS`; `None` = it was not set.
        has_result: Whether there is a result beside it.
        is_held: Whether a consumer holds its entry.
        deliveries: How often its entry was handed out; of one that ended the record tells it.

    Raises:
        NewerVersion: A newer qinfer wrote it.
    """
    state, version, attempts, webhook, webhook_state, accepted, failure = (value or b"" for value in values[:7])
    created_s, deadline_s, finished_s, expires_s = (int(value or 0) / 1000 for value in values[7:])
    about = _ACCEPTED.decode(accepted)
    ended = _FAILURE.decode(failure) if failure else _NO_FAILURE
    known = RequestState(state.decode())
    return RequestRecord(
        address=address,
        state=RequestState.RUNNING if is_held else known,
        version=int(version),
        tenant=about.tenant,
        client_id=about.client_id,
        attempts=int(attempts or 0) if known.is_terminal else deliveries,
        created_at=created_s,
        deadline_at=deadline_s,
        finished_at=finished_s,
        expires_at=expires_s,
        code=ended.code,
        message=ended.message,
        plan=about.plan,
        has_result=has_result,
        webhook=webhook.decode(),
        webhook_state=webhook_state.decode(),
    )


def _ending(model: str, partition: int, reply: Sequence[Any]) -> tuple[Ending, bool]:
    """Reads one of the replies of endings.lua."""
    item_id, attempts, request_id, notes, values, place, given = reply
    address = Address(model, partition, request_id.decode())
    blob = given if place == b"given" else None
    record = None if values[0] is None else record_of(address, values, has_result=blob is not None)
    ending = Ending(
        id=item_id.decode(), request_id=address.id, record=record, notes=notes, blob=blob, attempts=attempts
    )
    return ending, place == b"apart"


def _acceptance(acceptance: Acceptance, payload: Value) -> Words:
    """Returns the words of accept.lua."""
    address = acceptance.address
    model, partition = address.model, address.partition
    names = (
        *_lane_keys(acceptance.lane),
        record_key(address),
        keys.due(model, partition).encode(),
        payload_name(address).encode(),
        payload.staged.encode(),
        keys.idempotency(model, partition, acceptance.tenant, acceptance.idempotency_key).encode(),
    )
    times = (acceptance.timeout_s, acceptance.result_ttl_s, acceptance.tombstone_ttl_s, MARGIN_S)
    arguments: list[Argument] = [
        *(keys.GROUP, keys.RELEASED, keys.SUSPECTS),
        *(address.id, packable(acceptance.frame), payload.place, packable(payload.data), acceptance.limit),
        *map(ttl_ms, times),
        ttl_ms(acceptance.idempotency_ttl_s) if acceptance.idempotency_key else 0,
        *(acceptance.body_hash, acceptance.lane.version, acceptance.lane.name),
        _ACCEPTED.encode(_Accepted(acceptance.tenant, acceptance.client_id, acceptance.plan)),
        *(acceptance.webhook, acceptance.outbox, acceptance.notes, acceptance.watcher),
    ]
    return Words(names, arguments)


def _settlement(settlement: Settlement, result: Value) -> Words:
    """Returns the words of settle.lua."""
    address, entry, outcome = settlement.address, settlement.entry, settlement.outcome
    model, partition = address.model, address.partition
    names = (
        record_key(address),
        result_name(address).encode(),
        result.staged.encode(),
        keys.due(model, partition).encode(),
        keys.deliveries(model, partition, WEBHOOKS).encode(),
        payload_name(address).encode(),
    )
    where = (keys.lane(entry.lane), entry.entry_id) if entry is not None else (b"", b"")
    failure = _FAILURE.encode(_Failure(outcome.code, outcome.message)) if outcome.code or outcome.message else b""
    value = (result.place, packable(result.data))
    ended = (outcome.attempt, outcome.state, failure)
    return Words(names, (keys.prefix(model, partition), keys.GROUP, address.id, *where, *value, *ended))


@lru_cache(maxsize=1024)
def _lane_keys(lane: Lane) -> tuple[bytes, bytes]:
    """Returns the keys of a lane, and of its lane for the delayed."""
    return keys.lane(lane), keys.lane(Lane(lane.model, lane.version, lane.name + DELAYED, lane.partition))
