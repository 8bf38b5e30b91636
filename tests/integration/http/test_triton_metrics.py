"""Triton's metrics of a gateway and a worker around Redis: what a scrape tells of requests, however they end."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Entry, Lane
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.app import bind
from qinfer_api.rest.side_ports import open_metrics_port
from qinfer_workers.inference.worker import Worker
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.servers.servers import RedisServer

QUEUE = "default_queue_policy { max_queue_size: 1 }"


class Scraped:
    """A gateway, a worker with two models, and a reader of the gateway's metrics."""

    def __init__(
        self, scene: InlineWorkers, delivery: Queue, url: str, client: httpx.AsyncClient, worker: Worker
    ) -> None:
        self.scene, self.delivery, self.client, self.worker = scene, delivery, client, worker
        self._url = url
        self.page = ""

    async def ask(self, model: str = "stub", rows: int = 1) -> httpx.Response:
        tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": [1.0, 2.0] * rows}
        return await self.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})

    async def shows(self, name: str, value: str, model: str = "stub", reason: str = "") -> None:
        """Waits until the page has a line."""
        told = f'reason="{reason}",' if reason else ""
        line = f'{name}{{model="{model}",{told}version="1"}} {value}'

        async def is_shown() -> bool:
            self.page = (await self.client.get(self._url)).text
            return line in self.page.splitlines()

        await eventually(is_shown, description=line)

    def value(self, name: str) -> int:
        """Returns a value of the first model on the page that was read last."""
        found = re.search(rf'^{name}\{{model="stub",version="1"\}} (\d+)$', self.page, re.MULTILINE)
        assert found, name
        return int(found[1])


async def adapters(server: RedisServer) -> tuple[Queue, ControlStore]:
    settings = RedisSettings(url=SecretStr(server.url))
    return await Queue.connect(settings), ControlStore(admin_client(settings))


@pytest.fixture
async def scraped(redis_server: RedisServer) -> AsyncIterator[Scraped]:
    redis_server.client().flushall()
    delivery, store = await adapters(redis_server)
    async with inline_workers(delivery, store) as scene:
        await scene.model("stub", batching=QUEUE)
        await scene.model("raises", mode="raise")
        worker = await scene.worker(heartbeat_every_s=0.05)
        settings = settings_of({"drain_s": 1}).model_copy(update={"metrics": MetricsSettings(port=0)})
        listener = open_metrics_port(settings)
        assert listener is not None
        theirs = await adapters(redis_server)
        gateway = lean_gateway(settings, *theirs, bind(settings.http))
        gateway.serve_metrics(listener)
        assert gateway.metrics is not None
        serving = asyncio.create_task(gateway.serve())
        await gateway.started.wait()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:

            async def is_ready() -> bool:
                return (await client.get("/v2/models/stub/ready")).status_code == 200

            await eventually(is_ready, description="the gateway sees the worker's model")
            yield Scraped(scene, theirs[0], gateway.metrics.url, client, worker)
        scene.go()
        gateway.stop()
        await asyncio.wait([serving])
    await store.close()
    await delivery.close()


async def test_what_succeeds_is_counted(scraped: Scraped) -> None:
    """Requests, rows and executions exactly; durations add up, and a version that was asked nothing shows zeros."""
    for rows in (1, 2, 4):
        assert (await scraped.ask(rows=rows)).status_code == 200

    await scraped.shows("nv_inference_request_success", "3")
    await scraped.shows("nv_inference_pending_request_count", "0")

    assert scraped.value("nv_inference_count") == 7
    assert scraped.value("nv_inference_exec_count") == 3
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    total = sum(scraped.value(f"nv_inference_{part}_duration_us") for part in parts)
    assert 0 <= scraped.value("nv_inference_request_duration_us") - total < len(parts)
    for model in ("stub", "raises"):
        assert re.search(
            rf'^nv_model_load_duration_secs\{{model="{model}",version="1"\}} \d', scraped.page, re.MULTILINE
        )
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        for model in ("stub", "raises"):
            line = f'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}} 0'
            assert line in scraped.page.splitlines()
    assert 'nv_inference_request_success{model="raises",version="1"} 0' in scraped.page.splitlines()
    assert re.search(r"^nv_cpu_memory_total_bytes \d+$", scraped.page, re.MULTILINE)
    assert len([*text_string_to_metric_families(scraped.page)]) == scraped.page.count("# TYPE ")


async def test_failures_have_their_reason(scraped: Scraped, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind; while an execution is held, what waits behind it is pending."""
    scraped.scene.hold()
    held = asyncio.create_task(scraped.ask())
    await scraped.scene.started()
    waiting = asyncio.create_task(scraped.ask())
    await scraped.scene.queued(2)
    await scraped.shows("nv_inference_pending_request_count", "1")
    refused = await scraped.ask()
    await scraped.shows("nv_inference_request_failure", "1", reason="REJECTED")
    waiting.cancel()
    await scraped.shows("nv_inference_request_failure", "1", reason="CANCELED")
    await scraped.scene.queued(1)
    held_by = scraped.worker._keeper.held  # it may have taken the cancelled request before
    await eventually(lambda: len(held_by()) == 1, description="a worker with the execution alone")
    scraped.scene.go()
    raised = await scraped.ask("raises")

    def fail(lane: Lane, frame: bytes, done: Callable[[Entry | QinferError], None], **options: Any) -> None:
        del lane, frame, options
        asyncio.get_running_loop().call_soon(done, BrokerUnavailable("away"))

    with monkeypatch.context() as patch:
        patch.setattr(scraped.delivery, "submit", fail)
        lost = await scraped.ask()

    await scraped.shows("nv_inference_request_failure", "1", reason="OTHER")
    await scraped.shows("nv_inference_request_failure", "1", "raises", "BACKEND")
    await scraped.shows("nv_inference_request_success", "1")
    statuses = [(await held).status_code, refused.status_code, raised.status_code, lost.status_code]
    assert statuses == [200, 503, 500, 503]
    counts = re.findall(r'nv_inference_request_failure\{model="(\w+)",reason="(\w+)",version="1"\} (\d+)', scraped.page)
    assert {(model, reason): int(count) for model, reason, count in counts if count != "0"} == {
        ("stub", "REJECTED"): 1,
        ("stub", "CANCELED"): 1,
        ("stub", "OTHER"): 1,
        ("raises", "BACKEND"): 1,
    }
    assert len(counts) == 8


async def test_counters_outlive_the_workers(scraped: Scraped) -> None:
    """The one that counted is killed, and another goes on from there."""
    await scraped.ask()
    await scraped.shows("nv_inference_request_success", "1")
    await scraped.scene.kill()
    await scraped.shows("nv_inference_request_success", "1")

    await scraped.scene.worker("w2", heartbeat_every_s=0.05)
    await scraped.ask()

    await scraped.shows("nv_inference_request_success", "2")
