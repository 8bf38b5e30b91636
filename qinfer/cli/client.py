"""The command line's client of a gateway: `qinfer.Client` without repetitions, as a person waits for the answer."""

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from qinfer.cli.console import API_KEY_VARIABLE
from qinfer.client import Client, InferResult
from qinfer.client.flows import json_object, model_path
from qinfer.client.steps import Send, call
from qinfer.tensors import to_numpy

TIMEOUT_S = 300.0


class GatewayClient(Client):
    """A client without repetitions, with the environment's API key and certificate authorities, but no proxy.

    Args:
        url: The gateway's URL.
        verify: Check the certificate; off only for a gateway of this machine that the program has started itself.
        timeout_s: How long a call may take.

    Raises:
        InvalidRequest: The URL is malformed.
    """

    def __init__(self, url: str, *, verify: bool = True, timeout_s: float = TIMEOUT_S) -> None:
        # Reads SSL_CERT_FILE and SSL_CERT_DIR.
        transport = httpx.HTTPTransport(verify=verify)
        super().__init__(url, api_key=api_key(), timeout_s=timeout_s, max_retries=0, transport=transport)

    def metrics(self) -> str:
        """Returns the Prometheus text."""
        return self._run(call(self._policy, Send("GET", "/metrics", {}))).text

    def model_index(self, *, ready: bool = False) -> list[dict[str, str]]:
        """Returns the index of models: name, and version, state and reason of those that were ever loaded."""
        entries: list[dict[str, str]] = msgspec.json.decode(self._post("/v2/repository/index", {"ready": ready}))
        return entries

    def model_config(self, model: str) -> dict[str, Any]:
        """Returns a model's configuration, in Triton's JSON."""
        return json_object(self._policy, self._run(call(self._policy, Send("GET", f"{model_path(model)}/config", {}))))

    def load_model(self, model: str, parameters: Mapping[str, str]) -> None:
        """Loads a model; `parameters` are `config` and `file:<version>/<name>` (base64)."""
        self._post(f"/v2/repository/models/{quote(model, safe='')}/load", {"parameters": dict(parameters)})

    def unload_model(self, model: str) -> None:
        """Unloads a model."""
        self._post(f"/v2/repository/models/{quote(model, safe='')}/unload", {})

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        reply = self._run(call(self._policy, Send("POST", path, headers, msgspec.json.encode(body))))
        return reply.content


def api_key() -> str | None:
    """Returns the API key that commands present."""
    return os.environ.get(API_KEY_VARIABLE) or None


def as_json_object(result: InferResult) -> dict[str, Any]:
    """Returns the JSON form of a result; BYTES that are not UTF-8 show replacement characters."""
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
