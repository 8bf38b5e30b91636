"""Three times as many requests as a model can take: the rest is refused at the door, and Redis does not grow.

The lane is bounded, and results are short-lived here. `CHAOS_SECONDS` makes it last, up to a minute.
"""

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.load import numbered
from tests.chaos.repository import write_stub
from tests.support.servers.servers import command

SECONDS = min(float(os.environ.get("CHAOS_SECONDS", "8")), 60.0)
WARM_UP_S = min(SECONDS / 2, 10.0)

DELAY_S, BATCH = 0.2, 4
CAPACITY = 40
PUSHED_RPS = 3 * BATCH / DELAY_S
WIDTH = 16_384
"""Numbers in each of the two inputs: 64 KiB each, so that what piles up can be seen."""

SHORT_LIVED = {"QINFER_REQUESTS__RESULT_TTL_S": "2", "QINFER_REQUESTS__TOMBSTONE_TTL_S": "2"}
BOUND = {"more": f'parameters {{ key: "qinfer.lane_capacity" value {{ string_value: "{CAPACITY}" }} }}'}

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS + 180)]


@dataclass
class Push:
    """Requests at a steady rate, whatever becomes of them."""

    urls: list[str]
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx.AsyncClient(timeout=60.0, limits=limits) as http, asyncio.TaskGroup() as group:
            for number in range(int(seconds * PUSHED_RPS)):
                group.create_task(self._send(http, number))
                await asyncio.sleep(1 / PUSHED_RPS)
            await asyncio.sleep(0)

    async def _send(self, http: httpx.AsyncClient, number: int) -> None:
        is_asynchronous = number % 4 == 0
        path = "/v1/models/stuck/requests" if is_asynchronous else "/v2/models/stuck/infer"
        head, content = numbered(number, WIDTH)
        reply = await http.post(self.urls[number % len(self.urls)] + path, content=content, headers=head)
        self.statuses[f"{path[1:3]} {reply.status_code}"] += 1
        if reply.status_code == 202:
            self.accepted.append(self.urls[0] + reply.headers["location"])
        elif reply.status_code in (429, 503):
            if not reply.headers.get("retry-after", "").isdecimal() or is_asynchronous is (reply.status_code == 503):
                self.wrong.append(f"{number}: {reply.status_code} {dict(reply.headers)} {reply.text[:200]}")
        elif reply.status_code != 200:
            self.wrong.append(f"{number}: {reply.status_code} {reply.text[:200]}")


async def memory_of(cluster: Cluster, seconds: float) -> list[int]:
    """Returns the bytes that Redis used, four times a second."""
    samples = []
    with cluster.redis() as client:
        for _ in range(int(seconds * 4)):
            info = await asyncio.to_thread(command, client, "INFO", "memory")
            samples.append(int(info["used_memory"]))
            await asyncio.sleep(0.25)
    return samples


async def test_memory_is_flat_at_three_times_the_capacity(tmp_path: Path) -> None:
    """Refusals say when to come again; what was let in is answered, and no more than the lane holds piles up."""
    write_stub(tmp_path / "models", "stuck", delay_s=DELAY_S, max_batch_size=BATCH, dim=WIDTH, **BOUND)
    async with running_cluster(tmp_path, tmp_path / "models", workers=1, settings=SHORT_LIVED) as cluster:
        await cluster.ready(("stuck",))
        push = Push(cluster.urls)
        async with asyncio.TaskGroup() as group:
            group.create_task(push.run(WARM_UP_S + SECONDS))
            warm = await memory_of(cluster, WARM_UP_S)
            samples = await memory_of(cluster, SECONDS)
        await cluster.quiet()
        left = await asyncio.to_thread(cluster.keys)

    assert push.wrong == []
    assert push.statuses["v1 202"] > 0 < push.statuses["v2 200"]
    assert push.statuses["v1 429"] > 0 < push.statuses["v2 503"]
    one = 2 * 4 * WIDTH
    assert max(samples) <= max(warm) + CAPACITY * one, (max(warm), samples)
    assert [key for key in left if key.name.endswith(":p1") and key.length] == []
