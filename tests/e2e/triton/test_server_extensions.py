"""Triton's own HTTP client: statistics, the repository index, and what needs another control mode."""

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from qinfer.testing import wait_until
from tests.e2e.conftest import Stack

pytestmark = pytest.mark.slow


@pytest.fixture
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stack.address) as client:
        yield client


def infer(client: triton.InferenceServerClient, rows: int) -> None:
    inputs = [triton.InferInput(name, [rows, 4], "FP32") for name in "ab"]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.zeros((rows, 4), np.float32))
    client.infer("counted", inputs)


def test_statistics_grow_by_what_was_asked(client: triton.InferenceServerClient) -> None:
    """Requests, rows, and where their time went, all within a second or so; `perf_analyzer` needs the counts equal."""
    (before,) = client.get_inference_statistics("counted")["model_stats"]
    for rows in (1, 3, 3):
        infer(client, rows)

    def count() -> int:
        (now,) = client.get_inference_statistics("counted", "1")["model_stats"]
        return int(now["inference_stats"]["success"]["count"]) - int(before["inference_stats"]["success"]["count"])

    wait_until(lambda: count() == 3, 10, "the statistics")
    (after,) = client.get_inference_statistics("counted")["model_stats"]
    stats = after["inference_stats"]
    assert after["inference_count"] - before["inference_count"] == 7
    assert after["execution_count"] - before["execution_count"] == 3
    assert after["last_inference"] > before["last_inference"]
    assert len({stats[name]["count"] for name in ("success", "compute_input", "compute_infer", "compute_output")}) == 1
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert sum(stats[name]["ns"] for name in parts) == stats["success"]["ns"] > 0
    assert {1, 3} <= {batch["batch_size"] for batch in after["batch_stats"]}


def test_statistics_of_all_models(client: triton.InferenceServerClient) -> None:
    """One entry for each version."""
    entries = client.get_inference_statistics()["model_stats"]

    assert ("add_sub", "1") in {(entry["name"], entry["version"]) for entry in entries}


def test_the_repository_index(client: triton.InferenceServerClient) -> None:
    """Every model is ready."""
    index = client.get_model_repository_index()

    assert {"name": "add_sub", "version": "1", "state": "READY"} in index


def test_control_takes_the_explicit_mode(client: triton.InferenceServerClient) -> None:
    """The server runs in the mode that loads everything at its start."""
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed") as raised:
            call("add_sub")
        assert raised.value.status() == "503"
