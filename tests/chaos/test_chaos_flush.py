"""Redis comes back empty under load, flushed or without its volume; all recovers, and nothing is started again.

What had been accepted and was not answered is lost with the data, and is counted; nothing may be wrong. The line is
`accepted=… lost_by_flush=… wrong=0 recovered_s=…`, the last of them the longest time until every gateway was ready.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import httpx
import pytest

from qinfer.testing import eventually
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.load import Clients
from tests.chaos.receiver import receiving
from tests.chaos.repository import write_models
from tests.chaos.verdict import Ledger, judge_flushed, leftovers

SECONDS = float(os.environ.get("CHAOS_SECONDS", "24")) / 10
"""Seconds of load between two losses."""
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
RECOVERED_WITHIN_S = 30.0

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 10 + 300)]


async def flush(cluster: Cluster) -> None:
    with cluster.redis() as client:
        client.flushall()


async def lose_the_volume(cluster: Cluster) -> None:
    """Redis is killed, and starts without its files."""
    process = cluster.broker.process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    for path in cluster.data.glob("redis/*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix in (".aof", ".rdb"):
            path.unlink()
    await asyncio.to_thread(cluster.broker.start)


async def test_redis_comes_back_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = write_models(tmp_path / "models")
    losses: list[float] = []
    recovered: list[float] = []
    async with (
        receiving(SEED) as receiver,
        running_cluster(tmp_path, tmp_path / "models", settings=receiver.settings) as cluster,
    ):
        await cluster.ready(names)
        starts = [member.starts for member in cluster.members]
        ledger = Ledger()
        clients = Clients(cluster.urls, ledger, SEED, receiver)
        clients.explain = cluster.holders
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(clients.run())
                for lose in (flush, lose_the_volume, flush):
                    await asyncio.sleep(SECONDS)
                    began_s = asyncio.get_running_loop().time()
                    await lose(cluster)
                    losses.append(asyncio.get_running_loop().time())
                    await _until_recovered(cluster, names)
                    recovered.append(asyncio.get_running_loop().time() - began_s)
                await asyncio.sleep(SECONDS)
                clients.stop()
            await cluster.quiet()
            await clients.read_all()
        finally:
            await clients.close()
        accepted, lost, problems = judge_flushed(ledger, losses)
        problems += leftovers(cluster.keys())
        if [member.starts for member in cluster.members] != starts:
            problems.append(f"something was started again:\n{cluster.logs()}")
        errors = cluster.errors()
        sys.stdout.write(f"refused, and tried again: {dict(ledger.refusals)}\nerrors logged: {dict(errors)}\n")

    line = f"accepted={accepted} lost_by_flush={lost} wrong={len(problems)} recovered_s={max(recovered):.1f}"
    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {line}\n")
    assert problems == [], line
    assert errors["Redis has lost its data; this gateway restores the part that it knows"] >= len(cluster.urls)


async def _until_recovered(cluster: Cluster, names: tuple[str, ...]) -> None:
    """Waits until what was lost is written again and every gateway is ready."""
    async with httpx.AsyncClient(timeout=5.0) as client:

        async def is_recovered() -> bool:
            await asyncio.sleep(0.05)  # gateways are asked
            with cluster.redis() as redis, contextlib.suppress(httpx.TransportError):
                if {name.decode() for name in redis.hkeys("qinfer:desired")} >= set(names):
                    replies = [await client.get(f"{url}/v2/health/ready") for url in cluster.urls]
                    return all(reply.status_code == 200 for reply in replies)
            return False

        await eventually(is_recovered, RECOVERED_WITHIN_S, "gateways that are ready again")
