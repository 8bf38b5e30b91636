"""Ten thousand open sequences over four workers, of which one ends and another comes: every sum is right.

What it takes is printed, and not judged: the machine decides.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from pathlib import Path

import pytest

from qinfer.queue import keys
from qinfer.queue.sequences.records import SequenceId, SubmittedStep
from qinfer.testing import eventually
from tests.support import models
from tests.support.sequence_caller import SequenceCaller, value
from tests.support.worker_processes import Process, WorkerProcesses, worker_processes

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

COUNT = 10_000
WORKERS = 4
WITHIN_S = 240.0
_TOGETHER = 256
_LEASES = {"QINFER_WORKER__LEASE_S": "10", "QINFER_WORKER__RENEW_EVERY_S": "3"}


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    idle = "max_sequence_idle_microseconds: 600000000"
    strategy = "oldest { max_candidate_sequences: 4000 }"
    models.accumulator(tmp_path / "repository", strategy=strategy, max_batch_size=64, more=idle)
    async with worker_processes(tmp_path) as one:
        yield one


class Rounds:
    """Sends a step of every sequence at once, and waits for all answers."""

    def __init__(self, pool: WorkerProcesses) -> None:
        self._pool = pool
        self._caller = SequenceCaller(pool, "accumulator", "INPUT")
        self.sequences = self._caller.sequences
        self.sums: dict[int, list[float]] = {n: [] for n in range(1, COUNT + 1)}

    async def submit(self, *, start: bool = False, end: bool = False) -> dict[int, str]:
        """Submits the next step of each; returns the request ids."""
        ids: dict[int, str] = {}
        left = iter(self.sums)
        while numbers := list(islice(left, _TOGETHER)):
            steps = [self._caller.step(n, n, start=start, end=end) for n in numbers]
            ids |= {n: request_id for n, (request_id, _) in zip(numbers, steps, strict=True)}
            of = [(SequenceId("", n), step) for n, (_, step) in zip(numbers, steps, strict=True)]
            outcomes = await self.sequences.submit_together(of)
            assert all(isinstance(outcome, SubmittedStep) for outcome in outcomes), outcomes
        return ids

    async def answered(self, ids: dict[int, str]) -> None:
        """Waits for the answers."""
        responses = self._pool.responses
        await eventually(lambda: all(i in responses for i in ids.values()), WITHIN_S, f"{len(ids)} answers")
        for n, request_id in ids.items():
            (response,) = responses[request_id]
            self.sums[n].append(value(response))

    async def owned(self, processes: Iterable[Process]) -> list[int]:
        """Returns how many sequences each worker owns."""
        router, owners = self._pool.delivery.router, keys.sequence_owners("accumulator", 0).encode()
        generation, counts = self._pool._generations["accumulator"], []
        names = [name.decode() for name in await router.call(keys.slot(owners), b"ZRANGE", owners, 0, -1)]
        for process in processes:
            (worker_id,) = [r.id for r in await self._pool.store.workers() if f"-{process.pid}-" in r.id]
            (owner,) = [name for name in names if name.startswith(f"{worker_id}-1-{generation}-")]
            key = keys.sequence_owned("accumulator", 0, owner).encode()
            counts.append(await router.call(keys.slot(key), b"SCARD", key))
        return counts


def resident_mib(process: Process) -> int:
    """Returns the memory of a process."""
    (line,) = [x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


async def test_ten_thousand_sequences_outlive_a_worker(
    pool: WorkerProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = await asyncio.gather(*[pool.worker(**_LEASES) for _ in range(WORKERS)])
    rounds, seconds = Rounds(pool), {}
    before = [resident_mib(each) for each in workers]

    for name, flags in (("first steps", {"start": True}), ("second steps", {})):
        begin_s = time.monotonic()
        await rounds.answered(await rounds.submit(**flags))
        seconds[name] = time.monotonic() - begin_s
    owned, after = await rounds.owned(workers), [resident_mib(each) for each in workers]
    sizes = await rounds.sequences.sizes([1])

    ends = workers[max(range(WORKERS), key=owned.__getitem__)]
    begin_s = time.monotonic()
    ends.send_signal(signal.SIGTERM)
    joins = asyncio.create_task(pool.worker(**_LEASES))
    ids = await rounds.submit(end=True)
    status = await asyncio.to_thread(ends.wait, WITHIN_S)
    seconds["drain"] = time.monotonic() - begin_s
    await rounds.answered(ids)
    seconds["last steps"] = time.monotonic() - begin_s
    await joins
    last = await rounds.sequences.sizes([1])

    wrong = {n: sums for n, sums in rounds.sums.items() if sums != [n, 2 * n, 3 * n]}
    assert (len(wrong), status) == (0, 0)
    assert (sizes.open, sizes.waiting, sizes.lost) == (COUNT, 0, 0)
    assert sum(owned) == COUNT
    assert (last.open, last.lost) == (0, 0)
    assert 0 < last.handed_over <= max(owned)
    with capsys.disabled():
        took = ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items())
        moved = f"owned {owned}, {last.handed_over} handed over"
        sys.stdout.write(f"\n{COUNT} sequences: {took}; {moved}; MiB before {before}, with sequences {after}\n")
