"""A route's intake: messages are received and read in the source's thread, and accepted into the model's queue.

A message is unacknowledged until `done` (accepted, or its dead letter confirmed), and counts against the source's
prefetch, the only bound on messages in hand. Each batch is one write. If the lane is full or the queue unreachable,
messages are retried in order, fewer at a time; the source stops at its prefetch.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from qinfer.bridge.reports import ACCEPTED, PAUSED_MS, RECEIVED, REPEATED, UNIDENTIFIED, RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import Conflict, Overloaded, QinferError, RequestError
from qinfer.queue.entries import Acceptance, AcceptOutcome
from qinfer_workers.bridge.links import Link
from qinfer_workers.bridge.messages import Receipt, SourceMessage
from qinfer_workers.bridge.reading import Reader, Work
from qinfer_workers.bridge.transports.base import MessageSource

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256
FEWEST_AT_ONCE = 16
ROOM_S = 1.0

_RECEIVE_S = 1.0
_HELD_S = 0.5
_QUIET_S = 10.0  # each answer frees a little room
_SHORTEST_S = 0.02
_AWAY_S = 0.1
_ID_USED = "the id of the message was used before with another body; give each its own id"

Refused = tuple[SourceMessage, QinferError]


class Consumer(Link[MessageSource]):
    """The consumer of a route; `stop` ends the intake, `finish` the acknowledgements.

    `again` publishes a repeated message's reply again.
    """

    def __init__(  # noqa: PLR0913 - keywords: what a message passes through
        self,
        *,
        name: str,
        connect: Callable[[int], MessageSource],
        reader: Reader,
        accept: Callable[[Sequence[Acceptance]], Awaitable[Sequence[AcceptOutcome | QinferError]]],
        refuse: Callable[[Sequence[Refused]], None],
        again: Callable[[], None],
        tally: RouteTally,
    ) -> None:
        super().__init__(name, "source", "source is away", lambda: connect(self._epoch + 1), tally)
        self._epoch = 0
        self._reader = reader
        self._accept = accept
        self._refuse = refuse
        self._again = again
        self._held: list[SourceMessage] = []  # of a model that is not available
        self._waiting: deque[Work] = deque()
        self._done: list[Receipt] = []
        self._some_done = asyncio.Event()
        self._finished = False
        self._size = MOST_AT_ONCE
        self._paused_at_s = self._retry_at_s = 0.0
        self._pauses = Backoff(_AWAY_S, ROOM_S)
        self._no_model = OutageLog(
            logger, "model is not available, messages wait in the source", remind_s=REMIND_S, route=name
        )
        self._full = OutageLog(
            logger,
            "the model's lane is full, messages wait in the source",
            remind_s=REMIND_S,
            quiet_s=_QUIET_S,
            route=name,
        )
        self._away = OutageLog(logger, "Redis is away, messages wait in the source", remind_s=REMIND_S, route=name)

    def done(self, receipts: Iterable[Receipt]) -> None:
        """Acknowledges messages."""
        self._done += receipts
        self._some_done.set()
        self._wake()

    def notify_room(self) -> None:
        """Notes that the lane may have room."""
        if self._waiting:
            self._retry_at_s = min(self._retry_at_s, self._paused_at_s + _SHORTEST_S)
            self._wake()

    def finish(self) -> None:
        """Acknowledges finished messages, and ends `run`; after `stop`."""
        self._finished = True
        self._some_done.set()

    async def _use_link(self, link: MessageSource) -> None:
        self._epoch = link.epoch
        logger.info("consuming", extra={"route": self._route})
        while not self._stopping.is_set():
            works, refused = await self._in_thread(self._receive, link, self._taken_done(link), self._wait_s())
            self._waiting += works
            if refused:
                self._refuse(refused)
            while self._waiting and time.monotonic() >= self._retry_at_s and not self._stopping.is_set():
                await self._accept_batch()
        while self._done or not self._finished:
            self._some_done.clear()
            if done := self._taken_done(link):
                await self._in_thread(link.acknowledge, done)
            elif not self._finished:
                await self._some_done.wait()

    def _connected(self, *, is_up: bool) -> None:
        super()._connected(is_up=is_up)
        self._tally.unacknowledged = 0
        self._held.clear()
        self._waiting.clear()
        self._paused_at_s = self._retry_at_s = 0.0

    def _wait_s(self) -> float:
        wait_s = _HELD_S if self._held else _RECEIVE_S
        return max(min(wait_s, self._retry_at_s - time.monotonic()), _SHORTEST_S) if self._waiting else wait_s

    def _taken_done(self, link: MessageSource) -> list[Receipt]:
        receipts = [receipt for receipt in self._done if receipt.epoch == link.epoch]
        self._done.clear()
        self._tally.unacknowledged -= len(receipts)
        return receipts

    def _receive(self, link: MessageSource, done: Sequence[Receipt], wait_s: float) -> tuple[list[Work], list[Refused]]:
        """Acknowledges, receives and reads messages, in the thread."""
        if done:
            link.acknowledge(done)
        if messages := link.receive(wait_s):
            self._tally.counts[RECEIVED] += len(messages)
            self._tally.unacknowledged += len(messages)
            self._held += messages
            self._works()
        works: list[Work] = []
        refused: list[Refused] = []
        if not self._held:
            return works, refused
        try:
            self._reader.set_model()
        except QinferError as error:
            self._no_model.failed(error.message)
            return works, refused
        self._no_model.over()
        for message in self._held:
            try:
                works.append(self._reader.read(message))
            except QinferError as error:
                refused.append((message, error))
            except Exception:  # one message must not block all others
                logger.exception("a message could not be read", extra={"route": self._route})
                refused.append((message, QinferError("internal error; the bridge's log has more")))
        self._held = []
        self._tally.counts[UNIDENTIFIED] += sum(not work.is_identified for work in works)
        return works, refused

    async def _accept_batch(self) -> None:
        if self._paused_at_s:
            self._tally.counts[PAUSED_MS] += round(1000 * (time.monotonic() - self._paused_at_s))
            self._paused_at_s = 0.0
        batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
        results = await self._accept([work.acceptance for work in batch])
        refused: list[Refused] = []
        left: list[Work] = []
        problem: QinferError | None = None
        repeated = 0
        for work, result in zip(batch, results, strict=True):
            if isinstance(result, AcceptOutcome):
                if result.body_hash == work.acceptance.body_hash:
                    self._done.append(work.message.receipt)
                    self._tally.counts[ACCEPTED] += result.is_new
                    repeated += not result.is_new
                else:
                    refused.append((work.message, Conflict(_ID_USED)))
            elif isinstance(result, RequestError):
                refused.append((work.message, result))
            else:
                left.append(work)
                problem = result
        if repeated:
            self._tally.counts[REPEATED] += repeated
            self._again()
        if refused:
            self._refuse(refused)
        self._waiting.extendleft(reversed(left))
        self._pause(problem)

    def _pause(self, problem: QinferError | None) -> None:
        """Sets when and how many messages are tried next."""
        if problem is None:
            self._size = min(self._size * 2, MOST_AT_ONCE)
            self._pauses.reset()
            self._full.over()
            self._away.over()
            return
        is_full = isinstance(problem, Overloaded)
        (self._full if is_full else self._away).failed(problem.message)
        self._size = FEWEST_AT_ONCE
        self._paused_at_s = time.monotonic()
        self._retry_at_s = self._paused_at_s + (ROOM_S if is_full else self._pauses.next_s())
