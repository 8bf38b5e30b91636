"""Waiters for changes of asynchronous requests: the long polls and event streams of one gateway.

A *hint* on the reply stream wakes the waiters of a request. A hint may be lost, and the start of execution sends none,
so waiters also read the record every `REREAD_S` seconds.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from qinfer.queue.entries import EntryAddress, RequestRecord
from qinfer.queue.requests import Requests
from qinfer_api.shared_limit import SharedLimit

REREAD_S = 1.0

MAX_WAITS = 4096
"""Each waiter costs a read a second."""


class Waits:
    """The waiters of a gateway; while `ending`, no new waiter begins."""

    def __init__(self, requests: Requests, reply_to: str) -> None:
        self._requests = requests
        self._reply_to = reply_to
        self._events: dict[str, set[asyncio.Event]] = {}
        self._places = SharedLimit()
        self.ending = False

    def is_full(self, tenant: str) -> bool:
        """Returns whether a tenant has too many waiters, or the gateway shuts down."""
        return self.ending or not self._places.has_room(MAX_WAITS, tenant)

    def wake(self, request_id: str) -> None:
        """Wakes the waiters of a request."""
        for event in self._events.get(request_id, ()):
            event.set()

    def end_waits(self) -> None:
        """Ends all waits, as the gateway shuts down."""
        self.ending = True
        for events in self._events.values():
            for event in events:
                event.set()

    async def wait_for_end(
        self, address: EntryAddress, wait_s: float, check: Callable[[], None], tenant: str
    ) -> RequestRecord | None:
        """Waits until the request ends, at most `wait_s`; returns its record, if any."""
        ends_s = time.monotonic() + wait_s
        with self._waiting(address.id, tenant) as event:
            record = await self._requests.watch(address, self._reply_to)
            while record is not None and not record.state.is_terminal and not self.ending:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    break
                await _news(event, left_s)
                record = await self._requests.record(address)
                check()
        return record

    async def changes(
        self, address: EntryAddress, heartbeat_s: float, check: Callable[[], None], tenant: str
    ) -> AsyncIterator[RequestRecord | None]:
        """Yields a request's record at each change and new response, and `None` after `heartbeat_s` without either.

        It ends after the terminal state, when the request is gone, and at a shutdown.
        """
        with self._waiting(address.id, tenant) as event:
            last: tuple[str, int, int] | None = None
            said_s = time.monotonic()
            record = await self._requests.watch(address, self._reply_to)
            while record is not None:
                now = (record.state, record.attempts, record.responses)
                if last != now:
                    last, said_s = now, time.monotonic()
                    yield record
                elif time.monotonic() - said_s >= heartbeat_s:
                    said_s = time.monotonic()
                    yield None
                if record.state.is_terminal or self.ending:
                    return
                await _news(event, max(said_s + heartbeat_s - time.monotonic(), 0.0))
                record = await self._requests.record(address)
                check()

    @contextlib.contextmanager
    def _waiting(self, request_id: str, tenant: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._events.setdefault(request_id, set()).add(event)
        try:
            with self._places.place(tenant):
                yield event
        finally:
            events = self._events[request_id]
            events.discard(event)
            if not events:
                del self._events[request_id]


async def _news(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(REREAD_S, seconds)):
            await event.wait()
    event.clear()
