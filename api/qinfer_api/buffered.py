"""Connections that name the memory of their reads: large bodies need no `bytes` of their own.

It costs each read a little. So connections begin with `data_received`, and change with their first large body.
"""

import asyncio

READ_BYTES = 256 * 1024
"""The bytes that connections read at once, into one buffer of all."""


class SwitchingConnection(asyncio.Protocol):
    """A connection that reads by `data_received` at first."""

    _is_buffered = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for the next read."""
        raise NotImplementedError

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the bytes that were read."""
        raise NotImplementedError

    def _buffer_reads(self, transport: asyncio.Transport, *, is_paused: bool) -> None:
        """Reads into `get_buffer` from now on."""
        if self._is_buffered or transport.is_closing():
            return
        self._is_buffered = True
        transport.set_protocol(_BufferedReads(self))
        if not is_paused:  # a transport asks for the way of its reads when it begins to read
            transport.pause_reading()
            transport.resume_reading()


class _BufferedReads(asyncio.BufferedProtocol):
    def __init__(self, connection: SwitchingConnection) -> None:
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
