"""The bridge between kombu's queues on a real Redis and the workers: in, out, again, refused, full, stopped, killed."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from kombu import Connection, Producer
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.models.state import BRIDGE
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.support.bridge_scene import (
    DEAD,
    PREDICTIONS,
    TASKS,
    Broker,
    body_of,
    bridge,
    kill,
    routes,
    run_cli,
    start_process,
    value_of,
)
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.sequence_scene import scheduler
from tests.support.servers.servers import RedisServer, command, free_port

REPLIES = "replies"


@pytest.fixture
async def scene(redis_server: RedisServer) -> AsyncIterator[InlineWorkers]:
    with redis_server.client() as client:
        client.flushdb()
    settings = RedisSettings(url=SecretStr(redis_server.url))
    delivery, store = await Queue.connect(settings), ControlStore(admin_client(settings))
    async with inline_workers(delivery, store) as one:
        yield one
    await store.close()
    await delivery.close()


def headers_of(message: Any) -> tuple[str, str]:
    """Returns the id of the request that a message answers, and how that ended."""
    return message.headers["x-qinfer-request-id"], message.headers["x-qinfer-state"]


def in_hand(server: RedisServer) -> int:
    """Returns how many messages of the list are taken, and not confirmed."""
    with server.client() as client:
        client.select(5)
        return int(command(client, "HLEN", f"{TASKS}:taken"))


def push(server: RedisServer, *texts: bytes) -> None:
    """Pushes texts to the list as they are, without kombu's envelope."""
    with server.client() as client:
        client.select(5)
        client.lpush(TASKS, *texts)


def error_of(message: Any) -> str:
    return str(msgspec.json.decode(message.body)["error"])


async def test_a_message_becomes_a_prediction(scene: InlineWorkers, broker: Broker) -> None:
    """Its ids go along, headers tell of the request, and the source is empty."""
    await scene.model()
    await scene.worker()
    broker.put(body_of(3.0), message_id="m1", correlation_id="c1", headers={"batch": "b7"})

    async with bridge(scene, routes(broker.url, sink={"carry_headers": ["batch"]})):
        (prediction,) = await broker.take()

    assert value_of(prediction) == 3.0
    assert prediction.content_type == "application/json"
    assert (prediction.properties["message_id"], prediction.properties["correlation_id"]) == ("m1", "c1")
    request_id, state = headers_of(prediction)
    assert request_id.endswith(".0.stub")
    assert state == "succeeded"
    assert prediction.headers["x-qinfer-model"] == "stub"
    assert prediction.headers["x-qinfer-version"] == "1"
    assert prediction.headers["batch"] == "b7"
    assert broker.size(TASKS) == 0


async def test_reply_to_goes_first(scene: InlineWorkers, broker: Broker) -> None:
    """Unless the route says otherwise: then its own place gets all."""
    await scene.model()
    await scene.worker()
    broker.put(body_of(1.0), reply_to=REPLIES, correlation_id="mine")
    async with bridge(scene, routes(broker.url)):
        (reply,) = await broker.take(queue=REPLIES)
    assert (value_of(reply), reply.properties["correlation_id"]) == (1.0, "mine")

    broker.put(body_of(2.0), reply_to=REPLIES, correlation_id="other")
    async with bridge(scene, routes(broker.url, sink={"reply_to": False})):
        (prediction,) = await broker.take()
    assert value_of(prediction) == 2.0
    assert (broker.get(REPLIES), broker.size(DEAD)) == (None, 0)


async def test_a_message_that_comes_again_gets_the_stored_prediction(scene: InlineWorkers, broker: Broker) -> None:
    """It is scored once, before and after its end, and over a restart of the bridge."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    document = routes(broker.url)
    async with bridge(scene, document) as one:
        broker.put(body_of(4.0), message_id="m1")
        await scene.queued(2)
        broker.put(body_of(4.0), message_id="m1")
        await eventually(lambda: one.routes[0].tally.repeated == 1)
        scene.go()
        await first
        (prediction,) = await broker.take()
        broker.put(body_of(4.0), message_id="m1")
        (again,) = await broker.take()
    async with bridge(scene, document):
        broker.put(body_of(4.0), message_id="m1")
        (restarted,) = await broker.take()

    assert {headers_of(each) for each in (prediction, again, restarted)} == {headers_of(prediction)}
    assert {each.body for each in (prediction, again, restarted)} == {prediction.body}
    assert sum(scene.backends["w1"][0].sizes) == 2  # the request that kept the worker busy, and this one
    assert broker.get() is None


async def test_kombu_gives_an_id_where_the_producer_did_not(scene: InlineWorkers, broker: Broker) -> None:
    """Two messages with the same body are two requests."""
    await scene.model()
    await scene.worker()
    broker.put(body_of(1.0))
    broker.put(body_of(1.0))

    async with bridge(scene, routes(broker.url)) as one:
        predictions = await broker.take(2)
        assert one.routes[0].tally.unidentified == 0

    assert len({headers_of(each) for each in predictions}) == 2


async def test_an_id_with_another_body_is_a_dead_letter(scene: InlineWorkers, broker: Broker) -> None:
    """The first one is answered; the second one goes with its body and the reason."""
    await scene.model()
    await scene.worker()
    async with bridge(scene, routes(broker.url)) as one:
        broker.put(body_of(1.0), message_id="m1")
        await broker.take()
        broker.put(body_of(2.0), message_id="m1")
        (letter,) = await broker.take(queue=DEAD)
        assert one.routes[0].tally.refused == {"conflict": 1}

    assert letter.body == body_of(2.0)
    assert "used before with another body" in letter.headers["x-qinfer-reason"]
    assert (broker.size(TASKS), broker.size(PREDICTIONS)) == (0, 0)


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b"{", "application/json", "JSON"),
        (b'{"inputs": []}', "application/json", "expected"),
        (body_of(1.0).replace(b"FP32", b"BOOL"), "application/json", "boolean"),
        (b"PAR1", "application/vnd.apache.arrow.file", "Arrow"),
        (b'{"a": 1}\n', "application/jsonl", "x"),
        (b"\x89PNG", "image/png", "BYTES"),
    ],
)
async def test_a_body_that_can_not_be_read_is_a_dead_letter(
    scene: InlineWorkers, broker: Broker, body: bytes, content_type: str, reason: str
) -> None:
    """It names what is wrong, keeps the message as it was, and lets others pass."""
    await scene.model()
    await scene.worker()
    broker.put(body, content_type=content_type, message_id="bad", correlation_id="c", headers={"mine": "kept"})
    broker.put(body_of(5.0), message_id="good")

    async with bridge(scene, routes(broker.url)):
        (letter,) = await broker.take(queue=DEAD)
        (prediction,) = await broker.take()

    assert reason in letter.headers["x-qinfer-reason"]
    assert letter.headers["x-qinfer-route"] == "route"
    assert letter.headers["mine"] == "kept"
    assert (letter.body, letter.content_type, letter.properties["message_id"]) == (body, content_type, "bad")
    assert value_of(prediction) == 5.0
    assert broker.size(TASKS) == 0


@pytest.mark.parametrize("compression", ["zlib", "bzip2", "lzma"])
async def test_messages_that_kombu_compresses_are_read(scene: InlineWorkers, broker: Broker, compression: str) -> None:
    """Bombs become dead letters as they are, and the reply to a caller says why."""
    await scene.model()
    await scene.worker()
    large = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": "0" * 2**22}]}
    with closing(Connection(broker.url)) as connection:
        producer = Producer(connection)
        body = msgspec.json.decode(body_of(7.0))
        producer.publish(body, routing_key=TASKS, compression=compression, message_id="packed")
        producer.publish(large, routing_key=TASKS, compression=compression, message_id="bomb", reply_to=REPLIES)

    async with bridge(scene, routes(broker.url, body={"max_bytes": 2**20})):
        (prediction,) = await broker.take()
        (letter,) = await broker.take(queue=DEAD)
        (reply,) = await broker.take(queue=REPLIES)

    assert value_of(prediction) == 7.0
    assert letter.properties["message_id"] == "bomb"
    assert "more than 1048576 bytes" in letter.headers["x-qinfer-reason"]
    assert msgspec.json.decode(letter.body) == large  # as kombu, which the test reads it with, decompresses it
    assert "more than 1048576 bytes" in error_of(reply)
    assert broker.size(TASKS) == 0


async def test_a_message_to_a_stateful_model_is_a_dead_letter(scene: InlineWorkers, broker: Broker) -> None:
    """Its steps would come in no order."""
    await scene.model(mode="add", scheduler=scheduler())
    await scene.worker()
    broker.put(body_of(5.0), message_id="m1")

    async with bridge(scene, routes(broker.url)):
        (letter,) = await broker.take(queue=DEAD)

    assert "model 'stub' keeps state from request to request" in letter.headers["x-qinfer-reason"]
    assert broker.size(TASKS) == 0


async def test_plain_json_is_answered_or_refused(
    scene: InlineWorkers, redis_server: RedisServer, broker: Broker
) -> None:
    """Entries of any program: nothing leaves the list without an answer or a dead letter."""
    await scene.model()
    await scene.worker()
    bad = (b'{"text": "a"}', b"", b"[1, 2]", b"\xff\x00", b"not JSON", b"x" * 2**20)
    push(redis_server, body_of(3.0), *bad)

    async with bridge(scene, routes(broker.url, body={"max_bytes": 2**18})) as one:
        letters = await broker.take(len(bad), queue=DEAD)
        (prediction,) = await broker.take()
        await eventually(lambda: in_hand(redis_server) == 0)
        assert one.routes[0].tally.unidentified == 0

    assert value_of(prediction) == 3.0
    assert [letter.body for letter in letters[:-1]] == list(bad[:-1])
    assert all(letter.headers["x-qinfer-reason"] for letter in letters)
    assert (letters[-1].body, "is kept in the hash" in letters[-1].headers["x-qinfer-reason"]) == (b"", True)
    assert broker.size(TASKS) == 0


async def test_a_key_that_is_no_list_is_named(
    scene: InlineWorkers, redis_server: RedisServer, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The bridge tries until the key is gone."""
    await scene.model()
    await scene.worker()
    with redis_server.client() as client:
        client.select(5)
        client.hset(TASKS, "a", "b")
        async with bridge(scene, routes(broker.url)):
            await eventually(lambda: "source is away" in caplog.text)
            client.delete(TASKS)
            push(redis_server, body_of(3.0))
            (prediction,) = await broker.take()

    reasons = [record.__dict__["reason"] for record in caplog.records if record.message == "source is away"]
    assert f"the key '{TASKS}' is of type hash, and the bridge needs a list" in reasons[0]
    assert value_of(prediction) == 3.0


async def test_rows_come_back_as_rows(scene: InlineWorkers, broker: Broker) -> None:
    """JSON lines with a column map are one request, and so is its reply."""
    await scene.model()
    await scene.worker()
    broker.put(b'{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n', content_type="application/x-ndjson")

    async with bridge(scene, routes(broker.url, body={"columns": {"x": ["a", "b"]}})):
        (prediction,) = await broker.take()

    assert [msgspec.json.decode(line) for line in prediction.body.splitlines()] == [{"y": [1, 2]}, {"y": [3, 4]}]


async def test_a_plain_json_object_is_a_row(scene: InlineWorkers, redis_server: RedisServer, broker: Broker) -> None:
    """Where the route maps columns; its answer is an object, too."""
    await scene.model()
    await scene.worker()
    push(redis_server, b'{"a": 1, "b": 2}')

    async with bridge(scene, routes(broker.url, body={"columns": {"x": ["a", "b"]}})):
        (prediction,) = await broker.take()

    assert (prediction.body, prediction.content_type) == (b'{"y":[1.0,2.0]}', "application/json")


async def test_a_failure_is_told_to_the_caller_and_the_dead_letters(scene: InlineWorkers, broker: Broker) -> None:
    """Where nobody waits, only to the latter."""
    await scene.model(mode="raise")
    await scene.worker()
    broker.put(body_of(1.0, id="mine"), reply_to=REPLIES, correlation_id="c1")
    broker.put(body_of(2.0), message_id="m2")

    async with bridge(scene, routes(broker.url)):
        (reply,) = await broker.take(queue=REPLIES)
        letters = await broker.take(2, queue=DEAD)

    assert msgspec.json.decode(reply.body)["id"] == "mine"
    assert error_of(reply)
    assert headers_of(reply)[1] == "failed"
    assert {headers_of(letter)[1] for letter in letters} == {"failed"}
    assert all(letter.headers["x-qinfer-reason"] for letter in letters)
    assert broker.get() is None


async def test_a_message_that_nobody_could_be_answered_is_refused(scene: InlineWorkers, broker: Broker) -> None:
    """The route has no place of its own, and the message names none."""
    await scene.model()
    document = routes(broker.url)
    document["routes"][0]["sink"] = {}
    broker.put(body_of(1.0))

    async with bridge(scene, document):
        (letter,) = await broker.take(queue=DEAD)

    assert "no reply_to" in letter.headers["x-qinfer-reason"]


async def test_a_full_lane_leaves_messages_in_the_source(
    scene: InlineWorkers, redis_server: RedisServer, broker: Broker
) -> None:
    """No more than allowed wait in the lane; the next bridge has what this one took and did not accept."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    document = routes(broker.url, max_waiting=3, source={"prefetch": 10})
    for number in range(20):
        broker.put(body_of(number), message_id=f"m{number}")

    async with bridge(scene, document) as one:
        await eventually(lambda: one.routes[0].tally.accepted == 3)
        await eventually(lambda: one.routes[0].tally.unacknowledged >= 7)
        await eventually(lambda: one.routes[0].tally.paused_s > 0)
        assert one.routes[0].tally.accepted == 3
    assert broker.size(TASKS) + in_hand(redis_server) == 17
    async with bridge(scene, document):
        scene.go()
        await first
        predictions = await broker.take(20)

    assert sorted(value_of(each) for each in predictions) == list(range(20))
    assert (broker.size(TASKS), broker.get(), broker.size(DEAD)) == (0, None, 0)


async def test_messages_wait_for_a_model_that_is_not_there_yet(scene: InlineWorkers, broker: Broker) -> None:
    """Nothing is wrong with them: they stay in the source."""
    broker.put(body_of(1.0))
    async with bridge(scene, routes(broker.url)) as one:
        await eventually(lambda: one.routes[0].tally.received == 1)
        await scene.model()
        await scene.worker()
        (prediction,) = await broker.take()

    assert value_of(prediction) == 1.0
    assert broker.size(DEAD) == 0


async def test_two_bridges_share_a_route(scene: InlineWorkers, broker: Broker) -> None:
    """Each message is answered once, whoever takes it and whoever tells it."""
    await scene.model()
    await scene.worker()
    for number in range(100):
        broker.put(body_of(number), message_id=f"m{number}")

    async with bridge(scene, routes(broker.url)) as one, bridge(scene, routes(broker.url)) as other:
        predictions = await broker.take(100)
        assert one.routes[0].tally.received + other.routes[0].tally.received == 100

    assert sorted(value_of(each) for each in predictions) == list(range(100))
    assert (broker.get(), broker.size(TASKS)) == (None, 0)


async def test_a_killed_bridge_loses_nothing_and_scores_nothing_twice(
    scene: InlineWorkers, redis_server: RedisServer, broker: Broker, tmp_path: Path
) -> None:
    """What it had in hand comes again to the next one, from the source and from the outbox, and is recognised."""
    source = {"options": {"visibility_timeout": 1}, "prefetch": 100}
    document = routes(broker.url, max_waiting=50, source=source)
    config = tmp_path / "routes.yaml"
    config.write_text(yaml.safe_dump(document))
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    for number in range(300):
        broker.put(body_of(number), message_id=f"m{number}")
    process = start_process(redis_server.url, config)
    try:
        await eventually(lambda: broker.size(TASKS) == 300 - 100 - 50, 20.0)
        kill(process)
        assert in_hand(redis_server) == 100
        process = start_process(redis_server.url, config)
        scene.go()
        await first
        with redis_server.client() as client:
            await eventually(lambda: len(command(client, "KEYS", "*}:request:*")) == 300, 20.0, "all of them accepted")
        kill(process)
        process = start_process(redis_server.url, config)
        told: dict[str, Any] = {}
        while len(told) < 300:
            (message,) = await broker.take()
            known = told.setdefault(message.properties["message_id"], message)
            assert (known.body, headers_of(known)) == (message.body, headers_of(message))
        name = f"qinfer-bridge-{process.pid}@{socket.gethostname()}"  # the health check looks for it
        assert name in await scene.store.live_processes(BRIDGE)
        process.send_signal(signal.SIGHUP)  # which means gateways
        process.terminate()
        assert await asyncio.to_thread(process.wait, 15) == 0
    finally:
        kill(process)
    assert sum(scene.backends["w1"][0].sizes) == 301

    assert {name: value_of(message) for name, message in told.items()} == {f"m{n}": n for n in range(300)}
    assert broker.size(DEAD) == 0


async def test_a_check_tries_everything_and_moves_nothing(scene: InlineWorkers, broker: Broker, tmp_path: Path) -> None:
    """It says what is well and what is not, by route; exit codes are for scripts."""
    await scene.model()
    broker.put(body_of(1.0))
    redis_url = broker.url.removesuffix("/5") + "/0"
    document = routes(broker.url)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(document))
    other = {**document["routes"][0], "name": "other", "model": "unknown"}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({**document, "routes": [*document["routes"], other]}))

    good = await asyncio.to_thread(run_cli, redis_url, tmp_path / "good.yaml", "--check")
    bad = await asyncio.to_thread(run_cli, redis_url, tmp_path / "bad.yaml", "--check")
    wrong = await asyncio.to_thread(run_cli, redis_url, tmp_path / "gone.yaml", "--check")

    assert (good.returncode, good.stdout.count(": well")) == (0, 3), good
    assert bad.returncode == 1
    assert "route 'other': Request for unknown model: 'unknown' is not found" in bad.stdout
    assert (wrong.returncode, "gone.yaml: No such file or directory" in wrong.stderr) == (2, True)
    assert broker.size(TASKS) == 1


async def test_metrics_are_served_by_route(scene: InlineWorkers, broker: Broker) -> None:
    """On the port that the file names."""
    await scene.model()
    await scene.worker()
    port = free_port()
    broker.put(body_of(1.0))
    broker.put(b"{")
    async with bridge(scene, routes(broker.url) | {"metrics_port": port}) as one:
        await broker.take()
        await broker.take(queue=DEAD)
        await eventually(lambda: one.routes[0].tally.replied == {"succeeded": 1})
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text

    own = f'process="{one.process}"'
    assert f'qinfer_bridge_received_messages_total{{{own},route="route"}} 2.0' in text
    assert f'qinfer_bridge_refused_messages_total{{{own},reason="invalid_request",route="route"}} 1.0' in text
    assert f'qinfer_bridge_replies_total{{{own},route="route",state="succeeded"}} 1.0' in text
    assert f'qinfer_bridge_connected{{connection="source",{own},route="route"}} 1.0' in text
