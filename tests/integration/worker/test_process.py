"""`python -m qinfer_workers.inference` with a real Redis and a real ONNX model."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from qinfer.core.messages import IdFactory, InferRequest, Response
from qinfer.core.settings import RedisSettings, RepositorySettings
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import State
from qinfer.models.store import ControlStore
from qinfer.models.sync import sync
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Lane, reply_address
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy, to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_request
from tests.support.models import add_sub
from tests.support.servers.servers import RedisServer, system_redis

Process = subprocess.Popen[bytes]


class Setting:
    """A Redis with a synced repository, worker processes, and a caller."""

    def __init__(self, url: str, repository: Path) -> None:
        self._url = url
        self._repository = repository
        self._ids = IdFactory()
        self.responses: dict[str, list[Response]] = {}
        self.processes: list[Process] = []

    async def open(self) -> None:
        settings = RedisSettings(url=SecretStr(self._url))
        self.delivery = await Queue.connect(settings)
        self.store = ControlStore(admin_client(settings))
        repository = open_repositories(RepositorySettings(path=str(self._repository)))
        (self.model,) = await sync(repository, self.store, self.delivery)

    async def worker(self, **environment: str) -> Process:
        """Starts a worker process; waits until its model is ready."""
        known = {record.id for record in await self.store.workers()}
        env = {**os.environ, "QINFER_REDIS__URL": self._url, "QINFER_REPOSITORY__PATH": str(self._repository)}
        process = subprocess.Popen([sys.executable, "-m", "qinfer_workers.inference"], env=env | environment)  # noqa: ASYNC220  returns at once
        self.processes.append(process)

        async def is_ready() -> bool:
            states = [
                r.models.get(self.model.model, {}).get(1) for r in await self.store.workers() if r.id not in known
            ]
            return any(state is not None and state.state is State.READY for state in states)

        await eventually(is_ready, 30.0, "a ready worker")
        return process

    def submit(self, value: float) -> str:
        """Sends `a = value, b = 1`; returns the request's id."""
        inputs = tuple(from_numpy(name, np.full((1, 4), v, "<f4")) for name, v in (("a", value), ("b", 1.0)))
        request = InferRequest(
            model=self.model.model,
            version=1,
            id=self._ids.request_id(self.model.model),
            inputs=inputs,
            timeout_s=50.0,
            reply_to=reply_address("caller"),
            generation=self.model.generation,
        )
        self.delivery.submit(Lane(request.model, 1), encode_request(request), lambda _: None)
        return request.id

    def deliver(self, blob: bytes) -> None:
        """Takes answers from the reply stream."""
        for response in decode_responses(blob):
            self.responses.setdefault(response.request_id, []).append(response)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    add_sub(tmp_path / "repository")
    (tmp_path / "redis").mkdir()
    with RedisServer(system_redis(), tmp_path / "redis") as server:
        one = Setting(server.url, tmp_path / "repository")
        await one.open()
        async with asyncio.TaskGroup() as tasks:
            listener = tasks.create_task(one.delivery.listen("caller", one.deliver))
            try:
                yield one
            finally:
                for process in one.processes:
                    process.kill()
                    process.wait()
                listener.cancel()
        await one.store.close()
        await one.delivery.close()


def test_it_waits_for_redis_at_its_start(tmp_path: Path) -> None:
    """SIGTERM ends the wait with 0."""
    add_sub(tmp_path / "repository")
    env = {**os.environ, "QINFER_REDIS__URL": f"unix://{tmp_path}/none.sock", "QINFER_REDIS__CONNECT_TIMEOUT_S": "0.2"}
    env["QINFER_REPOSITORY__PATH"] = str(tmp_path / "repository")
    command = [sys.executable, "-m", "qinfer_workers.inference"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        waiting = next(line for line in process.stderr if "start waits for redis" in line)
        process.terminate()
        rest = process.stderr.read()
        code = process.wait(20)

    assert code == 0, waiting + rest
    assert "Traceback" not in rest


async def test_answers_and_drains(setting: Setting) -> None:
    """A worker process computes, leaves the lane empty, and exits with 0 when told to stop."""
    process = await setting.worker()
    ids = [setting.submit(float(i)) for i in range(50)]
    await eventually(lambda: len(setting.responses) == 50, 20.0, "50 answers")
    process.send_signal(signal.SIGTERM)

    assert await asyncio.to_thread(process.wait, 20) == 0
    for value, request_id in enumerate(ids):
        (response,) = setting.responses[request_id]
        assert response.failure is None
        total, difference = (to_numpy(tensor) for tensor in response.outputs)
        assert total.tolist() == [[value + 1.0] * 4]
        assert difference.tolist() == [[value - 1.0] * 4]
    assert await setting.delivery.depth([Lane(setting.model.model, 1)]) == [0]
    assert await setting.store.workers() == []


@pytest.mark.long
async def test_killed_worker_loses_nothing(setting: Setting) -> None:
    """Whatever a worker held when it was killed, another answers."""
    environment = {"QINFER_WORKER__LEASE_S": "1", "QINFER_WORKER__RENEW_EVERY_S": "0.3"}
    first = await setting.worker(**environment)
    ids = [setting.submit(float(i)) for i in range(2000)]
    await eventually(lambda: len(setting.responses) > 0, 20.0, "a first answer")
    first.kill()
    await setting.worker(**environment)

    await eventually(lambda: len(setting.responses) == len(ids), 30.0, "every answer")
    assert all(r.failure is None for answers in setting.responses.values() for r in answers)
