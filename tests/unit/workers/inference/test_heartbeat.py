"""The worker's record: how fast it finds its models to be, and what of that outlives it; its log, and asked drains."""

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from qinfer.backends.stub import StubBackend
from qinfer.batching.batcher import Batcher
from qinfer.core.clock import ServerClock
from qinfer.core.settings import WorkerSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models.state import Speed, State, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe import exposition
from qinfer.observe.exposition import ModelSeries
from qinfer.observe.logs import LogRing, WorkerLog
from qinfer.testing import FakeClock, eventually
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.heartbeat import LOG_TTL_S, SPEEDS_EVERY_S, Heartbeat
from tests.support.batching import Bench, Scene
from tests.support.servers.servers import Database


class Store(ControlStore):
    """Notes the speeds and the models' own metrics that are written."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.puts: list[Speed] = []
        self.metrics: list[bytes] = []

    async def put_speed(self, model: str, version: int, speed: Speed) -> None:
        self.puts.append(speed)
        await super().put_speed(model, version, speed)

    async def put_model_metrics(self, worker_id: str, record: bytes, ttl_s: float) -> None:
        self.metrics.append(record)
        await super().put_model_metrics(worker_id, record, ttl_s)


class Setup:
    def __init__(self, database: Database, scene: Scene) -> None:
        self.time = FakeClock()
        self.store = database.store(Store)
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
    scene.batcher.add_items(scene.items(2, rows))

    assert scene.batcher.speed_rps() == pytest.approx(rps)


async def test_a_batcher_that_has_run_nothing_knows_nothing(database: Database) -> None:
    """And nothing is written of it."""
    setup = Setup(database, Scene(Bench()))

    await setup.heartbeat.beat()

    assert setup.batchers[0].speed_rps() == 0.0
    assert await setup.speeds() == {}


async def test_speeds_are_in_every_record_and_stored_now_and_then(database: Database) -> None:
    """What outlives the worker need not be new."""
    setup = Setup(database, Scene(Bench(), known_s=0.01))

    await setup.heartbeat.beat()
    first = list(setup.store.puts)
    setup.time.advance(SPEEDS_EVERY_S)
    await setup.heartbeat.beat()
    setup.time.advance(SPEEDS_EVERY_S / 2)
    await setup.heartbeat.beat()

    assert await setup.speeds() == {"stub": {1: 100.0}}
    assert (first, setup.store.puts) == ([], [Speed(100.0)])


async def test_the_last_speed_is_stored_at_the_end(database: Database) -> None:
    """Of a version that is served no more, at drain too; once."""
    setup = Setup(database, Scene(Bench(), known_s=0.01))
    (batcher,) = setup.batchers
    setup.batchers.clear()
    setup.heartbeat.collect(batcher)

    await setup.heartbeat.beat()
    await setup.heartbeat.beat()

    assert await setup.store.speeds([("stub", 1)]) == {("stub", 1): Speed(100.0)}
    assert len(setup.store.puts) == 1


async def test_a_load_is_timed(database: Database) -> None:
    """In the record, and beside the speed, for when no worker lives."""
    setup = Setup(database, Scene(Bench(), known_s=0.01))
    setup.heartbeat.load_times = lambda: {"stub": {1: 7.5004}, "idle": {2: 0.25}}
    setup.time.advance(SPEEDS_EVERY_S)

    await setup.heartbeat.beat()

    (record,) = await setup.store.workers()
    assert record.load_s == {"stub": {1: 7.5004}, "idle": {2: 0.25}}
    assert setup.store.puts[-1] == Speed(100.0, 7.5)


async def test_requests_past_the_lanes_are_in_the_record(database: Database) -> None:
    setup = Setup(database, Scene(Bench()))
    setup.heartbeat.direct = lambda: {("stub", 1): 3}

    await setup.heartbeat.beat()

    (record,) = await setup.store.workers()
    assert record.direct == {"stub": {1: 3}}


async def test_what_waits_for_an_instance_is_not_executing(database: Database) -> None:
    """One batch is placed ahead of the only instance: it is pending still."""
    setup = Setup(database, scene := Scene(Bench(), known_s=0.01))
    scene.batcher.add_items(scene.items(2, 8))
    executing = scene.batcher.executing
    await setup.heartbeat.beat()
    (first,) = await setup.store.workers()
    began, _ = scene.batcher.expected_ends
    began.begin_ns = 1
    await setup.heartbeat.beat()
    (then,) = await setup.store.workers()

    assert executing == 2
    assert (first.busy, then.busy) == ({}, {"stub": {1: 1}})


class AwayStore(ControlStore):
    """Refuses the first heartbeats, and counts the wakes."""

    failures, wakes = 2, 0

    async def heartbeat(self, record: WorkerRecord, ttl_s: float) -> None:
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("Redis can't be reached")
        await super().heartbeat(record, ttl_s)

    async def wake(self) -> None:
        self.wakes += 1
        await super().wake()


async def test_news_wake_their_readers_though_the_store_was_away(database: Database) -> None:
    """Once, at the first beat that succeeds; a beat without news wakes nobody."""
    store, beats = database.store(AwayStore), 0

    def states() -> dict[str, dict[int, VersionState]]:
        nonlocal beats
        beats += 1
        return {}

    clock = ServerClock(FakeClock(), offset_s=0.0)
    heartbeat = Heartbeat(store, "w", WorkerSettings(heartbeat_every_s=0.001), clock, states, list)
    heartbeat.changed()
    beating = asyncio.create_task(heartbeat.run())
    await eventually(lambda: beats >= 6, description="some beats")
    beating.cancel()
    await asyncio.wait([beating])

    assert store.wakes == 1


async def test_an_asked_drain_begins_once(database: Database) -> None:
    setup, asked = Setup(database, Scene(Bench())), 0

    def drain() -> None:
        nonlocal asked
        asked += 1
        setup.heartbeat.drains()

    setup.heartbeat.drain_asked = drain
    await setup.heartbeat.beat()
    before = asked
    assert await setup.store.ask_drain("w", "root")
    await setup.heartbeat.beat()
    await setup.heartbeat.beat()

    assert (before, asked) == (0, 1)
    (record,) = await setup.store.workers()
    assert record.condition == "draining"


class LogStore(ControlStore):
    """Counts the writes of logs, of which it may refuse some."""

    writes, failures = 0, 0

    async def put_worker_log(self, worker_id: str, log: WorkerLog, ttl_s: float) -> None:
        self.writes += 1
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("Redis can't be reached")
        await super().put_worker_log(worker_id, log, ttl_s)


async def test_the_log_is_written_on_change_and_kept_while_the_worker_lives(database: Database) -> None:
    """A beat without news writes nothing; a line that could not be written comes with the next one."""
    setup = Setup(database, Scene(Bench()))
    store = database.store(LogStore)
    setup.heartbeat._store, setup.heartbeat.log = store, (ring := LogRing())

    def note(event: str) -> None:
        ring.handle(logging.LogRecord("qinfer", logging.WARNING, "", 0, event, (), None))

    await setup.heartbeat.put_log()
    note("one")
    store.failures = 1
    with pytest.raises(BrokerUnavailable):
        await setup.heartbeat.put_log()
    note("two")
    for _ in range(3):
        await setup.heartbeat.put_log()
    written = store.writes
    setup.time.advance(LOG_TTL_S / 2 + 1)
    await setup.heartbeat.put_log()

    assert [line.event for line in await store.worker_log("w")] == ["two", "one"]
    assert (written, store.writes) == (2, 3)


class Metered(StubBackend):
    """Has a metric of its own, and notes which threads read it."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[int] = set()

    def metrics(self) -> list[ModelSeries]:
        self.readers.add(threading.get_ident())
        return [ModelSeries("own", "counter", "", (), (), (1.0,))]


async def test_the_models_own_metrics_are_read_beside_the_event_loop(database: Database) -> None:
    """Tens of thousands would stop it."""
    setup, backend = Setup(database, scene := Scene(Bench())), Metered()
    executor = ThreadExecutor([backend], asyncio.get_running_loop(), "stub")
    scene.batcher.model = replace(scene.batcher.model, executor=executor)

    await setup.heartbeat.beat()

    assert backend.readers
    assert threading.get_ident() not in backend.readers
    assert exposition.series_of(await setup.store.model_metrics(["w"])) == backend.metrics()
    executor.retire()


async def test_the_models_own_metrics_are_written_where_they_have_changed(database: Database) -> None:
    """And now and then; where there never were any, not once."""
    setup, backend = Setup(database, scene := Scene(Bench())), Metered()
    executor = ThreadExecutor([backend], asyncio.get_running_loop(), "stub")
    await setup.heartbeat.beat()
    scene.batcher.model = replace(scene.batcher.model, executor=executor)

    for wait_s in (0.0, 1.0, SPEEDS_EVERY_S):
        setup.time.advance(wait_s)
        await setup.heartbeat.beat()
    setup.batchers.clear()
    await setup.heartbeat.beat()

    own = exposition.record_of(backend.metrics())
    assert setup.store.metrics == [own, own, exposition.record_of(())]
    executor.retire()
