"""Real worker processes around a real Redis, with faulty models, and a caller that waits for answers."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from pydantic import SecretStr

from qinfer.core.messages import IdFactory, InferRequest, Response
from qinfer.core.settings import LimitSettings, RedisSettings, RepositorySettings
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import State
from qinfer.models.store import ControlStore
from qinfer.models.sync import sync
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestRecord, reply_address
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_request, encode_responses
from tests.support.faulty_backend import install
from tests.support.programs import ForkedProgram
from tests.support.servers.servers import RedisServer, system_redis

Process = subprocess.Popen[bytes]

SHORT_LEASE = {"QINFER_WORKER__LEASE_S": "2", "QINFER_WORKER__RENEW_EVERY_S": "0.3"}
"""A lease of a second may end on a busy machine before the renewer of a forked worker has imported its modules."""
_TIMEOUT_S = 50.0


class WorkerProcesses:
    """A Redis with a synced repository, worker processes, and a caller."""

    def __init__(self, url: str, directory: Path, limits: LimitSettings | None = None) -> None:
        self.url, self.directory = url, directory
        self._limits = limits
        self._env = {
            **os.environ,
            "QINFER_REDIS__URL": url,
            "QINFER_REPOSITORY__PATH": str(directory / "repository"),
            "QINFER_LOG__LEVEL": "WARNING",
            "QINFER_STORES__ALLOW": json.dumps([f"file://{directory}"]),
            "PYTHONPATH": install(directory / "plugin"),
        }
        self._settings = RedisSettings(url=SecretStr(url))
        self._repository = open_repositories(RepositorySettings(path=str(directory / "repository")))
        self._ids = IdFactory()
        self._generations: dict[str, int] = {}
        self.responses: dict[str, list[Response]] = {}
        self.processes: list[Process] = []

    async def open(self) -> None:
        self.delivery = await Queue.connect(self._settings, self._limits)
        self.store = ControlStore(admin_client(self._settings))
        for model in await sync(self._repository, self.store, self.delivery):
            assert not model.error, model.error
            self._generations[model.model] = model.generation

    async def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        await self.store.close()
        await self.delivery.close()

    def start(self, **environment: str) -> Process:
        """Starts a worker process with short leases."""
        self.processes.append(ForkedProgram(["qinfer_workers.inference"], self._env | SHORT_LEASE | environment))
        return self.processes[-1]

    async def worker(self, **environment: str) -> Process:
        """Starts a worker process, and waits until its models are ready."""
        process = self.start(**environment)
        await self.ready(process)
        return process

    async def ready(self, process: Process) -> None:
        """Waits until a worker has loaded all models."""

        async def is_ready() -> bool:
            states = [
                versions[1].state
                for record in await self.store.workers()
                if f"-{process.pid}-" in record.id
                for versions in record.models.values()
            ]
            return len(states) == len(self._generations) and set(states) == {State.READY}

        await eventually(is_ready, 30.0, "a ready worker")

    async def supervise(self) -> None:
        """Keeps one worker running until cancelled."""
        while True:
            process = self.start()
            await asyncio.to_thread(process.wait)

    def request(self, value: float, model: str = "faulty", *, reply_to: str = reply_address("caller")) -> InferRequest:
        return InferRequest(
            model=model,
            version=1,
            id=self._ids.request_id(model),
            inputs=(from_numpy("x", np.full((1, 1), value, "<f4")),),
            timeout_s=_TIMEOUT_S,
            reply_to=reply_to,
            generation=self._generations[model],
        )

    def submit(self, value: float, model: str = "faulty") -> str:
        """Sends a request; returns its id."""
        request = self.request(value, model)
        self.delivery.submit(Lane(model, 1), encode_request(request), lambda _: None)
        return request.id

    async def accept(self, value: float, model: str = "faulty") -> EntryAddress:
        """Sends an asynchronous request."""
        request = self.request(value, model, reply_to="")
        address = EntryAddress(model, 0, request.id)
        frame = encode_request(request)
        await self.delivery.requests.accept(Acceptance(address=address, lane=Lane(model, 1), frame=frame, timeout_s=50))
        return address

    async def answered(self, *request_ids: str) -> list[Response]:
        """Waits for the final responses of requests."""
        await eventually(lambda: all(i in self.responses for i in request_ids), _TIMEOUT_S, "answers")
        return [self.responses[request_id][-1] for request_id in request_ids]

    async def ended(self, address: EntryAddress) -> RequestRecord:
        """Waits until an asynchronous request has ended."""
        found: list[RequestRecord] = []

        async def has_ended() -> bool:
            record = await self.delivery.requests.record(address)
            assert record is not None
            found.append(record)
            return record.state.is_terminal

        await eventually(has_ended, _TIMEOUT_S, "the end of a request")
        return found[-1]

    async def began(self, trace: Path, count: int = 1) -> None:
        """Waits until so many batches began; warm-up runs are no batches, their values are 0."""

        def is_so() -> bool:
            return sum("0.0" not in line.split() for line in trace.read_text().splitlines()) >= count

        await eventually(is_so, _TIMEOUT_S, f"{count} executions")

    async def empty(self, model: str = "faulty") -> None:
        """Waits until a lane is empty."""

        async def is_empty() -> bool:
            return await self.delivery.depth([Lane(model, 1)]) == [0]

        await eventually(is_empty, _TIMEOUT_S, "an empty lane")

    def deliver(self, blob: bytes) -> None:
        """Takes answers from the reply stream."""
        for response in decode_responses(blob):
            self.responses.setdefault(response.request_id, []).append(response)


@asynccontextmanager
async def worker_processes(directory: Path, limits: LimitSettings | None = None) -> AsyncIterator[WorkerProcesses]:
    """Opens a worker_processes for the models in `directory / "repository"`; kills its workers at the end."""
    (directory / "redis").mkdir()
    with RedisServer(system_redis(), directory / "redis") as server:
        one = WorkerProcesses(server.url, directory, limits)
        await one.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                listener = tasks.create_task(one.delivery.listen("caller", one.deliver))
                await eventually(lambda: one.delivery.publish(reply_address("caller"), encode_responses([])))
                try:
                    yield one
                finally:
                    listener.cancel()
        finally:
            await one.close()


def resume(process: Process) -> None:
    """Ends a SIGSTOP."""
    process.send_signal(signal.SIGCONT)
