"""The whole stack and failures of a real RabbitMQ: redelivery, full lanes, missing queues, broken connections."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from qinfer.testing import eventually
from tests.e2e.conftest import Stack
from tests.support.bridge_process import BridgeProcess, Line
from tests.support.bridge_stack import (
    ACCEPTED,
    PAUSED,
    RECEIVED,
    REPEATED,
    REPLIED,
    UNROUTABLE,
    Scene,
    answers,
    bridged_stack,
    consumers,
    opened_scene,
    slow,
    told,
)
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.servers import free_port


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


async def test_redelivered_messages_are_answered_again_and_not_executed(scene: Scene) -> None:
    """The broker never sees their acknowledgements; what it sends again gets the same reply, under the same id."""
    scene.declare("tasks")
    with Line(scene.rabbit.port) as line:
        url = scene.rabbit.url_of(scene.rabbit.password, line.port)
        route = scene.route("counted", source={"url": url}, sink={"url": scene.rabbit.url})
        async with scene.bridge(route) as bridge:
            await eventually(lambda: consumers(scene) == 1, 10, "a consumer")
            line.hold()
            for number in range(20):
                scene.put(number)
            first = await scene.take(20)
            line.cut()
            again = await scene.take(20)
            await bridge.reaches(REPEATED, 20)
            assert bridge.metric(ACCEPTED) == 20
    assert answers(first) == {f"m{number}": number + 0.5 for number in range(20)}
    assert told(first) == told(again)
    assert scene.sizes() == (0, 0, 0)

    async def is_counted() -> bool:
        return await scene.executed("counted") >= 20

    await eventually(is_counted, 10, "statistics")
    assert await scene.executed("counted") == 20


async def test_a_full_lane_leaves_messages_in_the_source(scene: Scene) -> None:
    """No more are taken than may wait; they are taken as there is room, and all are answered once."""
    scene.declare("tasks")
    for number in range(100):
        scene.put(number, body=slow(number))
    route = scene.route("slow", source={"prefetch": 8}, max_waiting=4)
    async with scene.bridge(route) as bridge:
        await bridge.reaches(PAUSED, 0.001)
        taken = bridge.metric(RECEIVED) - bridge.metric(REPLIED)
        assert taken <= 8 + 8  # what is unacknowledged, and what waits, executes, or is on its way out
        assert scene.broker.size(scene.queue("tasks")) > 0
        messages = await scene.take(100)

    assert answers(messages) == {f"m{number}": 2 * number for number in range(100)}
    assert scene.sizes() == (0, 0, 0)


async def test_queues_that_are_missing_are_waited_for(scene: Scene) -> None:
    """With `declare: false` the bridge makes none; what is accepted is kept until its sink is there."""
    route = scene.route("add_sub", source={"declare": False}, sink={"declare": False})
    async with scene.bridge(route) as bridge:
        await bridge.says("source is away")
        scene.broker.declare(scene.queue("tasks"))
        scene.put(1)
        await bridge.reaches(UNROUTABLE, 1, place="sink")
        scene.broker.declare(scene.queue("tasks.done"))
        messages = await scene.take()

    assert answers(messages) == {"m1": 1.5}


async def test_a_queue_that_is_deleted_is_made_again(scene: Scene) -> None:
    """The broker says that it will deliver no more; the bridge consumes from the new one."""
    scene.declare("tasks")
    async with scene.bridge(scene.route("add_sub")):
        await eventually(lambda: consumers(scene) == 1, 20, "a consumer")
        connection = scene.rabbit.connect()
        connection.channel().queue_delete(scene.queue("tasks"))
        connection.release()
        scene.declare("tasks")
        scene.put(1)
        messages = await scene.take()

    assert answers(messages) == {"m1": 1.5}


async def test_queues_of_other_kinds(scene: Scene) -> None:
    """A quorum queue, and a sink that refuses what it has no room for: that is published again."""
    connection = scene.rabbit.connect()
    kinds = {"tasks": {"x-queue-type": "quorum"}, "tasks.done": {"x-max-length": 5, "x-overflow": "reject-publish"}}
    for name, arguments in kinds.items():
        connection.channel().queue_declare(scene.queue(name), durable=True, auto_delete=False, arguments=arguments)
    connection.release()
    for number in range(12):
        scene.put(number)
    async with scene.bridge(scene.route("add_sub")) as bridge:
        await bridge.says("refuses messages")
        messages = await scene.take(12)

    assert answers(messages) == {f"m{number}": number + 0.5 for number in range(12)}


async def test_a_wrong_password_is_said_and_not_shown(scene: Scene) -> None:
    """The program stays: the password may be right again."""
    secret = "tr0ub4dor"
    scene.environment["RABBIT_PASSWORD"] = secret
    url = scene.rabbit.url.replace(scene.rabbit.password, "${RABBIT_PASSWORD}")
    async with scene.bridge(scene.route("add_sub", source={"url": url})) as bridge:
        await bridge.says("ACCESS_REFUSED")
        assert secret not in bridge.log()

    checked = BridgeProcess(
        scene.directory,
        {"routes": [scene.route("add_sub", source={"url": url})]},
        *("--data-dir", str(scene.data), "--check"),
        environment=scene.environment,
    )
    assert await asyncio.to_thread(checked.process.wait, 20) == 1
    assert "ACCESS_REFUSED" in checked.log()
    assert secret not in checked.log()


async def test_a_broker_that_is_away_is_waited_for(scene: Scene) -> None:
    """At the start, and again in the middle: connections break, and nothing is lost or answered in another way."""
    scene.declare("tasks")
    port = free_port()
    url = scene.rabbit.url_of(scene.rabbit.password, port)
    async with scene.bridge(scene.route("add_sub", source={"url": url})) as bridge:
        await bridge.says("source is away")
        with Line(scene.rabbit.port, port) as line:
            for number in range(300):
                scene.put(number)
            messages = await scene.take(50)
            line.cut()
            found = {message.properties["message_id"]: message for message in messages}
            while len(found) < 300:
                (message,) = await scene.take()
                known = found.setdefault(message.properties["message_id"], message)
                assert told([known]) == told([message])

    assert answers(list(found.values())) == {f"m{number}": number + 0.5 for number in range(300)}
    assert scene.sizes()[::2] == (0, 0)


async def test_redis_may_be_away(scene: Scene) -> None:
    """Messages wait in their queue meanwhile; those whose acceptance was not answered are recognised."""
    scene.declare("tasks")
    (redis,) = (p for p in psutil.Process(scene.stack.pid).children(recursive=True) if "redis-server" in p.name())
    async with scene.bridge(scene.route("add_sub", source={"prefetch": 50})) as bridge:
        scene.put(0)
        await scene.take()
        with stopped(redis):
            for number in range(1, 200):
                scene.put(number)
            await bridge.says("Redis is away")
        found: dict[str, Any] = {}
        while len(found) < 199:
            (message,) = await scene.take()
            known = found.setdefault(message.properties["message_id"], message)
            assert told([known]) == told([message])

    assert answers(list(found.values())) == {f"m{number}": number + 0.5 for number in range(1, 200)}
    assert scene.sizes()[::2] == (0, 0)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)
