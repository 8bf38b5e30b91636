"""The requests that are sent, and the check that a server's answer to one is right before it is measured."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import grpc
import httpx
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from benchmarks.models import BenchModel, FloatArray

JSON, BINARY, GRPC = "json", "binary", "grpc"
SHM = "shm"
"""The input in a shared memory object of the machine, which the server has as `REGION`.

A large output goes there, too, behind the input; a small one comes as in `binary`."""
REGION = "input"
LARGE_OUTPUT = 64 * 1024
LENGTH_HEADER = "Inference-Header-Content-Length"
GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
GRPC_STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
GRPC_PREFIX_BYTES = 5
"""Before each message: a byte that says whether it is compressed, and its length."""
TIMEOUT_S = 30.0
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
        encoding: `json`, `binary` for the binary tensor extension both ways, `shm` or `grpc`.
        expected: The in-process answer, float32[1, *output_dims].
        directory: Where the body file goes.
    """
    into = expected.nbytes if encoding == SHM and expected.nbytes >= LARGE_OUTPUT else 0
    content, headers = encode(model.name, encoding, model.example(), region_output=into)
    path = directory / f"{model.name}.{encoding}"
    path.write_bytes(content)
    return Body(model=model, encoding=encoding, path=path, headers=headers, expected=expected)


def encode(
    name: str,
    encoding: str,
    example: FloatArray,
    parameters: Mapping[str, int | bool] | None = None,
    *,
    region_output: int = 0,
) -> tuple[bytes, dict[str, str]]:
    """Returns the body and the headers of a request for a model's input `x`, with its parameters.

    For `SHM`, `region_output` is the size of an output that goes into the region; 0 = into the reply.
    """
    if encoding == GRPC:
        message = _grpc_message(name, example, parameters or {})
        return message, {"content-type": "application/grpc", "te": "trailers"}
    tensor: dict[str, object] = {"name": "x", "shape": list(example.shape), "datatype": "FP32"}
    request: dict[str, object] = {"parameters": parameters} if parameters else {}
    if encoding == JSON:
        # Shortest digits: what a client's float32 looks like, not its float64 expansion.
        tensor["data"] = [float(str(value)) for value in example.ravel()]
        content = json.dumps({**request, "inputs": [tensor]}, separators=(",", ":")).encode()
        return content, {"Content-Type": "application/json"}
    is_shared = encoding == SHM
    tensor["parameters"] = _in_region(example.nbytes) if is_shared else {"binary_data_size": example.nbytes}
    into = {**_in_region(region_output), "shared_memory_offset": example.nbytes}
    output = {"name": "y", "parameters": into if region_output else {"binary_data": True}}
    header = json.dumps({**request, "inputs": [tensor], "outputs": [output]}, separators=(",", ":")).encode()
    if is_shared:
        return header, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(header))}
    return header + example.tobytes(), headers


def _in_region(nbytes: int) -> dict[str, object]:
    return {"shared_memory_region": REGION, "shared_memory_byte_size": nbytes}


def _grpc_message(name: str, example: FloatArray, parameters: Mapping[str, int | bool]) -> bytes:
    """The length-prefixed message as NVIDIA's client sends it: the tensor's bytes in `raw_input_contents`."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=example.shape)
    request = pb.ModelInferRequest(model_name=name, inputs=[tensor], raw_input_contents=[example.tobytes()])
    for key, value in parameters.items():
        setattr(request.parameters[key], "bool_param" if isinstance(value, bool) else "int64_param", value)
    message = request.SerializeToString()
    return b"\0" + len(message).to_bytes(4) + message


@contextmanager
def shared_object(key: str, content: bytes) -> Iterator[None]:
    """Keeps a shared memory object of that name and content."""
    path = Path("/dev/shm", key)
    path.write_bytes(content)
    try:
        yield
    finally:
        path.unlink()


def register(url: str, key: str, nbytes: int) -> None:
    """Makes a shared memory object a server's `REGION`, instead of an earlier one.

    Raises:
        WrongAnswer: The server does not take it.
    """
    region = f"/v2/systemsharedmemory/region/{REGION}"
    for path, given in ((f"{region}/unregister", {}), (f"{region}/register", {"key": f"/{key}", "byte_size": nbytes})):
        response = httpx.post(httpx.URL(url).copy_with(path=path), json=given, timeout=TIMEOUT_S, trust_env=False)
        if response.status_code != 200:
            raise WrongAnswer(f"{url} answered {response.status_code} to {path}: {response.text[:300]}")


def check_answer(url: str, body: Body) -> None:
    """Asks once and compares the answer with the in-process one; of a recording it asks all samples.

    Raises:
        WrongAnswer: The status is not 200 or OK, or the output differs.
    """
    for sample in body.samples or (body,):
        output = answer(url, sample.encoding, sample.path.read_bytes(), sample.headers)
        check_output(url, output, sample.expected)


def check_output(url: str, output: FloatArray, expected: FloatArray) -> None:
    """Compares an output with the expected one.

    Raises:
        WrongAnswer: They differ.
    """
    if output.shape != expected.shape or not np.allclose(output, expected, atol=TOLERANCE, rtol=TOLERANCE):
        raise WrongAnswer(f"{url} answered {output.ravel()[:4]}, expected {expected.ravel()[:4]}")


def answer(url: str, encoding: str, content: bytes, headers: Mapping[str, str]) -> FloatArray:
    """Asks once, with a body and headers as `encode` makes them, and returns the first output.

    Raises:
        WrongAnswer: The status is not 200 or OK.
    """
    if encoding == GRPC:
        return _grpc_output(pb.ModelInferResponse.FromString(grpc_reply(url, content)))
    response = httpx.post(url, content=content, headers=dict(headers), timeout=TIMEOUT_S, trust_env=False)
    if response.status_code != 200:
        raise WrongAnswer(f"{url} answered {response.status_code}: {response.text[:300]}")
    if encoding == SHM and "shared_memory_offset" in (into := json.loads(content)["outputs"][0]["parameters"]):
        return _taken(response, into["shared_memory_offset"])
    return _first_output(response)


def grpc_reply(url: str, message: bytes) -> bytes:
    """Makes one call with a message that has its prefix, and returns its answer, an encoded `ModelInferResponse`.

    Raises:
        WrongAnswer: The call ended with another status than OK.
    """
    with grpc.insecure_channel(httpx.URL(url).netloc.decode()) as channel:
        call = channel.unary_unary(GRPC_PATH)
        try:
            reply: bytes = call(message[GRPC_PREFIX_BYTES:], timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise WrongAnswer(f"{url} answered {error.code().name}: {error.details()}") from None
    return reply


def stream_answers(url: str, message: bytes, count: int) -> tuple[list[FloatArray], int]:
    """Sends one request of a stream; returns the first outputs of its answers, and their bytes with their prefixes.

    Args:
        url: The server's address.
        message: The request with its prefix.
        count: The number of answers.

    Raises:
        WrongAnswer: The call ended with another status than OK, or an answer is an error.
    """
    with grpc.insecure_channel(httpx.URL(url).netloc.decode()) as channel:
        call = channel.stream_stream(GRPC_STREAM_PATH)
        try:
            replies: list[bytes] = list(islice(call(iter([message[GRPC_PREFIX_BYTES:]]), timeout=TIMEOUT_S), count))
        except grpc.RpcError as error:
            raise WrongAnswer(f"{url} answered {error.code().name}: {error.details()}") from None
    answers = [pb.ModelStreamInferResponse.FromString(reply) for reply in replies]
    if errors := [found.error_message for found in answers if found.error_message]:
        raise WrongAnswer(f"{url} answered {errors[0]}")
    outputs = [_grpc_output(found.infer_response) for found in answers]
    return outputs, sum(GRPC_PREFIX_BYTES + len(reply) for reply in replies)


def _grpc_output(reply: pb.ModelInferResponse) -> FloatArray:
    return np.frombuffer(reply.raw_output_contents[0], np.float32).reshape(tuple(reply.outputs[0].shape))


def _first_output(response: httpx.Response) -> FloatArray:
    length = response.headers.get(LENGTH_HEADER)
    header = json.loads(response.content[: int(length)] if length else response.content)
    output = header["outputs"][0]
    if length:
        return np.frombuffer(response.content[int(length) :], np.float32).reshape(output["shape"])
    return np.array(output["data"], np.float32).reshape(output["shape"])


def _taken(response: httpx.Response, begin: int) -> FloatArray:
    """Returns the first output, which is in the region, and clears it, so that no later answer can be this one."""
    status = response.url.copy_with(path=f"/v2/systemsharedmemory/region/{REGION}/status")
    [region] = httpx.get(status, timeout=TIMEOUT_S, trust_env=False).json()
    shape = tuple(response.json()["outputs"][0]["shape"])
    output = np.memmap(f"/dev/shm{region['key']}", np.float32, "r+", begin, shape)
    taken = np.array(output)
    output[...] = 0
    return taken
