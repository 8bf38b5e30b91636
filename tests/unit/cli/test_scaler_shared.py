"""Autoscalers that share the work of the same models: they know of one another by one store, without processes."""

import socket
from dataclasses import replace

import pytest

from qinfer.cli.local.supervisor import RestartPolicy
from qinfer.cli.scaling.scaler import Autoscaler, Away, ScalingPool, read
from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue
from qinfer.scaling.policy import RECORD_TTL_S, ScalingPolicy
from qinfer.scaling.work import VersionWork
from qinfer.testing import EmbeddedServer, FakeClock
from tests.unit.cli.test_scaler import Eyes, Hands

POLICY = ScalingPolicy(max_workers=3, target_s=10, down_after_s=30, idle_s=60, cooldown_s=0)
READY = WorkerRecord(id=f"{socket.gethostname()}-0-x", started_at=0.0, models={"m": {1: VersionState(State.READY, 1)}})
"""The heartbeat of every worker: those that no process is behind all have the number 0."""


class Host:
    """An autoscaler with its surroundings."""

    def __init__(self, name: str, scene: "Scene", policy: ScalingPolicy = POLICY) -> None:
        self.lines: list[str] = []
        self.name, self.scene = name, scene
        self.workers: tuple[WorkerRecord, ...] = (READY,)
        self.hands, self.eyes = Hands(self.lines.append), Eyes()
        slots = [()] * policy.max_workers
        self.pool = ScalingPool(self.hands, {}, slots, stop_s=1, policy=RestartPolicy(), clock=scene.clock)
        self.scaler = Autoscaler(policy, self.pool, self.eyes, ("m",), self.lines.append, scene.clock)
        self.scaler._id = self.scaler._peers._own = name  # random otherwise, and ties go by it
        self.scaler.start()

    async def look(self, work_s: float, *, publishes: bool = True) -> int:
        """Has it see so much work, and the records that there are; returns how many workers it has then."""
        work = VersionWork(
            model="m", version=1, requests=int(work_s > 0), rows=int(work_s > 0), work_s=work_s, rows_per_s=1.0
        )
        if publishes:
            await self.publish()
        reading = await read(self.scene.store, self.scene.delivery, ("m",), self.scene.clock)
        self.eyes.next = replace(reading, work=(work,), workers=self.workers)
        self.scaler.step()
        if publishes:
            await self.publish()
        return self.pool.size

    async def publish(self, ttl_s: float = RECORD_TTL_S) -> None:
        await self.scene.store.put_scaler(self.eyes.said[-1][0], {}, ttl_s)


class Scene:
    """A store, and the time."""

    def __init__(self, server: EmbeddedServer, store: ControlStore, delivery: Queue) -> None:
        self.clock = FakeClock(0.0)
        self.server, self.store, self.delivery = server, store, delivery
        self.hosts: list[Host] = []

    async def add(self, name: str, policy: ScalingPolicy = POLICY) -> Host:
        host = Host(name, self, policy)
        await host.publish()
        self.hosts.append(host)
        return host

    def advance(self, seconds: float) -> None:
        """Moves the time of the autoscalers, and that of the store, in which records end."""
        self.clock.advance(seconds)
        self.server.advance(seconds)

    async def watch(self, work_s: float, seconds: int = 3) -> list[tuple[int, ...]]:
        """Has all of them look each second, one after the other; returns the workers of each after each look."""
        sizes = []
        for _ in range(seconds):
            self.advance(1.0)
            for host in self.hosts:
                await host.look(work_s)
                sizes.append(tuple(one.pool.size for one in self.hosts))
        return sizes


@pytest.fixture
def scene(timed: EmbeddedServer, store: ControlStore, delivery: Queue) -> Scene:
    return Scene(timed, store, delivery)


async def test_one_of_them_starts_the_first_worker(scene: Scene) -> None:
    """And it stays the only one, whoever looks first."""
    await scene.add("b")
    await scene.add("a")

    assert set(await scene.watch(5.0, 10)) == {(0, 0), (0, 1)}
    assert scene.hosts[1].lines == [
        "1 worker instead of 0, 1 with those of other autoscalers: 5.0 s of work at 10 s a worker"
    ]


async def test_together_they_are_as_many_as_the_work_asks_for(scene: Scene) -> None:
    """Never more, up and down again; what each publishes is its own part."""
    a, b = await scene.add("a"), await scene.add("b")

    up = await scene.watch(35.0)
    assert max(map(sum, up)) == 4
    assert up[-1] == (2, 2)
    assert [(one.target, one.live) for one in await scene.store.scalers()] == [(2, 2), (2, 2)]

    down = await scene.watch(0.0, 200)
    assert down[-1] == (0, 0)
    totals = list(map(sum, down))
    assert totals == sorted(totals, reverse=True)
    assert [sum(counts.get("up", 0) for _, counts in host.eyes.said) for host in (a, b)] == [1, 1]


async def test_who_is_at_its_most_leaves_the_rest(scene: Scene) -> None:
    """To the one that has room."""
    await scene.add("a", replace(POLICY, max_workers=1))
    await scene.add("b", replace(POLICY, min_workers=1))

    assert (await scene.watch(40.0))[-1] == (1, 3)


async def test_work_goes_on_while_one_joins(scene: Scene) -> None:
    """What runs runs on; the newcomer takes what comes on top."""
    a = await scene.add("a")
    await scene.watch(25.0)
    assert a.pool.size == 3
    await scene.add("b")

    assert set(await scene.watch(25.0, 100)) == {(3, 0)}
    assert (await scene.watch(45.0))[-1] == (3, 2)
    assert len(a.lines) == 1


@pytest.mark.parametrize(("ends_well", "after_s"), [(True, 1), (False, int(RECORD_TTL_S))])
async def test_the_share_of_one_that_dies_is_taken_over(scene: Scene, *, ends_well: bool, after_s: int) -> None:
    """When it ends, or its record does; though the work that is left asks for none of it yet.

    The time of the store goes on while the test runs: a record may end one look earlier.
    """
    a, b = await scene.add("a"), await scene.add("b")
    assert (await scene.watch(15.0))[-1] == (1, 1)
    scene.hosts.remove(b)
    if ends_well:
        await b.publish(0.0)

    for _ in range(after_s):
        scene.advance(1.0)
        had_record = len(await scene.store.scalers()) == 2
        size = await a.look(5.0)
        has_record = len(await scene.store.scalers()) == 2
        assert (size, size == 1) in ((1, had_record), (2, has_record))

    assert size == 2
    assert a.lines[-1] == "2 workers instead of 1: the workers of an autoscaler that is gone are taken over"


async def test_one_that_can_not_start_workers_leaves_them_to_others(scene: Scene) -> None:
    """It goes on trying."""
    a, b = await scene.add("a"), await scene.add("b")
    a.hands.broken = True
    assert (await scene.watch(5.0))[-1] == (0, 1)
    a.hands.broken = False

    await scene.watch(5.0, 100)
    assert a.pool.size + b.pool.size == 1


async def test_those_that_do_not_know_one_another_yet_do_not_flap(scene: Scene) -> None:
    """What each started before it knew stays for as long as any that are too many."""
    a, b = await scene.add("a"), await scene.add("b")
    await a.publish(0.0)
    await b.publish(0.0)
    scene.advance(1.0)
    assert [await a.look(5.0, publishes=False), await b.look(5.0, publishes=False)] == [1, 1]

    sizes = await scene.watch(5.0, 200)
    assert sizes[:20] == [(1, 1)] * 20
    assert sizes[-1] == (1, 0)
    assert len(a.lines) + len(b.lines) == 3


async def test_nothing_changes_after_an_outage(scene: Scene) -> None:
    """Records have ended meanwhile; those who write late are not taken for dead."""
    a, b = await scene.add("a"), await scene.add("b")
    await scene.watch(35.0)
    for host in (a, b):
        host.eyes.next = Away("the control store can't be reached")
        host.scaler.step()
    scene.advance(100.0)

    assert [await a.look(35.0) for _ in range(3)] == [2, 2, 2]
    assert set(await scene.watch(35.0, 40)) == {(2, 2)}
