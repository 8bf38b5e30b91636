"""Images of 602 KB for a model that doubles them: each request differs, and so does its answer, of the same size."""

import json
from pathlib import Path

import httpx
import numpy as np

from tests.support.ensembles import scale

MODEL = "double"
IMAGE = np.arange(150_528, dtype="f4").reshape(1, -1)
"""3 by 224 by 224 numbers."""


def write_model(repository: Path) -> str:
    """Writes the model; returns its name."""
    return scale(repository, MODEL, 2.0, width=-1)


def request_of(number: int, model: str = MODEL) -> tuple[str, bytes, dict[str, str]]:
    """Returns path, body and headers of a request."""
    sent = IMAGE + number
    parameters = {"binary_data_size": sent.nbytes}
    about = {"name": "x", "shape": list(sent.shape), "datatype": "FP32", "parameters": parameters}
    wanted = {"name": "y", "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [about], "outputs": [wanted]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return f"/v2/models/{model}/infer", text + sent.tobytes(), headers


def problem_of(number: int, reply: httpx.Response) -> str:
    """Returns what is wrong with an answer; empty = nothing."""
    if reply.status_code != 200:
        return f"{number}: {reply.status_code} {reply.text}"
    found = np.frombuffer(reply.content[int(reply.headers["inference-header-content-length"]) :], "f4")
    return "" if np.array_equal(found, (IMAGE + number)[0] * 2) else f"{number} has the answer of another"


def ways_of(metrics: str) -> dict[str, int]:
    """Returns how many requests went which way, from the metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("qinfer_segment_requests_total{")]
    return {line.partition('way="')[2].partition('"')[0]: int(float(line.rpartition(" ")[2])) for line in lines}


def held_bytes(metrics: str) -> float:
    """Returns the bytes of pending requests in a gateway's memory, from its metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("qinfer_segment_bytes{") and '"held"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
