"""Pages of a large installation: 10,000 dead letters, 1,000 models, 500 jobs, 100 workers and 5,000 stored requests."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from qinfer.core.messages import InferRequest
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.job import JobSpec, JobState, Output, encode_spec
from qinfer.jobs.queue.jobs import MAX_LINE_CHARACTERS, MAX_LOG_LINES, Jobs
from qinfer.jobs.queue.records import JobAddress, JobRecord
from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.observe.host import MemoryUse
from qinfer.queue import keys
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_api.console.access import TOKEN_FIELD
from qinfer_api.requests.records import failed_outcome
from tests.e2e.console.metered_gateway import Meter
from tests.integration.console.test_console_pages import PAGES, token_of
from tests.support.gateway import Running, declare_more, running_gateway

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LETTERS, MODELS, JOBS, WORKERS, REQUESTS = 10_000, 1000, 500, 100, 5000
MOST_S, MOST_BYTES = 0.3, 300_000
LOADS = 5
AT_ONCE = 250
REASON = "ValueError: <b>'too'</b> many values & too few names, " * 77
"""A reason as long as a model's process lets it be."""

PLACES = (
    *PAGES, "models/m0500", "models?page=10", "models?q=m09", "models?state=UNAVAILABLE", "try/m0500", "queues?page=10",
    "letters?model=m0000", "letters?error=nothing+has+this", "letters?model=m0000&error=nothing+has+this",
    "letters/m0000/LETTER", "jobs/job-0", "jobs?state=failed", "requests?model=m0001", "requests?state=failed",
    "requests?error=nothing+has+this", "requests/r0?model=m0001", "workers?q=worker-9", "history?of=",
    "history?of=m0500:1", "operations/OPERATION",
)  # fmt: skip


async def fill(running: Running) -> None:
    names = [f"m{number:04}" for number in range(MODELS)]
    await declare_more(running, *names)
    await add_workers(running, names)
    await add_letters(running.delivery, names)
    await add_requests(running.delivery)
    await add_jobs(running.delivery)


async def add_workers(running: Running, names: list[str]) -> None:
    """Each worker has thirty models, one of which it could not load."""
    for number in range(WORKERS):
        own = [names[(number * 10 + step) % MODELS] for step in range(30)]
        models = {name: {1: VersionState(State.READY, 1)} for name in own}
        models[own[0]] = {1: VersionState(State.UNAVAILABLE, 1, REASON[:500])}
        uses: tuple[MemoryUse, ...] = (MemoryUse("CPU", 0, 10**8),)
        memory = {name: {1: uses} for name in own}
        record = WorkerRecord(
            id=f"worker-{number:03}", started_at=time.time(), models=models, host=f"host-{number}.example",
            memory=memory, memory_bytes=10**9, throughput_rps=12.5,
        )  # fmt: skip
        await running.store.heartbeat(record, ttl_s=3600)


async def add_letters(queue: Queue, names: list[str]) -> None:
    """Half of the dead letters are of the first model, the others of the next fifty."""
    for first in range(0, LETTERS, AT_ONCE):
        lane = Lane(names[0] if first < LETTERS / 2 else names[1 + first // AT_ONCE % 50], 1, "p32")
        await queue.ensure([lane])
        for number in range(first, first + AT_ONCE):
            request = InferRequest(model=lane.model, version=1, id=f"id-{number}", inputs=(), timeout_s=30.0)
            queue.submit(lane, encode_request(request), lambda _: None)
        left = AT_ONCE
        while left:
            leases = await queue.fetch([lane], "test", left, 5)
            buried = (queue.bury(lease, f"id-{first}", "inference_failed", REASON) for lease in leases)
            assert all(await asyncio.gather(*buried))
            left -= len(leases)


async def add_requests(queue: Queue) -> None:
    lane = Lane("m0001", 1)
    await queue.ensure([lane])
    for first in range(0, REQUESTS, AT_ONCE):
        addresses = [EntryAddress("m0001", 0, f"r{number}@") for number in range(first, first + AT_ONCE)]
        await queue.requests.accept_all([_acceptance(lane, address) for address in addresses])
        outcomes = (failed_outcome(each, RequestState.FAILED, BrokerUnavailable(REASON), 1) for each in addresses)
        settlements = [
            Settlement(address=address, outcome=outcome) for address, outcome in zip(addresses, outcomes, strict=True)
        ]
        await queue.requests.settle(settlements)


def _acceptance(lane: Lane, address: EntryAddress) -> Acceptance:
    frame = encode_request(InferRequest(model=lane.model, inputs=(), id=address.id, version=1))
    return Acceptance(address=address, lane=lane, frame=frame, timeout_s=3600.0, body_hash=address.id)


async def add_jobs(queue: Queue) -> None:
    """Every fifth job has failed; the oldest has many shards, failures and lines."""
    jobs, states = Jobs(queue), (JobState.FAILED, JobState.RUNNING, *(JobState.COMPLETED,) * 3)
    files = tuple(f"s3://bucket/{'folder/' * 10}rows-{number}.parquet" for number in range(200))
    spec = encode_spec(JobSpec("m0002", files, Output("s3://bucket/out"), version=1, metadata={"who": "a person"}))
    for number in range(JOBS):
        state = states[number % len(states)]
        record = JobRecord(
            id=f"job-{number}", model="m0002", version=1, state=state, spec=spec, rows=10**6, rows_done=10**5,
            shards=2000, shards_done=200, rows_failed=7, created_at=time.time() - number, started_at=time.time() - 60,
            ended_at=0.0 if state is JobState.RUNNING else time.time(),
            error=REASON[:MAX_LINE_CHARACTERS] if state is JobState.FAILED else "",
        )  # fmt: skip
        assert await jobs.create(record)
    outcomes = JobAddress("m0002", 0, "job-0").part("outcomes")
    words = [word for number in range(2000) for word in (number, f"500 1 1 {REASON[:500]}".encode())]
    await queue.router.call(keys.slot(outcomes), b"HSET", outcomes, *words)
    for _ in range(MAX_LOG_LINES):
        await jobs.note("job-0", REASON[:300])


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[Meter]:
    meter = Meter(tmp_path / "meter")
    with meter.on_console():
        yield meter


@pytest.fixture
async def client(meter: Meter) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway() as running:
        await fill(running)
        await running.refresh()
        asyncio.get_running_loop().set_task_factory(meter.make_task)
        base_url = f"{running.url}/console/"
        async with httpx.AsyncClient(base_url=base_url, follow_redirects=True, timeout=120) as client:
            await client.get("")
            yield client


async def places(client: httpx.AsyncClient) -> list[str]:
    """Returns the addresses of `PLACES`, with a dead letter and an ended operation."""
    page = await client.get("letters", params={"model": "m0000"})
    letter = re.search(r"letters/m0000/([0-9]+-[0-9]+)", page.text)
    assert letter is not None
    form = {TOKEN_FIELD: token_of(page.text), "do": "operate", "action": "replay"}
    operation = (await client.post("letters", params={"model": "m0000"}, data=form)).url.path.rpartition("/")[2]

    async def is_done() -> bool:
        return "Nothing is changed yet" in (await client.get(f"operations/{operation}")).text

    await eventually(is_done, 60.0, "the end of the dry run")
    return [place.replace("LETTER", letter[1]).replace("OPERATION", operation) for place in PLACES]


class Cost(NamedTuple):
    """The cost of a page: seconds of processor time of the console, seconds until it came, and bytes."""

    cpu_s: float
    took_s: float
    nbytes: int


async def cost_of(client: httpx.AsyncClient, meter: Meter, place: str) -> Cost:
    """Loads a page several times; other programs of the machine only add to the least of the times."""
    loads = []
    for _ in range(LOADS):
        began_s, before_s = time.perf_counter(), meter.sum_s
        reply = await client.get(place)
        loads.append(Cost(meter.sum_s - before_s, time.perf_counter() - began_s, len(reply.content)))
        assert reply.status_code == 200, (place, reply.text)
    cpu_s, took_s, nbytes = zip(*loads, strict=True)
    return Cost(min(cpu_s), min(took_s), max(nbytes))


def shown(costs: dict[str, Cost]) -> Iterator[str]:
    for place, cost in sorted(costs.items(), key=lambda each: -each[1].cpu_s):
        times = f"{cost.cpu_s * 1000:6.0f} ms of a core, {cost.took_s * 1000:6.0f} ms"
        yield f"{times} {cost.nbytes / 1000:6.0f} KB  {place}\n"


async def test_each_page_is_quick_and_small(
    client: httpx.AsyncClient, meter: Meter, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {place: await cost_of(client, meter, place) for place in await places(client)}

    with capsys.disabled():
        sys.stdout.write("\n" + "".join(shown(costs)))
    assert [place for place, cost in costs.items() if cost.cpu_s > MOST_S] == []
    assert [place for place, cost in costs.items() if cost.nbytes > MOST_BYTES] == []
    assert f"m0000 {LETTERS // 2000}\u2009000" in (await client.get("letters")).text
