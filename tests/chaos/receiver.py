"""A server that webhooks go to: it writes down what it is told, and sometimes fails, so that it is told again."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping

_FAILS = 0.1
_REPLIES = {True: b"HTTP/1.1 204 No Content\r\n\r\n", False: b"HTTP/1.1 500 Internal Server Error\r\n\r\n"}
_TYPE = "request."

Note = Callable[[int, str], None]
"""Called with a request's number and the state that a webhook tells."""


class Receiver:
    """See the module docstring; `receiving` makes one.

    Args:
        seed: Decides which webhooks fail.

    Attributes:
        note: Where to write what is told; only what was not failed counts.
    """

    def __init__(self, seed: int) -> None:
        self.note: Note = lambda number, state: None
        self._rng = random.Random(seed)
        self._port = 0

    @property
    def settings(self) -> Mapping[str, str]:
        """What gateways must be told to allow it."""
        return {
            "QINFER_WEBHOOKS__ALLOW": json.dumps([f"127.0.0.1:{self._port}"]),
            "QINFER_WEBHOOKS__ALLOW_PRIVATE": "true",
            "QINFER_WEBHOOKS__SECRET": "only for this test",
            "QINFER_WEBHOOKS__TIMEOUT_S": "1",
            "QINFER_WEBHOOKS__MAX_ATTEMPTS": "100",
        }

    def url_of(self, number: int) -> str:
        """Returns where to tell of a request."""
        return f"http://127.0.0.1:{self._port}/{number}"

    def listens_on(self, port: int) -> None:
        """Tells it where it is."""
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes one webhook; gateways are killed in the middle of one."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
            is_taken = self._rng.random() >= _FAILS
            if is_taken:
                self.note(int(head.split()[1].removeprefix("/")), json.loads(body)["type"].removeprefix(_TYPE))
            writer.write(_REPLIES[is_taken])
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def receiving(seed: int) -> AsyncIterator[Receiver]:
    """Runs a receiver."""
    receiver = Receiver(seed)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.listens_on(server.sockets[0].getsockname()[1])
    try:
        yield receiver
    finally:
        server.close()
