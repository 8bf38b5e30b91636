"""The console's cost: processor time of a gateway's console with ten open pages, while the gateway is under load."""

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from qinfer.observe.stats import QUEUE_BUCKETS_S
from qinfer.queue import keys
from qinfer_api.console.history import SLOT_S, SLOTS, SeriesCounts
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.member import Role
from tests.chaos.repository import write_stub
from tests.e2e.console import metered_gateway
from tests.e2e.console.metered_gateway import METER, read_meter

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MODEL = "cached"
"""The model whose answers come from the gateway's cache, because that is the greatest rate of a gateway."""
MOST_SHARE = 0.01
SECONDS, SETTLE_S, IDLE_S = 30.0, 5.0, 15.0
DIFFERENT = (
    "", "models", f"models/{MODEL}", "workers", "queues", "letters", "jobs", "requests", "endpoints", "audit",
)  # fmt: skip
ROOT = Path(__file__).parents[3]


class OpenPage:
    """A page as a browser keeps it: it follows the stream, and fetches its parts and charts again when it is told."""

    def __init__(self, client: httpx.AsyncClient, path: str) -> None:
        self._client, self._path = client, path
        self._topics: set[str] = set()
        self._charts: list[str] = []
        self.loads = 0
        self.is_open = asyncio.Event()

    async def follow(self) -> None:
        """Stays open until cancelled."""
        page = (await self._client.get(self._path)).text
        self._topics = set(re.findall(r'hx-trigger="live-(\w+) from:body"', page))
        self._charts = re.findall(r'data-charts="([^"]*)"', page)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_stream())
            if 'hx-trigger="every 5s"' in page:
                group.create_task(self._load_every(5.0))

    async def _read_stream(self) -> None:
        async with self._client.stream("GET", "live") as reply:
            assert reply.status_code == 200
            event = ""
            async for line in reply.aiter_lines():
                name, _, value = line.partition(": ")
                event = value if name == "event" else event
                if name == "data":
                    self.is_open.set()
                    await self._hear(event, json.loads(value))

    async def _hear(self, event: str, told: Sequence[str]) -> None:
        if event == "figures" and "slot" in told:
            for series in self._charts:
                await self._load("history", params={"of": series})
        if event == "topics" and self._topics & set(told):
            await self._load(self._path, headers={"hx-request": "true"})

    async def _load_every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._load(self._path, headers={"hx-request": "true"})

    async def _load(self, path: str, **options: dict[str, str]) -> None:
        reply = await self._client.get(path, **options)  # type: ignore[arg-type]  # options of httpx
        assert reply.status_code == 200, (path, reply.text)
        self.loads += 1


@contextlib.asynccontextmanager
async def metered(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Path]]:
    """Runs a gateway whose console is measured; yields the file of its meter."""
    repository, meter = tmp_path / "models", tmp_path / "meter"
    write_stub(repository, MODEL, delay_s=0, more="response_cache { enable: true }")
    settings = {"QINFER_CACHE__CONFIG": "local,size=16777216"}
    async with running_cluster(tmp_path, repository, workers=1, gateways=0, settings=settings) as cluster:
        more = {METER: str(meter), "PYTHONPATH": str(ROOT)}
        cluster.add(Role.GATEWAY, module=metered_gateway.__name__, settings=more)
        await cluster.ready((MODEL,))
        fill_history(cluster)
        yield cluster, meter


def fill_history(cluster: Cluster) -> None:
    """Writes the counts of an hour, which charts show."""
    made = SeriesCounts(3, [*range(len(QUEUE_BUCKETS_S) + 1)])
    value = msgspec.json.encode({f"{MODEL}:1": made, f"{MODEL}:2": made})
    last = int(time.time() / SLOT_S)
    with cluster.redis() as client:
        for number in range(last - SLOTS, last):
            key = keys.count_history(number)
            client.hset(key, "another", value)
            client.pexpire(key, 3_600_000)


@contextlib.asynccontextmanager
async def open_pages(url: str, paths: Sequence[str]) -> AsyncIterator[list[OpenPage]]:
    """Opens each page in a browser of its own."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"{url}/console/", follow_redirects=True, timeout=60)
            )
            for _ in paths
        ]
        pages = [OpenPage(client, path) for client, path in zip(clients, paths, strict=True)]
        async with asyncio.TaskGroup() as group:
            followed = [group.create_task(page.follow()) for page in pages]
            for page in pages:
                await page.is_open.wait()
            yield pages
            for each in followed:
                each.cancel()


async def loaded(url: str) -> float:
    """Loads the gateway as fast as one client can; returns requests a second."""
    options = ("-d", str(SECONDS), "--json", "--url", url, "--input", "a=1", "--input", "b=2")
    command = (sys.executable, "-m", "qinfer.cli.main", "bench", MODEL, *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed
    return float(json.loads(printed)["requests_per_s"])


async def share_of_core(meter: Path, seconds: float) -> float:
    """Returns the share of a core that the console takes for a while."""
    began_s, before_s = time.monotonic(), read_meter(meter)
    await asyncio.sleep(seconds)
    return (read_meter(meter) - before_s) / (time.monotonic() - began_s)


async def idle_share(pid: int) -> float:
    """Returns the share of a core that a whole process takes for a while."""
    process, began_s = psutil.Process(pid), time.monotonic()
    before = process.cpu_times()
    await asyncio.sleep(IDLE_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began_s)


@pytest.mark.parametrize("paths", [DIFFERENT, ("",) * 10], ids=["ten pages", "ten overviews"])
async def test_ten_open_pages_take_a_hundredth_of_a_core(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], paths: tuple[str, ...]
) -> None:
    async with metered(tmp_path) as (cluster, meter):
        (url,), (gateway,) = cluster.urls, cluster.of(Role.GATEWAY)
        alone = await idle_share(gateway.pid)
        async with open_pages(url, paths) as pages:
            await asyncio.sleep(SETTLE_S)
            before_s = read_meter(meter)
            idle = await idle_share(gateway.pid)
            share_idle = (read_meter(meter) - before_s) / IDLE_S
            before = sum(page.loads for page in pages)
            async with asyncio.TaskGroup() as group:
                load = group.create_task(loaded(url))
                await asyncio.sleep(SETTLE_S)
                share = await share_of_core(meter, SECONDS - 2 * SETTLE_S)
            loads = sum(page.loads for page in pages) - before

    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(paths)} pages, {load.result():.0f} requests/s, {loads} loads of parts and charts: "
            f"the console takes {share:.2%} of a core, without load {share_idle:.2%}; "
            f"the idle gateway {alone:.2%} without pages, {idle:.2%} with them\n"
        )
    assert loads >= len(paths)
    assert max(share, share_idle) <= MOST_SHARE
