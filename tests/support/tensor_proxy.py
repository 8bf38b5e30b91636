"""A proxy between two machines that stalls or cuts connections after some bytes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class TensorProxy:
    """Passes bytes on to `target`; at most `most_bytes` more that it sends, and `most_up` more that it gets.

    After those a connection ends, or just stands still if `stalls`, until it goes on.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.most_bytes: int | None = None
        self.most_up: int | None = None
        self.stalls = False
        self.seen = bytearray()
        """All bytes, of both directions."""

        self.connections = 0
        self.reached = asyncio.Event()
        """Set when the bytes have come to their most."""

        self._server: asyncio.Server
        self._goes_on = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Starts; returns its address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def close(self) -> None:
        """Ends all connections."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def go_on(self) -> None:
        """Passes everything on again, also on connections that stand still."""
        self.most_bytes = self.most_up = None
        self._goes_on.set()
        self._goes_on = asyncio.Event()

    def watcher(self, bound: str) -> Callable[[bytes], None]:
        """Returns what sees the bytes of a new connection's direction, which `bound` names."""
        return self.seen.extend

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError):
            theirs, to_them = await asyncio.open_connection(*self.target)
            up = asyncio.create_task(self._pass(reader, to_them, "most_up"))
            down = asyncio.create_task(self._pass(theirs, writer, "most_bytes"))
            self._tasks |= {up, down}
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            self._tasks -= {up, down}
            up.cancel()
            down.cancel()
            to_them.transport.abort()
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bound: str) -> None:
        see = self.watcher(bound)
        with suppress(OSError):
            while data := await reader.read(65536):
                most, goes_on = getattr(self, bound), self._goes_on
                passed = data if most is None else data[:most]
                if most is not None:
                    setattr(self, bound, most - len(passed))
                await _write(writer, passed, see)
                if len(passed) == most:
                    self.reached.set()
                    if not self.stalls:
                        return
                    await goes_on.wait()
                    await _write(writer, data[most:], see)


async def _write(writer: asyncio.StreamWriter, data: bytes, see: Callable[[bytes], None]) -> None:
    see(data)
    writer.write(data)
    await writer.drain()
