"""Streams that a tenant does not read hold instances of a model only while no other tenant waits for them."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from pydantic import SecretStr
from tritonclient.grpc import service_pb2 as pb

from qinfer.backends.base import Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import RedisSettings
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.tensors import from_numpy
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind
from qinfer_api.rpc.server import open_port
from qinfer_workers.inference.streams import UNREAD
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.rpc import stub_of
from tests.support.servers.servers import RedisServer
from tests.support.streaming_backend import DECOUPLED, StreamingBackend

WINDOW_BYTES = 100_000
ROW = 25_000
"""Elements of each response: 100,000 bytes."""
MANY = 5000
ITERATIVE = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 8 } }"
KINDS = ("generate_stream", "infer_stream", "grpc")


class Holding(StreamingBackend):
    """Sends as many large responses as its window lets through, and holds its instance until all are taken."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        if not ctx.is_decoupled:
            super().execute(batch, ctx)
            return
        self.started.release()
        for item in range(len(batch.requests)):
            for _ in range(int(batch.inputs["x"][item].flat[0])):
                ctx.respond(item, (from_numpy("y", np.zeros((1, ROW), "<f4")),), final=False)
                self.sent += 1
            ctx.respond(item, ())


class Iterating(StreamingBackend):
    """Sends one large response of each request with each execution."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__(gate)
        self.left: dict[str, int] = {}

    def execute(self, batch: Batch, ctx: Context) -> None:
        if not ctx.is_decoupled:
            super().execute(batch, ctx)
            return
        for item, request in enumerate(batch.requests):
            if ctx.cancelled(item):
                continue
            left = self.left[request.id] = self.left.get(request.id, int(batch.inputs["x"][item].flat[0])) - 1
            ctx.respond(item, (from_numpy("y", np.zeros((1, ROW), "<f4")),), final=not left)
            self.sent += 1
            if left:
                ctx.reschedule(item)


class Served:
    """A worker with instances of a model, and a gateway with keys of the tenants `acme` and `evil`."""

    def __init__(self, scene: InlineWorkers, gateway: Gateway, keys: Mapping[str, str], stub: Any) -> None:
        self.scene, self.gateway, self.keys, self.stub = scene, gateway, keys, stub
        self._open = contextlib.ExitStack()

    async def unread(self, kind: str) -> Callable[[], Any]:
        """Opens a stream of `evil` and reads nothing of it; returns what reads its end then."""
        if kind == "grpc":
            call = self.stub.ModelStreamInfer(metadata=(("authorization", f"Bearer {self.keys['evil']}"),))
            request = pb.ModelInferRequest(model_name="stub")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
            request.raw_input_contents.append(np.array([[MANY, 0]], "<f4").tobytes())
            await call.write(request)
            self._open.callback(call.cancel)
            return lambda: last_message(call)
        plain = {"x": [MANY, 0]}
        tensor = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [MANY, 0]}]}
        path, body = ("v2", plain) if kind == "generate_stream" else ("v1", tensor)
        sent = json.dumps(body).encode()
        key = f"authorization: Bearer {self.keys['evil']}\r\n"
        head = f"POST /{path}/models/stub/{kind} HTTP/1.1\r\nhost: 127.0.0.1\r\n{key}"
        connection = self._open.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(connection.connect, ("127.0.0.1", int(self.gateway.url.rpartition(":")[2])))
        connection.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        return lambda: asyncio.to_thread(all_of, connection)

    async def stuck(self) -> None:
        """Waits until the instances have sent what their callers' windows let through."""
        before, still = self.sent, 0
        while still < 20:
            await asyncio.sleep(0.02)  # nothing tells that nothing happens
            still = still + 1 if before == self.sent and all(before) else 0
            before = self.sent

    @property
    def sent(self) -> list[int]:
        """How many responses each instance has sent."""
        return [one.sent for one in self.scene.backends["w1"] if isinstance(one, StreamingBackend)]

    def ask(self, tenant: str, count: int = 1) -> "asyncio.Task[httpx.Response]":
        """Asks for a stream of so many responses, and reads it."""

        async def run() -> httpx.Response:
            headers = {"authorization": f"Bearer {self.keys[tenant]}"}
            async with httpx.AsyncClient(base_url=self.gateway.url, timeout=30, headers=headers) as client:
                return await client.post("/v2/models/stub/generate_stream", json={"x": [count, 0]})

        return asyncio.create_task(run())

    def close(self) -> None:
        self._open.close()


async def last_message(call: Any) -> str:
    while True:
        reply = await call.read()
        if not isinstance(reply, pb.ModelStreamInferResponse) or reply.error_message:
            return str(getattr(reply, "error_message", ""))


def all_of(connection: socket.socket) -> str:
    """Returns the last bytes that a connection sends before it is idle, or closed."""
    connection.settimeout(10)
    last = b""
    while b"read faster" not in last and (more := connection.recv(2**20)):
        last = last[-1000:] + more
    return last[-1000:].decode()


@asynccontextmanager
async def serving(
    server: RedisServer, folder: Path, backend: Callable[..., StubBackend], *, instances: int = 1, scheduler: str = ""
) -> AsyncIterator[Served]:
    server.client().flushall()
    file = folder / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "evil")}
    redis = RedisSettings(url=SecretStr(server.url))
    queue, store = await Queue.connect(redis), ControlStore(admin_client(redis))
    async with inline_workers(queue, store) as scene:
        scene.backend = backend
        auth = {"mode": "keys", "keys_file": str(file)}
        settings = settings_of(
            limits={"stream_window_bytes": WINDOW_BYTES, "wait_for_workers_s": 10}, grpc={}, auth=auth
        )
        scene.limits = settings.limits
        await scene.model(more=DECOUPLED, dims=-1, instances=instances, scheduler=scheduler)
        await scene.worker(heartbeat_every_s=0.05)
        rpc = open_port(settings)
        assert rpc is not None
        gateway = lean_gateway(
            settings, await Queue.connect(redis), ControlStore(admin_client(redis)), bind(settings.http), rpc=rpc
        )
        running = asyncio.create_task(gateway.serve())
        await eventually(lambda: gateway.started.is_set() or running.done(), description="a gateway that serves")
        assert not running.done(), running.exception()
        async with grpc.aio.insecure_channel(rpc.url.partition("://")[2]) as channel:
            one = Served(scene, gateway, keys, stub_of(channel))
            yield one
            one.close()
        gateway.stop()
        await asyncio.wait([running])
    await store.close()
    await queue.close()


@pytest.fixture
async def served(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(redis_server, tmp_path, Holding, instances=2) as one:
        yield one


@pytest.fixture
async def iterated(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(redis_server, tmp_path, Iterating, scheduler=ITERATIVE) as one:
        yield one


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unread_stream_gives_up_its_instance_to_another_tenant(served: Served, kind: str) -> None:
    ends = [await served.unread(kind) for _ in range(2)]
    await served.stuck()

    reply = await served.ask("acme")

    assert reply.status_code == 200
    assert len(reply.text) > ROW
    done, _ = await asyncio.wait([asyncio.ensure_future(end()) for end in ends], return_when=asyncio.FIRST_COMPLETED)
    assert UNREAD in done.pop().result()


async def test_a_tenant_with_unread_streams_gets_no_more_than_its_share(served: Served) -> None:
    """The others find an instance at once: what exceeds the share is refused, and does not wait for one."""
    for _ in range(2):
        await served.unread("generate_stream")
    await served.stuck()
    await served.ask("acme")

    refused = await served.ask("evil")

    assert "read slower than 256 KiB/s" in refused.text
    assert (await served.ask("acme")).status_code == 200


async def test_a_tenant_that_reads_has_all_instances(served: Served) -> None:
    """Though others ask for the model."""
    replies = await asyncio.gather(*(served.ask(tenant, 20) for tenant in ("evil", "acme", "evil", "evil", "acme")))

    assert [len(reply.text) > 20 * ROW for reply in replies] == [True] * 5
    await eventually(lambda: served.gateway.dispatcher.in_flight == 0, description="nothing is left")


async def test_a_request_that_joins_a_batch_does_not_wait_for_another_tenants_reader(iterated: Served) -> None:
    end = await iterated.unread("generate_stream")
    await iterated.stuck()

    reply = await iterated.ask("acme", 20)

    assert len(reply.text) > 20 * ROW
    assert UNREAD in await end()


async def test_a_request_of_the_same_batch_does_not_wait_for_another_tenants_reader(iterated: Served) -> None:
    """It has begun before."""
    asked = iterated.ask("acme", 200)
    await eventually(lambda: sum(iterated.sent) > 0, description="an execution")

    end = await iterated.unread("generate_stream")
    reply = await asked

    assert len(reply.text) > 200 * ROW
    assert UNREAD in await end()
