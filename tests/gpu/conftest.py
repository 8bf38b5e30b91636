"""What the tests on a GPU need: which runtimes can use it, and why not."""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from qinfer_workers.inference.devices import gpus_here


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known also where only this directory is collected."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and a runtime that can use it; skipped without")


def _onnxruntime() -> str:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "the installed onnxruntime has no CUDAExecutionProvider: pip install onnxruntime-gpu"
    return "" if gpus_here(None, os.environ.get("CUDA_VISIBLE_DEVICES")) else "this machine has no GPU"


def _torch() -> str:
    import torch

    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU"


def _tensorrt() -> str:
    from qinfer.backends.cuda import Cuda
    from qinfer.errors import BackendUnavailable

    if find_spec("tensorrt") is None:
        return "TensorRT is not installed: pip install tensorrt"
    try:
        return "" if Cuda().device_count() else "CUDA finds no GPU"
    except BackendUnavailable as error:
        return error.message


_REASONS: dict[str, Callable[[], str]] = {"onnxruntime": _onnxruntime, "pytorch": _torch, "tensorrt": _tensorrt}


def usable() -> list[str]:
    """Returns the backends that can use a GPU of this machine."""
    return [name for name, reason in _REASONS.items() if not reason()]


def require(backend: str) -> None:
    """Skips the test, with the reason, where a backend can't use a GPU."""
    if reason := _REASONS[backend]():
        pytest.skip(reason)
