"""The command line's HTTP client: metadata and inference with the binary tensor extension (reference §1.5 to §1.7)."""

import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from qinfer.cli.console import CommandFailed
from qinfer.tensors import Tensor, from_numpy, to_numpy

TIMEOUT_S = 300.0
LIVE_TIMEOUT_S = 1.0
"""A gateway that takes longer to say that it lives does not."""
JSON_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """An input of a model, as its metadata describes it; -1 is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """What `GET /v2/models/{m}` says."""

    name: str
    versions: tuple[str, ...]
    inputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's reply."""

    model: str
    version: str
    outputs: tuple[Tensor, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the reply with its outputs by name; BYTES that are not UTF-8 show replacement characters."""
        return {
            "model": self.model,
            "version": self.version,
            "outputs": {
                t.name: {"datatype": t.datatype, "shape": list(t.shape), "data": _plain(to_numpy(t).tolist())}
                for t in self.outputs
            },
        }


class GatewayClient:
    """A connection to a gateway; every failure becomes a `CommandFailed` that says what to do.

    Args:
        url: The gateway's URL.
        verify: Check its certificate; off only for a gateway that we started ourselves, on this machine.
    """

    def __init__(self, url: str, *, verify: bool = True) -> None:
        self._url = url.rstrip("/")
        timeout = httpx.Timeout(TIMEOUT_S, connect=5.0)
        try:
            self._http = httpx.Client(base_url=self._url, timeout=timeout, trust_env=False, verify=verify)
        except (httpx.InvalidURL, ValueError) as error:
            raise CommandFailed(f"'{url}' is no URL ({error}); expected something like http://127.0.0.1:8000") from None

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Closes the connection."""
        self._http.close()

    def metadata(self, model: str, version: int = 0) -> ModelMetadata:
        """Returns a model's metadata."""
        body = self._request("GET", model_path(model, version)).json()
        return ModelMetadata(
            name=body["name"],
            versions=tuple(body.get("versions", ())),
            inputs=tuple(
                TensorMetadata(name=i["name"], datatype=i["datatype"], shape=tuple(i["shape"])) for i in body["inputs"]
            ),
        )

    def infer(self, model: str, version: int, inputs: list[Tensor], outputs: list[str]) -> Answer:
        """Asks a model; tensors travel as binary both ways."""
        body, json_length = encode_infer(inputs, outputs)
        headers = {JSON_LENGTH: str(json_length), "Content-Type": "application/octet-stream"}
        reply = self._request("POST", f"{model_path(model, version)}/infer", content=body, headers=headers)
        return decode_answer(reply.content, int(reply.headers.get(JSON_LENGTH, len(reply.content))))

    def metrics(self) -> str:
        """Returns the Prometheus text."""
        return self._request("GET", "/metrics").text

    def is_live(self) -> bool:
        """Tells whether a gateway answers."""
        try:
            return self._http.get("/v2/health/live", timeout=LIVE_TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            reply = self._http.request(method, path, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol):
            raise CommandFailed(
                f"no server answers at {self._url}; start one with `qinfer up --model-repository DIR`, or give --url"
            ) from None
        except httpx.TransportError as error:
            raise CommandFailed(f"the connection to {self._url} failed: {error or type(error).__name__}") from None
        if not reply.is_success:
            raise CommandFailed(f"{_error_text(reply)} (HTTP {reply.status_code})")
        return reply


def model_path(model: str, version: int) -> str:
    """Returns the path of a model, or of one version of it."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{version}" if version else path


def encode_infer(inputs: list[Tensor], outputs: list[str], *, binary: bool = True) -> tuple[bytes, int]:
    """Encodes an inference request.

    Args:
        inputs: The inputs.
        outputs: Names of the outputs wanted; empty = all.
        binary: Tensors as raw bytes after the JSON, both ways; else everything as JSON.

    Returns:
        The body, and the length of its JSON part in bytes.
    """
    header: dict[str, Any] = {"inputs": [_encode_input(tensor, binary) for tensor in inputs]}
    if binary:
        header["parameters"] = {"binary_data_output": True}
    if outputs:
        header["outputs"] = [{"name": name} for name in outputs]
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([text, *(t.data for t in inputs)]) if binary else text, len(text)


def decode_answer(body: bytes, json_length: int) -> Answer:
    """Decodes a reply: JSON of `json_length` bytes, then the bytes of the binary outputs in order."""
    header = json.loads(body[:json_length])
    position, outputs = json_length, []
    for output in header["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            tensor = _tensor_of_json(output)
        else:
            data = memoryview(body)[position : position + size]
            tensor = Tensor(output["name"], output["datatype"], tuple(output["shape"]), data)
            position += size
        outputs.append(tensor)
    return Answer(model=header["model_name"], version=header["model_version"], outputs=tuple(outputs))


def _encode_input(tensor: Tensor, binary: bool) -> dict[str, Any]:  # noqa: FBT001  (private, one caller)
    entry: dict[str, Any] = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
    if binary:
        return {**entry, "parameters": {"binary_data_size": tensor.nbytes}}
    return {**entry, "data": _plain(to_numpy(tensor).ravel().tolist())}


def _tensor_of_json(output: dict[str, Any]) -> Tensor:
    from qinfer.cli.inputs import as_array

    array = as_array(output["name"], output["datatype"], output["data"]).reshape(output["shape"])
    return from_numpy(output["name"], array, output["datatype"])


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _error_text(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return reply.reason_phrase or "no error text"
