"""How much waits in the lanes: the queue's depths, and this gateway's own requests."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from qinfer.errors import BrokerUnavailable, DeadlineInfeasible, QueueFull
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import BatchingSpec, ModelSpec, QueuePolicy, Routes, lanes_of
from qinfer.queue.entries import Lane, Share, share_of
from qinfer.queue.lanes import Queue
from qinfer.queue.tenants import Places
from qinfer.submission.backlog import LaneLoads
from qinfer.testing import eventually

P1, P2, P3 = (Lane("m", 1, f"p{number}") for number in (1, 2, 3))
BATCHING = BatchingSpec(preferred_sizes=(8,), priority_levels=3, default_priority=2)
SPEC = ModelSpec(
    name="m", backend="stub", inputs=(), outputs=(), batching=BATCHING, lane_capacity=100, max_batch_size=8
)
SERVED = ServedVersion(spec=SPEC, version=1, generation=1, lane=P2, routes=Routes(SPEC, 1))


class World:
    """A queue whose depths are set by hand, and a catalog of one model."""

    def __init__(self) -> None:
        self.depths = dict.fromkeys((P1, P2, P3), 0)
        self.divided: dict[Lane, list[Share]] = {}
        self.speed = Capacity()
        self.looks = 0
        self.is_down = False
        self.places = Places(lambda: 0.0)
        self.backlog = LaneLoads(cast(Queue, self), cast(Catalog, self))

    async def shares(self, lanes: Sequence[Lane]) -> list[list[Share]]:
        self.looks += 1
        if self.is_down:
            raise BrokerUnavailable("gone")
        return [[Share(lane, self.depths[lane]), *self.divided.get(lane, ())] for lane in lanes]

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

    high, normal = (world.backlog.judge(SERVED, SERVED.routes.for_priority(level), 10.0) for level in (1, 2))

    assert high is None
    assert isinstance(normal, DeadlineInfeasible)
    assert "take at least 25.0 s" in normal.message


async def test_the_limit_is_of_the_own_lane_only() -> None:
    """Others' lanes may be full."""
    world = World()
    world.depths = {P1: 0, P2: 100, P3: 0}
    world.backlog.load(SERVED, P2)
    await world.backlog.poll()

    first, second = (world.backlog.judge(SERVED, SERVED.routes.for_priority(level), 10.0) for level in (1, 2))

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
    monkeypatch.setattr("qinfer.submission.backlog.POLL_S", 0.0)
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


def served_with(policy: QueuePolicy, levels: int = 0) -> ServedVersion:
    """Returns a model of 8 rows a batch whose requests all wait by one policy."""
    batching = BatchingSpec(
        preferred_sizes=(8,), priority_levels=levels, default_priority=levels, default_policy=policy
    )
    spec = replace(SPEC, batching=batching)
    return replace(SERVED, spec=spec, lane=P1, routes=Routes(spec, 1))


REJECTS = QueuePolicy(timeout_s=1.0, allow_override=True)


@pytest.mark.parametrize(
    ("policy", "asked_s", "waiting", "is_refused"),
    [
        (REJECTS, 0.0, 50, False),
        (REJECTS, 0.0, 51, True),
        (REJECTS, 0.2, 11, True),
        (QueuePolicy(timeout_s=1.0), 0.2, 11, False),
        (QueuePolicy(timeout_s=1.0, delay=True), 0.0, 99, False),
        (REJECTS, 0.001, 8, False),
        (QueuePolicy(), 0.2, 99, False),
    ],
    ids=["in time", "too late", "its own timeout", "may not override", "is delayed", "the next batch", "no policy"],
)
async def test_a_queue_timeout_that_would_pass_is_refused(
    *, policy: QueuePolicy, asked_s: float, waiting: int, is_refused: bool
) -> None:
    """By what is ahead and the measured speed; never where the next batch may have room."""
    world, served = World(), served_with(policy)
    world.speed = Capacity(50.0, 0.0, 1)
    world.backlog.load(served, P1).own = waiting

    refusal = world.backlog.judge(served, served.routes.for_priority(0), 60.0, asked_s)

    assert isinstance(refusal, DeadlineInfeasible) == is_refused


@pytest.mark.parametrize("speed", [Capacity(), Capacity(0.0, 0.0, 1)], ids=["no worker", "a worker that has not run"])
async def test_a_queue_timeout_refuses_nothing_where_the_speed_is_unknown(speed: Capacity) -> None:
    world, served = World(), served_with(REJECTS)
    world.speed = speed
    world.backlog.load(served, P1).own = 99

    assert world.backlog.judge(served, served.routes.for_priority(0), 60.0) is None


async def test_a_model_that_is_scaled_to_zero_takes_the_request_that_wakes_it() -> None:
    """However short its queue timeout: nobody is ahead of it."""
    world, served = World(), served_with(REJECTS)
    world.speed = Capacity(100.0, 30.0, 0)

    assert world.backlog.judge(served, served.routes.for_priority(0), 60.0) is None


async def looked_at(world: World, served: ServedVersion, looks: int, *, high: int, executed: int) -> None:
    """Looks at the lanes again and again, while so many of the higher level are there and are executed between two."""
    load = world.backlog.load(served, P1)
    for _ in range(looks):
        load.own, load.executed = high, executed
        world.backlog.load(served, P2)
        await world.backlog.poll()
    load.own = 0


async def test_a_low_level_has_the_speed_that_higher_levels_leave() -> None:
    """Requests of the higher level that come later go before it, too."""
    world, served = World(), served_with(REJECTS, levels=2)
    world.speed = Capacity(100.0, 0.0, 1)
    world.backlog.load(served, P2).own = 60
    before = world.backlog.judge(served, served.routes.for_priority(2), 60.0)

    await looked_at(world, served, 50, high=5, executed=8)
    after = [world.backlog.judge(served, served.routes.for_priority(level), 60.0) for level in (1, 2)]

    assert (before, after[0]) == (None, None)
    assert isinstance(after[1], DeadlineInfeasible)


async def test_one_request_of_a_higher_level_takes_no_speed_from_the_others() -> None:
    """One quick request that ended between two looks is no rate: of a slow model nothing would be left."""
    world, served = World(), served_with(QueuePolicy(), levels=2)
    world.speed = Capacity(0.8, 0.0, 1)
    world.backlog.load(served, P2).own = 20

    await looked_at(world, served, 1, high=0, executed=1)

    assert world.backlog.judge(served, served.routes.for_priority(2), 60.0) is None


async def test_a_burst_of_a_higher_level_that_is_over_takes_no_speed_from_the_others() -> None:
    """Quick requests, more than the model could execute of its usual ones: the lane is empty again."""
    world, served = World(), served_with(QueuePolicy(), levels=2)
    world.speed = Capacity(0.8, 0.0, 1)
    world.backlog.load(served, P2).own = 20

    await looked_at(world, served, 2, high=50, executed=100)
    await looked_at(world, served, 20, high=0, executed=0)

    assert world.backlog.judge(served, served.routes.for_priority(2), 60.0) is None


async def test_what_one_batch_may_hold_is_not_judged_by_time() -> None:
    """The batch that executes may be about to end, and the next one has room."""
    world, served = World(), served_with(QueuePolicy())
    world.speed = Capacity(0.1, 0.0, 1)
    load = world.backlog.load(served, P1)

    load.own = 8
    within = world.backlog.judge(served, served.routes.for_priority(0), 1.0)
    load.own = 9
    beyond = world.backlog.judge(served, served.routes.for_priority(0), 1.0)

    assert within is None
    assert isinstance(beyond, DeadlineInfeasible)


async def test_a_start_that_has_begun_takes_only_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for a worker have waited for a part of its start; and one load may have been a slow one."""
    world, served = World(), served_with(QueuePolicy())
    world.speed = Capacity(10.0, 100.0, 0)
    world.backlog.load(served, P1).own = 1
    loop, later = asyncio.get_running_loop(), [0.0]
    begin_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: begin_s + later[0])

    await world.backlog.poll()
    first = world.backlog.judge(served, served.routes.for_priority(0), 30.0)
    later[0] = 25.0
    second = world.backlog.judge(served, served.routes.for_priority(0), 30.0)

    assert isinstance(first, DeadlineInfeasible)
    assert "take at least 50.1 s" in first.message
    assert second is None


def test_what_is_left_of_a_speed_is_never_nothing() -> None:
    """A level that is overtaken by more than the model can do is refused by what is ahead, not for ever."""
    assert Capacity(100.0).behind(0.0).rps == 100.0
    assert Capacity(100.0).behind(0.4).rps == pytest.approx(60.0)
    assert Capacity(100.0).behind(5.0).rps == 1.0


# --- shares of tenants ---

LIGHT = share_of(P1, 1)


async def divided(*, heavy: int, light: int, weight: int = 1, rps: float = 1.0) -> World:
    """Returns a lane of two tenants that was looked at: `heavy` has the lane itself, `light` the other share."""
    world = World()
    world.speed = Capacity(rps)
    world.depths[P1] = heavy
    world.divided[P1] = [Share(LIGHT, light, weight)]
    world.places.learn(P1, "light", 1, is_shared=False)
    world.places.learn(P1, "heavy", 0, is_shared=False)
    world.backlog.load(SERVED, P1)
    world.backlog.load(SERVED, LIGHT)
    await world.backlog.poll()
    return world


async def test_a_tenant_waits_for_its_turns_and_not_for_anothers_flood() -> None:
    """Of two alike, each entry waits for one of the other's; a flood waits for itself."""
    world = await divided(heavy=90, light=3)
    route = SERVED.routes.for_priority(1)

    light = world.backlog.judge(SERVED, route, 8.0, tenant="light")
    light_soon = world.backlog.judge(SERVED, route, 6.0, tenant="light")
    heavy = world.backlog.judge(SERVED, route, 90.0, tenant="heavy")

    assert light is None
    assert isinstance(light_soon, DeadlineInfeasible)
    assert "take at least 7.0 s" in light_soon.message
    assert isinstance(heavy, DeadlineInfeasible)
    assert "take at least 93.0 s" in heavy.message


async def test_a_heavier_weight_waits_for_less_of_the_others() -> None:
    """With a weight of 4, four entries wait for one."""
    world = await divided(heavy=90, light=3, weight=4)

    refusal = world.backlog.judge(SERVED, SERVED.routes.for_priority(1), 3.0, tenant="light")

    assert isinstance(refusal, DeadlineInfeasible)
    assert "take at least 4.0 s" in refusal.message


@pytest.mark.parametrize(
    ("heavy", "light", "refused"),
    [(99, 0, []), (100, 0, ["heavy"]), (100, 49, ["heavy"]), (100, 50, ["heavy", "light"]), (49, 51, ["light"])],
)
async def test_a_full_lane_refuses_who_has_its_share_of_it(heavy: int, light: int, refused: list[str]) -> None:
    """Of 100, each of two tenants may have 50 when all are taken."""
    world = await divided(heavy=heavy, light=light, rps=0.0)

    found = [
        tenant
        for tenant in ("heavy", "light")
        if isinstance(world.backlog.judge(SERVED, SERVED.routes.for_priority(1), 60.0, tenant=tenant), QueueFull)
    ]

    assert found == refused


async def test_shares_of_higher_lanes_are_ahead_of_lower_ones() -> None:
    """All that is in a lane goes before what is below it."""
    world = await divided(heavy=3, light=4)

    refusal = world.backlog.judge(SERVED, SERVED.routes.for_priority(2), 6.0)

    assert isinstance(refusal, DeadlineInfeasible)
    assert "take at least 7.0 s" in refusal.message


async def test_a_tenant_whose_share_is_not_known_yet_has_an_empty_one() -> None:
    """Another's flood keeps nobody from asking for a place, nor makes it wait for more than its turn."""
    world = await divided(heavy=100, light=0)

    first = world.backlog.judge(SERVED, SERVED.routes.for_priority(1), 2.0, tenant="new")
    await world.backlog.poll()
    later = world.backlog.judge(SERVED, SERVED.routes.for_priority(1), 2.0, tenant="new")

    assert (first, later) == (None, None)
    assert isinstance(world.backlog.judge(SERVED, SERVED.routes.for_priority(1), 2.0, tenant="heavy"), QueueFull)


async def test_requests_whose_place_was_not_known_are_counted_once() -> None:
    """They are in the lane when it is looked at, and are neither others' nor beside themselves."""
    world = World()
    unknown = world.places.last(P1, "new")
    load, lane = world.backlog.load(SERVED, unknown), world.backlog.load(SERVED, P1)
    load.own, world.depths[P1] = 40, 40

    await world.backlog.poll()

    assert (load.others, load.beside, lane.others) == (0, 0, 0)
    assert world.backlog.judge(SERVED, SERVED.routes.for_priority(1), 60.0, tenant="new") is None
