"""The ports to other queues, sources and sinks. Each serves one thread.

A link is one connection: an exception other than `MessageRefused` shows that it is broken, and a `LinkThread` opens
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
        """Waits for messages or `wake`; also acknowledges, and sends heartbeats."""
        ...

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Acknowledges messages, maybe later; drops receipts of other connections."""
        ...

    def wake(self) -> None:
        """Ends a `receive` soon; for other threads."""
        ...

    def close(self) -> None:
        """Acknowledges settled messages, and closes the connection."""
        ...


class SettledMessages(NamedTuple):
    """Messages that a queue has, that were refused, or that no queue takes."""

    taken: Sequence[Outgoing] = ()
    refused: Sequence[Outgoing] = ()
    unroutable: Sequence[Outgoing] = ()


class MessageSink(Protocol):
    """A connection that publishes."""

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Publishes without waiting for confirms."""
        ...

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        """Waits for outcomes or `wake`; each message is settled once. Raises `MessageRefused`."""
        ...

    def wake(self) -> None:
        """Ends a `wait_settled` soon; for other threads."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...
