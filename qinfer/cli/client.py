"""The command line's client of a gateway: `qinfer.Client` without retries, because a person waits."""

import json
import os
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from qinfer.client import Client, InferResult
from qinfer.client.connection import API_KEY_VARIABLE
from qinfer.client.steps import Send, call
from qinfer.errors import EndpointNotFound, Unreachable
from qinfer.tensors import to_numpy

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
