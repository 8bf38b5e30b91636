"""The list of what is there after a job ended early: after each end anew, whoever makes it, and however often."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import StoreDenied, StoreUnavailable
from qinfer.jobs.job import JobState
from qinfer.jobs.plan import Manifest, decode_manifest
from qinfer_workers.jobs.documents import write_partial
from qinfer_workers.jobs.steps import Finaliser
from tests.support.jobs.bulk_bench import Bench, bench, record_of, spec, write_inputs
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")  # the databases are on it


LIST = "_manifest.partial.json"


async def running(database: Database, directory: Path) -> Bench:
    """Returns a bench whose job of three shards runs."""
    write_inputs(directory / "in", [20, 5])
    one = await bench(database, directory)
    await one.jobs.create(record_of(spec(directory)))
    await one.planner().run("job")
    return one


async def end_early(one: Bench, state: JobState = JobState.CANCELLED) -> None:
    """Commits a part more, and ends the job."""
    (lease, shard), *_ = await one.fetch()
    one.commit(shard)
    await one.finish(lease, shard)
    await one.jobs.stop("job", state, in_hand=True)


async def resume(one: Bench) -> None:
    one.clock.advance(10)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)
    await one.planner().run("job")


def partial_of(directory: Path) -> Manifest:
    """Returns the list."""
    return decode_manifest((directory / "out" / LIST).read_bytes())


async def test_the_list_says_which_end_it_is_of(database: Database, tmp_path: Path) -> None:
    """A resumed job that ends early again has another; until it is made, it shows that there is an earlier one's."""
    one = await running(database, tmp_path)
    await end_early(one)
    await one.finaliser().run("job")
    first = (await one.record()).ended_at
    await resume(one)
    await end_early(one, JobState.EXPIRED)
    second = (await one.record()).ended_at
    before = partial_of(tmp_path)

    await one.finaliser().run("job")

    after = partial_of(tmp_path)
    assert second > first
    assert (before.ended_at, before.rows) == (first, 10)
    assert (after.ended_at, after.rows) == (second, 20)


async def test_a_slow_finaliser_does_not_leave_the_list_of_an_earlier_end(database: Database, tmp_path: Path) -> None:
    """It looked at the parts, the job was resumed and ended again, another made the list, and then it made its own."""
    one = await running(database, tmp_path)
    await end_early(one)
    slow = one.other_services()
    in_thread = slow.in_thread

    async def late(function: Callable[..., Any], *arguments: object) -> Any:
        if function is write_partial:
            slow.in_thread = in_thread  # type: ignore[method-assign]
            await resume(one)
            await end_early(one)
            await one.finaliser().run("job")
        return await in_thread(function, *arguments)

    slow.in_thread = late  # type: ignore[method-assign]

    await Finaliser(slow).run("job")

    assert partial_of(tmp_path).ended_at == (await one.record()).ended_at
    assert partial_of(tmp_path).rows == 20


async def test_a_finaliser_that_was_killed_before_the_list_was_whole_makes_it_again(
    database: Database, tmp_path: Path
) -> None:
    """The earlier list is gone by then, and the task comes again."""
    one = await running(database, tmp_path)
    await end_early(one)
    await one.finaliser().run("job")
    await resume(one)
    await end_early(one)
    one.objects.before[LIST] = StoreUnavailable("killed")
    with pytest.raises(StoreUnavailable):
        await one.finaliser().run("job")
    assert not (tmp_path / "out" / LIST).exists()

    await one.finaliser().run("job")

    assert partial_of(tmp_path).rows == 20


async def test_a_job_that_fails_when_it_is_resumed_lists_what_is_there(database: Database, tmp_path: Path) -> None:
    """Nobody has it finished: planning itself has to, for the list is else that of the earlier end."""
    one = await running(database, tmp_path)
    await end_early(one)
    await one.finaliser().run("job")
    write_inputs(tmp_path / "in", [21])

    await resume(one)

    record = await one.record()
    assert record.state == JobState.FAILED
    assert (partial_of(tmp_path).ended_at, partial_of(tmp_path).rows) == (record.ended_at, 10)


async def test_a_list_that_can_not_be_made_is_given_up(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job has ended in any case; trying again would change nothing."""
    one = await running(database, tmp_path)
    await end_early(one)
    one.objects.before[LIST] = StoreDenied("not allowed")

    await one.finaliser().run("job")

    assert "partial manifest not written" in caplog.text
    assert (await one.record()).state == JobState.CANCELLED


@pytest.mark.parametrize(("deaths", "is_listed"), [(4, True), (5, False)])
async def test_a_part_that_kills_its_reader_ends_the_list_only(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, deaths: int, *, is_listed: bool
) -> None:
    """The process dies some times, or over and over."""
    one = await running(database, tmp_path)
    await end_early(one)
    one.examiners.deaths = deaths

    await one.finaliser().run("job")

    assert (tmp_path / "out" / LIST).exists() == is_listed
    assert ("partial manifest not written" in caplog.text) != is_listed


async def test_a_job_that_was_never_planned_has_no_list(database: Database, tmp_path: Path) -> None:
    """Its store may be what it failed of, and is not asked."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.jobs.stop("job", JobState.CANCELLED)

    def refuse(*_: object) -> Any:
        raise AssertionError("the store is asked")

    one.services.in_thread = refuse  # type: ignore[method-assign,assignment]

    await one.finaliser().run("job")
    await one.planner().run("job")

    assert not (tmp_path / "out").exists()
