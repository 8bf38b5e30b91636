"""Pins of the model versions that a worker's ensembles run: they stay loaded though their version policy drops them.

An ensemble goes on with the versions that it was loaded with until it is loaded again, and a request with those that it
began with.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from qinfer.core.clock import ServerClock
from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError
from qinfer.models.pins import Pin
from qinfer.models.store import ControlStore

logger = logging.getLogger(__name__)

PIN_REASON = "ensembles"
"""The reason of these pins."""

PIN_EVERY_S = 20.0
"""The pause between two renewals."""

_PIN_TTL_S = 60.0


class StepPins:
    """See the module docstring.

    Args:
        store: Where pins are kept.
        clock: The broker's time.
        worker_id: Their holder.
        versions: Returns the (model, version) of every step that present and further requests run.
    """

    def __init__(
        self,
        store: ControlStore,
        clock: ServerClock,
        worker_id: str,
        versions: Callable[[], Collection[tuple[str, int]]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._holder = worker_id
        self._versions = versions
        self._pinned: set[tuple[str, int]] = set()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Has the pins written at once: other versions may be run from now on."""
        self._changed.set()

    async def run(self) -> None:
        """Writes them until cancelled."""
        outage = OutageLog(logger, "pins of ensembles not renewed", "pins of ensembles are renewed again")
        while True:
            self._changed.clear()
            try:
                await self._write()
                outage.over()
            except QinferError as error:
                outage.failed(error.message)
            try:
                async with asyncio.timeout(PIN_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _write(self) -> None:
        versions = set(self._versions())
        for model, version in versions:
            await self._put(model, version, _PIN_TTL_S)
        self._pinned |= versions
        if gone := self._pinned - versions:
            for model, version in gone:
                await self._put(model, version, 0.0)
                self._pinned.discard((model, version))
            await self._store.wake()

    async def _put(self, model: str, version: int, ttl_s: float) -> None:
        expires_at = self._clock.now_s() + ttl_s
        pin = Pin(model=model, version=version, reason=PIN_REASON, holder=self._holder, expires_at=expires_at)
        await self._store.put_pin(pin, ttl_s)
