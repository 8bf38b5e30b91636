"""The bridge between queues of SQS, which moto's server plays, and the workers."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from qinfer.testing import eventually
from qinfer_workers.bridge.kombu import KombuSource
from qinfer_workers.bridge.messages import Receipt
from tests.support.bridge_scene import DEAD, PREDICTIONS, TASKS, Broker, body_of, bridge, routes, value_of
from tests.support.inline_workers import InlineWorkers
from tests.support.servers.servers import free_port

REPLIES = "replies"
OPTIONS = {"region": "eu-central-1", "is_secure": False, "wait_time_seconds": 1, "visibility_timeout": 5}

pytestmark = [pytest.mark.matrix, pytest.mark.parametrize("scene", ["memory"], indirect=True)]


class SqsBroker(Broker):
    """Queues of SQS: a message that is only taken comes again, so each is acknowledged."""

    def get(self, queue: str = PREDICTIONS) -> Any:
        """See `Broker.get`."""
        with self._lock:
            raw = self._channel.basic_get(queue, no_ack=False)
            if raw is None:
                return None
            message = self._channel.message_to_python(raw)
            self._channel.basic_ack(message.delivery_tag)
            return message


@pytest.fixture(scope="module")
def sqs_url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
    server.start()
    http = server._server
    assert http is not None
    yield f"sqs://key:secret@127.0.0.1:{http.server_port}"
    server.stop()
    http.server_close()  # which moto leaves to the garbage collector


@pytest.fixture
def broker(sqs_url: str) -> Iterator[Broker]:
    one = SqsBroker(sqs_url, OPTIONS)
    one.declare(TASKS, PREDICTIONS, DEAD, REPLIES)
    yield one
    one.close()


def document(broker: Broker) -> dict[str, Any]:
    return routes(broker.url, source={"options": OPTIONS})


async def test_messages_become_predictions(scene: InlineWorkers, broker: Broker) -> None:
    """To the route's queue and to their own, and what can't be read to the dead letters; the source is empty then."""
    await scene.model()
    await scene.worker()
    for number in range(10):
        broker.put(body_of(number), message_id=f"m{number}", correlation_id=f"c{number}")
    broker.put(body_of(20.0), reply_to=REPLIES, correlation_id="mine")
    broker.put(b"{", message_id="bad")
    packed = {"compression": "application/x-gzip"}
    broker.put(zlib.compress(body_of(10.0)), message_id="packed", correlation_id="c10", headers=packed)

    async with bridge(scene, document(broker)):
        predictions = await broker.take(11)
        (reply,) = await broker.take(queue=REPLIES)
        (letter,) = await broker.take(queue=DEAD)

    assert {each.properties["correlation_id"]: value_of(each) for each in predictions} == {
        f"c{number}": float(number) for number in range(11)
    }
    assert (value_of(reply), reply.properties["correlation_id"]) == (20.0, "mine")
    assert (letter.properties["message_id"], letter.body) == ("bad", b"{")
    assert "JSON" in letter.headers["x-qinfer-reason"]
    await eventually(lambda: broker.size(TASKS) == 0, 10, "an empty source")


async def test_a_message_that_comes_again_is_recognised(
    scene: InlineWorkers, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the id that SQS gave it, although its receipt is another one."""
    await scene.model()
    await scene.worker()
    scene.forget_started()
    broker.put(body_of(4.0))

    def forget(_: KombuSource, receipts: Sequence[Receipt]) -> None:
        """A bridge that dies before it acknowledges."""

    with monkeypatch.context() as patched:
        patched.setattr(KombuSource, "acknowledge", forget)
        async with bridge(scene, document(broker)):
            (first,) = await broker.take()
    async with bridge(scene, document(broker)) as one:
        (again,) = await broker.take()
        assert (one.routes[0].tally.repeated, one.routes[0].tally.unidentified) == (1, 0)

    assert (first.body, first.headers["x-qinfer-request-id"]) == (again.body, again.headers["x-qinfer-request-id"])
    assert sum(scene.backends["w1"][0].sizes) == 1
    await eventually(lambda: broker.size(TASKS) == 0, 10, "an empty source")
