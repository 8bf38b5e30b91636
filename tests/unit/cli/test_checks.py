"""What `qinfer doctor` makes of what it is told: pure findings."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from qinfer.cli.checks.all import (
    HIDDEN,
    Runtime,
    examine_gpus,
    examine_memory,
    examine_models,
    examine_sharing,
    examine_workers,
    load_runtime,
    without,
)
from qinfer.cli.checks.doctor import Finding, Severity, problem
from qinfer.cli.checks.redis_server import NodeReport, examine_node
from qinfer.core.settings import RedisSettings, Settings
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.segments.memory import OwnMemory
from qinfer.segments.shelf import Shelf

INFO = {"redis_version": "7.4.1", "used_memory": 10, "maxmemory": 100, "redis_mode": "standalone", "role": "master"}
BEHIND = {"ip": "10.0.0.2", "port": 6379, "state": "online", "offset": 0, "lag": 30}
CONFIG = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
WORKER = WorkerRecord(id="w1", started_at=0.0, models={"m": {1: VersionState(State.READY, 1)}})


def levels(findings: "list[Finding]") -> dict[str, Severity]:
    return {finding.subject: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("info", "config", "settings", "subject", "level"),
    [
        ({}, {}, {}, "eviction", Severity.OK),
        ({}, {}, {}, "durability", Severity.OK),
        ({}, {}, {}, "memory of Redis", Severity.OK),
        ({"redis_version": "6.0.9"}, {}, {}, "Redis version", Severity.PROBLEM),
        ({"redis_version": "10.0.1"}, {}, {}, "Redis version", Severity.OK),
        ({"used_memory": 85}, {}, {}, "memory of Redis", Severity.WARNING),
        ({"used_memory": 99}, {}, {}, "memory of Redis", Severity.PROBLEM),
        ({"maxmemory": 0, "total_system_memory": 100}, {}, {}, "memory of Redis", Severity.WARNING),
        ({"role": "slave"}, {}, {}, "Redis role", Severity.PROBLEM),
        ({}, {}, {"cluster": True}, "Redis mode", Severity.PROBLEM),
        ({}, {}, {"min_replicas": 1}, "Redis replicas", Severity.PROBLEM),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, {}, {}, "files of Redis", Severity.PROBLEM),
        ({"aof_last_bgrewrite_status": "err"}, {}, {}, "files of Redis", Severity.WARNING),
        ({"rdb_last_bgsave_status": "err"}, {}, {}, "files of Redis", Severity.WARNING),
        ({"connected_slaves": 1, "slave0": BEHIND}, {}, {"min_replicas": 1}, "Redis replicas", Severity.WARNING),
        ({}, {"maxmemory-policy": "allkeys-lru"}, {}, "eviction", Severity.PROBLEM),
        ({}, {"appendonly": "no"}, {}, "durability", Severity.WARNING),
        ({}, {"appendonly": "no"}, {"durability": "always"}, "durability", Severity.PROBLEM),
        ({"redis_version": "7.0.1"}, {}, {"durability": "always"}, "durability", Severity.PROBLEM),
        ({"redis_version": "7.2.0"}, {}, {"durability": "always"}, "durability", Severity.OK),
    ],
)
def test_a_node_is_judged(
    info: dict[str, object], config: dict[str, str], settings: dict[str, object], subject: str, level: Severity
) -> None:
    """As the programs themselves would at their start; and whatever is wrong comes with a remedy."""
    wanted = RedisSettings().model_copy(update=settings)
    findings = list(examine_node(NodeReport("h:1", INFO | info, CONFIG | config, 0.0), wanted))

    assert levels(findings)[subject] is level
    assert all(finding.remedy for finding in findings if finding.level is Severity.PROBLEM)


@pytest.mark.parametrize(
    ("offset_s", "level"), [(0.1, Severity.OK), (-3.0, Severity.WARNING), (900.0, Severity.PROBLEM)]
)
def test_clocks_are_compared(offset_s: float, level: Severity) -> None:
    """Redis' with this machine's, and each worker's with Redis'."""
    node = levels(list(examine_node(NodeReport("h:1", INFO, CONFIG, offset_s), RedisSettings())))
    workers = [WORKER, msgspec.structs.replace(WORKER, id="w2", clock_offset_s=offset_s)]
    fleet = levels(list(examine_workers(workers, [], needs_bulk=False)))

    assert node["clock of Redis"] is level
    assert fleet.get("clock of a worker", Severity.OK) is level


def test_what_is_forbidden_is_said_not_to_be_checked() -> None:
    """Managed services forbid CONFIG, and sometimes INFO."""
    found = levels(list(examine_node(NodeReport("h:1", {}, {}, 0.0), RedisSettings())))

    assert (found["Redis"], found["Redis settings"]) == (Severity.WARNING, Severity.WARNING)


def test_eviction_is_checked_where_config_is_forbidden() -> None:
    """INFO names the policy, too."""
    found = levels(
        list(examine_node(NodeReport("h:1", INFO | {"maxmemory_policy": "volatile-lru"}, {}, 0.0), RedisSettings()))
    )

    assert (found["eviction"], found["Redis settings"]) == (Severity.PROBLEM, Severity.WARNING)


def test_workers_that_can_not_read_what_gateways_write_are_a_problem() -> None:
    """They must be upgraded first."""
    old = msgspec.structs.replace(WORKER, id="old", frame_versions=(0,))
    findings = list(examine_workers([WORKER, old], ["b@h"], needs_bulk=True))

    (frames,) = (finding for finding in findings if finding.subject == "frame versions")
    assert (frames.level, "old" in frames.text, "w1" in frames.text) == (Severity.PROBLEM, True, False)


def test_missing_workers_and_failed_models_are_named() -> None:
    """A model that no worker could load is a problem; without any worker it only waits."""
    desired, stored = {"m": DesiredState("m", 1)}, {"m": StoredModel("m", 1, "{}", (1,))}
    failed = msgspec.structs.replace(WORKER, models={"m": {1: VersionState(State.UNAVAILABLE, 1, "no file")}})

    nobody = levels(list(examine_workers([], [], needs_bulk=True)))
    (waits,) = examine_models(desired, stored, [])
    (broken,) = examine_models(desired, stored, [failed])

    assert nobody == {"workers": Severity.WARNING, "bulk workers": Severity.WARNING}
    assert (waits.level, broken.level) == (Severity.WARNING, Severity.PROBLEM)
    assert "no file" in broken.text


def test_secrets_are_hidden_wherever_they_are() -> None:
    """Also in what a driver has written."""
    (found,) = without(["geheim", ""], [problem("x", "AUTH geheim failed", "not geheim")])

    assert (found.text, found.remedy) == (f"AUTH {HIDDEN} failed", f"not {HIDDEN}")


def test_a_runtime_that_crashes_is_told_from_one_that_lacks_a_library() -> None:
    """Neither takes the check with it."""
    crash = load_runtime(Runtime("os", "x", "os.abort()"))
    lacks = load_runtime(Runtime("nothing_of_this_name", "x", "[]"))
    works = load_runtime(Runtime("sys", "x", "['CPU']"))

    assert "crashes (signal 6)" in crash.error
    assert "nothing_of_this_name" in lacks.error
    assert works == (("CPU",), "")


def test_the_checks_need_no_program() -> None:
    """Neither the gateway's nor the workers' packages are imported by them."""
    source = "import sys, qinfer.cli.checks.all; print([m for m in sys.modules if m in ('qinfer_api', 'torch')])"

    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        ("echo 'NVIDIA H100 80GB HBM3, 570.1, 5 MiB, 81559 MiB'", Severity.OK, "driver 570.1, 5 MiB of 81559 MiB used"),
        ("exit 9", Severity.PROBLEM, "nvidia0; nvidia-smi does not answer"),
    ],
)
def test_gpus_are_those_of_the_driver(
    answer: str, level: Severity, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    found = next(iter(examine_gpus(tmp_path)))

    assert (found.level, said in found.text) == (level, True)
    assert [each.text for each in examine_gpus(tmp_path / "nothing")] == ["none"]


def test_large_tensors_stay_in_memory_or_pass_through_redis(tmp_path: Path) -> None:
    """`qinfer doctor` says which, and what keeps gateways from it."""
    settings, directory = Settings(), tmp_path / "memory"
    (through,) = examine_memory(settings, tmp_path)
    directory.mkdir(mode=0o755)
    (refused,) = examine_memory(settings, tmp_path)
    directory.chmod(0o700)
    (kept,) = examine_memory(settings, tmp_path)

    assert (through.level, "pass through Redis" in through.text) == (Severity.OK, True)
    assert (refused.level, refused.remedy) == (Severity.PROBLEM, f"chmod 700 {directory}")
    assert (kept.level, "0 gateways and workers share" in kept.text) == (Severity.OK, True)


async def test_workers_that_do_not_share_the_memory_are_counted(tmp_path: Path) -> None:
    """One of another machine, or of an older qinfer, makes its gateways send all through Redis."""
    directory = tmp_path / "m"
    shelves = [Shelf(directory, OwnMemory(name, 2**20)) for name in ("gateway-a", "worker-a")]
    found = [list(examine_sharing(directory, workers, 0)) for workers in (1, 2)]
    (far,) = examine_sharing(directory, 2, 1)
    for shelf in shelves:
        shelf.close()

    assert found[0] == []
    assert [(one.level, one.text.startswith("1 of 2 live workers do not share")) for one in found[1]] == [
        (Severity.WARNING, True)
    ]
    assert (far.level, "over TCP from 1 processes" in far.text) == (Severity.OK, True)
    assert list(examine_sharing(tmp_path / "nothing", 2, 0)) == []
