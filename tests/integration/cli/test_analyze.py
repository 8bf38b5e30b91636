"""`qinfer analyze` on a private server, killed in the middle."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from qinfer.cli.analyze.journal import FILE
from qinfer.testing import wait_until

QINFER = [sys.executable, "-m", "qinfer.cli.main"]
SMALL = ["--instances", "1,2", "--max-batch-size", "4", "--delay-ms", "0", "--concurrency", "1,4", "--threads", "1"]


pytestmark = pytest.mark.timeout(300)


def test_an_analysis_goes_on_after_a_kill(tmp_path: Path) -> None:
    """No server is left; what was measured before is not measured again; the winner is loadable, files are complete."""
    subprocess.run([*QINFER, "example", "digits", str(tmp_path)], check=True, capture_output=True)
    command = [
        *QINFER,
        "analyze",
        "digits",
        "--model-repository",
        str(tmp_path / "models"),
        "--window-s",
        "0.1",
        "--json",
    ]
    command += [*SMALL, "--output", str(tmp_path / "found")]
    journal = tmp_path / "found" / FILE

    def lines() -> list[str]:
        return journal.read_text().splitlines() if journal.exists() else []

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(lines()) > 3, 100.0, "three measurements")
        servers = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert servers
    wait_until(lambda: not any(map(_runs, servers)), 60.0, "the end of the private server")
    before = lines()[:4]

    second = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    answer = json.loads(second.stdout)
    assert lines()[: len(before)] == before
    assert "goes on after" in second.stderr
    assert answer["measurements"] == len(lines()) - 1
    assert answer["requests_per_s"] > 0
    assert (tmp_path / "found" / "report.html").read_text().startswith("<!doctype html>")
    assert 'name: "digits"' in (tmp_path / "found" / "config.pbtxt").read_text()
    assert os.path.getsize(tmp_path / "found" / "measurements.parquet") > 1000


def test_a_limit_that_nothing_keeps_is_an_error(tmp_path: Path) -> None:
    """Then there is no winner to apply."""
    subprocess.run([*QINFER, "example", "digits", str(tmp_path)], check=True, capture_output=True)
    command = [*QINFER, "analyze", "digits", "--model-repository", str(tmp_path / "models"), "--window-s", "0.1"]
    command += ["--p99-ms", "0.0001", "--output", str(tmp_path / "found"), "--json"]
    command += ["--instances", "1", "--max-batch-size", "4", "--delay-ms", "0", "--concurrency", "1", "--threads", "1"]

    refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert refused.returncode == 1
    assert "no configuration keeps the limits" in json.loads(refused.stdout)["error"]["message"]
    assert (tmp_path / "found" / "report.html").exists()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
