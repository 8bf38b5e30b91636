"""Outages of a whole installation, and what an operator sees of each: `qinfer status --json`, and Prometheus' alerts.

The installation has its workers from `qinfer autoscale`, and bulk jobs write to a small disk of their own.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import yaml

from qinfer.testing import eventually
from tests.chaos.cluster import Cluster
from tests.chaos.member import Member
from tests.e2e.conftest import clean_environment
from tests.support.deploy.deployments import DEPLOY
from tests.support.small_disk import SmallDisk

HANG_S = 150.0
"""Limit of the model that hangs for long: half of it, and then the alert's `for`, pass before."""
STUCK, SHAKY = "stuck", "shaky"
"""Models that hang when they are told to: until the limit above, and for a moment."""

MINUTE_S = 60.0
"""Within it `status` names an outage; and so much later than its `for` an alert fires at most: two scrapes of 15 s, two
evaluations of the rules."""
_OVER_WITHIN_S = 180.0
_QUIET_WITHIN_S = 900.0
_LOOK_EVERY_S = 1.0


class Site:
    """The installation.

    Args:
        cluster: Gateways, a bulk worker and Redis.
        scaler: `qinfer autoscale`.
        disk: Where bulk jobs write to.
        marks: The folder of the files that make models hang.

    Attributes:
        kills: Workers that were killed.
        is_spared: No more are to be killed now.
    """

    def __init__(self, cluster: Cluster, scaler: Member, disk: SmallDisk, marks: Path) -> None:
        self.cluster, self.scaler, self.disk, self.marks = cluster, scaler, disk, marks
        self.kills = 0
        self.is_spared = False

    def workers(self) -> list[psutil.Process]:
        """Returns the workers that run now."""
        children = psutil.Process(self.scaler.pid).children() if self.scaler.runs else []
        return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def kill(self, worker: psutil.Process) -> None:
        """SIGKILL."""
        worker.kill()
        self.kills += 1

    def mark(self, model: str) -> Path:
        """Returns the file that makes a model hang."""
        return self.marks / f"{model}-hangs"


class Outage(NamedTuple):
    """An outage.

    Attributes:
        alert: The alert whose job it is.
        holds_after_s: Seconds from its beginning until the alert's expression holds.
        begin: Brings it about.
        end: Mends it.
        is_named: Tells by the document of `qinfer status --json` whether that names it.
        model: The model that the alert must name, since others may have the same alert; empty = it is about no model.
    """

    alert: str
    holds_after_s: float
    begin: Callable[[Site], Awaitable[None]]
    end: Callable[[Site], Awaitable[None]]
    is_named: Callable[[Any], bool]
    model: str = ""

    def is_in(self, alerts: set[tuple[str, str]]) -> bool:
        """Tells whether its alert is among those that fire."""
        return any(name == self.alert and self.model in ("", model) for name, model in alerts)


async def _hang(site: Site) -> None:
    site.is_spared = True
    site.mark(STUCK).touch()
    await eventually(lambda: not site.mark(STUCK).exists(), _OVER_WITHIN_S, "an execution that hangs")


async def _wait_for_limit(site: Site) -> None:
    """Does nothing: the limit ends the execution."""


async def _fill_disk(site: Site) -> None:
    await asyncio.to_thread(site.disk.fill)


async def _make_room(site: Site) -> None:
    site.disk.make_room()


async def _kill_redis(site: Site) -> None:
    process = site.cluster.broker.process
    assert process is not None
    process.kill()
    await asyncio.to_thread(process.wait, 30)


async def _start_redis(site: Site) -> None:
    await asyncio.to_thread(site.cluster.broker.start)


async def _kill_workers(site: Site) -> None:
    site.is_spared = True
    site.scaler.send(signal.SIGSTOP)  # it would start others
    for worker in site.workers():
        site.kill(worker)


async def _wake_scaler(site: Site) -> None:
    site.scaler.send(signal.SIGCONT)


OUTAGES = {
    "a model hangs": Outage(
        "QinferExecutionLate",
        HANG_S / 2,
        _hang,
        _wait_for_limit,
        lambda seen: any(row["model"] == STUCK for worker in seen.get("workers", ()) for row in worker["long"]),
        STUCK,
    ),
    "the disk of jobs is full": Outage(
        "QinferJobPutOff", 30.0, _fill_disk, _make_room, lambda seen: "no space left" in str(seen.get("waiting_jobs"))
    ),
    "Redis is gone": Outage(
        "QinferStoreDown",
        0.0,
        _kill_redis,
        _start_redis,
        lambda seen: "error" in seen and seen["error"]["code"] == "broker_unavailable",
    ),
    "no worker is left": Outage(
        "QinferWorkersGone", 5.0, _kill_workers, _wake_scaler, lambda seen: "workers" in seen and not seen["workers"]
    ),
}


class Operator:
    """Looks at the installation, by `qinfer status --watch --json` and by Prometheus.

    Args:
        redis_url: Where Redis is.
        prometheus: The port of Prometheus.

    Attributes:
        seen: The latest document of status, or of its error; `None` = there is none since it was set to that.
    """

    def __init__(self, redis_url: str, prometheus: int) -> None:
        words = ("status", "--watch", "--interval", "1", "--json", "--redis", redis_url)
        self._status = (sys.executable, "-m", "qinfer.cli.main", *words)
        self._alerts = f"http://127.0.0.1:{prometheus}/api/v1/alerts"
        self.seen: Any = None

    async def run(self) -> None:
        """Reads what status prints until cancelled."""
        process = await asyncio.create_subprocess_exec(
            *self._status,
            env=clean_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=2**24,
        )
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self.seen = json.loads(line)
        finally:
            process.kill()
            await process.wait()

    async def firing(self) -> set[tuple[str, str]]:
        """Returns the alerts that fire: the name of each, and the model that it names."""
        async with httpx.AsyncClient(timeout=30.0) as client:
            found = (await client.get(self._alerts)).json()["data"]["alerts"]
        labels = [alert["labels"] for alert in found if alert["state"] == "firing"]
        return {(of["alertname"], of.get("model", "")) for of in labels}


class Suffered(NamedTuple):
    """An outage that is over: when it was named, in seconds from its beginning; `None` = never.

    Attributes:
        name: Which.
        status_s: When `status` named it.
        alert_s: When the alert fired.
        lasted_s: How long it lasted.
        over_s: How long `status` named it after that; `None` = too long.
    """

    name: str
    status_s: float | None
    alert_s: float | None
    lasted_s: float
    over_s: float | None

    @property
    def line(self) -> str:
        """The times, for people."""
        alert = OUTAGES[self.name].alert
        words = [f"{self.name} for {self.lasted_s:.0f} s:", f"status after {_told(self.status_s)},"]
        return " ".join([*words, f"{alert} after {_told(self.alert_s)}", f"(due by {due_s(self.name):.0f} s)"])

    @property
    def problems(self) -> list[str]:
        """The problems that were found."""
        found = []
        if self.status_s is None or self.status_s > MINUTE_S:
            found.append(f"{self.line}: status names it too late")
        if self.alert_s is None and self.lasted_s >= due_s(self.name):
            found.append(f"{self.line}: the alert does not fire")
        if self.over_s is None:
            found.append(f"{self.line}: status still names it {_OVER_WITHIN_S:.0f} s after it was mended")
        return found


def _told(seconds: float | None) -> str:
    return "(never)" if seconds is None else f"{seconds:.0f} s"


def due_s(name: str) -> float:
    """Returns after how many seconds of an outage its alert fires at the latest."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules" / "alerts.yml").read_text())["groups"]
    (wait,) = (rule["for"] for group in groups for rule in group["rules"] if rule["alert"] == OUTAGES[name].alert)
    for_s = int(wait[:-1]) * {"s": 1, "m": 60}[wait[-1]]
    return OUTAGES[name].holds_after_s + for_s + MINUTE_S


async def suffer(site: Site, operator: Operator, name: str, most_s: float) -> Suffered:
    """Brings an outage about, and mends it when it was named, when its alert was due, or after `most_s`."""
    outage, loop = OUTAGES[name], asyncio.get_running_loop()

    async def is_silent() -> bool:
        await asyncio.sleep(_LOOK_EVERY_S)
        return not outage.is_in(await operator.firing())

    await eventually(is_silent, _QUIET_WITHIN_S, f"{outage.alert} to be silent before")
    await outage.begin(site)
    begin_s, operator.seen = loop.time(), None
    status_s: float | None = None
    alert_s: float | None = None
    while None in (status_s, alert_s) and loop.time() - begin_s < min(due_s(name), most_s):
        if status_s is None and operator.seen is not None and outage.is_named(operator.seen):
            status_s = loop.time() - begin_s
        if alert_s is None and outage.is_in(await operator.firing()):
            alert_s = loop.time() - begin_s
        await asyncio.sleep(_LOOK_EVERY_S)
    await outage.end(site)
    mended_s, operator.seen = loop.time(), None

    async def is_over() -> bool:
        await asyncio.sleep(_LOOK_EVERY_S)
        return operator.seen is not None and "workers" in operator.seen and not outage.is_named(operator.seen)

    over_s = None
    try:
        await eventually(is_over, _OVER_WITHIN_S, "status without it")
        over_s = loop.time() - mended_s
    except TimeoutError:
        pass
    site.is_spared = False
    return Suffered(name, status_s, alert_s, mended_s - begin_s, over_s)
