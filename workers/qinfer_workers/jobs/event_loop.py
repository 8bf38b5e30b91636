"""The one event loop of the bulk worker, where queue, control store and examiners live, and the process' watchdog.

Celery's threads run coroutines on the loop. The watchdog notices when the process can't do its work any more, and ends
it: whoever supervises it starts it again. These must not go unseen, for then jobs would wait for ever: an event loop
that hangs, threads that a store never answers, a beat that died, and a Celery that takes no tasks, such as one whose
own loop waits for a connection. With beat within, there is a sweep every few seconds; where beat runs elsewhere others
may take them all, and only tasks that wait and are not taken tell. Tasks may be repeated, so that an end is no harm.
"""

import asyncio
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from qinfer.errors import QinferError
from qinfer_workers.jobs.services import JobServices

logger = logging.getLogger("qinfer_workers.jobs")

T = TypeVar("T")

CLOSE_S = 2.0
"""How long each of the last steps may take; `qinfer up` kills the process after 5 seconds."""


TASKS_AT_ONCE = 8
"""They wait for stores and Redis most of the time."""

LOOK_EVERY_S = 5.0
ANSWER_S = 30.0
"""So long the event loop may do nothing; it never blocks, and is merely late where the machine is busy."""
HANGING_S = 600.0
"""Beyond what drivers of stores wait for an answer, their repetitions included."""
STOP_S = 10.0
"""How long the process gets to stop in order."""

WAITING_LOOKS = 12
"""So many times in a row tasks must be seen waiting: one may be about to be taken, and after Redis was away Celery may
take half a minute to try again (kombu's longest pause)."""

_QUIET_SWEEPS = 30
_QUIET_S = 300.0


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
        """Runs a coroutine beside the calls of threads, until `close`; it does not count as a task."""
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


class Watchdog:
    """Watches over a bulk worker, in a thread that goes on for as long as the process does.

    Args:
        loop: Where its tasks run.
        services: Its threads.
        stop: Has it stop in order, with an exit code that is no success; for any thread.
        waiting: Returns how many tasks wait.
        beat: The thread of beat; `None` = it runs in another process. Where it runs here, there must be tasks to take.
    """

    def __init__(
        self,
        loop: EventLoop,
        services: JobServices,
        stop: Callable[[], None],
        waiting: Callable[[], int],
        beat: threading.Thread | None = None,
    ) -> None:
        self._loop = loop
        self._services = services
        self._stop = stop
        self._waiting = waiting
        self._beat = beat
        self._looks = 0  # in a row, at which it was quiet and tasks waited
        self._ended = threading.Event()

    def start(self) -> None:
        """Begins."""
        threading.Thread(target=self._run, name="bulk-watchdog", daemon=True).start()

    def end(self) -> None:
        """Looks no more: the process stops."""
        self._ended.set()

    def problem(self) -> str:
        """Says why the process can't go on; empty = it can."""
        settings = self._services.settings
        if not self._loop.answers(ANSWER_S):
            return "the event loop hangs"
        if 2 * (hanging := self._services.hanging(HANGING_S)) >= settings.plan_threads:
            return f"{hanging} threads wait for stores that never answer"
        if (
            self._beat is not None and not self._beat.is_alive()
        ):  # without sweeps nobody would notice jobs that are stuck
            return "beat has died"
        return self._deaf()

    def _deaf(self) -> str:
        """Says why it seems that Celery takes no tasks; empty = it does."""
        every_s = self._services.settings.sweep_every_s
        quiet_s = self._loop.quiet_s()
        if self._loop.running >= TASKS_AT_ONCE or quiet_s <= max(_QUIET_S, _QUIET_SWEEPS * every_s):
            self._looks = 0
            return ""
        if self._beat is not None:
            return f"no task has come for {quiet_s:.0f} s, and there should be a sweep every {every_s:g}"
        try:
            waiting = self._waiting()
        except QinferError:
            waiting = 0  # it can't be told
        self._looks = self._looks + 1 if waiting else 0
        return f"no task has come for {quiet_s:.0f} s, and {waiting} wait" if self._looks >= WAITING_LOOKS else ""

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            if (why := self.problem()) and not self._ended.is_set():
                threading.Thread(target=self._report, args=(why,), daemon=True).start()  # stderr may be what hangs
                self._stop()
                if not self._ended.wait(STOP_S):
                    os._exit(os.EX_SOFTWARE)
                return

    def _report(self, why: str) -> None:
        logger.critical("bulk worker ends", extra={"reason": why})
        faulthandler.dump_traceback()
