"""A TCP proxy on loopback that can be pointed to another server, as elsewhere a name in DNS or a virtual address."""

import asyncio
import contextlib
import re
import threading
from typing import Self

from tests.support.servers.servers import free_port


class Proxy:
    """Passes connections on to `target` while its block runs; those that are open stay where they are.

    Attributes:
        port: Where it listens.
        target: The port to which new connections go.
        prefix: The beginning of paths that it takes off, if any; each connection then has one request of HTTP.
    """

    def __init__(self, target: int, prefix: str = "") -> None:
        self.port = free_port()
        self.target = target
        self.prefix = prefix
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
            if self.prefix:
                back.write(_without_prefix(await reader.readuntil(b"\r\n\r\n"), self.prefix.encode()))
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        writer.close()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


def _without_prefix(head: bytes, prefix: bytes) -> bytes:
    """Returns the head of a request for a path below a prefix, as a server sees it that knows nothing of the prefix."""
    method, path, rest = head.split(b" ", 2)
    line, fields = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", rest).split(b"\r\n", 1)
    assert path.startswith(prefix + b"/"), path
    return b"%b %b %b\r\nConnection: close\r\n%b" % (method, path.removeprefix(prefix), line, fields)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
