"""Triton's clients load, change and unload models of a whole server in mode `explicit`; so does the command line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient import http
from tritonclient.utils import InferenceServerException

import qinfer as qinfer_package
from qinfer.errors import ModelLoadFailed
from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, clean_environment, running
from tests.support import models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    models.add_sub(path)
    models.add_sub(path, "extra")
    return path


@pytest.fixture(scope="module")
def explicit(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    modes = {"QINFER_REPOSITORY__CONTROL_MODE": "explicit", "QINFER_REPOSITORY__LOAD_MODELS": '["extra"]'}
    with running(repository, tmp_path_factory.mktemp("up"), **modes) as stack:
        yield stack


@pytest.fixture
def client(explicit: Stack) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(explicit.address, network_timeout=60.0) as one:
        yield one


def total(client: http.InferenceServerClient, model: str = "add_sub") -> list[float]:
    inputs = []
    for name, value in (("a", 1.0), ("b", 2.0)):
        inputs.append(http.InferInput(name, [1, 4], "FP32"))
        inputs[-1].set_data_from_numpy(np.full((1, 4), value, np.float32))
    result: list[float] = client.infer(model, inputs).as_numpy("sum")[0].tolist()
    return result


def qinfer(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "qinfer.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False)


def test_the_stock_life_of_a_model(client: http.InferenceServerClient, repository: Path) -> None:
    """What Triton's example for model control does, and what its texts are."""
    index = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert index["add_sub"] == {"name": "add_sub"}
    assert index["extra"]["state"] == "READY"
    assert not client.is_model_ready("add_sub")

    client.load_model("add_sub")
    assert client.is_model_ready("add_sub")
    assert total(client) == [3.0] * 4

    config = client.get_model_config("add_sub") | {"max_batch_size": "16"}
    client.load_model("add_sub", config=json.dumps(config))
    assert client.get_model_config("add_sub")["max_batch_size"] == 16

    content = (repository / "add_sub" / "1" / "model.onnx").read_bytes()
    client.load_model("add_sub", config=json.dumps(config), files={"file:1/model.onnx": content})
    assert total(client) == [3.0] * 4
    with pytest.raises(InferenceServerException, match="failed to load 'add_sub', "):
        client.load_model("add_sub", config=json.dumps(config), files={"file:1/model.onnx": b"nothing"})
    assert total(client) == [3.0] * 4

    client.unload_model("add_sub")
    assert not client.is_model_ready("add_sub")
    with pytest.raises(
        InferenceServerException, match="Request for unknown model: 'add_sub' has no available versions"
    ):
        total(client)

    def is_unloaded() -> bool:
        entries = client.get_model_repository_index()
        return {"name": "add_sub", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in entries

    wait_until(is_unloaded, 20.0, "the index says unloaded")
    with pytest.raises(InferenceServerException, match="failed to load 'nobody', failed to poll from model repository"):
        client.load_model("nobody")
    client.unload_model("nobody")
    assert client.is_server_ready()


def test_the_python_client_loads_and_unloads(explicit: Stack, repository: Path) -> None:
    """As Triton's does; what was loaded takes lists, and is counted."""
    shutil.copytree(repository / "extra", repository / "mine")
    (repository / "mine" / "config.pbtxt").unlink()
    content = (repository / "mine" / "1" / "model.onnx").read_bytes()

    with qinfer_package.Client(f"http://{explicit.address}") as client:
        client.load("mine")
        result = client.infer("mine", {"a": [[1.0] * 4], "b": [[2.0] * 4]})
        client.load("mine", config=client.config("mine") | {"max_batch_size": 16}, files={"1/model.onnx": content})
        changed = client.config("mine")["max_batch_size"]
        with pytest.raises(ModelLoadFailed, match="failed to load 'nobody'"):
            client.load("nobody")
        client.unload("mine")
        ready = client.is_ready("mine")

    assert (result["sum"].tolist(), changed, ready) == ([[3.0] * 4], 16, False)


def test_the_command_line_loads_and_unloads(explicit: Stack, repository: Path) -> None:
    """With the same words."""
    shutil.copytree(repository / "extra", repository / "new")
    (repository / "new" / "config.pbtxt").unlink()
    url = f"http://{explicit.address}"

    loaded = qinfer("models", "load", "new", "--url", url)
    shown = json.loads(qinfer("models", "index", "--ready", "--json", "--url", url).stdout)
    unloaded = qinfer("models", "unload", "new", "--url", url)
    failed = qinfer("models", "load", "nobody", "--url", url)

    assert (loaded.stdout, unloaded.stdout) == ("new is loaded\n", "new is unloaded\n")
    assert {"name": "new", "version": "1", "state": "READY"} in shown
    assert failed.returncode == 1
    assert "failed to load 'nobody', failed to poll from model repository" in failed.stderr


@pytest.mark.long
def test_a_server_that_polls_follows_its_repository(tmp_path: Path) -> None:
    """Models come and go with their directories; requests to load and unload are refused."""
    repository = tmp_path / "models"
    models.add_sub(repository)
    modes = {"QINFER_REPOSITORY__CONTROL_MODE": "poll", "QINFER_REPOSITORY__POLL_S": "0.2"}
    (tmp_path / "up").mkdir()
    with (
        running(repository, tmp_path / "up", **modes) as stack,
        http.InferenceServerClient(stack.address, network_timeout=60.0) as client,
    ):
        models.add_sub(tmp_path / "made", "extra")
        (tmp_path / "made" / "extra").rename(repository / "extra")
        wait_until(lambda: bool(client.is_model_ready("extra")), 30.0, "the new model")
        assert total(client, "extra") == [3.0] * 4

        shutil.rmtree(repository / "extra")
        wait_until(lambda: not client.is_model_ready("extra"), 30.0, "the model gone")
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed if polling"):
            client.load_model("add_sub")
        assert total(client) == [3.0] * 4
