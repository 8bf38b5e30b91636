"""`make demo`'s script, with few requests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import clean_environment
from tests.support.docs.doc_blocks import ROOT, blocks


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


def numberless(text: str) -> list[str]:
    """Returns the lines of an output without its numbers, and without spaces at their ends."""
    return [re.sub(r"\d+(\.\d+)?", "N", line).rstrip() for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_kills_a_worker_checks_every_answer_and_stops(tmp_path: Path) -> None:
    """It ends well without a redis-server or anything else on PATH, and prints what README shows."""
    finished = run_demo(tmp_path, path="")
    (shown,) = (block.code for block in blocks(ROOT / "README.md") if block.language == "console")

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "every answer" in finished.stdout
    assert '"data":[' in finished.stdout
    assert set(numberless(shown)) - {"$ make demo", "..."} <= set(numberless(finished.stdout))
