"""The effect of each field of `optimization` in config.pbtxt, backend by backend.

A field without effect on a backend never fails a load, because it changes at most the speed of a model; workers log it.
The backends themselves refuse values that would change answers.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from qinfer.models.config.message import ModelConfig, model_config_pb2
from qinfer.models.spec import FRAMEWORKS, IN_PROCESS

AUTO_MIXED_PRECISION = "auto_mixed_precision"
BACKENDS = (*sorted(IN_PROCESS | {"python"}), *sorted(FRAMEWORKS))
ALWAYS = "The next batch is always prepared while one executes."
HALF = "FP16 where the outputs of the warm-up samples stay within 1 % of FP32's"

EFFECTS: dict[str, dict[str, str]] = {
    "graph.level": {
        "onnxruntime": "-1 basic, 1 extended, 2 none; all by default.",
        "tensorflow": "A positive level compiles by XLA.",
    },
    "execution_accelerators.gpu.tensorrt": {
        "onnxruntime": "TensorRT before CUDA. If it can't run, CUDA does; other precisions than FP32 are refused then.",
        "tensorrt": "The options of engines that the worker builds.",
    },
    "execution_accelerators.gpu.cuda": {"onnxruntime": "Options of CUDA."},
    "execution_accelerators.gpu.auto_mixed_precision": {"onnxruntime": f"{HALF}.", "pytorch": "Autocast to FP16."},
    "execution_accelerators.cpu.openvino": {
        "onnxruntime": "OpenVINO before onnxruntime's own provider, which executes where OpenVINO can't run.",
        "openvino": "The backend itself.",
    },
    "execution_accelerators.cpu.auto_mixed_precision": {
        "onnxruntime": f"{HALF}; saves memory, seldom time.",
        "openvino": "BF16, on processors that have it.",
        "pytorch": "Autocast to BF16, on processors that have it.",
    },
    "priority": dict.fromkeys(("pytorch", "tensorrt"), "On GPUs, PRIORITY_MAX goes before the work of other models."),
    "cuda.graphs": {"tensorrt": "Records an execution of each shape, and replays it."},
    "cuda.busy_wait_events": {},
    "cuda.graph_spec": {},
    "cuda.output_copy_stream": {},
    "input_pinned_memory": {"pytorch": "`enable: false`: large inputs reach a GPU from ordinary memory."},
    "output_pinned_memory": {"pytorch": "`enable: false`: outputs leave a GPU to ordinary memory."},
    "gather_kernel_buffer_threshold": {},
    "eager_batching": dict.fromkeys(BACKENDS, ALWAYS),
}
"""Field, or `execution_accelerators.<device>.<name>` → backend → the effect."""


def without_effect(config: ModelConfig) -> list[str]:
    """Returns the fields that a configuration sets for a built-in backend, and that do nothing there."""
    if config.backend not in BACKENDS:
        return []
    kinds = model_config_pb2.ModelInstanceGroup
    devices = {"gpu" if group.kind == kinds.KIND_GPU else "cpu" for group in config.instance_group}
    found = [*_fields(config.optimization), *_accelerators(config.optimization.execution_accelerators)]
    return [
        field
        for field in found
        if config.backend not in EFFECTS.get(field, {})
        or (field.startswith("execution_accelerators.") and field.split(".")[1] not in devices)
    ]


def _fields(optimization: Any) -> Iterator[str]:
    for field in optimization.DESCRIPTOR.fields:
        value = getattr(optimization, field.name)
        if field.name.endswith("_pinned_memory"):
            if optimization.HasField(field.name) and not value.enable:
                yield field.name
        elif field.name != "execution_accelerators" and isinstance(value, Message):
            yield from (f"{field.name}.{each.name}" for each, _ in value.ListFields())
        elif field.name != "execution_accelerators" and value:
            yield field.name


def _accelerators(given: Any) -> Iterator[str]:
    for device, entries in (("gpu", given.gpu_execution_accelerator), ("cpu", given.cpu_execution_accelerator)):
        yield from (f"execution_accelerators.{device}.{entry.name}" for entry in entries)
