"""Outputs in a worker's memory: written, confirmed, or sent through Redis after all."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from qinfer.core.messages import MemoryReference, Response
from qinfer.core.settings_sections import SegmentSettings
from qinfer.segments.reading import SegmentReader
from qinfer.segments.sharing import SegmentSharing
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_responses
from qinfer_workers.inference import reply_memory
from qinfer_workers.inference.reply_memory import ReplyMemory

ADDRESS = "reply:gateway-a"


def response(name: str, size: int, *, final: bool = True, index: int = 0) -> Response:
    outputs = (Tensor("y", "UINT8", (1, size), name.encode() * size), Tensor("z", "UINT8", (1, 3), b"end"))
    return Response(request_id=name, model="m", version=1, outputs=outputs, final=final, index=index)


def size_of(responses: Sequence[Response]) -> int:
    return sum(one.nbytes for one in responses)


async def secret() -> bytes:
    return b"secret"


class Scene:
    """A worker's memory, and a gateway that reads it."""

    def __init__(self, directory: Path) -> None:
        settings = SegmentSettings(directory=str(directory), most_bytes=8 * 2**20)
        self.worker = SegmentSharing(settings, "worker-w", ("gateway-",), secret, reader="worker-w")
        self.own = self.worker.own
        self.replies = ReplyMemory(self.own, self.worker.shelf, 1000)
        self.reader = SegmentReader(directory, "gateway-a", ("worker-",))
        self.reader.secret = b"secret"
        self.running = asyncio.gather(self.worker.run(), self.reader.run())
        self.known = {"a", "b"}

    def read(self, request_id: str, reference: MemoryReference) -> bytes | None:
        """Reads outputs as a gateway does."""
        outputs = self.reader.read(reference) if request_id in self.known else None
        self.reader.confirm(reference)
        return outputs


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "m")
    await eventually(lambda: bool(scene.replies._shelf.readers), description="the gateway")
    yield scene
    scene.running.cancel()
    await asyncio.gather(scene.running, return_exceptions=True)
    scene.worker.close()


async def test_large_outputs_travel_beside_the_reply(scene: Scene) -> None:
    responses = [response("a", 1000), response("s", 10), response("b", 5000)]
    kept = scene.replies.keep(ADDRESS, responses, size_of(responses))
    assert kept is not None
    blob = encode_responses(responses, kept.references)

    assert len(blob) < 600
    assert decode_responses(blob, scene.read) == responses
    assert await kept.unconfirmed() == []
    assert scene.own.held_bytes == 0


async def test_a_reply_that_nobody_waits_for_is_confirmed_unread(scene: Scene) -> None:
    scene.known = {"a"}
    responses = [response("a", 1000), response("gone", 5000)]
    kept = scene.replies.keep(ADDRESS, responses, size_of(responses))
    assert kept is not None

    assert decode_responses(encode_responses(responses, kept.references), scene.read) == responses[:1]
    assert await kept.unconfirmed() == []


async def test_what_is_not_confirmed_goes_through_redis(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway never got the reference; a late one finds nothing in memory."""
    monkeypatch.setattr(reply_memory, "CONFIRMED_WITHIN_S", 0.01)
    responses = [response("a", 1000), response("b", 5000)]
    kept = scene.replies.keep(ADDRESS, responses, size_of(responses))
    assert kept is not None
    scene.read("a", kept.references["a"])
    await eventually(lambda: len(kept._waiting) == 1, description="a confirmation")

    assert await kept.unconfirmed() == responses[1:]
    assert scene.own.held_bytes == 0
    assert scene.replies._waiting == {}
    scene.reader.confirm(kept.references["b"])  # too late
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("address", "one"),
    [
        ("reply:gateway-b", response("a", 1000)),  # of another machine
        (ADDRESS, response("a", 900)),
        (ADDRESS, response("a", 1000, final=False)),
        (ADDRESS, response("a", 1000, index=1)),
    ],
)
async def test_other_replies_travel_whole(scene: Scene, address: str, one: Response) -> None:
    assert scene.replies.keep(address, [one], size_of([one])) is None


async def test_without_room_outputs_travel_whole(scene: Scene) -> None:
    responses = [response("a", 5 * 2**20), response("b", 5 * 2**20)]
    kept = scene.replies.keep(ADDRESS, responses, size_of(responses))

    assert kept is not None
    assert list(kept.references) == ["a"]
    assert decode_responses(encode_responses(responses, kept.references), scene.read) == responses


async def test_who_reads_no_memory_leaves_such_responses_out(scene: Scene) -> None:
    kept = scene.replies.keep(ADDRESS, [response("a", 1000)], 1003)
    assert kept is not None

    assert decode_responses(encode_responses([response("a", 1000)], kept.references)) == []
