"""The pytorch backend on the CPU: file formats, names, datatypes, switches, and what it refuses."""

import io
import json
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qinfer.backends import torch as adapter
from qinfer.backends.torch import TorchBackend, input_positions, output_positions
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed, OutputMismatch
from qinfer.models.spec import ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.testing.backend_contract import BackendContract
from tests.support.backends import (
    CPU,
    GPU,
    ragged,
    read_only,
    run,
    save_exported,
    save_torchscript,
    spec,
    tensors,
    xy,
)

FP32_2 = tensors(("x", "FP32", (2,)))
X = np.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)


class AddSub(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Sum(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["left"] + tensors["right"]


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"double": x * 2, "half": x / 2}


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Optional(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x if y is None else x + y


class Raises(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("positive")
        return x


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


EXAMPLE = (torch.ones(3, 2), torch.ones(3, 2))
ADD_SUB = tensors(("a", "FP32", (2,)), ("b", "FP32", (2,))), tensors(("sum", "FP32", (2,)), ("diff", "FP32", (2,)))


class Scaled(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.factor == 1 else x * self.factor


class TestContract(BackendContract):
    datatypes = ("FP32", *sorted(adapter._DTYPES.keys() - {"FP32"}))
    thread_parameter = "INTRA_OP_THREAD_COUNT"

    def create(self) -> TorchBackend:
        return TorchBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        save_torchscript(Scaled(factor), version_dir / "model.pt")
        return xy("pytorch", datatype)

    def write_ragged(self, version_dir: Path) -> ModelSpec:
        save_torchscript(Identity(), version_dir / "model.pt")
        return ragged("pytorch")


def loaded(version_dir: Path, model: ModelSpec) -> TorchBackend:
    backend = TorchBackend()
    backend.load(model, version_dir, CPU)
    return backend


@pytest.mark.parametrize("save", [save_torchscript, save_exported])
def test_both_formats_give_each_item_its_rows(save: Callable[..., None], tmp_path: Path) -> None:
    """A traced and an exported model compute the same, batch and names included; short runs may stay on the loop."""
    save(AddSub(), tmp_path / ("model.pt" if save is save_torchscript else "model.pt2"), EXAMPLE)
    backend = loaded(tmp_path, spec("pytorch", *ADD_SUB))
    answers = run(backend, {"a": X, "b": X + 1}, rows=(1, 2))
    np.testing.assert_array_equal(answers.arrays(0)["sum"], (2 * X + 1)[:1])
    np.testing.assert_array_equal(answers.arrays(1)["diff"], np.full((2, 2), -1, np.float32))
    assert backend.short_on_loop
    backend.unload()


@pytest.mark.parametrize("save", [save_torchscript, save_exported])
def test_the_memory_of_a_model_is_that_of_its_parameters_and_buffers(save: Callable[..., None], tmp_path: Path) -> None:
    """Each counted once, in whatever format they come."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.BatchNorm1d(5)).eval()
    save(model, tmp_path / ("model.pt" if save is save_torchscript else "model.pt2"), (torch.ones(3, 2),))

    backend = loaded(tmp_path, spec("pytorch", tensors(("x", "FP32", (2,))), tensors(("y__0", "FP32", (5,)))))

    sizes = [tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())]
    assert backend.memory() == (MemoryUse("CPU", 0, sum(sizes)),)
    backend.unload()


def test_programs_are_opened_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export.load keeps its state in the module: a second one meanwhile fails."""
    save_exported(Identity(), tmp_path / "model.pt2", (torch.ones(2, 2),))
    load, inside = torch.export.load, threading.Semaphore(1)

    def alone(path: Path) -> Any:
        assert inside.acquire(blocking=False)
        try:
            return load(path)
        finally:
            inside.release()

    monkeypatch.setattr(torch.export, "load", alone)
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: adapter.open_model(tmp_path / "model.pt2", torch.device("cpu")), range(8)))
    assert [one.kind for one in opened] == ["export"] * 8


def test_an_output_that_nobody_wants_is_left_out(tmp_path: Path) -> None:
    """A request names its outputs."""
    save_torchscript(AddSub(), tmp_path / "model.pt", EXAMPLE)
    backend = loaded(tmp_path, spec("pytorch", *ADD_SUB))
    assert list(run(backend, {"a": X, "b": X}, rows=(3,), outputs=["diff"]).arrays()) == ["diff"]


def test_inputs_by_position_in_their_names(tmp_path: Path) -> None:
    """`NAME__1` is the second argument, in whatever order the configuration lists them."""
    save_torchscript(AddSub(), tmp_path / "model.pt", EXAMPLE)
    inputs = tensors(("IN__1", "FP32", (2,)), ("IN__0", "FP32", (2,)))
    outputs = tensors(("OUT__1", "FP32", (2,)), ("OUT__0", "FP32", (2,)))
    answers = run(loaded(tmp_path, spec("pytorch", inputs, outputs)), {"IN__1": X, "IN__0": X + 1}, rows=(3,))
    np.testing.assert_array_equal(answers.arrays()["OUT__1"], np.ones_like(X))
    np.testing.assert_array_equal(answers.arrays()["OUT__0"], 2 * X + 1)


@pytest.mark.parametrize(
    ("inputs", "arguments", "expected"),
    [
        (["b", "a"], ["a", "b"], [1, 0]),
        (["IN__1", "IN__0"], ["a", "b"], [1, 0]),
        (["foo", "bar"], ["a", "b"], [0, 1]),
        (["foo", "bar"], [], [0, 1]),
        (["b"], ["a", "b"], [1]),
    ],
)
def test_naming_conventions(inputs: list[str], arguments: list[str], expected: list[int]) -> None:
    """Arguments' names win, then positions, then the configuration's order."""
    assert input_positions("m", inputs, arguments) == expected


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (["x__2"], r"'x__2' has no such position; the model has 2 inputs"),
        (["x__0", "y__0"], "two inputs of the same position"),
        (["p", "q", "r"], r"has 2 inputs \(a, b\), its configuration 3"),
    ],
)
def test_names_that_can_not_be(inputs: list[str], text: str) -> None:
    """A position that does not exist, or exists twice, is refused with the numbers."""
    with pytest.raises(ModelLoadFailed, match=text):
        input_positions("m", inputs, ["a", "b"])


def test_outputs_in_order_unless_numbered() -> None:
    """Outputs go by number if all have one."""
    assert output_positions("m", ["o__1", "o__0"]) == [1, 0]
    assert output_positions("m", ["o__1", "other"]) == [0, 1]


def test_dictionaries_in_and_out(tmp_path: Path) -> None:
    """A model that takes, or returns, a dictionary of tensors gets and gives them by name."""
    save_torchscript(Sum(), tmp_path / "sum" / "model.pt")
    both = tensors(("left", "FP32", (2,)), ("right", "FP32", (2,)))
    answers = run(loaded(tmp_path / "sum", spec("pytorch", both, FP32_2)), {"left": X, "right": X}, rows=(3,))
    np.testing.assert_array_equal(answers.arrays()["x"], 2 * X)
    save_torchscript(Named(), tmp_path / "named" / "model.pt")
    outputs = tensors(("half", "FP32", (2,)), ("double", "FP32", (2,)))
    answers = run(loaded(tmp_path / "named", spec("pytorch", FP32_2, outputs)), {"x": X}, rows=(3,))
    np.testing.assert_array_equal(answers.arrays()["half"], X / 2)


def test_a_model_can_not_write_into_the_request(tmp_path: Path) -> None:
    """A model that works in place does so on a copy of what came from the client."""
    save_torchscript(InPlace(), tmp_path / "model.pt")
    array = read_only(X)
    answers = run(loaded(tmp_path, spec("pytorch", FP32_2, tensors(("y", "FP32", (2,))))), {"x": array}, rows=(3,))
    np.testing.assert_array_equal(answers.arrays()["y"], 2 * X)
    np.testing.assert_array_equal(array, X)


def test_an_optional_input_may_be_left_out(tmp_path: Path) -> None:
    """An argument with a default is not passed if the request has no such input; one without is missed by name."""
    save_torchscript(Optional(), tmp_path / "model.pt")
    inputs = tensors(("x", "FP32", (2,)), ("y", "FP32", (2,)))
    backend = loaded(tmp_path, spec("pytorch", inputs, tensors(("z", "FP32", (2,)))))
    np.testing.assert_array_equal(run(backend, {"x": X}, rows=(3,)).arrays()["z"], X)
    np.testing.assert_array_equal(run(backend, {"x": X, "y": X}, rows=(3,)).arrays()["z"], 2 * X)
    with pytest.raises(InferenceFailed, match="x"):
        run(backend, {"y": X}, rows=(3,))


def test_strings_are_refused_at_load(tmp_path: Path) -> None:
    """PyTorch has no tensors of BYTES."""
    save_torchscript(Identity(), tmp_path / "model.pt")
    model = spec("pytorch", tensors(("x", "BYTES", (2,))), FP32_2)
    with pytest.raises(ModelLoadFailed, match="'x' is BYTES, which PyTorch has no tensors of"):
        loaded(tmp_path, model)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (tensors(("y", "INT64", (2,))), "output 'y' of the model is torch.float32, its configuration INT64"),
        (tensors(("y", "FP32", (2,)), ("z", "FP32", (2,))), "returned 1 values without output 'z'"),
    ],
)
def test_results_other_than_configured(outputs: Any, text: str, tmp_path: Path) -> None:
    """A result of another datatype, or one that is not there, fails by name."""
    save_torchscript(Identity(), tmp_path / "model.pt")
    with pytest.raises(OutputMismatch, match=text):
        run(loaded(tmp_path, spec("pytorch", FP32_2, outputs)), {"x": X}, rows=(3,))


def test_what_the_model_raises_fails_the_batch(tmp_path: Path) -> None:
    """The model's own exception is the message, without the author's code and paths."""
    save_torchscript(Raises(), tmp_path / "model.pt")
    backend = loaded(tmp_path, spec("pytorch", FP32_2, tensors(("y", "FP32", (2,)))))
    with pytest.raises(InferenceFailed, match=r"^PyTorch execute failure: ValueError: positive$"):
        run(backend, {"x": X}, rows=(3,))
    run(backend, {"x": -np.abs(X)}, rows=(3,))


def test_pickled_modules_are_refused(tmp_path: Path) -> None:
    """`torch.save(model)` is a pickle: it is named, and nothing of it runs."""
    torch.save(Identity(), tmp_path / "model.pt")
    with pytest.raises(ModelLoadFailed, match=r"'model.pt' is a pickled module .* never loaded"):
        loaded(tmp_path, spec("pytorch", FP32_2, FP32_2))


class Planted:
    """An object whose unpickling is seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("planted", ["sample_inputs", "weights"])
def test_exported_programs_with_pickled_objects_are_refused(planted: str, tmp_path: Path) -> None:
    """An archive of torch.export with a pickle inside is refused before anything is unpickled."""
    save_exported(torch.nn.Linear(2, 2), tmp_path / "good.pt2", EXAMPLE[:1])
    pickled = io.BytesIO()
    torch.save(Planted(), pickled)
    with zipfile.ZipFile(tmp_path / "good.pt2") as good, zipfile.ZipFile(tmp_path / "model.pt2", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if planted == "sample_inputs" and name.endswith("data/sample_inputs/model.pt"):
                content = pickled.getvalue()
            if planted == "weights" and name.endswith("model_weights_config.json"):
                config = json.loads(content)
                config["config"]["weight"]["use_pickle"] = True
                content = json.dumps(config).encode()
            if planted == "weights" and name.endswith("weights/weight_0"):
                content = pickled.getvalue()
            bad.writestr(name, content)
    with pytest.raises(ModelLoadFailed, match="pickled object"):
        loaded(tmp_path, spec("pytorch", FP32_2, FP32_2))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"no archive at all"])
def test_broken_files(content: bytes, tmp_path: Path) -> None:
    """A file that is none is named, without the machine's paths."""
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ModelLoadFailed, match=r"'model.pt' is not a PyTorch archive") as failure:
        loaded(tmp_path, spec("pytorch", FP32_2, FP32_2))
    assert str(tmp_path) not in failure.value.message


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("INTRA_OP_THREAD_COUNT", "-1"),
        ("INFERENCE_MODE", "maybe"),
        ("qinfer.torch_amp", "float8"),
        ("qinfer.torch_compile", "fast"),
        ("ENABLE_TENSOR_FUSER", "2"),
    ],
)
def test_wrong_parameters(parameter: str, value: str, tmp_path: Path) -> None:
    """A value that a parameter can't have is refused with both."""
    save_exported(Identity(), tmp_path / "model.pt2", EXAMPLE[:1])
    with pytest.raises(ModelLoadFailed, match=f"parameter '{parameter}' of model 'm' is '{value}'; it must be"):
        loaded(tmp_path, spec("pytorch", FP32_2, FP32_2, parameters={parameter: value}))


def test_switches_hold_while_the_model_runs(tmp_path: Path) -> None:
    """AMP computes in the lower precision; without INFERENCE_MODE and optimised execution the answer is the same."""
    save_torchscript(torch.nn.Linear(2, 2), tmp_path / "model.pt", EXAMPLE[:1])
    plain = run(loaded(tmp_path, spec("pytorch", FP32_2, FP32_2)), {"x": X}, rows=(3,)).arrays()["x"]
    off = {"INFERENCE_MODE": "false", "DISABLE_OPTIMIZED_EXECUTION": "true", "DISABLE_CUDNN": "1"}
    slow = run(loaded(tmp_path, spec("pytorch", FP32_2, FP32_2, parameters=off)), {"x": X}, rows=(3,)).arrays()["x"]
    np.testing.assert_array_equal(slow, plain)
    half = spec("pytorch", FP32_2, tensors(("x", "BF16", (2,))), parameters={"qinfer.torch_amp": "bfloat16"})
    rough = run(loaded(tmp_path, half), {"x": X}, rows=(3,)).arrays()["x"]
    np.testing.assert_allclose(rough, plain, rtol=0.05, atol=0.05)
    assert not np.array_equal(rough, plain)


def test_threads_are_shared_among_instances(tmp_path: Path) -> None:
    """Each model's executions use its own number of threads, whichever ran before."""
    save_torchscript(Identity(), tmp_path / "model.pt")
    outputs = tensors(("y", "FP32", (2,)))
    one = loaded(tmp_path, spec("pytorch", FP32_2, outputs, parameters={"INTRA_OP_THREAD_COUNT": "1"}))
    three = loaded(tmp_path, spec("pytorch", FP32_2, outputs, parameters={"INTRA_OP_THREAD_COUNT": "3"}))
    for backend, threads in ((one, 1), (three, 3), (one, 1)):
        run(backend, {"x": X}, rows=(3,))
        assert torch.get_num_threads() == threads


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance on a GPU is refused, with the remedy, where there is none or not so many."""
    save_torchscript(Identity(), tmp_path / "model.pt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadFailed, match=r"is for GPU 0, and the installed PyTorch .* finds none; install"):
        TorchBackend().load(spec("pytorch", FP32_2, FP32_2), tmp_path, GPU)


def test_compile_needs_an_exported_program(tmp_path: Path) -> None:
    """torch.compile can do nothing with TorchScript."""
    save_torchscript(Identity(), tmp_path / "model.pt")
    with pytest.raises(ModelLoadFailed, match=r"needs a model.pt2 of torch.export.save; this model is torchscript"):
        loaded(tmp_path, spec("pytorch", FP32_2, FP32_2, parameters={"qinfer.torch_compile": "default"}))


def test_a_compiled_model_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile is applied to the program, once per size at load, and never runs on the worker's loop."""
    save_exported(torch.nn.Linear(2, 2), tmp_path / "model.pt2", EXAMPLE[:1])
    sizes: list[int] = []

    def fake_compile(call: Callable[..., Any], mode: str) -> Callable[..., Any]:
        assert mode == "reduce-overhead"

        def compiled(x: torch.Tensor) -> Any:
            sizes.append(len(x))
            return call(x)

        return compiled

    monkeypatch.setattr(torch, "compile", fake_compile)  # a real compilation takes half a minute
    parameters = {"qinfer.torch_compile": "reduce-overhead"}
    backend = loaded(tmp_path, spec("pytorch", tensors(("input", "FP32", (2,))), FP32_2, parameters=parameters))
    assert sizes == [1, 2, 8]
    assert not backend.short_on_loop
    plain = loaded(tmp_path, spec("pytorch", tensors(("input", "FP32", (2,))), FP32_2))
    compiled = run(backend, {"input": X}, rows=(3,)).arrays()["x"]
    np.testing.assert_array_equal(compiled, run(plain, {"input": X}, rows=(3,)).arrays()["x"])


def test_a_missing_input_by_name(tmp_path: Path) -> None:
    """A model without named arguments says which input it misses."""
    save_torchscript(AddSub(), tmp_path / "model.pt", EXAMPLE)
    backend = loaded(tmp_path, spec("pytorch", *ADD_SUB))
    backend._arguments = ()
    with pytest.raises(InvalidRequest, match="input 'b' is missing"):
        run(backend, {"a": X}, rows=(3,))
