"""Threads of a low priority, where the system knows one for threads (Linux): bulk work gives way to online requests.

All that bulk jobs do is done in such threads, the model's executions included: were only some of it, a thread of low
priority that holds the interpreter's lock could wait for a core that bulk work of the usual priority keeps.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_NICENESS = 10


def lower() -> None:
    """Lowers the priority of the calling thread, for good: no process may raise it again without a privilege."""
    if sys.platform == "linux":  # elsewhere the id of a thread may be that of a process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class LowThreads:
    """Runs calls in threads of a low priority, as many as there are calls at once; they are kept."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._idle = 0
        self._lock = threading.Lock()

    def run(self, call: Callable[[], None]) -> None:
        """Runs a call, which raises nothing, and waits for its end."""
        with self._lock:
            is_new = not self._idle
            if not is_new:
                self._idle -= 1
        if is_new:
            threading.Thread(target=self._serve, name="bulk", daemon=True).start()
        ended = threading.Event()
        self._calls.put((call, ended))
        ended.wait()

    def _serve(self) -> None:
        lower()
        while True:
            call, ended = self._calls.get()
            call()
            with self._lock:
                self._idle += 1
            ended.set()
            del call, ended
