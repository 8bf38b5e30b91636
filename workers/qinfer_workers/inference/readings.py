"""Tensors beside the stream, on their way to a batcher while its fetch loop goes on."""

import asyncio
import time

MOST = 16
"""Where the tensors of so many requests are on their way, no more are read until some have come."""

SLOW_S = 0.25
"""For so long they count as if they were here; a store that takes longer holds up nobody but those who need it."""

STALLED_S = 2.0
"""Where there are `MOST` and none came for so long, requests are fetched that need no tensors to be read."""


class Readings:
    """The tasks that read the tensors of one model version's requests."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[None], tuple[int, float]] = {}
        self._changed_s = 0.0

    def __bool__(self) -> bool:
        """Tells whether anything is on its way."""
        return bool(self._open)

    @property
    def is_full(self) -> bool:
        """Whether no more should be read now."""
        return sum(count for count, _ in self._open.values()) >= MOST

    def add(self, task: "asyncio.Task[None]", count: int) -> None:
        """Takes a task that reads the tensors of `count` requests, and hands them over."""
        self._changed_s = time.monotonic()
        self._open[task] = count, self._changed_s
        task.add_done_callback(self._ended)

    async def room(self, count: int) -> int:
        """Returns how many of `count` requests may be fetched besides; where none may, it waits first, and returns 0.

        Args:
            count: How many there would be room for if nothing were on its way.
        """
        now_s = time.monotonic()
        fresh = [(number, began_s) for number, began_s in self._open.values() if now_s - began_s < SLOW_S]
        left = count - sum(number for number, _ in fresh)
        wait_s = 0.0
        if self.is_full:
            wait_s = self._changed_s + STALLED_S - now_s
        elif left <= 0:
            wait_s = min(began_s for _, began_s in fresh) + SLOW_S - now_s
        if wait_s <= 0:
            return max(left, 1)
        await asyncio.wait(self.tasks(), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return 0

    async def stop(self) -> None:
        """Cancels what has not come; the requests are given back."""
        if tasks := self.tasks():
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def tasks(self) -> "list[asyncio.Task[None]]":
        """Returns the tasks that have not ended."""
        return list(self._open)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._open[task]
        self._changed_s = time.monotonic()
