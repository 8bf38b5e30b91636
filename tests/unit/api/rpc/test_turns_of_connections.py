"""A connection of HTTP/2 that has sent much is read in slices, between others."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qinfer_api.rpc import frames
from qinfer_api.rpc.server import RpcServer
from qinfer_api.turns import Turns
from tests.support.http2 import DATA, GOAWAY, LIMITS, PING, Short, Wire, data_frame, prefixed, settings_frame, window

PINGS = 1800


@pytest.fixture
async def hurried() -> Wire:
    """A connection whose turns are short."""
    wire = Wire(LIMITS._replace(idle_frames=6000)).greet()
    wire.server.turns = Short()
    return wire


def pings(count: int) -> bytes:
    return b"".join(frames.frame(PING, 0, 0, number.to_bytes(8)) for number in range(count))


def answered(wire: Wire) -> list[int]:
    return [int.from_bytes(frame.payload) for frame in wire.read() if frame.kind == PING]


async def test_much_is_read_in_several_turns(hurried: Wire) -> None:
    """All of it, in order; the transport reads nothing meanwhile."""
    hurried.send(pings(PINGS))
    first = answered(hurried)
    was_paused, later, turns = hurried.is_reading_paused, list[int](), 0
    while hurried.is_reading_paused:
        await asyncio.sleep(0)
        later += answered(hurried)
        turns += 1

    assert was_paused
    assert 0 < len(first) < PINGS / 4
    assert first + later == list(range(PINGS))
    assert turns > 3


@pytest.mark.parametrize("has_body", [False, True])
async def test_many_calls_of_a_read_begin_in_several_turns(hurried: Wire, *, has_body: bool) -> None:
    """A body goes with its head, a call with no other."""
    flags = frames.END_HEADERS | (0 if has_body else frames.END_STREAM)
    body = [data_frame(number, b"x" * 40) if has_body else b"" for number in range(1, 2001, 2)]
    calls = [hurried.headers(2 * at + 1, hurried.block(), flags) + body[at] for at in range(len(body))]

    hurried.send(b"".join(calls))

    answered_at_once = len({frame.number for frame in hurried.read() if frame.number})
    assert hurried.is_reading_paused
    assert 0 < answered_at_once < len(calls) / 4


async def test_others_are_served_between_these_turns(hurried: Wire) -> None:
    hurried.send(pings(PINGS))
    other = Wire().greet()

    other.send(other.call(1, b"hello"))

    assert hurried.is_reading_paused
    assert [frame.payload for frame in other.read() if frame.kind == DATA] == [prefixed(b"hello")]


async def test_what_comes_while_a_connection_waits_is_read_behind_the_rest(hurried: Wire) -> None:
    """A transport with TLS may have more of it."""
    both = pings(2 * PINGS)
    hurried.send(both[: len(both) // 2])
    waits = hurried.server.turns.waits  # type: ignore[attr-defined]  # it is `Short`

    hurried.send(both[len(both) // 2 :])

    assert hurried.server.turns.waits == waits  # type: ignore[attr-defined]
    found = answered(hurried)
    while hurried.is_reading_paused:
        await asyncio.sleep(0)
        found += answered(hurried)
    assert found == list(range(2 * PINGS))


async def test_a_plain_call_is_read_at_once(hurried: Wire) -> None:
    hurried.send(hurried.call(1, bytes(60_000)))

    assert not hurried.is_reading_paused
    assert sum(len(frame.payload) for frame in hurried.read() if frame.kind == DATA) == 60_005


async def test_what_ends_a_connection_ends_it_in_any_turn(hurried: Wire) -> None:
    hurried.send(pings(PINGS) + window(0, 0) + pings(PINGS))
    for _ in range(100):
        await asyncio.sleep(0)

    assert [frame.kind for frame in hurried.read()][-1] == GOAWAY


async def test_a_connection_that_is_lost_reads_nothing_more(hurried: Wire) -> None:
    hurried.send(pings(PINGS))
    before = len(answered(hurried))
    hurried.connection.connection_lost(None)

    for _ in range(5):
        await asyncio.sleep(0)

    assert before > 0
    assert answered(hurried) == []
    assert hurried.connection._rest == b""


async def test_a_connection_whose_client_takes_nothing_goes_on_when_it_does(hurried: Wire) -> None:
    hurried.send(pings(PINGS))
    first = answered(hurried)
    hurried.connection.pause_writing()
    for _ in range(5):
        await asyncio.sleep(0)
    held = answered(hurried)

    hurried.connection.resume_writing()
    later = answered(hurried)
    while hurried.is_reading_paused:
        await asyncio.sleep(0)
        later += answered(hurried)

    assert held == []
    assert first + later == list(range(PINGS))


async def test_settings_are_charged_by_their_entries(wire: Wire) -> None:
    """A frame may have thousands of them."""
    entry = (frames.MAX_HEADER_LIST_SIZE, 65_536)
    wire.send(settings_frame(*[entry] * (LIMITS.idle_frames // 2)))
    is_open = not wire.is_closed

    wire.send(settings_frame(*[entry] * (LIMITS.idle_frames // 2 + 1)))

    assert is_open
    assert wire.is_closed


async def test_changes_of_many_windows_are_charged_by_the_streams() -> None:
    wire = Wire(LIMITS._replace(streams=1000)).greet()
    wire.send(b"".join(wire.call(number, b"", "/t.T/Hang") for number in range(1, 1281, 2)))

    for size in range(4):
        wire.send(settings_frame((frames.INITIAL_WINDOW_SIZE, 60_000 + size)))
    is_open = not wire.is_closed
    wire.send(settings_frame((frames.INITIAL_WINDOW_SIZE, 70_000)))

    assert is_open
    assert wire.is_closed


CALLS, EACH = 40, 3


@pytest.mark.parametrize(("beyond", "is_open"), [(0, True), (51, False)])
async def test_what_answers_earn_at_once_is_kept_for_the_frames_about_them(beyond: int, *, is_open: bool) -> None:
    """A client may send several frames for each of many answers that came together, and no flood."""
    wire = Wire(LIMITS._replace(streams=CALLS)).greet()
    wire.send(b"".join(wire.call(number, b"") for number in range(1, 2 * CALLS, 2)))

    wire.send(window(0, 1) * (CALLS * EACH))
    was_open = not wire.is_closed
    wire.send(window(0, 1) * (CALLS + beyond))

    assert was_open
    assert wire.is_closed is not is_open


@pytest.mark.parametrize("is_malformed", [True, False])
async def test_large_heads_that_open_nothing_are_charged_by_their_size(*, is_malformed: bool) -> None:
    wire = Wire(LIMITS._replace(header_bytes=20_000 if is_malformed else 2000)).greet()
    extra = ("X" if is_malformed else "x", "y" * 4000)

    wire.send(wire.headers(1, wire.block("/t.T/Echo", extra)))
    is_open = not wire.is_closed
    wire.send(wire.headers(3, wire.block("/t.T/Echo", extra, ("z", "z" * 4000))))

    assert is_open
    assert wire.is_closed


async def test_a_check_that_takes_turns_has_the_time_of_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping that is sent during the check must not count as sent at its beginning: its answer would be overdue."""
    now_s, is_over = asyncio.get_running_loop().time, asyncio.Event()
    checked = list[tuple[float, float]]()  # the time that it was told, and the real one

    def check(told_s: float) -> None:
        checked.append((told_s, now_s()))

    monkeypatch.setattr("qinfer_api.rpc.server._CHECK_EVERY_S", 0)
    server = RpcServer.__new__(RpcServer)
    connections = [SimpleNamespace(check=check) for _ in range(2)]
    server._calls = cast(Any, SimpleNamespace(turns=Turns(), connections=connections))
    server._infer = cast(Any, SimpleNamespace(check_callers=is_over.set))
    checks = asyncio.create_task(server._check_connections())

    await is_over.wait()
    checks.cancel()

    (_, first_s), (told_s, _) = checked[:2]
    assert told_s >= first_s
