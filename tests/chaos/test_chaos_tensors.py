"""Large tensors in the memory of gateways and workers, under faults: an answer is right, or may be asked for again.

Workers run on the machine of the gateways, or on another one, which shares no directory with it and is reached by TCP
only. `make chaos` runs it as long as `CHAOS_SECONDS` and `CHAOS_KILLS` say; without them it is short. The seed is
printed; `CHAOS_SEED` repeats its faults.
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
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.machines import WIRE_FAULTS, Network, NetworkChaos
from tests.chaos.member import Role
from tests.chaos.tensor_load import STEPS, WAYS, TensorClients, judge, near, write_models
from tests.chaos.verdict import leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "24"))
KILLS = int(os.environ.get("CHAOS_KILLS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SETTINGS = {
    "QINFER_WORKER__MAX_DELIVERIES": "1000",  # whatever is killed, no request becomes a dead letter
    "QINFER_SEGMENTS__LEAST_BYTES": "4096",
    "QINFER_SEGMENTS__MOST_BYTES": str(128 * 2**20),  # less than callers may send at once
}
HERE, THERE = "here", "there"
MACHINES = {"one_machine": (HERE, HERE, HERE, HERE), "two_machines": (HERE, THERE, THERE, THERE)}
"""Where the workers run; the gateways run here. The last two workers have the ensemble."""

USED_WITHIN_S = 120.0
"""Far more than the half minute in which tensors go through Redis because a worker could not read some."""

_OF_GATEWAYS, _OF_WORKERS = "qinfer_segment_requests_total{", "qinfer_worker_segment_requests_total{"
_HELD = ("qinfer_segment_bytes{", "qinfer_worker_segment_held_bytes{")

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.5 + 600)]


class Count:
    """How many requests with large tensors went which way.

    Attributes:
        ways: Those of gateways.
        of_workers: Steps of ensembles.
        far: What travelled between machines; `None` = there is one machine.
    """

    def __init__(self, far: Counter[str] | None) -> None:
        self.ways, self.of_workers = Counter[str](), Counter[str]()
        self.far = far

    async def watch(self, urls: Sequence[str]) -> None:
        """Reads the metrics; a process that is started again has another name, and series of its own."""
        series: dict[str, float] = {}
        while True:
            for url in urls:
                series |= await metrics_of(url, (_OF_GATEWAYS, _OF_WORKERS))
            for counts, name in ((self.ways, _OF_GATEWAYS), (self.of_workers, _OF_WORKERS)):
                for way in WAYS:
                    found = [value for one, value in series.items() if one.startswith(name) and f'way="{way}"' in one]
                    counts[way] = int(sum(found))
            await asyncio.sleep(0.3)

    async def is_used(self) -> None:
        """Waits until requests travel in memory again, in every way there is."""
        before = self._used()
        await eventually(
            lambda: all(now > was for now, was in zip(self._used(), before, strict=True)),
            USED_WITHIN_S,
            f"tensors beside Redis, after {before}",
        )

    def _used(self) -> list[int]:
        used = [self.ways["memory"], self.of_workers["memory"]]
        if self.far is not None:
            used += [self.far["fetched"], self.far["replied"], near(self.ways, self.of_workers, self.far)]
        return used


@pytest.mark.parametrize("machines", MACHINES.values(), ids=MACHINES)
async def test_answers_are_of_their_own_tensors(
    machines: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer is of its own tensor, and memory, queue and directories are empty in the end."""
    names = write_models(tmp_path / "models")
    running = running_cluster(tmp_path, tmp_path / "models", gateways=0, workers=0, settings=SETTINGS)
    async with contextlib.aclosing(Network()) as network, running as cluster:
        far = network if THERE in machines else None
        for place in (HERE, HERE):
            cluster.add(Role.GATEWAY, settings=await at(tmp_path / place, far))
        for place, models in zip(machines, (names[:-1], names[:-1], [STEPS], [STEPS]), strict=True):
            settings = await at(tmp_path / place, far)
            cluster.add(Role.WORKER, settings={**settings, "QINFER_WORKER__MODELS": json.dumps(models)})
        await cluster.ready(names)
        clients, count = TensorClients(cluster.urls, SEED), Count(None if far is None else far.counts)
        plan = faults.plan(SEED, SECONDS, KILLS, also=() if far is None else WIRE_FAULTS)
        chaos = NetworkChaos(cluster, plan, network)
        problems = await hurt(cluster, clients, count, chaos)
        await cluster.ready(names)
        await cluster.quiet()
        await until_empty(cluster.urls)
        held = [value for url in cluster.urls for value in await held_by(url)]
        verdict = judge(clients, ways=count.ways, of_workers=count.of_workers, held=held, far=count.far)
        problems += verdict.problems + leftovers(cluster.keys())
        about = {"faults": chaos.done, "refused, or broken off": clients.refusals, "errors logged": cluster.errors()}
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())
        sys.stdout.writelines(f"{problem}\n" for problem in problems)
        done = f"left={left(cluster)} faults={sum(chaos.done.values())} kills={chaos.kills}"

    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line} {done}\n")
    assert problems == [], verdict.line
    assert [file for place in machines for file in (tmp_path / place).iterdir()] == []


async def at(directory: Path, network: Network | None) -> dict[str, str]:
    """Returns the settings of a process on a machine, whose processes share the directory."""
    wire = {} if network is None else await network.listening()
    return {"QINFER_SEGMENTS__DIRECTORY": str(directory), **wire}


async def hurt(cluster: Cluster, clients: TensorClients, count: Count, chaos: NetworkChaos) -> list[str]:
    """Lets the faults happen under load; returns what does not work any more afterwards."""
    problems = []
    async with asyncio.TaskGroup() as group:
        group.create_task(clients.run())
        watching = group.create_task(count.watch(cluster.urls))
        await count.is_used()
        await chaos.run()
        try:
            await count.is_used()
        except TimeoutError as error:
            problems.append(str(error))
        clients.stop()
        watching.cancel()
    return problems


def left(cluster: Cluster) -> int:
    """Returns how often a process sent a model's tensors through Redis for a while, because a worker could not read."""
    return sum(member.log().count("a worker can't read tensors") for member in cluster.members)


async def metrics_of(url: str, names: tuple[str, ...]) -> dict[str, float]:
    """Returns the series of metrics; none while the gateway does not answer."""
    try:
        async with httpx.AsyncClient(timeout=5.0) as client:
            lines = (await client.get(f"{url}/metrics")).text.splitlines()
    except httpx.TransportError:
        return {}
    found = [line.rpartition(" ") for line in lines if line.startswith(names)]
    return {series: float(value) for series, _, value in found}


async def held_by(url: str) -> list[float]:
    """Returns the bytes that a gateway holds, and those that each worker holds, as it knows."""
    return [value for series, value in (await metrics_of(url, _HELD)).items() if 'state="idle"' not in series]


async def until_empty(urls: Sequence[str]) -> None:
    """Waits until every gateway answers and no process holds anything; the verdict says what is left."""

    async def is_empty() -> bool:
        return all([set(await held_by(url)) == {0.0} for url in urls])

    with contextlib.suppress(TimeoutError):
        await eventually(is_empty, 30.0, "processes that hold no tensors")
