"""Appends entries to lanes, and moves them between versions: the submitting half of `Queue`.

plain                XADD to the lane, in one write with the others of the tick
of a known tenant    XADD to the tenant's stream, if the stream still exists
with a limit         submit.lua, once for all entries of the tick with the same lane, sender and limit
of a new tenant, or with a payload    submit.lua, which knows each tenant's stream

`Moves` takes waiting entries from the lanes of one version to those of another, which executes them. A movable entry
has the fields `e`, its endpoint; `t`, its tenant; `r`, the id of a request with a record. `move.lua` moves each
atomically. The record, or a note (`…:moved`), has the new address for `Queue.cancel` and `Queue.withdraw`.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from qinfer.errors import BrokerUnavailable, QinferError, QueueFull
from qinfer.queue import keys
from qinfer.queue.connection import Argument, CommandRefused, Reply, pack, packable
from qinfer.queue.entries import FULL, Entry, Lane, Payload, delayed_name, share_of
from qinfer.queue.router import Call, Router, load_script, run_script, ttl_ms
from qinfer.queue.tenants import Places, adding, adding_to_share
from qinfer.queue.values import Values
from qinfer.tensors import Bytes

Done = Callable[[Entry | QinferError], None]

PLACING = ("now_ms", "shares", "holder", "waiting", "places")

_MOST_AT_ONCE = 64
"""The most entries of one script, because Redis serves no other client meanwhile."""

_NO_PAYLOAD: tuple[Argument, ...] = ("", 0, b"")
_CLOSED = "the connection to the queue was closed while tensors were sent; the request may have been enqueued"
_SUBMIT = load_script("lanes/submit", *PLACING)

MOVES_AT_ONCE = 50
"""Each moved entry costs about five commands."""

MOVED_BYTES_AT_ONCE = 2**20

NOTES_KEPT_S = 3600.0
"""How long notes are kept after the last move."""

_MOVE = load_script("lanes/move", *PLACING)


class _Sender(NamedTuple):
    """An entry's tenant, and its endpoint if `Moves` may move it."""

    tenant: str
    endpoint: str


class Submitter:
    """The submitting half of `Queue`."""

    def __init__(self, router: Router, values: Values, places: Places) -> None:
        self.router = router
        self.places = places
        self._values = values
        self._large: set[asyncio.Task[None]] = set()
        self._gathered: dict[tuple[Lane, int, str, str], list[tuple[Bytes, Done]]] = {}

    def submit(  # noqa: PLR0913 - keywords: what is to be known of an entry
        self,
        lane: Lane,
        frame: Bytes,
        done: Done,
        *,
        payload: Payload | None = None,
        limit: int = 0,
        tenant: str = "",
        endpoint: str = "",
    ) -> None:
        """Appends an entry without blocking; all submits of one event-loop tick leave in one write.

        `done` is called once with the entry or an error; after any error but `QueueFull` the entry may be in the queue.
        It is refused when `limit` entries wait in the lane and its `.delayed` lane; 0 = no limit. With `endpoint`,
        `moves` may move it.
        """
        if payload is not None:
            self._submit_with_payload(lane, frame, done, payload, limit, _Sender(tenant, endpoint))
        elif limit:
            self._gather((lane, limit, tenant, endpoint), (frame, done))
        elif not tenant:
            slot, command = adding(lane, endpoint)
            self.router.send(slot, command.pack(frame), partial(_added, lane, done))
        elif (stream := self.places.find(lane, tenant)) is None:
            self._send_script(lane, _Sender(tenant, endpoint), [(frame, done)])
        elif stream is lane:
            slot, command = adding(lane, endpoint, tenant if endpoint else "")
            self.router.send(slot, command.pack(frame), partial(_added, lane, done))
        else:
            slot, command = adding_to_share(stream, endpoint, tenant if endpoint else "")
            added = partial(self._added_to_share, lane, stream, _Sender(tenant, endpoint), frame, done)
            self.router.send(slot, command.pack(frame), added)

    async def _end_large(self) -> None:
        """Ends submissions whose payloads are being stored."""
        for task in list(self._large):
            task.cancel()
        if self._large:
            await asyncio.wait(list(self._large))

    def _added_to_share(self, lane: Lane, stream: Lane, sender: _Sender, frame: Bytes, done: Done, reply: Any) -> None:
        """Reports an entry; if the stream is gone, the script finds another."""
        if reply is not None:
            _added(stream, done, reply)
            return
        self.places.drop_place(lane, sender.tenant)
        self._run_later(lane, sender, [(frame, done)])

    def _gather(self, where: tuple[Lane, int, str, str], entry: tuple[Bytes, Done]) -> None:
        gathered = self._gathered
        if not gathered:
            asyncio.get_running_loop().call_soon(self._submit_gathered)
        entries = gathered.get(where)
        if entries is None:
            gathered[where] = [entry]
        else:
            entries.append(entry)

    def _submit_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for (lane, limit, tenant, endpoint), entries in gathered.items():
            for start in range(0, len(entries), _MOST_AT_ONCE):
                self._run_later(lane, _Sender(tenant, endpoint), entries[start : start + _MOST_AT_ONCE], limit)

    def _run_later(self, lane: Lane, sender: _Sender, entries: Sequence[tuple[Bytes, Done]], limit: int = 0) -> None:
        """Runs the script; reports a missing connection by `done`, since `submit` has returned already."""
        try:
            self._send_script(lane, sender, entries, limit)
        except BrokerUnavailable as error:
            for _, done in entries:
                done(error)

    def _submit_with_payload(
        self, lane: Lane, frame: Bytes, done: Done, payload: Payload, limit: int, sender: _Sender
    ) -> None:
        if not self._values.is_apart(len(payload.data)):
            about = (payload.request_id, max(1, int(payload.ttl_s * 1000)), packable(payload.data))
            self._send_script(lane, sender, [(frame, done)], limit, about)
        else:
            self.router.check_up(keys.lane_slot(lane))  # else the request would wait for the connection
            storing = self._submit_large(lane, frame, done, payload, limit, sender)
            task = asyncio.create_task(storing, name="large submit")
            self._large.add(task)
            task.add_done_callback(self._large.discard)

    def _send_script(
        self,
        lane: Lane,
        sender: _Sender,
        entries: Sequence[tuple[Bytes, Done]],
        limit: int = 0,
        payload: tuple[Argument, ...] = _NO_PAYLOAD,
    ) -> None:
        payload_id = str(payload[0])
        names = _keys(lane, payload_id)
        tenant, endpoint = sender
        weight = self.places.weigh(tenant) if tenant else 0
        frames = [packable(frame) for frame, _ in entries]
        words = (len(names), *names, keys.GROUP, limit, tenant, weight, endpoint, *payload, *frames)
        appended = partial(self._appended, lane, tenant, payload_id, [done for _, done in entries])
        # A closure's self-reference would keep everything until garbage collection.
        answered = partial(self._unless_unknown, keys.lane_slot(lane), words, appended)
        self.router.send(keys.lane_slot(lane), pack((b"EVALSHA", _SUBMIT.sha, *words)), answered)

    def _unless_unknown(self, slot: int, words: Sequence[Argument], appended: Reply, reply: Any) -> None:
        """Sends the script's text if Redis does not know it."""
        if type(reply) is not CommandRefused or reply.kind != "NOSCRIPT":
            appended(reply)
            return
        try:
            self.router.send(slot, pack((b"EVAL", _SUBMIT.text, *words)), appended)
        except BrokerUnavailable as error:
            appended(error)

    def _appended(self, lane: Lane, tenant: str, payload_id: str, dones: Sequence[Done], reply: Any) -> None:
        if type(reply) is not list:
            for done in dones:
                done(reply)
            return
        share, is_shared, first, *ids = reply
        if tenant:
            self.places.learn(lane, tenant, share, is_shared=bool(is_shared))
        stream, others = share_of(lane, first), share_of(lane, share)
        for done, entry_id in zip_longest(dones, ids):
            done(Entry(stream, entry_id.decode(), payload_id=payload_id) if entry_id else QueueFull(FULL))
            stream = others

    async def _submit_large(
        self, lane: Lane, frame: Bytes, done: Done, payload: Payload, limit: int, sender: _Sender
    ) -> None:
        """Stores the payload, then appends the entry; removes the payload if the lane is full."""
        slot, key = keys.lane_slot(lane), keys.payload(lane.model, lane.partition, payload.request_id)
        future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
        try:
            await self._values.set(slot, key, payload.data, payload.ttl_s, tenant=sender[0])
            self._send_script(lane, sender, [(frame, future.set_result)], limit, (payload.request_id, 0, b""))
            answer = await asyncio.shield(future)
        except QinferError as error:
            answer = error
        except asyncio.CancelledError:
            done(BrokerUnavailable(_CLOSED))
            raise
        if isinstance(answer, QueueFull):
            with suppress(BrokerUnavailable):  # the payload expires anyway
                await self._values.remove(slot, key)
        done(answer)


def _added(stream: Lane, done: Done, reply: Any) -> None:
    done(Entry(stream, reply.decode()) if type(reply) is bytes else reply)


def _keys(lane: Lane, payload_id: str) -> Sequence[bytes]:
    delayed = Lane(lane.model, lane.version, delayed_name(lane.name), lane.partition)
    names = [keys.lane(lane), keys.lane(delayed)]
    if payload_id:
        names.append(keys.payload(lane.model, lane.partition, payload_id).encode())
    return names


class Moves:
    """Moves waiting entries between versions."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def move(self, lanes: Sequence[Lane], version: int, endpoint: str) -> int:
        """Moves an endpoint's waiting entries, shares included, to another version's lanes; returns how many."""
        count = 0
        for lane in lanes:
            other = Lane(lane.model, version, lane.name, lane.partition)
            call = partial(self._router.call, keys.lane_slot(lane))
            after: tuple[int, str] | None = 0, "-"
            while after is not None:
                moved, after = await _move(call, lane, other, endpoint, after)
                count += moved
        return count


async def _move(
    call: Call, lane: Lane, other: Lane, endpoint: str, start: tuple[int, str]
) -> tuple[int, tuple[int, str] | None]:
    """Returns the number of moved entries, and where to continue (share and id)."""
    names = (keys.lane(lane), keys.lane(other), keys.moved(lane.model, lane.partition).encode())
    place = (keys.prefix(lane.model, lane.partition), other.version, other.name)
    limits = (MOVES_AT_ONCE, MOVED_BYTES_AT_ONCE, ttl_ms(NOTES_KEPT_S))
    moved, *rest = await run_script(call, _MOVE, names, keys.GROUP, keys.RELEASED, endpoint, *place, *limits, *start)
    return moved, (rest[0], rest[1].decode()) if rest else None
