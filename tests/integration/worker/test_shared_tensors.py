"""Tensors in the memory of a gateway, read by workers of its machine: over HTTP and gRPC, with real models."""

import asyncio
import errno
import json
import random
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as over_grpc
import tritonclient.http.aio as over_http

from qinfer.core.messages import InferRequest, MemoryReference
from qinfer.core.settings import GrpcSettings, HttpSettings
from qinfer.core.settings_sections import CacheSettings, SegmentSettings
from qinfer.queue.entries import Lane, worker_owner
from qinfer.segments import memory as segments
from qinfer.segments.memory import OwnSegment
from qinfer.segments.shelf import connected, owners, socket_path
from qinfer.segments.slabs import Place
from qinfer.submission.memory import MEMORY
from qinfer.submission.response_cache import inputs_digest
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import encode_referring_request
from qinfer_api.http.connection import HttpConnection
from tests.support.certificates import write_certificate
from tests.support.ensembles import scale
from tests.support.served_models import ServedModels, models_served, tensor

pytestmark = pytest.mark.timeout(90)

IMAGE = np.arange(150_528, dtype="f4").reshape(1, -1)
"""An image of 3 by 224 by 224 has as many numbers: 602,112 bytes."""


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServedModels]:
    scale(tmp_path / "repository", "double", 2.0, width=-1)
    segments = SegmentSettings(directory=str(tmp_path / "m"), least_bytes=16_384)
    cache = CacheSettings(config=f"local,size={2**26}")
    async with models_served(tmp_path / "repository", {"segments": segments, "cache": cache}) as scene:
        await scene.http.load_model("double")
        await shared(scene, "w1")
        yield scene


async def shared(scene: ServedModels, *workers: str) -> None:
    """Waits until just these workers read the gateway's memory."""
    segments = scene.gateway._segments
    assert segments is not None
    names = {worker_owner(worker) for worker in workers}
    await eventually(lambda: segments.shelf.readers == names, description=f"{workers} at the gateway's memory")


async def ways(scene: ServedModels) -> dict[str, int]:
    """Returns how many requests went which way, from the metrics."""
    async with httpx.AsyncClient(base_url=scene.gateway.url) as client:
        return await ways_over(client)


async def ways_over(client: httpx.AsyncClient) -> dict[str, int]:
    lines = (await client.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith("qinfer_segment_requests_total")]
    return {line.partition('way="')[2].partition('"')[0]: int(float(line.rpartition(" ")[2])) for line in found}


def held(scene: ServedModels) -> int:
    segments = scene.gateway._segments
    assert segments is not None
    return segments.own.held_bytes


async def test_images_are_answered_and_do_not_pass_through_redis(scene: ServedModels) -> None:
    asked = [scene.infer("double", x=IMAGE + number) for number in range(8)]
    wanted = over_http.InferRequestedOutput("y")
    over_http_ = [
        scene.http.infer("double", [tensor("x", IMAGE - number, over_http)], outputs=[wanted]) for number in range(8)
    ]

    answers = await asyncio.gather(*asked, *over_http_)

    for number, answer in enumerate(answers):
        sent = IMAGE + number if number < 8 else IMAGE - (number - 8)
        assert np.array_equal(answer.as_numpy("y"), sent * 2)
    assert await ways(scene) == {"memory": 16}
    assert held(scene) == 0
    entries = await largest_entries(scene)
    assert entries == []


def body_of(values: np.ndarray, model: str = "double", name: str = "x", *others: object) -> bytes:
    """Returns a binary request with its head; other inputs have no bytes in it."""
    about = {
        "name": name,
        "shape": list(values.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": values.nbytes},
    }
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    text = json.dumps({"inputs": [about, *others], "outputs": outputs}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Inference-Header-Content-Length: {len(text)}\r\n"
    head += f"Content-Length: {len(text) + values.nbytes}\r\n\r\n"
    return head.encode() + text + values.tobytes()


async def answer_of(reader: asyncio.StreamReader) -> np.ndarray:
    """Reads an answer of one binary output."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    assert lines[0] == "http/1.1 200 ok"
    headers = dict(line.split(": ") for line in lines[1:-1])
    body = await reader.readexactly(int(headers["content-length"]))
    return np.frombuffer(body[int(headers["inference-header-content-length"]) :], "f4")


async def opened(scene: ServedModels) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = scene.gateway.url.partition("://")[2].rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=2**22)


@pytest.fixture
def no_copies(scene: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which the gateway copies tensors into its memory."""
    segments = scene.gateway._segments
    assert segments is not None
    monkeypatch.setattr(segments.own, "write", Mock(side_effect=AssertionError("tensors were copied")))


@pytest.mark.usefixtures("no_copies")
async def test_a_body_is_received_into_memory_whatever_its_pieces(scene: ServedModels) -> None:
    """Two requests on one connection, the second behind the first; then pieces of odd sizes, one by one."""
    reader, writer = await opened(scene)
    writer.write(body_of(IMAGE) + body_of(IMAGE + 1))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    assert np.array_equal(await answer_of(reader), (IMAGE[0] + 1) * 2)

    text, position, draw = body_of(IMAGE + 2), 0, random.Random(3)
    while position < len(text):
        size = draw.choice([1, 100, 4097, 70_001, 300_000])
        writer.write(text[position : position + size])
        await writer.drain()
        await asyncio.sleep(0)
        position += size
    assert np.array_equal(await answer_of(reader), (IMAGE[0] + 2) * 2)
    writer.close()
    assert held(scene) == 0


async def configure(scene: ServedModels, text: str) -> None:
    """Loads the model with a longer configuration."""
    file = scene.repository / "double" / "config.pbtxt"
    file.write_text(file.read_text() + text)
    await scene.http.load_model("double")


SPLIT = 'parameters { key: "qinfer.split" value { string_value: "true" } }'
ROWS = IMAGE.reshape(32, -1)
"""Four parts."""


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("text", [SPLIT, SPLIT + " response_cache { enable: true }"])
async def test_parts_of_a_request_refer_to_its_memory(scene: ServedModels, text: str) -> None:
    await configure(scene, text)
    reader, writer = await opened(scene)
    for number in range(3):
        writer.write(body_of(ROWS + number))
        assert np.array_equal(await answer_of(reader), ((ROWS + number) * 2).ravel())

    writer.close()
    assert await ways(scene) == {"memory": 12}
    assert held(scene) == 0


async def test_a_client_that_leaves_takes_the_memory_of_its_parts_along(scene: ServedModels) -> None:
    await configure(scene, SPLIT)
    serving = scene.workers["w1"]._serving["double", 1]
    await serving.pause_serving()
    _, writer = await opened(scene)
    writer.write(body_of(ROWS))
    await eventually(lambda: scene.waits("double", 4), description="four parts")
    assert held(scene) > 0

    writer.transport.abort()

    await eventually(lambda: held(scene) == 0, description="memory that was given back")
    serving.batcher.resume_batching()


@pytest.mark.usefixtures("no_copies")
async def test_a_request_to_a_cached_model_lies_in_memory_until_it_is_executed(scene: ServedModels) -> None:
    """Another one waits for the same execution, and a third is answered by the cache."""
    await configure(scene, "response_cache { enable: true }")
    serving = scene.workers["w1"]._serving["double", 1]
    await serving.pause_serving()
    (reader, writer), (other_reader, other_writer) = await opened(scene), await opened(scene)
    writer.write(body_of(IMAGE))
    other_writer.write(body_of(IMAGE))
    await eventually(lambda: scene.gateway.dispatcher.in_flight == 3, description="two requests and one execution")
    serving.batcher.resume_batching()

    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    assert np.array_equal(await answer_of(other_reader), IMAGE[0] * 2)
    writer.write(body_of(IMAGE))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    assert await ways(scene) == {"memory": 1}
    assert held(scene) == 0
    for each in (writer, other_writer):
        each.close()


@pytest.mark.parametrize("sent", [300, 250_000, 500_000, 602_000])
async def test_a_client_that_leaves_in_its_body_gives_the_memory_back(scene: ServedModels, sent: int) -> None:
    _, writer = await opened(scene)
    writer.write(body_of(IMAGE)[:sent])
    await writer.drain()
    if sent > 300:
        await eventually(lambda: held(scene) > 0, description="a body in memory")

    writer.transport.abort()

    await eventually(lambda: held(scene) == 0, description="memory that was given back")
    assert np.array_equal((await scene.infer("double", x=IMAGE)).as_numpy("y"), IMAGE * 2)


@pytest.mark.parametrize("problem", ["shape", "model", "json", "input"])
async def test_a_body_that_is_refused_gives_the_memory_back(scene: ServedModels, problem: str) -> None:
    """The connection goes on."""
    text = body_of(IMAGE)
    wrong = {
        "shape": (b"150528", b"150527"),
        "model": (b"/double/", b"/doubl2/"),
        "json": (b'"inputs"', b'"inputs!'),
        "input": (b'"x"', b'"z"'),
    }[problem]
    reader, writer = await opened(scene)
    writer.write(text.replace(*wrong, 1))
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    await reader.readexactly(int(dict(line.split(": ") for line in lines[1:-1])["content-length"]))

    assert lines[0].split()[1] in ("400", "404")
    assert held(scene) == 0
    writer.write(text)
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    writer.close()


async def largest_entries(scene: ServedModels) -> list[int]:
    """Returns the sizes of stored payloads; there are none."""
    found = await scene.store.client.keys("qinfer:{*}:payload:*")
    return [len(await scene.store.client.get(name)) for name in found]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_large_tensors_are_hashed_off_the_event_loop(
    scene: ServedModels, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response cache needs the hash of all of them; other callers would wait for it."""
    await configure(scene, "response_cache { enable: true }")
    threads: list[bool] = []

    def hashed(inputs: Iterable[Tensor]) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return inputs_digest(inputs)

    monkeypatch.setattr("qinfer.submission.submit.inputs_digest", hashed)
    for number in range(4):  # the third message of gRPC is like those before it
        if protocol == "grpc":
            answer = await scene.infer("double", x=IMAGE + number)
        else:
            answer = await scene.http.infer("double", [tensor("x", IMAGE + number, over_http)])
        assert np.array_equal(answer.as_numpy("y"), (IMAGE + number) * 2)

    assert threads == [False] * 4


async def test_small_requests_pass_through_redis(scene: ServedModels) -> None:
    answer = await scene.infer("double", x=IMAGE[:, :1000])

    assert np.array_equal(answer.as_numpy("y"), IMAGE[:, :1000] * 2)
    assert await ways(scene) == {}


async def test_a_worker_without_the_directory_gets_whole_requests(scene: ServedModels) -> None:
    """While a worker lives that reads no memory, as one of another machine, no request refers to memory."""
    scene._sections = {}
    await scene.worker("far")
    await eventually(lambda: len(scene.gateway.catalog.workers()) == 2, description="both workers")

    answers = await asyncio.gather(*[scene.infer("double", x=IMAGE + number) for number in range(4)])

    assert all(np.array_equal(answer.as_numpy("y"), (IMAGE + n) * 2) for n, answer in enumerate(answers))
    assert await ways(scene) == {"old_worker": 4}


async def test_a_worker_that_reads_no_memory_leaves_requests_to_others(
    scene: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may come after a request that it can't read, and take it from the lane first."""
    memory = scene.gateway.dispatcher.submission.memory
    assert memory is not None
    scene._sections, before = {}, scene._sections
    await scene.worker("far")
    live = scene.gateway.catalog.workers
    await eventually(lambda: any(one.id == "far" and one.is_ready("double", 1) for one in live()), description="far")
    await scene.kill("w1")
    monkeypatch.setattr(memory, "_way", lambda _: MEMORY)  # as if it had not been seen yet
    asked = asyncio.create_task(scene.infer("double", x=IMAGE))
    await eventually(lambda: held(scene) > 0, description="tensors in memory")
    scene._sections = before
    await scene.worker("w2")

    answer = await asked

    assert np.array_equal(answer.as_numpy("y"), IMAGE * 2)


async def test_a_request_whose_dead_gateway_no_worker_knew_ends_at_its_deadline(scene: ServedModels) -> None:
    """Its gateway may be one that is not reached here and now; workers put it back until then."""
    request = InferRequest(
        model="double",
        version=1,
        id="r",
        timeout_s=0.3,
        reply_to="reply:gateway-dead",
        inputs=(Tensor("x", "FP32", (1, 5000), bytes(20_000)),),
    )
    frame = encode_referring_request(request, MemoryReference("gateway-dead", 1, 0, 20_000, 1), [0])
    submitted = asyncio.Event()
    scene.gateway._delivery.submit(Lane("double", 1), frame, lambda _: submitted.set())
    await submitted.wait()
    assert await scene.waits("double", 1)

    await eventually(lambda: scene.waits("double", 0), description="an empty lane")


async def test_many_sizes_come_back_as_they_were_sent(scene: ServedModels) -> None:
    """Slabs of all sizes are reused while others are in use."""
    draw = np.random.default_rng(5)

    async def ask(number: int) -> None:
        width = int(2 ** draw.uniform(8, 20))
        sent = np.full((1, width), number, "f4")
        answer = (await scene.infer("double", x=sent)).as_numpy("y")
        assert answer.shape == (1, width)
        assert (answer == 2 * number).all()

    for turn in range(5):
        await asyncio.gather(*[ask(turn * 20 + number) for number in range(20)])

    assert held(scene) == 0


async def test_a_caller_that_leaves_gives_the_memory_back(scene: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.kill("w1")
    memory = scene.gateway.dispatcher.submission.memory
    assert memory is not None
    monkeypatch.setattr(memory, "_way", lambda _: MEMORY)
    asked = asyncio.create_task(scene.infer("double", x=IMAGE))
    await eventually(lambda: held(scene) > 0, description="tensors in memory")

    asked.cancel()

    await eventually(lambda: held(scene) == 0, description="memory that was given back")


@pytest.mark.usefixtures("no_copies")
async def test_heads_of_later_bodies_need_no_parser(scene: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has sent a large body sends more, between small requests, and one that is refused."""
    reader, writer = await opened(scene)
    writer.write(body_of(IMAGE))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    began = Mock(side_effect=HttpConnection.on_message_begin, autospec=True)
    monkeypatch.setattr(HttpConnection, "on_message_begin", lambda connection: began(connection))

    for number in (1, 2):
        writer.write(body_of(IMAGE + number))
        assert np.array_equal(await answer_of(reader), (IMAGE[0] + number) * 2)
    began.assert_not_called()
    writer.write(body_of(IMAGE[:, :100]))
    assert np.array_equal(await answer_of(reader), IMAGE[0, :100] * 2)
    writer.write(body_of(IMAGE).replace(b"/double/", b"/absent/"))
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404")
    writer.close()
    assert held(scene) == 0


@pytest.mark.usefixtures("no_copies")
async def test_a_body_whose_head_needs_no_parser_waits_for_memory_as_others_do(scene: ServedModels) -> None:
    reader, writer = await opened(scene)
    writer.write(body_of(IMAGE))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    receiving = scene.gateway.receiving
    others = receiving.reserve("another", receiving._max_bytes - 1000, lambda: None)
    assert others is not None
    assert others.is_granted

    writer.write(body_of(IMAGE + 1))
    await eventually(lambda: receiving.waiting == 1, description="a body that waits")
    others.release()

    assert np.array_equal(await answer_of(reader), (IMAGE[0] + 1) * 2)
    writer.close()
    assert held(scene) == 0


async def test_without_room_for_pages_requests_and_answers_go_through_redis(
    scene: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has no memory for gateway and worker, and then it has some."""
    allocate, is_full = segments.allocate, [True]

    def allocated(segment: OwnSegment, place: Place) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "no room")
        allocate(segment, place)

    monkeypatch.setattr(segments, "allocate", allocated)
    reader, writer = await opened(scene)
    for number in range(3):
        answer = await scene.infer("double", x=IMAGE + number)
        writer.write(body_of(IMAGE - number))

        assert np.array_equal(answer.as_numpy("y"), (IMAGE + number) * 2)
        assert np.array_equal(await answer_of(reader), (IMAGE[0] - number) * 2)
    before = await ways(scene)
    is_full[0] = False
    answer = await scene.infer("double", x=IMAGE)
    writer.close()

    assert before == {"no_memory": 6}
    assert np.array_equal(answer.as_numpy("y"), IMAGE * 2)
    assert (await ways(scene))["memory"] == 1
    assert held(scene) == 0


async def test_peers_that_stall_hold_no_request_up(scene: ServedModels) -> None:
    """They connect to gateway and worker, send nothing or half of a proof, and stay."""
    directory = Path(scene._sections["segments"].directory)
    paths = [socket_path(directory, owner) for owner in owners(directory)]
    with ExitStack() as stack:
        for number in range(40):
            for path in paths:
                peer = stack.enter_context(connected(path))
                if number % 2:
                    peer.send(b"half of a proof")
            answer = await scene.infer("double", x=IMAGE + number)
            assert np.array_equal(answer.as_numpy("y"), (IMAGE + number) * 2)

    assert await ways(scene) == {"memory": 40}
    assert held(scene) == 0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has processes ask for the secret more often."""
    monkeypatch.setattr("qinfer.segments.sharing.SECRET_EVERY_S", 0.2)


async def test_a_secret_that_redis_lost_is_made_again(hasty: None, scene: ServedModels) -> None:
    """Connections stay, and workers that come later are readers, too."""
    await scene.store.client.delete("qinfer:segment-secret")
    assert np.array_equal((await scene.infer("double", x=IMAGE)).as_numpy("y"), IMAGE * 2)

    await scene.worker("w2")

    await shared(scene, "w1", "w2")
    assert await ways(scene) == {"memory": 1}


@pytest.mark.usefixtures("no_copies")
async def test_a_flood_after_a_large_body_is_read_as_any_other(scene: ServedModels) -> None:
    """The connection makes large reads again, which wait for their turns."""
    flood = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300
    reader, writer = await opened(scene)
    writer.write(body_of(IMAGE))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    (connection,) = [each for each in scene.gateway._server.port.connections if each._lands]

    writer.write(flood)
    for _ in range(300):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    assert not connection._lands
    writer.write(body_of(IMAGE + 1))
    assert np.array_equal(await answer_of(reader), (IMAGE[0] + 1) * 2)
    writer.close()


async def test_a_connection_reads_small_bodies_at_once_after_a_large_one(scene: ServedModels) -> None:
    """A gateway reads bodies of at most 64 KiB with their heads, and copies their tensors into memory."""
    small = IMAGE[:, : 16 * 1024]
    reader, writer = await opened(scene)
    writer.write(body_of(IMAGE))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    (connection,) = [each for each in scene.gateway._server.port.connections if each._lands]

    for number in range(3):
        writer.write(body_of(small[:, : 4096 * (number + 1)]))
        assert np.array_equal(await answer_of(reader), small[0, : 4096 * (number + 1)] * 2)
        assert not connection._lands

    assert await ways(scene) == {"memory": 4}
    assert held(scene) == 0
    writer.close()


async def test_images_over_tls(tmp_path: Path) -> None:
    """One connection of each protocol sends several images."""
    scale(tmp_path / "repository", "double", 2.0, width=-1)
    write_certificate(tmp_path, "server")
    files = {"tls_certfile": str(tmp_path / "server.pem"), "tls_keyfile": str(tmp_path / "server.key")}
    segments = SegmentSettings(directory=str(tmp_path / "m"), least_bytes=16_384)
    sections = {"segments": segments, "http": HttpSettings(port=0, **files), "grpc": GrpcSettings(port=0, **files)}
    async with (
        models_served(tmp_path / "repository", sections) as scene,
        httpx.AsyncClient(base_url=scene.gateway.url, verify=False, timeout=30) as client,
        over_grpc.InferenceServerClient(
            scene.grpc_target, ssl=True, root_certificates=str(tmp_path / "server.pem")
        ) as over_rpc,
    ):
        (await client.post("/v2/repository/models/double/load")).raise_for_status()
        await shared(scene, "w1")
        for number in range(4):
            head, _, body = body_of(IMAGE + number).partition(b"\r\n\r\n")
            length = head.rpartition(b"Content-Length: ")[0].partition(b"Content-Length: ")[2].split()[0]
            headers = {"Inference-Header-Content-Length": length.decode()}
            answer = await client.post("/v2/models/double/infer", content=body, headers=headers)
            tail = answer.content[int(answer.headers["inference-header-content-length"]) :]
            assert np.array_equal(np.frombuffer(tail, "f4"), (IMAGE[0] + number) * 2)

            reply = await over_rpc.infer("double", [tensor("x", IMAGE - number)])
            assert np.array_equal(reply.as_numpy("y"), (IMAGE - number) * 2)
        assert await ways_over(client) == {"memory": 8}
        assert held(scene) == 0
