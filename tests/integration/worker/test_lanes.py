"""Priority levels and queue policies as a worker keeps them, on a real Redis."""

import asyncio

from qinfer.core.messages import Response
from qinfer.models.spec import MAX_LANES
from qinfer.queue.entries import DELAYED, Lane
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, value

LEVELS = "priority_levels: 3 default_priority_level: 2"
DELAYS = "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000 }"
REJECTS = "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 100000 }"


class Order:
    """Notes in which order answers come."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def of(self, name: str, call: "asyncio.Future[Response]") -> "asyncio.Future[Response]":
        call.add_done_callback(lambda _: self.names.append(name))
        return call


async def seconds_pass(scene: InlineWorkers, seconds: float) -> None:
    """Lets queue timeouts end."""
    until_s = scene.delivery.clock.now_s() + seconds
    await eventually(lambda: scene.delivery.clock.now_s() > until_s)


async def held(scene: InlineWorkers, name: str, count: int) -> None:
    """Waits until a lane holds so many entries."""

    async def is_so() -> bool:
        return await scene.delivery.depth([Lane("stub", 1, name)]) == [count]

    await eventually(is_so, description=f"{count} entries in {name}")


async def test_higher_priorities_run_first(scene: InlineWorkers) -> None:
    """While one batch executes, others wait; then the order is that of the levels."""
    await scene.model(batching=LEVELS, mode="echo", dims=-1)
    await scene.worker()
    first = await scene.busy()
    # The batch is overdue: nothing is fetched until it has ended.
    await seconds_pass(scene, 0.15)
    order = Order()
    calls = [
        order.of(f"level {priority}", scene.submit_waiting(float(priority), priority=priority, levels=3))
        for priority in (3, 2, 1)
        for _ in range(8)
    ]
    await held(scene, "p3", 8)
    scene.go()

    answers = await asyncio.gather(*calls)

    assert {value(answer) for answer in answers} == {1.0, 2.0, 3.0}
    assert order.names == [f"level {priority}" for priority in (1, 2, 3) for _ in range(8)]
    await first


async def test_twelve_levels_run_in_their_order(scene: InlineWorkers) -> None:
    """Requests that came in mixed order, while the only worker was held, are answered level by level."""
    await scene.model(batching="priority_levels: 12 default_priority_level: 6")
    await scene.worker()
    first = await scene.busy()
    # As above.
    await seconds_pass(scene, 0.15)
    order = Order()
    mixed = [7, 12, 1, 9, 4, 11, 2, 8, 5, 10, 3, 6] * 2
    calls = [
        order.of(str(priority), scene.submit_waiting(float(priority), priority=priority, levels=12))
        for priority in mixed
    ]
    await held(scene, "p6", 2)
    scene.go()

    answers = await asyncio.gather(*calls)

    assert [value(answer) for answer in answers] == mixed
    assert order.names == [str(priority) for priority in sorted(mixed)]
    await first


async def test_levels_that_share_a_lane_are_sorted_by_the_worker(scene: InlineWorkers) -> None:
    """There are more of them than lanes: what one fetch brings runs in the order of the levels."""
    levels = 2 * MAX_LANES
    await scene.model(batching=f"priority_levels: {levels} default_priority_level: 2")
    await scene.worker()
    first = await scene.busy()
    # As above.
    await seconds_pass(scene, 0.15)
    order = Order()
    calls = [
        order.of(f"level {priority}", scene.submit_waiting(float(priority), priority=priority, levels=levels))
        for priority in (2, 1) * 4
    ]
    await held(scene, "p1", 1 + 8)
    scene.go()

    await asyncio.gather(*calls)

    assert order.names == ["level 1"] * 4 + ["level 2"] * 4
    await first


async def test_what_waited_too_long_is_refused(scene: InlineWorkers) -> None:
    """With REJECT, and not executed."""
    await scene.model(batching=REJECTS)
    await scene.worker()
    first = await scene.busy()
    call = scene.submit_waiting(1.0, queue_timeout_s=0.1)
    await seconds_pass(scene, 0.15)
    scene.go()

    failure = (await call).failure

    assert failure is not None
    assert (failure.code, failure.message) == ("deadline_exceeded", "Request timeout expired")
    await first
    assert scene.backends["w1"][0].sizes == [1]


async def test_what_waited_too_long_goes_behind_the_others(scene: InlineWorkers) -> None:
    """With DELAY: it is moved, waits for those that came later, and is answered in the end."""
    await scene.model(batching=DELAYS)
    await scene.worker()
    first = await scene.busy()
    order = Order()
    late = [order.of("late", scene.submit_waiting(float(i), queue_timeout_s=0.1)) for i in range(8)]
    await seconds_pass(scene, 0.15)
    others = [order.of("other", scene.submit_waiting(float(i), queue_timeout_s=20.0)) for i in range(8)]
    await scene.queued(17)
    scene.go()

    assert [value(answer) for answer in await asyncio.gather(*late, *others)] == [float(i) for i in range(8)] * 2
    assert order.names == ["other"] * 8 + ["late"] * 8
    await first
    await held(scene, f"p1{DELAYED}", 0)
    await scene.queued(0)


async def test_a_reload_with_other_levels_changes_the_lanes(scene: InlineWorkers) -> None:
    """New lanes are read at once, and what waits in old ones is not forgotten."""
    await scene.model(batching=LEVELS)
    worker = await scene.worker(lease_s=0.4, renew_every_s=0.1)
    assert [lane.name for lane in worker._lanes()] == ["p1", "p2", "p3"]
    await scene.model()
    await scene.ready()

    assert value(await scene.submit_waiting(3.0, priority=3, levels=3)) == 3.0
    await eventually(lambda: [lane.name for lane in worker._lanes()] == ["p1"])
    await scene.model(batching=LEVELS)
    await scene.ready()
    assert value(await scene.submit_waiting(2.0, priority=3, levels=3)) == 2.0


async def test_a_new_worker_reads_what_waits_in_lanes_of_old(scene: InlineWorkers) -> None:
    """The configuration changed while there was no worker."""
    await scene.model(batching=LEVELS)
    call = scene.submit_waiting(3.0, priority=3, levels=3)
    await scene.model()
    worker = await scene.worker(lease_s=0.4, renew_every_s=0.1)

    assert value(await call) == 3.0
    await eventually(lambda: [lane.name for lane in worker._lanes()] == ["p1"])


async def test_a_dead_workers_entries_of_every_lane_run_elsewhere(scene: InlineWorkers) -> None:
    """Whatever their level."""
    await scene.model(batching=LEVELS)
    calls = [scene.submit_waiting(float(priority), priority=priority, levels=3) for priority in (1, 2, 3)]
    lanes = [Lane("stub", 1, f"p{priority}") for priority in (1, 2, 3)]
    taken = 0
    while taken < 3:
        taken += len(await scene.delivery.fetch(lanes, "dead", 3, 1.0))
    await scene.worker(lease_s=0.3, renew_every_s=0.05)

    assert [value(answer) for answer in await asyncio.gather(*calls)] == [1.0, 2.0, 3.0]
