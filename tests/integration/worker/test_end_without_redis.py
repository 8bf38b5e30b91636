"""SIGTERM together with the end of Redis: worker and gateway end soon, though an answer can't be published any more.

Redis, the gateway and the worker are processes, whose time to drain is longer than the test's.
"""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from qinfer.queue.clients import admin_client
from qinfer.testing import eventually
from tests.support.faulty_backend import SLOW, write_model
from tests.support.programs import ForkedProgram
from tests.support.servers.servers import free_port
from tests.support.worker_processes import Process, WorkerProcesses, worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [SLOW]}]}


def start_gateway(one: WorkerProcesses) -> str:
    """Starts a gateway process, which ends with the workers; returns its URL."""
    port = str(free_port())
    mine = {"QINFER_REDIS__URL": one.url, "QINFER_HTTP__PORT": port, "QINFER_HTTP__DRAIN_S": "3600"}
    other = {"QINFER_GRPC__ENABLED": "false", "QINFER_METRICS__PORT": "0"}
    one.processes.append(ForkedProgram(["qinfer_api"], {**os.environ, **mine, **other}))
    return f"http://127.0.0.1:{port}"


async def ended(process: Process) -> int:
    return await asyncio.to_thread(process.wait, 60)


async def test_nothing_is_waited_for_that_needs_redis(tmp_path: Path) -> None:
    """The caller is told that the server exits; another worker would execute the request when its lease ends."""
    trace = write_model(tmp_path / "repository", hold_s=3600)
    async with worker_processes(tmp_path) as one:
        worker = await one.worker(QINFER_WORKER__DRAIN_S="3600")
        url = start_gateway(one)
        gateway = one.processes[-1]
        async with httpx.AsyncClient(base_url=url, timeout=90.0) as client:

            async def is_ready() -> bool:
                try:
                    return (await client.get("/v2/models/faulty/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_ready, 30.0, "a gateway")
            asking = asyncio.create_task(client.post("/v2/models/faulty/infer", json=BODY))
            await one.began(trace)

            await admin_client(one._settings).shutdown(nosave=True)
            for process in (worker, gateway):
                process.send_signal(signal.SIGTERM)
            trace.with_suffix(".go").touch()

            assert (await ended(worker), await ended(gateway)) == (0, 0)
            reply = await asking
    request_id = reply.headers["qinfer-request-id"]
    assert (reply.status_code, reply.json()) == (503, {"error": f"[request id: {request_id}] Server exiting"})
