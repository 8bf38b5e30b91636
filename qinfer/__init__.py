"""qinfer: a durable, queue-backed inference server that speaks NVIDIA Triton's protocol.

The client, its results, `model`, `local` and `from_…` for served functions, `qinfer.errors` and `qinfer.tensors` are
imported at their first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncModelFunction",
    "AsyncSequence",
    "Client",
    "Device",
    "InferResult",
    "Job",
    "JobEstimate",
    "JobLogLine",
    "JobPreview",
    "JobStatus",
    "ModelFunction",
    "ModelIndexEntry",
    "ModelMetadata",
    "ModelStatistics",
    "OperationStatus",
    "RecordedRequest",
    "RequestHandle",
    "RequestStatus",
    "Sequence",
    "State",
    "TensorMetadata",
    "__version__",
    "call",
    "from_mlflow",
    "from_onnx",
    "from_sklearn",
    "from_torch",
    "from_transformers",
    "local",
    "model",
]

_MODULES = ("errors", "tensors")
_FRAMEWORKS = ("from_mlflow", "from_onnx", "from_sklearn", "from_torch", "from_transformers")
_ELSEWHERE = dict.fromkeys(_FRAMEWORKS, "qinfer.functions.frameworks") | {
    "Device": "qinfer.models.spec",
    "State": "qinfer.functions.declare",
    "call": "qinfer.functions.calls",
    "local": "qinfer.functions.runner",
    "model": "qinfer.functions.declare",
}
"""Name → its module; all others are of the client."""

if TYPE_CHECKING:
    from qinfer import errors as errors
    from qinfer import tensors as tensors
    from qinfer.client import (
        AsyncClient,
        AsyncJob,
        AsyncModelFunction,
        AsyncSequence,
        Client,
        InferResult,
        Job,
        JobEstimate,
        JobLogLine,
        JobPreview,
        JobStatus,
        ModelFunction,
        ModelIndexEntry,
        ModelMetadata,
        ModelStatistics,
        OperationStatus,
        RecordedRequest,
        RequestHandle,
        RequestStatus,
        Sequence,
        TensorMetadata,
    )
    from qinfer.functions.calls import call
    from qinfer.functions.declare import State, model
    from qinfer.functions.frameworks import from_mlflow, from_onnx, from_sklearn, from_torch, from_transformers
    from qinfer.functions.runner import local
    from qinfer.models.spec import Device
else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"qinfer.{name}")
        if name in __all__:
            return getattr(import_module(_ELSEWHERE.get(name, "qinfer.client")), name)
        raise AttributeError(f"module 'qinfer' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
