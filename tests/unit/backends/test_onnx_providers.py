"""Which providers and options an instance of the onnxruntime backend gets."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from qinfer.backends import onnx
from qinfer.backends.onnx import CPU as CPU_PROVIDER
from qinfer.backends.onnx import CUDA, OPENVINO, TENSORRT, OnnxBackend, providers
from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.spec import Accelerator, Device, ModelSpec
from tests.support import models
from tests.support.backends import CPU, GPU, run, spec, tensors

NoEffects = Callable[[], list[tuple[str, str]]]
ALL = [TENSORRT, CUDA, CPU_PROVIDER]
CACHE = Path("/cache")
_Session = ort.InferenceSession
X = tensors(("a", "FP32", (4,)), ("b", "FP32", (4,)))
Y = tensors(("sum", "FP32", (4,)))


def model(**changes: Any) -> ModelSpec:
    return spec("onnxruntime", X, Y, **changes)


def test_the_cpu_has_its_own_provider_only() -> None:
    """A GPU build of onnxruntime still runs CPU instances on the CPU."""
    assert providers(model(gpu_accelerators=(Accelerator("tensorrt", {}),)), CPU, ALL, CACHE) == [(CPU_PROVIDER, {})]


def test_a_gpu_has_cuda_with_its_options() -> None:
    """The device's number and Triton's parameters become options of CUDA; the CPU takes what CUDA can't."""
    parameters = {"cudnn_conv_algo_search": "1", "gpu_mem_limit": "1024", "arena_extend_strategy": "1"}
    cuda = Accelerator("cuda", {"use_ep_level_unified_stream": "1"})
    chosen = providers(model(parameters=parameters, gpu_accelerators=(cuda,)), Device("gpu", 1), ALL, CACHE)
    assert chosen == [
        (
            CUDA,
            {
                "device_id": "1",
                "cudnn_conv_algo_search": "HEURISTIC",
                "gpu_mem_limit": "1024",
                "arena_extend_strategy": "kSameAsRequested",
                "use_ep_level_unified_stream": "1",
            },
        ),
        (CPU_PROVIDER, {}),
    ]


def test_tensorrt_comes_before_cuda() -> None:
    """An accelerator's parameters have Triton's names; engines are cached unless the configuration says otherwise."""
    given = {"precision_mode": "fp16", "max_workspace_size_bytes": "1000", "trt_timing_cache_enable": "true"}
    (name, options), (second, _), _ = providers(
        model(gpu_accelerators=(Accelerator("tensorrt", given),)), GPU, ALL, CACHE
    )
    assert (name, second) == (TENSORRT, CUDA)
    assert options == {
        "device_id": "0",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": "/cache/onnxruntime/m",
        "trt_fp16_enable": "1",
        "trt_max_workspace_size": "1000",
        "trt_timing_cache_enable": "1",
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gpu_accelerators": (Accelerator("openvino", {}),)}, "gpu_execution_accelerator 'openvino' is not known"),
        ({"gpu_accelerators": (Accelerator("tensorrt", {"precision_mode": "FP12"}),)}, "precision_mode is 'FP12'"),
        ({"gpu_accelerators": (Accelerator("tensorrt", {"speed": "1"}),)}, "parameter 'speed' of accelerator"),
        ({"parameters": {"cudnn_conv_algo_search": "3"}}, "'cudnn_conv_algo_search' .* must be 0 or 1 or 2"),
        ({"parameters": {"gpu_mem_limit": "much"}}, "'gpu_mem_limit' .* is 'much'; it must be a number of bytes"),
    ],
)
def test_wrong_settings_of_gpus(changes: dict[str, Any], text: str) -> None:
    """Each is named, with what it may be."""
    with pytest.raises(ModelLoadFailed, match=text):
        providers(model(**changes), GPU, ALL, CACHE)


def with_openvino(**parameters: str) -> ModelSpec:
    return model(cpu_accelerators=(Accelerator("openvino", parameters),), parameters={"intra_op_thread_count": "2"})


def test_openvino_comes_before_the_cpu() -> None:
    """With the threads of the model, and the accelerator's parameters as options of OpenVINO."""
    chosen = providers(with_openvino(precision="FP32"), CPU, [OPENVINO, CPU_PROVIDER], CACHE)

    assert chosen == [(OPENVINO, {"num_of_threads": "2", "precision": "FP32"}), (CPU_PROVIDER, {})]
    own = providers(with_openvino(num_of_threads="3"), CPU, [OPENVINO, CPU_PROVIDER], CACHE)
    assert own[0] == (OPENVINO, {"num_of_threads": "3"})


def test_openvino_that_is_not_installed_is_left_out(no_effects: NoEffects) -> None:
    """The log names the package, and the backend that needs none, once."""
    for _ in range(2):
        assert providers(with_openvino(), CPU, ALL, CACHE) == [(CPU_PROVIDER, {})]

    assert [field for field, _ in no_effects()] == ["openvino"]
    assert "pip install onnxruntime-ep-openvino, or" in no_effects()[0][1]


@pytest.mark.parametrize("parameters", [{}, {"precision_mode": "FP32"}, {"trt_fp16_enable": "false"}])
def test_tensorrt_that_is_not_there_is_left_out(parameters: dict[str, str], no_effects: NoEffects) -> None:
    asked = model(gpu_accelerators=(Accelerator("tensorrt", parameters),))

    assert [name for name, _ in providers(asked, GPU, [CUDA, CPU_PROVIDER], CACHE)] == [CUDA, CPU_PROVIDER]

    assert no_effects() == [("tensorrt", "the installed onnxruntime lacks it; CUDA executes")]


@pytest.mark.parametrize("parameters", [{"precision_mode": "FP16"}, {"trt_int8_enable": "true"}])
def test_tensorrt_that_is_not_there_is_refused_if_answers_would_differ(parameters: dict[str, str]) -> None:
    asked = model(gpu_accelerators=(Accelerator("tensorrt", parameters),))

    with pytest.raises(ModelLoadFailed, match=r"CUDA would answer in FP32; run: pip install tensorrt"):
        providers(asked, GPU, [CUDA, CPU_PROVIDER], CACHE)


def test_tensorrt_that_does_not_start_is_left_out(no_effects: NoEffects) -> None:
    """As where onnxruntime is built for it, and its libraries are not installed."""
    wanted = providers(model(gpu_accelerators=(Accelerator("tensorrt", {}),)), GPU, ALL, CACHE)

    onnx._check_device(model(), GPU, wanted, [CUDA, CPU_PROVIDER])

    assert no_effects() == [("tensorrt", "it could not start; CUDA executes")]


def test_another_accelerator_of_the_cpu_is_refused() -> None:
    with pytest.raises(ModelLoadFailed, match="cpu_execution_accelerator 'tensorrt' is not known; use 'openvino' or"):
        providers(model(cpu_accelerators=(Accelerator("tensorrt", {}),)), CPU, [OPENVINO, *ALL], CACHE)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A plugin of OpenVINO that is found and registered; returns the devices that it offers."""
    devices: list[Any] = []
    found: Any = ModuleType("onnxruntime_ep_openvino")
    found.__spec__ = ModuleSpec(found.__name__, None)
    found.get_library_path, found.get_ep_name = lambda: "plugin.so", lambda: OPENVINO
    monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU_PROVIDER])
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda name, path: None)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    onnx._openvino_devices.cache_clear()
    monkeypatch.setattr(onnx, "_openvino_devices", onnx._openvino_devices.__wrapped__)
    return devices


def test_the_plugin_gets_the_cpus_that_it_offers(
    plugin: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_effects: NoEffects
) -> None:
    models.add_sub(tmp_path)
    cpu, gpu = (SimpleNamespace(ep_name=OPENVINO, ep_metadata={"ov_device": name}) for name in ("CPU", "GPU"))
    plugin += [cpu, gpu, SimpleNamespace(ep_name=CPU_PROVIDER, ep_metadata={})]
    given: list[Any] = []

    class Options(ort.SessionOptions):  # type: ignore[misc]  # it has no types
        def add_provider_for_devices(self, *both: Any) -> None:
            given.append(both)

    monkeypatch.setattr(ort, "SessionOptions", Options)

    OnnxBackend().load(with_openvino(), tmp_path / "add_sub" / "1", CPU)

    assert no_effects() == [("openvino", "it could not start")]
    assert given == [([cpu], {"num_of_threads": "2"})]


def test_a_plugin_that_does_not_know_this_cpu(plugin: list[Any], tmp_path: Path, no_effects: NoEffects) -> None:
    """It takes those of Intel only; the other package takes all."""
    inputs = {"a": np.ones((2, 4), "f4"), "b": np.full((2, 4), 2, "f4")}
    models.add_sub(tmp_path)
    assert plugin == []

    backend = OnnxBackend()
    backend.load(with_openvino(), tmp_path / "add_sub" / "1", CPU)

    assert no_effects() == [("openvino", onnx._NOT_THIS_CPU)]
    assert run(backend, inputs, rows=[2]).arrays()["sum"].tolist() == [[3.0] * 4] * 2


@pytest.mark.skipif(OPENVINO not in onnx._available(), reason="this onnxruntime has no OpenVINO")
def test_openvino_answers_as_onnxruntime_does(tmp_path: Path) -> None:
    models.add_sub(tmp_path)
    inputs = {"a": np.ones((2, 4), "f4"), "b": np.full((2, 4), 2, "f4")}
    backend = OnnxBackend()
    backend.load(with_openvino(precision="FP32"), tmp_path / "add_sub" / "1", CPU)

    answers = run(backend, inputs, rows=[2])

    assert backend._session.get_providers()[0] == OPENVINO
    assert answers.arrays()["sum"].tolist() == [[3.0] * 4] * 2


def test_accelerators_are_read_from_the_configuration() -> None:
    """`optimization.execution_accelerators` reaches the backend."""
    text = """
    name: "m" backend: "onnxruntime" max_batch_size: 8
    input { name: "a" data_type: TYPE_FP32 dims: [4] } output { name: "sum" data_type: TYPE_FP32 dims: [4] }
    optimization { execution_accelerators { gpu_execution_accelerator: [
      { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } ] } }
    """
    read = to_spec(normalise(parse(text), "m"), LimitSettings())
    assert read.gpu_accelerators == (Accelerator("tensorrt", {"precision_mode": "FP16"}),)


@pytest.mark.skipif(CUDA in ort.get_available_providers(), reason="this onnxruntime can run on GPUs")
def test_a_gpu_without_its_build_of_onnxruntime(tmp_path: Path) -> None:
    """A build for CPUs refuses an instance on a GPU, with the package to install."""
    models.add_sub(tmp_path)
    with pytest.raises(ModelLoadFailed, match=r"needs CUDAExecutionProvider; .* pip install 'qinfer-ml\[onnx-gpu\]'"):
        OnnxBackend().load(model(), tmp_path / "add_sub" / "1", GPU)


def test_cuda_of_nvidias_packages_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those packages' libraries are loaded before the first session on a GPU, and never for one on the CPU."""
    models.add_sub(tmp_path)
    found: list[str] = []
    onnx._find_cuda.cache_clear()
    monkeypatch.setattr(ort, "preload_dlls", lambda: found.append("CUDA"))
    monkeypatch.setattr(ort, "get_available_providers", lambda: ALL)
    monkeypatch.setattr(ort, "InferenceSession", partial(_session, found))
    OnnxBackend().load(model(), tmp_path / "add_sub" / "1", CPU)
    for _ in range(2):
        with pytest.raises(ModelLoadFailed, match="CUDAExecutionProvider could not start there"):
            OnnxBackend().load(model(), tmp_path / "add_sub" / "1", GPU)
    assert found == ["CPUExecutionProvider", "CUDA", "CUDAExecutionProvider", "CUDAExecutionProvider"]


def _session(opened: list[str], path: str, options: Any, providers: list[Any]) -> ort.InferenceSession:
    """Opens a session on the CPU, as onnxruntime does where it can't use a GPU."""
    opened.append(providers[0][0])
    return _Session(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parameters": {"execution_mode": "2"}}, "'execution_mode' of model 'm' is '2'; it must be one of 0, 1"),
        ({"parameters": {"enable_mem_arena": "x"}}, "'enable_mem_arena' of model 'm' is 'x'"),
        ({"parameters": {"memory.enable_memory_arena_shrinkage": "gpu:7"}}, "must be of cpu:0"),
    ],
)
def test_wrong_settings_of_sessions(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Each is named, with what it may be."""
    models.add_sub(tmp_path)
    with pytest.raises(ModelLoadFailed, match=text):
        OnnxBackend().load(model(**changes), tmp_path / "add_sub" / "1", CPU)


def test_every_graph_level_answers_alike(tmp_path: Path, no_effects: NoEffects) -> None:
    """Triton takes an unknown level for all optimisations."""
    models.add_sub(tmp_path)
    rng = np.random.default_rng(1)
    inputs = {name: rng.random((3, 4), np.float32) for name in "ab"}

    for level in (None, -1, 0, 1, 2, 5):
        backend = OnnxBackend()
        backend.load(model(graph_level=level), tmp_path / "add_sub" / "1", CPU)
        np.testing.assert_array_equal(run(backend, inputs, rows=[3]).arrays()["sum"], inputs["a"] + inputs["b"])

    assert no_effects() == [("graph.level", "5 is none of -1, 0, 1 and 2")]
