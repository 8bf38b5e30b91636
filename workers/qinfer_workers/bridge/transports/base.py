"""The ports to other queues, sources and sinks. Each is used in one thread.

A link is one connection: an exception other than `MessageRefused` shows that it is broken, and a `Link` opens
another one, with a new epoch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qinfer_workers.bridge.messages import Outgoing, Receipt, SourceMessage


class MessageRefused(Exception):
    """The broker closed the connection because of a published message; it does not say which one."""


class MessageSource(Protocol):
    """Consumes one queue, to which unacknowledged messages return at the end."""

    epoch: int

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Waits for messages or `wake`; also sends heartbeats."""
        ...

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Acknowledges messages of this connection."""
        ...

    def wake(self) -> None:
        """Ends a `receive` soon; for other threads."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class SettledMessages(NamedTuple):
    """Messages that a queue has, that were refused, or that no queue takes."""

    taken: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()
    unroutable: Sequence[Outgoing] = ()


class MessageSink(Protocol):
    """A connection that publishes."""

    def exchange(self, messages: Sequence[Outgoing], timeout_s: float) -> SettledMessages:
        """Publishes, and waits for outcomes, also of earlier messages, or `wake`; each message is settled once.

        Raises `MessageRefused`.
        """
        ...

    def wake(self) -> None:
        """Ends an `exchange` soon; for other threads."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...
