"""How requests with a limit or a payload come into their lanes on Redis: by a script; others need a plain XADD only.

A payload of up to 1 MiB travels with the script. A larger one is sent before, over a connection of its own or to the
object store, so that no small request waits behind it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from qinfer.errors import BrokerUnavailable, QinferError, QueueFull
from qinfer.queue import keys, scripts
from qinfer.queue.base import DELAYED, FULL, Entry, Lane, Payload
from qinfer.queue.connection import Argument, Refused, pack, packable
from qinfer.queue.router import Router
from qinfer.queue.values import Values
from qinfer.tensors import Bytes

Done = Callable[[Entry | QinferError], None]

_CLOSED = "the connection to the queue was closed while the request's tensors were sent; it may have been enqueued"


class RedisSubmits:
    """The part of `Delivery` that appends entries conditionally.

    Args:
        router: The way to Redis.
        values: The way for payloads that are too large for it.
    """

    def __init__(self, router: Router, values: Values) -> None:
        self._router = router
        self._values = values
        self._large: set[asyncio.Task[None]] = set()

    def add(self, lane: Lane, frame: Bytes, done: Done, payload: Payload | None, limit: int) -> None:
        """See `Delivery.submit`."""
        if payload is None:
            self._add(lane, frame, done, limit, ())
        elif not self._values.is_apart(len(payload.data)):
            about = (payload.request_id, max(1, int(payload.ttl_s * 1000)), packable(payload.data))
            self._add(lane, frame, done, limit, about)
        else:
            task = asyncio.create_task(self._add_large(lane, frame, done, payload, limit), name="large submit")
            self._large.add(task)
            task.add_done_callback(self._large.discard)

    async def close(self) -> None:
        """Ends what is still sending a large payload; it fails with `BrokerUnavailable`."""
        tasks = list(self._large)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _add(self, lane: Lane, frame: Bytes, done: Done, limit: int, payload: tuple[Argument, ...]) -> None:
        """Runs the script.

        Args:
            lane: Where to.
            frame: The frame.
            done: Gets the entry or why there is none.
            limit: See `Delivery.submit`.
            payload: The payload's request id, time to live and bytes; empty without one.
        """
        payload_id = str(payload[0]) if payload else ""
        delayed = Lane(lane.model, lane.version, lane.name + DELAYED, lane.partition)
        names = [keys.lane(lane), keys.lane(delayed)]
        if payload:
            names.append(keys.payload(lane.model, lane.partition, payload_id).encode())
        words = (len(names), *names, keys.GROUP, keys.RELEASED, keys.SUSPECTS, limit, packable(frame), *payload)
        slot = keys.lane_slot(lane)

        def answered(reply: Any) -> None:
            if type(reply) is bytes:
                done(Entry(lane, reply.decode(), payload_id=payload_id))
            elif reply is None:
                done(QueueFull(FULL))
            elif type(reply) is Refused and reply.kind == "NOSCRIPT":
                try:
                    self._router.send(slot, pack((b"EVAL", scripts.SUBMIT.text, *words)), answered)
                except BrokerUnavailable as error:
                    done(error)
            else:
                done(reply)

        self._router.send(slot, pack((b"EVALSHA", scripts.SUBMIT.sha, *words)), answered)

    async def _add_large(self, lane: Lane, frame: Bytes, done: Done, payload: Payload, limit: int) -> None:
        """Stores the payload before the entry, where it holds nothing up; removes it where the lane is full."""
        slot, key = keys.lane_slot(lane), keys.payload(lane.model, lane.partition, payload.request_id)
        future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
        try:
            await self._values.set(slot, key, payload.data, payload.ttl_s)
            self._add(lane, frame, future.set_result, limit, (payload.request_id, 0))
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
