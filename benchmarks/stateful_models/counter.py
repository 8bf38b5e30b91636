"""Decoupled: counts for each request, for the Python backend of qinfer and of Triton.

Requests of a batch get their responses by turns, as a language model gives each caller a word at a time.
"""

import json
import os
import sys
from typing import Any

# Triton starts its interpreter isolated, so that PYTHONPATH says nothing to it.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

import numpy as np  # noqa: E402
import triton_python_backend_utils as triton  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._responses = int(parameters["responses"]["string_value"])

    def execute(self, requests: list[Any]) -> None:
        senders = [request.get_response_sender() for request in requests]
        for number in range(self._responses):
            y = np.full((1, 1), number, np.float32)
            for sender in senders:
                sender.send(triton.InferenceResponse([triton.Tensor("y", y)]))
        for sender in senders:
            sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
