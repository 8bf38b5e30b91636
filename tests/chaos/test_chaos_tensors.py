"""Large tensors in the memory of gateways and workers, under faults: an answer is right, or may be asked for again.

`make chaos` runs it as long as `CHAOS_SECONDS` and `CHAOS_KILLS` say; without them it is short. The seed is printed;
`CHAOS_SEED` repeats its faults.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from qinfer.testing import eventually
from tests.chaos import faults
from tests.chaos.cluster import running_cluster
from tests.chaos.member import Role
from tests.chaos.tensor_load import STEPS, TensorClients, judge, write_models
from tests.chaos.verdict import leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "24"))
KILLS = int(os.environ.get("CHAOS_KILLS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SETTINGS = {
    "QINFER_WORKER__MAX_DELIVERIES": "1000",  # whatever is killed, no request becomes a dead letter
    "QINFER_SEGMENTS__LEAST_BYTES": "4096",
    "QINFER_SEGMENTS__MOST_BYTES": str(128 * 2**20),  # less than callers may send at once
}

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.5 + 300)]


async def test_answers_are_of_their_own_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer is the checksum of its own tensor, and memory, queue and directory are empty in the end."""
    names = write_models(tmp_path / "models")
    settings = {**SETTINGS, "QINFER_SEGMENTS__DIRECTORY": str(tmp_path / "m")}
    ways, of_workers = Counter[str](), Counter[str]()
    async with running_cluster(tmp_path, tmp_path / "models", workers=0, settings=settings) as cluster:
        for models in (names[:-1], names[:-1], [STEPS], [STEPS]):
            cluster.add(Role.WORKER, settings={"QINFER_WORKER__MODELS": json.dumps(models)})
        await cluster.ready(names)
        clients = TensorClients(cluster.urls, SEED)
        chaos = faults.Chaos(cluster, faults.plan(SEED, SECONDS, KILLS))
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run())
            watching = group.create_task(watch(cluster.urls, ways, of_workers))
            await chaos.run()
            clients.stop()
            watching.cancel()
        await cluster.ready(names)
        await cluster.quiet()
        await until_empty(cluster.urls)
        held = [value for url in cluster.urls for value in await held_by(url)]
        verdict = judge(clients, kills=chaos.kills, ways=ways, of_workers=of_workers, held=held)
        problems = verdict.problems + leftovers(cluster.keys())
        about = {"faults": chaos.done, "refused, or broken off": clients.refusals, "errors logged": cluster.errors()}
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())
        sys.stdout.writelines(f"{problem}\n" for problem in problems)

    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line}\n")
    assert problems == [], verdict.line
    assert list((tmp_path / "m").iterdir()) == []


async def watch(urls: Sequence[str], ways: Counter[str], of_workers: Counter[str]) -> None:
    """Counts the requests of each way; a gateway that is started again counts anew, and a worker has another name."""
    before, by_series = Counter[tuple[str, str]](), dict[str, float]()
    while True:
        for url in urls:
            for way in ("memory", "no_memory", "old_worker"):
                for value in (await of_gateway(url, "qinfer_segment_requests_total", way)).values():
                    last, before[url, way] = before[url, way], int(value)
                    ways[way] += int(value) - (last if value >= last else 0)
                by_series |= await of_gateway(url, "qinfer_worker_segment_requests_total", f'way="{way}"')
                of_workers[way] = int(sum(count for series, count in by_series.items() if f'way="{way}"' in series))
        await asyncio.sleep(0.3)


async def of_gateway(url: str, name: str, label: str = "") -> dict[str, float]:
    """Returns the series of a metric; none while the gateway does not answer."""
    try:
        async with httpx.AsyncClient(timeout=5.0) as client:
            lines = (await client.get(f"{url}/metrics")).text.splitlines()
    except httpx.TransportError:
        return {}
    found = [line.rpartition(" ") for line in lines if line.startswith(name) and label in line]
    return {series: float(value) for series, _, value in found}


async def held_by(url: str) -> list[float]:
    """Returns the bytes that a gateway holds, and those that each worker holds, as it knows."""
    own, theirs = await of_gateway(url, "qinfer_segment_bytes", 'state="held"'), "qinfer_worker_segment_held_bytes"
    return [*own.values(), *(await of_gateway(url, theirs)).values()]


async def until_empty(urls: Sequence[str]) -> None:
    """Waits until every gateway answers and no process holds anything; the verdict says what is left."""

    async def is_empty() -> bool:
        return all([set(await held_by(url)) == {0.0} for url in urls])

    with contextlib.suppress(TimeoutError):
        await eventually(is_empty, 30.0, "processes that hold no tensors")
