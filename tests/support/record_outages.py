"""Records what a real Prometheus with the shipped rules sees of an outage, for the tests of the rules.

    python -m tests.support.record_outages workers_killed tests/data/outages/workers_killed.json

Everything is a process of its own on this machine: Redis, two gateways, two workers, Prometheus (`scripts/tools
promtool`), and callers. After a while of health the outage is brought about; what is recorded are the series that the
rules read, sample by sample, and how many seconds after it each alert fired.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from qinfer.testing import wait_until
from tests.chaos.repository import write_stub
from tests.e2e.conftest import EVERY_MODEL, clean_environment
from tests.support.deploy.deployments import DEPLOY, TOOLS
from tests.support.deploy.promql import uses_of
from tests.support.servers.servers import RedisServer, free_port, system_redis

STEP_S = 15
"""Seconds between two scrapes, as in deploy/prometheus/prometheus.yml."""
HEALTHY_S = 90.0
MOST_STEPS = 66
"""Samples of each series that are kept, for the tests: of a longer recording its beginning. All of it is looked at."""
MODELS = ("digits", "words")
RPS = 5.0
"""Requests a second of each model."""
BODY = {
    "inputs": [{"name": name, "shape": [1, 1], "datatype": "FP32", "data": [1.0]} for name in ("a", "b")],
}


class Scene:
    """A small installation under load, watched by Prometheus.

    Args:
        directory: For models, logs and data.
        stack: Ends what was started.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.models = directory / "models"
        self._directory, self._stack = directory, stack
        for name in MODELS:
            write_stub(self.models, name, delay_s=0.01)
        self.redis = stack.enter_context(RedisServer(system_redis(), directory, "--maxmemory-policy", "noeviction"))
        self._env = clean_environment() | {
            "QINFER_REDIS__URL": self.redis.url,
            "QINFER_REPOSITORY__PATH": str(self.models),
            "QINFER_REPOSITORY__CONTROL_MODE": "poll",
            "QINFER_REPOSITORY__POLL_S": "1",
            "QINFER_GRPC__ENABLED": "false",
        }
        self.workers = [self.worker() for _ in range(2)]
        self.gateways = [self.gateway(free_port(), free_port()) for _ in range(2)]
        self.prometheus = free_port()
        self._watch()

    def worker(self) -> subprocess.Popen[bytes]:
        """Starts a worker."""
        return self._start("qinfer_workers.inference", {})

    def gateway(self, port: int, metrics_port: int) -> "Gateway":
        """Starts a gateway, and waits until every model is ready."""
        ports = {"QINFER_HTTP__PORT": str(port), "QINFER_METRICS__PORT": str(metrics_port)}
        gateway = Gateway(f"http://127.0.0.1:{port}", metrics_port, self._start("qinfer_api", ports | EVERY_MODEL))
        wait_until(lambda: _answers(f"{gateway.url}/v2/health/ready"), 60, "a gateway")
        return gateway

    def _start(self, module: str, more: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._directory / f"{module}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module], env=self._env | more, stdout=log, stderr=log)
        self._stack.callback(_end, process)
        return process

    def _watch(self) -> None:
        """Starts Prometheus with the shipped configuration and rules, and the addresses of here."""
        shipped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        jobs = {job["job_name"]: job for job in shipped["scrape_configs"]}
        targets = [f"127.0.0.1:{gateway.metrics_port}" for gateway in self.gateways]
        jobs["qinfer-cluster"]["static_configs"] = [{"targets": targets[:1]}]
        del jobs["qinfer-gateways"]["dns_sd_configs"]
        jobs["qinfer-gateways"]["static_configs"] = [{"targets": targets}]
        shipped["scrape_configs"] = [jobs["qinfer-cluster"], jobs["qinfer-gateways"]]
        shutil.copytree(DEPLOY / "prometheus" / "rules", self._directory / "rules")
        file = self._directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(shipped))
        command = [str(TOOLS / "promtool" / "prometheus"), f"--config.file={file}"]
        command += [f"--storage.tsdb.path={self._directory / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{self.prometheus}"]
        with (self._directory / "prometheus.log").open("wb") as log:
            self._stack.callback(_end, subprocess.Popen(command, stdout=log, stderr=log))
        wait_until(lambda: _answers(f"http://127.0.0.1:{self.prometheus}/-/ready"), 60, "Prometheus")


class Gateway(NamedTuple):
    """A gateway that runs."""

    url: str
    metrics_port: int
    process: subprocess.Popen[bytes]


async def kill_workers(scene: Scene) -> None:
    """All workers are killed, and none starts again."""
    for worker in scene.workers:
        worker.kill()


async def break_model(scene: Scene) -> None:
    """A model whose file no runtime can read comes into the repository; callers ask for it."""
    (scene.models / "broken" / "1").mkdir(parents=True)
    (scene.models / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")


async def fail_rollout(scene: Scene) -> None:
    """A new version cannot be loaded; the old one serves on."""
    _rewrite(scene.models / "digits" / "config.pbtxt", '"add"', '"no-such-mode"')


async def slow_down(scene: Scene) -> None:
    """A new version takes two seconds."""
    _rewrite(scene.models / "digits" / "config.pbtxt", '"0.01"', '"2.0"')


async def fill_redis(scene: Scene) -> None:
    """Redis has no memory left."""
    with scene.redis.client() as client:
        client.config_set("maxmemory", "1mb")


async def kill_redis(scene: Scene) -> None:
    """Redis is gone, and does not come back."""
    scene.redis.process.kill()


async def roll(scene: Scene) -> None:
    """No outage: every ten minutes all workers and gateways are replaced, and one worker more comes and goes."""
    for _ in range(6):
        more = scene.worker()
        for number, worker in enumerate(scene.workers):
            await asyncio.sleep(90)
            new = scene.worker()
            await asyncio.sleep(15)
            worker.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait)
            scene.workers[number] = new
        for number in range(len(scene.gateways)):
            await asyncio.sleep(120)
            await _replace(scene, number)
        more.send_signal(signal.SIGTERM)


async def _replace(scene: Scene, number: int) -> None:
    """Replaces a gateway as behind a load balancer: callers go to the others first."""
    gateway = scene.gateways.pop(number)
    gateway.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(gateway.process.wait)
    port = int(gateway.url.rpartition(":")[2])
    scene.gateways.insert(number, await asyncio.to_thread(scene.gateway, port, gateway.metrics_port))


class Outage(NamedTuple):
    """An outage: what brings it about, for how long it is watched, and what callers ask for."""

    begin: Callable[[Scene], Awaitable[None]]
    lasts_s: float = 240.0
    models: tuple[str, ...] = MODELS


OUTAGES = {
    "workers_killed": Outage(kill_workers),
    "load_failure": Outage(break_model, models=(*MODELS, "broken")),
    "failed_rollout": Outage(fail_rollout),
    "slow_model": Outage(slow_down, 480.0),
    "redis_full": Outage(fill_redis),
    "redis_gone": Outage(kill_redis),
    "healthy": Outage(roll, 3600.0),
}


@asynccontextmanager
async def callers(scene: Scene, models: tuple[str, ...]) -> AsyncIterator[list[int]]:
    """Asks for each model again and again, of each gateway in turn, until the block ends.

    Yields:
        The status of each answer; 0 = there was none.
    """
    statuses: list[int] = []
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(number: int, model: str) -> None:
            url = scene.gateways[number % len(scene.gateways)].url
            try:
                statuses.append((await client.post(f"{url}/v2/models/{model}/infer", json=BODY)).status_code)
            except httpx.TransportError:
                statuses.append(0)

        async def ask_on() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in range(1_000_000):
                    for model in models:
                        tasks.create_task(ask(number, model))
                    await asyncio.sleep(1 / RPS)

        asking = asyncio.create_task(ask_on())
        try:
            yield statuses
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking


async def watch(scene: Scene, outage: Outage) -> tuple[float, float, list[int]]:
    """Lets callers ask, brings the outage about; returns when callers began, when it was, and their statuses."""
    began_s = time.time()
    async with callers(scene, MODELS) as healthy:
        await asyncio.sleep(HEALTHY_S)
    async with callers(scene, outage.models) as statuses:
        outage_s = time.time()
        lasting = asyncio.create_task(asyncio.sleep(outage.lasts_s))
        await outage.begin(scene)
        await lasting
    if set(healthy) != {200}:
        raise RuntimeError(f"callers were not content before the outage: {sorted(set(healthy))}")
    return began_s, outage_s, statuses


def record(name: str, path: Path) -> None:
    """Records one outage."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        scene = Scene(Path(place), stack)
        began_s, outage_s, statuses = asyncio.run(watch(scene, OUTAGES[name]))
        recorded = Recorded(scene.prometheus, began_s, time.time())
        found = {
            "step_s": STEP_S,
            "outage_step": round((outage_s - began_s) / STEP_S),
            "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
            "fired_after_s": recorded.fired(outage_s),
            "series": recorded.series(),
        }
    path.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(f"{name}: {found['statuses']} {found['fired_after_s']}\n")


class Recorded:
    """What Prometheus has of a time.

    Args:
        port: Prometheus' port.
        began_s: The beginning of the time.
        ended_s: Its end.
    """

    def __init__(self, port: int, began_s: float, ended_s: float) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query_range"
        self._began_s, self._ended_s = began_s, ended_s

    def fired(self, outage_s: float) -> dict[str, int]:
        """Returns alert → seconds after the outage at which it began to fire."""
        ranges = self._ask('min by (alertname) (ALERTS{alertstate="firing"})', 1)
        fired = {each["metric"]["alertname"]: round(each["values"][0][0] - outage_s) for each in ranges}
        return dict(sorted(fired.items(), key=lambda pair: pair[1]))

    def series(self) -> dict[str, str]:
        """Returns the series that the rules read, as promtool's tests write them."""
        steps = min(int((self._ended_s - self._began_s) / STEP_S) + 1, MOST_STEPS)
        names = sorted(_read_by_rules())
        found = {}
        for each in self._ask(f'{{__name__=~"{"|".join(names)}"}}', STEP_S):
            labels = {key: text for key, text in each["metric"].items() if key not in ("__name__", "instance")}
            labels["instance"] = each["metric"]["instance"].replace("127.0.0.1", "gateway")
            inside = ",".join(f'{key}="{text}"' for key, text in sorted(labels.items()))
            values = {round((at_s - self._began_s) / STEP_S): value for at_s, value in each["values"]}
            samples = [values.get(step) for step in range(steps)]
            if any(samples):
                found[f"{each['metric']['__name__']}{{{inside}}}"] = _notation(samples)
        return dict(sorted(found.items()))

    def _ask(self, query: str, step_s: int) -> list[dict[str, Any]]:
        given = {"query": query, "start": self._began_s, "end": self._ended_s, "step": step_s}
        reply = httpx.post(self._url, data=given, timeout=60)
        reply.raise_for_status()
        return list(reply.json()["data"]["result"])


def _read_by_rules() -> Iterator[str]:
    """Yields the names of the series that the rules read, but for those that they record."""
    for file in (DEPLOY / "prometheus" / "rules").iterdir():
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                yield from (use.name for use in uses_of(rule["expr"]) if ":" not in use.name and use.name != "ALERTS")


def _notation(values: list[str | None]) -> str:
    """Returns samples in the notation of promtool's tests: what ends is marked, as Prometheus marks it."""
    words: list[str] = []
    previous: str | None = None
    for value in values:
        if value is None:
            words.append("_" if previous is None else "stale")
        elif words and words[-1].partition("x")[0] == value:
            words[-1] = f"{value}x{int(words[-1].partition('x')[2] or 0) + 1}"
        else:
            words.append(value)
        previous = value
    return " ".join(words)


def _rewrite(file: Path, old: str, new: str) -> None:
    """Replaces a part of a model's configuration, at once."""
    after = file.with_suffix(".new")
    after.write_text(file.read_text().replace(old, new))
    after.rename(file)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that this one started, unless it has ended."""
    process.kill()
    process.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Record an outage for the tests of the alerts.")
    parser.add_argument("outage", choices=OUTAGES)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    record(given.outage, given.file)


if __name__ == "__main__":
    main()
