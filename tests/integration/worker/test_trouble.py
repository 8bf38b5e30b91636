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
from tests.support.trouble import CRASH, HOLD_GIL, SLOW, executed, write_model
from tests.support.worker_processes import Workshop, resume, workshop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ITEMS = 64


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Workshop]:
    write_model(tmp_path / "repository", delay_us=200_000, hold_s=5.0)
    write_model(tmp_path / "repository", "other", hold_s=0.5)
    async with workshop(tmp_path) as one:
        yield one


def batches(directory: Path, model: str = "trouble") -> list[list[float]]:
    """Returns what a model executed, but for the warm-up runs."""
    return [values for values in executed(directory / f"{model}.trace") if values != [0.0]]


async def test_one_bad_entry_of_a_batch_becomes_a_dead_letter(shop: Workshop, tmp_path: Path) -> None:
    """The other 63 are answered, and so is all that another model of the same worker had in hand."""
    others = [shop.submit(SLOW, "other") for _ in range(3)]
    ids = [shop.submit(CRASH if i == ITEMS // 2 else float(i + 1)) for i in range(ITEMS)]
    supervisor = asyncio.create_task(shop.supervise())
    try:
        answers = await shop.answered(*ids, *others)
    finally:
        supervisor.cancel()

    failed = [answer for answer in answers if answer.failure]
    assert [answer.request_id for answer in failed] == [ids[ITEMS // 2]]
    assert failed[0].failure is not None
    assert failed[0].failure.message == "the request was given up: 3 executions did not end"
    assert len(batches(tmp_path)[0]) == ITEMS
    assert [batch for batch in batches(tmp_path) if CRASH in batch][1:] == [[CRASH]] * 2
    (listed,) = await shop.delivery.dead_letters.list("trouble")
    letter = await shop.delivery.dead_letters.show("trouble", listed.id)
    assert letter is not None
    assert letter.frame
    assert (letter.request_id, letter.code, letter.deliveries) == (ids[ITEMS // 2], "inference_failed", 4)
    assert letter.reason == failed[0].failure.message
    await shop.empty()
    await shop.empty("other")


async def test_a_batch_that_holds_the_gil_keeps_its_leases(shop: Workshop, tmp_path: Path) -> None:
    """Five times the lease with the interpreter stopped: no other worker runs it, what came with it neither."""
    first = await shop.worker()
    request = await shop.accept(HOLD_GIL)
    await shop.began(tmp_path / "trouble.trace")
    second = await shop.worker()
    waits = shop.submit(3.0)

    record = await shop.ended(request)

    assert (record.state, record.attempts) == (RequestState.SUCCEEDED, 1)
    assert [batch for batch in batches(tmp_path) if HOLD_GIL in batch] == [[HOLD_GIL]]
    assert (await shop.answered(waits))[0].attempt == 1
    assert first.poll() is second.poll() is None


@pytest.mark.chaos
async def test_a_batch_of_ten_leases_runs_once(tmp_path: Path) -> None:
    """With four workers that would take it, and the interpreter stopped all the while."""
    write_model(tmp_path / "repository", hold_s=10.0)
    async with workshop(tmp_path) as shop:
        await shop.worker()
        call = shop.submit(HOLD_GIL)
        await shop.began(tmp_path / "trouble.trace")
        await asyncio.gather(*[shop.worker() for _ in range(3)])

        (answer,) = await shop.answered(call)

        assert (answer.attempt, answer.failure) == (1, None)
        assert [batch for batch in batches(tmp_path) if HOLD_GIL in batch] == [[HOLD_GIL]]
        await shop.empty()


async def test_a_stopped_workers_entries_run_elsewhere_and_are_seen_once(shop: Workshop, tmp_path: Path) -> None:
    """A worker that goes on after a SIGSTOP discards what another did meanwhile."""
    first = await shop.worker(QINFER_WORKER__MODELS='["trouble", "other"]')
    call, request = shop.submit(SLOW, "other"), await shop.accept(SLOW)
    await shop.began(tmp_path / "trouble.trace")
    await shop.began(tmp_path / "other.trace")
    first.send_signal(signal.SIGSTOP)
    try:
        await shop.worker()
        (answer,) = await shop.answered(call)
        record = await shop.ended(request)
        result = await shop.delivery.requests.result(request)
    finally:
        resume(first)

    assert (answer.attempt, answer.failure) == (2, None)
    assert (record.state, record.attempts) == (RequestState.SUCCEEDED, 2)
    again = shop.submit(5.0)
    await shop.answered(again)
    await shop.empty()
    await shop.empty("other")
    first.terminate()  # it says no more than it has said when it is gone
    assert await asyncio.to_thread(first.wait, 30) == 0
    assert await shop.delivery.requests.record(request) == record
    assert await shop.delivery.requests.result(request) == result
    assert Counter(response.attempt for response in shop.responses[call]) == {2: 1}


async def test_a_dead_worker_renews_nothing(shop: Workshop, tmp_path: Path) -> None:
    """Its renewer ends with it, so that what it held runs elsewhere."""
    first = await shop.worker()
    call = shop.submit(SLOW, "other")
    await shop.began(tmp_path / "other.trace")
    first.kill()
    await shop.worker()

    (answer,) = await shop.answered(call)

    assert (answer.attempt, answer.failure) == (2, None)


async def test_drain_hands_over_what_did_not_begin(shop: Workshop, tmp_path: Path) -> None:
    """The batch in hand is ended; the rest, asynchronous requests too, runs in another worker meanwhile."""
    first = await shop.worker()
    in_hand = await shop.accept(SLOW)
    await shop.began(tmp_path / "trouble.trace")
    waiting = [await shop.accept(float(i)) for i in range(1, 4)]
    calls = [shop.submit(float(i)) for i in range(4, 8)]
    first.terminate()
    await shop.worker()

    answers = await shop.answered(*calls)
    records = [await shop.ended(address) for address in waiting]

    running = await shop.delivery.requests.record(in_hand)
    assert running is not None
    assert not running.state.is_terminal
    assert {answer.attempt for answer in answers} == {record.attempts for record in records} == {1}
    assert (await shop.ended(in_hand)).attempts == 1
    assert await asyncio.to_thread(first.wait, 30) == 0


async def test_a_renewer_that_ends_is_started_again(shop: Workshop, tmp_path: Path) -> None:
    """The worker keeps its leases."""
    first = await shop.worker()
    (renewer,) = psutil.Process(first.pid).children()
    renewer.kill()
    await eventually(lambda: [c for c in psutil.Process(first.pid).children() if c.pid != renewer.pid] != [], 10.0)
    call = await shop.accept(SLOW)
    await shop.began(tmp_path / "trouble.trace")
    await shop.worker()

    assert (await shop.ended(call)).attempts == 1
    assert await shop.delivery.depth([Lane("trouble", 1)]) == [0]
