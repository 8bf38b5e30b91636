"""`auto_mixed_precision` on each backend, compared with FP32."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino as ov
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from qinfer.backends import onnx_amp, parameters
from qinfer.backends.base import Array, Backend
from qinfer.backends.onnx import OnnxBackend
from qinfer.backends.openvino import OpenvinoBackend
from qinfer.backends.torch import TorchBackend
from qinfer.errors import ModelLoadFailed
from qinfer.models.spec import Accelerator, ModelSpec, WarmupInput, WarmupSpec
from tests.support.backends import CPU, run, save_exported, save_scaled, save_torchscript, spec, tensors, xy

AMP = "auto_mixed_precision"
X = np.random.default_rng(3).standard_normal((5, 16)).astype(np.float32)
PORTS = tensors(("x", "FP32", (16,))), tensors(("y", "FP32", (8,)))


def write(version_dir: Path, scale: float = 1.0) -> Path:
    """Writes three layers; numbers between the last two are `scale` times larger."""
    version_dir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    weights = {
        "w0": rng.standard_normal((16, 16)).astype(np.float32) / 4,
        "w1": rng.standard_normal((16, 32)).astype(np.float32) * np.float32(scale),
        "w2": rng.standard_normal((32, 8)).astype(np.float32) / np.float32(scale),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["g"]),
        helper.make_node("MatMul", ["g", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["z"]),
        helper.make_node("Tanh", ["z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, version_dir / "model.onnx")
    return version_dir


def with_amp(backend: str) -> ModelSpec:
    return spec(backend, *PORTS, cpu_accelerators=(Accelerator(AMP, {}),))


def answer(backend: Backend, model: ModelSpec, version_dir: Path) -> Array:
    backend.load(model, version_dir, CPU)
    try:
        return run(backend, {"x": X}, rows=(2, 3)).arrays(1)["y"]
    finally:
        backend.unload()


def types_of(cache: Path) -> list[set[int]]:
    """Returns the types of the weights of each cached copy."""
    return [
        {weight.data_type for weight in onnx.load(copy).graph.initializer}
        for copy in sorted(cache.glob("onnxruntime/*/model.onnx"))
    ]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parameters, "_engine_cache", [tmp_path / "cache"])
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that were started."""
    started: list[Any] = []
    start = subprocess.run

    def counted(command: Any, **options: Any) -> Any:
        started.append(command)
        return start(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return started


def test_an_onnx_model_answers_nearly_as_in_fp32(cache: Path, builds: list[Any], tmp_path: Path) -> None:
    """From a copy that instances and later loads share, until a file of the version changes."""
    version_dir = write(tmp_path / "m" / "1")
    exact = answer(OnnxBackend(), spec("onnxruntime", *PORTS), version_dir)

    rough = [answer(OnnxBackend(), with_amp("onnxruntime"), version_dir) for _ in range(2)]

    np.testing.assert_allclose(rough[0], exact, atol=0.01)
    assert not np.array_equal(rough[0], exact)
    np.testing.assert_array_equal(rough[1], rough[0])
    assert types_of(cache) == [{TensorProto.FLOAT16}]
    assert len(builds) == 1
    write(version_dir, scale=2.0)
    answer(OnnxBackend(), with_amp("onnxruntime"), version_dir)
    assert len(builds) == 2


def test_nodes_beyond_the_range_of_fp16_stay_in_fp32(cache: Path, tmp_path: Path) -> None:
    """By the samples of the model; numbers of 1e7 between the layers are infinite in FP16."""
    version_dir = write(tmp_path / "m" / "1", scale=1e6)
    (version_dir.parent / "warmup").mkdir()
    X[:1].tofile(version_dir.parent / "warmup" / "row")
    sample = WarmupSpec(name="s", batch_size=2, inputs={"x": WarmupInput("FP32", (16,), file="row")})
    exact = answer(OnnxBackend(), spec("onnxruntime", *PORTS), version_dir)

    rough = answer(OnnxBackend(), replace(with_amp("onnxruntime"), warmup=(sample,)), version_dir)

    np.testing.assert_allclose(rough, exact, atol=0.02)
    assert not np.array_equal(rough, exact)
    assert types_of(cache) == [{TensorProto.FLOAT, TensorProto.FLOAT16}]


def test_an_output_of_a_node_in_fp32_keeps_datatype_and_range(cache: Path, tmp_path: Path) -> None:
    version_dir = write(tmp_path / "m" / "1")
    model = onnx.load(version_dir / "model.onnx")
    model.graph.node[-1].output[0] = "t"
    model.graph.node.append(helper.make_node("Mul", ["t", "million"], ["y"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1e6, np.float32), "million"))
    onnx.save(model, version_dir / "model.onnx")
    exact = answer(OnnxBackend(), spec("onnxruntime", *PORTS), version_dir)

    rough = answer(OnnxBackend(), with_amp("onnxruntime"), version_dir)

    np.testing.assert_allclose(rough, exact, atol=0.02e6)
    assert not np.array_equal(rough, exact)
    assert types_of(cache) == [{TensorProto.FLOAT, TensorProto.FLOAT16}]


def test_an_output_that_ends_with_a_cast_keeps_its_datatype(cache: Path, tmp_path: Path) -> None:
    """The converter leaves some operators in FP32."""
    version_dir = write(tmp_path / "m" / "1")
    model = onnx.load(version_dir / "model.onnx")
    model.graph.node[-1].output[0] = "t"
    model.graph.node.append(helper.make_node("Cast", ["t"], ["d"], to=TensorProto.DOUBLE))
    model.graph.node.append(helper.make_node("Cast", ["d"], ["y"], to=TensorProto.FLOAT))
    onnx.save(model, version_dir / "model.onnx")
    exact = answer(OnnxBackend(), spec("onnxruntime", *PORTS), version_dir)

    rough = answer(OnnxBackend(), with_amp("onnxruntime"), version_dir)

    np.testing.assert_allclose(rough, exact, atol=0.02)
    assert types_of(cache) == [{TensorProto.FLOAT16}]


def test_a_converter_that_fails_is_said_and_costs_the_speed_only(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by the copy that is there already."""
    broken = tmp_path / "broken" / "onnxconverter_common"
    broken.mkdir(parents=True)
    (broken / "__init__.py").touch()
    (broken / "float16.py").write_text("def convert_float_to_float16(*a, **k): raise TypeError('no such field')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    monkeypatch.setattr(parameters, "_model_variables", {"PYTHONPATH": str(broken.parent)})
    version_dir = write(tmp_path / "m" / "1")
    exact = answer(OnnxBackend(), spec("onnxruntime", *PORTS), version_dir)

    for _ in range(2):
        parameters.say_once.cache_clear()
        np.testing.assert_array_equal(answer(OnnxBackend(), with_amp("onnxruntime"), version_dir), exact)

    told = [record for record in caplog.records if record.message == "optimization has no effect"]
    reason = "no node is in FP16: it can't be converted (no such field)"
    assert [(getattr(each, "field"), getattr(each, "reason")) for each in told] == [(AMP, reason)] * 2  # noqa: B009
    assert types_of(cache) == [{TensorProto.FLOAT}]


def test_a_model_in_fp16_stays_as_it_is(cache: Path, tmp_path: Path) -> None:
    save_scaled(tmp_path, "FP16", 3)
    backend = OnnxBackend()
    backend.load(replace(xy("onnxruntime", "FP16"), cpu_accelerators=with_amp("").cpu_accelerators), tmp_path, CPU)

    answers = run(backend, {"x": np.ones((2, 2), np.float16)}, rows=(2,))

    assert answers.array().tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_missing_package_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_amp, "_PACKAGE", "onnxconverter_that_is_not_there")

    with pytest.raises(ModelLoadFailed, match=r"needs onnxconverter-common, .* run: pip install 'qinfer-ml\[amp\]'"):
        answer(OnnxBackend(), with_amp("onnxruntime"), write(tmp_path / "m" / "1"))


def test_a_model_that_can_not_be_converted_tells_no_path(cache: Path, tmp_path: Path) -> None:
    version_dir = write(tmp_path / "m" / "1")
    (version_dir / "model.onnx").write_bytes(b"no model")

    with pytest.raises(ModelLoadFailed, match=r"the FP16 copy of model 'm' can't be built: ") as failure:
        answer(OnnxBackend(), with_amp("onnxruntime"), version_dir)

    assert tmp_path.name not in failure.value.message


@pytest.mark.parametrize(
    ("found", "is_close"),
    [
        ([1.9, -99.1, np.inf, np.nan], True),
        ([2.1, -100.0, np.inf, np.nan], False),
        ([1.0, -100.0, 5.0, np.nan], False),
        ([1.0, np.inf, np.inf, np.nan], False),
    ],
)
def test_close_is_a_share_of_the_largest_number(found: list[float], *, is_close: bool) -> None:
    wanted = np.array([1.0, -100.0, np.inf, np.nan], np.float32)

    assert onnx_amp.is_close(wanted, np.array(found, np.float32)) is is_close


def test_whole_numbers_must_be_equal() -> None:
    assert onnx_amp.is_close(np.array([100, 2]), np.array([100, 2]))
    assert not onnx_amp.is_close(np.array([100, 2]), np.array([100, 3]))


class Layers(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no BF16")
@pytest.mark.parametrize(("save", "name"), [(save_torchscript, "model.pt"), (save_exported, "model.pt2")])
def test_torch_answers_nearly_as_in_fp32(save: Callable[..., None], name: str, tmp_path: Path) -> None:
    """By autocast; outputs keep the datatype of the configuration."""
    save(Layers().eval(), tmp_path / name, (torch.ones(3, 16),))
    inputs = tensors(("input" if name == "model.pt2" else "x", "FP32", (16,)))
    exact, rough = (
        _torch(replace(model, inputs=inputs), tmp_path) for model in (spec("pytorch", *PORTS), with_amp("pytorch"))
    )

    assert rough.dtype == np.float32
    np.testing.assert_allclose(rough, exact, atol=0.03)
    assert not np.array_equal(rough, exact)


def _torch(model: ModelSpec, directory: Path) -> Array:
    backend = TorchBackend()
    backend.load(model, directory, CPU)
    return run(backend, {model.inputs[0].name: X}, rows=(5,)).arrays()["y"]


def test_torch_on_a_processor_without_bf16_stays_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_effects: Callable[[], list[tuple[str, str]]]
) -> None:
    save_torchscript(Layers().eval(), tmp_path / "model.pt", (torch.ones(3, 16),))
    exact = answer(TorchBackend(), spec("pytorch", *PORTS), tmp_path)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)

    np.testing.assert_array_equal(answer(TorchBackend(), with_amp("pytorch"), tmp_path), exact)

    assert no_effects() == [(AMP, "the processor has no BF16")]


def test_the_parameter_of_torch_comes_before_the_accelerator(tmp_path: Path) -> None:
    save_torchscript(Layers().eval(), tmp_path / "model.pt", (torch.ones(3, 16),))
    exact = answer(TorchBackend(), spec("pytorch", *PORTS), tmp_path)

    found = answer(TorchBackend(), replace(with_amp("pytorch"), parameters={"qinfer.torch_amp": "none"}), tmp_path)

    np.testing.assert_array_equal(found, exact)


@pytest.mark.skipif(
    "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="the processor has no BF16"
)
def test_openvino_answers_nearly_as_in_fp32(tmp_path: Path) -> None:
    version_dir = write(tmp_path / "m" / "1")
    exact = answer(OpenvinoBackend(), spec("openvino", *PORTS), version_dir)

    rough = answer(OpenvinoBackend(), with_amp("openvino"), version_dir)

    np.testing.assert_allclose(rough, exact, atol=0.1)
    assert not np.array_equal(rough, exact)
