"""The bulk worker's event loop, for the coroutines of Celery's threads, and its watchdog.

The watchdog ends a process, to be restarted, if the event loop hangs or threads wait for a dead store. Tasks may be
repeated.
"""

import asyncio
import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from qinfer_workers.jobs.services import JobServices

logger = logging.getLogger("qinfer_workers.jobs")

T = TypeVar("T")

CLOSE_S = 2.0
"""`qinfer up` kills the process after 5 seconds."""


TASKS_AT_ONCE = 8
"""Tasks that a process runs at a time; tasks mostly wait."""

LOOK_EVERY_S = 5.0
ANSWER_S = 30.0
"""The time within which the loop has to answer; it never blocks, but may be late on a busy machine."""
HANGING_S = 600.0
"""A time that is longer than drivers of stores wait, including retries."""
STOP_S = 10.0


class WorkStopped(Exception):
    """The process ends; another has to do the work."""


class TimedOut(Exception):
    """The work was cancelled at its time limit."""


class EventLoop:
    """An event loop in its own thread, from creation to `close`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._beside: list[Future[Any]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="bulk-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Runs a coroutine for another thread.

        At its limit the coroutine is cancelled, but not awaited, since the loop may hang.
        """
        with self._lock:
            if self._stopping:
                work.close()
                raise WorkStopped
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
        try:
            return self._result(future, limit_s)
        finally:
            with self._lock:
                self._running.discard(future)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine until `close`."""
        self._beside.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def answers(self, within_s: float) -> bool:
        """Returns whether the loop responds, or is closed."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return True
        return answered.wait(within_s)

    def stop(self) -> None:
        """Cancels all work; safe in signal handlers."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def close(self, *last: Coroutine[Any, Any, None]) -> None:
        """Runs the last coroutines, then ends the loop."""
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
            raise WorkStopped from None
        except TimeoutError:
            if not future.cancel():  # its own `TimeoutError`, or ended just now
                return future.result()
            raise TimedOut(f"it took more than {limit_s:g} s, and was cancelled") from None

    def _cancel(self) -> None:
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for future in running:
            future.cancel()


class Watchdog:
    """Watches a bulk worker, in a thread that lives as long as the process."""

    def __init__(self, loop: EventLoop, services: JobServices, stop: Callable[[], None]) -> None:
        self._loop = loop
        self._services = services
        self._stop = stop
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch_loop, name="bulk-watchdog", daemon=True).start()

    def stop_watching(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def problem(self) -> str:
        """Returns why the process has to end."""
        if not self._loop.answers(ANSWER_S):
            return "the event loop hangs"
        if 2 * (hanging := self._services.hanging(HANGING_S)) >= self._services.settings.plan_threads:
            return f"{hanging} threads wait for stores that never answer"
        return ""

    def _watch_loop(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            if (why := self.problem()) and not self._ended.is_set():
                threading.Thread(target=self._report, args=(why,), daemon=True).start()  # writing to stderr may hang
                self._stop()
                if not self._ended.wait(STOP_S):
                    os._exit(os.EX_SOFTWARE)
                return

    def _report(self, why: str) -> None:
        logger.critical("bulk worker ends", extra={"reason": why})
        faulthandler.dump_traceback()
