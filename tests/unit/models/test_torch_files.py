"""PyTorch files: what is completed from those of torch.export, and what the others are refused for."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qinfer.backends.base import Batch
from qinfer.backends.torch import TorchBackend
from qinfer.core.messages import InferRequest
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.spec import Device, ModelSpec
from tests.support.backends import Answers
from tests.unit.models.test_read import read

ROWS = torch.export.Dim("rows")
X, IDS = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64)


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"doubled": 2 * x, "sums": ids.sum(1)}


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x[:, 0]


class Detector(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()


class Listed(torch.nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0] + xs[1]


def export(repository: Path, model: torch.nn.Module, given: tuple[Any, ...], shapes: Any, config: str = "") -> None:
    (repository / "m" / "1").mkdir(parents=True)
    torch.export.save(torch.export.export(model, given, dynamic_shapes=shapes), repository / "m" / "1" / "model.pt2")
    if config:
        (repository / "m" / "config.pbtxt").write_text(config)


def completed(repository: Path) -> ModelSpec:
    stored = read(repository)
    assert stored.error == ""
    return to_spec(from_json(stored.config or ""))


def tensors(spec: ModelSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.datatype, tensor.dims) for tensor in (*spec.inputs, *spec.outputs)]


def test_an_exported_program_needs_no_configuration(tmp_path: Path) -> None:
    """Its arguments are the inputs, the members of the dictionary the outputs; and it runs so."""
    export(tmp_path, Two(), (X, IDS), {"x": {0: ROWS}, "ids": {0: ROWS}})

    spec = completed(tmp_path)
    backend, answers = TorchBackend(), Answers()
    backend.load(spec, tmp_path / "m" / "1", Device())
    inputs = {"x": np.ones((1, 4), np.float32), "ids": np.array([[3, 4]])}
    backend.execute(Batch(requests=[InferRequest(model="m", inputs=())], rows=[1], inputs=inputs), answers)

    assert (spec.max_batch_size, spec.batching is not None) == (4, True)
    assert tensors(spec) == [
        ("x", "FP32", (4,)),
        ("ids", "INT64", (2,)),
        ("doubled", "FP32", (4,)),
        ("sums", "INT64", (1,)),
    ]
    assert {name: array.tolist() for name, array in answers.arrays().items()} == {"doubled": [[2.0] * 4], "sums": [7]}


def test_results_without_names_have_tritons(tmp_path: Path) -> None:
    export(tmp_path, Pair(), (X,), {"x": {0: ROWS}})

    assert [output.name for output in completed(tmp_path).outputs] == ["OUTPUT__0", "OUTPUT__1"]


@pytest.mark.parametrize(
    ("model", "shapes", "dims"),
    [
        (Detector(), {"x": {0: ROWS}}, [(-1, 4), (-1, 2)]),
        (torch.nn.ReLU(), {"input": {0: torch.export.Dim("few", max=3)}}, [(-1, 4), (-1, 4)]),
        (torch.nn.ReLU(), None, [(3, 4), (3, 4)]),
    ],
)
def test_rows_that_are_no_batch(tmp_path: Path, model: torch.nn.Module, shapes: Any, dims: object) -> None:
    """Rows of detections, fewer than a batch may have, and a fixed number."""
    export(tmp_path, model, (X,), shapes)

    spec = completed(tmp_path)

    assert (spec.max_batch_size, [tensor[2] for tensor in tensors(spec)]) == (0, dims)


IO = 'name: "%s" data_type: TYPE_FP32 dims: [ 4 ]'


def test_a_configuration_by_other_names_is_left_to_the_worker(tmp_path: Path) -> None:
    config = f"max_batch_size: 8 input {{ {IO % 'INPUT__0'} }} output {{ {IO % 'y'} }}"
    export(tmp_path, torch.nn.ReLU(), (X,), {"input": {0: ROWS}}, config)

    assert [tensor[0] for tensor in tensors(completed(tmp_path))] == ["INPUT__0", "y"]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (f"max_batch_size: 8 input {{ {IO % 'INPUT__0'} }}", "no output, and 'model.pt2' completes it only"),
        (f"max_batch_size: 8 output {{ {IO % 'y'} }}", "no input, and 'model.pt2' completes it only without both"),
    ],
)
def test_a_half_that_names_other_tensors(tmp_path: Path, config: str, error: str) -> None:
    export(tmp_path, torch.nn.ReLU(), (X,), {"input": {0: ROWS}}, config)

    assert error in read(tmp_path).error


def test_a_half_by_the_names_of_arguments_is_completed(tmp_path: Path) -> None:
    export(tmp_path, torch.nn.ReLU(), (X,), {"input": {0: ROWS}}, f"max_batch_size: 8 input {{ {IO % 'input'} }}")

    assert [tensor[0] for tensor in tensors(completed(tmp_path))] == ["input", "OUTPUT__0"]


def test_lists_of_tensors_are_no_inputs(tmp_path: Path) -> None:
    export(tmp_path, Listed(), ([X, X],), {"xs": [{0: ROWS}, {0: ROWS}]})

    assert "the arguments of the model are lists or dictionaries; write name, data_type" in read(tmp_path).error


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_traced", [True, False])
def test_torchscript_names_its_arguments(tmp_path: Path, is_traced: bool) -> None:  # noqa: FBT001
    """In the error, because it tells neither datatypes nor shapes."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    trace: Any = torch.jit.trace
    module = trace(Pair(), X) if is_traced else torch.jit.script(Pair())
    torch.jit.save(module, tmp_path / "m" / "1" / "model.pt")

    error = read(tmp_path).error

    assert "and TorchScript declares neither datatypes nor shapes (its arguments: x: Tensor)" in error
    assert error.endswith("write name, data_type and dims of each input and each output into config.pbtxt")


def test_what_is_no_archive_of_pytorch_is_refused(tmp_path: Path) -> None:
    """However it is damaged, with one error."""
    export(tmp_path, torch.nn.ReLU(), (X,), None)
    path = tmp_path / "m" / "1" / "model.pt2"
    content = path.read_bytes()
    for damaged in (b"", content[:-100], content.replace(b"tensor_values", b"tensor_value5"), b"PK" + content[2:900]):
        path.write_bytes(damaged)
        assert "has no input and output, and 'model.pt2' does not declare it" in read(tmp_path).error
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/models/m.json", "[" * 100_000)
    assert "'model.pt2' does not declare it" in read(tmp_path).error
