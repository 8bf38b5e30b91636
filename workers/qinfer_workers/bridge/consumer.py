"""A thread that takes messages from one source, reads them, and acknowledges those that are taken care of.

    source ──receive──▶ read ──▶ `accept` (the loop)         `done` (any thread) ──▶ acknowledge ──▶ source
                          └────▶ `refuse` (dead letters)

Nobody else touches the connection. Messages and receipts are handed over in batches. A message stays unacknowledged
until its receipt comes by `done`: it is accepted, or its dead letter is confirmed. Where neither happens, the source's
prefetch is used up, and the source sends no more: nothing else bounds what is in hand.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from qinfer.bridge.reports import RouteTally
from qinfer.core.retry import REMIND_S, OutageLog
from qinfer.errors import QinferError
from qinfer.models.catalog import Served
from qinfer_workers.bridge.messages import Delivered, Receipt
from qinfer_workers.bridge.reading import Reader, Work
from qinfer_workers.bridge.transports.base import LinkThread, Source

logger = logging.getLogger(__name__)

Refused = tuple[Delivered, QinferError]

_RECEIVE_S = 1.0
_HELD_S = 0.5
_LAST_S = 0.02


class Consumer(LinkThread[Source]):
    """The consumer of a route; `start`, `stop` when nothing more is to be taken, then `finish` when all is done.

    Args:
        name: The route's.
        connect: Opens the source; gets the epoch of the connection.
        reader: Reads messages.
        resolve: Finds the model version to read them for; safe in any thread.
        accept: Gets what was read.
        refuse: Gets what could not be read, and why.
        tally: Counts.

    Attributes:
        epoch: Of the connection that stands, or stood last.
    """

    def __init__(  # noqa: PLR0913 - keywords: what a message passes through
        self,
        *,
        name: str,
        connect: Callable[[int], Source],
        reader: Reader,
        resolve: Callable[[], Served],
        accept: Callable[[Sequence[Work]], None],
        refuse: Callable[[Sequence[Refused]], None],
        tally: RouteTally,
    ) -> None:
        super().__init__(name, "source", "source is away", tally)
        self.epoch = 0
        self._connect = connect
        self._reader = reader
        self._resolve = resolve
        self._accept = accept
        self._refuse = refuse
        self._done: deque[Receipt] = deque()
        self._held: list[Delivered] = []
        self._finished = threading.Event()
        self._no_model = OutageLog(
            logger, "model is not available, messages wait in the source", remind_s=REMIND_S, route=name
        )

    def done(self, receipts: Iterable[Receipt]) -> None:
        """Acknowledges messages, in the thread; for any thread."""
        self._done.extend(receipts)
        self._wake()

    def finish(self) -> None:
        """Acknowledges what is done, and ends; for any thread, after `stop`, which only ends taking messages."""
        self._finished.set()

    def _open(self) -> Source:
        source = self._connect(self.epoch + 1)
        self.epoch += 1
        logger.info("consuming", extra={"route": self._route})
        return source

    def _serve(self, link: Source) -> None:
        while not self._stopping.is_set():
            self._acknowledge(link)
            messages = link.receive(_HELD_S if self._held else _RECEIVE_S)
            if messages:
                self._tally.received += len(messages)
                self._tally.unacknowledged += len(messages)
                self._held += messages
                self._works()
            if self._held:
                self._read_held()
        while not self._finished.wait(_LAST_S):
            self._acknowledge(link)
        self._acknowledge(link)

    def _connected(self, *, is_up: bool) -> None:
        super()._connected(is_up=is_up)
        self._tally.unacknowledged = 0
        self._held.clear()

    def _acknowledge(self, source: Source) -> None:
        if not self._done:
            return
        receipts = []
        while self._done:
            receipt = self._done.popleft()
            if receipt.epoch == source.epoch:
                receipts.append(receipt)
        source.acknowledge(receipts)
        self._tally.unacknowledged -= len(receipts)

    def _read_held(self) -> None:
        """Reads what was received; where the model is not known, or the route does not fit it, it stays."""
        try:
            self._reader.use(self._resolve())
        except QinferError as error:
            self._no_model.failed(error.message)
            return
        self._no_model.over()
        messages, self._held = self._held, []
        works: list[Work] = []
        refused: list[Refused] = []
        for message in messages:
            try:
                works.append(self._reader.read(message))
            except QinferError as error:
                refused.append((message, error))
            except Exception:  # the boundary: one message must not keep all others from their predictions
                logger.exception("a message could not be read", extra={"route": self._route})
                refused.append((message, QinferError("internal error; the bridge's log has more")))
        self._tally.unidentified += sum(not work.is_identified for work in works)
        if works:
            self._accept(works)
        if refused:
            self._refuse(refused)
