"""The constructor arguments of both clients, and their pool of connections."""

import math
import os
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import httpx

from qinfer import errors
from qinfer.client.flows import checked_headers, header_value
from qinfer.client.steps import Gateways, GatewayUrl, Policy
from qinfer.core.clock import Clock, SystemClock
from qinfer.core.retry import RetryBudget

DEFAULT_TIMEOUT_S = 60.0

API_KEY_VARIABLE = "QINFER_API_KEY"
"""Unlike command options, others on the machine can't see this variable."""

KEEPALIVE_S = 30.0
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)

C = TypeVar("C", httpx.Client, httpx.AsyncClient)


class Pool(Generic[C]):
    """A pool of HTTP clients of one connection each, last in first out.

    httpx's own pool compares each pair of its connections for each request: with 64 of them that takes longer than the
    request.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make: Callable[[], C] = make
        self._idle: list[C] = []
        self._all: list[C] = []
        self._closed = False

    def take(self) -> C:
        """Returns an idle client, for the caller alone until `give`; thread-safe."""
        if self._closed:
            raise errors.InvalidRequest("the client is closed; make a new one")
        try:
            return self._idle.pop()
        except IndexError:
            client = self._make()
            self._all.append(client)
            return client

    def give(self, client: C) -> None:
        """Takes a client back."""
        self._idle.append(client)

    @contextmanager
    def borrow(self) -> Iterator[C]:
        """Provides an idle client for the block."""
        client = self.take()
        try:
            yield client
        finally:
            self.give(client)

    def close(self) -> list[C]:
        """Closes the pool; the caller closes the returned clients."""
        self._closed = True
        return self._all


def options(
    url: str | Sequence[str],
    *,
    api_key: str | None,
    headers: Mapping[str, str] | None,
    ca_file: str | os.PathLike[str] | None,
    timeout_s: float,
    max_retries: int | None,
    resend: bool,
    retry_share: float | None,
    clock: Clock | None,
) -> tuple[dict[str, Any], Policy]:
    """Checks a client's arguments; returns those of each HTTP client, and the policy of all flows."""
    gateways = Gateways(_gateways(url))
    is_typed = isinstance(timeout_s, int | float) and isinstance(max_retries, int | None)
    if not is_typed or not 0 < timeout_s < math.inf or (max_retries or 0) < 0:
        raise errors.InvalidRequest(
            f"timeout_s is {timeout_s!r} and max_retries {max_retries!r}; expected a finite time > 0, and a number "
            ">= 0 or None"
        )
    # Compressed tensors cost both sides more time than they save, and take the gateway's slower path.
    sent = {"Accept-Encoding": "identity", "User-Agent": "qinfer-python"}
    name = "api_key" if api_key is not None else API_KEY_VARIABLE
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if key != "":
        sent["Authorization"] = f"Bearer {header_value(name, key)}"
    http = {"headers": sent | checked_headers(headers), "limits": LIMITS, "verify": _tls(ca_file)}
    return http, Policy(gateways, timeout_s, max_retries, clock or SystemClock(), resend, RetryBudget(retry_share), {})


def _gateways(url: str | Sequence[str]) -> list[GatewayUrl]:
    try:
        urls = [url] if isinstance(url, str) else list(dict.fromkeys(url))
    except TypeError:
        urls = []
    if not urls:
        raise errors.InvalidRequest("no gateway is named; give a URL such as http://127.0.0.1:8000, or a list of them")
    return [_gateway(one) for one in urls]


def _gateway(url: str) -> GatewayUrl:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError, TypeError):
        # The error's own text may show a password.
        raise errors.InvalidRequest(
            "the gateway's URL can't be read; expected something like http://127.0.0.1:8000"
        ) from None
    shown = str(parsed.copy_with(userinfo=b"")).rstrip("/")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise errors.InvalidRequest(f"'{shown}' is not a gateway's URL; expected something like http://127.0.0.1:8000")
    # httpx's text of a URL hides the password.
    user = f"{parsed.userinfo.decode()}@" if parsed.userinfo else ""
    return GatewayUrl(shown.replace("://", f"://{user}", 1), shown)


def _tls(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, TypeError) as error:
        raise errors.InvalidRequest(f"ca_file can't be read as certificates in PEM: {error}") from None
