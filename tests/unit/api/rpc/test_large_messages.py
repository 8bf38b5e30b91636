"""Messages that are received into memory, and replies that are written from where they are."""

import asyncio
import struct
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest

from qinfer.segments.memory import OwnMemory
from qinfer.submission.memory import Landing
from qinfer.tensors import Bytes
from qinfer_api.receiving import ReceivingBudget, Reservation
from qinfer_api.rpc import frames
from qinfer_api.rpc.frames import ConnectionLimits
from qinfer_api.rpc.headers import Method
from qinfer_api.rpc.heads import Server
from qinfer_api.rpc.protocol import GrpcCall
from tests.support.http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    LIMITS,
    MAX_MESSAGE_BYTES,
    WINDOW_UPDATE,
    Frame,
    Short,
    Unhurried,
    Wire,
    prefixed,
    status_of,
    window,
)

PATH, LARGE = "/t.T/Land", "/t.T/Large"
MIB = 2**20
MESSAGE = bytes(range(251)) * 360  # 90 KB
REPLY = bytes(range(241)) * 2500  # 602 KB


class Scene:
    """A connection to a server that receives messages into memory, and answers them with one byte or `reply`."""

    def __init__(
        self, reply: Bytes = REPLY, frame_bytes: int = frames.MIN_FRAME_BYTES, limits: ConnectionLimits = LIMITS
    ) -> None:
        self.memory = OwnMemory("gateway-a", 4 * MIB)
        self.received: list[bytes] = []
        self.calls: list[GrpcCall] = []
        self.reply = reply
        self.wire = Wire(limits)
        self.methods = {
            PATH: Method(lambda *_: None, self.take, False, MAX_MESSAGE_BYTES, land=self.land),
            LARGE: Method(lambda *_: None, self.answer, False, MAX_MESSAGE_BYTES),
            "/t.T/Hang": Method(lambda *_: None, lambda *_: None, False, MAX_MESSAGE_BYTES),
            "/t.T/Echo": Method(
                lambda *_: None, lambda call, message: call.finish((message,)), False, MAX_MESSAGE_BYTES
            ),
        }
        self.limits = limits
        self.serve()
        self.wire.greet((frames.INITIAL_WINDOW_SIZE, 2**30), (frames.MAX_FRAME_SIZE, frame_bytes))
        self.wire.send(window(0, 2**30))

    def serve(self) -> None:
        """Begins to serve the methods."""
        server = self.wire.server = Server(self.methods, self.limits, ReceivingBudget(10**9))
        self.wire.connection.service = server
        server.turns = Unhurried()
        server.new_id = lambda: "the-id"

    def echoed(self) -> list[bytes]:
        """Returns the messages that were answered since the last time."""
        bodies: dict[int, bytes] = {}
        for frame in self.wire.read():
            if frame.kind == DATA:
                bodies[frame.number] = bodies.get(frame.number, b"") + frame.payload
        return list(bodies.values())

    def land(self, call: GrpcCall, size: int) -> Landing | None:
        self.calls.append(call)
        held = self.memory.take(size, "")
        return None if held is None else Landing(held, 0, 0, in_pieces=False)

    def take(self, call: GrpcCall, message: Bytes) -> None:
        landing, call.landing = call.landing, None
        assert landing is not None
        self.received.append(bytes(message))
        landing.leave()
        call.finish((b"!",))

    def answer(self, call: GrpcCall, _: Bytes) -> None:
        self.calls.append(call)
        call.finish((b"head", self.reply))

    def ask(self, number: int, path: str, frame_bytes: int, message: bytes = MESSAGE) -> bytes:
        """Returns the frames of a call whose message comes in frames of so many bytes."""
        body = prefixed(message)
        cut = [body[at : at + frame_bytes] for at in range(0, len(body), frame_bytes)]
        sent = [frames.frame(DATA, 0, number, part) for part in cut[:-1]]
        head = self.wire.headers(number, self.wire.block(path))
        return b"".join([head, *sent, frames.frame(DATA, frames.END_STREAM, number, cut[-1])])


def data_of(found: Iterable[Frame]) -> list[bytes]:
    return [frame.payload for frame in found if frame.kind == DATA]


@pytest.mark.parametrize("frame_bytes", [700, 1500, 16_384, LIMITS.frame_bytes])
@pytest.mark.parametrize("read_bytes", [9, 5000, 16_393, 40_000, 10**6])
async def test_a_message_is_received_into_memory(frame_bytes: int, read_bytes: int) -> None:
    """In frames and reads of any size; a connection's window is renewed meanwhile."""
    scene = Scene()
    sent = b"".join([scene.ask(number, PATH, frame_bytes) for number in (1, 3, 5)])

    for at in range(0, len(sent), read_bytes):
        scene.wire.send(sent[at : at + read_bytes])

    assert scene.received == [MESSAGE] * 3
    assert data_of(scene.wire.read()) == [prefixed(b"!")] * 3
    assert (scene.memory.held_bytes, scene.wire.server.receiving.held_bytes) == (0, 0)


SMALL = bytes(range(251)) * 66  # 16 KB


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were reserved for each message."""
    sizes, reserve = list[int](), ReceivingBudget.reserve

    def noted(budget: ReceivingBudget, owner: object, size: int, granted: Callable[[], None]) -> Reservation | None:
        sizes.append(size)
        return reserve(budget, owner, size, granted)

    monkeypatch.setattr(ReceivingBudget, "reserve", noted)
    return sizes


@pytest.mark.parametrize("read_bytes", [9, 5000, 16_400, 10**6])
async def test_a_small_message_of_large_frames_waits_for_its_end_as_a_frame_does(
    reserved: list[int], read_bytes: int
) -> None:
    scene = Scene()
    sent = b"".join([scene.ask(number, "/t.T/Echo", 12_000, SMALL) for number in (1, 3, 5)])

    for at in range(0, len(sent), read_bytes):
        scene.wire.send(sent[at : at + read_bytes])

    assert scene.echoed() == [prefixed(SMALL)] * 3
    assert reserved == []


@pytest.mark.parametrize("between", [frames.frame(frames.PING, 0, 0, bytes(8)), window(0, 1)])
async def test_a_message_with_frames_between_its_own_is_read_frame_by_frame(
    reserved: list[int], between: bytes
) -> None:
    scene = Scene()
    sent = scene.ask(1, "/t.T/Echo", 12_000, SMALL)
    last = frames.HEAD_BYTES + len(prefixed(SMALL)) - 12_000

    scene.wire.send(sent[:-last] + between + sent[-last:])

    assert scene.echoed() == [prefixed(SMALL)]
    assert reserved == [len(SMALL)]


@pytest.mark.parametrize("read_bytes", [5000, 10**6])
async def test_a_small_message_for_which_there_is_no_memory_is_refused(read_bytes: int) -> None:
    """However it comes; in one frame it needs none."""
    scene = Scene()
    scene.wire.server.receiving = ReceivingBudget(20_000)
    block = scene.wire.block("/t.T/Hang")
    held = scene.wire.headers(1, block) + frames.frame(DATA, 0, 1, prefixed(bytes(10_000))[:2000])
    scene.wire.send(held + frames.frame(DATA, 0, 1, b"x") + scene.ask(3, "/t.T/Echo", len(SMALL) + 5, SMALL))
    in_one_frame = scene.echoed()
    sent = scene.ask(5, "/t.T/Echo", 12_000, SMALL)

    for at in range(0, len(sent), read_bytes):
        scene.wire.send(sent[at : at + read_bytes])

    assert in_one_frame == [prefixed(SMALL)]
    assert status_of(scene.wire, scene.wire.read()) == "8"


async def test_a_task_keeps_the_memory_of_its_message_until_it_has_decoded_it() -> None:
    scene, goes_on = Scene(), asyncio.Event()

    async def work(call: GrpcCall) -> None:
        await goes_on.wait()
        call.finish((b"!",))

    scene.methods["/t.T/Echo"] = Method(lambda *_: None, lambda call, _: call.run(work(call)), False, MAX_MESSAGE_BYTES)
    scene.serve()
    scene.wire.send(scene.ask(1, "/t.T/Echo", 12_000, SMALL))
    held = scene.wire.server.receiving.held_bytes

    goes_on.set()
    for _ in range(4):
        await asyncio.sleep(0)

    assert held == len(SMALL)
    assert scene.echoed() == [prefixed(b"!")]
    assert scene.wire.server.receiving.held_bytes == 0


async def test_a_small_call_takes_few_calls_of_functions() -> None:
    """The cost of a small request in a gateway is that of Python's calls."""
    scene, called = Scene(), list[str]()
    first, second, sent = [scene.ask(number, "/t.T/Echo", 16_384, SMALL) for number in (1, 3, 5)]
    scene.wire.send(first + second)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "qinfer_api" in frame.f_code.co_filename:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    scene.wire.send(sent)
    sys.setprofile(None)

    assert 10 < len(called) <= 27, called


@pytest.mark.parametrize(("frame_bytes", "waits"), [(16_384, False), (100, True)])
async def test_large_frames_of_a_message_wait_for_no_turn(frame_bytes: int, *, waits: bool) -> None:
    scene = Scene()
    scene.wire.server.turns = turns = Short()
    sent = scene.ask(1, PATH, frame_bytes)

    for at in range(0, len(sent), 40_000):
        scene.wire.send(sent[at : at + 40_000])

    assert (turns.waits > 0) is waits
    assert scene.received == ([] if waits else [MESSAGE])


async def test_messages_behind_a_message_wait_for_turns() -> None:
    """One call of several whose ends come at once begins without a turn."""
    scene = Scene()
    scene.wire.server.turns = turns = Short()
    turns.may_read = lambda: True  # type: ignore[method-assign]
    sent = [scene.ask(number, PATH, 16_384, MESSAGE[:70_000]) for number in (1, 3, 5, 7)]
    last = 9 + 5 + 70_000 - 4 * 16_384
    begun, ends = b"".join(each[:-last] for each in sent), b"".join(each[-last:] for each in sent)
    scene.wire.send(begun[:-20_000])

    turns.may_read = lambda: False  # type: ignore[method-assign]
    scene.wire.send(begun[-20_000:] + ends)

    assert (len(scene.received), turns.waits) == (1, 1)
    assert scene.wire.is_reading_paused


async def test_the_rest_of_a_frame_whose_call_has_ended_is_dropped() -> None:
    scene = Scene()
    sent = scene.ask(1, PATH, 16_384)
    scene.wire.send(sent[:40_000])

    scene.calls[0].reset(frames.CANCEL)
    scene.wire.send(sent[40_000:50_000])
    scene.wire.send(sent[50_000:] + scene.ask(3, PATH, 16_384))

    assert scene.received == [MESSAGE]
    assert data_of(scene.wire.read()) == [prefixed(b"!")]
    assert scene.memory.held_bytes == 0


async def test_a_frame_of_a_message_may_not_interrupt_a_header_block() -> None:
    scene = Scene()
    sent = scene.ask(1, PATH, 16_384)
    scene.wire.send(sent[:40_000])

    scene.wire.send(sent[40_000:60_000])
    rest = scene.wire.connection._missing
    begin = 60_000 + rest
    scene.wire.send(sent[60_000:begin] + scene.wire.headers(3, b"", 0) + sent[begin:])

    assert scene.wire.read()[-1].kind == GOAWAY


async def test_a_frame_of_a_message_is_no_larger_than_allowed() -> None:
    scene = Scene()

    scene.wire.send(scene.ask(1, PATH, 16_384)[:30_000])
    scene.wire.send(bytes(scene.wire.connection._missing))
    scene.wire.send(frames.frame(DATA, 0, 1, bytes(LIMITS.frame_bytes + 1)))

    last = scene.wire.read()[-1]
    assert (last.kind, struct.unpack(">I", last.payload[4:8])[0]) == (GOAWAY, frames.FRAME_SIZE_ERROR)


@pytest.mark.parametrize("frame_bytes", [16_384, 65_536, 2**24 - 1])
@pytest.mark.parametrize("size", [300, 16_375, 16_376, 90_000, 602_112, 3 * MIB])
async def test_a_reply_fills_frames(frame_bytes: int, size: int) -> None:
    scene = Scene(bytes(size), frame_bytes)

    scene.wire.send(scene.wire.call(1, b"", LARGE))

    found = scene.wire.read()
    data = data_of(found)
    assert b"".join(data) == prefixed(b"head" + bytes(size))
    assert {len(part) for part in data[:-1]} <= {min(frame_bytes, MIB)}
    assert status_of(scene.wire, found) == "0"


async def test_a_large_reply_is_written_at_once_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, written = Scene(), list[list[Any]]()
    monkeypatch.setattr(scene.wire, "writelines", lambda pieces: written.append(list(pieces)))

    scene.wire.send(scene.wire.call(1, b"", LARGE))

    (pieces,) = written
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert sum(map(len, views)) == len(REPLY)
    assert all(view.obj is REPLY for view in views)
    assert scene.wire.connection._streams == {}


class Lent:
    """The memory of an answer."""

    is_released = False

    def become(self, size: int) -> None:
        del self, size

    def release(self) -> None:
        self.is_released = True


async def test_a_reply_keeps_its_memory_until_its_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply counts until its client reads, also when all of it is written to the transport."""
    scene, lent = Scene(bytes(3 * MIB - len(prefixed(b"head")))), Lent()
    write = scene.wire.writelines

    def full(pieces: Iterable[Bytes]) -> None:
        write(pieces)
        scene.wire.connection.pause_writing()

    def answer(call: GrpcCall, _: Bytes) -> None:
        call.keep(lent)  # type: ignore[arg-type]  # what is used of it is here
        scene.answer(call, b"")

    method = Method(lambda *_: None, answer, False, MAX_MESSAGE_BYTES)
    monkeypatch.setattr(scene.wire.server, "_methods", {LARGE.encode(): method})
    monkeypatch.setattr(scene.wire, "writelines", full)
    scene.wire.send(scene.wire.call(1, b"", LARGE))
    sent, kept = list[int](), list[bool]()

    for _ in range(3):
        found = scene.wire.read()
        sent.append(sum(map(len, data_of(found))))
        kept.append(not lent.is_released)
        scene.wire.connection.resume_writing()

    (last,) = [frame for frame in scene.wire.read() if frame.kind == HEADERS]
    assert sent == [MIB] * 3
    assert kept == [True] * 3
    assert last.flags & frames.END_STREAM
    assert lent.is_released


async def test_a_client_may_answer_each_frame_of_a_large_reply() -> None:
    """A window and a PING for each of its frames use up nothing."""
    scene = Scene(limits=LIMITS._replace(idle_frames=100))
    for number in range(1, 41, 2):
        scene.wire.send(scene.wire.call(number, b"", LARGE))
        frames_sent = len(data_of(scene.wire.read()))
        scene.wire.send((window(0, 16_384) + frames.frame(frames.PING, 0, 0, bytes(8))) * frames_sent)

    assert not scene.wire.is_closed
    assert [frame.kind for frame in scene.wire.read() if frame.kind == WINDOW_UPDATE] == []
