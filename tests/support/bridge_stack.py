"""The whole stack between a RabbitMQ's queues: `qinfer up`, `qinfer bridge`, and one who sends and takes messages."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.chaos.repository import write_stub
from tests.e2e.conftest import Stack, running
from tests.support import models
from tests.support.bridge_process import BridgeProcess, running_bridge
from tests.support.bridge_scene import Broker
from tests.support.servers.rabbitmq import RabbitServer

RECEIVED = "qinfer_bridge_received_messages_total"
ACCEPTED = "qinfer_bridge_accepted_messages_total"
REPEATED = "qinfer_bridge_repeated_messages_total"
REPLIED = "qinfer_bridge_replies_total"
UNROUTABLE = "qinfer_bridge_unroutable_messages_total"
PAUSED = "qinfer_bridge_paused_seconds_total"
UNACKNOWLEDGED = "qinfer_bridge_unacknowledged_messages"


@dataclass
class Scene:
    """A stack, a broker, and the queues of one test.

    Attributes:
        rabbit: RabbitMQ.
        stack: `qinfer up`.
        data: Its data directory.
        directory: For files.
        broker: A connection to RabbitMQ.
        name: What the names of queues begin with.
    """

    rabbit: RabbitServer
    stack: Stack
    data: Path
    directory: Path
    broker: Broker
    name: str
    environment: dict[str, str] = field(default_factory=lambda: {"QINFER_REDIS__COMMAND_TIMEOUT_S": "1"})

    def queue(self, what: str) -> str:
        return f"{self.name}.{what}"

    def route(self, model: str, name: str = "tasks", **more: Any) -> dict[str, Any]:
        """Returns a route from `<name>` to `<name>.done`; sections are completed, fields replaced."""
        source = {"url": self.rabbit.url, "queue": self.queue(name), **more.pop("source", {})}
        sink = {"routing_key": self.queue(f"{name}.done"), **more.pop("sink", {})}
        return {"name": f"{self.name}-{name}", "model": model, "source": source, "sink": sink, **more}

    def put(self, number: int, message_id: str = "", body: bytes = b"", queue: str = "tasks", **more: Any) -> None:
        """Sends a message to `add_sub`'s route, as KServe JSON unless there is a body."""
        properties = {"message_id": message_id or f"m{number}", **more}
        self.broker.put(body or add(number), queue=self.queue(queue), **properties)

    async def take(self, count: int = 1, queue: str = "tasks.done") -> list[Any]:
        return await self.broker.take(count, self.queue(queue))

    def sizes(self, name: str = "tasks") -> tuple[int, int, int]:
        """Returns how many messages wait in a route's queues: source, sink, dead letters."""
        return tuple(self.broker.size(self.queue(f"{name}{what}")) for what in ("", ".done", ".dead"))  # type: ignore[return-value]

    def declare(self, *names: str) -> None:
        """Makes the queues of routes."""
        self.broker.declare(*(self.queue(f"{name}{what}") for name in names for what in ("", ".done", ".dead")))

    async def executed(self, model: str) -> int:
        """Returns how many requests a model has executed, by Triton's statistics."""
        async with httpx.AsyncClient() as client:
            found = (await client.get(f"http://{self.stack.address}/v2/models/{model}/stats")).json()
        return int(found["model_stats"][0]["inference_count"])

    @asynccontextmanager
    async def bridge(self, *routes: Mapping[str, Any], **options: Any) -> AsyncIterator[BridgeProcess]:
        document = {"retry_s": 1, "routes": list(routes), **options}
        where = ("--data-dir", str(self.data))
        async with running_bridge(self.directory, document, *where, environment=self.environment) as one:
            yield one


@contextmanager
def bridged_stack(directory: Path) -> Iterator[tuple[Stack, Path]]:
    """Runs `qinfer up` with the models of these tests; also gives its data directory."""
    repository = directory / "models"
    models.add_sub(repository)
    models.add_sub(repository, "counted")  # for one test: its executions are counted
    for datatype in ("BYTES", "UINT8"):
        models.identity(repository, datatype)
    write_stub(repository, "slow", delay_s=0.02, max_batch_size=1)
    with running(repository, directory) as stack:
        yield stack, directory / "data"


@contextmanager
def opened_scene(rabbit: RabbitServer, up: tuple[Stack, Path], directory: Path, test: str) -> Iterator[Scene]:
    """Gives a test its own queues."""
    broker = Broker(rabbit.url)
    try:
        yield Scene(rabbit, *up, directory, broker, test.removeprefix("test_").replace("_", "-")[:40].strip("-"))
    finally:
        broker.close()


def add(number: float, **more: object) -> bytes:
    """Returns a KServe request whose sums are `number` + 0.5."""
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
        for name, value in (("a", number), ("b", 0.5))
    ]
    return msgspec.json.encode({"inputs": inputs, "outputs": [{"name": "sum"}], **more})


def slow(number: float) -> bytes:
    """Returns a request to `slow`, whose sum is twice the number."""
    inputs = [{"name": name, "datatype": "FP32", "shape": [1, 1], "data": [number]} for name in "ab"]
    return msgspec.json.encode({"inputs": inputs})


def data_of(message: Any, output: int = 0) -> Any:
    """Returns an output of a KServe reply."""
    return msgspec.json.decode(message.body)["outputs"][output]["data"]


def ids(messages: list[Any]) -> list[str]:
    """Returns the ids of messages."""
    return sorted(message.properties["message_id"] for message in messages)


def answers(messages: list[Any]) -> dict[str, float]:
    """Returns the sums by message id; each message must be answered once."""
    found = {message.properties["message_id"]: data_of(message)[0] for message in messages}
    assert len(found) == len(messages)
    return found


def told(messages: list[Any]) -> dict[str, tuple[str, bytes]]:
    """Returns request ids and bodies by message id."""
    return {
        message.properties["message_id"]: (message.headers["x-qinfer-request-id"], bytes(message.body))
        for message in messages
    }


def consumers(scene: Scene, name: str = "tasks") -> int:
    """Returns how many consume from a queue that there is."""
    connection = scene.rabbit.connect()
    try:
        return int(connection.channel().queue_declare(scene.queue(name), passive=True).consumer_count)
    finally:
        connection.release()
