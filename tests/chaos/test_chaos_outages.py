"""The proof of what operators are promised: `status` names each outage within a minute, and an alert within its `for`.

A model hangs, the disk of bulk jobs is full, Redis is gone, no worker is left: one after the other, and again, while
`qinfer autoscale` starts and drains workers as the load rises and falls, some of them are killed, and another model
hangs for a moment now and then. Nothing that was accepted is lost, doubled or wrong meanwhile. An outage ends when it
is named, and after a quarter of the time at the latest: all alerts have time to fire with `CHAOS_SECONDS=1800`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qinfer.client import AsyncClient, AsyncJob
from qinfer.client.job_flows import JobStatus
from qinfer.errors import BrokerUnavailable, QinferError
from tests.chaos.cluster import running_cluster
from tests.chaos.load import Clients, Habits
from tests.chaos.member import Role
from tests.chaos.outages import HANG_S, OUTAGES, SHAKY, STUCK, Operator, Site, Suffered, due_s, suffer
from tests.chaos.receiver import receiving
from tests.chaos.repository import write_hanging, write_models
from tests.chaos.test_chaos_jobs import Field, write_inputs
from tests.chaos.verdict import Ledger, judge, leftovers
from tests.support.jobs import job_proof
from tests.support.jobs.job_proof import Place
from tests.support.outages.scene import watch
from tests.support.small_disk import SmallDisk

SECONDS = float(os.environ.get("CHAOS_SECONDS", "100"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + 1800)]

CALM_S = min(max(SECONDS / 60, 5.0), 30.0)
"""Between two outages."""
NOISE_EVERY_S = (10.0, 30.0)
"""Between two kills of a worker, and two hangs of a moment; the load changes then, too."""
PACES = (3.0, 8.0, 16.0)
SHORT_HANG_S = 4.0
JOB_WITHIN_S = 900.0
SETTINGS = {
    "QINFER_LIMITS__DEFAULT_TIMEOUT_S": "1800",  # a request of no wish outlives any outage
    "QINFER_LIMITS__EXECUTE_TIMEOUT_S": "60",
    "QINFER_REQUESTS__RESULT_TTL_S": "14400",
    "QINFER_WORKER__DRAIN_S": str(HANG_S + 30),  # a hang lasts until its limit, though its worker is to end
    "QINFER_BULK__SWEEP_EVERY_S": "0.5",
    # So hasty that there are many steps.
    "QINFER_AUTOSCALE__MIN_WORKERS": "1",
    "QINFER_AUTOSCALE__MAX_WORKERS": "3",
    "QINFER_AUTOSCALE__TARGET_S": "1",
    "QINFER_AUTOSCALE__UP_AFTER_S": "1",
    "QINFER_AUTOSCALE__DOWN_AFTER_S": "8",
    "QINFER_AUTOSCALE__IDLE_S": "8",
    "QINFER_AUTOSCALE__COOLDOWN_S": "4",
}


class Jobs(Field):
    """One job after the other, with its output on the small disk.

    Args:
        site: The installation.
        client: Submits them.

    Attributes:
        total: What the comparisons of all outputs have shown.
        count: How many jobs there were.
        refused: How many were not accepted.
    """

    def __init__(self, site: Site, client: AsyncClient) -> None:
        place = Place(f"file://{site.disk.seen}")
        super().__init__(site.cluster, client, place, write_inputs(place))
        self.url = f"file://{site.disk.home}"
        self.total = job_proof.Verdict(0, 0, 0)
        self.count = self.refused = 0
        self._disk = site.disk

    async def run(self, over: asyncio.Event) -> None:
        """Submits, waits and compares until it is over; deletes what was compared, unless the disk is full."""
        for number in itertools.count():
            if over.is_set():
                return
            try:
                job = await self.submit(f"out-{number}", rows_per_part=50)
            except QinferError:
                self.refused += 1
                continue
            verdict = await self.prove(f"out-{number}", await _ended(job))
            self.total, self.count = job_proof.add(self.total, verdict), self.count + 1
            for folder in [] if self._disk.is_full else self._disk.seen.glob("out-*"):
                shutil.rmtree(folder, ignore_errors=True)


async def _ended(job: AsyncJob) -> JobStatus:
    """Waits for a job's end through outages of Redis that last longer than a client's patience."""
    while True:
        with contextlib.suppress(BrokerUnavailable):
            return await job.wait(timeout_s=JOB_WITHIN_S)


@contextlib.asynccontextmanager
async def opened(directory: Path, stack: ExitStack, more: dict[str, str]) -> AsyncIterator[tuple[Site, Operator]]:
    """Runs two gateways, a bulk worker, an autoscaler and Prometheus, all but the last where the small disk is."""
    models = directory / "models"
    names = (*write_models(models), job_proof.write_model(models), STUCK, SHAKY)
    for name, limit_s in ((STUCK, HANG_S), (SHAKY, SHORT_HANG_S)):
        write_hanging(models, name, limit_s, directory / f"{name}-hangs")
    for name in ("disk", "spool"):
        (directory / name).mkdir()
    disk = SmallDisk(directory / "disk", "16m")
    stack.callback(disk.close)
    stores = {"QINFER_STORES__ALLOW": json.dumps([f"file://{disk.home}"])}
    settings = {"QINFER_BULK__SPOOL_DIR": str(directory / "spool"), **stores, **SETTINGS, **more}
    async with running_cluster(
        directory, models, gateways=0, workers=0, durability="always", settings=settings
    ) as cluster:
        cluster.enter = disk.enter()
        for role in (Role.GATEWAY, Role.GATEWAY, Role.BULK):
            cluster.add(role)
        scaler = cluster.add(Role.WORKER, module="qinfer.cli.main", arguments=["autoscale"])
        await cluster.ready(names)
        prometheus = await asyncio.to_thread(watch, directory, stack, cluster.metrics_targets)
        yield Site(cluster, scaler, disk, directory), Operator(cluster.broker.url, prometheus)


async def disturb(site: Site, habits: Habits, over: asyncio.Event) -> None:
    """Kills a worker now and then, has a model hang for a moment, and lets the load rise and fall, until it is over."""
    rng = random.Random(SEED)
    while not over.is_set():
        habits.pace = rng.choice(PACES)
        site.mark(SHAKY).touch()
        workers = site.workers()
        if workers and not site.is_spared:
            site.kill(rng.choice(workers))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), rng.uniform(*NOISE_EVERY_S))
    site.mark(SHAKY).unlink(missing_ok=True)


async def suffer_all(site: Site, operator: Operator) -> list[Suffered]:
    """Brings all outages about, in an order of chance, and again until the next one does not fit into the time."""
    loop, rng = asyncio.get_running_loop(), random.Random(SEED)
    until_s, most_s = loop.time() + SECONDS, SECONDS / len(OUTAGES)
    suffered: list[Suffered] = []
    while True:
        for name in rng.sample(list(OUTAGES), len(OUTAGES)):
            await asyncio.sleep(CALM_S)
            if len(suffered) >= len(OUTAGES) and loop.time() + min(due_s(name), most_s) > until_s:
                return suffered
            suffered.append(await suffer(site, operator, name, most_s))
            sys.stderr.write(f"{suffered[-1].line}\n")


async def test_each_outage_is_named_and_nothing_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a hanging model, a full disk, no Redis, no worker, and an autoscaler whose workers are killed."""
    over, ledger, habits = asyncio.Event(), Ledger(), Habits((STUCK, SHAKY), patience_s=1800.0)
    with ExitStack() as stack:
        async with (
            receiving(SEED) as receiver,
            opened(tmp_path, stack, dict(receiver.settings)) as (site, operator),
            AsyncClient(site.cluster.urls[0]) as client,
        ):
            cluster, jobs = site.cluster, Jobs(site, client)
            clients = Clients(cluster.urls, ledger, SEED, receiver, habits)
            clients.explain = cluster.holders
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(operator.run())
                for each in (clients.run(), jobs.run(over), disturb(site, habits, over)):
                    group.create_task(each)
                suffered = await suffer_all(site, operator)
                over.set()
                watching.cancel()
                clients.stop()
            await cluster.quiet()
            await clients.read_all()
            await clients.close()
            verdict = judge(ledger, kills=site.kills, dead_letters=cluster.dead_letters())
            with cluster.redis() as redis:
                steps = {name.decode(): int(count) for name, count in redis.hgetall("qinfer:scaler-counts").items()}
            keys = [key for key in cluster.keys() if key.name.startswith("qinfer:")]  # noqa: SIM118  not a mapping
            problems = [*verdict.problems, *leftovers(keys)]
            sys.stdout.write(f"refused, and tried again: {dict(ledger.refusals)}\nlogged: {dict(cluster.errors())}\n")

    problems += [problem for each in suffered for problem in each.problems]
    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {verdict.line} wrong={len(ledger.problems)}; autoscaler: {steps}\n")
        sys.stdout.write(f"{jobs.count} jobs: {jobs.total.line} wrong={jobs.total.wrong} not accepted={jobs.refused}\n")
        sys.stdout.writelines(f"{line}\n" for line in (*(each.line for each in suffered), *problems))
    assert problems == []
    assert steps.get("up", 0) > 0
