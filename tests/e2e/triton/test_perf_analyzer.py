"""NVIDIA's `perf_analyzer`, unchanged, against the whole server: it ends well, and reads the server's statistics.

It measures for a second at a time, until three of them agree; the load is tiny, and what it measures is not judged.
"""

import csv
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Stack, clean_environment, running
from tests.support import models, python_models, real_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

_DIRECTORY = Path(__file__).parents[3] / ".venv" / "tools" / "perf_analyzer"
_MEASURE = ("--measurement-mode", "count_windows", "--measurement-request-count", "50", "-s", "150", "-r", "10")
SERVER = ("Server Queue", "Server Compute Input", "Server Compute Infer")
"""Columns of the server's statistics; there is `Server Compute Output` too, which rounds to 0 µs for a small model."""


@pytest.fixture(scope="module")
def analyzer() -> Path:
    binary = _DIRECTORY / "perf_analyzer"
    if not binary.exists():
        pytest.skip("no perf_analyzer in .venv/tools: `scripts/tools` fetches it")
    return binary


@pytest.fixture(scope="module")
def stack(analyzer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    real_models.build_digits(repository)
    models.add_sub(repository)
    models.add_sub(repository, "unbatched", max_batch_size=0)
    models.greet(repository)
    models.identity(repository, "FP16")
    python_models.write_model(repository, python_models.ECHO, "echo")
    with running(repository, tmp_path_factory.mktemp("up"), QINFER_ALLOW_CLIENT_SHM="true") as stack:
        yield stack


def measure(analyzer: Path, stack: Stack, report: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    protocol = options[options.index("-i") + 1]
    address = stack.address if protocol == "http" else stack.grpc_address
    command = [str(analyzer), *options, *_MEASURE, "-u", address, "-f", str(report)]
    environment = clean_environment() | {"LD_LIBRARY_PATH": os.fspath(_DIRECTORY)}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=50, env=environment)


@pytest.mark.parametrize(
    "options",
    [
        "-m digits -i http --concurrency-range 4",
        "-m digits -i http -a --concurrency-range 4 -b 8",
        "-m digits -i grpc --concurrency-range 4",
        "-m digits -i grpc -a --concurrency-range 4",
        "-m add_sub -x 1 -i grpc -a --streaming --percentile=95",
        "-m add_sub -i http --input-tensor-format json --output-tensor-format json --percentile=95",
        "-m add_sub -i http --shared-memory system",
        "-m unbatched -i grpc --shared-memory system -a --streaming",
        "-m unbatched -i http -a --request-rate-range 50 --measurement-request-count 20",
        "-m greet -i http --shape greeting:3 --shape name:3 --string-length 8",
        "-m identity_fp16 -i grpc --shape x:5 -b 3 --grpc-compression-algorithm gzip",
        "-m echo -i http --shape x:7",
    ],
)
def test_it_measures(analyzer: Path, stack: Stack, tmp_path: Path, options: str) -> None:
    """It ends with a stable result, whose throughput, latency and server columns are not zero."""
    report = tmp_path / "report.csv"

    finished = measure(analyzer, stack, report, *options.split())

    assert finished.returncode == 0, finished.stdout + finished.stderr
    (row,) = csv.DictReader(report.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0
    assert int(row["p95 latency"]) > 0
    assert {column: int(row[column]) for column in SERVER if int(row[column]) == 0} == {}, row
    if "digits" in options:
        assert int(row["Server Compute Output"]) > 0, row
    assert f"Batch size: {8 if '-b 8' in options else 3 if '-b 3' in options else 1}" in finished.stdout


def test_it_is_told_what_is_wrong(analyzer: Path, stack: Stack, tmp_path: Path) -> None:
    """An unknown model, and a batch that is too large, in the server's own words."""
    unknown = measure(analyzer, stack, tmp_path / "a", "-m", "nothing", "-i", "grpc")
    large = measure(analyzer, stack, tmp_path / "b", "-m", "add_sub", "-i", "http", "-b", "9")

    assert unknown.returncode != 0
    assert "Request for unknown model: 'nothing' is not found" in unknown.stdout + unknown.stderr
    assert large.returncode != 0
    assert "inference request batch-size must be <= 8 for 'add_sub'" in large.stdout + large.stderr
