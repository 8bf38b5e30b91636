"""Which providers and options an instance of the onnxruntime backend gets."""

from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from qinfer.backends import onnx
from qinfer.backends.onnx import CPU as CPU_PROVIDER
from qinfer.backends.onnx import CUDA, TENSORRT, OnnxBackend, providers
from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.spec import Accelerator, Device, ModelSpec
from tests.support import models
from tests.support.backends import CPU, GPU, spec, tensors

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


def test_openvino_on_the_cpu_is_refused() -> None:
    """The remedy is the backend of that name."""
    with pytest.raises(ModelLoadFailed, match=r"'openvino' is not supported; .* by backend 'openvino'"):
        providers(model(cpu_accelerators=(Accelerator("openvino", {}),)), CPU, ALL, CACHE)


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
        ({"graph_level": 5}, r"graph.level of model 'm' is 5; it must be -1, 0, 1 or 2"),
    ],
)
def test_wrong_settings_of_sessions(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Each is named, with what it may be."""
    models.add_sub(tmp_path)
    with pytest.raises(ModelLoadFailed, match=text):
        OnnxBackend().load(model(**changes), tmp_path / "add_sub" / "1", CPU)
