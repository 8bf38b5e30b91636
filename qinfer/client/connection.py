"""The constructor arguments of both clients, checked and turned into httpx's, and their pool of connections."""

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import httpx

from qinfer import errors
from qinfer.client.flows import header_value
from qinfer.client.steps import Policy
from qinfer.core.clock import Clock, SystemClock

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_MAX_RETRIES = 8

KEEPALIVE_S = 30.0
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)

C = TypeVar("C", httpx.Client, httpx.AsyncClient)


class Pool(Generic[C]):
    """A pool of HTTP clients of one connection each; the one used last is used next.

    httpx's own pool looks at each pair of its connections for each request: with 64 of them that takes longer than the
    request. The callers bound the number of connections, and no call waits for another's.

    Args:
        make: Makes a client.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make: Callable[[], C] = make
        self._idle: list[C] = []
        self._all: list[C] = []
        self._closed = False

    def take(self) -> C:
        """Returns an idle client, for the caller alone until `give`; may be called from any thread.

        Raises:
            InvalidRequest: The pool is closed.
        """
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

    def close(self) -> list[C]:
        """Hands out no more clients; returns all of them, to be closed."""
        self._closed = True
        return self._all


def options(
    url: str, api_key: str | None, timeout_s: float, max_retries: int, clock: Clock | None
) -> tuple[dict[str, Any], Policy]:
    """Checks a client's arguments; returns those of each HTTP client, and the policy of all flows.

    Args:
        url: The gateway's URL.
        api_key: The key sent as `Authorization: Bearer`; `None` sends none.
        timeout_s: How long a call may take, its repetitions included.
        max_retries: How often a call is repeated.
        clock: Measures time; the system's by default.

    Raises:
        InvalidRequest: An argument is wrong.
    """
    try:
        base_url = httpx.URL(url)
    except (httpx.InvalidURL, ValueError, TypeError):
        # The error's own text may show a password.
        raise errors.InvalidRequest(
            "the gateway's URL can't be read; expected something like http://127.0.0.1:8000"
        ) from None
    if base_url.scheme not in ("http", "https") or not base_url.host:
        raise errors.InvalidRequest(
            f"'{_shown(base_url)}' is no URL of a gateway; expected something like http://127.0.0.1:8000"
        )
    is_typed = isinstance(timeout_s, int | float) and isinstance(max_retries, int)
    if not is_typed or not 0 < timeout_s < math.inf or max_retries < 0:
        raise errors.InvalidRequest(
            f"timeout_s is {timeout_s!r} and max_retries {max_retries!r}; expected a finite time > 0 and a number >= 0"
        )
    # Compressed tensors cost both sides more time than they save, and take the gateway's slower way.
    headers = {"Accept-Encoding": "identity", "User-Agent": "qinfer-python"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {header_value('api_key', api_key)}"
    http = {"base_url": base_url, "headers": headers, "limits": LIMITS, "verify": httpx.create_ssl_context()}
    return http, Policy(_shown(base_url), timeout_s, max_retries, clock or SystemClock())


def _shown(url: httpx.URL) -> str:
    """Returns a URL without user and password."""
    return str(url.copy_with(userinfo=b"")).rstrip("/")
