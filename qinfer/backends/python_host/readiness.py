"""A model's own `is_ready`, which is asked by a socket of its own: the answer says what readiness checks say.

    worker: ReadinessProbe ── one byte a question ──▶ process: answer_readiness ── "+", or "-" and why not ──▶

Triton asks a model at each check, between two executions. The worker asks it once a second, between two executions,
and the checks say what it said last. Requests execute in either case, as in Triton.
https://github.com/triton-inference-server/python_backend/pull/430
"""

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

ANSWER_S = 5.0
"""How long `is_ready` may take: Triton's time."""

EVERY_S = 1.0
"""Seconds between two questions."""

_LATE = f"its is_ready gave no answer for {ANSWER_S:g} s"
_MOST_BYTES = 4096
_YES, _NO = b"+", b"-"


class ReadinessProbe:
    """Asks one process, and never waits for it; for any thread.

    Args:
        asks: The socket to the process.
        is_busy: Tells whether the process executes a batch; then it answers after that.
        reason: Why the model is not ready, until its first answer.
    """

    def __init__(self, asks: socket.socket, is_busy: Callable[[], bool], reason: str = "") -> None:
        self._asks = asks
        self._is_busy = is_busy
        self._reason = reason
        self._asked_s = 0.0
        self._waits = False
        self._lock = threading.Lock()

    def first(self) -> None:
        """Waits for the first answer."""
        self.look()
        self._asks.settimeout(ANSWER_S)
        with suppress(OSError):  # too late, or the process is gone
            self._asks.recv(1, socket.MSG_PEEK)
        self._asks.settimeout(None)
        self.look()

    def look(self) -> str:
        """Takes an answer, if there is one, and asks again when it is time.

        Returns:
            Why the model says that it is not ready; empty = it is.
        """
        with self._lock, suppress(OSError):  # the process is gone, and another one will answer
            now_s = time.monotonic()
            if self._waits:
                self._take(now_s)
            elif now_s - self._asked_s >= EVERY_S:
                self._asks.send(b"?", socket.MSG_DONTWAIT)
                self._waits, self._asked_s = True, now_s
        return self._reason

    def _take(self, now_s: float) -> None:
        try:
            answer = self._asks.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if self._is_busy():
                self._asked_s = now_s
            elif now_s - self._asked_s >= ANSWER_S:
                self._reason = _LATE
            return
        if answer:
            self._waits = False
            self._reason = answer[1:].decode(errors="replace")


def answer_readiness(
    asks: socket.socket, is_ready: Callable[[], object], turn: threading.Lock, told: Callable[[BaseException], str]
) -> None:
    """Answers until the worker is gone; the program of a thread of the model's process.

    Args:
        asks: The socket to the worker.
        is_ready: The model's method, which may be a coroutine function.
        turn: Held while the model executes.
        told: Logs an exception of the model's; returns what may be shown of it.
    """
    seen, shown = "", ""
    with suppress(OSError):
        while asks.recv(1):
            reason = ""
            try:
                with turn:
                    answer = is_ready()
                    if inspect.iscoroutine(answer):
                        answer = asyncio.run(answer)
                if not isinstance(answer, bool):
                    reason = f"its is_ready returned a {type(answer).__name__}, which is no bool"
                elif not answer:
                    reason = "its is_ready returned False"
            except BaseException as error:  # noqa: BLE001  the boundary to the model's code
                if repr(error) != seen:
                    seen, shown = repr(error), told(error)
                reason = shown
            asks.send((_NO + reason.encode()[: _MOST_BYTES - 1]) if reason else _YES)
