"""Rolling restarts under load: every process is drained and replaced, one after the other, and no request fails.

The clients behave as behind a load balancer: what was not answered (a refused or a closed connection), and what a
draining gateway turned away together with its connection, goes to the next gateway. Any other refusal is a failure.
Callers of gRPC have one channel to both gateways, as gRPC's own balancing makes it, and repeat nothing.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.testing import eventually
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.load import FAST, SLOW, body_of, infer_path
from tests.chaos.member import Member, Role
from tests.chaos.repository import write_models
from tests.chaos.verdict import expected
from tests.support.rpc import stub_of

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(180)]

CALLERS = 8
TRIES = 50
WITHIN_S = 40.0


class Balanced:
    """Callers behind a load balancer."""

    def __init__(self, urls: list[str]) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self.moved: Counter[str] = Counter()
        self._urls = urls
        self._numbers = iter(range(1, 1_000_000))
        self._is_over = False

    async def run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=30.0, limits=limits) as http, asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call(http))

    def stop(self) -> None:
        self._is_over = True

    async def more(self, count: int = 100) -> None:
        """Waits for so many more answers."""
        wanted = self.answered + count
        await eventually(lambda: self.answered >= wanted or bool(self.failed), WITHIN_S, f"{count} answers")

    async def _call(self, http: httpx.AsyncClient) -> None:
        while not self._is_over:
            number = next(self._numbers)
            model = SLOW if number % 5 == 0 else FAST
            problem = await self._ask(http, number, infer_path(model))
            if problem:
                self.failed.append(f"{number}: {problem}")
            else:
                self.answered += 1

    async def _ask(self, http: httpx.AsyncClient, number: int, path: str) -> str:
        for attempt in range(TRIES):
            url = self._urls[(number + attempt) % len(self._urls)]
            try:
                reply = await http.post(url + path, content=body_of(number))
            except httpx.TransportError as error:
                self.moved[type(error).__name__] += 1
                await asyncio.sleep(0.05)
                continue
            if reply.status_code == 503 and reply.headers.get("connection", "") == "close":
                self.moved["draining"] += 1
                continue
            if reply.status_code != 200:
                return f"{reply.status_code} {reply.text}"
            value = reply.json()["outputs"][0]["data"][0]
            return "" if value == expected(number) else f"answered {value}"
        return "no gateway took it"


class BalancedRpc(Balanced):
    """Callers of gRPC on a channel that knows all gateways, and takes them in turn."""

    async def run(self) -> None:
        options = [("grpc.lb_policy_name", "round_robin"), ("grpc.enable_retries", 0)]
        options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        target = f"ipv4:{','.join(self._urls)}"
        async with grpc.aio.insecure_channel(target, options) as channel, asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._infer(stub_of(channel)))

    async def _infer(self, stub: Any) -> None:
        while not self._is_over:
            number = next(self._numbers)
            request = pb.ModelInferRequest(model_name=SLOW if number % 5 == 0 else FAST)
            for name, value in (("a", number), ("b", number + 1)):
                request.inputs.add(name=name, datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(value)
            try:
                reply = await stub.ModelInfer(request, timeout=30.0)
            except grpc.aio.AioRpcError as error:
                self.failed.append(f"{number}: {error.code()} {error.details()}")
                continue
            value = struct.unpack("<f", reply.raw_output_contents[0])[0]
            if value == expected(number):
                self.answered += 1
            else:
                self.failed.append(f"{number}: answered {value}")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    names = write_models(tmp_path / "models")
    async with running_cluster(tmp_path, tmp_path / "models") as cluster:
        await cluster.ready(names)
        yield cluster


async def replaced(member: Member) -> None:
    """Drains a process and waits until its successor runs."""
    before = member.starts
    member.end()
    await eventually(lambda: member.starts > before and member.runs, WITHIN_S, f"another {member.role}")


async def workers_ready(cluster: Cluster, count: int) -> None:
    """Waits until so many workers serve."""

    async def serve() -> bool:
        return len(await cluster.serving(SLOW)) >= count

    await eventually(serve, WITHIN_S, f"{count} workers")


@pytest.mark.parametrize("role", [Role.WORKER, Role.GATEWAY])
async def test_a_rolling_restart_fails_no_request(cluster: Cluster, role: Role) -> None:
    """All workers, or both gateways, one after the other; the next one when its forerunner's successor serves."""
    load = Balanced(cluster.urls)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await load.more()
        for member in cluster.of(role):
            await replaced(member)
            await cluster.ready((FAST, SLOW))
            await workers_ready(cluster, len(cluster.of(Role.WORKER)))
            await load.more()
        load.stop()

    assert load.failed == []
    assert [member.exits for member in cluster.of(role)] == [Counter({0: 1})] * len(cluster.of(role))


async def test_a_rolling_restart_of_gateways_fails_no_call(cluster: Cluster) -> None:
    """Both gateways, under calls of gRPC that nobody repeats."""
    load = BalancedRpc(cluster.grpc_targets)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        await load.more()
        for member in cluster.of(Role.GATEWAY):
            await replaced(member)
            await cluster.ready((FAST, SLOW))
            await load.more(300)
        load.stop()

    assert load.failed == []
    assert [member.exits for member in cluster.of(Role.GATEWAY)] == [Counter({0: 1})] * 2
