"""Explicit state: the sum of a sequence's steps so far, for the Python backend of qinfer and of Triton."""

import os
import sys
from typing import Any

# Triton starts its interpreter isolated, so that PYTHONPATH says nothing to it.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

import numpy as np  # noqa: E402
import triton_python_backend_utils as triton  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._sums: dict[int, Any] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        return [triton.InferenceResponse([triton.Tensor("y", self._step(request))]) for request in requests]

    def _step(self, request: Any) -> Any:
        x, start, end, ready, sequence = (
            triton.get_input_tensor_by_name(request, name).as_numpy() for name in ("x", "start", "end", "ready", "id")
        )
        if not ready.item():
            return np.zeros_like(x)
        key = sequence.item()
        total = x.copy() if start.item() else self._sums[key] + x
        if end.item():
            self._sums.pop(key, None)
        else:
            self._sums[key] = total
        return total
