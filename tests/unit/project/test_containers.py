"""`scripts/containers.py` without an engine: a stub on PATH that answers as docker or podman does."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import containers
from scripts.containers import Buildah, Config, Docker, ImageFailed, find_engine

PROGRAM = {"User": "10001:10001", "Entrypoint": ["/usr/bin/tini", "--"], "Cmd": ["python", "-m", "qinfer_api"]}
CHECK = {"Test": ["CMD", "qinfer", "healthcheck", "gateway"]}
CONFIG = Config(
    user="10001:10001",
    command=["/usr/bin/tini", "--", "python", "-m", "qinfer_api"],
    health=["qinfer", "healthcheck", "gateway"],
)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a program that notes how it was called, prints something, and ends with a status."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin")

    def make(name: str, printed: object = "", status: int = 0) -> Path:
        (tmp_path / f"{name}.out").write_text(printed if isinstance(printed, str) else json.dumps(printed))
        calls = tmp_path / f"{name}.calls"
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncat {tmp_path}/{name}.out\nexit {status}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return calls

    return make


def test_an_engine_that_does_not_work_is_passed_over(stub: Callable[..., Path]) -> None:
    """Such as docker without its daemon."""
    stub("docker", status=1)
    stub("podman")

    assert isinstance(find_engine(), Docker)
    with pytest.raises(ImageFailed, match="no docker works here"):
        find_engine("docker")


@pytest.mark.parametrize(
    "found",
    [{"Config": {**PROGRAM, "Healthcheck": CHECK}}, {"Config": PROGRAM, "Healthcheck": CHECK}],
    ids=["docker", "podman"],
)
def test_an_image_says_how_it_runs(stub: Callable[..., Path], found: dict[str, object]) -> None:
    stub("docker", [{**found, "Size": 661_727_269}])

    assert Docker("docker").config("x") == CONFIG
    assert Docker("docker").size("x") == "662 MB"


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_a_target_is_built_with_its_health_check(stub: Callable[..., Path], program: str) -> None:
    """The default format of podman would lose it."""
    calls = stub(program)

    assert Docker(program).build("gateway") == "qinfer-gateway:test"

    words = calls.read_text().split()
    assert words[words.index("--target") + 1] == "gateway"
    assert ("--format" in words) == (program == "podman")


def test_a_container_is_started_asked_and_ended(stub: Callable[..., Path]) -> None:
    calls = stub("docker", "7")
    container = Docker("docker").start("image", ["sleep", "1"], {"A": "b"}, ["/x:/x:ro"])

    assert (container.uid(), container.stop(45.0)) == (7, 7)

    container.remove()
    assert calls.read_text().splitlines() == [
        "run --detach --network host --no-healthcheck --env A=b --volume /x:/x:ro image sleep 1",
        "exec 7 id -u",
        "stop --time 45 7",
        "inspect --format {{.State.ExitCode}} 7",
        "rm --force 7",
    ]


def test_a_base_image_that_is_made_here_has_no_digest(
    stub: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub("buildah")
    copy = f'while [ "$1" != -f ]; do shift; done; cp "$2" {tmp_path}/built'
    (tmp_path / "buildah").write_text(f'#!/bin/sh\n[ "$1" != build ] || {{ {copy}; }}\n')
    (tmp_path / "pinned").write_text(f"FROM python:3.11.15-slim-bookworm@sha256:{'1' * 64} AS wheel\n")
    monkeypatch.setattr(containers, "DOCKERFILE", tmp_path / "pinned")

    Buildah().build("gateway")

    assert (tmp_path / "built").read_text() == "FROM python:3.11.15-slim-bookworm AS wheel\n"


def test_the_mirror_is_that_of_apt(stub: Callable[..., Path]) -> None:
    """Not its security updates, nor another vendor's packages."""
    lines = ["security/debian-security bookworm-security", "vendor/apt bookworm", "mirror/debian/ bookworm"]
    stub("apt-get", "".join(f"http://{line}\n" for line in lines))

    assert containers._mirror() == "http://mirror/debian/"


def test_processes_below_a_process_are_found() -> None:
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    with shell:
        sleeper = int(shell.stdout.readline())

        assert [*containers._descendants(shell.pid)] == [sleeper]

        os.kill(sleeper, 15)
