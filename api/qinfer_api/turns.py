"""Fairness between connections: large reads are parsed in slices, and applications start, in turns of the event loop.

One read may hold seconds of work, and a hundred clients may begin requests at once. Connections that have just sent go
first, so that uploads do not wait behind floods.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SMALL_BYTES = 8192

SLICE_BYTES = 2048

TURN_S = 0.002
"""The time that all large reads and starts of a port may take together before the event loop serves others."""

START_S = 0.001
"""The part of a turn that the start of an application costs, or its end without an answer."""

LEAST_S = 0.0002
"""The part of a turn for connections that have waited."""


class Turns:
    """Schedules the large reads of a port, and the starts of its applications."""

    def __init__(self) -> None:
        self._fresh: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._ends_s = 0.0

    def may_read(self) -> bool:
        """Returns whether large reads may be parsed."""
        now_s = time.monotonic()
        if not self._is_running:
            self._start_turn(now_s)
        return now_s < self._ends_s

    def may_start(self) -> bool:
        """Returns whether an application may start; its cost is taken from the turn."""
        if not self.may_read():
            return False
        self._ends_s -= START_S
        return True

    async def start(self) -> None:
        """Waits until a task may go on, as an application may start."""
        while not self.may_start():
            turn = asyncio.Event()
            self.wait(turn.set, is_fresh=False)
            await turn.wait()

    def wait(self, go_on: Callable[[], None], *, is_fresh: bool) -> None:
        """Calls `go_on` in a later turn; `is_fresh` = nothing is parsed."""
        (self._fresh if is_fresh else self._others).append(go_on)

    def _start_turn(self, now_s: float) -> None:
        self._is_running, self._ends_s = True, now_s + TURN_S
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_running = False
        if not (self._fresh or self._others):
            return
        self._start_turn(time.monotonic())
        self._run_waiting(self._fresh)
        if self._others:
            self._ends_s = max(self._ends_s, time.monotonic() + LEAST_S)
            self._run_waiting(self._others)

    def _run_waiting(self, waiting: deque[Callable[[], None]]) -> None:
        for _ in range(len(waiting)):
            if time.monotonic() >= self._ends_s:
                return
            waiting.popleft()()
