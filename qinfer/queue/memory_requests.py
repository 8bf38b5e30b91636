"""Asynchronous requests in one process's memory, beside `MemoryDelivery`'s lanes; nothing outlives it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.errors import QinferError
from qinfer.queue.base import Lane, Payload
from qinfer.queue.deliveries import Kind
from qinfer.queue.memory_lanes import Item, MemoryLanes
from qinfer.queue.memory_outboxes import MemoryOutboxes
from qinfer.queue.request_records import (
    MARGIN_S,
    MAX_WATCHERS,
    Acceptance,
    Accepted,
    Address,
    Ending,
    Outcome,
    RequestRecord,
    RequestState,
    Settlement,
)
from qinfer.queue.requests import check_outbox, hint

_FORGET_EVERY_S = 60.0


class _Stored(msgspec.Struct, eq=False):
    """One request, as it was accepted and as it is."""

    accepted: Acceptance
    item: Item
    created_at: float
    deadline_at: float
    gone_at: float
    outcome: Outcome | None = None
    attempts: int = 0
    finished_at: float = 0.0
    expires_at: float = 0.0
    webhook_state: str = ""
    notice: str = ""
    waiters: list[str] = msgspec.field(default_factory=list)


class _Pending(msgspec.Struct, eq=False):
    """One outbox entry."""

    address: Address
    is_job: bool = False
    deliveries: int = 0
    taken_at: float = 0.0


class MemoryRequests:
    """`Requests` without a broker.

    Args:
        lanes: What the requests wait in.
        clock: The queue's time.
        publish: Appends to a reply stream: `Delivery.publish`.
    """

    def __init__(
        self, lanes: MemoryLanes, clock: ServerClock, publish: Callable[[str, bytes], Awaitable[bool]]
    ) -> None:
        self._lanes = lanes
        self._clock = clock
        self._publish = publish
        self._stored: dict[Address, _Stored] = {}
        self._by_key: dict[tuple[str, int, str, str], tuple[float, Accepted]] = {}
        self._outbox: dict[str, _Pending] = {}
        self._outboxes = MemoryOutboxes(clock)
        self._last_notice = 0
        self._forgets_at = 0.0
        self.on_job_told: Callable[[str, str], None] = lambda _, __: None
        """Called with a job's id and `delivered` or `failed`, when the notice of its webhook is confirmed."""
        lanes.on_replay = self._replayed

    async def accept(self, acceptance: Acceptance) -> Accepted:
        """See `Requests.accept`."""
        if acceptance.outbox or acceptance.notes:
            check_outbox(acceptance)
        await asyncio.sleep(0)  # as with a broker, others get their turn
        now_s = self._clock.now_s()
        self._forget(now_s)
        address = acceptance.address
        key = (address.model, address.partition, acceptance.tenant, acceptance.idempotency_key)
        earlier = self._earlier(acceptance, now_s)
        if earlier is not None:
            return earlier
        lifetime_s = acceptance.timeout_s + acceptance.result_ttl_s + acceptance.tombstone_ttl_s + MARGIN_S
        payload = Payload(address.id, bytes(acceptance.payload), lifetime_s) if acceptance.payload else None
        item = self._lanes.add(acceptance.lane, acceptance.frame, payload, acceptance.limit)
        bare = msgspec.structs.replace(acceptance, frame=b"", payload=b"")
        stored = _Stored(bare, item, now_s, now_s + acceptance.timeout_s, now_s + lifetime_s)
        stored.waiters = [acceptance.watcher] if acceptance.watcher else []
        self._stored[address] = stored
        if acceptance.idempotency_key:
            earlier = Accepted(address.id, is_new=False, body_hash=acceptance.body_hash)
            self._by_key[key] = (now_s + acceptance.idempotency_ttl_s, earlier)
        return Accepted(address.id, is_new=True, body_hash=acceptance.body_hash)

    async def find(
        self,
        address: Address,
        body_hash: str,
        *,
        tenant: str = "",
        idempotency_key: str = "",
        notes: bytes | None = None,
    ) -> Accepted | None:
        """See `Requests.find`."""
        await asyncio.sleep(0)
        asked = Acceptance(
            address=address,
            lane=Lane(address.model, 0),
            frame=b"",
            timeout_s=0.0,
            body_hash=body_hash,
            tenant=tenant,
            idempotency_key=idempotency_key,
            outbox="" if notes is None else "any",
            notes=notes or b"",
        )
        return self._earlier(asked, self._clock.now_s())

    def _earlier(self, acceptance: Acceptance, now_s: float) -> Accepted | None:
        address = acceptance.address
        key = (address.model, address.partition, acceptance.tenant, acceptance.idempotency_key)
        until_s, earlier = self._by_key.get(key, (0.0, None))
        if earlier is not None and now_s < until_s:
            return self._repeated(acceptance, earlier)
        known = self._known(address)
        if known is None:
            return None
        return self._repeated(acceptance, Accepted(address.id, is_new=False, body_hash=known.accepted.body_hash))

    async def accept_all(self, acceptances: Sequence[Acceptance]) -> list[Accepted | QinferError]:
        """See `Requests.accept_all`."""
        found: list[Accepted | QinferError] = []
        for acceptance in acceptances:
            try:
                found.append(await self.accept(acceptance))
            except QinferError as error:
                found.append(error)
        return found

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """See `Requests.settle`."""
        await asyncio.sleep(0)
        waiters: list[tuple[str, Address]] = []
        firsts = [self._settle(settlement, waiters) for settlement in settlements]
        for reply_to, address in waiters:
            await self._publish(reply_to, hint([address]))
        return firsts

    async def record(self, address: Address) -> RequestRecord | None:
        """See `Requests.record`."""
        await asyncio.sleep(0)
        stored = self._known(address)
        return None if stored is None else self._record(stored)

    async def result(self, address: Address) -> bytes | None:
        """See `Requests.result`."""
        await asyncio.sleep(0)
        stored = self._known(address)
        return (
            bytes(stored.outcome.blob) if stored is not None and stored.outcome and self._has_result(stored) else None
        )

    async def watch(self, address: Address, reply_to: str) -> RequestRecord | None:
        """See `Requests.watch`."""
        await asyncio.sleep(0)
        stored = self._known(address)
        if stored is None:
            return None
        if stored.outcome is None and reply_to not in stored.waiters:
            stored.waiters = [*stored.waiters, reply_to][-MAX_WATCHERS:]
        return self._record(stored)

    async def due(self, model: str, partition: int, count: int) -> list[Address]:
        """See `Requests.due`."""
        await asyncio.sleep(0)
        now_s = self._clock.now_s()
        late = [
            (stored.deadline_at, address)
            for address, stored in self._stored.items()
            if (address.model, address.partition) == (model, partition)
            and stored.outcome is None
            and stored.deadline_at <= now_s
        ]
        return [address for _, address in sorted(late, key=lambda pair: pair[0])[:count]]

    async def endings(self, model: str, partition: int, kind: Kind, count: int) -> list[Ending]:
        """See `Requests.endings`: of Redis only."""
        raise NotImplementedError

    def tell_job(self, model: str, partition: int, job_id: str) -> None:
        """Has the end of a bulk job told: its notice is handed out with those of requests."""
        self._tell(Address(model, partition, job_id), is_job=True)

    def _tell(self, address: Address, *, is_job: bool) -> None:
        self._last_notice += 1
        self._outbox[f"{int(self._clock.now_s() * 1000)}-{self._last_notice}"] = _Pending(address, is_job)

    def _repeated(self, acceptance: Acceptance, earlier: Accepted) -> Accepted:
        """Has the end of a request told again that was accepted before, unless it waits to be told."""
        address = msgspec.structs.replace(acceptance.address, id=earlier.id)
        stored = self._known(address)
        if stored is None or stored.outcome is None or not stored.accepted.outbox:
            return earlier
        if acceptance.body_hash != earlier.body_hash:
            return earlier
        outbox, notes = stored.accepted.outbox, acceptance.notes if acceptance.outbox else stored.accepted.notes
        if notes != stored.accepted.notes:
            self._outboxes.tell(outbox, address, notes)
        elif not self._outboxes.has(outbox, address, stored.notice):
            stored.notice = self._outboxes.tell(outbox, address, notes)
        return earlier

    def _replayed(self, request_id: str, item: Item) -> None:
        """Makes a request that had ended `queued` again, with its timeout from now on."""
        lane = item.entry.lane
        stored = self._known(Address(lane.model, lane.partition, request_id))
        if stored is None:
            return
        accepted = stored.accepted
        stored.item, stored.outcome, stored.attempts = item, None, 0
        stored.finished_at, stored.expires_at, stored.webhook_state = 0.0, 0.0, ""
        stored.deadline_at = self._clock.now_s() + accepted.timeout_s
        stored.gone_at = stored.deadline_at + accepted.result_ttl_s + accepted.tombstone_ttl_s + MARGIN_S

    def _known(self, address: Address) -> _Stored | None:
        stored = self._stored.get(address)
        if stored is not None and self._clock.now_s() >= stored.gone_at:
            del self._stored[address]
            return None
        return stored

    def _forget(self, now_s: float) -> None:
        """Drops what nobody asks for any more; only now and then, for it looks at everything."""
        if now_s < self._forgets_at:
            return
        self._forgets_at = now_s + _FORGET_EVERY_S
        self._stored = {address: stored for address, stored in self._stored.items() if now_s < stored.gone_at}
        self._by_key = {key: found for key, found in self._by_key.items() if now_s < found[0]}
        for stored in self._stored.values():
            if stored.outcome is not None and now_s >= stored.expires_at:
                stored.outcome = msgspec.structs.replace(stored.outcome, blob=b"")

    def _settle(self, settlement: Settlement, waiters: list[tuple[str, Address]]) -> bool:
        """Ends one request, if it has not ended; adds who is to be told to `waiters`."""
        address, outcome = settlement.address, settlement.outcome
        stored = self._known(address)
        is_first = stored is not None and stored.outcome is None
        if stored is not None and is_first:
            now_s = self._clock.now_s()
            stored.attempts = outcome.attempt or stored.item.deliveries
            stored.outcome = msgspec.structs.replace(outcome, blob=bytes(outcome.blob))
            stored.finished_at = now_s
            stored.expires_at = now_s + stored.accepted.result_ttl_s
            stored.gone_at = stored.expires_at + stored.accepted.tombstone_ttl_s
            waiters.extend((reply_to, address) for reply_to in stored.waiters)
            stored.waiters = []
            if stored.accepted.outbox:
                stored.notice = self._outboxes.tell(stored.accepted.outbox, address, stored.accepted.notes)
            elif stored.accepted.webhook:
                stored.webhook_state = "pending"
                self._tell(address, is_job=False)
            self._lanes.remove(stored.item.entry)
        if settlement.entry is not None:
            self._lanes.remove(settlement.entry)
        return is_first

    def _has_result(self, stored: _Stored) -> bool:
        return bool(stored.outcome and stored.outcome.blob) and self._clock.now_s() < stored.expires_at

    def _record(self, stored: _Stored) -> RequestRecord:
        accepted, outcome = stored.accepted, stored.outcome
        state = RequestState.RUNNING if stored.item.owner else RequestState.QUEUED
        return RequestRecord(
            address=accepted.address,
            state=outcome.state if outcome else state,
            version=accepted.lane.version,
            tenant=accepted.tenant,
            client_id=accepted.client_id,
            attempts=stored.attempts if outcome else stored.item.deliveries,
            created_at=stored.created_at,
            deadline_at=stored.deadline_at,
            finished_at=stored.finished_at,
            expires_at=stored.expires_at,
            code=outcome.code if outcome else "",
            message=outcome.message if outcome else "",
            plan=accepted.plan,
            has_result=self._has_result(stored),
            webhook=accepted.webhook,
            webhook_state=stored.webhook_state,
        )
