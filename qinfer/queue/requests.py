"""Asynchronous requests: accepted now, ended once, read until their time is over.

    accept ──▶ queued ──settle──▶ succeeded | failed | expired | cancelled        `settle` is their `finish`

The promises, each a test in `tests/contract/`:

1. What `accept` confirmed ends in exactly one terminal state, whoever calls `settle`, and however often.
2. `settle` stores the result, sets the times to live, appends to the outbox, and removes the entry with its payload, in
   one step; of several callers one is first, and only its outcome is ever visible.
3. `accept` and `find` with an id or an idempotency key that is known already change nothing and say which request it
   was; where that has ended and has an outbox of its own, its end is told there again.
4. A result can be read again and again until its time to live is over; afterwards a tombstone tells so for a while.
5. `due` knows every request whose deadline passed, with zero workers too.
6. An end that is to be told, by a webhook or through an outbox that a program named, is a delivery: see `deliveries`.

A payload or result too large for the common connection is *staged* first: stored over a connection of its own, or in
the object store, under a name that nobody knows. The script then renames it, or removes it. Where the script never
came, it expires.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from functools import partial

import msgspec

from qinfer.core.messages import Response
from qinfer.errors import BrokerUnavailable, CorruptEntry, InvalidRequest, QinferError, QueueFull
from qinfer.queue import keys, request_scripts
from qinfer.queue.base import FULL
from qinfer.queue.connection import Refused, pack
from qinfer.queue.deliveries import Kind
from qinfer.queue.durability import Durability
from qinfer.queue.request_records import (
    MARGIN_S,
    MAX_NOTES_BYTES,
    MAX_OUTBOX_NAME,
    Acceptance,
    Accepted,
    Address,
    Ending,
    RequestRecord,
    Settlement,
)
from qinfer.queue.request_scripts import (
    AT_ONCE_BYTES,
    AcceptReply,
    Value,
    given,
    parts_of,
    payload_name,
    record_key,
    result_name,
)
from qinfer.queue.router import Router
from qinfer.queue.scripts import Call
from qinfer.queue.values import Values
from qinfer.tensors import Bytes
from qinfer.wire.frame import encode_responses

logger = logging.getLogger(__name__)

_NOT_IN_TIME = "the data of the request did not arrive in time; try again"
_STAGED_TTL_S = 600.0


class Requests:
    """Asynchronous requests; every coroutine raises `BrokerUnavailable` when Redis can't be reached.

    Args:
        router: The way to Redis.
        values: The way for large payloads and results.
        durability: Makes what was accepted as safe as the settings ask.
    """

    def __init__(self, router: Router, values: Values, durability: Durability) -> None:
        self._router = router
        self._values = values
        self._durability = durability

    async def accept(self, acceptance: Acceptance) -> Accepted:
        """Stores and enqueues a request, in one step, as durably as the settings ask.

        Raises:
            InvalidRequest: Its outbox or notes can't be.
            QueueFull: The lane is at `limit`, or the broker has no memory left.
            PayloadTooLarge: The payload is larger than the broker can store.
            BrokerUnavailable: It may have been accepted: repeat it with the same id.
        """
        if acceptance.outbox or acceptance.notes:
            check_outbox(acceptance)
        address = acceptance.address
        kept_s = acceptance.timeout_s + acceptance.result_ttl_s + acceptance.tombstone_ttl_s + MARGIN_S
        payload = await self._staged(payload_name(address), acceptance.payload, kept_s)
        write = partial(request_scripts.accept, requests=[(acceptance, payload)])
        (reply,) = await self._durability.write(address.model, address.partition, write)
        accepted = self._accepted(reply)
        if isinstance(accepted, QinferError):
            raise accepted
        return accepted

    async def accept_all(self, acceptances: Sequence[Acceptance]) -> list[Accepted | QinferError]:
        """As `accept`, for many at a fraction of the cost; returns what became of each, an error as a value."""
        sizes = [
            AT_ONCE_BYTES + 1 if self._values.is_apart(len(each.payload)) else len(each.frame) + len(each.payload)
            for each in acceptances  # what is stored first goes alone
        ]
        parts = parts_of([acceptance.address for acceptance in acceptances], sizes)
        answers = await asyncio.gather(*(self._accept_part([acceptances[i] for i in part]) for part in parts))
        found: list[Accepted | QinferError | None] = [None] * len(acceptances)
        for part, answer in zip(parts, answers, strict=True):
            for number, accepted in zip(part, answer, strict=True):
                found[number] = accepted
        return [each for each in found if each is not None]

    async def find(
        self,
        address: Address,
        body_hash: str,
        *,
        tenant: str = "",
        idempotency_key: str = "",
        notes: bytes | None = None,
    ) -> Accepted | None:
        """Finds a request that was accepted before, as `accept` does, and accepts none; `None` = there is none.

        What is returned is as durable as the settings ask: the acceptance may not have been confirmed yet.

        Args:
            address: Where it is, by its id.
            body_hash: Identifies the request's content; where it is the same, an end is told again.
            tenant: Whose request it is.
            idempotency_key: The hash of the caller's key, which goes before the id; empty without one.
            notes: For whoever reads its outbox; `None` = those that it has.

        Raises:
            BrokerUnavailable: It can't be asked, or what was accepted is not safe yet.
        """

        async def look(call: Call) -> Accepted | None:
            return await request_scripts.find(call, address, body_hash, tenant, idempotency_key, notes)

        return await self._durability.write(address.model, address.partition, look)

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Ends requests; all leave in one write, one atomic step each.

        Waiters of those that ended now are told (`watch`).

        Returns:
            For each, whether this was the first terminal state: False = it had ended before, or is unknown.

        Raises:
            PayloadTooLarge: A blob is larger than the broker can store; none has ended.
            BrokerUnavailable: Some may have ended; repeat it: those are then not the first.
        """
        results = await self._staged_results(settlements)
        parts = parts_of([each.address for each in settlements], [len(result.data) for result in results])
        ended = await asyncio.gather(
            *(self._settle([settlements[i] for i in part], [results[i] for i in part]) for part in parts),
            return_exceptions=True,
        )
        if len(parts) < len(settlements) and any(isinstance(answers, Refused) for answers in ended):
            return await self._settle_apart(settlements)  # one that can't be written ends no other
        waiters: dict[str, list[Address]] = {}
        firsts = [False] * len(settlements)
        for part, answers in zip(parts, ended, strict=True):
            for number, waiting in zip(part, answers if not isinstance(answers, BaseException) else (), strict=False):
                firsts[number] = waiting is not None
                for reply_to in waiting or ():
                    waiters.setdefault(reply_to, []).append(settlements[number].address)
        for reply_to, addresses in waiters.items():
            self._tell(reply_to, addresses)
        for answers in ended:
            if isinstance(answers, BaseException):
                raise answers
        return firsts

    async def record(self, address: Address) -> RequestRecord | None:
        """Returns what is known of a request; `None` = nothing, or not any more."""
        return await request_scripts.record(self._call(record_key(address)), address)

    async def result(self, address: Address) -> bytes | None:
        """Returns the `Outcome.blob` of a request that ended; `None` when it has not, or its time is over."""
        name = keys.result(address.model, address.partition, address.id)
        return await self._values.get(keys.slot(name), name)

    async def watch(self, address: Address, reply_to: str) -> RequestRecord | None:
        """As `record`, and from then on a hint goes to `reply_to` when the request ends.

        The hint is a response with the request's id and no outputs: a reason to read, nothing more; it may be missed.
        """
        return await request_scripts.record(self._call(record_key(address)), address, reply_to)

    async def due(self, model: str, partition: int, count: int) -> list[Address]:
        """Returns up to `count` requests whose deadline has passed and which have not ended, the oldest first."""
        return await request_scripts.due(self._call(keys.due(model, partition).encode()), model, partition, count)

    async def endings(self, model: str, partition: int, kind: Kind, count: int) -> list[Ending]:
        """Takes up to `count` requests that ended, with their results, from an outbox that a program named.

        They are deliveries, and done by `Deliveries.done`. Fewer may come though there are more, where results are
        large: call it until none comes.

        Args:
            model: The model, and
            partition: its partition.
            kind: The outbox, as `deliveries.outbox` returns it.
            count: How many at most.
        """
        call = self._call(keys.deliveries(model, partition, kind.name).encode())
        found = await request_scripts.endings(call, model, partition, kind, count)
        apart = [number for number, (_, is_apart) in enumerate(found) if is_apart]
        fetched = await asyncio.gather(*(self._with_result(model, partition, found[number][0]) for number in apart))
        whole = dict(zip(apart, fetched, strict=True))
        return [whole.get(number, ending) for number, (ending, _) in enumerate(found)]

    async def _accept_part(self, acceptances: Sequence[Acceptance]) -> Sequence[Accepted | QinferError]:
        """Accepts requests of one partition in one step; returns what became of each."""
        first = acceptances[0].address
        try:
            if len(acceptances) == 1:
                return [await self.accept(acceptances[0])]
            for acceptance in acceptances:
                check_outbox(acceptance)
            requests = [(each, given(payload_name(each.address), each.payload)) for each in acceptances]
            write = partial(request_scripts.accept, requests=requests)
            replies = await self._durability.write(first.model, first.partition, write)
        except (InvalidRequest, Refused) as error:  # of one of them
            if len(acceptances) == 1:
                return [error]
            return [answer for each in acceptances for answer in await self._accept_part([each])]
        except QinferError as error:
            return [error] * len(acceptances)
        return [self._accepted(reply) for reply in replies]

    def _accepted(self, reply: AcceptReply) -> Accepted | QinferError:
        self._values.forget(reply.objects)
        if reply.what == "full":
            return QueueFull(FULL)
        if reply.what == "gone":
            return BrokerUnavailable(_NOT_IN_TIME)
        return Accepted(reply.id, is_new=reply.what == "new", body_hash=reply.body_hash)

    async def _with_result(self, model: str, partition: int, ending: Ending) -> Ending:
        try:
            blob = await self.result(Address(model, partition, ending.request_id))
        except CorruptEntry as error:
            extra = {"request_id": ending.request_id, "error": error.message}
            logger.warning("a result is gone before its time", extra=extra)
            return ending
        record = ending.record and msgspec.structs.replace(ending.record, has_result=blob is not None)
        return msgspec.structs.replace(ending, blob=blob, record=record)

    def _call(self, key: bytes) -> Call:
        return partial(self._router.call, keys.slot(key))

    async def _staged_results(self, settlements: Sequence[Settlement]) -> list[Value]:
        """Returns the results as the script takes them; large ones are stored first."""
        values = [given(result_name(each.address), each.outcome.blob) for each in settlements]
        large = [number for number, value in enumerate(values) if self._values.is_apart(len(value.data))]
        if large:
            stored = await asyncio.gather(*(self._staged_result(settlements[number]) for number in large))
            for number, value in zip(large, stored, strict=True):
                values[number] = value
        return values

    async def _staged_result(self, settlement: Settlement) -> Value:
        address, blob, kept_s = settlement.address, settlement.outcome.blob, 0.0
        if self._values.is_object(len(blob)):
            key = record_key(address)
            kept_s = int(await self._call(key)(b"HGET", key, b"result_ttl_ms") or 0) / 1000
        return await self._staged(result_name(address), blob, kept_s)

    async def _staged(self, name: str, value: Bytes, kept_s: float) -> Value:
        """Returns a value as a script takes it; a large one is stored first.

        Args:
            name: The name that the script gives it.
            value: The bytes.
            kept_s: How long it is kept then.
        """
        if not self._values.is_apart(len(value)):
            return given(name, value)
        staged = keys.staged(name, secrets.token_hex(8))
        await self._values.set(keys.slot(name), staged, value, _STAGED_TTL_S, later_s=kept_s)
        return Value(b"staged", b"", staged)

    async def _settle(self, settlements: Sequence[Settlement], results: Sequence[Value]) -> list[Sequence[str] | None]:
        """Ends requests of one partition in one step; returns for each who waits for it, `None` = it had ended before.

        Raises:
            BrokerUnavailable: A result that was stored first is gone; the other requests have ended.
        """
        call = self._call(record_key(settlements[0].address))
        replies = await request_scripts.settle(call, list(zip(settlements, results, strict=True)))
        for reply in replies:
            self._values.forget(reply.objects)
        if any(reply.what == "gone" for reply in replies):
            raise BrokerUnavailable(_NOT_IN_TIME)
        return [reply.watchers if reply.what == "first" else None for reply in replies]

    async def _settle_apart(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Ends requests one by one; raises what the first of them raised when all have been tried."""
        ended = await asyncio.gather(*(self.settle([each]) for each in settlements), return_exceptions=True)
        firsts: list[bool] = []
        for answers in ended:
            if isinstance(answers, BaseException):
                raise answers
            firsts += answers
        return firsts

    def _tell(self, reply_to: str, addresses: Sequence[Address]) -> None:
        """Sends hints without waiting; one that is lost costs its reader some time."""
        key = keys.reply(reply_to).encode()
        packed = pack((b"XADD", key, b"NOMKSTREAM", b"*", b"r", hint(addresses)))
        try:
            self._router.send(keys.slot(key), packed, lambda _: None)
        except BrokerUnavailable:
            logger.warning("waiting callers could not be told", extra={"count": len(addresses)})


def check_outbox(acceptance: Acceptance) -> None:
    """Checks what a request says of its outbox.

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


def hint(addresses: Sequence[Address]) -> bytes:
    """Returns what is published to those that watch requests which have ended: their ids, and no outputs."""
    return encode_responses([Response(request_id=address.id) for address in addresses])
