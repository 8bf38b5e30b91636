"""The proof of the promise: processes are killed, ended and stopped under load, and nothing that was accepted is lost.

`make chaos` runs it for ten minutes and 200 kills; without `CHAOS_SECONDS` and `CHAOS_KILLS` it is short. `make test`
runs the stricter mode of durability only. The seed is printed; `CHAOS_SEED` repeats its faults, though not their exact
moment in the work.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.load import Clients
from tests.chaos.receiver import receiving
from tests.chaos.repository import write_models
from tests.chaos.verdict import Ledger, judge, leftovers
from tests.support.servers.servers import matrix

SECONDS = float(os.environ.get("CHAOS_SECONDS", "6"))
KILLS = int(os.environ.get("CHAOS_KILLS", "8"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)

MODES = {"always": 0.7, "everysec": 0.3}
"""Which part of the time, and of the kills, each mode of durability gets."""

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 1.5 + 300)]


@pytest.mark.parametrize("durability", ["always", *matrix("everysec")])
async def test_nothing_accepted_is_lost(durability: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each accepted request ends once, in one state, with its right answer; and nothing is left in the queue."""
    share = MODES[durability]
    planned = faults.plan(SEED, SECONDS * share, round(KILLS * share))
    names = write_models(tmp_path / "models")
    async with (
        receiving(SEED) as receiver,
        running_cluster(tmp_path, tmp_path / "models", durability=durability, settings=receiver.settings) as cluster,
    ):
        await cluster.ready(names)
        ledger = Ledger()
        clients = Clients(cluster.urls, ledger, SEED, receiver)
        clients.explain = cluster.holders
        chaos = faults.Chaos(cluster, planned)
        await hurt(cluster, chaos, clients, names)
        unsafe = chaos.broker_kills if durability == "everysec" else []
        verdict = judge(ledger, kills=chaos.kills, dead_letters=cluster.dead_letters(), broker_kills=unsafe)
        problems = verdict.problems + leftovers(cluster.keys())
        about = {"faults": chaos.done, "refused, and tried again": ledger.refusals, "errors logged": cluster.errors()}
        sys.stdout.writelines(f"{name}: {dict(counts)}\n" for name, counts in about.items())

    with capsys.disabled():
        sys.stdout.write(f"\n{durability}, CHAOS_SEED={SEED}: {verdict.line}\n")
    assert problems == [], verdict.line


async def hurt(cluster: Cluster, chaos: faults.Chaos, clients: Clients, names: tuple[str, ...]) -> None:
    """Lets the faults happen under load, waits until all has recovered, and reads what there is."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run())
            await chaos.run()
            clients.stop()
        await cluster.ready(names)
        await cluster.quiet()
        await clients.read_all()
    finally:
        await clients.close()
