"""Fairness between connections and between tenants.

Large reads are parsed in slices, and applications start, in turns of the event loop: one read may hold seconds of work,
and a hundred clients may begin requests at once. Connections that have just sent go first, so that uploads do not wait
behind floods.

Of a limit that tenants share, a tenant gets a place while it has fewer places than are free (*dynamic thresholds*:
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998): one greedy tenant gets
half of them, two a third each.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

SMALL_BYTES = 8192

SLICE_BYTES = 2048

TURN_S = 0.001
"""The time that all large reads and starts of a port may take together before the event loop serves others."""

START_S = 0.0005
"""The part of a turn that the start of an application costs, or its end without an answer."""

LEAST_S = 0.0002
"""The part of a turn for connections that have waited, and the time that periodic work has after it."""

MOST_WAITING = 256
"""The callbacks of floods that may wait for a turn; further floods are to be cut."""

T = TypeVar("T")


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
            await self._wait_for_turn(is_fresh=False)

    async def in_turns(self, items: Iterable[T]) -> AsyncIterator[T]:
        """Yields items for periodic work on each, as many in a turn as its time allows, and a few beside floods."""
        ends_s = 0.0
        for item in items:
            if time.monotonic() >= ends_s and not self.may_read():
                await self._wait_for_turn(is_fresh=True)
                ends_s = time.monotonic() + LEAST_S
            yield item

    @property
    def is_awaited(self) -> bool:
        """Whether a callback waits for a turn."""
        return bool(self._fresh or self._others)

    @property
    def is_full(self) -> bool:
        """Whether so many wait, other than those that have just sent, that a flood is to be cut."""
        return len(self._others) >= MOST_WAITING

    def wait(self, go_on: Callable[[], None], *, is_fresh: bool) -> None:
        """Calls `go_on` in a later turn; `is_fresh` = nothing is parsed."""
        (self._fresh if is_fresh else self._others).append(go_on)
        if not self._is_running:
            self._start_turn(time.monotonic())

    async def _wait_for_turn(self, *, is_fresh: bool) -> None:
        turn = asyncio.Event()
        self.wait(turn.set, is_fresh=is_fresh)
        await turn.wait()

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


class SharedLimit:
    """The places in use; for one event loop."""

    def __init__(self) -> None:
        self.taken = 0
        self._by_tenant: Counter[str] = Counter()

    def has_room(self, most: int, tenant: str) -> bool:
        """Returns whether a tenant may take a place; callers without a tenant may take all places."""
        free = most - self.taken
        return free > (self._by_tenant[tenant] if tenant else 0)

    def take_place(self, tenant: str) -> None:
        """Takes a place."""
        self.taken += 1
        self._by_tenant[tenant] += 1

    def free_place(self, tenant: str) -> None:
        """Frees a place of the tenant."""
        self.taken -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @contextlib.contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Takes a place during the block."""
        self.take_place(tenant)
        try:
            yield
        finally:
            self.free_place(tenant)
