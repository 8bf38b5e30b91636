"""Which execution providers of onnxruntime run a model, and with which options; pure.

An instance on the CPU has the CPU provider. One on a GPU has CUDA, behind TensorRT where the configuration asks for it
by `optimization.execution_accelerators.gpu_execution_accelerator`, and the CPU for what neither can do.

https://github.com/triton-inference-server/onnxruntime_backend#onnx-runtime-with-tensorrt-optimization
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from qinfer.errors import ModelLoadFailed
from qinfer.models.spec import Device, ModelSpec

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"

Provider = tuple[str, dict[str, str]]
"""A provider's name and its options."""

# Triton's values of the (older) `parameters` → those of CUDAExecutionProvider.
_CUDA_PARAMETERS: Mapping[str, Mapping[str, str] | None] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "gpu_mem_limit": None,
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "do_copy_in_default_stream": {"0": "0", "1": "1"},
}
_PRECISIONS: Mapping[str, dict[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_FLAGS = {"true": "1", "false": "0"}


def providers(spec: ModelSpec, device: Device, available: Collection[str], cache: Path) -> list[Provider]:
    """Returns the providers of an instance, the preferred one first.

    Args:
        spec: The model's configuration.
        device: Where the instance is to run.
        available: What the installed onnxruntime offers.
        cache: Where TensorRT keeps its engines, if the configuration does not say.

    Raises:
        ModelLoadFailed: A provider is needed that is not there, or a setting is wrong.
    """
    if device.kind == "cpu":
        for accelerator in spec.cpu_accelerators:
            raise ModelLoadFailed(
                f"model '{spec.name}': cpu_execution_accelerator '{accelerator.name}' is not supported; remove it, or "
                "serve the model by backend 'openvino'"
            )
        return [(CPU, {})]
    chosen: list[Provider] = []
    cuda = _cuda_parameters(spec)
    for accelerator in spec.gpu_accelerators:
        if accelerator.name == "tensorrt":
            _require(spec, device, TENSORRT, available)
            chosen.append((TENSORRT, tensorrt_options(spec, device, accelerator.parameters, cache)))
        elif accelerator.name == "cuda":
            cuda |= accelerator.parameters
        else:
            raise ModelLoadFailed(
                f"model '{spec.name}': gpu_execution_accelerator '{accelerator.name}' is not known; "
                "use 'tensorrt' or 'cuda'"
            )
    _require(spec, device, CUDA, available)
    return [*chosen, (CUDA, {"device_id": str(device.number)} | cuda), (CPU, {})]


def tensorrt_options(spec: ModelSpec, device: Device, parameters: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Translates an accelerator's parameters to options of TensorrtExecutionProvider; engines are cached by default.

    Raises:
        ModelLoadFailed: A parameter is not known.
    """
    options = {
        "device_id": str(device.number),
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(cache / "onnxruntime" / spec.name),
    }
    for key, value in parameters.items():
        if key == "precision_mode":
            if value.upper() not in _PRECISIONS:
                raise ModelLoadFailed(
                    f"model '{spec.name}': precision_mode is '{value}'; it must be one of {', '.join(_PRECISIONS)}"
                )
            options |= _PRECISIONS[value.upper()]
        elif key in _RENAMED or key.startswith("trt_"):
            options[_RENAMED.get(key, key)] = _FLAGS.get(value.lower(), value)
        else:
            raise ModelLoadFailed(
                f"model '{spec.name}': parameter '{key}' of accelerator 'tensorrt' is not known; "
                f"use precision_mode, {', '.join(_RENAMED)}, or an option of onnxruntime that begins with trt_"
            )
    return options


def _cuda_parameters(spec: ModelSpec) -> dict[str, str]:
    options = {}
    for name, values in _CUDA_PARAMETERS.items():
        text = spec.parameters.get(name)
        if text is None:
            continue
        known = values or ({text: text} if text.isascii() and text.isdecimal() else {})
        if text not in known:
            expected = " or ".join(values) if values else "a number of bytes"
            raise ModelLoadFailed(f"parameter '{name}' of model '{spec.name}' is '{text}'; it must be {expected}")
        options[name] = known[text]
    return options


def _require(spec: ModelSpec, device: Device, provider: str, available: Collection[str]) -> None:
    if provider not in available:
        raise ModelLoadFailed(
            f"model '{spec.name}' is for GPU {device.number}, which needs {provider}; the installed onnxruntime has "
            f"{', '.join(sorted(available))}; run: pip install 'qinfer-ml[onnx-gpu]' (and uninstall onnxruntime), "
            "or set the instance group's kind to KIND_CPU"
        )
