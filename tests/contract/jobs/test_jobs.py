"""The promises of bulk jobs in the queue (`qinfer.jobs.queue.jobs` numbers them): records and shards."""

import asyncio

import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.queue.jobs import MAX_LOG_LINES, TOP_UP_COUNT, Jobs
from qinfer.jobs.queue.records import ShardOutcome, Standing
from qinfer.queue.entries import DELAYED, Lane
from tests.contract.conftest import RedisQueue
from tests.support.bulk_jobs import (
    LANES,
    counts,
    fetch,
    fine,
    finish,
    index_of,
    known,
    noticed,
    planned,
    record,
    running,
    shards,
    top_up,
)
from tests.support.leases import renew

# --- records (promises 1, 7) ---


async def test_a_record_is_read_as_it_was_created(queue: RedisQueue) -> None:
    """By any process; the creation is stamped, if it is not given."""
    delivery, other = await queue.connect(), await queue.connect()
    before_s = delivery.clock.now_s()
    given = record(
        tenant="t",
        priority=3,
        deadline_at=2e9 + 0.25,
        spec=b"\x00\xff",
        max_errors=5,
        kept_s=9.5,
        webhook="https://example.org/x",
    )

    assert await Jobs(delivery).create(given)

    found = await known(other)
    assert found.created_at == pytest.approx(before_s, abs=5.0)
    for name in set(given.__struct_fields__) - {"created_at", "updated_at"}:
        assert getattr(found, name) == getattr(given, name), name
    assert found.lane == LANES[2]


async def test_a_job_is_created_once(queue: RedisQueue) -> None:
    """Another one of its id, of this model or another, changes nothing; an unknown id is nobody's."""
    delivery = await queue.connect()
    assert await Jobs(delivery).create(record(tenant="first"))

    assert not await Jobs(delivery).create(record(tenant="second"))
    assert not await Jobs(delivery).create(record(tenant="third", model="other"))

    assert (await known(delivery)).tenant == "first"
    assert await Jobs(delivery).get("j2") is None
    assert not await Jobs(delivery).move("j2", {"validating"}, "planning")


async def test_a_state_changes_only_from_one_that_is_expected(queue: RedisQueue) -> None:
    """Of several that move a job at once one does; the fields go with it; each change raises the revision."""
    delivery = await queue.connect()
    await Jobs(delivery).create(record())
    first = await known(delivery)

    assert not await Jobs(delivery).move("j1", {"running", "planning"}, "failed", error="no")
    moved = await asyncio.gather(
        *(Jobs(delivery).move("j1", {"validating"}, "planning", rows=n, max_errors=-1) for n in (7, 7, 7))
    )

    assert sorted(moved) == [False, False, True]
    found = await known(delivery)
    assert (found.state, found.rows, found.error, found.max_errors, found.ended_at) == ("planning", 7, "", -1, 0.0)
    assert found.revision == first.revision + 1


async def test_only_fields_that_are_the_callers_can_be_set(queue: RedisQueue) -> None:
    """The counts are the queue's own."""
    delivery = await queue.connect()
    await Jobs(delivery).create(record())

    with pytest.raises(TypeError, match="rows_done"):
        await Jobs(delivery).move("j1", {"validating"}, "planning", rows_done=1)  # type: ignore[call-arg]
    assert (await known(delivery)).state == "validating"


async def test_jobs_are_listed_the_newest_first(queue: RedisQueue) -> None:
    """Page by page, also where many were created in the same moment; of a tenant, in a state."""
    delivery = await queue.connect()
    for number in range(5):
        await Jobs(delivery).create(record(f"j{number}", created_at=1000.0 + number, tenant="ab"[number % 2]))
    for name in ("k1", "k2", "k3"):
        await Jobs(delivery).create(record(name, created_at=999.0, state="planning", model="other"))

    seen: list[str] = []
    after = ""
    while True:
        page = await Jobs(delivery).list(after=after, count=3)
        seen += [found.id for found in page.records]
        after = page.after
        if not after:
            break

    assert seen == ["j4", "j3", "j2", "j1", "j0", "k3", "k2", "k1"]
    assert [found.id for found in (await Jobs(delivery).list(tenant="b")).records] == ["j3", "j1"]
    assert [found.id for found in (await Jobs(delivery).list(state="planning", count=2)).records] == ["k3", "k2"]
    assert [found.id for found in await Jobs(delivery).unfinished() if found.model == "other"] == ["k1", "k2", "k3"]
    assert set(await Jobs(delivery).models()) == {("digits", 0), ("other", 0)}
    with pytest.raises(InvalidRequest, match="nonsense"):
        await Jobs(delivery).list(after="nonsense")


async def test_a_job_past_its_deadline_is_overdue_until_it_ends(queue: RedisQueue) -> None:
    """Jobs with a later deadline, or none, are not."""
    delivery = await queue.connect()
    now_s = delivery.clock.now_s()
    for name, deadline_at in (("late", now_s - 1), ("later", now_s + 60), ("never", 0.0)):
        await Jobs(delivery).create(record(name, deadline_at=deadline_at))

    assert [found.id for found in await Jobs(delivery).overdue()] == ["late"]
    assert await Jobs(delivery).stop("late", "expired")
    assert await Jobs(delivery).overdue() == []


async def test_a_waiter_is_told_of_a_change(queue: RedisQueue) -> None:
    """At once if it happened before, else when it happens; after the timeout it sees the record as it was."""
    delivery = await queue.connect()
    await Jobs(delivery).create(record())
    seen = (await known(delivery)).revision

    waiting = asyncio.create_task(Jobs(delivery).wait_for_change("j1", seen, 30.0))
    await asyncio.sleep(0)
    await Jobs(delivery).move("j1", {"validating"}, "planning")

    changed = await waiting
    assert changed is not None
    assert (changed.state, changed.revision) == ("planning", seen + 1)
    assert await Jobs(delivery).wait_for_change("j1", seen, 30.0) == changed
    assert await Jobs(delivery).wait_for_change("j1", changed.revision, 0.01) == changed
    assert await Jobs(delivery).wait_for_change("j2", 0, 30.0) is None


async def test_a_log_keeps_the_latest_lines(queue: RedisQueue) -> None:
    """Any text is a line; an unknown job has no log."""
    delivery = await queue.connect()
    await Jobs(delivery).create(record())

    await Jobs(delivery).note("j2", "lost")
    for number in range(MAX_LOG_LINES + 5):
        await Jobs(delivery).note("j1", f"line {number} é")

    lines = await Jobs(delivery).log("j1")
    assert [line.text for line in lines] == [f"line {number} é" for number in range(5, MAX_LOG_LINES + 5)]
    assert lines[0].at == pytest.approx(delivery.clock.now_s(), abs=30.0)
    assert list(await Jobs(delivery).log("j2")) == []


# --- planning (promise 2) ---


async def test_a_plan_may_be_put_again_and_again(queue: RedisQueue) -> None:
    """In parts, by two planners; each shard is there once, and the last part lets the job run."""
    delivery = await queue.connect()
    await Jobs(delivery).create(record(state="planning"))

    for part in (shards(0, 1), shards(2, 3), shards(0, 1), shards(2, 3)):
        assert await Jobs(delivery).add_shards("j1", part)
    assert (await known(delivery)).state == "planning"
    assert await Jobs(delivery).add_shards("j1", shards(4), 50, complete=True)
    assert not await Jobs(delivery).add_shards("j1", shards(5), 60, complete=True)

    found = await known(delivery)
    assert (found.state, found.shards, found.rows, found.in_lane) == ("running", 5, 50, 0)
    assert found.started_at >= found.created_at
    assert await noticed(delivery) == ["j1"]
    assert await Jobs(delivery).advance("j1", workers=9) == Standing("running", 4, 1, 4, has_failed=False)
    assert [index_of(lease) for lease in await fetch(delivery, 9)] == [0, 1, 2, 3]


async def test_a_plan_without_shards_is_settled(queue: RedisQueue) -> None:
    """An input without a row: there is nothing to run, and somebody is told."""
    delivery = await queue.connect()
    await planned(delivery, 0)

    assert await noticed(delivery) == ["j1"]
    standing = await Jobs(delivery).advance("j1")
    assert standing == Standing("running", 0, 0, 0, has_failed=False)
    assert standing.is_settled


async def test_a_job_that_is_not_being_planned_takes_no_shards(queue: RedisQueue) -> None:
    """Neither one that was cancelled meanwhile, nor an unknown one."""
    delivery = await queue.connect()
    await Jobs(delivery).create(record(state="planning"))
    await Jobs(delivery).stop("j1", "cancelled")

    assert not await Jobs(delivery).add_shards("j1", shards(0), 10, complete=True)
    assert not await Jobs(delivery).add_shards("j2", shards(0), 10, complete=True)
    assert (await known(delivery)).shards == 0


# --- progress within shards ---


async def test_rows_that_are_scored_count_until_their_shard_ends(queue: RedisQueue) -> None:
    """Each report replaces the one before, and is a change where it says something new."""
    delivery = await queue.connect()
    await running(delivery, 4)
    first, second = await fetch(delivery, 2)
    before = (await known(delivery)).revision

    for lease, rows in ((first, 3), (second, 4), (first, 7), (second, 4)):
        assert await Jobs(delivery).report("j1", lease, index_of(lease), rows)
    assert (await known(delivery)).rows_scored == 11
    assert (await known(delivery)).revision == before + 3

    await finish(delivery, first)
    assert ((await known(delivery)).rows_scored, (await known(delivery)).rows_done) == (4, 10)
    assert await Jobs(delivery).report("j1", second, 1, 0)
    assert (await known(delivery)).rows_scored == 0


async def test_the_reason_of_a_shard_that_is_put_off_is_known_until_it_goes_on(queue: RedisQueue) -> None:
    """The log says each reason once, however often it puts shards off."""
    delivery = await queue.connect()
    await running(delivery, 4)
    first, second = await fetch(delivery, 2)

    reports = ((first, 10, "full"), (second, 0, "full"), (first, 0, ""), (first, 5, ""), (first, 0, "full"))
    for lease, rows, reason in reports:
        assert await Jobs(delivery).report("j1", lease, index_of(lease), rows, reason)
        assert (await known(delivery)).put_off == "full"
    assert [line.text for line in await Jobs(delivery).log("j1")] == ["a shard waits: full"]

    assert await Jobs(delivery).report("j1", first, index_of(first), 7)
    await finish(delivery, second)
    assert (await known(delivery)).put_off == ""


async def test_only_who_has_a_shard_reports_it(queue: RedisQueue) -> None:
    """Not a worker that lost it to another, nor one whose shard was taken back."""
    delivery = await queue.connect()
    await running(delivery, 4)
    first, second, third = await fetch(delivery, 3)
    for lease in (first, second, third):
        await Jobs(delivery).report("j1", lease, index_of(lease), 5)

    await Jobs(delivery).requeue("j1", shards(0))
    await Jobs(delivery).drop_shard("j1", second, 1)
    assert (await known(delivery)).rows_scored == 5
    for lease in (first, second):
        assert await Jobs(delivery).report("j1", lease, index_of(lease), 9)
    assert (await known(delivery)).rows_scored == 5

    await Jobs(delivery).stop("j1", "cancelled", in_hand=True)
    assert not await Jobs(delivery).report("j1", third, 2, 9)
    assert (await known(delivery)).rows_scored == 0


# --- lanes (promise 3) ---


@pytest.mark.parametrize(("max_parallel", "workers", "in_lane"), [(3, 1, 6), (0, 2, 4), (0, 0, 2)])
async def test_twice_as_many_shards_as_may_run_are_in_the_lane(
    queue: RedisQueue, max_parallel: int, workers: int, in_lane: int
) -> None:
    """By the job's own word, else by the number of workers; to fill it again changes nothing."""
    delivery = await queue.connect()
    await planned(delivery, 10, max_parallel=max_parallel)

    assert await top_up(Jobs(delivery), "digits", workers=workers) == in_lane
    assert await top_up(Jobs(delivery), "digits", workers=workers) == 0

    assert await delivery.depth(LANES) == [0, in_lane, 0]
    assert (await known(delivery)).in_lane == in_lane


async def test_a_step_is_bounded(queue: RedisQueue) -> None:
    """However many may run."""
    delivery = await queue.connect()
    await planned(delivery, TOP_UP_COUNT + 5, max_parallel=10_000)

    assert await top_up(Jobs(delivery), "digits") == TOP_UP_COUNT
    assert await top_up(Jobs(delivery), "digits") == 5


async def test_shards_of_a_higher_priority_are_read_first(queue: RedisQueue) -> None:
    """Though they came later; of one priority, those of the older job."""
    delivery = await queue.connect()
    for name, priority in (("low", 3), ("old", 2), ("new", 2), ("high", 1)):
        await planned(delivery, 3, name, priority=priority)
        await top_up(Jobs(delivery), "digits")

    frames = [lease.frame.partition(b":")[0].decode() for lease in await fetch(delivery, 12)]

    assert frames == ["high"] * 3 + ["old"] * 3 + ["new"] * 3 + ["low"] * 3


async def test_a_shard_that_ends_makes_room_for_the_next(queue: RedisQueue) -> None:
    """In the same step: nobody has to look at the job until nothing is left."""
    delivery = await queue.connect()
    await running(delivery, 7)
    order: list[int] = []

    while leases := await fetch(delivery):
        assert sum(await delivery.depth(LANES)) <= 4
        order.append(index_of(leases[0]))
        assert await finish(delivery, leases[0])

    assert order == list(range(7))
    assert await counts(delivery) == (70, 0, 7, 0)
    assert await noticed(delivery) == ["j1"]


async def test_shards_are_leased_as_all_entries_are(queue: RedisQueue) -> None:
    """Renewed, released with the count unchanged, reclaimed as suspects; a reader of online lanes sees none."""
    delivery = await queue.connect()
    await running(delivery, 2)
    online = (Lane("digits", 1, "p1"), Lane("digits", 1, "p1" + DELAYED))
    await delivery.ensure(online)
    assert await fetch(delivery, 5, lanes=online) == []

    [lease] = await fetch(delivery)
    assert renew(delivery, [lease]) == []
    await delivery.release([lease])
    [again] = await fetch(delivery, consumer="b")
    assert (again.frame, again.deliveries) == (lease.frame, 1)
    [suspect] = await delivery.reclaim(LANES, "c", 0.0, 5)
    assert (suspect.frame, suspect.deliveries, suspect.suspect) == (lease.frame, 2, True)
    assert renew(delivery, [again]) == [again]
    assert await delivery.depth(LANES) == [0, 2, 0]


async def test_online_and_bulk_lanes_are_read_at_the_same_time(queue: RedisQueue) -> None:
    """By one process: a reader that waits for the ones holds up no reader of the others."""
    delivery = await queue.connect()
    online = (Lane("digits", 1, "p1"),)
    await delivery.ensure([*online, *LANES])
    waiting = asyncio.create_task(delivery.fetch(online, "a", 1, 20.0))
    await asyncio.sleep(0)

    await running(delivery, 1)
    [lease] = await delivery.fetch(LANES, "a", 1, 20.0)
    assert not waiting.done()
    assert await finish(delivery, lease)
    delivery.submit(online[0], b"online", lambda _: None)

    assert [found.frame for found in await waiting] == [b"online"]


# --- the end of a shard (promises 4, 5) ---


async def test_a_shard_ends_once(queue: RedisQueue) -> None:
    """Whoever else finishes it, at once or later, counts nothing; its entry is gone."""
    delivery, other = await queue.connect(), await queue.connect()
    await running(delivery, 2)
    [lease] = await fetch(delivery)
    [stolen] = await other.reclaim(LANES, "b", 0.0, 1)

    ended = await asyncio.gather(finish(delivery, lease, failed_rows=3), finish(other, stolen, failed_rows=3))

    assert sorted(ended) == [False, True]
    assert not await Jobs(delivery).finish_shard("j1", lease, ShardOutcome(0, 10, 10, "too late"))
    assert await counts(delivery) == (7, 3, 1, 0)
    assert await Jobs(delivery).outcomes("j1") == {0: fine(lease, 3)}
    assert await delivery.depth(LANES) == [0, 1, 0]
    assert renew(delivery, [stolen]) == [stolen]


async def test_an_outcome_of_a_shard_that_was_given_up_is_kept(queue: RedisQueue) -> None:
    """With its error, which is in the log, too."""
    delivery = await queue.connect()
    await running(delivery, 1)
    [lease] = await fetch(delivery)
    outcome = ShardOutcome(0, 10, 10, "the input has changed:\nétag 1 2 3")

    assert await Jobs(delivery).finish_shard("j1", lease, outcome)

    assert await Jobs(delivery).outcomes("j1") == {0: outcome}
    assert await counts(delivery) == (0, 10, 0, 1)
    assert [line.text for line in await Jobs(delivery).log("j1")] == [f"shard 0 was given up: {outcome.error}"]


async def test_outcomes_of_many_shards_are_all_there(queue: RedisQueue) -> None:
    """More than are read at once."""
    delivery = await queue.connect()
    await running(delivery, 150, max_parallel=100)
    while leases := await fetch(delivery, 100):
        await asyncio.gather(*(finish(delivery, lease) for lease in leases))

    assert await Jobs(delivery).outcomes("j1") == {index: ShardOutcome(index, 10) for index in range(150)}
    assert (await known(delivery)).in_lane == 0
    assert await Jobs(delivery).outcomes("j2") == {}


async def test_too_many_failed_rows_leave_a_notice_and_no_shard_more(queue: RedisQueue) -> None:
    """As many as are allowed are none too many."""
    delivery = await queue.connect()
    await running(delivery, 9, max_errors=5)
    leases = await fetch(delivery, 3)

    await finish(delivery, leases[0], failed_rows=5)
    assert await noticed(delivery) == []
    await finish(delivery, leases[1], failed_rows=1)
    await finish(delivery, leases[2], failed_rows=1)

    assert await noticed(delivery) == ["j1"]
    assert await Jobs(delivery).advance("j1") == Standing("running", 0, 4, 2, has_failed=True)


async def test_a_shard_that_is_given_up_is_buried_in_the_same_step(queue: RedisQueue) -> None:
    """With its frame; not by one that does not own it any more."""
    delivery = await queue.connect()
    await running(delivery, 2)
    [lease] = await fetch(delivery)
    [mine] = await delivery.reclaim(LANES, "b", 0.0, 1)
    outcome = ShardOutcome(0, 10, 10, "its worker died twice")

    assert not await Jobs(delivery).bury_shard("j1", lease, outcome, "inference_failed")
    assert await counts(delivery) == (0, 0, 0, 0)
    assert await Jobs(delivery).bury_shard("j1", mine, outcome, "inference_failed")
    assert not await Jobs(delivery).bury_shard("j1", mine, outcome, "inference_failed")

    assert await counts(delivery) == (0, 10, 0, 1)
    [letter] = await delivery.dead_letters.list("digits")
    assert (letter.request_id, letter.code, letter.reason) == ("j1", "inference_failed", outcome.error)
    assert (letter.lane, letter.deliveries) == (LANES[1], 2)
    shown = await delivery.dead_letters.show("digits", letter.id)
    assert shown is not None
    assert (shown.frame, shown.payload) == (b"j1:0", b"")
    assert await delivery.depth(LANES) == [0, 1, 0]


async def test_a_replayed_shard_counts_nothing(queue: RedisQueue) -> None:
    """A dead letter may be put back; the outcome of its shard stays what it was."""
    delivery = await queue.connect()
    await running(delivery, 1)
    [lease] = await fetch(delivery)
    await Jobs(delivery).bury_shard("j1", lease, ShardOutcome(0, 10, 10, "no"), "inference_failed")
    [letter] = await delivery.dead_letters.list("digits")

    assert await delivery.dead_letters.replay("digits", letter.id)
    [again] = await fetch(delivery)
    assert not await finish(delivery, again)

    assert await counts(delivery) == (0, 10, 0, 1)
    assert await delivery.depth(LANES) == [0, 0, 0]


async def test_a_job_is_to_be_looked_at_once(queue: RedisQueue) -> None:
    """While nobody has looked at it; then again."""
    delivery = await queue.connect()
    await planned(delivery, 1)
    assert not await Jobs(delivery).add_shards("j1", [], complete=True)
    await Jobs(delivery).advance("j1")
    [lease] = await fetch(delivery)
    await finish(delivery, lease)

    assert await noticed(delivery) == ["j1", "j1"]
    assert await noticed(delivery) == []
