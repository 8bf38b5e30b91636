"""What `/metrics` reads of queue and store besides the work: counts of everything at once, on each server."""

from collections.abc import AsyncIterator

import pytest

from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_dead_letters import MODEL, bury_all, letters
from tests.contract.queue.test_delivery import ready
from tests.support.bulk_jobs import planned, record, running


@pytest.fixture
async def store(queue: RedisQueue) -> AsyncIterator[ControlStore]:
    opened = ControlStore(admin_client(queue.settings))
    yield opened
    await opened.close()


async def test_dead_letters_are_counted(queue: RedisQueue) -> None:
    """Those that are kept."""
    delivery = await ready(queue, b"r1", b"r2")
    assert await delivery.dead_letters.count(MODEL) == 0
    await bury_all(delivery)
    assert await delivery.dead_letters.count(MODEL) == 2
    first, _ = await letters(delivery)
    await delivery.dead_letters.purge(MODEL, [first.id])

    assert await delivery.dead_letters.count(MODEL) == 1
    assert await delivery.dead_letters.count("other") == 0


async def test_jobs_are_counted_by_state(queue: RedisQueue) -> None:
    """All open ones, and the newest of those that have ended."""
    delivery = await queue.connect()
    assert dict(await Jobs(delivery).states()) == {}
    await running(delivery, 2, "j1")
    await planned(delivery, 1, "j2")
    for number in (3, 4, 5):
        await Jobs(delivery).create(record(f"j{number}", created_at=1000.0 + number))
        assert await Jobs(delivery).move(f"j{number}", {"validating"}, "failed", error="no")
    await Jobs(delivery).create(record("j6"))
    states = [job.state for name in ("j1", "j2") if (job := await Jobs(delivery).get(name)) is not None]

    found = await Jobs(delivery).states()

    assert found == {"failed": 3, "validating": 1} | {state: states.count(state) for state in states}
    assert (await Jobs(delivery).states(newest=4)).get("failed", 0) == 1


async def test_all_statistics_of_several_versions(store: ControlStore) -> None:
    """Each version is there, with all of its fields."""
    await store.add_stats("m", 1, {"a": 1, "b": 2})

    assert await store.all_stats([("m", 1), ("none", 2)]) == {("m", 1): {"a": 1, "b": 2}, ("none", 2): {}}
    assert await store.all_stats([]) == {}
