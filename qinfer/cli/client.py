"""The command line's client of a gateway: qinfer's own, which answers a person at once instead of trying again."""

import os
from typing import Any

import httpx

from qinfer.client import Client, InferResult
from qinfer.client.steps import Send, call
from qinfer.settings import API_KEY_VARIABLE
from qinfer.tensors import to_numpy

TIMEOUT_S = 300.0


class GatewayClient(Client):
    """A client that repeats nothing, and takes an API key but no proxy from the environment.

    Args:
        url: The gateway's URL.
        verify: Check its certificate; off only for a gateway that we started ourselves, on this machine.

    Raises:
        InvalidRequest: The URL is none.
    """

    def __init__(self, url: str, *, verify: bool = True) -> None:
        transport = httpx.HTTPTransport(verify=verify, trust_env=False)
        super().__init__(url, api_key=api_key(), timeout_s=TIMEOUT_S, max_retries=0, transport=transport)

    def metrics(self) -> str:
        """Returns the Prometheus text."""
        return self._run(call(self._policy, Send("GET", "/metrics", {}))).text


def api_key() -> str | None:
    """Returns the API key that commands present: an option would show it in the list of processes."""
    return os.environ.get(API_KEY_VARIABLE) or None


def as_json_object(result: InferResult) -> dict[str, Any]:
    """Returns a result as JSON has it; BYTES that are not UTF-8 show replacement characters."""
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
