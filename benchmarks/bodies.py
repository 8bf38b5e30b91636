"""The requests that are sent, and the check that a server's answer to one is right before it is measured."""

import json
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.models import BenchModel, FloatArray

JSON, BINARY = "json", "binary"
LENGTH_HEADER = "Inference-Header-Content-Length"
TOLERANCE = 1e-4
"""Batches of different sizes may take different kernels, so the last bits of a float differ."""


class WrongAnswer(Exception):
    """A server answered, and not what ONNX Runtime answers in process: nothing of it may be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One request body on disk, which wrk reads, with the headers that belong to it."""

    model: BenchModel
    encoding: str
    path: Path
    headers: dict[str, str]
    expected: FloatArray


def write_body(model: BenchModel, encoding: str, expected: FloatArray, directory: Path) -> Body:
    """Writes the body of a one-row request in the KServe form.

    Args:
        model: The model that is asked.
        encoding: `json`, or `binary` for the binary tensor extension both ways.
        expected: The in-process answer, float32[1, *output_dims].
        directory: Where the body file goes.
    """
    example = model.example()
    tensor: dict[str, object] = {"name": "x", "shape": list(example.shape), "datatype": "FP32"}
    if encoding == JSON:
        # Shortest digits: what a client's float32 looks like, not its float64 expansion.
        tensor["data"] = [float(str(value)) for value in example.ravel()]
        content = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"}
    else:
        tensor["parameters"] = {"binary_data_size": example.nbytes}
        output = {"name": "y", "parameters": {"binary_data": True}}
        header = json.dumps({"inputs": [tensor], "outputs": [output]}, separators=(",", ":")).encode()
        content = header + example.tobytes()
        headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(header))}
    path = directory / f"{model.name}.{encoding}"
    path.write_bytes(content)
    return Body(model=model, encoding=encoding, path=path, headers=headers, expected=expected)


def check_answer(url: str, body: Body) -> None:
    """Asks once and compares the answer with the in-process one.

    Raises:
        WrongAnswer: The status is not 200, or the output differs.
    """
    response = httpx.post(url, content=body.path.read_bytes(), headers=body.headers, timeout=30.0, trust_env=False)
    if response.status_code != 200:
        raise WrongAnswer(f"{url} answered {response.status_code}: {response.text[:300]}")
    output = _first_output(response)
    if output.shape != body.expected.shape or not np.allclose(output, body.expected, atol=TOLERANCE, rtol=TOLERANCE):
        raise WrongAnswer(f"{url} answered {output.ravel()[:4]}, expected {body.expected.ravel()[:4]}")


def _first_output(response: httpx.Response) -> FloatArray:
    length = response.headers.get(LENGTH_HEADER)
    header = json.loads(response.content[: int(length)] if length else response.content)
    output = header["outputs"][0]
    if length:
        return np.frombuffer(response.content[int(length) :], np.float32).reshape(output["shape"])
    return np.array(output["data"], np.float32).reshape(output["shape"])
