"""Many stored requests are searched, replayed and cancelled by a filter while gateways are killed: counts are exact.

`CHAOS_REQUESTS` is their number: 5,000, and 100,000 before a release. The output has times and the greatest memory.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Unpack

import psutil
import pytest
from pydantic import SecretStr

from qinfer.client import AsyncClient, RequestStatus
from qinfer.client.request_flows import RequestFilters
from qinfer.core.messages import InferRequest
from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable
from qinfer.queue import keys
from qinfer.queue.dead_letters import head_of
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, Lease, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.queue.operations import Operations
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_api.requests.records import failed_outcome
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.member import Role
from tests.chaos.repository import write_stub

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "5000"))
MODEL, REASONS = "company", ("out of memory", "no such file")
AT_ONCE = 256
SHARES = (0.05, 0.35, 0.7)
"""All gateways are killed when an operation has read these shares of its requests."""

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(300 + REQUESTS / 20)]


async def bury_all(queue: Queue, lane: Lane) -> set[str]:
    """Stores requests and makes each a dead letter, the odd ones for another reason; returns the ids of the even ones.

    They fill the queue before any gateway looks, so that it needs neither a worker nor the time of executions.
    """
    chosen = set[str]()
    await queue.ensure([lane])
    for first in range(0, REQUESTS, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, REQUESTS))
        await queue.requests.accept_all([_acceptance(lane, f"r{number}@") for number in numbers])
        while leases := await queue.fetch([lane], "burier", AT_ONCE, 0.0):
            chosen |= await _bury(queue, leases)
    return chosen


async def _bury(queue: Queue, leases: list[Lease]) -> set[str]:
    chosen, buried, settlements = set[str](), [], []
    for lease in leases:
        request = head_of(lease.frame)
        assert request is not None
        reason = REASONS[int(request.id[1:-1]) % 2]
        buried.append(queue.bury(lease, request.id, "inference_failed", reason))
        address = EntryAddress(MODEL, 0, request.id)
        outcome = failed_outcome(address, RequestState.FAILED, BrokerUnavailable(reason))
        settlements.append(Settlement(address=address, outcome=outcome))
        chosen |= {request.id[:-1]} if reason == REASONS[0] else set()
    assert all(await asyncio.gather(*buried))
    await queue.requests.settle(settlements)
    return chosen


def _acceptance(lane: Lane, request_id: str) -> Acceptance:
    frame = encode_request(InferRequest(model=MODEL, inputs=(), id=request_id, version=1))
    address = EntryAddress(MODEL, 0, request_id)
    return Acceptance(address=address, lane=lane, frame=frame, timeout_s=86400.0, body_hash=request_id)


class Killer:
    """Kills gateways at moments of the work: one while a list is read, all of them while operations run.

    It notes the greatest memory of each kind of process meanwhile.
    """

    def __init__(self, cluster: Cluster, queue: Queue) -> None:
        self._cluster = cluster
        self._operations = Operations(queue.router)
        self._left: dict[str, list[float]] = {}
        self.kills = 0
        self.peak_mib: dict[str, float] = {}

    async def kill_one(self) -> None:
        """Kills a gateway that has begun to work."""
        (await self._cluster.running(Role.GATEWAY, random.randrange(100))).kill()
        self.kills += 1

    @contextlib.asynccontextmanager
    async def at_work(self, operations: int = 1) -> AsyncIterator[None]:
        """Kills all gateways at each of `SHARES` of the operations during the block, when so many have begun."""
        async with asyncio.TaskGroup() as group:
            follows = group.create_task(self._follow(len(self._left) + operations))
            yield
            follows.cancel()

    async def _follow(self, begun: int) -> None:
        while True:
            for operation_id in await self._operations.open():
                found = await self._operations.find(operation_id)
                left = self._left.setdefault(operation_id, [*SHARES])
                have_begun = len(self._left) >= begun
                if found is not None and have_begun and left and found.progress.looked > left[0] * found.total:
                    left.pop(0)
                    self._kill_all()
            self._note_memory()
            await asyncio.sleep(0.02)

    def _kill_all(self) -> None:
        for member in self._cluster.of(Role.GATEWAY):
            self.kills += member.runs
            member.kill()

    def _note_memory(self) -> None:
        broker = self._cluster.broker.process
        assert broker is not None
        pids = [("Redis", broker.pid), *(("gateway", one.pid) for one in self._cluster.of(Role.GATEWAY) if one.runs)]
        for name, pid in pids:
            with contextlib.suppress(psutil.Error):
                mib = psutil.Process(pid).memory_info().rss / 2**20
                self.peak_mib[name] = max(mib, self.peak_mib.get(name, 0.0))


class Watch:
    """Notes how long each part takes."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.took_s[name] = time.monotonic() - began_s


async def searched(client: AsyncClient, **filters: Unpack[RequestFilters]) -> list[RequestStatus]:
    filters["model"] = MODEL
    return await client.requests(limit=10 * REQUESTS, **filters)


def waiting_in(cluster: Cluster, lane: Lane) -> list[str]:
    """Returns the id of each entry of a lane."""
    with cluster.redis() as client:
        heads = [head_of(fields[b"f"]) for _, fields in client.xrange(keys.lane(lane))]
    return sorted(head.id[:-1] for head in heads if head is not None)


@contextlib.asynccontextmanager
async def buried(tmp_path: Path, watch: Watch) -> AsyncIterator[tuple[Cluster, Queue, set[str]]]:
    """Runs gateways without workers, with `REQUESTS` dead letters; yields the ids of those that ran out of memory."""
    more = 'parameters { key: "qinfer.lane_capacity" value { string_value: "1000000" } }'
    write_stub(tmp_path / "models", MODEL, more=more)
    settings = {"QINFER_REQUESTS__MAX_TIMEOUT_S": "86400"}
    async with running_cluster(tmp_path, tmp_path / "models", workers=1, gateways=3, settings=settings) as cluster:
        await cluster.ready((MODEL,))
        [worker] = cluster.of(Role.WORKER)
        worker.end_for_good()
        await eventually(lambda: not worker.runs, 60.0, "the end of the worker")
        queue = await Queue.connect(RedisSettings(url=SecretStr(cluster.broker.url)))
        try:
            with watch.part("stored and buried"):
                chosen = await bury_all(queue, Lane(MODEL, 1))
            yield cluster, queue, chosen
        finally:
            await queue.close()


async def test_search_replay_and_cancel_are_exact_while_gateways_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, lane = Watch(), Lane(MODEL, 1)
    async with (
        buried(tmp_path, watch) as (cluster, queue, chosen),
        AsyncClient(cluster.urls, timeout_s=300.0) as client,
    ):
        killer = Killer(cluster, queue)

        async def operated(
            action: str, *, dry_run: bool = False, **filters: Unpack[RequestFilters]
        ) -> tuple[str, int, int]:
            filters["model"] = MODEL
            done = await client.operate(action, dry_run=dry_run, wait_s=1200.0, **filters)
            return done.state, done.found, done.changed

        with watch.part("searched"):
            async with asyncio.TaskGroup() as group:
                searching = group.create_task(searched(client, error=REASONS[0]))
                group.create_task(killer.kill_one())
        async with killer.at_work():
            with watch.part("counted for a replay"):
                counted = await operated("replay", error=REASONS[0], dry_run=True)
        async with killer.at_work(2):
            with watch.part("replayed twice at once"):
                both = [operated("replay", error=REASONS[0]) for _ in range(2)]
                replayed = await asyncio.gather(*both)
        entries, letters = waiting_in(cluster, lane), await queue.dead_letters.count(MODEL)
        queued, failed = [await searched(client, state=[state]) for state in ("queued", "failed")]
        async with killer.at_work():
            with watch.part("counted for a cancel"):
                to_cancel = await operated("cancel", state=["queued"], dry_run=True)
        async with killer.at_work():
            with watch.part("cancelled"):
                cancelled = await operated("cancel", state=["queued"])
        ended = await searched(client, state=["cancelled"])
        left = waiting_in(cluster, lane)

    with capsys.disabled():
        parts = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in watch.took_s.items())
        peaks = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in killer.peak_mib.items())
        counts = f"{len(searching.result())} found, {replayed} replayed, {cancelled} cancelled"
        sys.stdout.write(f"\n{REQUESTS} requests, {killer.kills} kills: {counts}; {parts}; at most {peaks}\n")
    assert killer.kills >= 10
    assert {one.id for one in searching.result()} == chosen
    assert counted == to_cancel == ("done", len(chosen), 0)
    assert [state for state, _, _ in replayed] == ["done", "done"]
    assert sum(changed for _, _, changed in replayed) == len(chosen)
    assert entries == sorted(chosen), "each is in the lane once"
    assert letters == REQUESTS - len(chosen)
    assert {one.id for one in queued} == chosen
    assert len({one.id for one in failed}) == REQUESTS - len(chosen)
    assert cancelled[0] == "done"
    assert cancelled[2] == len(chosen)
    assert {one.id for one in ended} == chosen
    assert left == []
