"""What the python backend adds to a model's own time: `python -m benchmarks.python_backend`.

A model that returns its input, in its own process; without queue, worker and gateway. The time of a batch is what it
takes there and back.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from qinfer.backends.base import OneResponse
from qinfer.backends.python import PythonBackend
from qinfer.batching.assemble import assemble
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.core.settings import LimitSettings
from qinfer.errors import QinferError
from qinfer.models.config import config
from qinfer.models.spec import Device
from qinfer.tensors import Tensor, from_numpy

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""
CONFIG = """
backend: "python" max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
CASES = ((1, 2, 5000), (16, 16, 2000), (16, 150_528, 100), (1, 256 * 1024, 500), (1, 2_621_440, 200))
"""Requests of a batch, elements of each, batches."""


class Unheard(OneResponse):
    """A context that lets go of what it is told."""

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Takes an answer."""

    def cancelled(self, item: int) -> bool:
        """Tells that somebody waits."""
        return False

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Is not called."""
        raise NotImplementedError


def main() -> None:
    """Measures each case and prints a line."""
    with TemporaryDirectory() as directory:
        version = Path(directory) / "echo" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        normal = config.normalise(config.parse(CONFIG), "echo", ["model.py"])
        backend = PythonBackend()
        backend.load(config.to_spec(normal, LimitSettings()), version, Device())
        for requests, elements, batches in CASES:
            tensor = from_numpy("x", np.ones((1, elements), "<f4"))
            waiting = [InferRequest(model="echo", inputs=(tensor,)) for _ in range(requests)]
            for _ in range(max(batches // 10, 3)):
                backend.execute(assemble(waiting, [1] * requests, room=backend.room), Unheard())
            begin_s = time.perf_counter()
            for _ in range(batches):
                backend.execute(assemble(waiting, [1] * requests, room=backend.room), Unheard())
            each_s = (time.perf_counter() - begin_s) / batches
            print(
                f"{requests:3} requests of {elements * 4:11,} bytes: {each_s * 1e6:9.0f} µs, "
                f"{2 * requests * tensor.nbytes / each_s / 1e9:6.2f} GB/s in both directions together"
            )
        backend.unload()


if __name__ == "__main__":
    main()
