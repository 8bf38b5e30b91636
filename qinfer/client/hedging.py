"""Hedging: a late request is sent a second time, and the first answer counts; the slower request is cancelled.

It shortens the slowest answers, such as those of a gateway that hangs (Dean & Barroso, "The Tail at Scale", 2013). Only
requests that the server executes at most once are hedged: reads, and submissions, which have an id or a key. The second
request goes to another gateway, if there are several, and needs a token of the retry budget.
"""

import asyncio
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal

import httpx

from qinfer.client.connection import Pool
from qinfer.client.steps import Outcome, Policy, Send
from qinfer.errors import InvalidRequest

HedgeAfter = float | Literal["p95"] | None
"""Seconds after which a request is late; `p95` = the client's recent 95th percentile; `None` = never."""

LEAST_LATENCIES = 20
_LATEST = 200
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class Hedging:
    """Decides when and where a request is sent a second time; thread-safe."""

    def __init__(self, after: float | Literal["p95"], policy: Policy) -> None:
        is_number = isinstance(after, int | float) and not isinstance(after, bool)
        if after != "p95" and not (is_number and 0 < after < math.inf):
            raise InvalidRequest(f"hedge_after is {after!r}; make it a number of seconds > 0, 'p95' or None")
        self._after = after
        self._policy = policy
        self._latencies: dict[str, deque[float]] = {}

    def now_s(self) -> float:
        """Returns the monotonic time."""
        return self._policy.clock.monotonic_s()

    def after_s(self, send: Send) -> float | None:
        """Returns the seconds after which a request is sent a second time."""
        after_s = self._p95(send.method) if self._after == "p95" else self._after
        if not send.hedges or after_s is None or after_s + send.hold_s >= send.timeout_s:
            return None
        return after_s + send.hold_s

    def second(self, send: Send) -> Send | None:
        """Returns the second request; `None` without a token of the retry budget."""
        if self._policy.budget.take(self.now_s(), 0.0) is None:
            return None
        return send._replace(base=self._policy.gateways.after(send.base).base)

    def record_latency(self, send: Send, outcome: Outcome, began_s: float) -> None:
        """Records an answer's latency, unless the gateway held it back."""
        if send.hedges and not send.hold_s and is_answer(outcome):
            self._latencies.setdefault(send.method, deque(maxlen=_LATEST)).append(self.now_s() - began_s)

    def _p95(self, method: str) -> float | None:
        # another thread may add to it
        latest = sorted(self._latencies.get(method, deque()).copy())
        return latest[math.ceil(0.95 * len(latest)) - 1] if len(latest) >= LEAST_LATENCIES else None


def is_answer(outcome: Outcome | BaseException) -> bool:
    """Returns whether an outcome ends the race: another gateway would not answer better."""
    return isinstance(outcome, httpx.Response) and outcome.status_code < 500 and outcome.status_code != 429


class HedgedTasks:
    """The hedging of the asynchronous client; `transmit` sends one request over a connection."""

    def __init__(
        self,
        hedging: Hedging,
        pool: Pool[httpx.AsyncClient],
        transmit: Callable[[httpx.AsyncClient, Send], Awaitable[Outcome]],
    ) -> None:
        self._hedging, self._pool, self._transmit = hedging, pool, transmit

    async def exchange(self, send: Send) -> Outcome:
        """Returns the first answer, or without one the first request's outcome."""
        began_s, after_s = self._hedging.now_s(), self._hedging.after_s(send)
        outcome = await (self._attempt(send) if after_s is None else self._race(send, after_s))
        self._hedging.record_latency(send, outcome, began_s)
        return outcome

    async def _attempt(self, send: Send) -> Outcome:
        with self._pool.borrow() as http:
            return await self._transmit(http, send)

    async def _race(self, send: Send, after_s: float) -> Outcome:
        # a task group would wrap an error in an exception group
        tasks = [asyncio.ensure_future(self._attempt(send))]
        try:
            done, running = await asyncio.wait(tasks, timeout=after_s)
            if running and (second := self._hedging.second(send)):
                tasks.append(asyncio.ensure_future(self._attempt(second)))
                running.add(tasks[1])
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if answers := [one for one in tasks if one in done and is_answer(one.result())]:
                    return answers[0].result()
            return tasks[0].result()
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.wait(tasks)


class HedgedThreads:
    """The hedging of the blocking client; `transmit` sends one request with httpx's extensions."""

    def __init__(
        self,
        hedging: Hedging,
        pool: Pool[httpx.Client],
        transmit: Callable[[httpx.Client, Send, Mapping[str, Any]], Outcome],
    ) -> None:
        self._hedging, self._pool, self._transmit = hedging, pool, transmit
        self._connections: dict[httpx.Client, Any] = {}

    def exchange(self, send: Send) -> Outcome:
        """Returns the first answer, or without one the first request's outcome."""
        began_s, after_s = self._hedging.now_s(), self._hedging.after_s(send)
        first = Attempt(self._connections)
        outcome = self._run(send, first) if after_s is None else self._race(send, after_s)
        self._hedging.record_latency(send, outcome, began_s)
        return outcome

    def _run(self, send: Send, attempt: "Attempt") -> Outcome:
        with self._pool.borrow() as http, attempt.using(http) as extensions:
            return self._transmit(http, send, extensions)

    def _race(self, send: Send, after_s: float) -> Outcome:
        outcomes: SimpleQueue[tuple[int, Outcome | BaseException]] = SimpleQueue()
        attempts: list[Attempt] = []

        def run(number: int, request: Send) -> None:
            try:
                outcomes.put((number, self._run(request, attempts[number])))
            except BaseException as error:  # noqa: BLE001  # raised again by `_first`
                outcomes.put((number, error))

        def start(request: Send) -> None:
            attempts.append(Attempt(self._connections))
            Thread(target=run, args=(len(attempts) - 1, request), name="qinfer-hedge", daemon=True).start()

        start(send)
        try:
            try:
                return _raised(outcomes.get(timeout=after_s)[1])
            except Empty:
                if second := self._hedging.second(send):
                    start(second)
            found = dict([outcomes.get()])
            while len(found) < len(attempts) and not any(map(is_answer, found.values())):
                found.update([outcomes.get()])
            return _raised(next(filter(is_answer, found.values()), found.get(0)))
        finally:
            for attempt in attempts:
                attempt.cancel()


class Attempt:
    """A request of a blocking client, which another thread cancels by shutting its connection down.

    `connections` maps HTTP clients to their last opened connection.
    """

    def __init__(self, connections: dict[httpx.Client, Any]) -> None:
        self._connections = connections
        self._http: httpx.Client | None = None
        self._is_cancelled = False
        self._lock = Lock()

    @contextmanager
    def using(self, http: httpx.Client) -> Iterator[dict[str, Any]]:
        """Provides the extensions for a request, which can be cancelled during the block."""

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in _CONNECTED:
                self._connections[http] = info["return_value"]
                if self._is_cancelled:
                    self.cancel()

        with self._lock:
            self._http = http
        try:
            yield {"trace": trace}
        finally:
            with self._lock:
                self._http = None

    def cancel(self) -> None:
        """Cancels the request, unless it has ended and its connection serves another."""
        with self._lock:
            self._is_cancelled = True
            connection = self._connections.get(self._http) if self._http else None
            if connection is not None:
                with suppress(OSError):
                    connection.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _raised(outcome: Outcome | BaseException) -> Outcome:
    if isinstance(outcome, BaseException) and not isinstance(outcome, httpx.RequestError):
        raise outcome
    return outcome
