"""The requests that are sent, and the check that a server's answer to one is right before it is measured."""

import json
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from benchmarks.models import BenchModel, FloatArray

JSON, BINARY, GRPC = "json", "binary", "grpc"
LENGTH_HEADER = "Inference-Header-Content-Length"
GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
GRPC_PREFIX_BYTES = 5
"""Before each message: a byte that says whether it is compressed, and its length."""
TOLERANCE = 1e-4
"""Batches of different sizes may take different kernels, so the last bits of a float differ."""


class WrongAnswer(Exception):
    """A server answered, and not what ONNX Runtime answers in process: nothing of it may be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One request body on disk, which the load generator reads, with the headers that belong to it.

    Attributes:
        model: The model that is asked.
        encoding: How it is asked.
        path: The file; for gRPC the message with its prefix.
        headers: The headers of HTTP, or the metadata of gRPC.
        expected: The in-process answer, float32[1, *output_dims].
        samples: Bodies whose answers are checked, where `path` is no body but a recording of many requests.
    """

    model: BenchModel
    encoding: str
    path: Path
    headers: dict[str, str]
    expected: FloatArray
    samples: tuple["Body", ...] = ()


def write_body(model: BenchModel, encoding: str, expected: FloatArray, directory: Path) -> Body:
    """Writes the body of a one-row request in the KServe form.

    Args:
        model: The model that is asked.
        encoding: `json`, `binary` for the binary tensor extension both ways, or `grpc`.
        expected: The in-process answer, float32[1, *output_dims].
        directory: Where the body file goes.
    """
    content, headers = encode(model, encoding, model.example())
    path = directory / f"{model.name}.{encoding}"
    path.write_bytes(content)
    return Body(model=model, encoding=encoding, path=path, headers=headers, expected=expected)


def encode(model: BenchModel, encoding: str, example: FloatArray) -> tuple[bytes, dict[str, str]]:
    """Returns the body and the headers of a request for `example`, float32[1, *input_dims]."""
    if encoding == GRPC:
        return _grpc_message(model, example), {"content-type": "application/grpc", "te": "trailers"}
    tensor: dict[str, object] = {"name": "x", "shape": list(example.shape), "datatype": "FP32"}
    if encoding == JSON:
        # Shortest digits: what a client's float32 looks like, not its float64 expansion.
        tensor["data"] = [float(str(value)) for value in example.ravel()]
        content = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
        return content, {"Content-Type": "application/json"}
    tensor["parameters"] = {"binary_data_size": example.nbytes}
    output = {"name": "y", "parameters": {"binary_data": True}}
    header = json.dumps({"inputs": [tensor], "outputs": [output]}, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(header))}
    return header + example.tobytes(), headers


def _grpc_message(model: BenchModel, example: FloatArray) -> bytes:
    """The length-prefixed message as NVIDIA's client sends it: the tensor's bytes in `raw_input_contents`."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=example.shape)
    request = pb.ModelInferRequest(model_name=model.name, inputs=[tensor], raw_input_contents=[example.tobytes()])
    message = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


def check_answer(url: str, body: Body) -> None:
    """Asks once and compares the answer with the in-process one; of a recording it asks all samples.

    Raises:
        WrongAnswer: The status is not 200 or OK, or the output differs.
    """
    for sample in body.samples or (body,):
        output = _grpc_output(grpc_reply(url, sample)) if sample.encoding == GRPC else _http_output(url, sample)
        expected = sample.expected
        if output.shape != expected.shape or not np.allclose(output, expected, atol=TOLERANCE, rtol=TOLERANCE):
            raise WrongAnswer(f"{url} answered {output.ravel()[:4]}, expected {expected.ravel()[:4]}")


def grpc_reply(url: str, body: Body) -> bytes:
    """Makes one call and returns its answer, an encoded `ModelInferResponse`.

    Raises:
        WrongAnswer: The call ended with another status than OK.
    """
    with grpc.insecure_channel(httpx.URL(url).netloc.decode()) as channel:
        call = channel.unary_unary(GRPC_PATH)
        try:
            reply: bytes = call(body.path.read_bytes()[GRPC_PREFIX_BYTES:], timeout=30.0)
        except grpc.RpcError as error:
            raise WrongAnswer(f"{url} answered {error.code().name}: {error.details()}") from None
    return reply


def _grpc_output(reply: bytes) -> FloatArray:
    response = pb.ModelInferResponse.FromString(reply)
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(tuple(response.outputs[0].shape))


def _http_output(url: str, body: Body) -> FloatArray:
    response = httpx.post(url, content=body.path.read_bytes(), headers=body.headers, timeout=30.0, trust_env=False)
    if response.status_code != 200:
        raise WrongAnswer(f"{url} answered {response.status_code}: {response.text[:300]}")
    return _first_output(response)


def _first_output(response: httpx.Response) -> FloatArray:
    length = response.headers.get(LENGTH_HEADER)
    header = json.loads(response.content[: int(length)] if length else response.content)
    output = header["outputs"][0]
    if length:
        return np.frombuffer(response.content[int(length) :], np.float32).reshape(output["shape"])
    return np.array(output["data"], np.float32).reshape(output["shape"])
