"""The command line's client of a gateway, `qinfer.Client` without retries, because a person waits; and its inputs."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.client import Client, InferResult, TensorMetadata
from qinfer.client.connection import API_KEY_VARIABLE
from qinfer.client.flows import sequence_parameters
from qinfer.client.model_flows import as_array
from qinfer.client.steps import Send, call
from qinfer.core.messages import Scalar
from qinfer.errors import EndpointNotFound, InvalidRequest, Unreachable, WorkerNotFound
from qinfer.tensors import Tensor, from_numpy, numpy_dtype, to_numpy

T = TypeVar("T")

_ENDPOINTS = "/v1/endpoints"
TIMEOUT_S = 300.0


class GatewayClient(Client):
    """A client without retries and proxies, with the environment's key and certificate authorities.

    `verify` is off only for a gateway that the program started.
    """

    def __init__(self, url: str, *, verify: bool = True, timeout_s: float = TIMEOUT_S) -> None:
        # reads SSL_CERT_FILE and SSL_CERT_DIR
        transport = httpx.HTTPTransport(verify=verify)
        super().__init__(url, timeout_s=timeout_s, max_retries=0, transport=transport)

    def metrics(self) -> str:
        """Returns the Prometheus text."""
        return self._run_flow(call(self._policy, Send("GET", "/metrics", {}))).text

    def pauses(self) -> list[dict[str, Any]]:
        """Returns the paused models and versions."""
        reply = self._run_flow(call(self._policy, Send("GET", "/v1/pauses", {})))
        return decode_json(reply.content, list[dict[str, Any]])

    def change_pause(self, model: str, version: int, act: str, reason: str = "") -> list[dict[str, Any]]:
        """Pauses or resumes a model, version 0 = all versions; returns the model's pauses."""
        of = f"/versions/{version}" if version else ""
        path = f"/v1/models/{quote(model, safe='')}{of}/{act}"
        body = json.dumps({"reason": reason}).encode() if reason else b""
        reply = self._run_flow(call(self._policy, Send("POST", path, {"content-type": "application/json"}, body)))
        return decode_json(reply.content, list[dict[str, Any]])

    def worker_log(self, worker: str) -> list[dict[str, Any]]:
        """Returns the last warnings and errors of a worker, newest first."""
        send = Send("GET", f"/v1/workers/{quote(worker, safe='')}/log", {})
        reply = self._run_flow(call(self._policy, send, not_found=WorkerNotFound))
        return decode_json(reply.content, list[dict[str, Any]])

    def drain_worker(self, worker: str) -> None:
        """Asks a worker to drain."""
        send = Send("POST", f"/v1/workers/{quote(worker, safe='')}/drain", {})
        self._run_flow(call(self._policy, send, not_found=WorkerNotFound))

    def endpoints(self) -> list[dict[str, Any]]:
        """Returns the endpoints and their states."""
        reply = self._run_flow(call(self._policy, Send("GET", _ENDPOINTS, {})))
        return decode_json(reply.content, list[dict[str, Any]])

    def endpoint(self, name: str) -> dict[str, Any]:
        """Returns an endpoint and its state."""
        return self._on_endpoint("GET", name)

    def endpoint_differences(self, name: str) -> dict[str, Any]:
        """Returns the differences between the answers of shadows and those of the stable target."""
        return self._on_endpoint("GET", name, suffix="/differences")

    def put_endpoint(self, name: str, declaration: Mapping[str, Any]) -> dict[str, Any]:
        """Declares an endpoint; returns it and its state."""
        return self._on_endpoint("PUT", name, json.dumps(declaration).encode())

    def decide_endpoint(self, name: str, decision: str) -> dict[str, Any]:
        """Makes a decision about a canary; returns the endpoint's state."""
        return self._on_endpoint("POST", name, suffix=f"/{decision}")

    def delete_endpoint(self, name: str, revision: int | None) -> None:
        """Removes an endpoint."""
        query = "" if revision is None else f"?revision={revision}"
        path = f"{_ENDPOINTS}/{quote(name, safe='')}{query}"
        self._run_flow(call(self._policy, Send("DELETE", path, {}), not_found=EndpointNotFound))

    def _on_endpoint(self, method: str, name: str, body: bytes = b"", suffix: str = "") -> dict[str, Any]:
        path = f"{_ENDPOINTS}/{quote(name, safe='')}{suffix}"
        send = Send(method, path, {"content-type": "application/json"}, body)
        reply = self._run_flow(call(self._policy, send, not_found=EndpointNotFound))
        return decode_json(reply.content, dict[str, Any])


def decode_json(content: bytes, kind: type[T]) -> T:
    """Decodes a gateway's answer."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unreachable("the server at the URL sent no endpoints; is it a gateway of this version?") from None


def api_key() -> str | None:
    """Returns the API key that commands present."""
    return os.environ.get(API_KEY_VARIABLE) or None


def as_json_object(result: InferResult) -> dict[str, Any]:
    """Returns the JSON form of a result; undecodable BYTES show replacement characters."""
    return {
        "model": result.model,
        "version": str(result.version),
        "outputs": {
            t.name: {"datatype": t.datatype, "shape": list(t.shape), "data": _plain(to_numpy(t).tolist())}
            for t in result.tensors
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


Array = npt.NDArray[Any]


def read_inputs(options: Sequence[str], inputs: Sequence[TensorMetadata], model: str) -> list[Tensor]:
    """Reads `--input` options: `name=VALUE` with a `.npy` or `.json` file, JSON text, or `zeros`."""
    known = {i.name: i for i in inputs}
    allowed = ", ".join(f"{i.name} ({i.datatype} {list(i.shape)})" for i in inputs)
    tensors: dict[str, Tensor] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise InvalidRequest(f"'{option}' is malformed; expected name=VALUE, such as {inputs[0].name}=zeros")
        if name not in known:
            raise InvalidRequest(f"model '{model}' has no input '{name}'; its inputs are: {allowed}")
        if name in tensors:
            raise InvalidRequest(f"input '{name}' is given twice")
        wanted = known[name]
        array = add_batch_dimension(_read_value(wanted, value), wanted.shape)
        tensors[name] = from_numpy(name, array, wanted.datatype)
    if not tensors:
        raise InvalidRequest(f"model '{model}' needs --input name=VALUE; its inputs are: {allowed}")
    return list(tensors.values())


def read_sequence(sequence_id: str, *, start: bool, end: bool) -> dict[str, Scalar]:
    """Reads the options of a sequence's step as parameters of its request."""
    if sequence_id:
        number = int(sequence_id) if sequence_id.isascii() and sequence_id.isdecimal() else 0
        return sequence_parameters(number or sequence_id, start=start, end=end)
    if start or end:
        raise InvalidRequest("--sequence-start and --sequence-end need --sequence-id, a number > 0 or a text")
    return {}


def fill(inputs: Sequence[TensorMetadata], make: Callable[[str, tuple[int, ...]], Array]) -> list[Tensor]:
    """Makes a tensor for each input, with 1 for variable dimensions."""
    return [from_numpy(i.name, make(i.datatype, concrete(i.shape)), i.datatype) for i in inputs]


def zeros(name: str, shape: tuple[int, ...]) -> Array:
    """Returns zeros of a datatype; BYTES are empty strings."""
    if name == "BYTES":
        array = np.empty(shape, dtype=object)
        array.fill(b"")
        return array
    return np.zeros(shape, dtype=numpy_dtype(name))


def random(name: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Returns reproducible random data: floats in [0, 1), else 0 and 1."""
    generator = np.random.default_rng(seed)
    if name == "BYTES":
        return zeros(name, shape)
    if np.issubdtype(numpy_dtype(name), np.floating):
        return generator.random(shape).astype(numpy_dtype(name))
    return generator.integers(0, 2, shape).astype(numpy_dtype(name))


def concrete(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape with 1 for its variable dimensions."""
    return tuple(1 if d < 0 else d for d in shape)


def add_batch_dimension(array: Array, shape: Sequence[int]) -> Array:
    """Adds a missing batch dimension; one number gets all dimensions."""
    if array.ndim == 0 and shape and math.prod(concrete(shape)) == 1:
        return array.reshape(concrete(shape))
    return array[np.newaxis] if shape and shape[0] == -1 and array.ndim == len(shape) - 1 else array


def _read_value(wanted: TensorMetadata, value: str) -> Array:
    if value == "zeros":
        return zeros(wanted.datatype, concrete(wanted.shape))
    try:
        if value.endswith(".npy"):
            return as_array(wanted.name, wanted.datatype, np.load(value, allow_pickle=False))
        text = Path(value).read_text(encoding="utf-8") if value.endswith(".json") else value
        return as_array(wanted.name, wanted.datatype, json.loads(text))
    except OSError as error:
        raise InvalidRequest(f"input '{wanted.name}': {value} can't be read: {error.strerror or error}") from None
    # errors of json, numpy, and UTF-8
    except (ValueError, EOFError) as error:
        shown = value if value.endswith((".npy", ".json")) else f"'{value[:60]}'"
        raise InvalidRequest(
            f"input '{wanted.name}': {shown} is not a .npy file, a .json file or JSON text ({error})"
        ) from None
