"""Calls of streams, frame by frame: messages that come before the method reads, and replies of many messages."""

import asyncio

import pytest

from qinfer_api.receiving import ReceivingBudget
from qinfer_api.rpc import frames
from qinfer_api.rpc.frames import ConnectionLimits
from qinfer_api.rpc.headers import Method
from qinfer_api.rpc.heads import Server
from qinfer_api.rpc.protocol import GrpcCall
from tests.support.http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    MAX_MESSAGE_BYTES,
    RST_STREAM,
    Frame,
    Wire,
    prefixed,
    status_of,
    window,
)

PATH, MANY, WATCH = "/t.T/EchoAll", "/t.T/Many", "/t.T/Watch"
MESSAGES = 300


async def _echo_all(call: GrpcCall) -> None:
    while (message := await call.read()) is not None:
        await call.write((message,))
    call.finish_stream()


async def _many(call: GrpcCall) -> None:
    for _ in range(MESSAGES):
        await call.write((b"a message",))
    call.finish_stream()


async def _watch(_: GrpcCall) -> None:
    await asyncio.Event().wait()


METHODS = {
    PATH: Method(lambda *_: None, lambda call, _: call.run(_echo_all(call)), True, MAX_MESSAGE_BYTES),
    MANY: Method(lambda *_: None, lambda call, _: call.run(_many(call)), False, MAX_MESSAGE_BYTES),
    WATCH: Method(lambda *_: None, lambda call, _: call.run(_watch(call)), False, MAX_MESSAGE_BYTES, is_awaited=False),
}


def wire_of(methods: dict[str, Method]) -> Wire:
    wire = Wire(ConnectionLimits(idle_frames=50, idle_frames_per_s=1))
    wire.server = wire.connection.service = Server(methods, wire.connection.service.limits, ReceivingBudget(10**9))
    return wire


async def settle(wire: Wire) -> list[Frame]:
    """Returns what is written once nothing more happens."""
    for _ in range(5):
        await asyncio.sleep(0)
    return wire.read()


@pytest.mark.parametrize("messages", [[], [b"one"], [b"one", b"two"], [b""]])
async def test_a_stream_that_has_come_whole_before_its_method_reads(messages: list[bytes]) -> None:
    """Head, messages and end in one packet: the method is started once, and reads all of them."""
    wire = wire_of(METHODS).greet()
    body = b"".join(prefixed(message) for message in messages)
    head = wire.headers(1, wire.block(PATH))
    wire.send(head + frames.frame(DATA, frames.END_STREAM, 1, body))

    found = await settle(wire)

    assert [frame.payload for frame in found if frame.kind == DATA] == list(map(prefixed, messages))
    assert status_of(wire, found) == "0"


async def test_a_client_may_open_its_windows_for_every_frame_that_it_gets() -> None:
    """Clients of gRPC do; what brings replies further uses nothing of the allowance up."""
    wire = wire_of(METHODS).greet((frames.INITIAL_WINDOW_SIZE, 14))
    wire.send(wire.call(1, b"", MANY))
    found = await settle(wire)

    while not any(frame.kind in (HEADERS, RST_STREAM, GOAWAY) and frame.flags & 1 for frame in found):
        wire.send(window(1, 14) + window(0, 14))
        found += await settle(wire)
        assert not wire.is_closed, found[-1]

    assert b"".join(frame.payload for frame in found if frame.kind == DATA) == prefixed(b"a message") * MESSAGES


async def test_a_client_that_opens_its_windows_byte_by_byte_is_not_served_for_long() -> None:
    wire = wire_of(METHODS).greet((frames.INITIAL_WINDOW_SIZE, 0))
    wire.send(wire.call(1, b"x" * 40_000, PATH))

    for _ in range(200):
        wire.send(window(1, 1))
        await settle(wire)

    assert wire.is_closed


async def test_a_shutdown_waits_for_no_call_that_lasts_as_long_as_its_client_likes() -> None:
    wire = wire_of(METHODS | {"/t.T/Hang": Method(lambda *_: None, lambda *_: None, False, MAX_MESSAGE_BYTES)}).greet()
    wire.send(wire.call(1, b"", WATCH))
    await asyncio.wait_for(wire.server.wait_idle(), 5)
    wire.send(wire.call(3, b"", "/t.T/Hang"))
    ended = asyncio.ensure_future(wire.server.wait_idle())
    await settle(wire)
    is_done_early = ended.done()
    wire.connection.connection_lost(None)
    await ended

    assert not is_done_early
