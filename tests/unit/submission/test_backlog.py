"""How much waits in the lanes: the queue's depths, and this gateway's own requests."""

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from qinfer.errors import BrokerUnavailable, DeadlineInfeasible, QueueFull
from qinfer.models.catalog import Catalog, Served
from qinfer.models.readiness import Capacity
from qinfer.models.routes import Routes, lanes_of
from qinfer.models.spec import BatchingSpec, ModelSpec
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.submission.submit import Backlog
from qinfer.testing import eventually

P1, P2, P3 = (Lane("m", 1, f"p{number}") for number in (1, 2, 3))
BATCHING = BatchingSpec(preferred_sizes=(8,), priority_levels=3, default_priority=2)
SPEC = ModelSpec(
    name="m", backend="stub", inputs=(), outputs=(), batching=BATCHING, lane_capacity=100, max_batch_size=8
)
SERVED = Served(spec=SPEC, version=1, generation=1, lane=P2, routes=Routes(SPEC, 1))


class World:
    """A queue whose depths are set by hand, and a catalog of one model."""

    def __init__(self) -> None:
        self.depths = dict.fromkeys((P1, P2, P3), 0)
        self.speed = Capacity()
        self.looks = 0
        self.is_down = False
        self.backlog = Backlog(cast(Queue, self), cast(Catalog, self))

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        self.looks += 1
        if self.is_down:
            raise BrokerUnavailable("gone")
        return [self.depths[lane] for lane in lanes]

    def lanes(self, model: str, version: int) -> tuple[Lane, ...]:
        return lanes_of(SPEC, version)

    def capacity(self, model: str, version: int) -> Capacity:
        return self.speed


async def test_others_requests_are_polled_and_ones_own_are_counted() -> None:
    """What was one's own at the look is not counted twice, and what is answered since is counted no more."""
    world = World()
    load = world.backlog.load(SERVED, P2)
    load.own, world.depths[P2] = 3, 10

    await world.backlog.poll()
    polled = load.own + load.others
    load.own = 1

    assert (polled, load.others, load.own + load.others) == (10, 7, 8)


async def test_entries_that_are_answered_and_not_yet_finished_are_not_negative() -> None:
    """The queue may be ahead of its depth."""
    world = World()
    load = world.backlog.load(SERVED, P2)
    load.own, world.depths[P2] = 3, 1

    await world.backlog.poll()

    assert load.own + load.others == 3


@pytest.mark.parametrize(("workers", "others"), [(0, 20), (1, 4)])
async def test_entries_that_are_answered_and_not_yet_finished_are_not_others(workers: int, others: int) -> None:
    """At most two batches of each live worker; what was answered before the last look is finished by now."""
    world = World()
    world.speed = Capacity(0.0, 0.0, workers)
    load = world.backlog.load(SERVED, P2)
    load.left, world.depths[P2] = 17, 20

    await world.backlog.poll()
    first = load.others
    await world.backlog.poll()

    assert (first, load.others) == (others, 20)


async def test_a_level_waits_for_its_own_lane_and_those_above() -> None:
    """Strict priorities: what is below is not ahead."""
    world = World()
    world.speed = Capacity(1.0, 0.0, 1)
    world.depths = {P1: 5, P2: 20, P3: 90}
    world.backlog.load(SERVED, P2)
    await world.backlog.poll()

    high, normal = (world.backlog.judge(SERVED, SERVED.routes.of(level), 100, 10.0) for level in (1, 2))

    assert high is None
    assert isinstance(normal, DeadlineInfeasible)
    assert "take about 25.0 s" in normal.message


async def test_the_limit_is_of_the_own_lane_only() -> None:
    """Others' lanes may be full."""
    world = World()
    world.depths = {P1: 0, P2: 100, P3: 0}
    world.backlog.load(SERVED, P2)
    await world.backlog.poll()

    first, second = (world.backlog.judge(SERVED, SERVED.routes.of(level), 100, 10.0) for level in (1, 2))

    assert first is None
    assert isinstance(second, QueueFull)


async def test_an_outage_keeps_the_last_look() -> None:
    """Requests can't be submitted either."""
    world = World()
    load = world.backlog.load(SERVED, P2)
    world.depths[P2] = 10
    await world.backlog.poll()
    world.is_down = True

    await world.backlog.poll()

    assert load.own + load.others == 10


async def test_nothing_is_polled_while_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is looked at from its first request until some time after its last."""
    monkeypatch.setattr("qinfer.submission.submit.POLL_S", 0.0)
    world = World()
    task = asyncio.create_task(world.backlog.run())
    await asyncio.sleep(0)
    before = world.looks

    load = world.backlog.load(SERVED, P2)
    load.own = 1
    await eventually(lambda: world.looks > 50, description="looks while a request is in flight")
    load.own = 0
    seen = [-1]

    def is_quiet() -> bool:
        seen.append(world.looks)
        return seen[-1] == seen[-2]

    await eventually(is_quiet, description="the version to be forgotten")
    task.cancel()
    await asyncio.wait([task])

    assert before == 0
    assert world.backlog.load(SERVED, P2) is not load
