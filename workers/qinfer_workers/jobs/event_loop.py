"""The one event loop of the bulk worker, where queue, control store and examiners live, for Celery's threads."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

CLOSE_S = 2.0
"""How long each of the last steps may take; `qinfer up` kills the process after 5 seconds."""


class Stopped(Exception):
    """The work was broken off because the process ends; it is to be done by another."""


class TimedOut(Exception):
    """The work took longer than it may, and was broken off."""


class EventLoop:
    """An event loop in a thread of its own; begins with the object, ends with `close`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._beside: list[Future[Any]] = []
        self._stopping = False
        self._begun_s = time.monotonic()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bulk-loop", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many coroutines run for threads."""
        return len(self._running)

    def quiet_s(self) -> float:
        """Returns how long ago the last one began."""
        return time.monotonic() - self._begun_s

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Runs a coroutine on the loop and waits for it; for any thread but the loop's.

        Args:
            work: The coroutine.
            limit_s: How long it may take.

        Raises:
            Stopped: `stop` was called before it ended.
            TimedOut: It took longer. It is cancelled, but not waited for: where the loop itself hangs, that would not
                end (`answers` tells).
        """
        with self._lock:
            if self._stopping:
                work.close()
                raise Stopped
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
            self._begun_s = time.monotonic()
        try:
            return self._result(future, limit_s)
        finally:
            with self._lock:
                self._running.discard(future)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine beside what threads ask for, until `close`: it counts as no task."""
        self._beside.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def answers(self, within_s: float) -> bool:
        """Tells whether the loop does something at all in some seconds, or has been closed."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return True
        return answered.wait(within_s)

    def stop(self) -> None:
        """Breaks off what runs, and takes nothing new but `close`'s; safe in a handler of signals."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def close(self, *last: Coroutine[Any, Any, None]) -> None:
        """Runs what closes the adapters, and ends the loop; gives up on what takes longer than some seconds."""
        for one in self._beside:
            one.cancel()
        for work in last:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(work, self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _result(self, future: "Future[T]", limit_s: float) -> T:
        try:
            return future.result(limit_s)
        except (CancelledError, asyncio.CancelledError):
            raise Stopped from None
        except TimeoutError:
            if not future.cancel():  # it has ended: with a `TimeoutError` of its own, or in this moment
                return future.result()
            raise TimedOut(f"it took more than {limit_s:g} s, and was broken off") from None

    def _cancel(self) -> None:
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for future in running:
            future.cancel()
