"""`qinfer up` with models that hang: what callers, `status`, `workers` and the metric of the alert say of it."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from qinfer.testing import wait_until
from tests.integration.cli.test_up import Up
from tests.support.faulty_backend import SLOW, install
from tests.support.faulty_backend import write_model as write_faulty
from tests.support.hanging import HANG, limit, write_hanging
from tests.support.models import sequence_batching
from tests.support.python_models import write_accumulator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NAMED_WITHIN_S = 60.0
LIMIT_S = 3.0
STATE = """max_sequence_idle_microseconds: 60000000
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 1 ]
  initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }"""


def write_models(folder: Path) -> Path:
    write_hanging(folder / "models", 40.0)
    write_accumulator(folder / "models", more=limit(LIMIT_S))
    (file,) = (folder / "models" / "accumulator").rglob("model.py")
    file.write_text(
        file.read_text().replace(
            "        before = 0", f"        if x(request) == {HANG}: time.sleep(1e6)\n        before = 0"
        )
    )
    write_faulty(folder / "models", "sums", hold_s=600.0, max_batch_size=4, beside=limit(LIMIT_S))
    config = folder / "models" / "sums" / "config.pbtxt"
    config.write_text(
        config.read_text().replace(
            "dynamic_batching { max_queue_delay_microseconds: 0  }", sequence_batching("direct { }", STATE)
        )
    )
    return folder / "models"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    env = {"PYTHONPATH": install(folder / "plugin")}
    one = Up(write_models(folder), folder / "data", "--no-model-output", env=env).wait_ready()
    yield one
    one.process.terminate()
    one.process.wait(60)


def asked(up: Up, model: str, value: float, **parameters: object) -> object:
    """Returns the value of an answer, or its error."""
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}], "parameters": parameters}
    reply = httpx.post(f"{up.url}/v2/models/{model}/infer", json=body, timeout=100).json()
    return reply["error"] if "error" in reply else reply["outputs"][0]["data"][0]


def shown(up: Up, *words: str) -> str:
    command = [sys.executable, "-m", "qinfer.cli.main", *words, "--data-dir", str(up.data_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def late(up: Up) -> float:
    """Returns what the expression of QinferExecutionLate sees of the model."""
    text = httpx.get(f"{up.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith('qinfer_late_executions{model="hang"')]
    return max((float(line.split()[-1]) for line in lines), default=0.0)


@pytest.mark.long
def test_a_model_that_hangs_is_named_within_a_minute(up: Up) -> None:
    """With half of its limit over it is late for the alert, too, for longer than that one's `for`."""
    threading.Thread(target=asked, args=(up, "hang", HANG), daemon=True).start()

    wait_until(lambda: "hang 1: execution since" in shown(up, "status"), NAMED_WITHIN_S, "status to name it")
    assert "hang 1: execution since" in shown(up, "workers")
    wait_until(lambda: late(up) == 1.0, NAMED_WITHIN_S, "the alert's expression")
    assert "hang 1: execution since" in " ".join(shown(up, "doctor").split())


def test_a_step_that_hangs_leaves_its_sequence_and_others_as_they_were(up: Up) -> None:
    """In the worker's process, which ends; the states are in Redis."""
    assert asked(up, "sums", 1, sequence_id=1, sequence_start=True) == 1
    assert asked(up, "sums", 10, sequence_id=2, sequence_start=True) == 10

    error = asked(up, "sums", SLOW, sequence_id=1)

    assert "lasted longer than its limit of 3 s (qinfer.execute_timeout_s)" in str(error)
    assert asked(up, "sums", 5, sequence_id=2) == 15
    assert asked(up, "sums", 2, sequence_id=1) == 3


def test_sequences_in_the_memory_of_a_process_that_is_ended_are_lost(up: Up) -> None:
    assert asked(up, "accumulator", 1, sequence_id=1, sequence_start=True) == 1

    error = asked(up, "accumulator", HANG, sequence_id=1)

    assert "its process had the state in memory; begin it again with the START flag" in str(error)
    assert asked(up, "accumulator", 4, sequence_id=1, sequence_start=True) == 4
