"""A proxy between two machines that stalls or cuts connections after some bytes."""

import asyncio
from contextlib import suppress


class TensorProxy:
    """Passes bytes on to `target`; at most `most_bytes` more that it sends, and `most_up` more that it gets.

    After those a connection ends, or just stands still if `stalls`.
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError):
            theirs, to_them = await asyncio.open_connection(*self.target)
            up = asyncio.create_task(self._pass(reader, to_them, "most_up"))
            down = asyncio.create_task(self._pass(theirs, writer, "most_bytes"))
            self._tasks |= {up, down}
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            down.cancel()
            for one in (writer, to_them):
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bound: str) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                most = getattr(self, bound)
                if most is not None:
                    data = data[:most]
                    setattr(self, bound, most - len(data))
                self.seen += data
                writer.write(data)
                await writer.drain()
                if most is not None and most <= len(data):
                    self.reached.set()
                    if not self.stalls:
                        return
                    await asyncio.Event().wait()
