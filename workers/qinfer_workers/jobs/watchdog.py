"""Notices when the process can't do its work any more, and ends it: whoever supervises it starts it again.

Three things must not go unseen, for then jobs would wait for ever: an event loop that hangs, threads that a store never
answers, and a Celery that takes no tasks, such as one whose own loop waits for a connection. With beat within, there is
a sweep every few seconds; where beat runs elsewhere others may take them all, and only tasks that wait and are not
taken tell. Tasks may be repeated, so that an end is no harm.
"""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable

from qinfer.errors import QinferError
from qinfer_workers.jobs.event_loop import EventLoop
from qinfer_workers.jobs.services import JobServices

logger = logging.getLogger("qinfer_workers.jobs")

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


class Watchdog:
    """Watches over a bulk worker, in a thread that goes on for as long as the process does.

    Args:
        loop: Where its tasks run.
        services: Its threads.
        stop: Has it stop in order, with an exit code that is no success; for any thread.
        waiting: Returns how many tasks wait; `None` = beat runs in this process, so that there must be some to take.
    """

    def __init__(
        self, loop: EventLoop, services: JobServices, stop: Callable[[], None], waiting: Callable[[], int] | None = None
    ) -> None:
        self._loop = loop
        self._services = services
        self._stop = stop
        self._waiting = waiting
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
        return self._deaf()

    def _deaf(self) -> str:
        """Says why it seems that Celery takes no tasks; empty = it does."""
        every_s = self._services.settings.sweep_every_s
        quiet_s = self._loop.quiet_s()
        if self._loop.running >= TASKS_AT_ONCE or quiet_s <= max(_QUIET_S, _QUIET_SWEEPS * every_s):
            self._looks = 0
            return ""
        if self._waiting is None:
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
