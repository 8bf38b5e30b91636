"""What tracing does to the programs at their start: nothing where nobody wants it, an error where it can't be had."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.servers import RedisServer, system_redis

GATEWAY, WORKER = "qinfer_api", "qinfer_workers.inference"
STARTED = {GATEWAY: "gateway serving", WORKER: "worker started"}
WANTED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


def environment(tmp_path: Path, url: str, **variables: str) -> dict[str, str]:
    ours = ("QINFER_", "OTEL_")
    ports = {f"QINFER_{server}__PORT": "0" for server in ("HTTP", "GRPC", "METRICS")}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "QINFER_REDIS__URL": url,
        "QINFER_REPOSITORY__PATH": str(tmp_path / "models"),
        **ports,
        **variables,
    }


def run_until_started(program: str, *options: str, env: dict[str, str]) -> str:
    """Runs a program until it has started, drains it, and returns what it printed."""
    command = [sys.executable, *options, "-m", program]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        printed = ""
        for line in process.stderr:
            printed += line
            if STARTED[program] in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, printed
    return printed


@pytest.mark.long
@pytest.mark.parametrize("program", [GATEWAY, WORKER])
def test_untraced_programs_do_not_even_import_what_traces(tmp_path: Path, program: str) -> None:
    """Python itself tells what it imports; with traces, the same look finds it. Libraries may import other parts."""
    (tmp_path / "models").mkdir()
    with RedisServer(system_redis(), tmp_path) as redis:
        env = environment(tmp_path, redis.url)
        without = run_until_started(program, "-X", "importtime", env=env)
        traced = run_until_started(program, "-X", "importtime", env=env | WANTED)

    assert "qinfer.observe.tracing" in without
    for package in ("opentelemetry.sdk.trace", "opentelemetry.exporter"):
        assert (package in without, package in traced) == (False, True)


@pytest.mark.parametrize(("program", "code"), [pytest.param(GATEWAY, 2, marks=pytest.mark.long), (WORKER, 1)])
def test_a_missing_extra_is_named_at_the_start(tmp_path: Path, program: str, code: int) -> None:
    """A module that can't be imported stands for one that is not there."""
    (tmp_path / "models").mkdir()
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry.sdk.trace'] = None\n")
    with RedisServer(system_redis(), tmp_path) as redis:
        env = environment(tmp_path, redis.url, PYTHONPATH=str(tmp_path), **WANTED)
        command = [sys.executable, "-m", program]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)

    assert (ended.returncode, "pip install 'qinfer-ml[tracing]'" in ended.stderr) == (code, True), ended.stderr
