"""The janitor's part in bulk jobs, a round at a time, on a server whose time tests move."""

import asyncio
import logging
from functools import partial

import pytest

from qinfer.core.settings import LimitSettings, WebhookSettings
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.observe.catalogue import BACKLOG, NV_PENDING
from qinfer.observe.stats import GatewayTally
from qinfer.queue.entries import Lease, bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.testing import EmbeddedServer, eventually
from qinfer_api.jobs.records import message_of
from qinfer_api.jobs.service import JobJanitor
from qinfer_api.observe.reporting import DeadLetterCounts, take_snapshot
from qinfer_api.requests.janitor import Janitor
from qinfer_api.requests.webhooks import Targets, Webhooks
from tests.support.leases import renew
from tests.support.servers.servers import Database

CONFIG = """
name: "m" backend: "stub" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] }
"""
LANES = bulk_lanes("m", 1)


class Bench:
    """A janitor and what it looks after; Celery's broker is away while `trouble` is set."""

    def __init__(self, server: EmbeddedServer, database: Database, delivery: Queue) -> None:
        self.server = server
        self.delivery, self.store = delivery, database.store()
        self.jobs = Jobs(self.delivery)
        self.catalog = Catalog(self.store, LimitSettings())
        self.sent: list[str] = []
        self.trouble = False
        self.janitor = JobJanitor(self.delivery, self.catalog, self.finalise)

    def finalise(self, job_id: str) -> None:
        if self.trouble:
            raise BrokerUnavailable("the task queue can't be reached; try again")
        self.sent.append(job_id)

    async def workers(self, count: int) -> None:
        await self.store.put_model(StoredModel("m", 1, to_json(normalise(parse(CONFIG), "m")), (1,)))
        await self.store.set_desired(DesiredState("m", 1))
        ready = {"m": {1: VersionState(State.READY, 1)}}
        for number in range(count):
            await self.store.heartbeat(WorkerRecord(id=f"w{number}", started_at=0.0, models=ready), ttl_s=3600)
        await self.catalog.refresh()

    async def plan(self, count: int, job_id: str = "j1", **changes: object) -> None:
        fields = {"id": job_id, "model": "m", "version": 1, "state": "planning", **changes}
        assert await self.jobs.create(JobRecord(**fields))  # type: ignore[arg-type]  # of the fields' own types
        shards = [(index, f"{job_id}:{index}".encode()) for index in range(count)]
        assert await self.jobs.add_shards(job_id, shards, 10 * count, complete=True)

    async def depth(self) -> int:
        return sum(await self.delivery.depth(LANES))

    async def fetch(self, count: int = 1) -> list[Lease]:
        return await self.delivery.fetch(LANES, "w", count, 0.0)

    async def finish(self, lease: Lease, failed_rows: int = 0) -> None:
        job_id, _, index = lease.frame.decode().partition(":")
        assert await self.jobs.finish_shard(job_id, lease, ShardOutcome(int(index), 10, failed_rows))

    async def state(self, job_id: str = "j1") -> str:
        record = await self.jobs.get(job_id)
        return "" if record is None else record.state


def rounds(bench: Bench, jobs: JobJanitor) -> Janitor:
    off = WebhookSettings()
    webhooks = Webhooks(off, bench.delivery, Targets(off), partial(message_of, bench.jobs))
    return Janitor(bench.delivery, bench.catalog, GatewayTally(), 0.001, webhooks, jobs.round)


@pytest.fixture
def bench(timed: EmbeddedServer, database: Database, delivery: Queue) -> Bench:
    return Bench(timed, database, delivery)


async def test_a_planned_job_gets_its_lane_filled(bench: Bench) -> None:
    """For as many workers as there are; once there are more, the next look fills it up."""
    await bench.workers(1)
    await bench.plan(9)

    assert await bench.janitor.attend() == 1
    assert await bench.depth() == 2
    await bench.workers(3)
    assert await bench.janitor.attend() == 0
    await bench.janitor.fill_lanes()

    assert await bench.depth() == 6
    assert await bench.state() == "running"


async def test_a_wide_job_gets_its_lane_filled_in_one_round(bench: Bench) -> None:
    """In bounded steps, as many as it takes."""
    await bench.plan(700, max_parallel=300)

    await bench.janitor.attend()

    assert await bench.depth() == 600


async def test_a_settled_job_is_finished_by_celery(bench: Bench) -> None:
    """Once; the notice is gone then."""
    await bench.plan(1)
    await bench.janitor.attend()
    [lease] = await bench.fetch()
    await bench.finish(lease)

    await bench.janitor.attend()
    await bench.janitor.fill_lanes()
    bench.server.advance(3600)
    await bench.janitor.attend()

    assert (await bench.state(), bench.sent) == ("finalizing", ["j1"])


async def test_a_job_is_finished_though_celery_is_away_for_long(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The notice stays, and comes again; other jobs go on meanwhile."""
    bench.trouble = True
    await bench.plan(0)
    for _ in range(3):
        with pytest.raises(BrokerUnavailable):
            await bench.janitor.attend()
        bench.server.advance(100.0)
    await bench.plan(1, "j2")
    with pytest.raises(BrokerUnavailable):
        await bench.janitor.attend()
    assert await bench.depth() == 1

    bench.trouble = False
    bench.server.advance(100.0)
    with caplog.at_level(logging.INFO):
        assert await bench.janitor.attend() == 1

    assert (await bench.state(), bench.sent) == ("finalizing", ["j1"])


async def test_the_parts_of_an_ended_job_are_listed_though_celery_is_away(bench: Bench) -> None:
    """By a gateway that was started only after the job's end, too."""
    bench.trouble = True
    await bench.plan(3)
    await bench.jobs.stop("j1", "cancelling")
    with pytest.raises(BrokerUnavailable):
        await bench.janitor.attend()
    assert (await bench.state(), await bench.jobs.models()) == ("cancelled", [])

    bench.trouble = False
    bench.server.advance(100.0)
    later = JobJanitor(bench.delivery, bench.catalog, bench.finalise)
    assert await later.attend() == 1

    assert bench.sent == ["j1"]


async def test_too_many_failed_rows_end_a_job(bench: Bench) -> None:
    """At once: what waits and what is in hand is taken back, and the record says why."""
    await bench.plan(9, max_errors=4, max_parallel=2)
    await bench.janitor.attend()
    first, second = await bench.fetch(2)
    await bench.finish(first, failed_rows=5)

    await bench.janitor.attend()

    record = await bench.jobs.get("j1")
    assert record is not None
    assert (record.state, record.in_lane, record.rows_failed) == ("failed", 0, 5)
    said = "the column error_message of the parts says why"
    assert record.error == f"5 rows failed; the job allows 4 (error_threshold); {said}"
    assert renew(bench.delivery, [second]) == [second]
    assert await bench.depth() == 0
    assert bench.sent == ["j1"]  # to list the parts that are there


async def test_a_cancelled_job_ends_when_nothing_is_in_hand(bench: Bench) -> None:
    """Not before: what its workers still finish counts."""
    await bench.plan(9)
    await bench.janitor.attend()
    [lease] = await bench.fetch()
    await bench.jobs.stop("j1", "cancelling")
    await bench.janitor.attend()
    assert await bench.state() == "cancelling"

    await bench.finish(lease)
    await bench.janitor.attend()

    record = await bench.jobs.get("j1")
    assert record is not None
    assert (record.state, record.rows_done) == ("cancelled", 10)
    assert bench.sent == ["j1"]  # to list the parts that are there


async def test_a_notice_of_a_job_that_is_gone_is_confirmed(bench: Bench) -> None:
    """It was deleted before anybody looked."""
    await bench.plan(3)
    await bench.plan(3, "j2")
    await bench.jobs.stop("j1", "cancelled")
    await bench.jobs.delete("j1")

    assert await bench.janitor.attend() == 2
    assert await bench.depth() == 2


async def test_several_janitors_do_no_harm(bench: Bench) -> None:
    """Each gateway has one."""
    others = [JobJanitor(bench.delivery, bench.catalog, bench.finalise) for _ in range(3)]
    for number in range(20):
        await bench.plan(number % 2, f"j{number}")

    await asyncio.gather(*(janitor.attend() for janitor in others))
    for lease in await bench.fetch(99):
        await bench.finish(lease)
    await asyncio.gather(*(janitor.attend() for janitor in others))

    assert {await bench.state(f"j{number}") for number in range(20)} == {"finalizing"}
    assert sorted(bench.sent) == sorted(f"j{number}" for number in range(20))


async def test_the_metrics_show_shards_apart_from_requests(bench: Bench) -> None:
    """In the same metric by lane, to scale workers by; they are no requests that Triton would call pending."""
    await bench.workers(1)
    await bench.plan(9, priority=3)
    await bench.janitor.attend()

    letters = DeadLetterCounts(bench.delivery.dead_letters)
    snapshot = await take_snapshot(bench.catalog, bench.store, bench.delivery, letters)

    [pending] = [family for family in snapshot.of_triton() if family.info is NV_PENDING]
    [backlog] = [family for family in snapshot.collect() if family.info is BACKLOG]
    shown = {dict(sample.labels)["lane"]: sample.value for sample in backlog.samples}
    assert shown == {"p1": 0, "bulk1": 0, "bulk2": 0, "bulk3": 2}
    assert [sample.value for sample in pending.samples] == [0]


async def test_rounds_go_on_while_celery_is_away(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once that it is, and once that it is not any more."""
    bench.trouble = True
    await bench.plan(0)
    with caplog.at_level(logging.INFO, "qinfer_api.requests.janitor"):
        running = asyncio.create_task(rounds(bench, bench.janitor).run())
        await eventually(lambda: "can't be looked after" in caplog.text)
        bench.trouble = False
        bench.server.advance(100.0)
        await eventually(lambda: "are looked after again" in caplog.text)
        bench.server.advance(100.0)
        await eventually(lambda: bench.sent == ["j1"])
        running.cancel()
        await asyncio.wait([running])

    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert set(said) == {"bulk jobs can't be looked after now"}


async def test_a_defect_ends_neither_the_janitor_nor_the_gateway(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the log with its traceback, and the others' jobs are looked after."""
    finalise, broken = bench.finalise, [True]

    def fail(job_id: str) -> None:
        if broken:
            raise RuntimeError("a defect")
        finalise(job_id)

    janitor = JobJanitor(bench.delivery, bench.catalog, fail)
    await bench.plan(0)
    running = asyncio.create_task(rounds(bench, janitor).run())
    await eventually(lambda: "RuntimeError: a defect" in caplog.text)
    broken.clear()
    bench.server.advance(100.0)

    await eventually(lambda: bench.sent == ["j1"])
    running.cancel()
    await asyncio.wait([running])
