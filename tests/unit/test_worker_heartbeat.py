"""The worker's record: how fast it finds its models to be, and what of that outlives it."""

import pytest

from qinfer.batching.batcher import Batcher
from qinfer.clock import ServerClock
from qinfer.control.base import Speed, State, VersionState
from qinfer.control.memory_store import MemoryControlStore
from qinfer.settings import WorkerSettings
from qinfer.testing import FakeClock
from qinfer_workers.inference.heartbeat import SPEEDS_EVERY_S, Heartbeat
from tests.batching import Bench, Scene


class Store(MemoryControlStore):
    """Counts the speeds that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[Speed] = []

    async def put_speed(self, model: str, version: int, speed: Speed) -> None:
        self.puts.append(speed)
        await super().put_speed(model, version, speed)


class Setup:
    def __init__(self, scene: Scene) -> None:
        self.time = FakeClock()
        self.store = Store()
        self.batchers: list[Batcher] = [scene.batcher]
        self.states = {"stub": {1: VersionState(State.READY, 1)}}
        clock = ServerClock(self.time, offset_s=0.0)
        settings = WorkerSettings()
        self.heartbeat = Heartbeat(self.store, "w", settings, clock, lambda: self.states, lambda: self.batchers)

    async def speeds(self) -> dict[str, dict[int, float]]:
        (record,) = await self.store.workers()
        return record.speeds


@pytest.mark.parametrize(("instances", "rows", "rps"), [(1, 1, 100.0), (3, 1, 300.0), (1, 4, 25.0)])
async def test_a_batcher_knows_its_speed(instances: int, rows: int, rps: float) -> None:
    """All instances, full batches, requests of as many rows as the last ones."""
    scene = Scene(Bench(instances), known_s=0.01)
    scene.batcher.admit(scene.items(2, rows))

    assert scene.batcher.speed_rps() == pytest.approx(rps)


async def test_a_batcher_that_has_run_nothing_knows_nothing() -> None:
    """And nothing is written of it."""
    setup = Setup(Scene(Bench()))

    await setup.heartbeat.beat()

    assert setup.batchers[0].speed_rps() == 0.0
    assert await setup.speeds() == {}


async def test_speeds_are_in_every_record_and_stored_now_and_then() -> None:
    """What outlives the worker need not be new."""
    setup = Setup(Scene(Bench(), known_s=0.01))

    await setup.heartbeat.beat()
    first = list(setup.store.puts)
    setup.time.advance(SPEEDS_EVERY_S)
    await setup.heartbeat.beat()
    setup.time.advance(SPEEDS_EVERY_S / 2)
    await setup.heartbeat.beat()

    assert await setup.speeds() == {"stub": {1: 100.0}}
    assert (first, setup.store.puts) == ([], [Speed(100.0)])


async def test_the_last_speed_is_stored_at_the_end() -> None:
    """Of a version that is served no more, at drain too; once."""
    setup = Setup(Scene(Bench(), known_s=0.01))
    (batcher,) = setup.batchers
    setup.batchers.clear()
    setup.heartbeat.collect(batcher)

    await setup.heartbeat.beat()
    await setup.heartbeat.beat()

    assert await setup.store.speed("stub", 1) == Speed(100.0)
    assert len(setup.store.puts) == 1


async def test_a_load_is_timed() -> None:
    """From LOADING to READY; one that failed before counts for nothing."""
    setup = Setup(Scene(Bench(), known_s=0.01))
    for state in (State.LOADING, State.UNAVAILABLE):
        setup.states = {"stub": {1: VersionState(state, 1)}}
        await setup.heartbeat.beat()
        setup.time.advance(1.0)
    setup.states = {"stub": {1: VersionState(State.LOADING, 1)}}
    await setup.heartbeat.beat()
    setup.time.advance(2.0)
    await setup.heartbeat.beat()
    setup.time.advance(5.5)
    setup.states = {"stub": {1: VersionState(State.READY, 1)}}
    await setup.heartbeat.beat()
    setup.time.advance(SPEEDS_EVERY_S)
    await setup.heartbeat.beat()

    assert setup.store.puts[-1] == Speed(100.0, 7.5)
