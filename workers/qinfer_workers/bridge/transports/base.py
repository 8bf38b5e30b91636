"""The ports to other queues, sources and sinks. Each serves one thread.

`amqp` implements them for AMQP 0-9-1, `redis_list` the source for Redis, and `kombu` the rest. A link is one
connection: an exception other than `MessageRefused` shows that it is broken, and a `LinkThread` opens another one, with
a new epoch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qinfer_workers.bridge.messages import Outgoing, Receipt, SourceMessage


class MessageRefused(Exception):
    """A published message ended the connection; which one is unknown."""


class MessageSource(Protocol):
    """Consumes one queue; unacknowledged messages return to it at the end."""

    epoch: int

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Waits for messages or `wake`; also acknowledges, and sends heartbeats.

        At most the source's prefetch is unacknowledged.
        """
        ...

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Acknowledges messages now or in a later `receive`; drops receipts of other connections."""
        ...

    def wake(self) -> None:
        """Ends a `receive` soon; for other threads."""
        ...

    def close(self) -> None:
        """Acknowledges the rest, and closes the connection."""
        ...


class SettledMessages(NamedTuple):
    """Messages that a queue has, the broker refused, or no queue takes."""

    taken: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()
    unroutable: Sequence[Outgoing] = ()


class MessageSink(Protocol):
    """A connection that publishes."""

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Publishes messages, without waiting for confirms."""
        ...

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        """Waits for outcomes or `wake`; each message is settled once.

        Raises:
            MessageRefused: A message ended the connection.
        """
        ...

    def wake(self) -> None:
        """Ends a `settle` soon; for other threads."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...
