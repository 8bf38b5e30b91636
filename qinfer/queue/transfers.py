"""The order of large transfers between this process and Redis or an object store: tenants take turns.

Only `MOST_BYTES` travel at a time, so that another tenant's next value waits only for these. A larger value travels
alone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_BYTES = 64 * 2**20

_Waiting = tuple[int, asyncio.Future[None]]


class Transfers:
    """The transfers of one event loop."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._waiting: dict[str, deque[_Waiting]] = {}
        """Waiting transfers by tenant, next turn first."""

    @asynccontextmanager
    async def turn(self, tenant: str, nbytes: int) -> AsyncIterator[None]:
        """Waits until a tenant may move this many bytes within the block."""
        if self._waiting or not self._fits(nbytes):
            await self._wait(tenant, nbytes)
        else:
            self._bytes += nbytes
        try:
            yield
        finally:
            self._bytes -= nbytes
            self._grant()

    def _fits(self, nbytes: int) -> bool:
        return not self._bytes or self._bytes + nbytes <= self._most_bytes

    async def _wait(self, tenant: str, nbytes: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((nbytes, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was granted meanwhile
                self._bytes -= nbytes
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            tenant, theirs = next(iter(self._waiting.items()))
            nbytes, future = theirs[0]
            if not future.cancelled() and not self._fits(nbytes):
                return
            del self._waiting[tenant]
            theirs.popleft()
            if theirs:
                self._waiting[tenant] = theirs
            if not future.cancelled():
                self._bytes += nbytes
                future.set_result(None)
