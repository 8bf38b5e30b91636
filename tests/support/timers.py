"""A clock whose timers fire when a test moves it."""

import asyncio
from collections.abc import Callable


class Clock:
    """See the module docstring."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[Timer] = []

    def monotonic_s(self) -> float:
        """Returns the present."""
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "Timer":
        """Sets a timer, as an event loop does."""
        timer = Timer(self.now_s + delay_s, callback)
        self.timers.append(timer)
        return timer

    def move_to(self, now_s: float) -> None:
        """Lets time pass."""
        self.now_s = now_s
        due = [t for t in self.timers if t.at_s <= now_s and not t.cancelled]
        self.timers = [t for t in self.timers if t not in due and not t.cancelled]
        for timer in due:
            timer.callback()


class Timer:
    """A timer; see `call_later`."""

    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        """Unsets it."""
        self.cancelled = True


async def settle_loop() -> None:
    """Returns once every coroutine that can go on without a timer has gone on."""
    for _ in range(100):
        await asyncio.sleep(0)
