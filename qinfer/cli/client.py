"""The command line's client of a gateway: `qinfer.Client` without repetitions, as a person waits for the answer."""

import os
from typing import Any

import httpx

from qinfer.client import Client, InferResult
from qinfer.client.connection import API_KEY_VARIABLE
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
        super().__init__(url, timeout_s=timeout_s, max_retries=0, transport=transport)

    def metrics(self) -> str:
        """Returns the Prometheus text."""
        return self._run(call(self._policy, Send("GET", "/metrics", {}))).text


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
