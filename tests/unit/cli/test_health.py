"""What `qinfer healthcheck` decides, and how it ends."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qinfer.cli.checks.healthcheck import judge
from qinfer.cli.main import app
from qinfer.models.state import State, VersionState, WorkerRecord
from tests.support.servers.servers import free_port


def worker(state: State = State.READY, host: str = "here", *, draining: bool = False) -> WorkerRecord:
    models = {"m": {1: VersionState(state, 1)}}
    return WorkerRecord(id=f"{host}-1", started_at=0.0, models=models, host=host, draining=draining)


@pytest.mark.parametrize(
    ("records", "ready", "strict", "is_healthy"),
    [
        ([worker()], False, True, True),
        ([worker()], True, True, True),
        ([worker(host="there")], False, True, False),
        ([], False, True, False),
        ([worker(State.LOADING)], False, True, True),
        ([worker(State.LOADING)], True, True, False),
        ([worker(State.UNAVAILABLE)], True, True, False),
        ([worker(State.UNAVAILABLE)], True, False, True),
        ([worker(draining=True)], False, True, True),
        ([worker(draining=True)], True, True, False),
        ([worker(State.LOADING), worker()], True, True, True),
    ],
)
def test_a_worker_is_judged_by_its_heartbeat(
    records: list[WorkerRecord], *, ready: bool, strict: bool, is_healthy: bool
) -> None:
    """Alive = one of this host beats; ready = it has its models, and does not drain."""
    assert judge(records, "here", ready=ready, strict=strict).is_healthy is is_healthy


@pytest.mark.parametrize("program", ["worker", "bulk", "bridge"])
def test_a_redis_that_is_away_makes_nothing_restart(program: str) -> None:
    """A restart would not bring it back; but whoever asks for readiness is told."""
    url = f"redis://127.0.0.1:{free_port()}"
    alive = CliRunner().invoke(app, ["healthcheck", program, "--redis", url, "--json"])
    ready = CliRunner().invoke(app, ["healthcheck", program, "--redis", url, "--ready"])

    assert (alive.exit_code, json.loads(alive.stdout)["healthy"]) == (0, True)
    assert (ready.exit_code, ready.stdout) == (1, "")
    assert "Redis can't be reached" in ready.stderr


def test_a_gateway_that_is_away_is_not_well(tmp_path: Path) -> None:
    """Exit code 1, and where it was looked for; whatever else listens there is no gateway either."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        silent = CliRunner().invoke(app, ["healthcheck", "gateway", "--url", url, "--timeout", "0.2"])
    away = CliRunner().invoke(app, ["healthcheck", "gateway", "--url", url])

    assert (silent.exit_code, away.exit_code) == (1, 1)
    assert "no gateway answers at 127.0.0.1" in away.stderr
