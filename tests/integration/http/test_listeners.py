"""Listening sockets on uvloop, which accepts one connection a turn and server."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
import uvloop

from qinfer_api.http.server import ACCEPTS, Listeners, bound_socket


class Counted(asyncio.Protocol):
    """Counts the connections that were accepted."""

    count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Counted.count += 1


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    Counted.count = 0
    with bound_socket("HTTP", "127.0.0.1", 0, "") as opened:
        yield opened


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_several_connections_are_accepted_in_a_turn(listener: socket.socket) -> None:
    """A connection does not wait for as many turns of the event loop as others wait before it."""

    async def accept() -> None:
        listeners = Listeners(Counted, listener)
        await listeners.listen(None)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(ACCEPTS)]
        await turns(3)
        listeners.close()
        for client in clients:
            client.close()

    uvloop.run(accept())

    assert Counted.count == ACCEPTS


def test_a_closed_port_refuses_connections_although_it_was_renewed(listener: socket.socket) -> None:
    async def close() -> None:
        address = listener.getsockname()
        listeners = Listeners(Counted, listener)
        await listeners.listen(None)
        await listeners.listen(None)
        listeners.close()
        await turns(3)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        await listeners.listen(None)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    uvloop.run(close())
