"""A thread that takes messages from one source, reads them, and acknowledges those that are taken care of.

    source ──receive──▶ read ──▶ `accept` (the loop)         `done` (any thread) ──▶ acknowledge ──▶ source
                          └────▶ `refuse` (dead letters)

It is the only one that touches the connection. What it hands over and gets back are batches. A message stays
unacknowledged until somebody says `done`: it is accepted, or its dead letter is confirmed. Where neither comes, the
source's prefetch is used up, and the source sends no more: nothing else bounds what is in hand.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from qinfer.bridge.metrics import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import QinferError
from qinfer.models.catalog import Served
from qinfer_workers.bridge.messages import Delivered, Receipt
from qinfer_workers.bridge.reading import Reader, Work
from qinfer_workers.bridge.transports.base import Source

logger = logging.getLogger(__name__)

Refused = tuple[Delivered, QinferError]

_CONNECTION = "source"
_RECEIVE_S = 1.0
_HELD_S = 0.5
_LAST_S = 0.02


class Consumer:
    """One per route; `start`, then `stop` when nothing more is to be taken, then `finish` when all is done.

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
        self.epoch = 0
        self._name = name
        self._connect = connect
        self._reader = reader
        self._resolve = resolve
        self._accept = accept
        self._refuse = refuse
        self._tally = tally
        self._done: deque[Receipt] = deque()
        self._held: list[Delivered] = []
        self._source: Source | None = None
        tally.connected[_CONNECTION] = False
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._no_source = OutageLog(logger, "source is away", remind_s=REMIND_S, route=name)
        self._no_model = OutageLog(
            logger, "model can't be asked, messages wait in the source", remind_s=REMIND_S, route=name
        )
        self._thread = threading.Thread(target=self._run, name=f"bridge-{name}-source", daemon=True)

    def start(self) -> None:
        """Begins to consume."""
        self._thread.start()

    def done(self, receipts: Iterable[Receipt]) -> None:
        """Has messages acknowledged; for any thread."""
        self._done.extend(receipts)
        if (source := self._source) is not None:
            source.wake()

    def stop(self) -> None:
        """Takes no more messages, and goes on to acknowledge; for any thread."""
        self._stopping.set()
        if (source := self._source) is not None:
            source.wake()

    def finish(self) -> None:
        """Acknowledges what is done, and ends; for any thread, after `stop`."""
        self._finished.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; tells whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                source = self._connect(self.epoch + 1)
            except Exception as error:  # noqa: BLE001 - the boundary to kombu, whose transports raise what they like
                self._no_source.failed(_text(error))
                self._stopping.wait(backoff.next_s())
                continue
            self.epoch += 1
            self._source = source
            self._connected(is_up=True)
            logger.info("consuming", extra={"route": self._name})
            try:
                self._serve(source, backoff)
            except Exception as error:  # the same
                self._no_source.failed(_text(error))
                logger.debug("source lost", exc_info=True)
            finally:
                self._source = None
                self._connected(is_up=False)
                self._held.clear()
                source.close()
            self._stopping.wait(backoff.next_s())

    def _serve(self, source: Source, backoff: Backoff) -> None:
        while not self._stopping.is_set():
            self._acknowledge(source)
            messages = source.receive(_HELD_S if self._held else _RECEIVE_S)
            if messages:
                self._tally.received += len(messages)
                self._tally.unacknowledged += len(messages)
                self._held += messages
                self._no_source.over()
                backoff.reset()
            if self._held:
                self._read_held()
        while not self._finished.wait(_LAST_S):
            self._acknowledge(source)
        self._acknowledge(source)

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
                logger.exception("a message could not be read", extra={"route": self._name})
                refused.append((message, QinferError("internal error; the bridge's log tells more")))
        self._tally.unidentified += sum(not work.is_identified for work in works)
        if works:
            self._accept(works)
        if refused:
            self._refuse(refused)

    def _connected(self, *, is_up: bool) -> None:
        self._tally.connected[_CONNECTION] = is_up
        self._tally.unacknowledged = 0


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
