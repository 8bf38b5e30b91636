"""Records what `qinfer autoscale` sees of a real queue and real workers, under arrivals of a shape.

    python -m tests.support.record_scaling burst tests/data/scaling/burst.jsonl

Everything is a process of its own: Redis, a gateway, the autoscaler and its workers, on this machine. The model takes a
tenth of a second for each request. When a request is sent is given by the shape, at random around its rate (Poisson);
what is recorded is what the queue and the workers did.
"""

import argparse
import asyncio
import math
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from qinfer.testing import wait_until
from tests.chaos.repository import write_stub
from tests.e2e.conftest import clean_environment
from tests.support.servers.servers import RedisServer, free_port, system_redis

ROW_S = 0.1
MODEL = "slow"
BODY = {
    "inputs": [{"name": name, "shape": [1, 1], "datatype": "FP32", "data": [1.0]} for name in ("a", "b")],
}
POLICY = ("--max", "4", "--target-s", "3", "--down-after-s", "10", "--idle-s", "15", "--cooldown-s", "5")


def burst(second: float) -> float:
    """A trickle, twenty seconds of much, a trickle, nothing."""
    if second < 30:
        return 1.0
    if second < 50:
        return 30.0
    return 1.0 if second < 90 else 0.0


def ramp(second: float) -> float:
    """Up to three workers' worth within 75 seconds, and down again, and nothing."""
    return max(30.0 * (1 - abs(second - 75) / 75), 0.0)


def diurnal(second: float) -> float:
    """A day within 160 seconds: from next to nothing to almost three workers' worth and back."""
    return 14.0 - 13.5 * math.cos(2 * math.pi * second / 160) if second < 160 else 0.0


SHAPES: dict[str, tuple[Callable[[float], float], float]] = {
    "burst": (burst, 130),
    "ramp": (ramp, 180),
    "diurnal": (diurnal, 175),
}
"""The rate at each second, and for how many seconds it is recorded."""


async def send(url: str, rate: Callable[[float], float], lasts_s: float, seed: int) -> None:
    """Sends requests for so long; all must be answered."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    begin_s, second, most = loop.time(), 0.0, 40.0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as tasks:
        while (second := second + rng.expovariate(most)) < lasts_s:
            if rng.random() * most < rate(second):
                await asyncio.sleep(max(begin_s + second - loop.time(), 0))
                tasks.create_task(_ask(client, url))
        await asyncio.sleep(max(begin_s + lasts_s - loop.time(), 0))


async def _ask(client: httpx.AsyncClient, url: str) -> None:
    (await client.post(url, json=BODY)).raise_for_status()


@contextmanager
def program(directory: Path, env: dict[str, str], *argv: str) -> Iterator[None]:
    """Runs a program of qinfer, which is asked to stop at the end."""
    with (directory / f"{argv[0]}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", *argv], env=env, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_ready(url: str) -> bool:
    """Tells whether the gateway takes requests."""
    try:
        return httpx.get(f"{url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def record(shape: str, path: Path, seed: int = 1) -> None:
    """Records one shape."""
    rate, lasts_s = SHAPES[shape]
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        directory = Path(place)
        write_stub(directory / "models", MODEL, max_batch_size=1, delay_s=ROW_S)
        redis = stack.enter_context(RedisServer(system_redis(), directory, "--maxmemory-policy", "noeviction"))
        port = free_port()
        env = clean_environment() | {
            "QINFER_REDIS__URL": redis.url,
            "QINFER_REPOSITORY__PATH": str(directory / "models"),
            "QINFER_REPOSITORY__MIN_WORKERS": "0",
            "QINFER_HTTP__PORT": str(port),
            "QINFER_GRPC__ENABLED": "false",
            "QINFER_METRICS__ENABLED": "false",
        }
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(program(directory, env, "qinfer_api"))
        wait_until(lambda: is_ready(url), 60, "the gateway")
        stack.enter_context(
            program(directory, env, "qinfer.cli.main", "autoscale", *POLICY, "--record", str(path.resolve()))
        )
        asyncio.run(send(f"{url}/v2/models/{MODEL}/infer", rate, lasts_s, seed))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Record a trace for the tests of the scaling policy.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    record(given.shape, given.file)


if __name__ == "__main__":
    main()
