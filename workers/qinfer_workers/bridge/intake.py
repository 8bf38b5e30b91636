"""On the loop: what was read is accepted into the model's queue, and what became of it is told.

A batch leaves in one write. What finds the lane full, or the queue away, is tried again in order, with less at a time,
when there may be room: after answers were taken, or after a pause. Meanwhile the source's prefetch is used up.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import Enum

from qinfer.bridge.metrics import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import Conflict, Overloaded, QinferError, RequestError
from qinfer.queue.request_records import Acceptance, Accepted
from qinfer_workers.bridge.consumer import Refused
from qinfer_workers.bridge.messages import Receipt
from qinfer_workers.bridge.reading import Work

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256
FEWEST_AT_ONCE = 16
ROOM_S = 1.0
"""After so many seconds a full lane is tried again, whatever happens."""

_SHORTEST_S = 0.02
_AWAY_S = 0.1


class Fate(Enum):
    """What is done with a message."""

    NEW = "new"
    KNOWN = "known"
    REFUSE = "refuse"
    FULL = "full"
    AWAY = "away"


def fate_of(work: Work, result: Accepted | QinferError) -> tuple[Fate, QinferError | None]:
    """Decides what is done with a message, by what became of its acceptance.

    Returns:
        What, and why.
    """
    if isinstance(result, Accepted):
        if result.body_hash == work.acceptance.body_hash:
            return (Fate.NEW if result.is_new else Fate.KNOWN), None
        return Fate.REFUSE, Conflict("the id of the message was used before with another body; give each its own id")
    if isinstance(result, Overloaded):
        return Fate.FULL, result
    if isinstance(result, RequestError):
        return Fate.REFUSE, result
    return Fate.AWAY, result  # the queue's trouble, and not this message's: it goes on when that is over


class Intake:
    """One per route; made on the loop.

    Args:
        name: The route's.
        accept: Accepts requests: `Requests.accept_all`.
        done: Has messages acknowledged.
        refuse: Puts messages with the dead letters.
        again: Called when a message had been accepted before: where its request has ended, that is told again.
        epoch: Returns that of the source's connection: messages of earlier ones come again.
        tally: Counts.
    """

    def __init__(  # noqa: PLR0913 - keywords: what a message passes through
        self,
        *,
        name: str,
        accept: Callable[[Sequence[Acceptance]], Awaitable[Sequence[Accepted | QinferError]]],
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
        self._is_told = False
        self._stopping = False
        self._size = MOST_AT_ONCE
        self._backoff = Backoff(_AWAY_S, ROOM_S)
        self._full = OutageLog(
            logger, "the model's lane is full, messages wait in the source", remind_s=REMIND_S, route=name
        )
        self._away = OutageLog(logger, "the queue is away, messages wait in the source", remind_s=REMIND_S, route=name)

    def add(self, works: Sequence[Work]) -> None:
        """Takes messages that were read; for any thread."""
        self._waiting.extend(works)
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._begin)

    def room(self) -> None:
        """There may be room in the lane; on the loop."""
        self._room.set()

    def stop(self) -> None:
        """Has `run` end after the batch in hand; on the loop."""
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
            fate = await self._accept_batch()
            if fate is not None and not self._stopping:
                await self._pause(fate)

    def _begin(self) -> None:
        self._is_told = False
        self._some.set()

    async def _accept_batch(self) -> Fate | None:
        """Accepts some messages; returns why others are to wait, if they are."""
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
        waits_for: Fate | None = None
        for work, result in zip(batch, results, strict=True):
            fate, error = fate_of(work, result)
            if fate in (Fate.FULL, Fate.AWAY):
                left.append(work)
                waits_for = fate
                self._complain(fate, error)
            elif error is None:
                done.append(work.message.receipt)
                self._tally.accepted += fate is Fate.NEW
                repeated += fate is Fate.KNOWN
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

    def _complain(self, fate: Fate, error: QinferError | None) -> None:
        text = "" if error is None else error.message
        (self._full if fate is Fate.FULL else self._away).failed(text)

    async def _pause(self, fate: Fate) -> None:
        began_s = time.monotonic()
        self._size = FEWEST_AT_ONCE
        if fate is Fate.FULL:
            await asyncio.sleep(_SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_S):
                    await self._room.wait()
        else:
            await asyncio.sleep(self._backoff.next_s())
        self._tally.paused_s += time.monotonic() - began_s
