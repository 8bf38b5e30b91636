"""Appends entries to lanes: the submitting half of `Queue`.

plain                XADD to the lane, in one write with the others of the tick
of a known tenant    XADD to the stream that the tenant has of the lane, where it still exists
of a new tenant, with a payload, with a limit    submit.lua, which knows each tenant's stream
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qinfer.errors import BrokerUnavailable, QinferError, QueueFull
from qinfer.queue import keys
from qinfer.queue.connection import Argument, Refused, pack, packable
from qinfer.queue.entries import FULL, Entry, Lane, Payload, delayed_name, share_of
from qinfer.queue.router import Router, load_script
from qinfer.queue.shares import Places, adding, adding_to_share
from qinfer.queue.values import Values
from qinfer.tensors import Bytes

Done = Callable[[Entry | QinferError], None]

PLACING = ("now_ms", "shares", "holder", "waiting", "places")
"""The files that a script needs which appends an entry of a tenant to a lane."""

_CLOSED = "the connection to the queue was closed while the request's tensors were sent; it may have been enqueued"
_SUBMIT = load_script("lanes/submit", *PLACING)


class Submitter:
    """See the module docstring, and `Queue.submit`.

    Args:
        router: The way to Redis.
        values: The way for payloads that are stored first.
        places: Which stream of a lane a tenant has.
    """

    def __init__(self, router: Router, values: Values, places: Places) -> None:
        self._router = router
        self._values = values
        self._places = places
        self._large: set[asyncio.Task[None]] = set()

    def submit(self, lane: Lane, frame: Bytes, done: Done, *, payload: Payload | None, limit: int, tenant: str) -> None:
        """See `Queue.submit`."""
        if limit or payload is not None:
            self._submit_by_script(lane, frame, done, payload, limit, tenant)
        elif not tenant:
            slot, command = adding(lane)
            self._router.send(slot, command.pack(frame), partial(_added, lane, done))
        elif (stream := self._places.find(lane, tenant)) is None:
            self._run(lane, tenant, frame, done)
        elif stream is lane:
            slot, command = adding(lane)
            self._router.send(slot, command.pack(frame), partial(_added, lane, done))
        else:
            slot, command = adding_to_share(stream)
            added = partial(self._added_to_share, lane, stream, tenant, frame, done)
            self._router.send(slot, command.pack(frame), added)

    async def close(self) -> None:
        """Ends the submissions whose payloads are still being stored."""
        for task in list(self._large):
            task.cancel()
        if self._large:
            await asyncio.wait(list(self._large))

    def _added_to_share(self, lane: Lane, stream: Lane, tenant: str, frame: Bytes, done: Done, reply: Any) -> None:
        """Takes the reply to an XADD to a share; where its stream was given up, the script finds another."""
        if reply is not None:
            _added(stream, done, reply)
            return
        self._places.forget(lane, tenant)
        try:
            self._run(lane, tenant, frame, done)
        except BrokerUnavailable as error:
            done(error)

    def _submit_by_script(
        self, lane: Lane, frame: Bytes, done: Done, payload: Payload | None, limit: int, tenant: str
    ) -> None:
        """Submits with a limit or a payload; a payload too large for the script is sent before."""
        if payload is None:
            self._run(lane, tenant, frame, done, limit)
        elif not self._values.is_apart(len(payload.data)):
            about = (payload.request_id, max(1, int(payload.ttl_s * 1000)), packable(payload.data))
            self._run(lane, tenant, frame, done, limit, about)
        else:
            storing = self._submit_large(lane, frame, done, payload, limit, tenant)
            task = asyncio.create_task(storing, name="large submit")
            self._large.add(task)
            task.add_done_callback(self._large.discard)

    def _run(
        self,
        lane: Lane,
        tenant: str,
        frame: Bytes,
        done: Done,
        limit: int = 0,
        payload: tuple[Argument, ...] = (),
    ) -> None:
        """Runs the script; `payload` is its request id, time to live and bytes, empty without one."""
        payload_id = str(payload[0]) if payload else ""
        names = _keys(lane, payload_id)
        weight = self._places.weigh(tenant) if tenant else 0
        words = (len(names), *names, keys.GROUP, limit, tenant, weight, packable(frame), *payload)
        slot = keys.lane_slot(lane)

        def answered(reply: Any) -> None:
            if type(reply) is list:
                entry_id, number, share, is_shared = reply
                if tenant:
                    self._places.learn(lane, tenant, share, is_shared=bool(is_shared))
                done(Entry(share_of(lane, number), entry_id.decode(), payload_id=payload_id))
            elif reply is None:
                done(QueueFull(FULL))
            elif type(reply) is Refused and reply.kind == "NOSCRIPT":
                try:
                    self._router.send(slot, pack((b"EVAL", _SUBMIT.text, *words)), answered)
                except BrokerUnavailable as error:
                    done(error)
            else:
                done(reply)

        self._router.send(slot, pack((b"EVALSHA", _SUBMIT.sha, *words)), answered)

    async def _submit_large(
        self, lane: Lane, frame: Bytes, done: Done, payload: Payload, limit: int, tenant: str
    ) -> None:
        """Stores the payload before the entry, where it holds nothing up; removes it where the lane is full."""
        slot, key = keys.lane_slot(lane), keys.payload(lane.model, lane.partition, payload.request_id)
        future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
        try:
            await self._values.set(slot, key, payload.data, payload.ttl_s)
            self._run(lane, tenant, frame, future.set_result, limit, (payload.request_id, 0))
            answer = await asyncio.shield(future)
        except QinferError as error:
            answer = error
        except asyncio.CancelledError:
            done(BrokerUnavailable(_CLOSED))
            raise
        if isinstance(answer, QueueFull):
            with suppress(BrokerUnavailable):  # its time to live ends it
                await self._values.remove(slot, key)
        done(answer)


def _added(stream: Lane, done: Done, reply: Any) -> None:
    """Takes the reply to an XADD."""
    done(Entry(stream, reply.decode()) if type(reply) is bytes else reply)


def _keys(lane: Lane, payload_id: str) -> Sequence[bytes]:
    """Returns the keys of the script: the lane, that of what is delayed there, the payload."""
    delayed = Lane(lane.model, lane.version, delayed_name(lane.name), lane.partition)
    names = [keys.lane(lane), keys.lane(delayed)]
    if payload_id:
        names.append(keys.payload(lane.model, lane.partition, payload_id).encode())
    return names
