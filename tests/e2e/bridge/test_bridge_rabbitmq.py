"""The whole stack between the queues of a real RabbitMQ: bodies of every kind, replies, dead letters, many bridges."""

import asyncio
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from qinfer.testing import eventually
from tests.e2e.conftest import Stack
from tests.support.bridge_stack import (
    RECEIVED,
    REPLIED,
    UNROUTABLE,
    Scene,
    add,
    answers,
    bridged_stack,
    consumers,
    data_of,
    ids,
    opened_scene,
)
from tests.support.servers.rabbitmq import RabbitServer

COLUMNS = {"a": ["a0", "a1", "a2", "a3"], "b": ["b0", "b1", "b2", "b3"]}
ROWS = [{**{f"a{i}": i for i in range(4)}, **{f"b{i}": row for i in range(4)}} for row in range(2)]
SUMS = [[row + i for i in range(4)] for row in range(2)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    with bridged_stack(tmp_path_factory.mktemp("up")) as up:
        yield up


@pytest.fixture
def scene(
    rabbit: RabbitServer, up: tuple[Stack, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    with opened_scene(rabbit, up, tmp_path, request.node.name) as scene:
        yield scene


def arrow(is_file: bool) -> bytes:  # noqa: FBT001
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(ROWS)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def binary_kserve() -> tuple[bytes, dict[str, object]]:
    tensors = [np.full(4, value, "<f4").tobytes() for value in (7, 0.5)]
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}} for name in "ab"
    ]
    head = msgspec.json.encode({"inputs": inputs, "outputs": [{"name": "sum", "parameters": {"binary_data": True}}]})
    return head + b"".join(tensors), {"inference-header-content-length": str(len(head))}


async def test_bodies_of_every_kind_by_several_routes(scene: Scene) -> None:
    """Each is answered in its own form, with the ids that it came with."""
    routes = [
        scene.route("add_sub", body={"columns": COLUMNS}),
        scene.route("identity_bytes", "texts"),
        scene.route("identity_uint8", "images"),
    ]
    scene.declare("tasks", "texts", "images")
    lines = b"\n".join(map(msgspec.json.encode, ROWS))
    binary, headers = binary_kserve()
    scene.put(3, "json", correlation_id="c-json")
    scene.put(0, "zipped", gzip.compress(lines), content_type="application/jsonl", content_encoding="gzip")
    packed = {"compression": "application/x-gzip"}
    scene.put(0, "packed", zlib.compress(lines), content_type="application/jsonl", headers=packed)
    scene.put(0, "binary", binary, content_type="application/octet-stream", headers=headers)
    scene.put(0, "lines", lines, content_type="application/x-ndjson")
    scene.put(0, "stream", arrow(False), content_type="application/vnd.apache.arrow.stream")
    scene.put(0, "file", arrow(True), content_type="application/vnd.apache.arrow.file")
    scene.put(0, "text", "Grüße".encode(), "texts", content_type="text/plain")
    scene.put(0, "png", b"\x89PNG", "images", content_type="image/png")

    async with scene.bridge(*routes):
        done = {message.properties["message_id"]: message for message in await scene.take(7)}
        (text,) = await scene.take(queue="texts.done")
        (image,) = await scene.take(queue="images.done")

    assert data_of(done["json"]) == [3.5] * 4
    assert done["json"].properties["correlation_id"] == "c-json"
    assert done["json"].properties["delivery_mode"] == 2
    cut = int(done["binary"].headers["inference-header-content-length"])
    assert np.frombuffer(bytes(done["binary"].body)[cut:], "<f4").tolist() == [7.5] * 4
    assert [msgspec.json.decode(line)["sum"] for line in bytes(done["lines"].body).splitlines()] == SUMS
    assert bytes(done["zipped"].body) == bytes(done["packed"].body) == bytes(done["lines"].body)
    assert pa.ipc.open_stream(bytes(done["stream"].body)).read_all()["sum"].to_pylist() == SUMS
    assert pa.ipc.open_file(bytes(done["file"].body)).read_all()["sum"].to_pylist() == SUMS
    assert data_of(text) == ["Grüße"]
    assert data_of(image) == list(b"\x89PNG")
    assert {scene.sizes("tasks"), scene.sizes("texts"), scene.sizes("images")} == {(0, 0, 0)}


async def test_callers_get_their_replies(scene: Scene) -> None:
    """By RabbitMQ's direct reply-to, to a queue of their own, and by the route's own place without either."""
    scene.declare("tasks", "mine")
    connection = scene.rabbit.connect()
    channel = connection.channel()
    direct: list[Any] = []
    channel.basic_consume("amq.rabbitmq.reply-to", no_ack=True, callback=lambda raw: direct.append(raw))
    asked = channel.prepare_message(
        add(1), content_type="application/json", properties={"reply_to": "amq.rabbitmq.reply-to", "correlation_id": "1"}
    )
    channel.basic_publish(asked, exchange="", routing_key=scene.queue("tasks"))
    scene.broker.put(add(2), queue=scene.queue("tasks"), reply_to=scene.queue("mine"), correlation_id="2")
    scene.broker.put(add(3), queue=scene.queue("tasks"), correlation_id="3", message_id="m3")

    async with scene.bridge(scene.route("add_sub")):
        (mine,) = await scene.take(queue="mine")
        (other,) = await scene.take()
        await asyncio.to_thread(connection.drain_events, timeout=20)
    connection.release()

    assert [data_of(message)[0] for message in (direct[0], mine, other)] == [1.5, 2.5, 3.5]
    assert [message.properties["correlation_id"] for message in (direct[0], mine, other)] == ["1", "2", "3"]
    assert scene.sizes() == (0, 0, 0)


async def test_a_caller_who_has_left_keeps_nobody_waiting(scene: Scene) -> None:
    """Its queue is gone: the reply is counted, and the next ones are sent."""
    scene.declare("tasks")
    scene.broker.put(add(1), queue=scene.queue("tasks"), reply_to=scene.queue("nowhere"), correlation_id="1")
    scene.put(2)

    async with scene.bridge(scene.route("add_sub")) as bridge:
        (other,) = await scene.take()
        await bridge.reaches(UNROUTABLE, 1, place="reply")
        await bridge.reaches(REPLIED, 2)

    assert ids([other]) == ["m2"]
    assert scene.sizes() == (0, 0, 0)


async def test_two_bridges_answer_each_message_once(scene: Scene) -> None:
    """Both take part, and one of them may leave in the middle."""
    scene.declare("tasks")
    route = scene.route("add_sub", source={"prefetch": 10})
    async with scene.bridge(route) as one, scene.bridge(route) as other:
        await eventually(lambda: consumers(scene) == 2, 20, "two consumers")
        for number in range(100):
            scene.put(number)
        messages = await scene.take(100)
        assert min(one.metric(RECEIVED), other.metric(RECEIVED)) > 0
        for number in range(100, 200):
            scene.put(number)
        await one.stop()
        messages += await scene.take(100)

    assert answers(messages) == {f"m{number}": number + 0.5 for number in range(200)}
    assert scene.sizes() == (0, 0, 0)


BAD: dict[str, tuple[bytes, str, dict[str, Any], str]] = {
    "not-json": (b"{", "application/json", {}, "JSON"),
    "no-inputs": (b'{"inputs": []}', "application/json", {}, "input"),
    "unknown-input": (add(1).replace(b'"a"', b'"zebra"'), "application/json", {}, "zebra"),
    "wrong-type": (add(1).replace(b"FP32", b"FP64"), "application/json", {}, "FP64"),
    "wrong-shape": (add(1).replace(b"[1,4]", b"[2,2]"), "application/json", {}, "shape"),
    "too-large": (add(1) + b" " * 3000, "application/json", {}, "3000"),
    "zipped-wrongly": (add(1), "application/json", {"content_encoding": "gzip"}, "gzip"),
    "unknown-encoding": (add(1), "application/json", {"content_encoding": "lz4"}, "lz4"),
    "unknown-compression": (add(1), "application/json", {"headers": {"compression": "application/x-lz4"}}, "lz4"),
    "bomb": (zlib.compress(bytes(2**22)), "application/json", {"headers": {"compression": "zlib"}}, "3000"),
    "row-lacks": (b'{"a0": 1}', "application/jsonl", {}, "lacks"),
    "row-no-json": (msgspec.json.encode(ROWS[0]) + b"\n[", "application/jsonl", {}, "row 2"),
    "too-many-rows": (b"\n".join([msgspec.json.encode(ROWS[0])] * 9), "application/jsonl", {}, "8"),
    "no-arrow": (b"ARROW1xx", "application/vnd.apache.arrow.file", {}, "Arrow"),
    "cut-arrow": (arrow(False)[:-40], "application/vnd.apache.arrow.stream", {}, "Arrow"),
    "raw": (b"\x00\x01", "application/octet-stream", {}, "input"),
    "bad-header": (add(1), "application/json", {"headers": {"inference-header-content-length": "x"}}, "content-length"),
}


async def test_what_can_not_be_used_becomes_a_dead_letter(scene: Scene) -> None:
    """Each with the reason, its body and its ids as they were; the good ones between them are answered."""
    scene.declare("tasks")
    route = scene.route("add_sub", body={"columns": COLUMNS, "max_bytes": 3000})
    async with scene.bridge(route) as bridge:
        for number, (name, (body, content_type, more, _)) in enumerate(BAD.items()):
            scene.put(number, f"good{number}")
            scene.put(0, name, body, content_type=content_type, correlation_id=f"c-{name}", **more)
        await scene.take(len(BAD))
        scene.put(1000, "good0")
        letters = {m.properties["message_id"]: m for m in await scene.take(len(BAD) + 1, "tasks.dead")}
        assert bridge.metric("qinfer_bridge_refused_messages_total", reason="conflict") == 1

    for name, (body, content_type, _, reason) in BAD.items():
        letter = letters[name]
        said = letter.headers["x-qinfer-reason"]
        assert reason in said, (name, said)
        assert "Error:" not in said, (name, said)
        compression = letter.headers.get("compression")  # the test's kombu has unpacked what it knows
        assert bytes(letter.body) == (zlib.decompress(body) if compression == "zlib" else body)
        assert letter.content_type == content_type
        assert letter.properties["correlation_id"] == f"c-{name}"
        assert letter.headers["x-qinfer-route"] == route["name"]
    assert "used before with another body" in letters["good0"].headers["x-qinfer-reason"]
    assert scene.sizes() == (0, 0, 0)


async def test_the_bridge_makes_its_queues(scene: Scene) -> None:
    """Durable ones: declaring them so again is no conflict."""
    async with scene.bridge(scene.route("add_sub")) as bridge:
        for connection in ("source", "sink"):
            await bridge.reaches("qinfer_bridge_connected", 1, connection=connection)
        for what in ("tasks", "tasks.done", "tasks.dead"):
            assert consumers(scene, what) == (what == "tasks")
    scene.declare("tasks")
