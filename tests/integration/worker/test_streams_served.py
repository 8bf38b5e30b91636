"""Streams from a model to its callers: workers and a gateway around a real Redis, over both protocols."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from pydantic import SecretStr
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb

from qinfer.backends.base import Batch, Context
from qinfer.core.messages import InferRequest
from qinfer.core.settings import RedisSettings
from qinfer.errors import QinferError
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind
from qinfer_api.rpc.server import open_port
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.rpc import stub_of
from tests.support.servers.servers import RedisServer
from tests.support.streaming_backend import DECOUPLED, ENDLESS, RESUMES, StreamingBackend

WINDOW_BYTES = 100_000
ROW = 5000
"""Elements of each of `Pouring`'s responses: 20,000 bytes."""


class Pouring(StreamingBackend):
    """Sends large responses as fast as its window lets them through, each full of its own number.

    A model of the name `front` passes on what the model `stub` sends.
    """

    def execute(self, batch: Batch, ctx: Context) -> None:
        if not ctx.is_decoupled:
            super().execute(batch, ctx)
            return
        for item in range(len(batch.requests)):
            threading.Thread(target=self._serve, args=(ctx, item, batch.requests[item]), daemon=True).start()

    def _serve(self, ctx: Context, item: int, request: InferRequest) -> None:
        try:
            (self._pass_on if self.model == "front" else self._pour)(ctx, item, request)
        except QinferError as error:
            self.errors.append(error)

    def _pour(self, ctx: Context, item: int, request: InferRequest) -> None:
        count = int(np.frombuffer(request.inputs[0].data, "<f4")[0])
        for index in range(count):
            ctx.respond(item, (from_numpy("y", np.full((1, ROW), index, "<f4")),), final=False)
            self.sent += 1
        ctx.respond(item, ())

    def _pass_on(self, ctx: Context, item: int, request: InferRequest) -> None:
        for response in ctx.stream(InferRequest(model="stub", inputs=request.inputs)):
            ctx.respond(item, response.outputs, final=response.final)
            self.sent += 1


class Served:
    """Workers, and a gateway that serves both protocols."""

    def __init__(self, scene: InlineWorkers, gateway: Gateway, client: httpx.AsyncClient, stub: Any) -> None:
        self.scene, self.gateway, self.client, self.stub = scene, gateway, client, stub

    def model(self, worker_id: str = "w1", name: str = "stub") -> StreamingBackend:
        """Returns the only instance of a model in a worker."""
        (backend,) = [one for one in self.scene.backends[worker_id] if one.model == name]
        assert isinstance(backend, StreamingBackend)
        return backend

    async def events(self, count: float, model: str = "stub") -> AsyncGenerator[Any, None]:
        """Asks for so many responses, and gives them as they come."""
        url = f"/v2/models/{model}/generate_stream"
        async with self.client.stream("POST", url, json={"x": [count, 0]}) as reply:
            async for line in reply.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

    async def is_idle(self) -> bool:
        return self.gateway.dispatcher.in_flight == 0 and await self.scene.delivery.depth([self.scene.lane]) == [0]


async def adapters(server: RedisServer) -> tuple[Queue, ControlStore]:
    settings = RedisSettings(url=SecretStr(server.url))
    return await Queue.connect(settings), ControlStore(admin_client(settings))


@pytest.fixture
async def served(redis_server: RedisServer) -> AsyncIterator[Served]:
    redis_server.client().flushall()
    delivery, store = await adapters(redis_server)
    async with inline_workers(delivery, store) as scene:
        scene.backend = StreamingBackend
        settings = settings_of(limits={"stream_window_bytes": WINDOW_BYTES, "wait_for_workers_s": 10}, grpc={})
        scene.limits = settings.limits
        rpc = open_port(settings)
        assert rpc is not None
        gateway = lean_gateway(settings, *await adapters(redis_server), bind(settings.http), rpc=rpc)
        serving = asyncio.create_task(gateway.serve())
        await gateway.started.wait()
        async with (
            httpx.AsyncClient(base_url=gateway.url, timeout=30) as client,
            grpc.aio.insecure_channel(rpc.url.partition("://")[2]) as channel,
        ):
            yield Served(scene, gateway, client, stub_of(channel))
        gateway.stop()
        await asyncio.wait([serving])
    await store.close()
    await delivery.close()


async def started(served: Served, more: str = DECOUPLED, **options: Any) -> None:
    """Starts the first worker, with the model."""
    await served.scene.model(more=more, **options)
    await served.scene.worker(heartbeat_every_s=0.05, lease_s=0.5)
    await served.gateway.catalog.refresh()


async def test_many_streams_at_once(served: Served) -> None:
    """Each has all of its own responses, once and in order, whichever call it came by."""
    await started(served)
    served.model().let(10_000)

    async def ask(count: int) -> list[float]:
        return [event["y"][0] async for event in served.events(count)]

    counts = [number % 20 for number in range(100)]
    values = await asyncio.gather(*map(ask, counts))

    assert values == [list(range(count)) for count in counts]
    await eventually(served.is_idle, description="nothing is left")


async def test_a_stream_whose_worker_dies_says_how_far_it_came(served: Served) -> None:
    """It may be sent again; nobody executes the rest."""
    await started(served)
    served.model().let(2)
    events = served.events(5)
    got = [(await anext(events))["y"][0] for _ in range(2)]

    await served.scene.kill()
    await served.scene.worker("w2", lease_s=0.5)
    rest = [event async for event in events]

    assert got == [0.0, 1.0]
    assert [event["error"] for event in rest] == [
        "the worker that executed the request ended after 2 responses; send the request again"
    ]
    await eventually(served.is_idle, description="nothing is left")


async def test_a_stream_that_resumes_is_unbroken(served: Served) -> None:
    """Though its worker was killed."""
    await started(served, RESUMES)
    served.model().let(2)
    events = served.events(5)
    got = [(await anext(events))["y"][0] for _ in range(2)]

    await served.scene.kill()
    await served.scene.worker("w2", lease_s=0.5)
    served.model("w2").let(6)
    got += [event["y"][0] async for event in events]

    assert got == [0.0, 1.0, 2.0, 3.0, 4.0]
    await eventually(served.is_idle, description="nothing is left")


async def test_who_leaves_is_noticed_by_the_model(served: Served) -> None:
    await started(served)
    served.model().let(1)
    events = served.events(ENDLESS)
    await anext(events)

    await events.aclose()

    def is_told() -> bool:
        served.model().let(1)
        return bool(served.model().errors)

    await eventually(is_told, description="the model is told")
    assert served.model().errors[0].code == "cancelled"
    await eventually(served.is_idle, description="nothing is left")


async def test_a_reader_that_does_not_read_holds_the_model(served: Served) -> None:
    """Of 100 MB; others are served meanwhile. When it reads on it gets the rest, in order."""
    served.scene.backend = Pouring
    await started(served, dims=-1)
    call = served.stub.ModelStreamInfer()
    await call.write(asked(5000))
    seen = await stuck(served.model())

    others = [event async for event in served.events(3)]
    values = [float(InferResult((await call.read()).infer_response).as_numpy("y")[0, 0]) for _ in range(seen + 50)]
    call.cancel()

    assert seen * ROW * 4 < 25_000_000  # what sockets and the client hold, besides
    assert len(others) == 3
    assert values == list(range(seen + 50))
    await eventually(served.is_idle, description="nothing is left")


async def test_a_model_passes_on_what_another_sends(served: Served) -> None:
    """As fast as its own caller reads."""
    served.scene.backend = Pouring
    await served.scene.model("front", more=DECOUPLED, dims=-1)
    await started(served, dims=-1)
    whole = [event["y"][0] async for event in served.events(20, "front")]
    call = served.stub.ModelStreamInfer()
    await call.write(asked(5000, "front"))
    seen = await stuck(served.model())
    call.cancel()

    assert whole == list(range(20))
    assert seen * ROW * 4 < 25_000_000  # as above
    await eventually(served.is_idle, description="nothing is left")


def asked(count: int, model: str = "stub") -> Any:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(np.array([[count, 0]], "<f4").tobytes())
    return request


async def stuck(model: StreamingBackend) -> int:
    """Waits until a model has sent nothing for a while; returns how many responses it has sent."""
    sent, still = 0, 0
    while still < 20:
        await asyncio.sleep(0.02)  # nothing tells that nothing happens
        still = still + 1 if sent == model.sent and sent else 0
        sent = model.sent
    return sent
