"""Large messages that are announced and do not come: they cost little, and others' come in beside them."""

import gzip
import tracemalloc

import pytest

from qinfer_api.receiving import PATIENCE_S, ReceivingBudget, Reservation
from qinfer_api.rpc import frames
from qinfer_api.rpc.headers import Method
from qinfer_api.rpc.heads import Server
from qinfer_api.rpc.http2 import Http2Connection
from tests.support.http2 import DATA, LIMITS, RST_STREAM, WINDOW_UPDATE, Frame, Wire, prefixed, status_of, window

MB = 2**20
CLAIM = b"\0" + (48 * MB).to_bytes(4) + b"0123456789"
STREAMS = 60
ECHO = Method(lambda *_: None, lambda call, message: call.finish((message,)), False, 64 * MB)


def wires(count: int) -> list[Wire]:
    """Returns connections of one server with the usual budget."""
    made = [Wire(LIMITS._replace(streams=1000, connection_window_bytes=2**30)) for _ in range(count)]
    server = Server({"/t.T/Echo": ECHO}, made[0].server.limits, ReceivingBudget(2**30))
    server.turns = made[0].server.turns
    for wire in made:
        wire.server = wire.connection.service = server
        server.connections.add(wire.connection)
        wire.greet((frames.INITIAL_WINDOW_SIZE, 2**30))
        wire.send(window(0, 2**30))
    return made


def claim(wire: Wire, streams: int, claimed: bytes = CLAIM) -> None:
    """Announces a large message on each of so many streams."""
    block = wire.block()
    for number in range(1, 2 * streams, 2):
        wire.send(wire.headers(number, block) + frames.frame(DATA, 0, number, claimed))


def granted(found: list[Frame]) -> list[int]:
    return [frame.number for frame in found if frame.kind == WINDOW_UPDATE and frame.number]


async def test_memory_grows_as_bytes_arrive() -> None:
    (wire,) = wires(1)

    tracemalloc.start()
    claim(wire, STREAMS)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert len(granted(wire.read())) > 5
    assert most < 2 * MB


async def test_a_connection_that_ends_gets_nothing_of_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the end of each of its calls would begin the next one."""
    (wire,) = wires(1)
    claim(wire, STREAMS)
    let_in = len(granted(wire.read()))
    budget, begun = wire.server.receiving, list[Reservation]()
    monkeypatch.setattr(budget, "_grant", begun.append)

    wire.connection.connection_lost(None)

    assert 0 < let_in < STREAMS
    assert begun == []
    assert (budget.held_bytes, budget.waiting, len(budget.watched)) == (0, 0, 0)


async def test_what_another_waits_for_is_granted_at_the_end_of_a_connection() -> None:
    first, second = wires(2)
    claim(first, STREAMS)
    claim(second, STREAMS)
    before = len(granted(second.read()))

    first.connection.connection_lost(None)

    assert len(granted(second.read())) > before


async def test_another_connection_sends_a_megabyte_beside_them() -> None:
    hostile, other = wires(2)
    claim(hostile, STREAMS)
    message = prefixed(bytes(MB))

    other.send(other.headers(1, other.block()) + frames.frame(DATA, 0, 1, message[:40_000]))
    for at in range(40_000, len(message), 60_000):
        other.send(frames.frame(DATA, 0, 1, message[at : at + 60_000]))
    other.send(frames.frame(DATA, frames.END_STREAM, 1))

    found = other.read()
    assert granted(found) == [1]
    assert b"".join(frame.payload for frame in found if frame.kind == DATA)[:5] == message[:5]


@pytest.mark.parametrize("every_s", [1, 5])
async def test_claims_that_drip_are_given_up(every_s: int) -> None:
    """From their first seconds on, and long before a pause is too long."""
    (wire,) = wires(1)
    claim(wire, 10)
    wire.read()
    budget = wire.server.receiving

    for second in range(PATIENCE_S + 1):
        if second % every_s == 0:
            wire.send(b"".join(frames.frame(DATA, 0, number, b"a") for number in range(1, 20, 2)))
        budget.second_passed()

    assert status_of(wire, wire.read()) == "1"
    assert (budget.held_bytes, len(budget.watched)) == (0, 0)


async def test_a_message_at_the_least_rate_comes_in() -> None:
    (wire,) = wires(1)
    size = 2 * MB
    message = prefixed(bytes(size))

    wire.send(wire.headers(1, wire.block()) + frames.frame(DATA, 0, 1, message[:64_000]))
    for at in range(64_000, len(message), 65_000):
        wire.send(frames.frame(DATA, 0, 1, message[at : at + 65_000]))
        wire.server.receiving.second_passed()
    wire.send(frames.frame(DATA, frames.END_STREAM, 1))

    assert status_of(wire, wire.read()) == "0"


async def test_a_small_message_that_may_become_large_has_to_end_in_time() -> None:
    """Its call could otherwise hold what may come of it as long as a pause may take."""
    (wire,) = wires(1)
    content = gzip.compress(bytes(10 * MB))
    wire.send(wire.headers(1, wire.block("/t.T/Echo", ("grpc-encoding", "gzip"))))
    message = b"\1" + len(content).to_bytes(4) + content
    wire.send(frames.frame(DATA, 0, 1, message[:3]) + frames.frame(DATA, 0, 1, message[3:]))
    held = wire.server.receiving.held_bytes

    for _ in range(PATIENCE_S + 1):
        wire.server.receiving.second_passed()

    assert held > 10 * MB
    assert status_of(wire, wire.read()) == "1"
    assert wire.server.receiving.held_bytes == 0


async def test_a_call_of_one_message_claims_no_second_one() -> None:
    (wire,) = wires(1)
    wire.send(wire.headers(1, wire.block()) + frames.frame(DATA, 0, 1, prefixed(b"first")))

    wire.send(frames.frame(DATA, 0, 1, CLAIM))

    found = wire.read()
    assert status_of(wire, found) == "13"
    assert RST_STREAM in [frame.kind for frame in found]
    assert wire.server.receiving.held_bytes == 0


async def test_what_comes_before_its_memory_is_kept_once() -> None:
    """Byte by byte: it is not copied for each of them."""
    (wire,) = wires(1)
    claim(wire, STREAMS)
    connection: Http2Connection = wire.connection
    waiting = connection._streams[2 * STREAMS - 1]
    before = waiting._unread  # type: ignore[attr-defined]  # it is a call

    wire.send(frames.frame(DATA, 0, 2 * STREAMS - 1, b"a") * 100)

    assert waiting._unread is before  # type: ignore[attr-defined]
    assert len(before) == 110
