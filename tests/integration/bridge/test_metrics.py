"""What gateways show of bridges, around a real Redis: totals that outlive them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from qinfer.testing import eventually
from tests.integration.observe.test_metrics_scopes import Page, adapters, gateway_on
from tests.support.bridge_scene import Broker, body_of, kill, routes, start_process
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.servers.servers import RedisServer

WAIT_S = 20.0
COUNTERS = ("received_messages", "accepted_messages", "replies", "paused_seconds")


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[Broker]:
    with redis_server.client() as client:
        client.flushall()
    one = Broker(f"redis://127.0.0.1:{redis_server.port}/5")
    yield one
    one.close()


@pytest.fixture
async def scene(redis_server: RedisServer, broker: Broker) -> AsyncIterator[InlineWorkers]:
    delivery, store = await adapters(redis_server.url)
    async with inline_workers(delivery, store) as scene:
        await scene.model()
        await scene.worker()
        yield scene
    await store.close()
    await delivery.close()


class Totals:
    """The series of the route `route` among those of the cluster; its counters may not fall."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.shown: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        found = await self._page.read("cluster")
        shown = {
            name.removeprefix("qinfer_bridge_"): value
            for (name, labels), value in found.items()
            if ("route", "route") in labels
        }
        for name in (f"{counter}_total" for counter in COUNTERS):
            assert shown.get(name, 0.0) >= self.shown.get(name, 0.0), name
        assert not any("process" in dict(labels) for name, labels in found if name.startswith("qinfer_bridge_"))
        self.shown = shown
        return shown

    async def reach(self, accepted: int) -> None:
        """Waits until so many messages are accepted and answered, and no more."""

        async def is_there() -> bool:
            await self.read()
            return self.shown.get("accepted_messages_total") == self.shown.get("replies_total") == accepted

        await eventually(is_there, WAIT_S, f"{accepted} accepted")


async def test_totals_outlive_bridges(
    scene: InlineWorkers, redis_server: RedisServer, broker: Broker, tmp_path: Path
) -> None:
    """They stay when a bridge is killed, and grow when it is started again; a bridge that ends well tells all of it."""
    config = tmp_path / "routes.yaml"
    config.write_text(yaml.safe_dump(routes(broker.url)))
    process = start_process(redis_server.url, config)
    try:
        async with gateway_on(redis_server.url) as (_, page):
            totals = Totals(page)
            for number in range(3):
                broker.put(body_of(number))
            await totals.reach(3)
            assert (totals.shown["processes"], totals.shown["unacknowledged_messages"]) == (1, 0)

            kill(process)
            await totals.read()
            assert totals.shown["accepted_messages_total"] == 3
            process = start_process(redis_server.url, config)
            for number in range(2):
                broker.put(body_of(number))
            await totals.reach(5)
            broker.put(body_of(9.0))
            await broker.take(6)
            process.terminate()
            assert await asyncio.to_thread(process.wait, WAIT_S) == 0

            await totals.read()
            assert totals.shown["accepted_messages_total"] == totals.shown["replies_total"] == 6
            assert totals.shown["received_messages_total"] == 6
    finally:
        kill(process)
