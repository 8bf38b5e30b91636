"""Chooses the lanes in which to look for entries of dead workers.

A worker watches the lanes from which it has fetched, and all lanes after a broken connection or a missing heartbeat; it
watches quiet lanes in turns.
"""

import time
from collections.abc import Mapping
from typing import TypeVar

from qinfer.core.settings import WorkerSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.models import Key
from qinfer_workers.inference.serving import Serving

T = TypeVar("T", bound=Serving)

_LOOKS_PER_S = 1.0

_SILENT_BEATS = 3

_LEASES = 2.5


class Lookout:
    """Chooses the lanes of one worker."""

    def __init__(self, queue: Queue, store: ControlStore, settings: WorkerSettings, worker_id: str) -> None:
        self._queue = queue
        self._store = store
        self._settings = settings
        self._id = worker_id
        self._beats: dict[str, tuple[float, float]] = {}
        """Worker → its last heartbeat, and the time at which this heartbeat was first seen."""
        self._silent: set[str] = set()
        self._turn = 0
        queue.doorbell.stirred_s = _LEASES * settings.lease_s
        queue.doorbell.alarm()

    async def chosen(self, servings: Mapping[Key, T]) -> list[tuple[Key, T]]:
        """Returns servings whose lanes to look at now."""
        if await self._is_one_missing():
            self._queue.doorbell.alarm()
        every = list(servings.items())
        count = max(1, round(_LOOKS_PER_S * self._settings.lease_s / 2))
        first, self._turn = self._turn, (self._turn + count) % max(len(every), 1)
        turns = {every[(first + number) % len(every)][0] for number in range(min(count, len(every)))}
        return [
            (key, serving)
            for key, serving in every
            if key in turns or not serving.is_settled or self._queue.is_stirred(serving.lanes)
        ]

    async def _is_one_missing(self) -> bool:
        try:
            beats = await self._store.beats()
        except BrokerUnavailable:
            return True
        now_s, before = time.monotonic(), self._beats
        self._beats = {
            worker: before[worker] if worker in before and before[worker][0] == at else (at, now_s)
            for worker, at in beats.items()
            if worker != self._id
        }
        silent_s = _SILENT_BEATS * self._settings.heartbeat_every_s
        silent = {worker for worker, (_, since_s) in self._beats.items() if now_s - since_s >= silent_s}
        is_news = not silent <= self._silent or not before.keys() <= self._beats.keys()
        self._silent = silent
        return is_news
