"""A decoupled Python model between a plain Redis list and the bridge's sink: all of its responses, in order."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis
import yaml

from qinfer.testing import eventually
from tests.support.bridge_scene import (
    DEAD,
    PREDICTIONS,
    TASKS,
    Broker,
    bridge,
    kill,
    routes,
    start_process,
)
from tests.support.faulty_backend import write_model as write_faulty_model
from tests.support.python_models import DECOUPLED, HEADER, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

# Sends 0, 1, … from a thread, as many as the request says, and the final flag alone; -1 fails after two responses.
COUNTER = (
    HEADER
    + """
import threading

def count(sender, number):
    for index in range(number if number >= 0 else 2):
        sender.send(reply(np.array([[index]], "f4")))
    if number < 0:
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no third token")), flags=1)
    else:
        sender.send(flags=1)

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            arguments = (request.get_response_sender(), int(x(request).item()))
            threading.Thread(target=count, args=arguments, daemon=True).start()
"""
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcesses]:
    directory = tmp_path_factory.mktemp("streams")
    write_model(directory / "repository", COUNTER, "counter", dims="1", more=DECOUPLED)
    write_faulty_model(directory / "repository")
    async with worker_processes(directory) as one:
        await one.worker()
        yield one


@pytest.fixture
def broker(pool: WorkerProcesses) -> Iterator[Broker]:
    one = Broker(f"{pool.url.removesuffix('/0')}/5")
    with redis.Redis.from_url(one.url) as client:
        client.flushdb()
    yield one
    one.close()


def push(broker: Broker, *numbers: int) -> None:
    """Pushes JSON objects to the list as they are, without an envelope."""
    with redis.Redis.from_url(broker.url) as client:
        client.lpush(TASKS, *(b'{"count": %d}' % number for number in numbers))


def route(broker: Broker, **more: Any) -> dict[str, Any]:
    return routes(broker.url, model="counter", body={"columns": {"x": "count"}}, **more)


def told(message: Any) -> tuple[str, int, bool]:
    """Returns what tells messages apart: the request, the index of the response, and whether it is the last."""
    headers = message.headers
    is_final = {"true": True, "false": False}[headers["x-qinfer-response-final"]]
    return headers["x-qinfer-request-id"], int(headers["x-qinfer-response-index"]), is_final


async def test_one_message_has_the_list_of_all_responses(pool: WorkerProcesses, broker: Broker) -> None:
    """Also of none, and of more than are read at once."""
    push(broker, 3, 0, 2000)

    async with bridge(pool, route(broker)):
        found = await broker.take(3)

    lists = [msgspec.json.decode(each.body)["responses"] for each in found]
    expected = [[{"y": float(number)} for number in range(count)] for count in (0, 3, 2000)]
    assert sorted(lists, key=len) == expected
    assert {(each.content_type, each.headers["x-qinfer-state"]) for each in found} == {
        ("application/json", "succeeded")
    }
    assert (broker.size(TASKS), broker.size(DEAD)) == (0, 0)


async def test_each_response_is_a_message_in_order(pool: WorkerProcesses, broker: Broker) -> None:
    """A message that comes again has the same answers, and its model is not asked again."""
    document = route(broker, responses="each")
    async with bridge(pool, document):
        broker.put(b'{"count": 3}', message_id="m1", correlation_id="c1")
        first = await broker.take(3)
        broker.put(b'{"count": 3}', message_id="m1", correlation_id="c1")
        again = await broker.take(3)

    assert [msgspec.json.decode(each.body) for each in first] == [{"y": 0.0}, {"y": 1.0}, {"y": 2.0}]
    assert [told(each)[1:] for each in first] == [(0, False), (1, False), (2, True)]
    assert {(each.properties["message_id"], each.properties["correlation_id"]) for each in first} == {("m1", "c1")}
    assert [(told(each), each.body) for each in again] == [(told(each), each.body) for each in first]
    assert broker.get() is None


async def test_a_stream_that_fails_is_a_dead_letter(pool: WorkerProcesses, broker: Broker) -> None:
    """Nothing of it is sent: no reader waits for the rest."""
    push(broker, -1)

    async with bridge(pool, route(broker, responses="each")):
        (letter,) = await broker.take(queue=DEAD)

    assert msgspec.json.decode(letter.body)["error"] == letter.headers["x-qinfer-reason"]
    assert "no third token" in letter.headers["x-qinfer-reason"]
    assert letter.headers["x-qinfer-state"] == "failed"
    assert broker.get() is None


async def test_a_killed_bridge_loses_no_response(pool: WorkerProcesses, broker: Broker, tmp_path: Path) -> None:
    """Messages that come twice are equal, by the request's id and the response's index."""
    count, each = 30, 20
    document = route(broker, name="killed", responses="each", source={"options": {"visibility_timeout": 1}})
    config = tmp_path / "routes.yaml"
    config.write_text(yaml.safe_dump(document))
    killed = start_process(pool.url, config)
    try:
        push(broker, *[each] * count)
        await eventually(lambda: broker.size(PREDICTIONS) > 0, 30.0, "the first prediction")
    finally:
        kill(killed)

    found: dict[tuple[str, int, bool], bytes] = {}
    async with bridge(pool, document):
        async with asyncio.timeout(45.0):
            while len(found) < count * each:
                (message,) = await broker.take()
                assert found.setdefault(told(message), message.body) == message.body

    requests = {request for request, _, _ in found}
    expected = {(request, index, index == each - 1) for request in requests for index in range(each)}
    assert (len(requests), expected - found.keys(), found.keys() - expected) == (count, set(), set())
    assert all(msgspec.json.decode(body) == {"y": float(index)} for (_, index, _), body in found.items())
    assert broker.size(DEAD) == 0
