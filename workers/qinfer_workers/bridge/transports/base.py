"""The ports to other queues: where messages come from, and where they are published. Each serves one thread.

`amqp` has them for AMQP 0-9-1, `kombu` for every other transport of kombu. A link is one connection: when it breaks,
which shows as any exception but those named here, `LinkThread` opens another one, with a new epoch.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from qinfer.bridge.reports import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer_workers.bridge.messages import Delivered, Outgoing, Receipt

logger = logging.getLogger(__name__)

_MAX_REASON = 500


class MessageRefused(Exception):
    """The broker ended a connection because of one of the messages that were published, without saying which."""


class Source(Protocol):
    """A connection that consumes from one queue, which gets back what is not acknowledged when the connection ends.

    Attributes:
        epoch: Tells this connection's receipts from those of others.
    """

    epoch: int

    def receive(self, timeout_s: float) -> list[Delivered]:
        """Waits for messages, up to `timeout_s` seconds, or until `wake`; acknowledges and beats its heart besides.

        No more are outstanding, received and not acknowledged, than the source's prefetch says.
        """
        ...

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Acknowledges messages of this connection, now or in a later `receive`; drops the receipts of others."""
        ...

    def wake(self) -> None:
        """Ends a `receive` soon; for other threads."""
        ...

    def close(self) -> None:
        """Acknowledges what is left, and closes the connection."""
        ...


class Settled(NamedTuple):
    """The outcomes of published messages.

    Attributes:
        taken: A queue has them.
        refused: The broker could not take them now.
        unroutable: There is no queue where they were to go.
    """

    taken: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()
    unroutable: Sequence[Outgoing] = ()


class Sink(Protocol):
    """A connection that publishes."""

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Publishes messages; does not wait until the broker has confirmed them."""
        ...

    def settle(self, timeout_s: float) -> Settled:
        """Waits for news, up to `timeout_s` seconds, or until `wake`; each message is settled once.

        Raises:
            MessageRefused: See there.
        """
        ...

    def wake(self) -> None:
        """Ends a `settle` soon; for other threads."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


L = TypeVar("L", Source, Sink)


class LinkThread(ABC, Generic[L]):
    """A thread that holds one connection, and opens another one when it breaks; `start`, then `stop`, then `join`.

    Args:
        route: The route's name.
        connection: The connection's name in metrics and logs: `source`, `sink`, `dead_letters`.
        outage: The log line of a connection that can't be had.
        tally: Counts.
    """

    def __init__(self, route: str, connection: str, outage: str, tally: RouteTally) -> None:
        self._route = route
        self._connection = connection
        self._tally = tally
        self._link: L | None = None
        self._stopping = threading.Event()
        self._outage = OutageLog(logger, outage, remind_s=REMIND_S, route=route, connection=connection)
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._run, name=f"bridge-{route}-{connection}", daemon=True)
        tally.connected[connection] = False

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def stop(self) -> None:
        """Ends when everything is taken care of; for any thread."""
        self._stopping.set()
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; tells whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _open(self) -> L:
        """Opens a connection."""

    @abstractmethod
    def _serve(self, link: L) -> None:
        """Uses a connection until the thread is to end, or an exception shows that the connection is broken."""

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set()

    def _works(self) -> None:
        """Notes that the connection is of use."""
        self._backoff.reset()
        self._outage.over()

    def _connected(self, *, is_up: bool) -> None:
        self._tally.connected[self._connection] = is_up

    def _wake(self) -> None:
        if (link := self._link) is not None:
            link.wake()

    def _run(self) -> None:
        while not self._is_over:
            try:
                link = self._open()
            except Exception as error:  # noqa: BLE001 - the boundary to kombu, whose transports raise what they like
                self._failed(error)
                self._pause()
                continue
            self._link = link
            self._connected(is_up=True)
            try:
                self._serve(link)
            except Exception as error:  # noqa: BLE001 - the same
                self._failed(error)
            finally:
                self._link = None
                self._connected(is_up=False)
                link.close()
            self._pause()

    def _failed(self, error: Exception) -> None:
        self._outage.failed(f"{type(error).__name__}: {error}"[:_MAX_REASON])
        logger.debug("connection lost", exc_info=error, extra={"route": self._route})

    def _pause(self) -> None:
        if not self._is_over:
            self._stopping.wait(self._backoff.next_s())
