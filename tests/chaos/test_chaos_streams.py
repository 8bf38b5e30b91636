"""Streams of decoupled models under faults: each response comes once and in order, and no stream is silently short.

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
from tests.chaos.stream_load import StreamClients, judge, write_models
from tests.chaos.verdict import leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "24"))
KILLS = int(os.environ.get("CHAOS_KILLS", "12"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)

SETTINGS = {
    "QINFER_WORKER__MAX_DELIVERIES": "1000",  # whatever is killed, no request becomes a dead letter
    "QINFER_LIMITS__STREAM_WINDOW_BYTES": "8192",  # less than a stream: credits matter
}

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.5 + 300)]


async def test_streams_are_exact_or_say_that_they_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stream is complete, or ends with an error that may be repeated; a resumed one is unbroken."""
    names = write_models(tmp_path / "models")
    async with running_cluster(
        tmp_path, tmp_path / "models", workers=2, durability="always", settings=SETTINGS
    ) as cluster:
        await cluster.ready(names)
        clients = StreamClients(cluster.urls, cluster.grpc_targets, SEED)
        chaos = faults.Chaos(cluster, faults.plan(SEED, SECONDS, KILLS))
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run())
            await chaos.run()
            clients.stop()
        await cluster.ready(names)
        await cluster.quiet()
        verdict = judge(clients.streams, kills=chaos.kills)
        problems = verdict.problems + leftovers(cluster.keys())
        ends = Counter(stream.trouble[:100] for stream in clients.streams if stream.trouble)
        about = {"faults": chaos.done, "ended early": ends, "errors logged": cluster.errors()}
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())

    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line}\n")
    assert problems == [], verdict.line
