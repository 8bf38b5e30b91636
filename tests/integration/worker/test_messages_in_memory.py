"""gRPC messages that a gateway receives into its memory, frame by frame, because they are like earlier ones."""

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.submission.response_cache import inputs_digest
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer_api.rpc import frames
from qinfer_api.rpc.http2 import Http2Connection
from tests.integration.worker.test_shared_tensors import IMAGE, held, no_copies, scene, ways
from tests.support.ensembles import scale
from tests.support.http2 import (
    DATA,
    HEADERS,
    RST_STREAM,
    WINDOW_UPDATE,
    Requests,
    Short,
    prefixed,
    reset,
    settings_frame,
)
from tests.support.served_models import ServedModels

__all__ = ["no_copies", "scene"]

pytestmark = pytest.mark.timeout(90)

INFER = "/inference.GRPCInferenceService/ModelInfer"


def message(values: np.ndarray, model: str = "double") -> bytes:
    """Returns a request with its prefix."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[values.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=list(values.shape))
    return prefixed(request.SerializeToString())


class Caller:
    """One connection, which keeps to the server's windows; by stream: reply, status, code of a reset."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.requests, self.decoder = Requests(), hpack.Decoder()
        self.replies: defaultdict[int, bytes] = defaultdict(bytes)
        self.statuses: dict[int, str] = {}
        self.resets: dict[int, int] = {}
        self.windows: defaultdict[int, int] = defaultdict(lambda: 64 * 1024)
        self.windows[0] = frames.FIRST_WINDOW_BYTES
        writer.write(frames.PREFACE + settings_frame())

    def begin(self, number: int) -> None:
        self.writer.write(self.requests.headers(number, self.requests.block(INFER)))

    async def send(self, number: int, text: bytes, size: int = 16_384, *, is_whole: bool = True) -> None:
        """Sends a message in frames of this size."""
        for begin in range(0, len(text), size):
            part = text[begin : begin + size]
            while min(self.windows[number], self.windows[0]) < len(part):
                await self._read()
            is_last = is_whole and begin + size >= len(text)
            self.writer.write(frames.frame(DATA, frames.END_STREAM if is_last else 0, number, part))
            self.windows[number] -= len(part)
            self.windows[0] -= len(part)

    async def values(self, number: int) -> np.ndarray:
        """Returns the answer to a call."""
        assert await self.status(number) == "0"
        reply = pb.ModelInferResponse.FromString(self.replies[number][5:])
        return np.frombuffer(reply.raw_output_contents[0], "f4")

    async def status(self, number: int) -> str:
        while number not in self.statuses:
            await self._read()
        return self.statuses[number]

    async def code(self, number: int) -> int:
        """Returns the code of a stream's reset."""
        while number not in self.resets:
            await self._read()
        return self.resets[number]

    async def _read(self) -> None:
        word, _, number = frames.HEAD.unpack(await self.reader.readexactly(frames.HEAD_BYTES))
        kind, payload = word & 0xFF, await self.reader.readexactly(word >> 8)
        if kind == WINDOW_UPDATE:
            self.windows[number] += int.from_bytes(payload)
        elif kind == RST_STREAM:
            self.resets[number] = int.from_bytes(payload)
        elif kind == DATA:
            self.replies[number] += payload
            self.writer.write(
                b"".join(frames.frame(WINDOW_UPDATE, 0, n, len(payload).to_bytes(4)) for n in (0, number))
            )
        elif kind == HEADERS:
            fields = {str(name): str(value) for name, value in self.decoder.decode(payload)}
            if "grpc-status" in fields:
                self.statuses[number] = fields["grpc-status"]


@asynccontextmanager
async def caller(scene: ServedModels) -> AsyncIterator[Caller]:
    host, _, port = scene.grpc_target.rpartition(":")
    one = Caller(*await asyncio.open_connection(host, int(port)))
    try:
        yield one
    finally:
        one.writer.close()


@pytest.fixture
async def known(scene: ServedModels) -> ServedModels:
    """A gateway that has had two images, so that it knows the third by its size."""
    async with caller(scene) as one:
        for number in (1, 3):
            one.begin(number)
            await one.send(number, message(IMAGE))
            assert np.array_equal(await one.values(number), IMAGE[0] * 2)
    return scene


async def test_messages_are_received_into_memory_whatever_their_frames(known: ServedModels, no_copies: None) -> None:
    draw = random.Random(5)
    async with caller(known) as one:
        for number, size in ((1, 16_384), (3, 65_536), (5, 1009)):
            one.begin(number)
            await one.send(number, message(IMAGE + number), size)
        for number in (1, 3, 5):
            assert np.array_equal(await one.values(number), (IMAGE[0] + number) * 2)

        for number in (7, 9, 11):
            one.begin(number)
        rest = {number: message(IMAGE + number) for number in (7, 9, 11)}
        while rest:
            number = draw.choice(list(rest))
            size = draw.choice([1, 100, 16_384, 40_000, 150_000])
            await one.send(number, rest[number][:size], 16_384, is_whole=size >= len(rest[number]))
            rest[number] = rest[number][size:]
            if not rest[number]:
                del rest[number]
        for number in (7, 9, 11):
            assert np.array_equal(await one.values(number), (IMAGE[0] + number) * 2)
    assert held(known) == 0
    assert await ways(known) == {"memory": 8}


async def test_padded_and_empty_frames_within_a_message(known: ServedModels, no_copies: None) -> None:
    text = message(IMAGE + 1)
    async with caller(known) as one:
        one.begin(1)
        await one.send(1, text[:100_000], is_whole=False)
        one.writer.write(frames.frame(DATA, frames.PADDED, 1, b"\x03" + text[100_000:100_500] + bytes(3)))
        one.writer.write(frames.frame(DATA, 0, 1))
        await one.send(1, text[100_500:])

        assert np.array_equal(await one.values(1), (IMAGE[0] + 1) * 2)
    assert held(known) == 0


@pytest.mark.parametrize("leave", ["reset", "end", "abort"])
async def test_a_client_that_leaves_in_its_message_gives_the_memory_back(known: ServedModels, leave: str) -> None:
    async with caller(known) as one:
        one.begin(1)
        await one.send(1, message(IMAGE)[:300_000], is_whole=False)
        await eventually(lambda: held(known) > 0, description="a message in memory")

        if leave == "reset":
            one.writer.write(reset(1, frames.CANCEL))
        elif leave == "end":
            one.writer.write(frames.frame(DATA, frames.END_STREAM, 1, b"x"))
            assert await one.status(1) == "13"
        else:
            one.writer.transport.abort()

        await eventually(lambda: held(known) == 0, description="memory that was given back")
    assert np.array_equal((await known.infer("double", x=IMAGE)).as_numpy("y"), IMAGE * 2)


async def test_another_message_of_the_same_size_is_read_as_it_is(known: ServedModels) -> None:
    """The memory was for a message of another model; so it is copied out of it."""
    async with caller(known) as one:
        one.begin(1)
        await one.send(1, message(IMAGE, model="absent"))
        one.begin(3)
        await one.send(3, message(IMAGE + 3))

        assert await one.status(1) == "5"
        assert np.array_equal(await one.values(3), (IMAGE[0] + 3) * 2)
    assert held(known) == 0


async def test_more_than_the_window_in_a_message_in_memory_is_refused(known: ServedModels) -> None:
    async with caller(known) as one:
        one.begin(1)
        await one.send(1, message(IMAGE)[:300_000], is_whole=False)
        one.windows[1] += 10**6
        await one.send(1, bytes(600_000))

        assert await one.code(1) == frames.FLOW_CONTROL_ERROR
        one.begin(3)
        await one.send(3, message(IMAGE + 3))
        assert np.array_equal(await one.values(3), (IMAGE[0] + 3) * 2)
    assert held(known) == 0


async def test_what_is_left_of_a_read_without_a_turn_is_read_later(
    known: ServedModels, no_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slice of small frames waits for its turn, so that a connection reads anew while it has a rest."""
    async with caller(known) as one:
        one.begin(1)
        await one.send(1, message(IMAGE + 1))
        assert np.array_equal(await one.values(1), (IMAGE[0] + 1) * 2)
        rpc = known.gateway.rpc
        assert rpc is not None
        (connection,) = {each for each in rpc._calls.connections if each._is_buffered}
        assert isinstance(connection, Http2Connection)
        turns = Short()
        monkeypatch.setattr(connection.service, "turns", turns)
        for number in (3, 5):
            one.begin(number)
            await one.send(number, message(IMAGE + number), 1000)
        for number in (3, 5):
            assert np.array_equal(await one.values(number), (IMAGE[0] + number) * 2)
    assert turns.waits > 4
    assert held(known) == 0


async def test_a_message_of_a_cached_model_is_hashed_off_the_event_loop(
    scene: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message has the size of another model's messages, which are received into memory."""
    scale(scene.repository, "cached", 2.0, width=-1)
    file = scene.repository / "cached" / "config.pbtxt"
    file.write_text(file.read_text() + "response_cache { enable: true }")
    await scene.http.load_model("cached")
    on_loop: list[bool] = []

    def hashed(inputs: Iterable[Tensor]) -> bytes:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return inputs_digest(inputs)

    monkeypatch.setattr("qinfer.submission.submit.inputs_digest", hashed)
    async with caller(scene) as one:
        models = ["cached", "cached", "double", "double", "cached"]
        for number, model in zip(range(1, 11, 2), models, strict=True):
            one.begin(number)
            await one.send(number, message(IMAGE + number, model))
            assert np.array_equal(await one.values(number), (IMAGE[0] + number) * 2)
    assert on_loop == [False] * 3
    assert held(scene) == 0
