"""What every peer shares: the session with equal thread options, and the KServe JSON form read and written with orjson.

Runs in the peers' own environments, so it imports nothing of qinfer.
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import orjson

FloatArray = npt.NDArray[np.float32]

MODEL = os.environ.get("BENCH_MODEL", "")
PORT = int(os.environ.get("BENCH_PORT", "0"))
MAX_BATCH_SIZE = int(os.environ.get("BENCH_MAX_BATCH_SIZE", "64"))
INFER_PATH = f"/v2/models/{MODEL}/infer"


class Model:
    """The ONNX model of this run, or of a file, in ONNX Runtime with the threads that all servers have."""

    def __init__(self, file: str = os.environ.get("BENCH_MODEL_FILE", "")) -> None:
        threads = int(os.environ["BENCH_THREADS"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(self, x: FloatArray) -> FloatArray:
        """Runs one batch, float32[batch, ...] in and out."""
        result: FloatArray = self._session.run(None, {"x": x})[0]
        return result

    def run_many(self, items: list[FloatArray]) -> list[FloatArray]:
        """Runs requests as one batch and splits the answer."""
        if len(items) == 1:
            return [self.run(items[0])]
        rows = np.cumsum([len(item) for item in items[:-1]])
        return np.split(self.run(np.concatenate(items)), rows)


def read_tensor(request: dict[str, Any]) -> FloatArray:
    """Returns the first input of a parsed KServe request."""
    tensor = request["inputs"][0]
    return np.array(tensor["data"], np.float32).reshape(tensor["shape"])


def answer(y: FloatArray) -> dict[str, Any]:
    """Returns the KServe response as an object."""
    output = {"name": "y", "shape": y.shape, "datatype": "FP32", "data": y.ravel().tolist()}
    return {"model_name": MODEL, "model_version": "1", "outputs": [output]}


def parse(body: bytes) -> FloatArray:
    """Returns the first input of a KServe body."""
    return read_tensor(orjson.loads(body))


def render(y: FloatArray) -> bytes:
    """Returns the KServe response as bytes."""
    return orjson.dumps(answer(y))
