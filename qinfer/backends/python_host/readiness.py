"""A model's own `is_ready`, called over a socket of its own, decides the readiness checks.

    worker: ReadinessProbe ── one byte a question ──▶ process: answer_readiness ── "+", or "-" and why not ──▶

It is called between executions, once a second (in Triton at each check); requests wait for `ANSWER_S` at most.
https://github.com/triton-inference-server/python_backend/pull/430
"""

import inspect
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

ANSWER_S = 5.0
"""The time limit of `is_ready`, as in Triton."""

EVERY_S = 1.0
"""Seconds between two questions."""

_LATE = f"its is_ready gave no answer for {ANSWER_S:g} s"
_MOST_BYTES = 4096
_YES, _NO = b"+", b"-"


class ReadinessProbe:
    """Asks one process without waiting."""

    def __init__(self, asks: socket.socket, is_busy: Callable[[], bool], reason: str = "") -> None:
        self._asks = asks
        self._is_busy = is_busy
        self._reason = reason
        self._asked_s = 0.0
        self._waits = False
        self._lock = threading.Lock()

    def first(self) -> None:
        """Waits for the first answer."""
        self.poll_answer()
        self._asks.settimeout(ANSWER_S)
        with suppress(OSError):  # too late
            self._asks.recv(1, socket.MSG_PEEK)
        self._asks.settimeout(None)
        self.poll_answer()

    def poll_answer(self) -> str:
        """Asks again; returns why the model is not ready, or ""."""
        with self._lock, suppress(OSError):
            now_s = time.monotonic()
            if self._waits:
                self._receive_answer(now_s)
            elif now_s - self._asked_s >= EVERY_S:
                self._asks.send(b"?", socket.MSG_DONTWAIT)
                self._waits, self._asked_s = True, now_s
        return self._reason

    def _receive_answer(self, now_s: float) -> None:
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
    """Answers until the worker is gone, in a thread of the model's process.

    `turn` is held while the model executes; `told` logs an exception, and returns its text for clients.
    """
    question, own = None, _Own(is_ready, told)
    with suppress(OSError):
        while asks.recv(1):
            if question is None:
                with turn:
                    question = _Question(own)
                    question.join(ANSWER_S)
            reason = _LATE
            if not question.is_alive():
                reason, question = question.reason, None
            asks.send((_NO + reason.encode()[: _MOST_BYTES - 1]) if reason else _YES)


class _Own:
    """A model's method; repeated exceptions are logged once."""

    def __init__(self, is_ready: Callable[[], object], told: Callable[[BaseException], str]) -> None:
        self._is_ready, self._told = is_ready, told
        self._seen = self._shown = ""

    def reason(self) -> str:
        try:
            answer = self._is_ready()
            if inspect.iscoroutine(answer):
                import asyncio

                answer = asyncio.run(answer)
        except BaseException as error:  # noqa: BLE001  the boundary to the model's code
            if repr(error) != self._seen:
                self._seen, self._shown = repr(error), self._told(error)
            return self._shown
        if not isinstance(answer, bool):
            return f"its is_ready returned a {type(answer).__name__}, not a bool"
        return "" if answer else "its is_ready returned False"


class _Question(threading.Thread):
    """One call of a model's method, which may hang without blocking batches."""

    def __init__(self, own: _Own) -> None:
        super().__init__(name="is_ready", daemon=True)
        self._own = own
        self.reason = ""
        self.start()

    def run(self) -> None:
        self.reason = self._own.reason()
