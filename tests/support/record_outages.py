"""Records what a real Prometheus with the shipped rules sees of an outage, for the tests of the rules.

    python -m tests.support.record_outages workers_killed tests/data/outages/workers_killed.json

Everything is a process of its own on this machine: Redis, two gateways, two workers, Prometheus (`scripts/tools
promtool`), and callers; for some outages a bulk worker or a bridge, a replica or a cluster, too. After a
while of health the outage is brought about; what is recorded are the series that the rules read, sample by sample, and
how many seconds after it each alert fired.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.deploy.deployments import DEPLOY
from tests.support.deploy.promql import uses_of
from tests.support.outages.kinds import OUTAGES, Outage
from tests.support.outages.scene import MODELS, Scene

STEP_S = 15
"""Seconds between two scrapes, as in deploy/prometheus/prometheus.yml."""
HEALTHY_S = 90.0
MOST_STEPS = 90
"""Samples of each series that are kept, for the tests: of a longer recording its beginning. All of it is looked at."""
RPS = 5.0
"""Requests a second of each model."""
BODY = {
    "inputs": [{"name": name, "shape": [1, 1], "datatype": "FP32", "data": [1.0]} for name in ("a", "b")],
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
    async with outage.beside(scene):
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
        scene = Scene(Path(place), stack, is_cluster=OUTAGES[name].is_cluster)
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


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Record an outage for the tests of the alerts.")
    parser.add_argument("outage", choices=OUTAGES)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    record(given.outage, given.file)


if __name__ == "__main__":
    main()
