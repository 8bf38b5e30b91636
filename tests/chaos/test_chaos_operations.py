"""Many stored requests are searched and replayed by a filter while gateways are killed: the counts are exact.

`CHAOS_REQUESTS` is their number: 5,000, and 100,000 before a release.
"""

import asyncio
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from qinfer.client import AsyncClient, OperationStatus, RequestStatus
from qinfer.core.messages import InferRequest
from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable
from qinfer.queue.dead_letters import head_of
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_api.requests.records import failed_outcome
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.member import Role
from tests.chaos.repository import write_stub

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "5000"))
MODEL, REASONS = "company", ("out of memory", "no such file")
AT_ONCE = 256

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(300 + REQUESTS / 20)]


async def bury_all(queue: Queue) -> set[str]:
    """Stores requests and makes each a dead letter, the odd ones for another reason; returns the ids of the even ones.

    They fill the queue before any gateway looks, so that it needs neither a worker nor the time of executions.
    """
    lane, chosen = Lane(MODEL, 1), set[str]()
    await queue.ensure([lane])
    for first in range(0, REQUESTS, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, REQUESTS))
        await queue.requests.accept_all([_acceptance(lane, f"r{number}@") for number in numbers])
        while leases := await queue.fetch([lane], "burier", AT_ONCE, 0.0):
            for lease in leases:
                request = head_of(lease.frame)
                assert request is not None
                reason = REASONS[int(request.id[1:-1]) % 2]
                await queue.bury(lease, request.id, "inference_failed", reason)
                address = EntryAddress(MODEL, 0, request.id)
                outcome = failed_outcome(address, RequestState.FAILED, BrokerUnavailable(reason))
                await queue.requests.settle([Settlement(address=address, outcome=outcome)])
                chosen |= {request.id[:-1]} if reason == REASONS[0] else set()
    return chosen


def _acceptance(lane: Lane, request_id: str) -> Acceptance:
    frame = encode_request(InferRequest(model=MODEL, inputs=(), id=request_id, version=1))
    address = EntryAddress(MODEL, 0, request_id)
    return Acceptance(address=address, lane=lane, frame=frame, timeout_s=86400.0, body_hash=request_id)


class Killer:
    """Kills gateways at moments of the work: one while a list is read, all of them while operations run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.kills = 0

    async def kill_one(self) -> None:
        """Kills a gateway that has begun to work."""
        (await self._cluster.running(Role.GATEWAY, random.randrange(100))).kill()
        self.kills += 1

    def all_at(self, *shares: float) -> Callable[[OperationStatus], None]:
        """Returns an observer that kills all gateways when an operation has done these shares of its work."""
        left = list(shares)

        def observe(status: OperationStatus) -> None:
            if left and status.state == "running" and (status.looked or 0) > left[0] * REQUESTS:
                left.pop(0)
                for member in self._cluster.of(Role.GATEWAY):
                    member.kill()
                    self.kills += 1

        return observe


async def searched(client: AsyncClient, **filters: str) -> list[RequestStatus]:
    return await client.requests(limit=10 * REQUESTS, model=MODEL, **filters)  # type: ignore[arg-type]  # a filter


async def test_search_and_replay_are_exact_while_gateways_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stub(
        tmp_path / "models", MODEL, more='parameters { key: "qinfer.lane_capacity" value { string_value: "1000000" } }'
    )
    settings = {"QINFER_REQUESTS__MAX_TIMEOUT_S": "86400"}
    async with running_cluster(tmp_path, tmp_path / "models", workers=1, gateways=3, settings=settings) as cluster:
        await cluster.ready((MODEL,))
        [worker] = cluster.of(Role.WORKER)
        worker.end_for_good()
        await eventually(lambda: not worker.runs, 60.0, "the end of the worker")
        queue = await Queue.connect(RedisSettings(url=SecretStr(cluster.broker.url)))
        try:
            chosen = await bury_all(queue)
            async with AsyncClient(cluster.urls, timeout_s=300.0) as client:
                killer = Killer(cluster)
                async with asyncio.TaskGroup() as group:
                    searching = group.create_task(searched(client, error=REASONS[0]))
                    group.create_task(killer.kill_one())
                found = searching.result()
                observe = killer.all_at(0.1, 0.6)
                counted = await client.operate(
                    "replay", model=MODEL, error=REASONS[0], wait_s=600.0, on_status=observe, dry_run=True
                )
                both = [
                    client.operate("replay", model=MODEL, error=REASONS[0], wait_s=600.0, on_status=observe)
                    for observe in (killer.all_at(0.1, 0.6), None)
                ]
                replayed = await asyncio.gather(*both)
                queued = await searched(client, state="queued")
                failed = await searched(client, state="failed")
            depth, letters = (await queue.depth([Lane(MODEL, 1)]))[0], await queue.dead_letters.count(MODEL)
        finally:
            await queue.close()

    changed = [one.changed for one in replayed]
    with capsys.disabled():
        sys.stdout.write(f"\n{REQUESTS} requests, {killer.kills} kills: {len(found)} found, {changed} replayed\n")
    assert killer.kills > 1
    assert {one.id for one in found} == chosen
    assert (counted.state, counted.found, counted.changed) == ("done", len(chosen), 0)
    assert [one.state for one in replayed] == ["done", "done"]
    assert sum(changed) == depth == len(chosen)
    assert letters == REQUESTS - len(chosen)
    assert {one.id for one in queued} == chosen
    assert len({one.id for one in failed}) == REQUESTS - len(chosen)
