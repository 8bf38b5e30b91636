"""Waiters for changes of asynchronous requests: the long polls and event streams of one gateway.

A *hint* on the reply stream wakes the waiters of a request. A hint may be lost, and the start of execution sends none,
so waiters also read the record every `REREAD_S` seconds. The waiters of one request share their reads, and go on in
turns of the event loop, because hundreds may wait for one end.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from qinfer.queue.entries import EntryAddress, RequestRecord
from qinfer.queue.requests import Requests
from qinfer_api.turns import SharedLimit, Turns

REREAD_S = 1.0

SHARED_S = 0.25
"""The age up to which a read, unless a hint has come since, serves other waiters of its request."""

MAX_WAITS = 4096
"""Each request that is waited for costs a read a second."""


class _Watched:
    """A request with waiters."""

    def __init__(self) -> None:
        self.events: set[asyncio.Event] = set()
        self.reading: asyncio.Future[RequestRecord | None] | None = None
        self.is_hinted = False  # a hint will come to this gateway
        self.read_s = 0.0

    def wake(self) -> None:
        """Lets all waiters go on."""
        for event in self.events:
            event.set()

    def end_read(self, done: "asyncio.Future[RequestRecord | None]") -> None:
        """Lets the next waiter read anew after an error."""
        if (done.cancelled() or done.exception() is not None) and self.reading is done:
            self.reading, self.is_hinted = None, False


class Waits:
    """The waiters of a gateway; while `ending`, no new waiter begins."""

    def __init__(self, requests: Requests, reply_to: str) -> None:
        self._requests = requests
        self._reply_to = reply_to
        self._watched: dict[str, dict[EntryAddress, _Watched]] = {}  # models may have requests of the same id
        self._places = SharedLimit()
        self._turns = Turns()
        self.ending = False

    def is_full(self, tenant: str) -> bool:
        """Returns whether a tenant has too many waiters, or the gateway shuts down."""
        return self.ending or not self._places.has_room(MAX_WAITS, tenant)

    def wake(self, request_id: str) -> None:
        """Wakes the waiters of a request."""
        for watched in self._watched.get(request_id, {}).values():
            watched.reading = None
            watched.wake()

    def end_waits(self) -> None:
        """Ends all waits, as the gateway shuts down."""
        self.ending = True
        for requests in self._watched.values():
            for watched in requests.values():
                watched.wake()

    async def wait_for_end(
        self, address: EntryAddress, wait_s: float, check: Callable[[], None], tenant: str
    ) -> RequestRecord | None:
        """Waits until the request ends, at most `wait_s`; returns its record, if any."""
        ends_s = time.monotonic() + wait_s
        with self._waiting(address, tenant) as event:
            record = await self._read(address)
            while record is not None and not record.state.is_terminal and not self.ending:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    break
                await _news(event, left_s)
                record = await self._read(address)
                check()
        return record

    async def changes(
        self, address: EntryAddress, heartbeat_s: float, check: Callable[[], None], tenant: str
    ) -> AsyncIterator[RequestRecord | None]:
        """Yields a request's record at each change and new response, and `None` after `heartbeat_s` without either.

        It ends after the terminal state, when the request is gone, and at a shutdown.
        """
        with self._waiting(address, tenant) as event:
            last: tuple[str, int, int] | None = None
            said_s = time.monotonic()
            record = await self._read(address)
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
                record = await self._read(address)
                check()

    async def _read(self, address: EntryAddress) -> RequestRecord | None:
        """Reads a watched request's record, or waits for another waiter's read; returns in a turn."""
        watched, now_s = self._watched[address.id][address], time.monotonic()
        if watched.reading is None or now_s > watched.read_s + SHARED_S:
            watcher, watched.is_hinted = "" if watched.is_hinted else self._reply_to, True
            watched.reading, watched.read_s = asyncio.ensure_future(self._requests.record(address, watcher)), now_s
            watched.reading.add_done_callback(watched.end_read)
        record = await asyncio.shield(watched.reading)
        await self._turns.start()
        return record

    @contextlib.contextmanager
    def _waiting(self, address: EntryAddress, tenant: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        requests = self._watched.setdefault(address.id, {})
        watched = requests.setdefault(address, _Watched())
        watched.events.add(event)
        try:
            with self._places.place(tenant):
                yield event
        finally:
            watched.events.discard(event)
            if not watched.events:
                del requests[address]
            if not requests:
                del self._watched[address.id]


async def _news(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(REREAD_S, seconds)):
            await event.wait()
    event.clear()
