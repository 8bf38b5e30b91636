"""The ports to other queues, sources and sinks. Each serves one thread.

`amqp` implements them for AMQP 0-9-1, `redis_list` the source for Redis, and `kombu` the rest, over kombu's transports.
A link is one connection: any exception except those named here shows that it is broken, and a `LinkThread` opens
another one, with a new epoch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qinfer_workers.bridge.messages import Delivered, Outgoing, Receipt


class MessageRefused(Exception):
    """The broker ended a connection because of a published message, without naming it."""


class Source(Protocol):
    """A connection that consumes from one queue; unacknowledged messages return to the queue when it ends."""

    epoch: int

    def receive(self, timeout_s: float) -> list[Delivered]:
        """Waits for messages, up to `timeout_s` seconds, or until `wake`; also acknowledges, and sends heartbeats.

        No more messages than the source's prefetch are unacknowledged.
        """
        ...

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Acknowledges messages of this connection, now or in a later `receive`; drops the receipts of others."""
        ...

    def wake(self) -> None:
        """Ends a `receive` soon; for other threads."""
        ...

    def close(self) -> None:
        """Acknowledges the remaining messages, and closes the connection."""
        ...


class Settled(NamedTuple):
    """The outcomes of published messages: a queue has them, the broker refused them, or no queue exists."""

    taken: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()
    unroutable: Sequence[Outgoing] = ()


class Sink(Protocol):
    """A connection that publishes."""

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Publishes messages, without waiting for the broker's confirms."""
        ...

    def settle(self, timeout_s: float) -> Settled:
        """Waits for outcomes, up to `timeout_s` seconds, or until `wake`; each message is settled once.

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
