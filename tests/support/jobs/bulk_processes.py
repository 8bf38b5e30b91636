"""Bulk workers as processes, beside a job on a real Redis."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import SecretStr

from qinfer.core.settings import BulkSettings, RedisSettings, Settings
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.job import JobState
from qinfer.jobs.plan import decode_manifest, decode_success
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import bulk_lanes
from qinfer.queue.lanes import Queue
from tests.support.jobs.bulk_bench import MODEL, Bench, record_of, spec, write_inputs
from tests.support.programs import ForkedProgram
from tests.support.servers.servers import RedisServer, free_port

ROOT = Path(__file__).parents[3]
WITHIN_S = 40.0


class BulkProcesses(Bench):
    """A test bench on Redis, with bulk workers as processes."""

    def __init__(self, directory: Path, delivery: Queue, store: ControlStore, url: str) -> None:
        super().__init__(directory, delivery, store)
        self.url = url
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log = directory / "bulk.log"
        redis = RedisSettings(url=SecretStr(url))
        self.tasks = BulkTasks(Settings(redis=redis, bulk=BulkSettings(sweep_every_s=0.3)))

    def start(self, *fault: str) -> "subprocess.Popen[bytes]":
        """Starts a bulk worker, which dies at a step if one is given."""
        return self.run(*(["tests.support.jobs.bulk_faults", *fault] if fault else ["qinfer_workers.jobs"]))

    def run(self, *module: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Starts a program: its module and arguments, and settings of its own."""
        settings = {
            "QINFER_REDIS__URL": self.url,
            "QINFER_BULK__SWEEP_EVERY_S": "0.3",
            "QINFER_STORES__ALLOW": f'["file://{self.directory}"]',
        }
        env = {**os.environ, **settings, **variables}
        with self.log.open("ab") as log:
            self.processes.append(ForkedProgram(module, env, cwd=ROOT, log=log))
        return self.processes[-1]

    def start_flower(self) -> int:
        """Starts Flower; returns its port."""
        port = free_port()
        command = [sys.executable, "-m", "celery", f"--broker={self.url}", "flower", "--address=127.0.0.1"]
        env = {**os.environ, "FLOWER_UNAUTHENTICATED_API": "true"}
        with self.log.open("ab") as log:
            self.processes.append(subprocess.Popen([*command, f"--port={port}"], env=env, stdout=log, stderr=log))
        return port

    async def ended(self, process: "subprocess.Popen[bytes]") -> int:
        """Waits for the end of a process."""
        return await asyncio.to_thread(process.wait, WITHIN_S)

    async def becomes(self, state: JobState) -> None:
        """Waits until the job has a state, also while Redis is restarted."""
        until_s = time.monotonic() + WITHIN_S
        try:
            record = await self.record()
        except BrokerUnavailable:  # the connection that the restart broke; the next one waits for the server
            record = await self.record()
        while record.state != state:
            assert time.monotonic() < until_s, f"{record}\n{self.log.read_text()}"
            record = await self.jobs.wait_for_change("job", record.revision, 1.0) or record

    async def send(self, name: str) -> None:
        await asyncio.to_thread(getattr(self.tasks, name), "job")


@asynccontextmanager
async def opened(server: RedisServer, directory: Path) -> AsyncIterator[BulkProcesses]:
    """An emptied server with a job, of which no bulk worker was notified."""
    write_inputs(directory / "in", [20, 5])
    with server.client() as client:
        client.flushall()
    settings = RedisSettings(url=SecretStr(server.url))
    delivery, store = await Queue.connect(settings), ControlStore(admin_client(settings))
    await store.put_model(MODEL)
    await delivery.ensure(bulk_lanes("stub", 1))
    one = BulkProcesses(directory, delivery, store, server.url)
    await one.beat()
    try:
        await one.jobs.create(record_of(spec(directory)))
        yield one
    finally:
        for process in one.processes:
            process.kill()
            process.wait()
        one.tasks.close()
        await store.close()
        await delivery.close()


def check_output(directory: Path) -> None:
    """Checks that the output is complete and says so itself."""
    data = (directory / "out" / "_manifest.json").read_bytes()
    decode_success((directory / "out" / "_SUCCESS").read_bytes(), data)
    manifest = decode_manifest(data)
    assert (manifest.rows, len(manifest.parts)) == (25, 3)
