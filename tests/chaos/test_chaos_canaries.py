"""Canaries under faults: good versions are promoted, bad ones are rolled back, and a rollback that is done is done.

One version after the other is tried, each at an endpoint of its own, while gateways, workers and Redis are killed; of
the gateways mostly the one that decides about canaries. `make chaos` runs it as long as `CHAOS_SECONDS` and
`CHAOS_KILLS` say; without them it is short. The seed is printed; `CHAOS_SEED` repeats its faults.
"""

import asyncio
import contextlib
import itertools
import os
import random
import sys
from pathlib import Path

import httpx
import pytest

from qinfer.queue import keys
from qinfer.testing import eventually
from tests.chaos import canary_load
from tests.chaos.canary_load import MODEL, STEPS, WITHOUT_SHADOW, CanaryCallers, Trial, Version
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faults import Chaos, Fault, Kind, plan
from tests.chaos.member import Member, Role
from tests.chaos.verdict import leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "40"))
KILLS = int(os.environ.get("CHAOS_KILLS", "20")) // 2
"""Three gateways take longer to come back than two, and canaries are to be decided meanwhile."""
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)

TRIED = (
    (Version.GOOD, STEPS),
    (Version.WRONG, STEPS),
    (Version.FAILING, WITHOUT_SHADOW),
    (Version.GOOD, WITHOUT_SHADOW),
    (Version.FAILING, STEPS),
)
WITHIN_S = 300.0
"""For one trial; some faults take several seconds, and the load has but one part of the machine."""
ANSWERS, ANSWERS_WITHIN_S = 50, 20.0
"""Between two faults."""

# Whatever is killed, no request is given up.
SETTINGS = {"QINFER_WORKER__MAX_DELIVERIES": "1000"}

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 3 + 5 * WITHIN_S)]


class LeaderChaos(Chaos):
    """Faults of which most kills of gateways are those of the gateway that decides about canaries.

    Each waits until callers have got some answers since the last: where processes take long to start, nothing but
    starts would be hurt.

    Args:
        cluster: Whose processes.
        faults: What to do, in the order of time.
        callers: The callers.
    """

    def __init__(self, cluster: Cluster, faults: list[Fault], callers: CanaryCallers) -> None:
        super().__init__(cluster, faults)
        self._callers = callers
        self.leaders = 0

    async def _do(self, fault: Fault, stops: asyncio.TaskGroup) -> None:
        wanted = self._callers.answers + ANSWERS
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: self._callers.answers >= wanted, ANSWERS_WITHIN_S)
        is_for_leader = fault.kind is Kind.KILL and fault.role is Role.GATEWAY and fault.pick % 3
        leader = await leader_of(self._cluster) if is_for_leader else None
        if leader is None:
            await super()._do(fault, stops)
        else:
            self.leaders += 1
            leader.kill()


async def leader_of(cluster: Cluster) -> Member | None:
    """Returns the gateway that decides about canaries; `None` = none does, or it does not answer."""
    with cluster.redis() as client:
        owner = client.get(keys.trial_lease())
    async with httpx.AsyncClient(timeout=2.0) as http:
        for url, member in zip(cluster.urls, cluster.of(Role.GATEWAY), strict=True):
            try:
                metrics = await http.get(f"{url}/metrics")
            except httpx.TransportError:
                continue
            if isinstance(owner, bytes) and f'process="{owner.decode()}"' in metrics.text:
                return member
    return None


async def test_canaries_end_as_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    canary_load.write_models(tmp_path / "models")
    trials: list[Trial] = []
    async with running_cluster(
        tmp_path, tmp_path / "models", gateways=3, durability="always", settings=SETTINGS
    ) as cluster:
        await cluster.ready((MODEL,))
        callers = CanaryCallers(cluster.urls, SEED)
        chaos = LeaderChaos(cluster, plan(SEED, SECONDS, KILLS), callers)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(callers.run())
                hurting = group.create_task(chaos.run())
                for number, (version, steps) in enumerate(itertools.cycle(TRIED)):
                    if hurting.done() and number >= len(TRIED):
                        break
                    trial = Trial(name=f"trial-{number}", version=version, steps=steps)
                    trials.append(trial)
                    await callers.declare(trial)
                    await cluster.ready((trial.name,))
                    await callers.follow(trial, WITHIN_S)
                callers.stop()
            await cluster.ready((MODEL,))
            await cluster.quiet()
            await callers.read_all()
            for trial in trials:
                await callers.look(trial)
        finally:
            await callers.close()
        verdict = canary_load.judge(trials, callers, kills=chaos.kills)
        problems = verdict.problems + leftovers(cluster.keys())
        about = {"faults": chaos.done, "refused, and tried again": callers.refusals, "errors logged": cluster.errors()}
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())
        sys.stdout.writelines(f"{problem}\n" for problem in problems)

    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line}, {chaos.leaders} of them the deciding gateway\n")
    assert problems == [], verdict.line
