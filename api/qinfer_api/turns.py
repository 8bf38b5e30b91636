"""Turns of the event loop: connections that have sent much are read for a moment, then others have their turn.

One read has up to 256 KB, and one look at a socket up to 32 reads; hostile frames of that size take seconds. So a
connection is read in slices. One that has more when the turn is over is paused, and goes on in a later turn of the
loop. Connections that have just sent go first: cheap bytes, as an upload's, do not wait behind floods. Small reads, as
plain requests are, ask nothing here.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SMALL_BYTES = 8192
"""A read of so many bytes is small."""

SLICE_BYTES = 2048
"""So much of a large read is parsed between two looks at the time."""

TURN_S = 0.004
"""Seconds in one turn of the loop for all connections of a port that have sent much."""

LEAST_S = 0.0002
"""Seconds of those for one that waited."""


class Turns:
    """Says when connections may be read that have sent much; one for all connections of a port."""

    def __init__(self) -> None:
        self._fresh: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._ends_s = 0.0

    def may_read(self) -> bool:
        """Tells whether a connection may be read that has sent much."""
        now_s = time.monotonic()
        if not self._is_running:
            self._begin(now_s)
        return now_s < self._ends_s

    def wait(self, go_on: Callable[[], None], *, is_fresh: bool) -> None:
        """Calls a connection in a later turn of the loop.

        Args:
            go_on: Reads on.
            is_fresh: Nothing of what it sent was read yet.
        """
        (self._fresh if is_fresh else self._others).append(go_on)

    def _begin(self, now_s: float) -> None:
        self._is_running, self._ends_s = True, now_s + TURN_S
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_running = False
        if not (self._fresh or self._others):
            return
        self._begin(time.monotonic())
        self._serve(self._fresh)
        if self._others:
            self._ends_s = max(self._ends_s, time.monotonic() + LEAST_S)
            self._serve(self._others)

    def _serve(self, waiting: deque[Callable[[], None]]) -> None:
        for _ in range(len(waiting)):
            if time.monotonic() >= self._ends_s:
                return
            waiting.popleft()()
