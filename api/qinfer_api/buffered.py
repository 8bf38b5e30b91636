"""Connections that name the memory of their reads: large bodies need no `bytes` of their own.

It costs each read a little. So connections begin with `data_received`, and change with their first large body.
"""

import asyncio
from typing import Protocol

READ_BYTES = 256 * 1024
"""The bytes that connections read at once, into one buffer of all."""


class Buffered(Protocol):
    """A connection that can read either way."""

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for the next read."""
        ...

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the bytes that were read."""
        ...

    def eof_received(self) -> bool | None:
        """Handles the client's end."""
        ...

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the connection's end."""
        ...

    def pause_writing(self) -> None:
        """Writes no more for now."""
        ...

    def resume_writing(self) -> None:
        """Writes again."""
        ...


class _BufferedReads(asyncio.BufferedProtocol):
    def __init__(self, connection: Buffered) -> None:
        self._connection = connection

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


def buffer_reads(transport: asyncio.Transport, connection: Buffered, *, is_paused: bool) -> None:
    """Has a transport read into the connection's buffers from now on."""
    transport.set_protocol(_BufferedReads(connection))
    if not is_paused:  # a transport asks for the way of its reads when it begins to read
        transport.pause_reading()
        transport.resume_reading()
