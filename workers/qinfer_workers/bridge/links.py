"""Threads that hold a connection to another queue: `Consumer` takes messages from a source, `LinkPublisher` publishes.

Only the thread uses its connection. A message is unacknowledged until `done` (accepted, or its dead letter confirmed),
and counts against the source's prefetch, the only bound on messages in hand. Unconfirmed messages are published again
over the next connection: one may arrive twice, none is lost.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from qinfer.bridge.reports import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import QinferError
from qinfer.models.catalog import ServedVersion
from qinfer_workers.bridge.messages import (
    MessageRefused,
    MessageSink,
    MessageSource,
    Outgoing,
    Receipt,
    Refused,
    SettledMessages,
    SourceMessage,
)
from qinfer_workers.bridge.reading import Reader, Work

logger = logging.getLogger(__name__)

_MAX_REASON = 500

L = TypeVar("L", MessageSource, MessageSink)


class LinkThread(ABC, Generic[L]):
    """Holds one connection, and replaces it when it breaks."""

    def __init__(self, route: str, connection: str, outage: str, tally: RouteTally) -> None:
        self._route = route
        self._connection = connection
        self._tally = tally
        self._link: L | None = None
        self._stopping = threading.Event()
        self._outage = OutageLog(logger, outage, remind_s=REMIND_S, route=route, connection=connection)
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._run_links, name=f"bridge-{route}-{connection}", daemon=True)
        tally.connected[connection] = False

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def stop(self) -> None:
        """Ends when all work is done; for any thread."""
        self._stopping.set()
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; returns whether it came in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _open_link(self) -> L:
        """Opens a connection."""

    @abstractmethod
    def _use_link(self, link: L) -> None:
        """Uses a connection until the end, or an exception."""

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set()

    def _works(self) -> None:
        self._backoff.reset()
        self._outage.over()

    def _connected(self, *, is_up: bool) -> None:
        self._tally.connected[self._connection] = is_up

    def _wake(self) -> None:
        if (link := self._link) is not None:
            link.wake()

    def _run_links(self) -> None:
        while not self._is_over:
            try:
                link = self._open_link()
            except Exception as error:  # noqa: BLE001 - the boundary to kombu, whose transports raise what they like
                self._log_failure(error)
                self._pause()
                continue
            self._link = link
            self._connected(is_up=True)
            try:
                self._use_link(link)
            except Exception as error:  # noqa: BLE001 - the same
                self._log_failure(error)
            finally:
                self._link = None
                self._connected(is_up=False)
                link.close()
            self._pause()

    def _log_failure(self, error: Exception) -> None:
        self._outage.failed(f"{type(error).__name__}: {error}"[:_MAX_REASON])
        logger.debug("connection lost", exc_info=error, extra={"route": self._route})

    def _pause(self) -> None:
        if not self._is_over:
            self._stopping.wait(self._backoff.next_s())


_RECEIVE_S = 1.0
_HELD_S = 0.5
_LAST_S = 0.02


class Consumer(LinkThread[MessageSource]):
    """The consumer of a route; `stop` ends the intake, `finish` the acknowledgements."""

    def __init__(  # noqa: PLR0913 - keywords: what a message passes through
        self,
        *,
        name: str,
        connect: Callable[[int], MessageSource],
        reader: Reader,
        resolve: Callable[[], ServedVersion],
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
        self._held: list[SourceMessage] = []
        self._finished = threading.Event()
        self._no_model = OutageLog(
            logger, "model is not available, messages wait in the source", remind_s=REMIND_S, route=name
        )

    def done(self, receipts: Iterable[Receipt]) -> None:
        """Acknowledges messages; for any thread."""
        self._done.extend(receipts)
        self._wake()

    def finish(self) -> None:
        """Acknowledges finished messages, and ends; for any thread, after `stop`."""
        self._finished.set()

    def _open_link(self) -> MessageSource:
        source = self._connect(self.epoch + 1)
        self.epoch += 1
        logger.info("consuming", extra={"route": self._route})
        return source

    def _use_link(self, link: MessageSource) -> None:
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

    def _acknowledge(self, source: MessageSource) -> None:
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
        try:
            self._reader.set_model(self._resolve())
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
            except Exception:  # one message must not block all others
                logger.exception("a message could not be read", extra={"route": self._route})
                refused.append((message, QinferError("internal error; the bridge's log has more")))
        self._tally.unidentified += sum(not work.is_identified for work in works)
        if works:
            self._accept(works)
        if refused:
            self._refuse(refused)


_SETTLE_S = 1.0


class LinkPublisher(LinkThread[MessageSink]):
    """The publisher of a route to one broker; `stop` settles posted messages first."""

    def __init__(
        self,
        name: str,
        connection: str,
        connect: Callable[[], MessageSink],
        settled: Callable[[SettledMessages], None],
        tally: RouteTally,
    ) -> None:
        super().__init__(name, connection, "predictions can't be published", tally)
        self._connect = connect
        self._settled = settled
        self._inbox: deque[Outgoing] = deque()
        self._unsettled: dict[Outgoing, None] = {}  # in posted order
        self._is_careful = False  # an unsettled message has ended a connection

    def post(self, messages: Sequence[Outgoing]) -> None:
        """Publishes messages in order; for any thread."""
        self._inbox.extend(messages)
        self._wake()

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set() and not self._inbox and not self._unsettled

    def _open_link(self) -> MessageSink:
        return self._connect()

    def _use_link(self, link: MessageSink) -> None:
        try:
            self._send_again(link)
            while not self._is_over:
                if self._inbox:
                    posted = [self._inbox.popleft() for _ in range(len(self._inbox))]
                    self._unsettled.update(dict.fromkeys(posted))
                    link.send(posted)
                if self._report_settled(link.wait_settled(_SETTLE_S)):
                    self._works()
        except MessageRefused:
            self._is_careful = True
            raise

    def _send_again(self, sink: MessageSink) -> None:
        """Publishes one at a time if an unknown message ended a connection."""
        left = list(self._unsettled)
        if not self._is_careful:
            sink.send(left)
            return
        for message in left:
            sink.send([message])
            try:
                while message in self._unsettled:
                    self._report_settled(sink.wait_settled(_SETTLE_S))
            except MessageRefused:
                self._report_settled(SettledMessages(refused=[message]))
                self._backoff.reset()
                raise
        self._is_careful = False

    def _report_settled(self, settled: SettledMessages) -> bool:
        for messages in settled:
            for message in messages:
                self._unsettled.pop(message, None)
        if any(settled):
            self._settled(settled)
        return any(settled)
