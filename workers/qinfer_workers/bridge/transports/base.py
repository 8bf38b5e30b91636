"""The ports to other queues: where messages come from, and where they are published. Each serves one thread.

`amqp` has them for AMQP 0-9-1, `redis_list` has the source for Redis, and `kombu` what is left, over the transports of
kombu. A link is one connection: when it breaks, which shows as any exception but those named here, a `LinkThread` opens
another one, with a new epoch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qinfer_workers.bridge.messages import Delivered, Outgoing, Receipt


class MessageRefused(Exception):
    """The broker ended a connection because of one of the messages that were published, without saying which."""


class Source(Protocol):
    """A connection that consumes from one queue; unacknowledged messages return to the queue when it ends.

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
        """Acknowledges the remaining messages, and closes the connection."""
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
