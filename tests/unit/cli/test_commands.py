"""The commands as people type them: help, errors, exit codes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from qinfer import __version__
from qinfer.cli import client
from qinfer.cli.local.preparation import example_line
from qinfer.cli.main import app
from qinfer.client import InferResult, ModelMetadata, TensorMetadata
from qinfer.core.messages import Response
from qinfer.core.settings import variable_names
from qinfer.tensors import Tensor, from_numpy, to_numpy

METADATA = ModelMetadata(
    name="double", versions=("1",), inputs=(TensorMetadata(name="x", datatype="FP32", shape=(-1, 2)),)
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)


class FakeGateway:
    """Answers with twice its inputs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def metadata(self, model: str, version: int = 0) -> ModelMetadata:
        return METADATA

    def infer(self, model: str, inputs: dict[str, Tensor], **_: object) -> InferResult:
        doubled = from_numpy("y", to_numpy(inputs["x"]) * 2)
        return InferResult(Response(request_id="", model=model, version=1, outputs=(doubled,)))

    def infer_stream(self, model: str, inputs: dict[str, Tensor], **_: object) -> Iterator[InferResult]:
        for factor in (1, 2):
            scaled = from_numpy("y", to_numpy(inputs["x"]) * factor)
            yield InferResult(Response(request_id="", model=model, version=1, outputs=(scaled,)))


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_version_is_printed() -> None:
    """`qinfer --version` says which."""
    assert run("--version") == (0, f"qinfer {__version__}\n", "")


@pytest.mark.parametrize(
    "command", [["up"], ["infer"], ["status"], ["bench"], ["models", "sync"], ["models", "list"]], ids=" ".join
)
def test_help_has_an_example(command: list[str]) -> None:
    """Help that can be copied from."""
    code, stdout, _ = run(*command, "--help")

    assert code == 0
    assert f"Example: qinfer {' '.join(command)}" in stdout


def test_help_loads_nothing_heavy() -> None:
    """`qinfer --help` answers at once: no numpy, no redis, no pydantic."""
    source = (
        "import sys, qinfer.cli.main; print([m for m in ('numpy', 'redis', 'pydantic', 'httpx') if m in sys.modules])"
    )

    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert loaded.stdout == "[]\n"


def test_infer_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, datatype, shape and value of each output."""
    monkeypatch.setattr(client, "GatewayClient", FakeGateway)

    code, stdout, _ = run("infer", "double", "--input", "x=[1, 2]")

    assert code == 0
    assert re.search(r"y\W+FP32\W+\[1, 2\]\W+\[\[2\. 4\.\]\]", stdout)


def test_infer_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read `--json`."""
    monkeypatch.setattr(client, "GatewayClient", FakeGateway)

    code, stdout, _ = run("infer", "double", "--input", "x=[1, 2]", "--json")

    assert code == 0
    assert json.loads(stdout)["outputs"] == {"y": {"datatype": "FP32", "shape": [1, 2], "data": [[2.0, 4.0]]}}


def test_a_stream_is_a_line_of_json_for_each_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "GatewayClient", FakeGateway)

    code, stdout, _ = run("infer", "double", "--input", "x=[1, 2]", "--stream", "--json")

    assert code == 0
    assert [json.loads(line)["outputs"]["y"]["data"] for line in stdout.splitlines()] == [[[1.0, 2.0]], [[2.0, 4.0]]]


def test_unknown_input_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 64 and the inputs that there are, in one line without a traceback."""
    monkeypatch.setattr(client, "GatewayClient", FakeGateway)

    code, _, stderr = run("infer", "double", "--input", "z=[1]")

    assert code == 64
    assert stderr == "Error: model 'double' has no input 'z'; its inputs are: x (FP32 [-1, 2])\n"


@pytest.mark.parametrize("command", [["infer", "m", "--input", "x=zeros"], ["bench", "m"]], ids=["infer", "bench"])
def test_no_server_says_how_to_start_one(command: list[str], unused_tcp_port: int) -> None:
    """The remedy is in the message."""
    code, _, stderr = run(*command, "--url", f"http://127.0.0.1:{unused_tcp_port}")

    assert code == 69
    assert "no server answers" in stderr
    assert "qinfer up --model-repository" in stderr


def test_missing_repository_is_wrong_usage(tmp_path: Path) -> None:
    """`up` shows what a repository looks like."""
    code, _, stderr = run("up", "--model-repository", str(tmp_path / "nowhere"), "--data-dir", str(tmp_path / "data"))

    assert code == 64
    assert "does not exist" in stderr
    assert "model.onnx" in stderr
    assert not (tmp_path / "data").exists()


def test_unknown_variable_stops_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting is found before anything starts."""
    monkeypatch.setenv("QINFER_HTTP__PROT", "8001")

    code, _, stderr = run("up", "--model-repository", str(tmp_path), "--data-dir", str(tmp_path / "data"))

    assert code == 64
    assert "did you mean QINFER_HTTP__PORT" in stderr


@pytest.mark.parametrize("command", [["status"], ["models", "list"], ["models", "sync"]], ids=" ".join)
def test_no_running_up_says_what_to_give(command: list[str], tmp_path: Path) -> None:
    """Without `up` and without --redis there is nothing to ask."""
    code, _, stderr = run(*command, "--data-dir", str(tmp_path))

    assert code == 64
    assert "no `qinfer up` is running with the data directory" in stderr


def test_redis_that_is_away_is_one_line(unused_tcp_port: int) -> None:
    """A connection that is refused is no traceback."""
    code, _, stderr = run("status", "--redis", f"redis://127.0.0.1:{unused_tcp_port}")

    assert code == 69
    assert stderr.startswith("Error: ")
    assert "Traceback" not in stderr


def shown_request(model: ModelMetadata, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Has a shell expand the example's body."""
    body = example_line("http://h", model, config or {}).partition(" -d ")[2]
    expanded = subprocess.run(["sh", "-c", f"printf %s {body}"], capture_output=True, text=True, check=True).stdout
    return dict(json.loads(expanded))


def example_model(*inputs: TensorMetadata) -> ModelMetadata:
    return ModelMetadata(name="m", versions=("1",), inputs=inputs)


@pytest.mark.parametrize(
    ("datatype", "dims", "value"),
    [("FP32", (2,), [[0.0, 0.0]]), ("BYTES", (1,), ["hi"]), ("FP16", (1,), [0.0]), ("INT64", (2, -1), [[[0], [0]]])],
)
def test_example_request_is_plain_json(datatype: str, dims: tuple[int, ...], value: object) -> None:
    """The example that `up` shows can be pasted into a shell; one dimension of 1 is a scalar."""
    model = example_model(TensorMetadata(name="it's x", datatype=datatype, shape=(-1, *dims)))

    assert shown_request(model, {"max_batch_size": 8}) == {"it's x": value}


def test_example_for_a_decoupled_model_streams() -> None:
    """Other calls of it are refused."""
    config = {"model_transaction_policy": {"decoupled": True}}
    small, large = (example_model(TensorMetadata(name="x", datatype="INT32", shape=(size,))) for size in (1, 17))

    assert example_line("http://h", small, config) == "curl -sN http://h/models/m -d '{\"x\": 0}'"
    assert example_line("http://h", large, config) == "qinfer infer m --stream --url http://h --input x=zeros"


def test_example_for_a_stateful_model_is_a_whole_sequence() -> None:
    """A request without a correlation ID is refused; a sequence without END would stay open."""
    config: dict[str, Any] = {"sequence_batching": {"direct": {}}, "max_batch_size": 1}
    small, large = (example_model(TensorMetadata(name="x", datatype="FP32", shape=(-1, size))) for size in (2, 17))

    assert shown_request(small, config) == {
        "x": [[0.0, 0.0]],
        "sequence_id": 1,
        "sequence_start": True,
        "sequence_end": True,
    }
    assert "--sequence-id 1 --sequence-start --sequence-end" in example_line("http://h", large, config)


def test_infer_sends_the_flags_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    class Gateway(FakeGateway):
        def infer(self, model: str, inputs: dict[str, Tensor], **options: object) -> InferResult:
            sent.append(options["parameters"])
            return super().infer(model, inputs)

    monkeypatch.setattr(client, "GatewayClient", Gateway)

    code, _, _ = run("infer", "double", "--input", "x=[1, 2]", "--sequence-id", "7", "--sequence-start")

    assert (code, sent) == (0, [{"sequence_id": 7, "sequence_start": True}])


def test_bench_of_sequences_does_not_stream() -> None:
    code, _, stderr = run("bench", "double", "--sequences", "4", "--streaming")

    assert code == 64
    assert "--sequences" in stderr
