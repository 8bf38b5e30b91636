"""Asynchronous requests: accepted now, ended once, readable until their result expires.

The guarantees, each with a test in `tests/contract/`:

1. A request that `accept` confirmed ends in exactly one terminal state, however many callers `settle` it.
2. `settle` atomically stores the result, sets the times to live, appends to the outbox, and removes the entry with its
   payload. Only the outcome of the first caller is ever visible.
3. `accept` and `find` with a known id or idempotency key return the earlier request. If it has ended, its end is
   appended to its own outbox again.
4. A result can be read until it expires or `forget` removes it. A tombstone then remains, and id and key stay known.
5. `due` finds every request whose deadline passed, even without workers.
6. A tenant whose results take all the free memory or disk has new requests refused, and executing ones end as failures.
7. An end for a webhook or a named outbox is a delivery: see `deliveries`.
8. `list_requests` finds each request while its record lasts: unfinished ones by `due`, ended ones by an index that
   `settle` writes, of about 140 bytes for each.

A large payload or result is *staged* first: stored over a connection of its own, or in the object store, under a random
name. The script then renames or removes it; without the script it expires.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec

from qinfer.core.messages import Failure, Response
from qinfer.errors import BrokerUnavailable, CorruptEntry, InvalidRequest, QinferError, QueueFull, QuotaExceeded
from qinfer.queue import keys
from qinfer.queue.connection import Argument, CommandRefused, pack, packable
from qinfer.queue.deliveries import WEBHOOKS, DeliveryKind
from qinfer.queue.durability import Durability
from qinfer.queue.entries import (
    FULL,
    MARGIN_S,
    MAX_WATCHERS,
    Acceptance,
    AcceptOutcome,
    Ending,
    EntryAddress,
    Lane,
    RequestExecution,
    RequestRecord,
    RequestState,
    Settlement,
    check_outbox,
    delayed_name,
)
from qinfer.queue.router import Call, Router, ScriptArguments, load_script, run_each, run_script, ttl_ms
from qinfer.queue.stored_responses import TOO_MUCH_STORED, StoredResponses
from qinfer.queue.submitter import PLACING
from qinfer.queue.tenants import Places
from qinfer.queue.values import LARGE_BYTES, Room, StagedValue, ValueKind, Values, given
from qinfer.wire.frame import encode_responses
from qinfer.wire.versions import Record

logger = logging.getLogger(__name__)

_STORED_AGAIN_S = 10.0
_NOT_IN_TIME = "the data of the request did not arrive in time; try again"

AT_ONCE = 32
"""The most requests of one script: about a millisecond, during which Redis serves no other client."""

STAGED_BYTES = 16 * 2**20
"""The most bytes of large results that are stored before their requests end."""

AT_ONCE_BYTES = 2**20
"""The most bytes of values in one script; a single value may be larger."""

_RECORD_FIELDS = (
    *(b"state", b"version", b"attempts", b"webhook", b"webhook_state", b"accepted", b"failure"),
    *(b"created_at", b"deadline_at", b"finished_at", b"expires_at", b"stored_bytes", b"execution"),
)

_ACCEPT = load_script("each", *PLACING, "drop", "deliveries", "requests/stored", "requests/known", "requests/accept")
_SETTLING = ("now_ms", "drop", "holder", "deliveries", "notes", "requests/stored", "requests/settle")
_SETTLE = load_script("each", *_SETTLING)
_SETTLE_COUNTED = load_script("each", *_SETTLING, "operations/count", "operations/settle")
_FIND = load_script("requests/find", "now_ms", "deliveries", "requests/known")
_FORGET = load_script("requests/forget", "now_ms", "drop", "requests/stored", "operations/count")
_RECORD = load_script("requests/record", "holder", "requests/read")
_LIST = load_script("requests/list", "holder", "requests/read")
_DUE = load_script("requests/due", "now_ms")
_ENDINGS = load_script("requests/endings", "now_ms", "deliveries")


class _AcceptedFields(msgspec.Struct, array_like=True, frozen=True):
    """Fields that no script reads."""

    tenant: str
    client_id: str
    plan: bytes
    decoupled: bool = False


class _Failure(msgspec.Struct, array_like=True, frozen=True):
    code: str
    message: str


_LAST_MS = 253402300799999
"""The end of the year 9999."""
_ACCEPTED = Record(_AcceptedFields, "the record of a request")
_FAILURE = Record(_Failure, "the failure of a request")
_EXECUTION = Record(RequestExecution, "the execution of a request")
_NO_FAILURE = _Failure("", "")

UNFINISHED = "unfinished"
"""Stands for queued and running requests in `LISTED`."""

LISTED = (UNFINISHED, RequestState.FAILED, RequestState.EXPIRED, RequestState.CANCELLED, RequestState.SUCCEEDED)
"""The indexes of requests, in the order of lists."""


class ListPlace(NamedTuple):
    """A place in a model's list: the name of an index of `LISTED`, and a score and id there to continue behind.

    Without a score it is the start of the index, without an id that of the score.
    """

    name: str = UNFINISHED
    score: str = ""
    id: str = ""


class ListedRequest(NamedTuple):
    """A place in a list with its request, `None` if that has expired or is in another state."""

    place: ListPlace
    record: RequestRecord | None


class Requests:
    """Asynchronous requests."""

    def __init__(self, router: Router, values: Values, durability: Durability, places: Places) -> None:
        self.responses = StoredResponses(router, values, self._send_hint)
        self._router = router
        self._values = values
        self._durability = durability
        self._places = places

    async def accept(self, acceptance: Acceptance) -> AcceptOutcome:
        """Stores and enqueues a request atomically, as durably as the settings ask.

        After `BrokerUnavailable` it may have been accepted: repeat it with the same id.
        """
        (accepted,) = await self._accept_part([acceptance])
        if isinstance(accepted, QinferError):
            raise accepted
        return accepted

    async def accept_all(self, acceptances: Sequence[Acceptance]) -> list[AcceptOutcome | QinferError]:
        """Accepts many requests at less cost; returns the outcome or error of each."""
        sizes = [
            AT_ONCE_BYTES + 1 if self._values.is_apart(len(each.payload)) else len(each.frame) + len(each.payload)
            for each in acceptances  # a staged payload goes alone
        ]
        parts = _parts_of([acceptance.address for acceptance in acceptances], sizes)
        answers = await asyncio.gather(*(self._accept_part([acceptances[i] for i in part]) for part in parts))
        found: list[AcceptOutcome | QinferError | None] = [None] * len(acceptances)
        for part, answer in zip(parts, answers, strict=True):
            for number, accepted in zip(part, answer, strict=True):
                found[number] = accepted
        return [each for each in found if each is not None]

    async def find(
        self,
        address: EntryAddress,
        body_hash: str,
        *,
        tenant: str = "",
        idempotency_key: str = "",
        notes: bytes | None = None,
    ) -> AcceptOutcome | None:
        """Looks up a request by idempotency key or id as `accept` does, and makes it durable.

        If `body_hash` is the request's own, its end is published again, with these `notes`.
        """
        names = [_record_key(address)]
        if idempotency_key:
            names.append(keys.idempotency(address.model, address.partition, tenant, idempotency_key).encode())

        async def look(call: Call) -> AcceptOutcome | None:
            found = await run_script(call, _FIND, names, address.id, body_hash, *(() if notes is None else (notes,)))
            return (
                None if found is None else AcceptOutcome(found[0].decode(), is_new=False, body_hash=found[1].decode())
            )

        return await self._durability.write(address.model, address.partition, look)

    async def settle(self, settlements: Sequence[Settlement], operation: bytes = b"") -> list[bool]:
        """Ends requests in one write, each atomically, and notifies their watchers.

        Returns false for a request that had ended or is unknown. Large results count as stored only at the end, so only
        `STAGED_BYTES` are stored ahead. After an error some requests may have ended. An `operation` (its key) counts
        those that it ends: they are of its model, and have small results.
        """
        first = self._first_of(settlements)
        if first < len(settlements):
            return [*await self.settle(settlements[:first]), *await self.settle(settlements[first:])]
        results = await self._staged_results(settlements)
        has_objects = any(self._values.is_object(len(each.outcome.blob)) for each in settlements)
        free = await self._values.free_bytes() if has_objects else None
        parts = _parts_of([each.address for each in settlements], [len(result.data) for result in results])
        ended = await asyncio.gather(
            *(
                self._settle_partition([settlements[i] for i in part], [results[i] for i in part], free, operation)
                for part in parts
            ),
            return_exceptions=True,
        )
        if len(parts) < len(settlements) and any(isinstance(answers, CommandRefused) for answers in ended):
            return await self._settle_apart(settlements)  # an unwritable result must not stop the other results
        waiters: dict[str, list[EntryAddress]] = {}
        firsts = [False] * len(settlements)
        for part, answers in zip(parts, ended, strict=True):
            for number, waiting in zip(part, answers if not isinstance(answers, BaseException) else (), strict=False):
                firsts[number] = waiting is not None
                for reply_to in waiting or ():
                    waiters.setdefault(reply_to, []).append(settlements[number].address)
        for reply_to, addresses in waiters.items():
            self._send_hint(reply_to, addresses)
        for answers in ended:
            if isinstance(answers, BaseException):
                raise answers
        return firsts

    def ends_at_once(self, settlement: Settlement) -> bool:
        """Tells whether the end is a single write, without staging."""
        return not self._values.is_apart(len(settlement.outcome.blob))

    async def result(self, address: EntryAddress, tenant: str = "", room: Room | None = None) -> bytes | None:
        """Returns an ended request's `RequestOutcome.blob`, awaiting `room` before a large one."""
        name = keys.result(address.model, address.partition, address.id)
        return await self._values.get(keys.slot(name), name, tenant, room)

    async def remove_result(self, address: EntryAddress, operation: bytes = b"") -> None:
        """Removes a request's result, unless its end goes to an outbox; the record stays.

        An `operation` (its key) counts it.
        """
        names = [_record_key(address), _result_name(address).encode()]
        names.append(keys.stored_responses(address.model, address.partition, address.id).encode())
        names += [operation] if operation else []
        prefix = keys.prefix(address.model, address.partition)
        self._values.delete_objects(await self._router.run(keys.slot(names[0]), _FORGET, names, prefix, address.id))

    async def due(self, model: str, partition: int, count: int) -> list[EntryAddress]:
        """Returns up to `count` unfinished requests past their deadline, oldest first."""
        key = keys.due(model, partition).encode()
        found = await self._router.run(keys.slot(key), _DUE, [key], count)
        return [EntryAddress(model, partition, request_id.decode()) for request_id in found]

    async def endings(self, model: str, partition: int, kind: DeliveryKind, count: int) -> list[Ending]:
        """Takes up to `count` ended requests with their results from an outbox, to be `done`.

        Large results make it return fewer: repeat it until it returns nothing.
        """
        name, prefix = keys.deliveries(model, partition, kind.name).encode(), keys.prefix(model, partition)
        arguments = (count, int(kind.pause_s * 1000), prefix, LARGE_BYTES, *_RECORD_FIELDS)
        replies = await self._router.run(keys.slot(name), _ENDINGS, [name], *arguments)
        found = [_ending(model, partition, reply) for reply in replies]
        apart = [number for number, (_, is_apart) in enumerate(found) if is_apart]
        fetched = await asyncio.gather(*(self._with_result(model, partition, found[number][0]) for number in apart))
        whole = dict(zip(apart, fetched, strict=True))
        return [whole.get(number, ending) for number, (ending, _) in enumerate(found)]

    async def record(self, address: EntryAddress, watcher: str = "") -> RequestRecord | None:
        """Returns a request's record, unless it expired; a `watcher` gets a hint at the end, which may be lost."""
        key, prefix = _record_key(address), keys.prefix(address.model, address.partition)
        arguments = (prefix, keys.GROUP, address.id, watcher, MAX_WATCHERS, *_RECORD_FIELDS)
        found = await self._router.run(keys.slot(key), _RECORD, [key], *arguments)
        return None if found is None else _read_record(address, found)

    async def list_requests(
        self, model: str, partition: int, after: ListPlace, count: int, indexes: Sequence[str] = LISTED
    ) -> list[ListedRequest]:
        """Lists up to `count` places of a model, from `after` on, in those of its `indexes` that are of `LISTED`.

        Unfinished requests come first, the next deadline first; the last end is the first of each state. A request that
        ends meanwhile may be listed twice, but is not left out.
        """
        left = [each for each in LISTED[LISTED.index(after.name) :] if each in indexes]
        if not left:
            return []
        place = after if left[0] == after.name else ListPlace()
        names = [_index_key(model, partition, each) for each in left]
        prefix = keys.prefix(model, partition)
        arguments = (prefix, keys.GROUP, count, place.score, place.id, *_RECORD_FIELDS)
        found = await self._router.run(keys.slot(names[0]), _LIST, names, *arguments)
        return [
            ListedRequest(
                ListPlace(left[number - 1], score.decode(), request_id.decode()),
                _listed_record(EntryAddress(model, partition, request_id.decode()), left[number - 1], reply),
            )
            for number, score, request_id, reply in found
        ]

    async def count(self, model: str, partition: int, indexes: Sequence[str] = LISTED) -> int:
        """Counts the places of a model's list; a few may be of expired or replayed requests."""
        names = [_index_key(model, partition, each) for each in indexes]
        sizes = await asyncio.gather(*(self._router.call(keys.slot(name), b"ZCARD", name) for name in names))
        return sum(sizes)

    async def has_any(self, model: str, partition: int) -> bool:
        """Tells whether a list of a model's requests would have places."""
        names = [_index_key(model, partition, each) for each in LISTED]
        return bool(await self._router.call(keys.slot(names[0]), b"EXISTS", *names))

    async def _accept_part(self, acceptances: Sequence[Acceptance]) -> Sequence[AcceptOutcome | QinferError]:
        first = acceptances[0].address
        try:
            for acceptance in acceptances:
                check_outbox(acceptance)
            payloads = [await self._stage_payload(acceptance) for acceptance in acceptances]
            free = await self._values.free_bytes() if any(each.share for each in acceptances) else None
            weigh = self._places.weigh
            requests = [
                _acceptance(each, payload, weigh(each.tenant), free)
                for each, payload in zip(acceptances, payloads, strict=True)
            ]
            write = partial(_accept, requests=requests)
            replies = await self._durability.write(first.model, first.partition, write)
        except (InvalidRequest, CommandRefused) as error:  # caused by one of them
            if len(acceptances) == 1:
                return [error]
            return [answer for each in acceptances for answer in await self._accept_part([each])]
        except QinferError as error:
            return [error] * len(acceptances)
        return [self._accepted(reply) for reply in replies]

    async def _stage_payload(self, acceptance: Acceptance) -> StagedValue:
        kept_s = acceptance.timeout_s + acceptance.result_ttl_s + acceptance.tombstone_ttl_s + MARGIN_S
        name, tenant = _payload_name(acceptance.address), acceptance.tenant
        return await self._values.stage(name, acceptance.payload, kept_s, tenant, ValueKind.PAYLOAD)

    def _accepted(self, reply: Sequence[Any]) -> AcceptOutcome | QinferError:
        what, request_id, body_hash, objects = reply
        self._values.delete_objects(objects)
        if what == b"full":
            return QueueFull(FULL)
        if what == b"over":
            return QuotaExceeded(TOO_MUCH_STORED, _STORED_AGAIN_S)
        if what == b"gone":
            return BrokerUnavailable(_NOT_IN_TIME)
        return AcceptOutcome(request_id.decode(), is_new=what == b"new", body_hash=body_hash.decode())

    async def _with_result(self, model: str, partition: int, ending: Ending) -> Ending:
        try:
            blob = await self.result(EntryAddress(model, partition, ending.request_id))
        except CorruptEntry as error:
            extra = {"request_id": ending.request_id, "error": error.message}
            logger.warning("a result is gone before its expiry", extra=extra)
            return ending
        record = ending.record and msgspec.structs.replace(ending.record, has_result=blob is not None)
        return msgspec.structs.replace(ending, blob=blob, record=record)

    def _first_of(self, settlements: Sequence[Settlement]) -> int:
        size = 0
        for number, each in enumerate(settlements):
            nbytes = 0 if self.ends_at_once(each) else len(each.outcome.blob)
            if size and size + nbytes > STAGED_BYTES:
                return number
            size += nbytes
        return len(settlements)

    async def _staged_results(self, settlements: Sequence[Settlement]) -> list[StagedValue]:
        values = [given(_result_name(each.address), each.outcome.blob) for each in settlements]
        large = [number for number, value in enumerate(values) if self._values.is_apart(len(value.data))]
        if large:
            stored = await asyncio.gather(*(self._staged_result(settlements[number]) for number in large))
            for number, value in zip(large, stored, strict=True):
                values[number] = value
        return values

    async def _staged_result(self, settlement: Settlement) -> StagedValue:
        address, blob, kept_s = settlement.address, settlement.outcome.blob, 0.0
        if self._values.is_object(len(blob)):
            key = _record_key(address)
            kept_s = int(await self._router.call(keys.slot(key), b"HGET", key, b"result_ttl_ms") or 0) / 1000
        return await self._values.stage(_result_name(address), blob, kept_s, settlement.tenant)

    async def _settle_partition(
        self,
        settlements: Sequence[Settlement],
        results: Sequence[StagedValue],
        free: int | None = None,
        operation: bytes = b"",
    ) -> list[Sequence[str] | None]:
        """Returns the watchers of each request; `None` = ended before."""
        call = partial(self._router.call, keys.slot(_record_key(settlements[0].address)))
        words = [_settlement(each, result, free) for each, result in zip(settlements, results, strict=True)]
        if operation:
            counted = [each._replace(keys=(*each.keys, operation)) for each in words]
            replies = await run_each(call, _SETTLE_COUNTED, counted)
        else:
            replies = await run_each(call, _SETTLE, words)
        for _, _, objects in replies:
            self._values.delete_objects(objects)
        if any(what == b"gone" for what, _, _ in replies):
            raise BrokerUnavailable(_NOT_IN_TIME)
        ended = [watchers.decode().split() if what == b"first" else None for what, watchers, _ in replies]
        for number, (what, _, _) in enumerate(replies):
            if what == b"over":
                refused = _without_result(settlements[number])
                result = given(_result_name(refused.address), refused.outcome.blob)
                (ended[number],) = await self._settle_partition([refused], [result])
        return ended

    async def _settle_apart(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Raises the first error after all were tried."""
        ended = await asyncio.gather(*(self.settle([each]) for each in settlements), return_exceptions=True)
        firsts: list[bool] = []
        for answers in ended:
            if isinstance(answers, BaseException):
                raise answers
            firsts += answers
        return firsts

    def _send_hint(self, reply_to: str, addresses: Sequence[EntryAddress]) -> None:
        """Sends a hint without waiting; a lost one costs its reader only time."""
        key = keys.reply(reply_to).encode()
        packed = pack((b"XADD", key, b"NOMKSTREAM", b"*", b"r", hint(addresses)))
        try:
            self._router.send(keys.slot(key), packed, lambda _: None)
        except BrokerUnavailable:
            logger.warning("waiting callers could not be notified", extra={"count": len(addresses)})


def _without_result(settlement: Settlement) -> Settlement:
    failure, outcome = Failure.from_error(QuotaExceeded(TOO_MUCH_STORED)), settlement.outcome
    blob = encode_responses([Response(request_id=settlement.address.id, failure=failure, attempt=outcome.attempt or 1)])
    failed = {"state": RequestState.FAILED, "blob": blob, "code": failure.code, "message": failure.message}
    return msgspec.structs.replace(settlement, outcome=msgspec.structs.replace(outcome, **failed))


def hint(addresses: Sequence[EntryAddress]) -> bytes:
    """Encodes the hint for watchers of these requests."""
    return encode_responses([Response(request_id=address.id) for address in addresses])


async def _accept(call: Call, requests: Sequence[ScriptArguments]) -> Sequence[Any]:
    return await run_each(call, _ACCEPT, requests)  # type: ignore[no-any-return]  # a list


def _parts_of(addresses: Sequence[EntryAddress], sizes: Sequence[int]) -> list[list[int]]:
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


def _record_key(address: EntryAddress) -> bytes:
    return keys.request(address.model, address.partition, address.id).encode()


def _payload_name(address: EntryAddress) -> str:
    return keys.payload(address.model, address.partition, address.id)


def _result_name(address: EntryAddress) -> str:
    return keys.result(address.model, address.partition, address.id)


def _index_key(model: str, partition: int, index: str) -> bytes:
    return (keys.due(model, partition) if index == UNFINISHED else keys.ended(model, partition, index)).encode()


def _listed_record(address: EntryAddress, index: str, reply: Sequence[Any]) -> RequestRecord | None:
    """Indexes keep requests that were replayed, or have expired, for a while."""
    if reply[0][0] is None:
        return None
    try:
        record = _read_record(address, reply)
    except CorruptEntry:  # a damaged record must not hide other records
        return None
    return record if index == (record.state if record.state.is_terminal else UNFINISHED) else None


def _read_record(address: EntryAddress, reply: Sequence[Any]) -> RequestRecord:
    values, has_result, worker, deliveries, stored = reply
    record = _record_of(address, values, has_result=bool(has_result), worker=worker.decode(), deliveries=deliveries)
    return msgspec.structs.replace(record, responses=stored) if stored else record


def _record_of(
    address: EntryAddress,
    values: Sequence[bytes | None],
    *,
    has_result: bool,
    worker: str = "",
    deliveries: int = 0,
) -> RequestRecord:
    """Decodes a record; `deliveries` are the attempts of an unfinished request."""
    state, version, attempts, webhook, webhook_state, accepted, failure = (value or b"" for value in values[:7])
    about = _ACCEPTED.decode(accepted)
    ended = _FAILURE.decode(failure) if failure else _NO_FAILURE
    try:
        created_s, deadline_s, finished_s, expires_s = (_instant_s(value) for value in values[7:11])
        known = RequestState(state.decode())
        return RequestRecord(
            address=address,
            state=RequestState.RUNNING if worker else known,
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
            decoupled=about.decoupled,
            stored_bytes=int(values[11] or 0),
            has_result=has_result,
            webhook=webhook.decode(),
            webhook_state=webhook_state.decode(),
            worker=worker,
            execution=_EXECUTION.decode(values[12]) if values[12] else None,
        )
    except ValueError as error:
        raise CorruptEntry(f"the record of request '{address.id}' is damaged: {error}") from None


def _instant_s(value: bytes | None) -> float:
    ms = int(value or 0)
    if not 0 <= ms <= _LAST_MS:
        raise ValueError(f"{ms} ms is not a date")
    return ms / 1000


def _ending(model: str, partition: int, reply: Sequence[Any]) -> tuple[Ending, bool]:
    item_id, attempts, request_id, notes, values, place, inline = reply
    address = EntryAddress(model, partition, request_id.decode())
    blob = inline if place == b"given" else None
    record = None if values[0] is None else _record_of(address, values, has_result=blob is not None)
    ending = Ending(
        id=item_id.decode(), request_id=address.id, record=record, notes=notes, blob=blob, attempts=attempts
    )
    return ending, place == b"apart"


def _acceptance(acceptance: Acceptance, payload: StagedValue, weight: int, free: int | None) -> ScriptArguments:
    address = acceptance.address
    model, partition = address.model, address.partition
    names = (
        *_lane_keys(acceptance.lane),
        _record_key(address),
        keys.due(model, partition).encode(),
        _payload_name(address).encode(),
        payload.staged.encode(),
        keys.idempotency(model, partition, acceptance.tenant, acceptance.idempotency_key).encode(),
    )
    times = (acceptance.timeout_s, acceptance.result_ttl_s, acceptance.tombstone_ttl_s, MARGIN_S)
    arguments: list[Argument] = [
        keys.GROUP,
        *(address.id, packable(acceptance.frame), payload.place, packable(payload.data)),
        *(acceptance.limit, int(acceptance.reports_start)),
        *map(ttl_ms, times),
        ttl_ms(acceptance.idempotency_ttl_s) if acceptance.idempotency_key else 0,
        *(acceptance.body_hash, acceptance.lane.version, acceptance.lane.name),
        _ACCEPTED.encode(
            _AcceptedFields(acceptance.tenant, acceptance.client_id, acceptance.plan, acceptance.decoupled)
        ),
        *(acceptance.webhook, acceptance.outbox, acceptance.notes, acceptance.watcher),
        *(acceptance.tenant, weight, acceptance.endpoint, acceptance.share),
        _given(free),
    ]
    return ScriptArguments(names, arguments)


def _settlement(settlement: Settlement, result: StagedValue, free: int | None) -> ScriptArguments:
    address, entry, outcome = settlement.address, settlement.entry, settlement.outcome
    model, partition = address.model, address.partition
    names = (
        _record_key(address),
        _result_name(address).encode(),
        result.staged.encode(),
        keys.due(model, partition).encode(),
        keys.deliveries(model, partition, WEBHOOKS).encode(),
        _payload_name(address).encode(),
        keys.stored_responses(model, partition, address.id).encode(),
        keys.cancels(model, partition).encode(),
    )
    where = (keys.lane(entry.lane), entry.entry_id) if entry is not None else (b"", b"")
    failure = _FAILURE.encode(_Failure(outcome.code, outcome.message)) if outcome.code or outcome.message else b""
    value = (result.place, packable(result.data))
    execution = b"" if outcome.execution is None else _EXECUTION.encode(outcome.execution)
    ended = (outcome.attempt, outcome.state, failure, _given(free), execution)
    return ScriptArguments(names, (keys.prefix(model, partition), keys.GROUP, address.id, *where, *value, *ended))


def _given(free: int | None) -> Argument:
    return b"" if free is None else free


@lru_cache(maxsize=1024)
def _lane_keys(lane: Lane) -> tuple[bytes, bytes]:
    return keys.lane(lane), keys.lane(Lane(lane.model, lane.version, delayed_name(lane.name), lane.partition))
