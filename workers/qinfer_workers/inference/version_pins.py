"""Pins model versions that a worker needs, so that they stay loaded when their version policy drops them.

A sequence stays on the version that it began with, an ensemble on those that it was loaded with.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from qinfer.core.clock import ServerClock
from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError
from qinfer.models.pins import Pin
from qinfer.models.store import ControlStore
from qinfer_workers.inference.models import Key

logger = logging.getLogger(__name__)

PIN_EVERY_S = 20.0

_PIN_TTL_S = 60.0


class VersionPins:
    """Keeps a worker's pins for one reason; `versions` returns versions → the hash to execute (empty = any)."""

    def __init__(
        self,
        store: ControlStore,
        clock: ServerClock,
        worker_id: str,
        reason: str,
        versions: Callable[[], Mapping[Key, str]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._holder = worker_id
        self._reason = reason
        self._versions = versions
        self._pinned: set[Key] = set()
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    def changed(self) -> None:
        """Triggers a write."""
        self._changed.set()

    async def run(self) -> None:
        """Writes the pins until cancelled."""
        outage = OutageLog(logger, f"pins of {self._reason} not renewed", f"pins of {self._reason} are renewed again")
        while True:
            self._changed.clear()
            try:
                await self.write()
                outage.over()
            except QinferError as error:
                outage.failed(error.message)
            try:
                async with asyncio.timeout(PIN_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def write(self) -> None:
        """Writes needed pins, removes others, wakes readers."""
        async with self._writing:
            versions = self._versions()
            is_news = versions.keys() != self._pinned
            for key, content_hash in versions.items():
                self._pinned.add(key)
                await self._put(key, content_hash, _PIN_TTL_S)
            for key in self._pinned - versions.keys():
                await self._put(key, "", 0.0)
                self._pinned.discard(key)
            if is_news:
                await self._store.wake()

    async def _put(self, key: Key, content_hash: str, ttl_s: float) -> None:
        pin = Pin(
            model=key[0],
            version=key[1],
            content_hash=content_hash,
            reason=self._reason,
            holder=self._holder,
            expires_at=self._clock.now_s() + ttl_s,
        )
        await self._store.put_pin(pin, ttl_s)
