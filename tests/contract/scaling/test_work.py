"""Sizes of lanes, rows of open jobs, and the work that they amount to, on each server; no worker lives."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.installation import ensure_lanes
from qinfer.models.state import DesiredState, OpenRows, Speed, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.stats import EXECUTION_NS, INFERENCE_COUNT, SUCCESS_COUNT
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import DELAYED, Lane, bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.scaling.work import read_work
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import submit
from tests.support.bulk_jobs import fetch, finish, planned, record, running

CONFIG = """
name: "digits" backend: "stub" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }
dynamic_batching { default_queue_policy { default_timeout_microseconds: 1000 timeout_action: DELAY } }
"""
FIRST, DELAYED_ONE, OTHER = Lane("digits", 1, "p1"), Lane("digits", 1, "p1" + DELAYED), Lane("other", 3, "p1")


@pytest.fixture
async def store(queue: RedisQueue) -> AsyncIterator[ControlStore]:
    opened = ControlStore(admin_client(queue.settings))
    yield opened
    await opened.close()


async def put(store: ControlStore, delivery: Queue, model: str, *versions: int, **fields: object) -> None:
    """Stores a model, and the wish for it, and makes its lanes; nobody loads it."""
    text = to_json(normalise(parse(CONFIG.replace("digits", model)), model, ["model.stub"]))
    stored = StoredModel(**{"model": model, "generation": 1, "config": text, "versions": versions} | fields)  # type: ignore[arg-type]  # by name
    await store.put_model(stored)
    await store.set_desired(DesiredState(model, 1))
    await ensure_lanes(stored, delivery)


async def test_sizes_are_of_what_waits_and_what_is_in_hand(queue: RedisQueue) -> None:
    """In the order asked for, of several models, whether a lane exists or not."""
    delivery = await queue.connect()
    await delivery.ensure([FIRST])
    entry, _ = await submit(delivery, FIRST, b"1", b"2")
    await submit(delivery, OTHER, b"3")
    await delivery.fetch([FIRST], "a", 1, 0.0)

    sizes = await delivery.sizes([OTHER, Lane("none", 1), FIRST, OTHER])

    assert [size.entries for size in sizes] == [1, 0, 2, 1]
    assert sizes[1].oldest_age_s == 0.0
    assert sizes[2].oldest_age_s == pytest.approx(max(delivery.clock.now_s() - entry.enqueued_s, 0.0), abs=1.0)
    assert await delivery.sizes([]) == []


async def test_an_entry_that_was_moved_is_as_old_as_it_was(queue: RedisQueue) -> None:
    """Its age is that since it was enqueued first."""
    delivery = await queue.connect()
    await delivery.ensure([FIRST, DELAYED_ONE])
    (entry,) = await submit(delivery, FIRST, b"1")
    await asyncio.sleep(0.05)  # the age that it must not lose
    leases = await delivery.fetch([FIRST], "a", 1, 0.0)
    await delivery.delay(leases, DELAYED_ONE.name)

    before, behind = await delivery.sizes([FIRST, DELAYED_ONE])

    assert (before.entries, before.oldest_age_s) == (0, 0.0)
    assert behind.entries == 1
    assert behind.oldest_age_s >= 0.04
    ((moved, _),) = await delivery.oldest(DELAYED_ONE, 0.0, 1)
    assert moved.enqueued_s == entry.enqueued_s


async def test_open_jobs_tell_the_rows_that_are_left(queue: RedisQueue) -> None:
    """Those that ended are left out; what is settled does not count any more."""
    delivery = await queue.connect()
    await running(delivery, 3)
    (lease,) = await fetch(delivery)
    assert await finish(delivery, lease, failed_rows=4)
    await planned(delivery, 2, "j2", version=2, partition=1)
    await Jobs(delivery).create(record("j3"))
    await Jobs(delivery).create(record("j4"))
    assert await Jobs(delivery).move("j4", {"validating"}, "failed", error="no")

    found = sorted(await Jobs(delivery).open_rows(), key=lambda job: (job.version, job.rows))

    assert [(job.model, job.version, job.partition, job.rows) for job in found] == [
        ("digits", 1, 0, 0),
        ("digits", 1, 0, 20),
        ("digits", 2, 1, 20),
    ]
    assert all(isinstance(job, OpenRows) for job in found)


async def test_some_statistics_of_several_versions(store: ControlStore) -> None:
    """Only the fields asked for, and only those that there are."""
    await store.add_stats("m", 1, {"a": 1, "b": 2, "c": 3})
    await store.add_stats("n", 2, {"b": 5})

    found = await store.some_stats([("m", 1), ("n", 2), ("none", 1)], ["b", "a"])

    assert found == {("m", 1): {"a": 1, "b": 2}, ("n", 2): {"b": 5}, ("none", 1): {}}
    assert await store.some_stats([], ["a"]) == {}


async def test_the_work_of_all_models_without_a_worker(queue: RedisQueue, store: ControlStore) -> None:
    """Of requests that wait and are in hand, of jobs; by the speed that was stored last."""
    delivery = await queue.connect()
    await put(store, delivery, "digits", 1, 2)
    await put(store, delivery, "other", 3)
    await store.add_stats("digits", 1, {SUCCESS_COUNT: 10, INFERENCE_COUNT: 20, EXECUTION_NS: 1})
    await store.put_speed("digits", 1, Speed(5.0, 3.0))
    await submit(delivery, FIRST, b"1", b"2", b"3")
    await delivery.fetch([FIRST], "gone", 2, 0.0)
    await planned(delivery, 3)

    one, two, other = await read_work(store, delivery, Jobs(delivery).open_rows)

    assert [(work.model, work.version) for work in (one, two, other)] == [("digits", 1), ("digits", 2), ("other", 3)]
    assert (one.requests, one.bulk_rows, one.rows, one.rows_per_s) == (3, 30, 36, 10.0)
    assert one.work_s == pytest.approx(3.6)
    assert [lane.lane for lane in one.lanes] == [FIRST, DELAYED_ONE, *bulk_lanes("digits", 1)]
    assert [lane.entries for lane in one.lanes] == [3, 0, 0, 0, 0]
    assert (two.rows, two.work_s, other.rows, other.work_s) == (0, 0.0, 0, 0.0)
    assert [lane.lane.name for lane in other.lanes] == ["p1", "p1" + DELAYED]  # it has no job
    assert (*(await read_work(store, delivery, Jobs(delivery).open_rows, model="digits")),)[1] == two
    assert await read_work(store, delivery, Jobs(delivery).open_rows, model="unknown") == ()


async def test_what_an_unloaded_model_has_left_is_told_who_asks_for_it(queue: RedisQueue, store: ControlStore) -> None:
    """It is none of the models that are to be served."""
    delivery = await queue.connect()
    await put(store, delivery, "digits", 1)
    await submit(delivery, FIRST, b"1")
    await store.set_desired(DesiredState("digits", 1, load=False))

    assert await read_work(store, delivery, Jobs(delivery).open_rows) == ()
    (left,) = await read_work(store, delivery, Jobs(delivery).open_rows, model="digits")
    assert left.requests == 1


async def test_models_that_cannot_be_loaded_do_no_harm(queue: RedisQueue, store: ControlStore) -> None:
    """One without a version, one with a configuration that nobody can read, one that is to be completed."""
    delivery = await queue.connect()
    await put(store, delivery, "bad", error="no version")
    await put(store, delivery, "digits", 1)
    await store.put_model(StoredModel("strange", 1, '{"name": 7}', (1,)))
    await store.set_desired(DesiredState("strange", 1))
    await store.put_model(StoredModel("early", 1, "", (1,), pending="python"))
    await store.set_desired(DesiredState("early", 1))
    await store.set_desired(DesiredState("lost", 1))

    found = {work.model: work for work in await read_work(store, delivery, Jobs(delivery).open_rows)}

    assert sorted(found) == ["digits", "early", "strange"]
    assert (found["early"].rows, found["strange"].lanes) == (1, ())


async def test_lanes_of_an_earlier_configuration_are_work_without_a_worker(
    queue: RedisQueue, store: ControlStore
) -> None:
    """The next worker reads them: there must be one for them."""
    delivery = await queue.connect()
    await put(store, delivery, "digits", 1)
    old = Lane("digits", 1, "p3")
    await delivery.ensure([old])
    await submit(delivery, old, b"1", b"2")

    (found,) = await read_work(store, delivery, Jobs(delivery).open_rows)
    assert (found.requests, [lane.lane for lane in found.lanes]) == (2, [old, FIRST, DELAYED_ONE])
    assert found.work_s > 0

    ready = {"digits": {1: VersionState(State.READY, 1)}}
    await store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=ready), 30.0)
    (found,) = await read_work(store, delivery, Jobs(delivery).open_rows)
    assert [lane.lane for lane in found.lanes] == [FIRST, DELAYED_ONE]  # the worker sees to the other itself


async def test_an_unloaded_model_waits_for_no_configuration(queue: RedisQueue, store: ControlStore) -> None:
    """No worker would complete it: none may be kept for it."""
    delivery = await queue.connect()
    await store.put_model(StoredModel("early", 1, "", (1,), pending="python"))
    await store.set_desired(DesiredState("early", 1))
    (loaded,) = await read_work(store, delivery, Jobs(delivery).open_rows, model="early")
    await store.set_desired(DesiredState("early", 1, load=False))
    (unloaded,) = await read_work(store, delivery, Jobs(delivery).open_rows, model="early")

    assert (loaded.rows, unloaded.rows, unloaded.work_s) == (1, 0, 0.0)
