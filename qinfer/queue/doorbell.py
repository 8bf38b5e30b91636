"""The doorbell: readers of idle lanes sleep in a long blocking read, and a ring makes them look again.

A new entry wakes a sleeper by itself. Rings, entries of a stream that every process with sleepers reads, announce what
wakes no blocking read: a released entry, and a new stream of a lane.

No ring is lost. A reader sleeps only if its look found nothing, and the bell was armed then and has not rung since. A
ring unblocks the read repeatedly, finally by a new connection, because the read may not have reached Redis yet. A
broken connection rings for every lane. Besides, all sleepers of a process together look `LOOKS_PER_S` times a second.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from qinfer.core.retry import OutageLog
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.queue import keys
from qinfer.queue.connection import pack
from qinfer.queue.entries import Lane
from qinfer.queue.router import Router, load_script

logger = logging.getLogger(__name__)

LOOKS_PER_S = 1.0

SHORTEST_S = 0.5

_BLOCK_S = 5.0
_RETRY_S = 0.5
_PING_EVERY_S = 5.0
_WATCH_EVERY_S = 0.5
_KEPT = 1000
"""If more rings are unread, some may be lost."""
_KEPT_MS = 3_600_000
_PING = pack((b"PING",))
_RING = load_script("lanes/ring")


class Sleeper(Protocol):
    """A reader that may sleep."""

    place: bytes

    def ring(self) -> None:
        """Makes the reader look at its lanes again."""
        ...


class Doorbell:
    """The bell of one process.

    While `is_armed`, the bell hears every ring. Abandoned leases are searched for `stirred_s` after an event.
    """

    def __init__(self, router: Router, monotonic_s: Callable[[], float]) -> None:
        self.is_armed = False
        self.stirred_s = 20.0
        self._alarmed_at_s = float("-inf")
        self._router = router
        self._monotonic_s = monotonic_s
        self._key = keys.doorbell().encode()
        self._slot = keys.slot(self._key)
        self._sleepers: set[Sleeper] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._unrung: set[bytes] = set()
        self._is_closed = False
        self._outage = OutageLog(logger, "doorbell not heard: lanes are polled", "the doorbell is heard again")

    def join(self, sleeper: Sleeper) -> None:
        """Passes rings to a reader."""
        self._sleepers.add(sleeper)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    def remove_sleeper(self, sleeper: Sleeper) -> None:
        """Stops passing rings to a reader."""
        self._sleepers.discard(sleeper)

    def sleep_s(self) -> float:
        """Returns how long a reader may sleep before it looks at its lanes again."""
        share_s = len(self._sleepers) / LOOKS_PER_S
        return max(SHORTEST_S, share_s * random.uniform(0.75, 1.25))  # noqa: S311 - so that they do not look at once

    def ring(self, lane: Lane, _: Any = None) -> None:
        """Rings for a lane without waiting, until Redis has confirmed it."""
        place = place_of(lane)
        if place not in self._unrung:
            self._unrung.add(place)
            asyncio.get_running_loop().call_soon(self._send_ring, place)

    def _send_ring(self, place: bytes) -> None:
        words = (b"EVAL", _RING.text, 1, self._key, place, _KEPT, _KEPT_MS)
        self._unrung.discard(place)  # later events need a ring of their own
        try:
            self._router.send(self._slot, pack(words), partial(self._sent, place))
        except BrokerUnavailable as error:
            self._sent(place, error)

    def _sent(self, place: bytes, reply: Any) -> None:
        if isinstance(reply, QinferError) and not self._is_closed:
            self._unrung.add(place)
            asyncio.get_running_loop().call_later(_RETRY_S, self._send_ring, place)

    def alarm(self) -> None:
        """Rings for all lanes of this process, because a worker is gone or rings may be lost."""
        self._alarmed_at_s = self._monotonic_s()
        for sleeper in list(self._sleepers):
            sleeper.ring()

    def is_stirred(self, at_s: float) -> bool:
        """Tells whether to search a lane with an event at `at_s` for abandoned leases."""
        return self._monotonic_s() < max(at_s, self._alarmed_at_s) + self.stirred_s

    async def close(self) -> None:
        """Stops hearing and ringing."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    async def _listen(self) -> None:
        link = self._router.blocking(self._slot, "qinfer-doorbell", _BLOCK_S)
        read = (b"XREAD", b"COUNT", _KEPT, b"BLOCK", int(_BLOCK_S * 1000), b"STREAMS", self._key)
        try:
            while True:
                try:
                    newest = await link.call(b"XREVRANGE", self._key, b"+", b"-", b"COUNT", 1)
                    last = newest[0][0] if newest else b"0"
                    self.is_armed = True
                    self.alarm()
                    self._outage.over()
                    while True:
                        streams = await link.call(*read, last)
                        if streams:
                            last = self._heard(streams[0][1])
                except QinferError as error:
                    self.is_armed = False
                    self._outage.failed(error.message)
                    self.alarm()
                    await asyncio.sleep(_RETRY_S)
        finally:
            self.is_armed = False
            await link.close()

    def _heard(self, rings: list[tuple[bytes, list[bytes]]]) -> bytes:
        if len(rings) >= _KEPT:
            self.alarm()
        else:
            places = {fields[1] for _, fields in rings}
            for sleeper in [one for one in self._sleepers if one.place in places]:
                sleeper.ring()
        return rings[-1][0]

    async def _watch(self) -> None:
        """Pings nodes to find dead ones: sleepers there get nothing, and a hanging node closes no connection."""
        troubles, ping_at_s = self._router.troubles, self._monotonic_s()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if self._router.troubles != troubles:
                troubles = self._router.troubles
                self.alarm()
            if self._monotonic_s() >= ping_at_s:
                ping_at_s = self._monotonic_s() + _PING_EVERY_S
                for link in self._router.owners().values():
                    if link.is_up:
                        link.send(_PING, lambda _: None)


def place_of(lane: Lane) -> bytes:
    """Returns the common prefix of a version's lanes."""
    return f"{keys.prefix(lane.model, lane.partition)}{lane.version}:".encode()
