"""How much work waits: the calculation, without a queue."""

import msgspec
import pytest

from qinfer.jobs.queue.records import JobRecord, open_rows
from qinfer.models.state import OpenRows, Speed, State, VersionState, WorkerRecord
from qinfer.observe.stats import EXECUTION_NS, INFERENCE_COUNT, JOB_ROWS_SCORED, SUCCESS_COUNT
from qinfer.queue.entries import Lane, LaneSize
from qinfer.scaling.work import ASSUMED_ROW_S, VersionWork, WorkInputs, work_of

ONLINE, DELAYED, BULK = Lane("m", 1, "p1"), Lane("m", 1, "p1.delayed"), Lane("m", 1, "bulk2")
THREE_ROWS = {SUCCESS_COUNT: 100, INFERENCE_COUNT: 300, EXECUTION_NS: 6_000_000_000}


def seen(entries: int = 0, **fields: object) -> WorkInputs:
    size = LaneSize(entries, 2.5 if entries else 0.0)
    return msgspec.structs.replace(WorkInputs(lanes=((ONLINE, size),)), **fields)


def worker(name: str, rps: float = 0.0, state: State = State.READY) -> WorkerRecord:
    speeds = {"m": {1: rps}} if rps else {}
    return WorkerRecord(id=name, started_at=0.0, models={"m": {1: VersionState(state, 1)}}, speeds=speeds)


def job(rows: int, rows_per_s: float = 0.0) -> OpenRows:
    return OpenRows(model="m", version=1, rows=rows, rows_per_s=rows_per_s)


def work(given: WorkInputs, *workers: WorkerRecord) -> VersionWork:
    return work_of("m", 1, given, workers)


def test_nothing_is_no_work() -> None:
    """Whatever is known of the speed."""
    for given in (WorkInputs(), seen(), seen(counts=THREE_ROWS, speed=Speed(9.0))):
        found = work(given, worker("a", 5.0))
        assert (found.requests, found.rows, found.work_s, found.oldest_age_s) == (0, 0, 0.0, 0.0)


def test_requests_of_all_online_lanes_count_with_their_mean_rows() -> None:
    """Bulk shards are no requests, and their age is nobody's wait."""
    lanes = ((ONLINE, LaneSize(4, 1.0)), (DELAYED, LaneSize(1, 9.0)), (BULK, LaneSize(2, 100.0)))

    found = work(seen(lanes=lanes, counts=THREE_ROWS, jobs=(job(70),)))

    assert (found.requests, found.bulk_rows, found.rows) == (5, 70, 5 * 3 + 70)
    assert found.oldest_age_s == 9.0
    assert [(lane.lane, lane.entries, lane.oldest_age_s) for lane in found.lanes] == [
        (ONLINE, 4, 1.0),
        (DELAYED, 1, 9.0),
        (BULK, 2, 100.0),
    ]


def test_a_request_has_a_row_at_least() -> None:
    """Without statistics it is taken for one; a mean that is no whole number is rounded up, over all requests."""
    assert work(seen(7)).rows == 7
    assert work(seen(3, counts={SUCCESS_COUNT: 2, INFERENCE_COUNT: 3})).rows == 5  # 4.5
    assert work(seen(3, counts={SUCCESS_COUNT: 2, INFERENCE_COUNT: 1003, JOB_ROWS_SCORED: 1000})).rows == 5
    assert work(seen(3, counts={SUCCESS_COUNT: 10, INFERENCE_COUNT: 2})).rows == 3  # decoupled ones: counts may differ


def test_the_speed_is_what_one_live_worker_measured() -> None:
    """The mean of those that have it ready and measured something, times the rows of a request."""
    loading = worker("d", 1000.0, State.LOADING)

    found = work(
        seen(20, counts=THREE_ROWS, speed=Speed(1.0)), worker("b", 10.0), worker("a", 30.0), worker("c"), loading
    )

    assert found.rows_per_s == 20.0 * 3
    assert found.work_s == pytest.approx(60 / 60.0)
    assert found.workers == ("a", "b", "c")


def test_without_a_worker_the_stored_speed_counts() -> None:
    """As long as no live one has measured anything."""
    given = seen(20, counts=THREE_ROWS, speed=Speed(4.0, 12.0))

    assert work(given).rows_per_s == work(given, worker("new")).rows_per_s == 12.0
    assert work(given).work_s == pytest.approx(5.0)


def test_without_a_stored_speed_the_totals_tell() -> None:
    """Rows by the time that executing them took; requests or not."""
    found = work(seen(5, counts=THREE_ROWS))

    assert found.rows_per_s == pytest.approx(50.0)
    assert found.work_s == pytest.approx(15 / 50)


def test_without_any_request_so_far_the_jobs_tell() -> None:
    """What they settled, by all workers that are ready; at least one is reckoned with."""
    given = seen(jobs=(job(1000, 40.0), job(200, 10.0)))

    assert work(given).work_s == pytest.approx(1200 / 50)
    assert work(given, worker("a"), worker("b")).work_s == pytest.approx(1200 / 25)


def test_where_nothing_is_known_rows_count_all_the_same() -> None:
    """Else nobody would start the worker that finds out."""
    found = work(seen(30))

    assert found.rows_per_s == 0.0
    assert found.work_s == pytest.approx(30 * ASSUMED_ROW_S)
    assert found.work_s > 0


def test_a_shard_in_a_lane_is_work_though_its_job_has_no_rows() -> None:
    """A job that is cancelled ends when its shards have been taken back, from a worker that died too."""
    found = work(seen(lanes=((BULK, LaneSize(2, 5.0)),), jobs=(job(0),)))

    assert (found.requests, found.rows, found.bulk_rows) == (0, 2, 2)
    assert found.work_s > 0


def test_a_configuration_to_be_completed_is_work() -> None:
    """Only a worker can complete it: without one the model would never be ready."""
    assert work(seen(is_pending=True)).rows == 1
    assert work(seen(is_pending=True)).work_s > 0


@pytest.mark.parametrize(
    ("state", "rows"), [("validating", 0), ("planning", 60), ("running", 60), ("finalizing", 0), ("cancelling", 0)]
)
def test_the_rows_of_a_job_that_are_left(state: str, rows: int) -> None:
    """While it is planned again they are known; what is stopped or done has none."""
    record = JobRecord(
        id="j", model="m", version=2, partition=3, state=state, rows=100, rows_done=30, rows_failed=10, started_at=100.0
    )
    if state == "validating":
        record = msgspec.structs.replace(record, rows=0)

    found = open_rows(record, 120.0)

    assert (found.model, found.version, found.partition, found.rows) == ("m", 2, 3, rows)
    assert found.rows_per_s == pytest.approx(2.0)


def test_the_speed_of_a_job_is_that_since_it_was_resumed() -> None:
    """And unknown before it has run, or by a clock that was set back."""
    record = JobRecord(id="j", model="m", version=1, state="running", rows=100, rows_done=50, rows_before=40)

    resumed = msgspec.structs.replace(record, started_at=10.0, resumed_at=90.0)
    assert open_rows(resumed, 95.0).rows_per_s == pytest.approx(2.0)
    assert open_rows(resumed, 80.0).rows_per_s == open_rows(record, 80.0).rows_per_s == 0.0
