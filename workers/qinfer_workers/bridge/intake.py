"""Acceptance of messages into the model's queue, on the loop.

Each batch is one write. If the lane is full or the queue unreachable, messages are retried in order, fewer at a time;
the source stops at its prefetch.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import Enum

from qinfer.bridge.reports import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import Conflict, Overloaded, QinferError, RequestError
from qinfer.queue.entries import Acceptance, AcceptOutcome
from qinfer_workers.bridge.links import Refused
from qinfer_workers.bridge.messages import Receipt
from qinfer_workers.bridge.reading import Work

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256
FEWEST_AT_ONCE = 16
ROOM_S = 1.0

_QUIET_S = 10.0  # each answer frees a little room
_SHORTEST_S = 0.02
_AWAY_S = 0.1
_ID_USED = "the id of the message was used before with another body; give each its own id"


class Disposition(Enum):
    """The outcome for a message: accepted now or before, refused, or to be tried again."""

    NEW = "new"
    KNOWN = "known"
    REFUSE = "refuse"
    FULL = "full"
    AWAY = "away"


def disposition_of(work: Work, result: AcceptOutcome | QinferError) -> tuple[Disposition, QinferError | None]:
    """Returns a message's disposition, and the error behind it."""
    if isinstance(result, AcceptOutcome):
        if result.body_hash == work.acceptance.body_hash:
            return (Disposition.NEW if result.is_new else Disposition.KNOWN), None
        return Disposition.REFUSE, Conflict(_ID_USED)
    if isinstance(result, Overloaded):
        return Disposition.FULL, result
    if isinstance(result, RequestError):
        return Disposition.REFUSE, result
    return Disposition.AWAY, result


class MessageIntake:
    """The acceptance of a route's messages.

    `again` publishes a repeated message's reply again. Messages of earlier connections (`epoch`) are delivered again.
    """

    def __init__(  # noqa: PLR0913 - keywords: what a message passes through
        self,
        *,
        name: str,
        accept: Callable[[Sequence[Acceptance]], Awaitable[Sequence[AcceptOutcome | QinferError]]],
        done: Callable[[Sequence[Receipt]], None],
        refuse: Callable[[Sequence[Refused]], None],
        again: Callable[[], None],
        epoch: Callable[[], int],
        tally: RouteTally,
    ) -> None:
        self._accept = accept
        self._done = done
        self._refuse = refuse
        self._again = again
        self._epoch = epoch
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Work] = deque()
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._is_scheduled = False
        self._stopping = False
        self._size = MOST_AT_ONCE
        self._backoff = Backoff(_AWAY_S, ROOM_S)
        self._full = OutageLog(
            logger,
            "the model's lane is full, messages wait in the source",
            remind_s=REMIND_S,
            quiet_s=_QUIET_S,
            route=name,
        )
        self._away = OutageLog(logger, "Redis is away, messages wait in the source", remind_s=REMIND_S, route=name)

    def add(self, works: Sequence[Work]) -> None:
        """Takes messages; for any thread."""
        self._waiting.extend(works)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._wake_intake)

    def notify_room(self) -> None:
        """Notes that the lane may have room."""
        self._room.set()

    def stop(self) -> None:
        """Ends `run` after the current batch."""
        self._stopping = True
        self._some.set()
        self._room.set()

    async def run(self) -> None:
        """Accepts until `stop`."""
        while not self._stopping:
            if not self._waiting:
                self._some.clear()
                if not self._waiting:
                    await self._some.wait()
                continue
            disposition = await self._accept_batch()
            if disposition is not None and not self._stopping:
                await self._pause(disposition)

    def _wake_intake(self) -> None:
        self._is_scheduled = False
        self._some.set()

    async def _accept_batch(self) -> Disposition | None:
        self._room.clear()
        epoch, batch = self._epoch(), list[Work]()
        while self._waiting and len(batch) < self._size:
            work = self._waiting.popleft()
            if work.message.receipt.epoch == epoch:
                batch.append(work)
        results = await self._accept([work.acceptance for work in batch])
        done: list[Receipt] = []
        refused: list[Refused] = []
        left: list[Work] = []
        repeated = 0
        waits_for: Disposition | None = None
        for work, result in zip(batch, results, strict=True):
            disposition, error = disposition_of(work, result)
            if disposition in (Disposition.FULL, Disposition.AWAY):
                left.append(work)
                waits_for = disposition
                (self._full if disposition is Disposition.FULL else self._away).failed(error.message if error else "")
            elif error is None:
                done.append(work.message.receipt)
                self._tally.accepted += disposition is Disposition.NEW
                repeated += disposition is Disposition.KNOWN
            else:
                refused.append((work.message, error))
        if done:
            self._done(done)
        if repeated:
            self._tally.repeated += repeated
            self._again()
        if refused:
            self._refuse(refused)
        self._waiting.extendleft(reversed(left))
        if waits_for is None:
            self._size = min(self._size * 2, MOST_AT_ONCE)
            self._backoff.reset()
            self._full.over()
            self._away.over()
        return waits_for

    async def _pause(self, disposition: Disposition) -> None:
        began_s = time.monotonic()
        self._size = FEWEST_AT_ONCE
        if disposition is Disposition.FULL:
            await asyncio.sleep(_SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_S):
                    await self._room.wait()
        else:
            await asyncio.sleep(self._backoff.next_s())
        self._tally.paused_s += time.monotonic() - began_s
