"""A server that receives webhooks, for tests: it keeps what comes, and answers as it is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple


class Received(NamedTuple):
    """One POST; header names are in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """What came, and what is answered: the first status of `statuses`, then the next, the last one for ever."""

    def __init__(self, port: int, statuses: list[int]) -> None:
        self.port = port
        self.statuses = statuses
        self.received: list[Received] = []

    def url(self, host: str = "127.0.0.1", path: str = "/hook?token=hidden") -> str:
        return f"http://{host}:{self.port}{path}"


@contextlib.asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    """Runs a receiver on a free port of the loopback address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        headers = {name.lower(): value for name, value in headers.items()}
        body = await reader.readexactly(int(headers["content-length"]))
        receiver.received.append(Received(lines[0].split(" ")[1], headers, body))
        status = receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
        location = b"location: http://127.0.0.1:1/elsewhere\r\n" if 300 <= status < 400 else b""
        writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: 1000000\r\n\r\nsome" % (status, location))
        await writer.drain()
        await reader.read()  # until the sender has hung up: it does not wait for the rest
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    receiver = Receiver(server.sockets[0].getsockname()[1], list(statuses or (204,)))
    async with server:
        yield receiver
