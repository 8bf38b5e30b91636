"""Which shards a worker holds: any number that are fine, or one suspect alone.

A suspect is a shard whose worker died. If it is the reason, it will take this one down as well; what was held beside it
would count an execution that it is not to blame for, and in the end be given up with it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from qinfer.queue.base import Lease


class HeldShard:
    """A shard in this worker's hands, whose lease is renewed (`leases.Held`).

    Args:
        lease: The lease on its entry.
        deadline_s: Until when it is renewed, in the broker's time; moved on as long as it makes progress.

    Attributes:
        lost: The lease is lost: somebody else runs it, or nobody wants it.
        on_lost: Called when that happens.
    """

    def __init__(self, lease: Lease, deadline_s: float) -> None:
        self.lease = lease
        self.deadline_s = deadline_s
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None

    def lose(self) -> None:
        """Takes note that the lease is lost."""
        self.lost = True
        self.on_lost()


class Hands:
    """See the module docstring. Used on the event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._alone = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    async def ready(self) -> None:
        """Waits until no suspect is held or waited for."""
        async with self._alone:
            return

    def take(self, *, is_suspect: bool = False) -> bool:
        """Takes a shard in hand; false = not beside a suspect that came meanwhile."""
        if self._alone.locked() and not is_suspect:
            return False
        self._count += 1
        self._empty.clear()
        return True

    def put(self) -> None:
        """Takes note that a shard is not in hand any more."""
        self._count -= 1
        if not self._count:
            self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Waits until nothing is in hand, and lets nothing be fetched until the end."""
        async with self._alone:
            await self._empty.wait()
            yield
            await self._empty.wait()
