"""Asynchronous requests on Redis: each step is one Lua script, and a request's keys share a slot (DESIGN.md §3).

accept   accept.lua: record, payload, deadline, entry        settle   settle.lua, for each request
record, watch   record.lua       due   due.lua               notices, confirm   notices.lua, confirm.lua

A payload or result too large for the common connection is *staged* first: stored over a connection of its own, or in
the object store, under a name that nobody knows. The script then renames it, or removes it. Where the script never
came, it expires.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from qinfer.delivery import keys, scripts
from qinfer.delivery.base import DELAYED, FULL, Lane
from qinfer.delivery.connection import Argument, pack
from qinfer.delivery.durability import Durability
from qinfer.delivery.requests import (
    LONGEST_RETRY_S,
    MARGIN_S,
    MAX_WATCHERS,
    Acceptance,
    Accepted,
    Address,
    Notice,
    RequestRecord,
    RequestState,
    Settlement,
    hint,
)
from qinfer.delivery.router import Router
from qinfer.delivery.values import Values, packable
from qinfer.errors import BrokerUnavailable, QueueFull
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

_CONSUMER_GONE_MS = 3_600_000
_NOT_IN_TIME = "the data of the request did not arrive in time; try again"
_STAGED_TTL_S = 600.0


class RedisRequests:
    """`Requests` beside `RedisDelivery`'s lanes.

    Args:
        router: The way to Redis.
        values: The way for large payloads and results.
        durability: Makes what was accepted as safe as the settings ask.
    """

    def __init__(self, router: Router, values: Values, durability: Durability) -> None:
        self._router = router
        self._values = values
        self._durability = durability
        self._looked_at: dict[tuple[str, int], bytes] = {}  # how far in the outbox's unconfirmed notices

    async def accept(self, acceptance: Acceptance) -> Accepted:
        """See `Requests.accept`."""
        address, lane = acceptance.address, acceptance.lane
        name = keys.payload(address.model, address.partition, address.id)
        kept_s = acceptance.timeout_s + acceptance.result_ttl_s + acceptance.tombstone_ttl_s + MARGIN_S
        place, payload, staged = await self._staged(name, acceptance.payload, kept_s)
        names = [
            keys.lane(lane),
            keys.lane(Lane(lane.model, lane.version, lane.name + DELAYED, lane.partition)),
            _record_key(address),
            keys.due(address.model, address.partition).encode(),
            name.encode(),
            staged.encode(),
            keys.idempotency(address.model, address.partition, acceptance.tenant, acceptance.idempotency_key).encode(),
        ]
        arguments = _accept_arguments(acceptance, place, payload)

        async def write(call: Callable[..., Awaitable[Any]]) -> Any:
            return await scripts.run(call, scripts.ACCEPT, names, *arguments)

        what, request_id, body_hash, gone = await self._durability.write(address.model, address.partition, write)
        self._values.forget(gone)
        if what == b"full":
            raise QueueFull(FULL)
        if what == b"gone":
            raise BrokerUnavailable(_NOT_IN_TIME)
        return Accepted(request_id.decode(), is_new=what == b"new", body_hash=body_hash.decode())

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """See `Requests.settle`."""
        blobs = await asyncio.gather(*map(self._staged_result, settlements))
        ended = await asyncio.gather(*map(self._settle, settlements, blobs), return_exceptions=True)
        waiters: dict[str, list[Address]] = {}
        for settlement, waiting in zip(settlements, ended, strict=True):
            if not isinstance(waiting, BaseException):
                for reply_to in (waiting or "").split():
                    waiters.setdefault(reply_to, []).append(settlement.address)
        for reply_to, addresses in waiters.items():
            self._tell(reply_to, addresses)
        for waiting in ended:
            if isinstance(waiting, BaseException):
                raise waiting
        return [waiting is not None for waiting in ended]

    async def record(self, address: Address) -> RequestRecord | None:
        """See `Requests.record`."""
        return await self._record(address, "")

    async def result(self, address: Address) -> bytes | None:
        """See `Requests.result`."""
        name = keys.result(address.model, address.partition, address.id)
        return await self._values.get(keys.slot(name), name)

    async def watch(self, address: Address, reply_to: str) -> RequestRecord | None:
        """See `Requests.watch`."""
        return await self._record(address, reply_to)

    async def due(self, model: str, partition: int, count: int) -> list[Address]:
        """See `Requests.due`."""
        name = keys.due(model, partition).encode()
        ids = await scripts.run(self._call(name), scripts.DUE, [name], count)
        return [Address(model, partition, found.decode()) for found in ids]

    async def notices(
        self, model: str, partition: int, consumer: str, count: int, *, retry_s: float = 1.0
    ) -> list[Notice]:
        """See `Requests.notices`."""
        name = keys.outbox(model, partition).encode()
        start = self._looked_at.get((model, partition), b"-")
        times = int(retry_s * 1000), int(LONGEST_RETRY_S * 1000)
        arguments = (keys.JANITORS, consumer, count, *times, start, _CONSUMER_GONE_MS)
        next_start, found = await scripts.run(self._call(name), scripts.NOTICES, [name], *arguments)
        self._looked_at[model, partition] = next_start
        return [
            Notice(
                id=notice_id.decode(),
                address=Address(model, partition, request_id.decode()),
                deliveries=deliveries,
                is_job=kind == b"j",
            )
            for notice_id, request_id, deliveries, kind in found
        ]

    async def confirm(self, model: str, partition: int, notice: Notice, *, delivered: bool) -> None:
        """See `Requests.confirm`."""
        name = keys.outbox(model, partition).encode()
        state = b"delivered" if delivered else b"failed"
        address = notice.address
        job = keys.job(address.model, address.partition, address.id).encode()
        names = [name, job if notice.is_job else _record_key(address)]
        await scripts.run(self._call(name), scripts.CONFIRM, names, keys.JANITORS, notice.id, state)

    def _call(self, key: bytes) -> Callable[..., Awaitable[Any]]:
        return partial(self._router.call, keys.slot(key))

    async def _staged_result(self, settlement: Settlement) -> tuple[bytes, Bytes, str]:
        address, blob = settlement.address, settlement.outcome.blob
        name, kept_s = keys.result(address.model, address.partition, address.id), 0.0
        if self._values.is_object(len(blob)):
            key = _record_key(address)
            kept_s = int(await self._call(key)(b"HGET", key, b"result_ttl_ms") or 0) / 1000
        return await self._staged(name, blob, kept_s)

    async def _staged(self, name: str, value: Bytes, kept_s: float) -> tuple[bytes, Bytes, str]:
        """Returns where a script finds a value, the value if it is passed to it, and the name it was staged under.

        Args:
            name: The name that the script gives it.
            value: The bytes.
            kept_s: How long it is kept then.
        """
        if not self._values.is_apart(len(value)):
            return (b"given" if value else b"none"), value, keys.staged(name, "")
        staged = keys.staged(name, secrets.token_hex(8))
        await self._values.set(keys.slot(name), staged, value, _STAGED_TTL_S, later_s=kept_s)
        return b"staged", b"", staged

    async def _settle(self, settlement: Settlement, staged: tuple[bytes, Bytes, str]) -> str | None:
        """Ends one request; returns who waits for it, or `None` where it had ended before."""
        address, entry, outcome = settlement.address, settlement.entry, settlement.outcome
        place, blob, staged_name = staged
        model, partition = address.model, address.partition
        names = [
            _record_key(address),
            keys.result(model, partition, address.id).encode(),
            staged_name.encode(),
            keys.due(model, partition).encode(),
            keys.outbox(model, partition).encode(),
            keys.payload(model, partition, address.id).encode(),
        ]
        where = (keys.lane(entry.lane), entry.entry_id) if entry is not None else (b"", b"")
        fields = (b"state", outcome.state, b"code", outcome.code, b"message", outcome.message)
        arguments = (keys.prefix(model, partition), keys.GROUP, address.id, *where, place, packable(blob))
        what, waiters, gone = await scripts.run(
            self._call(names[0]), scripts.SETTLE, names, *arguments, outcome.attempt, *fields
        )
        self._values.forget(gone)
        if what == b"gone":
            raise BrokerUnavailable(_NOT_IN_TIME)
        return waiters.decode() if what == b"first" else None

    def _tell(self, reply_to: str, addresses: Sequence[Address]) -> None:
        """Sends hints without waiting; one that is lost costs its reader some time."""
        key = keys.reply(reply_to).encode()
        packed = pack((b"XADD", key, b"NOMKSTREAM", b"*", b"r", hint(addresses)))
        try:
            self._router.send(keys.slot(key), packed, lambda _: None)
        except BrokerUnavailable:
            logger.warning("waiting callers could not be told", extra={"count": len(addresses)})

    async def _record(self, address: Address, reply_to: str) -> RequestRecord | None:
        name = _record_key(address)
        prefix = keys.prefix(address.model, address.partition)
        names = [name, keys.result(address.model, address.partition, address.id).encode()]
        arguments = (prefix, keys.GROUP, keys.RELEASED, keys.SUSPECTS, reply_to, MAX_WATCHERS)
        found = await scripts.run(self._call(name), scripts.RECORD, names, *arguments)
        return None if found is None else _record_of(address, *found)


def _record_key(address: Address) -> bytes:
    return keys.request(address.model, address.partition, address.id).encode()


def _accept_arguments(acceptance: Acceptance, place: bytes, payload: Bytes) -> tuple[Argument, ...]:
    """Returns the ARGV of accept.lua."""
    times = (acceptance.timeout_s, acceptance.result_ttl_s, acceptance.tombstone_ttl_s, MARGIN_S)
    fields: dict[bytes, Argument] = {
        b"version": acceptance.lane.version,
        b"lane": acceptance.lane.name,
        b"tenant": acceptance.tenant,
        b"client_id": acceptance.client_id,
        b"plan": acceptance.plan,
        b"webhook": acceptance.webhook,
    }
    return (
        *(keys.GROUP, keys.RELEASED, keys.SUSPECTS),
        *(acceptance.address.id, packable(acceptance.frame), place, packable(payload), acceptance.limit),
        *(_ttl_ms(seconds) for seconds in times),
        _ttl_ms(acceptance.idempotency_ttl_s) if acceptance.idempotency_key else 0,
        acceptance.body_hash,
        *(word for pair in fields.items() for word in pair),
    )


def _ttl_ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))  # Redis takes no time to live of 0


def _record_of(
    address: Address, pairs: Sequence[bytes], has_result: int, is_held: int, deliveries: int
) -> RequestRecord:
    """Reads the reply of record.lua."""
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode()

    def instant_s(name: bytes) -> float:
        return int(fields.get(name, b"0")) / 1000

    state = RequestState(text(b"state"))
    return RequestRecord(
        address=address,
        state=RequestState.RUNNING if is_held else state,
        version=int(fields[b"version"]),
        tenant=text(b"tenant"),
        client_id=text(b"client_id"),
        attempts=int(fields.get(b"attempts", b"0")) if state.is_terminal else deliveries,
        created_at=instant_s(b"created_at"),
        deadline_at=instant_s(b"deadline_at"),
        finished_at=instant_s(b"finished_at"),
        expires_at=instant_s(b"expires_at"),
        code=text(b"code"),
        message=text(b"message"),
        plan=fields.get(b"plan", b""),
        has_result=bool(has_result),
        webhook=text(b"webhook"),
        webhook_state=text(b"webhook_state"),
    )
