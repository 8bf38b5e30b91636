"""Frames of any kind, whole, damaged and in pieces, to a gRPC connection: it keeps its rules, and its memory."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import hpack as reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer_api.rpc import frames, hpack
from tests.support.fuzzing import FUZZ_S, within_limits
from tests.support.http2 import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    LIMITS,
    MAX_MESSAGE_BYTES,
    PING,
    PRIORITY,
    SETTINGS,
    Requests,
    Wire,
    prefixed,
    reset,
    settings_frame,
    window,
)

pytestmark = [
    within_limits,
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of Hypothesis: it would hide what failed
]
patient = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))

BUDGET_BYTES = 30_000
PAUSE, RESUME = "pause", "resume"
Step = bytes | int | str
"""What happens to a connection: bytes, seconds that pass, or a transport that is full, or not any more."""

NUMBERS = st.sampled_from([*[1, 3, 5, 7, 9] * 4, 0, 2, 99, 2**31 - 1, 2**31 + 1, 2**32 - 1])  # mostly streams there are
WORDS = st.sampled_from([*[1, 10, 300, 20_000, 70_000] * 3, 0, 2**31 - 1, 2**31, 2**32 - 1])
KEYS = st.sampled_from([*[frames.INITIAL_WINDOW_SIZE, frames.HEADER_TABLE_SIZE] * 4, 2, 3, 5, 6, 8])
PATHS = st.sampled_from([*["/t.T/Echo", "/t.T/Chat"] * 6, "/t.T/Hang", "/t.T/Hang", "/t.T/Deny", "/t.T/Nope", "", "t"])
EXTRA = st.sampled_from(
    [
        *[(), (("grpc-timeout", "5S"),), (("x-id", "1" * 40),)] * 6,
        *[(("te", "gzip"),), (("X", "y"),), (("a", "b\n"),), ((":path", "/"),), (("x", "y" * 2500),)],
        *[(("grpc-encoding", "br"),), (("grpc-timeout", "x"),)],
    ]
)
SIZES = st.sampled_from([*[[5], [300], [5000], [40_000]] * 3, [0], [1, 1], [5, 300, 5], [20_000, 20_000], []])


@st.composite
def calls(draw: st.DrawFn, requests: Requests, number: int) -> bytes:
    """Frames of a call that is right, but for what its head says and what may be missing at its end."""
    block = requests.block(draw(PATHS), *draw(EXTRA))
    cut = draw(st.integers(0, len(block)))
    sent = requests.headers(number, block)
    if draw(st.booleans()):
        sent = requests.headers(number, block[:cut], 0)
        sent += frames.frame(CONTINUATION, frames.END_HEADERS, number, block[cut:])
    body = b"".join(prefixed(bytes(size)) for size in draw(SIZES))
    for _ in range(draw(st.integers(0, 3))):
        cut = draw(st.integers(0, min(len(body), LIMITS.frame_bytes)))
        sent += frames.frame(DATA, 0, number, body[:cut])
        body = body[cut:]
    last = body[: LIMITS.frame_bytes]
    flags = draw(st.sampled_from([*[frames.END_STREAM] * 7, 0, None]))
    return sent if flags is None else sent + frames.frame(DATA, flags, number, last)


@st.composite
def scenes(draw: st.DrawFn) -> list[Step]:
    """What happens to a connection, from its first byte on."""
    requests = Requests()
    small = st.binary(max_size=12)
    others = st.one_of(
        st.builds(settings_frame, st.tuples(KEYS, WORDS), flags=st.sampled_from([0, 0, 0, 1])),
        st.builds(window, NUMBERS | st.just(0), WORDS),
        st.builds(reset, NUMBERS),
        st.builds(frames.frame, st.integers(0, 12), st.integers(0, 255), NUMBERS, small),
        st.builds(frames.frame, st.sampled_from([PING, PRIORITY, GOAWAY, SETTINGS]), st.just(0), st.just(0), small),
        st.builds(
            frames.frame, st.sampled_from([HEADERS, DATA]), st.sampled_from([0, 1, 4, 5, 8, 0x2D]), NUMBERS, small
        ),
        st.just(frames.frame(PING, 0, 0, b"sign of ")),
    )
    events: st.SearchStrategy[Step] = st.sampled_from([1, 15, 90, PAUSE, RESUME, RESUME])
    steps: list[Step] = [frames.PREFACE + settings_frame((frames.INITIAL_WINDOW_SIZE, draw(WORDS) % 2**31))]
    number = -1
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.integers(0, 9))
        if kind < 6:
            number += 2
            steps.append(draw(calls(requests, number)))
        else:
            steps.append(draw(others if kind < 9 else events))
    if draw(st.integers(0, 4)) == 0:
        at, byte = draw(st.integers(0, len(steps) - 1)), draw(st.integers(0, 255))
        damaged = steps[at]
        if isinstance(damaged, bytes) and damaged:
            place = draw(st.integers(0, len(damaged) - 1))
            steps[at] = damaged[:place] + bytes((byte,)) + damaged[place + 1 :]
    return steps


async def play(steps: Sequence[Step], pieces: Sequence[int]) -> bytes:
    """Returns what the connection writes; bytes come in pieces of these sizes, again and again."""
    wire, turn = Wire(budget_bytes=BUDGET_BYTES), 0
    now_s = asyncio.get_running_loop().time()
    for step in steps:
        if isinstance(step, bytes):
            position = 0
            while position < len(step):
                size = pieces[turn % len(pieces)]
                wire.send(step[position : position + size])
                position, turn = position + size, turn + 1
        elif wire.connection.output.is_closed:
            break
        elif step == PAUSE:
            wire.connection.pause_writing()
        elif step == RESUME:
            wire.connection.resume_writing()
        else:
            now_s += int(step)
            wire.connection.check(now_s)
        for _ in range(4):
            await asyncio.sleep(0)
        check(wire)
    written = bytes(wire.written)
    check_written(wire)
    wire.connection.connection_lost(None)
    await asyncio.sleep(0)
    assert wire.server.receiving.held_bytes == 0
    await wire.server.wait_idle()
    return written


def check(wire: Wire) -> None:
    """The connection keeps no more than it may."""
    connection = wire.connection
    assert wire.server.receiving.held_bytes <= max(BUDGET_BYTES, MAX_MESSAGE_BYTES)
    assert len(connection._rest) <= frames.HEAD_BYTES + LIMITS.frame_bytes
    assert len(connection._streams) <= LIMITS.streams
    assert connection._block is None or len(connection._block[2]) <= LIMITS.frame_bytes
    assert wire.is_closed == connection.output.is_closed
    if wire.is_closed:
        assert not wire.server.connections
        assert not connection._streams


def check_written(wire: Wire) -> None:
    """What was written is HTTP/2, and says why the connection ended."""
    if wire.written.startswith(b"HTTP/1.1"):
        return
    found = wire.read()
    for frame in found:
        if frame.kind == HEADERS:
            assert wire.fields(frame.payload)
    ends = [number for kind, flags, number, _ in found if kind in (DATA, HEADERS) and flags & frames.END_STREAM]
    assert len(ends) == len(set(ends))
    if wire.is_closed and not wire.is_aborted and wire.connection._has_preface:
        assert GOAWAY in [frame.kind for frame in found]


@patient
@given(steps=scenes(), pieces=st.lists(st.integers(1, 40) | st.integers(1, 70_000), min_size=1, max_size=5))
def one_scene(steps: Sequence[Step], pieces: Sequence[int]) -> None:
    with asyncio.Runner() as runner:
        whole = runner.run(play(steps, [10**9]))
        assert runner.run(play(steps, pieces)) == whole


def test_any_frames_in_any_pieces() -> None:
    """The same bytes get the same answer, however they are cut; and none of them an unforeseen error."""
    end_s = time.monotonic() + FUZZ_S * 0.05
    one_scene()
    while time.monotonic() < end_s:
        one_scene()


FIELDS = st.lists(
    st.tuples(
        st.sampled_from([b":path", b":status", b"x-id", b"te", b"cookie"]) | st.binary(min_size=1, max_size=20),
        st.binary(max_size=60) | st.sampled_from([b"/", b"200", b"x" * 5000]),
        st.booleans(),
    ),
    max_size=8,
)


@patient
@given(blocks=st.lists(FIELDS, max_size=6), tables=st.lists(st.integers(0, 4096), max_size=3), is_packed=st.booleans())
def test_blocks_of_another_encoder_are_decoded(
    blocks: list[list[tuple[bytes, bytes, bool]]], tables: list[int], *, is_packed: bool
) -> None:
    encoder, decoder = reference.Encoder(), hpack.Decoder(10**6)

    for number, fields in enumerate(blocks):
        if number < len(tables):
            encoder.header_table_size = tables[number]
        block = encoder.encode(fields, huffman=is_packed)
        assert decoder.decode(block)[0] == [(name, value) for name, value, _ in fields]


@patient
@given(blocks=st.lists(st.binary(max_size=40), max_size=6))
def test_damaged_blocks_are_refused_as_such(blocks: list[bytes]) -> None:
    """What can be decoded, another decoder reads in the same way."""
    decoder, other = hpack.Decoder(10**6), reference.Decoder()
    other.max_allowed_table_size = hpack.MAX_TABLE_BYTES

    with contextlib.suppress(hpack.HpackError):
        for block in blocks:
            fields, _ = decoder.decode(block)
            with contextlib.suppress(reference.HPACKError):  # it wants each change of the table's size to be the last
                assert fields == [(bytes(name), bytes(value)) for name, value in other.decode(block, raw=True)]
