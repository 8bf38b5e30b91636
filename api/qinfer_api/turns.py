"""Turns of the event loop: a connection that has sent much is read for a moment, then others have their turn.

One read has up to 256 KB, and one look at a socket up to 32 reads; hostile frames of that size take seconds. So a
connection is read in slices. One that has more when its turn is over is paused, and goes on in a later turn of the
loop, behind those that wait already. Reads of one slice, as plain requests are, ask nothing here.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S = 0.002
"""Seconds in one turn of the loop for all connections of a port that have sent much."""

LEAST_S = 0.0002
"""Seconds for one of them where others have used these up: as long as cheap bytes need, an upload's."""


class Turns:
    """Says how long connections may be read that have sent much; one for all connections of a port."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._ends_s = 0.0

    def begin(self) -> float:
        """Returns the monotonic time at which a connection's turn ends."""
        now_s = time.monotonic()
        if not self._is_running:
            self._is_running = True
            self._ends_s = now_s + TURN_S
            asyncio.get_running_loop().call_soon(self._next)
        return max(self._ends_s, now_s + LEAST_S)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Calls a connection whose turn is over in a later turn of the loop."""
        self._waiting.append(go_on)

    def _next(self) -> None:
        self._is_running = False
        if not self._waiting:
            return
        ends_s = self.begin()
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()
            if time.monotonic() >= ends_s:
                return
