"""What `qinfer status` reads."""

import asyncio
import re
from pathlib import Path

from rich.console import Console, RenderableType

from qinfer.cli.local.machine import RunFile, read_run, remove_run, write_run
from qinfer.cli.overview import ModelRow, SequencesRow, ShareRow, read_overview
from qinfer.cli.tables import models_tables, overview_tables, queues_tables
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord
from qinfer.models.readiness import Pin
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Entry, Lane
from qinfer.queue.lanes import Queue
from tests.support.sequences import SEVEN, STATEFUL, first, stored


async def put(store: ControlStore, model: str, *versions: int, error: str = "") -> None:
    stored = StoredModel(model=model, generation=1, config="{}", versions=versions, error=error)
    await store.put_model(stored)
    await store.set_desired(DesiredState(model, 1))


async def beat(
    store: ControlStore, delivery: Queue, states: dict[str, dict[int, VersionState]], age_s: float = 5.0
) -> None:
    record = WorkerRecord(id=f"w{age_s:g}", started_at=delivery.clock.now_s() - age_s, models=states)
    await store.heartbeat(record, ttl_s=60.0)


def text_of(tables: RenderableType) -> str:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(tables)
    return shown.get()


async def test_state_reason_and_depth_are_shown(store: ControlStore, delivery: Queue) -> None:
    """One row per version, one per lane, one per worker."""
    await put(store, "digits", 1, 2)
    await put(store, "bad", error="config.pbtxt line 3: unknown field")
    await beat(
        store,
        delivery,
        {"digits": {1: VersionState(State.READY, 1), 2: VersionState(State.UNAVAILABLE, 1, "no such file")}},
    )
    lane = Lane("digits", 1)
    await delivery.ensure([lane, Lane("digits", 2)])
    delivery.submit(lane, b"frame", lambda _entry: None)

    overview = await read_overview(store, delivery)

    assert overview.models == (
        ModelRow(name="bad", version=0, state=State.UNAVAILABLE, reason="config.pbtxt line 3: unknown field"),
        ModelRow(name="digits", version=1, state=State.READY),
        ModelRow(name="digits", version=2, state=State.UNAVAILABLE, reason="no such file"),
    )
    assert [(row.model, row.version, row.depth) for row in overview.lanes] == [("digits", 1, 1), ("digits", 2, 0)]
    assert [(row.ready, round(row.up_s)) for row in overview.workers] == [(("digits:1",), 5)]


async def test_pins_are_shown_with_what_they_keep(store: ControlStore, delivery: Queue) -> None:
    """And one that can't be kept, with the reason."""
    await put(store, "digits", 2)
    await beat(
        store,
        delivery,
        {"digits": {1: VersionState(State.UNAVAILABLE, 1, "no such file"), 2: VersionState(State.READY, 1)}},
    )
    for version in (1, 2):
        pin = Pin(model="digits", version=version, reason="job", holder="j1", expires_at=delivery.clock.now_s() + 60)
        await store.put_pin(pin, 60.0)

    first, second = (await read_overview(store, delivery)).models

    assert (first.version, first.state) == (1, State.UNAVAILABLE)
    assert first.reason == "version 1 of model 'digits' can't be kept: no such file"
    assert (second.version, second.state, [(one.reason, one.holder) for one in second.pins]) == (
        2,
        State.READY,
        [("job", "j1")],
    )


async def test_sequences_are_shown_of_stateful_models(store: ControlStore, delivery: Queue) -> None:
    """In `qinfer status` and `qinfer models list`; others have no row, and without any there is no table."""
    await put(store, "digits", 1)
    assert "handed over" not in text_of(overview_tables(await read_overview(store, delivery)))
    await store.put_model(stored(STATEFUL, 1))
    await store.set_desired(DesiredState("sum", 1))
    await delivery.sequences("sum", 0).submit(SEVEN, first(1))

    overview = await read_overview(store, delivery)

    assert overview.sequences == (SequencesRow(model="sum", open=1, waiting=1, handed_over=0, lost=0),)
    for tables in (overview_tables(overview), models_tables(overview)):
        assert re.search(r"handed over +lost *\n.*\n *sum +1 +1 +0 +0", text_of(tables))


async def test_bulk_lanes_are_shown_of_models_that_have_jobs(store: ControlStore, delivery: Queue) -> None:
    """Until the last has ended; a model without jobs has its online lanes only."""
    await put(store, "digits", 1)
    await put(store, "other", 1)
    await Jobs(delivery).create(JobRecord(id="j1", model="digits", version=1, state="planning", priority=1))
    await Jobs(delivery).add_shards("j1", [(0, b"a"), (1, b"b")], 2, complete=True)
    await Jobs(delivery).advance("j1")

    shown = (await read_overview(store, delivery)).lanes
    await Jobs(delivery).stop("j1", "cancelled")
    later = (await read_overview(store, delivery)).lanes

    rows = [(row.model, row.name, row.depth) for row in shown if row.name.startswith("bulk")]
    assert rows == [("digits", "bulk1", 2), ("digits", "bulk2", 0), ("digits", "bulk3", 0)]
    assert not any(row.name.startswith("bulk") for row in later)


async def test_version_nobody_reported_on_is_pending(store: ControlStore, delivery: Queue) -> None:
    """A worker that has just started says nothing about its models yet: `up` goes on waiting."""
    await put(store, "digits", 1)
    await delivery.ensure([Lane("digits", 1)])
    await beat(store, delivery, {})

    overview = await read_overview(store, delivery)

    assert [row.pending for row in overview.models] == [True]


async def test_failed_version_is_not_pending(store: ControlStore, delivery: Queue) -> None:
    """A model that can't be loaded must not hold `up` back."""
    await put(store, "digits", 1)
    await delivery.ensure([Lane("digits", 1)])
    await beat(store, delivery, {"digits": {1: VersionState(State.UNAVAILABLE, 1, "not an ONNX file")}})

    overview = await read_overview(store, delivery)

    assert [row.pending for row in overview.models] == [False]


async def test_older_workers_can_be_left_out(store: ControlStore, delivery: Queue) -> None:
    """After kill -9 the record of the dead worker lives for seconds: `up` must not take it for its own."""
    await put(store, "digits", 1)
    await delivery.ensure([Lane("digits", 1)])
    await beat(store, delivery, {"digits": {1: VersionState(State.READY, 1)}}, age_s=100.0)
    await beat(store, delivery, {"digits": {1: VersionState(State.LOADING, 1)}}, age_s=1.0)

    overview = await read_overview(store, delivery, max_up_s=10.0)

    assert [row.id for row in overview.workers] == ["w1"]
    assert [row.state for row in overview.models] == [State.LOADING]


def test_run_file_is_read_back(tmp_path: Path) -> None:
    """What `up` writes is what `status` finds; after `remove` there is nothing."""
    run = RunFile(pid=1, url="http://127.0.0.1:1", redis_url="unix:///x")

    write_run(tmp_path, run)

    assert read_run(tmp_path) == run
    remove_run(tmp_path)
    assert read_run(tmp_path) is None


def test_torn_run_file_counts_as_none(tmp_path: Path) -> None:
    """Whatever is in the directory, a command says what to do and does not crash."""
    (tmp_path / "up.json").write_text('{"pid": ')

    assert read_run(tmp_path) is None


async def test_shares_of_tenants_are_shown_where_a_lane_has_several(store: ControlStore, delivery: Queue) -> None:
    """With weight, part and depth, the fullest first; a lane of one tenant has no line."""
    await put(store, "digits", 1)
    await put(store, "other", 1)
    lane, alone = Lane("digits", 1), Lane("other", 1)
    await delivery.ensure([lane, alone])
    delivery.places.weigh = {"acme": 1, "globex": 3}.__getitem__
    for tenant, count in (("acme", 5), ("globex", 2)):
        for _ in range(count):
            await submitted(delivery, lane, tenant)
    await submitted(delivery, alone, "acme")

    overview = await read_overview(store, delivery)
    shown = text_of(queues_tables(overview.lanes, overview.work))

    shares = {row.model: row.shares for row in overview.lanes}
    assert shares["digits"] == (
        ShareRow(tenants=("acme",), weight=1, part=0.25, depth=5),
        ShareRow(tenants=("globex",), weight=3, part=0.75, depth=2),
    )
    assert [share.tenants for share in shares["other"]] == [("acme",)]
    table = shown.partition("Shares of tenants")[2]
    assert re.search(r"digits +1 +p1 +acme +1 +25% +5\b", table)
    assert re.search(r"digits +1 +p1 +globex +3 +75% +2\b", table)
    assert "other" not in table


async def submitted(delivery: Queue, lane: Lane, tenant: str) -> None:
    """Submits an entry of a tenant, and waits until it is in the queue."""
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    delivery.submit(lane, b"frame", future.set_result, tenant=tenant)
    assert isinstance(await future, Entry)
