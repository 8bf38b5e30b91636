"""NVIDIA's Triton: the model in its Python backend, which runs it in a process beside the server.

The network is that of the run, or `model.onnx` beside this file. Triton's front
end and scheduler are its own; a batch is what its dynamic batcher gives to one call of `execute`.
"""

import os
import sys
from pathlib import Path
from typing import Any

# The backend starts its interpreter isolated, so that PYTHONPATH says nothing to it.
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)

import triton_python_backend_utils as triton  # noqa: E402

from benchmarks.peers import kserve  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        beside = Path(args["model_repository"], args["model_version"], "model.onnx")
        self._model = kserve.Model(str(beside)) if beside.exists() else kserve.Model()

    def execute(self, requests: list[Any]) -> list[Any]:
        items = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("y", y)]) for y in self._model.run_many(items)]
