"""Sequences under faults: right answers as if nothing had befallen, or an error that says that the sequence is lost.

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

from qinfer.queue import keys
from tests.chaos import faults
from tests.chaos.cluster import running_cluster
from tests.chaos.sequence_load import EXPLICIT, IMPLICIT, SequenceClients, judge, write_models
from tests.chaos.verdict import leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "24"))
KILLS = int(os.environ.get("CHAOS_KILLS", "12"))
CALLERS = int(os.environ.get("CHAOS_SEQUENCES", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)

SETTINGS = {"QINFER_WORKER__MAX_DELIVERIES": "1000"}  # whatever is killed, no step is given up

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.5 + 300)]


async def test_sequences_go_on_or_say_that_they_are_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A state beside the queue outlives whatever is killed; one in memory ends with an error that may be repeated."""
    names = write_models(tmp_path / "models")
    async with running_cluster(
        tmp_path, tmp_path / "models", workers=3, durability="always", settings=SETTINGS
    ) as cluster:
        await cluster.ready(names)
        counts = {IMPLICIT: CALLERS * 3 // 4, EXPLICIT: CALLERS // 4}
        clients = SequenceClients(cluster.urls, counts, SEED, has_unnumbered=True)
        chaos = faults.Chaos(cluster, faults.plan(SEED, SECONDS, KILLS))
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run())
            await chaos.run()
            clients.stop()
        await cluster.ready(names)
        await cluster.quiet()
        with cluster.redis() as client:
            handed_over = int(client.hget(keys.sequence_counts(IMPLICIT, 0), "handed_over") or 0)
        verdict = judge(clients.sequences, handed_over=handed_over, kills=chaos.kills)
        problems = verdict.problems + leftovers(cluster.keys())
        ends = Counter(told.trouble[:100] for told in clients.sequences if told.trouble)
        about = {"faults": chaos.done, "ended early": ends, "errors logged": cluster.errors()}
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())

    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line} repeated={clients.repeats}\n")
    assert problems == [], verdict.line
