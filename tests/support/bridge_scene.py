"""A bridge between queues of kombu and workers: in this process, or in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from kombu import Connection

from qinfer.core.messages import IdFactory
from qinfer.core.settings import LimitSettings, Settings
from qinfer.models.catalog import Catalog
from qinfer.traffic.controller import EndpointFollower
from qinfer_workers.bridge.__main__ import Bridge
from qinfer_workers.bridge.config import BridgeConfig, parse_config
from tests.support.inline_workers import InlineWorkers
from tests.support.programs import ForkedProgram
from tests.support.worker_processes import WorkerProcesses

Process = subprocess.Popen[bytes]

TASKS, PREDICTIONS, DEAD = "tasks", "predictions", "tasks.dead"
_WAIT_S = 20.0


class Broker:
    """Queues of kombu, over one connection; for one thread at a time.

    Args:
        url: As kombu writes it.
        options: kombu's options of the transport.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url
        self._connection = Connection(url, transport_options=dict(options or {}))
        self._connection.ensure_connection(max_retries=1)
        self._channel = self._connection.channel()
        self._lock = threading.Lock()

    def put(
        self,
        body: bytes,
        *,
        queue: str = TASKS,
        content_type: str = "application/json",
        content_encoding: str = "binary",
        headers: Mapping[str, object] | None = None,
        **properties: object,
    ) -> None:
        """Sends a message to a queue."""
        with self._lock:
            message = self._channel.prepare_message(
                body,
                content_type=content_type,
                content_encoding=content_encoding,
                headers=dict(headers or {}),
                properties={"delivery_mode": 2, **properties},
            )
            self._channel.basic_publish(message, exchange="", routing_key=queue)

    def declare(self, *names: str) -> None:
        """Makes queues."""
        for name in names:
            self._channel.queue_declare(name, durable=True, auto_delete=False)

    def get(self, queue: str = PREDICTIONS) -> Any:
        """Returns the next message of a queue, acknowledged; `None` where there is none."""
        with self._lock:
            raw = self._channel.basic_get(queue, no_ack=True)
            return None if raw is None else self._channel.message_to_python(raw)

    def size(self, queue: str = TASKS) -> int:
        """Returns how many messages wait in a queue."""
        with self._lock:
            return int(self._channel.queue_declare(queue, durable=True, auto_delete=False).message_count)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.release()

    async def take(self, count: int = 1, queue: str = PREDICTIONS) -> list[Any]:
        """Waits for so many messages of a queue."""

        def taken() -> list[Any]:
            found: list[Any] = []
            pause = threading.Event()
            for _ in range(int(_WAIT_S / 0.01)):
                while len(found) < count and (message := self.get(queue)) is not None:
                    found.append(message)
                if len(found) >= count:
                    return found
                pause.wait(0.01)
            raise TimeoutError(f"{len(found)} of {count} messages came to '{queue}'")

        return await asyncio.to_thread(taken)


def body_of(value: float, **more: object) -> bytes:
    """Returns a request to a model of the workers, as KServe JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, value]}
    return msgspec.json.encode({"inputs": [tensor], **more})


def value_of(message: Any) -> float:
    """Returns the first element of a prediction."""
    reply = msgspec.json.decode(message.body)
    return float(reply["outputs"][0]["data"][0])


def routes(url: str, **route: Any) -> dict[str, Any]:
    """Returns a configuration with one route from `TASKS` to `PREDICTIONS`."""
    source = {"url": url, "queue": TASKS, **route.pop("source", {})}
    one = {
        "name": "route",
        "model": "stub",
        "source": source,
        "sink": {"routing_key": PREDICTIONS, **route.pop("sink", {})},
        **route,
    }
    return {"routes": [one], "retry_s": 1.0}


@asynccontextmanager
async def bridge(scene: InlineWorkers | WorkerProcesses, document: Mapping[str, Any]) -> AsyncIterator[Bridge]:
    """Runs a bridge in this process, on the workers' queue."""
    config: BridgeConfig = parse_config(dict(document), {})
    catalog = Catalog(scene.store, LimitSettings())
    await catalog.refresh()
    endpoints = EndpointFollower(catalog, scene.store, f"bridge-{IdFactory().ulid()}", scene.delivery)
    await endpoints.load_endpoints()
    one = Bridge(config, scene.delivery, endpoints, Settings())
    stop = asyncio.Event()
    running = asyncio.create_task(one.run(stop))
    try:
        yield one
    finally:
        stop.set()
        await running


def start_process(redis_url: str, config: Path, **environment: str) -> Process:
    """Starts a bridge in a process of its own."""
    env = {**os.environ, "QINFER_REDIS__URL": redis_url, "QINFER_LOG__LEVEL": "INFO", **environment}
    return ForkedProgram(["qinfer_workers.bridge", str(config)], env)


def kill(process: Process) -> None:
    """Ends a process at once: SIGKILL."""
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def run_cli(redis_url: str, config: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs `qinfer bridge` until it ends."""
    words = [sys.executable, "-m", "qinfer.cli.main", "bridge", str(config), "--redis", redis_url, *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
