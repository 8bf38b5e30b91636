"""Ensembles under faults: each request ends once, in one state, with its right answer, and state changes once a step.

`make chaos` runs it as long as `CHAOS_SECONDS` and `CHAOS_KILLS` say; without them it is short. The seed is printed;
`CHAOS_SEED` repeats its faults.
"""

import asyncio
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.cluster import running_cluster
from tests.chaos.ensemble_load import KEPT, judge, write_models
from tests.chaos.load import Clients
from tests.chaos.receiver import receiving
from tests.chaos.sequence_load import SequenceClients
from tests.chaos.verdict import Ledger, leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "24"))
KILLS = int(os.environ.get("CHAOS_KILLS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SEQUENCES = 20

# Whatever is killed, no step is given up: a request of an ensemble is held by a worker for longer than one of a model.
SETTINGS = {"QINFER_WORKER__MAX_DELIVERIES": "1000"}

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.5 + 300)]


async def test_requests_of_ensembles_end_once_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = write_models(tmp_path / "models")
    async with (
        receiving(SEED) as receiver,
        running_cluster(
            tmp_path, tmp_path / "models", workers=3, durability="always", settings={**receiver.settings, **SETTINGS}
        ) as cluster,
    ):
        await cluster.ready(names)
        ledger = Ledger()
        clients = Clients(cluster.urls, ledger, SEED, receiver)
        clients.explain = cluster.holders
        callers = SequenceClients(cluster.urls, {KEPT: SEQUENCES}, SEED)
        chaos = faults.Chaos(cluster, faults.plan(SEED, SECONDS, KILLS))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(clients.run())
                group.create_task(callers.run())
                await chaos.run()
                clients.stop()
                callers.stop()
            await cluster.ready(names)
            await cluster.quiet()
            await clients.read_all()
        finally:
            await clients.close()
        verdict = judge(ledger, callers.sequences, kills=chaos.kills, dead_letters=cluster.dead_letters())
        problems = verdict.problems + leftovers(cluster.keys())
        ends = Counter(told.trouble[:100] for told in callers.sequences if told.trouble)
        about = {"faults": chaos.done, "refused, and tried again": ledger.refusals, "sequences ended early": ends}
        about["errors logged"] = cluster.errors()
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())
        sys.stdout.writelines(f"{problem}\n" for problem in problems)

    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line}\n")
    assert problems == [], verdict.line
