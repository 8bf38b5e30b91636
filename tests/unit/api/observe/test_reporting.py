"""What a gateway adds to the models' statistics, and when."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from qinfer.core.settings import LimitSettings, Settings
from qinfer.errors import BrokerUnavailable
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.observe.stats import GatewayTally
from qinfer.queue.lanes import Queue
from qinfer_api.observe.reporting import Reporting
from tests.support.servers.servers import Database


class SlowStore(ControlStore):
    """Adds statistics once it is let, and fails where it is told to.

    Attributes:
        asked: Set once somebody adds.
        go: Lets whoever adds go on.
        is_away: Refuses.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.is_away = False

    async def add_stats(self, model: str, version: int, deltas: Mapping[str, int]) -> None:
        sent = dict(deltas)
        self.asked.set()
        await self.go.wait()
        if self.is_away:
            raise BrokerUnavailable("Redis can't be reached")
        await super().add_stats(model, version, sent)


class Setup:
    """A gateway's reporting on that store."""

    def __init__(self, store: SlowStore, delivery: Queue) -> None:
        self.store = store
        self.tally = GatewayTally()
        catalog = Catalog(self.store, LimitSettings())
        self.reporting = Reporting(Settings(), catalog, self.store, delivery, self.tally)

    async def counted(self) -> int:
        return (await self.store.stats("m", 1)).get("refusals:queue_full", 0)


@pytest.fixture
async def setup(database: Database) -> Setup:
    return Setup(database.store(SlowStore), await database.delivery())


async def test_two_flushes_at_once_count_once(setup: Setup) -> None:
    """The last one, at the end of a gateway, comes while the one of every second is under way."""
    setup.tally.count_ended("m", 1, "queue_full")
    first = asyncio.create_task(setup.reporting.flush())
    await setup.store.asked.wait()
    setup.tally.count_ended("m", 1, "queue_full")
    last = asyncio.create_task(setup.reporting.flush())
    await asyncio.sleep(0)

    setup.store.go.set()
    await asyncio.gather(first, last)

    assert await setup.counted() == 2


async def test_what_can_not_be_added_is_added_later(setup: Setup) -> None:
    """With what has come in between, and once."""
    setup.store.go.set()
    setup.store.is_away = True
    setup.tally.count_ended("m", 1, "queue_full")
    await setup.reporting.flush()
    setup.store.is_away = False
    setup.tally.count_ended("m", 1, "queue_full")

    await setup.reporting.flush()
    await setup.reporting.flush()

    assert await setup.counted() == 2
