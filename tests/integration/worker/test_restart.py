"""A restart of the only worker of a model under load, over HTTP and gRPC: it costs latency, and no error.

Redis and the workers are processes.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind
from qinfer_api.rpc.server import open_port
from tests.support.faulty_backend import write_model
from tests.support.gateway import lean_gateway, settings_of
from tests.support.rpc import stub_of, value_of
from tests.support.worker_processes import WorkerProcesses, worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CALLERS = 8
Ask = Callable[[float], Awaitable[float]]
"""Asks with a value, and returns the answer's; a refusal is an error."""


@asynccontextmanager
async def gateway(one: WorkerProcesses) -> AsyncIterator[Gateway]:
    """Runs a gateway whose callers wait for a worker for as long as one may take to start on a busy machine."""
    settings = settings_of(grpc={}, limits={"wait_for_workers_s": 50})
    delivery = await Queue.connect(one._settings)
    store = ControlStore(admin_client(one._settings))
    made = lean_gateway(settings, delivery, store, bind(settings.http), rpc=open_port(settings))
    serving = asyncio.create_task(made.serve())
    await made.started.wait()
    try:
        yield made
    finally:
        made.stop()
        await serving


class Load:
    """Callers that ask one request after the other, half of them over HTTP and half over gRPC, until told to end."""

    def __init__(self) -> None:
        self.answers: list[tuple[float, float]] = []
        self.is_over = False

    async def run(self, at: Gateway) -> None:
        assert at.rpc is not None
        async with (
            httpx.AsyncClient(base_url=at.url, timeout=60.0) as client,
            grpc.aio.insecure_channel(at.rpc.url.partition("://")[2]) as channel,
            asyncio.TaskGroup() as callers,
        ):
            stub = stub_of(channel)

            async def by_http(value: float) -> float:
                tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}
                reply = await client.post("/v2/models/faulty/infer", json={"inputs": [tensor]})
                assert reply.status_code == 200, reply.text
                return float(reply.json()["outputs"][0]["data"][0])

            async def by_grpc(value: float) -> float:
                request = pb.ModelInferRequest(model_name="faulty")
                request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
                request.raw_input_contents.append(np.float32(value).tobytes())
                return value_of(await stub.ModelInfer(request))

            for number in range(CALLERS):
                callers.create_task(self._ask(by_grpc if number % 2 else by_http, 100_000.0 * (number + 1)))

    async def more(self) -> None:
        """Waits until every caller has had another answer, or more, since now."""
        count = len(self.answers) + 2 * CALLERS
        await eventually(lambda: len(self.answers) >= count, 50.0, "answers")

    async def _ask(self, ask: Ask, value: float) -> None:
        while not self.is_over:
            self.answers.append((value, await ask(value)))
            value += 1


async def test_a_restart_of_the_only_worker_fails_no_request(tmp_path: Path) -> None:
    write_model(tmp_path / "repository")
    load = Load()
    async with worker_processes(tmp_path) as one, gateway(one) as at, asyncio.TaskGroup() as tasks:
        first = await one.worker()
        await eventually(lambda: at.catalog.ready_versions("faulty") == (1,), description="a model that is served")
        tasks.create_task(load.run(at))
        await load.more()

        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 30) == 0
        await eventually(lambda: not at.catalog.ready_versions("faulty"), description="a model without a worker")
        await eventually(lambda: at.dispatcher.in_flight == CALLERS, description="callers that wait for a worker")
        await one.worker()
        await load.more()
        load.is_over = True

    assert load.answers == [(value, value) for value, _ in load.answers]
