"""The metrics of an installation, around a real Redis: scopes, workers that die, and a queue without a worker."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import InferenceFailed
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind
from qinfer_api.rest.side_ports import open_metrics_port
from tests.support.faulty_backend import write_model
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.servers.servers import RedisServer, command
from tests.support.worker_processes import WorkerProcesses, worker_processes

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Page:
    """Reads a gateway's metrics.

    Attributes:
        series: What was read last: (name, labels) → value.
        counters: The names of counters, of buckets, counts and sums.
    """

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._client = client
        self.series: Series = {}
        self.counters: set[str] = set()

    async def read(self, scope: str = "") -> Series:
        reply = await self._client.get(self._url, params={"scope": scope} if scope else {})
        assert reply.status_code == 200, reply.text
        self.series = {}
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self.series, f"{key} is there twice"
                self.series[key] = sample.value
                if family.type in ("counter", "histogram"):
                    self.counters.add(sample.name)
        return self.series

    def value(self, name: str, model: str = "stub", **labels: str) -> float:
        wanted = tuple(sorted({"model": model, "version": "1", **labels}.items()))
        return self.series.get((name, wanted), -1.0)

    async def shows(self, name: str, value: float, model: str = "stub", **labels: str) -> None:
        async def is_shown() -> bool:
            await self.read()
            return self.value(name, model, **labels) == value

        await eventually(is_shown, description=f"{name} {labels} = {value}")

    async def lists(self, name: str) -> None:
        """Waits for a series of that name; a worker measures what it uses beside its heartbeats."""

        async def is_listed() -> bool:
            return any(each == name for each, _ in await self.read())

        await eventually(is_listed, description=name)


async def adapters(url: str) -> tuple[Queue, ControlStore]:
    settings = RedisSettings(url=SecretStr(url))
    return await Queue.connect(settings), ControlStore(admin_client(settings))


@asynccontextmanager
async def gateway_on(url: str) -> AsyncIterator[tuple[Gateway, Page]]:
    """Runs a gateway on a Redis, and what reads its metrics' port."""
    settings = settings_of({"drain_s": 1}).model_copy(update={"metrics": MetricsSettings(port=0)})
    listener = open_metrics_port(settings)
    assert listener is not None
    gateway = lean_gateway(settings, *await adapters(url), bind(settings.http))
    gateway.serve_metrics(listener)
    assert gateway.metrics is not None
    serving = asyncio.create_task(gateway.serve())
    await gateway.started.wait()
    async with httpx.AsyncClient(timeout=30) as client:
        yield gateway, Page(gateway.metrics.url, client)
    gateway.stop()
    await asyncio.wait([serving])


@pytest.fixture
async def scene(redis_server: RedisServer) -> AsyncIterator[InlineWorkers]:
    redis_server.client().flushall()
    delivery, store = await adapters(redis_server.url)
    async with inline_workers(delivery, store) as scene:
        await scene.model("stub")
        yield scene
    await store.close()
    await delivery.close()


def fallen(before: Series, after: Series, counters: set[str]) -> list[object]:
    """Returns which counters went backwards, or are gone though no worker's."""
    return [
        key
        for key, value in before.items()
        if key[0] in counters and (after.get(key, 0.0 if "worker" not in dict(key[1]) else value) < value)
    ]


async def test_scopes_of_two_gateways(scene: InlineWorkers, redis_server: RedisServer) -> None:
    """The installation's numbers are the same at both, each gateway's are its own, and no series is in two scopes."""
    await scene.worker(heartbeat_every_s=0.05)
    async with gateway_on(redis_server.url) as (first, page), gateway_on(redis_server.url) as (_, other):
        async with httpx.AsyncClient(base_url=first.url) as client:
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
            assert (await client.post("/v2/models/stub/infer", json={"inputs": [tensor]})).status_code == 200
            await page.shows("qinfer_executed_requests_total", 1)
            await page.shows("qinfer_publish_seconds_count", 1)
            await page.lists("qinfer_worker_memory_bytes")
            wrong = await client.get("/metrics?scope=worker")
            here = (await client.get("/metrics?scope=process")).text
        cluster, process = await page.read("cluster"), await page.read("process")
        theirs, own = await other.read("cluster"), await other.read("process")
        both = await page.read()

    assert wrong.status_code == 400
    assert "it must be cluster or process" in wrong.json()["error"]
    assert "qinfer_requests_total" in here
    assert "qinfer_backlog_requests" not in here
    assert not cluster.keys() & process.keys()
    assert cluster.keys() | process.keys() == both.keys()
    assert {name for name, _ in cluster} == {name for name, _ in theirs}
    assert [value for (name, _), value in process.items() if name == "qinfer_requests_total"] == [1.0]
    assert [value for (name, _), value in own.items() if name == "qinfer_requests_total"] == [0.0]
    names = {dict(labels)["process"] for name, labels in (*process, *own) if not name.startswith("nv_")}
    assert len(names) == 2
    assert all("process" not in dict(labels) for _, labels in cluster)


async def test_a_dead_worker_takes_no_count_with_it(scene: InlineWorkers, redis_server: RedisServer) -> None:
    """Before, between and after two workers no counter falls, and each request is counted once."""
    await scene.worker(heartbeat_every_s=0.05, lease_s=0.5, renew_every_s=0.1)
    async with gateway_on(redis_server.url) as (_, page):
        await asyncio.gather(*(scene.submit(float(number)) for number in range(5)))
        await page.shows("qinfer_executed_requests_total", 5)
        await page.shows("qinfer_publish_seconds_count", page.value("qinfer_execution_seconds_count"))
        first = dict(page.series)
        scene.hold()
        waiting = scene.submit(9.0)
        await scene.started()
        await scene.kill()
        between = dict(await page.read())
        assert page.value("qinfer_backlog_requests", lane="p1") == 1
        scene.go()
        await scene.worker("w2", heartbeat_every_s=0.05, lease_s=0.5, renew_every_s=0.1)
        await waiting
        await page.shows("qinfer_executed_requests_total", 6)
        last = dict(page.series)

    assert fallen(first, between, page.counters) == []
    assert fallen(between, last, page.counters) == []
    assert page.value("qinfer_redeliveries_total") == 1
    assert page.value("nv_inference_request_success_total") == 6  # the parser's name of it
    assert page.value("qinfer_batch_fill_ratio_count") == page.value("qinfer_execution_seconds_count")


async def test_a_queue_without_a_worker(scene: InlineWorkers, redis_server: RedisServer) -> None:
    """Depth, age, rows and seconds of work are there before the first worker, and 0 once it is done."""
    await scene.accept(1.0)
    answer = scene.submit(2.0, rows=2)
    await scene.queued(2)
    async with gateway_on(redis_server.url) as (_, page):
        await page.read("cluster")
        assert page.value("qinfer_backlog_requests", lane="p1") == 2
        assert page.value("qinfer_backlog_oldest_age_seconds", lane="p1") > 0
        assert page.value("qinfer_backlog_rows") == 2
        assert page.value("qinfer_backlog_work_seconds") > 0
        assert page.value("qinfer_model_ready") == 0
        assert page.value("nv_inference_pending_request_count") == 2
        assert not [name for name, _ in page.series if name == "qinfer_worker_up"]

        await scene.worker(heartbeat_every_s=0.05)
        await answer

        await page.shows("qinfer_backlog_requests", 0, lane="p1")
        assert page.value("qinfer_backlog_oldest_age_seconds", lane="p1") == 0
        assert page.value("qinfer_backlog_work_seconds") == 0


async def test_what_is_given_up(scene: InlineWorkers, redis_server: RedisServer) -> None:
    """Dead letters that wait, by version; purged, there are none, and the total stays."""
    scene.submit(1.0)
    await scene.queued(1)
    (lease,) = await scene.delivery.fetch([scene.lane], "w0", 1, 1.0)
    assert await scene.delivery.bury(lease, "r1", InferenceFailed.code.value, "no")
    async with gateway_on(redis_server.url) as (_, page):
        await page.shows("qinfer_dead_letters", 1)
        await scene.delivery.dead_letters.purge("stub")

        await page.shows("qinfer_dead_letters", 0)


async def test_a_user_who_may_not_ask_redis_about_itself_has_the_other_metrics(
    scene: InlineWorkers, redis_server: RedisServer
) -> None:
    """The node is shown as up, and no more of it."""
    with redis_server.client() as client:
        command(client, "ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-info")
        async with gateway_on(redis_server.url.replace("//", "//limited:secret@")) as (_, page):
            await page.read()
        command(client, "ACL", "DELUSER", "limited")

    of_redis = {name: value for (name, _), value in page.series.items() if name.startswith("qinfer_redis_")}
    assert of_redis == {"qinfer_redis_up": 1}
    assert page.value("qinfer_model_ready") == 0
    assert [value for (name, _), value in page.series.items() if name == "qinfer_store_up"] == [1]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    write_model(tmp_path / "repository")
    async with worker_processes(tmp_path) as one:
        yield one


@pytest.mark.long
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs a redis-server")
async def test_worker_processes_tell_what_they_use(pool: WorkerProcesses) -> None:
    """CPU time, memory and leases renewed, of a real process and its renewer; killed, it takes only its own with it."""
    process = await pool.worker()
    async with gateway_on(pool.url) as (_, page):
        await pool.answered(*[pool.submit(float(number)) for number in range(1, 30)])
        await page.shows("qinfer_executed_requests_total", 29, "faulty")

        async def is_measured() -> bool:
            await page.read("cluster")
            return any(
                name == "qinfer_worker_cpu_seconds_total" and value > 0 for (name, _), value in page.series.items()
            )

        await eventually(is_measured, 10.0, "CPU time")
        before = dict(page.series)
        memory = [value for (name, _), value in before.items() if name == "qinfer_worker_memory_bytes"]
        assert len(memory) == 1
        assert memory[0] > 30 * 2**20
        process.kill()
        process.wait()
        between = dict(await page.read("cluster"))
        await pool.worker()
        await pool.answered(pool.submit(99.0))
        await page.shows("qinfer_executed_requests_total", 30, "faulty")

    assert fallen(before, between, page.counters) == []
    assert fallen(between, page.series, page.counters) == []
