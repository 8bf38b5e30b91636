"""A `model.py` that calls ONNX Runtime, for the Python backends of Triton and of qinfer.

The network is `model.onnx` beside this file. A batch is what the dynamic batcher gives to one call of `execute`.
"""

import os
import sys
from pathlib import Path
from typing import Any

# Triton starts its interpreter isolated, so that PYTHONPATH says nothing to it.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
import triton_python_backend_utils as triton  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = int(os.environ.get("BENCH_THREADS", "1"))
        file = str(Path(__file__).with_name("model.onnx"))
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        items = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        x = items[0] if len(items) == 1 else np.concatenate(items)
        (y,) = self._session.run(None, {"x": x})
        parts = np.split(y, np.cumsum([len(item) for item in items[:-1]]))
        return [triton.InferenceResponse([triton.Tensor("y", part)]) for part in parts]
