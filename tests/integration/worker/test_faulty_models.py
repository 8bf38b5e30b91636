"""Worker processes that crash, hang or are stopped: nothing is lost, and nothing is visible twice."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from qinfer.queue.entries import Lane, RequestState
from qinfer.testing import eventually
from tests.support.faulty_backend import CRASH, HOLD_GIL, SLOW, executed, write_model
from tests.support.worker_processes import WorkerProcesses, resume, worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ITEMS = 64


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    write_model(tmp_path / "repository", delay_us=200_000, hold_s=5.0)
    write_model(tmp_path / "repository", "other", hold_s=0.5)
    async with worker_processes(tmp_path) as one:
        yield one


def batches(directory: Path, model: str = "faulty") -> list[list[float]]:
    """Returns what a model executed, but for the warm-up runs."""
    return [values for values in executed(directory / f"{model}.trace") if values != [0.0]]


async def test_one_bad_entry_of_a_batch_becomes_a_dead_letter(pool: WorkerProcesses, tmp_path: Path) -> None:
    """The other 63 are answered, and so is all that another model of the same worker had in hand."""
    others = [pool.submit(SLOW, "other") for _ in range(3)]
    ids = [pool.submit(CRASH if i == ITEMS // 2 else float(i + 1)) for i in range(ITEMS)]
    supervisor = asyncio.create_task(pool.supervise())
    try:
        answers = await pool.answered(*ids, *others)
    finally:
        supervisor.cancel()

    failed = [answer for answer in answers if answer.failure]
    assert [answer.request_id for answer in failed] == [ids[ITEMS // 2]]
    assert failed[0].failure is not None
    assert failed[0].failure.message == "the request was given up: 3 executions did not end"
    assert len(batches(tmp_path)[0]) == ITEMS
    assert [batch for batch in batches(tmp_path) if CRASH in batch][1:] == [[CRASH]] * 2
    (listed,) = await pool.delivery.dead_letters.list("faulty")
    letter = await pool.delivery.dead_letters.show("faulty", listed.id)
    assert letter is not None
    assert letter.frame
    assert (letter.request_id, letter.code, letter.deliveries) == (ids[ITEMS // 2], "inference_failed", 4)
    assert letter.reason == failed[0].failure.message
    await pool.empty()
    await pool.empty("other")


async def test_a_batch_that_holds_the_gil_keeps_its_leases(pool: WorkerProcesses, tmp_path: Path) -> None:
    """Five times the lease with the interpreter stopped: no other worker runs it, what came with it neither."""
    first = await pool.worker(QINFER_WORKER__LEASE_S="1")
    request = await pool.accept(HOLD_GIL)
    await pool.began(tmp_path / "faulty.trace")
    second = await pool.worker(QINFER_WORKER__LEASE_S="1")
    waits = pool.submit(3.0)

    record = await pool.ended(request)

    assert (record.state, record.attempts) == (RequestState.SUCCEEDED, 1)
    assert [batch for batch in batches(tmp_path) if HOLD_GIL in batch] == [[HOLD_GIL]]
    assert (await pool.answered(waits))[0].attempt == 1
    assert first.poll() is second.poll() is None


@pytest.mark.long
@pytest.mark.chaos
async def test_a_batch_of_ten_leases_runs_once(tmp_path: Path) -> None:
    """With four workers that would take it, and the interpreter stopped all the while."""
    write_model(tmp_path / "repository", hold_s=10.0)
    async with worker_processes(tmp_path) as pool:
        await pool.worker()
        call = pool.submit(HOLD_GIL)
        await pool.began(tmp_path / "faulty.trace")
        await asyncio.gather(*[pool.worker() for _ in range(3)])

        (answer,) = await pool.answered(call)

        assert (answer.attempt, answer.failure) == (1, None)
        assert [batch for batch in batches(tmp_path) if HOLD_GIL in batch] == [[HOLD_GIL]]
        await pool.empty()


async def test_a_stopped_workers_entries_run_elsewhere_and_are_seen_once(pool: WorkerProcesses, tmp_path: Path) -> None:
    """A worker that goes on after a SIGSTOP discards what another did meanwhile."""
    first = await pool.worker(QINFER_WORKER__MODELS='["faulty", "other"]')
    call, request = pool.submit(SLOW, "other"), await pool.accept(SLOW)
    await pool.began(tmp_path / "faulty.trace")
    await pool.began(tmp_path / "other.trace")
    first.send_signal(signal.SIGSTOP)
    try:
        await pool.worker()
        (answer,) = await pool.answered(call)
        record = await pool.ended(request)
        result = await pool.delivery.requests.result(request)
    finally:
        resume(first)

    assert (answer.attempt, answer.failure) == (2, None)
    assert (record.state, record.attempts) == (RequestState.SUCCEEDED, 2)
    again = pool.submit(5.0)
    await pool.answered(again)
    await pool.empty()
    await pool.empty("other")
    first.terminate()  # it says no more than it has said when it is gone
    assert await asyncio.to_thread(first.wait, 30) == 0
    assert await pool.delivery.requests.record(request) == record
    assert await pool.delivery.requests.result(request) == result
    assert Counter(response.attempt for response in pool.responses[call]) == {2: 1}


async def test_a_dead_worker_renews_nothing(pool: WorkerProcesses, tmp_path: Path) -> None:
    """Its renewer ends with it, so that what it held runs elsewhere."""
    first = await pool.worker()
    call = pool.submit(SLOW, "other")
    await pool.began(tmp_path / "other.trace")
    first.kill()
    await pool.worker()

    (answer,) = await pool.answered(call)

    assert (answer.attempt, answer.failure) == (2, None)


async def test_drain_hands_over_what_did_not_begin(tmp_path: Path) -> None:
    """The batch in hand is ended; the rest, asynchronous requests too, runs in another worker meanwhile."""
    write_model(tmp_path / "repository", delay_us=200_000, hold_s=25.0)
    async with worker_processes(tmp_path) as pool:
        first = await pool.worker()
        in_hand = await pool.accept(SLOW)
        await pool.began(tmp_path / "faulty.trace")
        waiting = [await pool.accept(float(i)) for i in range(1, 4)]
        calls = [pool.submit(float(i)) for i in range(4, 8)]
        first.terminate()
        await pool.worker()

        answers = await pool.answered(*calls)
        records = [await pool.ended(address) for address in waiting]

        running = await pool.delivery.requests.record(in_hand)
        assert running is not None
        assert not running.state.is_terminal
        (tmp_path / "faulty.go").touch()
        assert {answer.attempt for answer in answers} == {record.attempts for record in records} == {1}
        assert (await pool.ended(in_hand)).attempts == 1
        assert await asyncio.to_thread(first.wait, 30) == 0


async def test_a_renewer_that_ends_is_started_again(pool: WorkerProcesses, tmp_path: Path) -> None:
    """The worker keeps its leases."""
    first = await pool.worker()
    (renewer,) = psutil.Process(first.pid).children()
    renewer.kill()
    await eventually(lambda: [c for c in psutil.Process(first.pid).children() if c.pid != renewer.pid] != [], 40.0)
    call = await pool.accept(SLOW)
    await pool.began(tmp_path / "faulty.trace")
    await pool.worker()

    assert (await pool.ended(call)).attempts == 1
    assert await pool.delivery.depth([Lane("faulty", 1)]) == [0]
