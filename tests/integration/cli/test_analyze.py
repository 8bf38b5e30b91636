"""`qinfer analyze` on a private server, killed in the middle."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qinfer.cli.analyze.journal import FILE
from qinfer.testing import wait_until

QINFER = [sys.executable, "-m", "qinfer.cli.main"]
SMALL = ["--instances", "1,2", "--max-batch-size", "4", "--delay-ms", "0", "--concurrency", "1,4", "--threads", "1"]


pytestmark = pytest.mark.timeout(300)


def test_an_analysis_goes_on_after_a_kill(tmp_path: Path) -> None:
    """What was measured before is not measured again; the winner is loadable, and files are complete."""
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
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
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
