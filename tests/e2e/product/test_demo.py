"""`make demo`'s script, with few requests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import clean_environment

ROOT = Path(__file__).resolve().parents[3]


def run_demo(directory: Path, path: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "scripts.demo", "--directory", str(directory), "--rounds", "1", "--port", "0"]
    return subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=clean_environment() | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_demo_checks_every_answer_and_stops(tmp_path: Path) -> None:
    """It ends well without a redis-server or anything else on PATH, and says what it found."""
    finished = run_demo(tmp_path, path="")

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "every answer" in finished.stdout
    assert '"data":[' in finished.stdout
