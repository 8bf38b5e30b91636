"""Bodies of many MiB that a gateway receives into memory in pieces, and a worker copies in pieces."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from qinfer.core.settings_sections import SegmentSettings
from qinfer.segments import memory as segments
from qinfer.segments.memory import PIECE_BYTES, OwnSegment
from qinfer.segments.reading import TensorView
from qinfer.segments.slabs import Place
from qinfer.testing import eventually
from qinfer_api.http.connection import HttpConnection
from tests.integration.worker.test_shared_tensors import answer_of, body_of, held, largest_entries, opened, shared, ways
from tests.support import models
from tests.support.served_models import ServedModels, models_served

pytestmark = pytest.mark.timeout(120)

MIB = 2**20


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServedModels]:
    nodes = [
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=1),
    ]
    models.write(tmp_path / "repository", "total", nodes, [("x", "FP32", (-1,))], [("y", "FP32", (1,))])
    shared_memory = SegmentSettings(directory=str(tmp_path / "m"))
    async with models_served(tmp_path / "repository", {"segments": shared_memory}) as scene:
        await scene.http.load_model("total")
        await shared(scene, "w1")
        yield scene


def numbers(nbytes: int, value: int = 1) -> np.ndarray:
    """Returns few ones, whose sum is exact, among zeros."""
    tensor = np.zeros((1, nbytes // 4), "f4")
    tensor[0, :: 64 * 1024] = value
    return tensor


def pages(scene: ServedModels) -> int:
    """Returns the bytes that the machine's memory holds for the gateway's segments."""
    assert scene.gateway._segments is not None
    own = scene.gateway._segments.own.segments.values()
    return sum(os.fstat(segment.descriptor).st_blocks * 512 for segment in own)


async def send(writer: asyncio.StreamWriter, text: bytes) -> None:
    for begin in range(0, len(text), 128 * 1024):
        writer.write(text[begin : begin + 128 * 1024])
        await writer.drain()


async def test_memory_for_a_large_body_is_taken_and_filled_in_pieces(
    scene: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, pages and copies would hold the event loop up for 50 ms."""
    allocate, get_buffer, sizes = segments.allocate, HttpConnection.get_buffer, {0}

    def allocated(segment: OwnSegment, place: Place) -> None:
        sizes.add(place.size)
        allocate(segment, place)

    def given(connection: HttpConnection, sizehint: int) -> memoryview:
        buffer = get_buffer(connection, sizehint)
        sizes.add(len(buffer))
        return buffer

    monkeypatch.setattr(segments, "allocate", allocated)
    monkeypatch.setattr(HttpConnection, "get_buffer", given)
    reader, writer = await opened(scene)
    for number in range(3):
        sent = numbers(60 * MIB, number + 1)
        await send(writer, body_of(sent, "total"))
        assert (await answer_of(reader)).tolist() == [sent.sum()]

    writer.close()
    assert max(sizes) == PIECE_BYTES
    assert await ways(scene) == {"memory": 3}
    assert await largest_entries(scene) == []
    assert held(scene) == 0
    await eventually(lambda: pages(scene) == 0, 10.0, "pages that were given back")


async def test_pages_of_a_body_come_with_its_bytes(scene: ServedModels) -> None:
    """A client that leaves gives them back."""
    _, writer = await opened(scene)
    text = body_of(numbers(40 * MIB), "total")
    await send(writer, text[: 10 * MIB])
    await eventually(lambda: pages(scene) > 9 * MIB, 10.0, "ten MiB")
    assert pages(scene) <= 10 * MIB + 2 * PIECE_BYTES

    writer.transport.abort()

    await eventually(lambda: held(scene) == 0 and pages(scene) == 0, 10.0, "memory that was given back")


async def test_a_body_for_which_memory_ends_is_refused(scene: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, and the memory is given back."""
    allocate, left = segments.allocate, [5]

    def some(segment: OwnSegment, place: Place) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(segment, place)

    monkeypatch.setattr(segments, "allocate", some)
    reader, writer = await opened(scene)
    asked = asyncio.create_task(send(writer, body_of(numbers(40 * MIB), "total")))

    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith("http/1.1 503 ")
    assert "connection: close" in head
    assert "retry-after: 1" in head
    assert b"no memory left" in await reader.read()
    await eventually(lambda: held(scene) == 0, 10.0, "memory that was given back")
    asked.cancel()
    writer.close()

    reader, writer = await opened(scene)
    small = numbers(MIB, 3)
    await send(writer, body_of(small, "total"))
    assert (await answer_of(reader)).tolist() == [small.sum()]
    writer.close()
    assert await ways(scene) == {"no_memory": 1}


async def test_a_large_body_beyond_the_bound_is_answered_through_redis(scene: ServedModels) -> None:
    """Another one has the room."""
    assert scene.gateway._segments is not None
    sent = numbers(20 * MIB, 2)
    other = scene.gateway._segments.own.take(240 * MIB, "", in_pieces=True)
    assert other is not None
    reader, writer = await opened(scene)
    await send(writer, body_of(sent, "total"))

    assert (await answer_of(reader)).tolist() == [sent.sum()]
    assert await ways(scene) == {}
    other.release()
    await send(writer, body_of(sent, "total"))
    assert (await answer_of(reader)).tolist() == [sent.sum()]
    assert await ways(scene) == {"memory": 1}
    assert await largest_entries(scene) == []
    writer.close()


async def test_a_request_that_ends_while_it_is_copied_is_not_executed(
    scene: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory may have become another request's between two pieces."""
    looks: list[TensorView] = []

    def is_first_look(view: TensorView) -> bool:
        looks.append(view)
        return len(looks) == 1

    monkeypatch.setattr(TensorView, "is_current", is_first_look)
    reader, writer = await opened(scene)
    await send(writer, body_of(numbers(20 * MIB), "total"))

    await eventually(lambda: len(looks) == 2, 10.0, "a look after the copy")
    await eventually(lambda: scene.waits("total", 0), description="an entry that is finished")
    assert held(scene) > 0
    writer.transport.abort()
    with pytest.raises(asyncio.IncompleteReadError):
        await reader.readexactly(1)
    await eventually(lambda: held(scene) == 0, 10.0, "memory that was given back")
