"""A client of Label Studio's API.

A personal access token, the default of Label Studio 1.23, is exchanged for access tokens of minutes. A legacy token is
sent unchanged.
"""

import asyncio
import base64
import binascii
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import qinfer
from qinfer.core.settings import LabelingSettings
from qinfer.errors import InvalidRequest, PayloadTooLarge, SettingsError, Unreachable

if TYPE_CHECKING:
    import httpx

PAGE = 100

# Seconds for which an access token is used if it names no end.
_ACCESS_S = 240.0
_AWAY = frozenset({408, 425, 429, 502, 503, 504})
_CONFIG_S = 30.0
_MAX_REASON = 500
_MAX_REPLY_BYTES = 64 * 2**20
_URL, _TOKEN = "QINFER_LABELING__URL", "QINFER_LABELING__TOKEN"


class StudioAway(Unreachable):
    """Label Studio is unreachable, overloaded, or rejects the token."""


class StudioFailed(Unreachable):
    """A call failed, and may fail again."""


class StudioRefused(InvalidRequest):
    """Label Studio refuses the call for good."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"Label Studio refused with status {status}: {reason}")
        self.status = status


class LabelStudio:
    """A client of Label Studio; each gateway has one."""

    def __init__(self, settings: LabelingSettings) -> None:
        self.origin, self._token = check_address(settings)
        self._is_jwt = self._token.count(".") == 2
        self._access, self._access_until_s = "", 0.0
        self._refreshing = asyncio.Lock()
        self._timeout_s = settings.call_timeout_s
        self._configs: dict[int, tuple[float, str]] = {}
        import httpx

        self._http = httpx.AsyncClient(
            timeout=settings.call_timeout_s,
            trust_env=False,
            follow_redirects=False,
            headers={"user-agent": f"qinfer/{qinfer.__version__}"},
        )

    async def close(self) -> None:
        """Closes the HTTP client."""
        await self._http.aclose()

    async def label_config(self, project: int) -> str:
        """Returns a label config as XML, at most 30 s old."""
        now_s = time.monotonic()
        found = self._configs.get(project)
        if found is None or now_s - found[0] > _CONFIG_S:
            read = await self._json("GET", f"/api/projects/{project}/")
            config = read.get("label_config") if isinstance(read, dict) else None
            found = self._configs[project] = (now_s, config if isinstance(config, str) else "")
        return found[1]

    async def task(self, task: int) -> dict[str, Any]:
        """Returns a task."""
        read = await self._json("GET", f"/api/tasks/{task}/", {"resolve_uri": "false"})
        if not isinstance(read, dict):
            raise StudioFailed("Label Studio's reply is not a task")
        return read

    async def tasks(self, project: int, page: int) -> tuple[list[dict[str, Any]], bool]:
        """Returns a page of tasks, from 1, and whether more follow."""
        words: dict[str, str | int] = {"project": project, "page": page, "page_size": PAGE, "resolve_uri": "false"}
        try:
            read = await self._json("GET", "/api/tasks/", words)
        except StudioRefused as error:
            if error.status == 404 and page > 1:
                return [], False
            raise
        found = read.get("tasks", []) if isinstance(read, dict) else read
        if not isinstance(found, list) or not all(isinstance(task, dict) for task in found):
            raise StudioFailed("Label Studio's reply is not a list of tasks")
        total = read.get("total") if isinstance(read, dict) else None
        return found, page * PAGE < total if isinstance(total, int) else len(found) == PAGE

    async def predictions(self, task: int) -> list[dict[str, Any]]:
        """Returns the predictions of a task."""
        read = await self._json("GET", "/api/predictions/", {"task": task})
        return [each for each in read if isinstance(each, dict)] if isinstance(read, list) else []

    async def push(self, project: int, predictions: Sequence[Any]) -> int:
        """Stores predictions; returns how many were accepted.

        After `Unreachable`, they may be stored; after `StudioRefused`, an invalid one kept all from being stored.
        """
        read = await self._json("POST", f"/api/projects/{project}/import/predictions", body=list(predictions))
        created = read.get("created") if isinstance(read, dict) else None
        return created if isinstance(created, int) else len(predictions)

    async def file(self, path_and_query: str, max_bytes: int) -> bytes:
        """Returns a file that Label Studio stores."""
        status, content = await self._authorized(self._request("GET", path_and_query), max_bytes)
        if 300 <= status < 400:
            raise StudioRefused(status, "the file is kept elsewhere; name where in the task itself")
        return _checked(status, content)

    async def _json(
        self, method: str, path: str, words: dict[str, str | int] | None = None, body: object = None
    ) -> Any:
        try:
            text = _checked(*await self._authorized(self._request(method, path, words, body), _MAX_REPLY_BYTES))
        except PayloadTooLarge as error:
            raise StudioFailed(error.message) from None
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise StudioAway(f"the server at {_URL} is not Label Studio: it sends no JSON") from None

    def _request(
        self, method: str, path: str, words: dict[str, str | int] | None = None, body: object = None
    ) -> "httpx.Request":
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        return self._http.build_request(method, f"{self.origin}{path}", params=words, content=content, headers=headers)

    async def _authorized(self, request: "httpx.Request", max_bytes: int) -> tuple[int, bytes]:
        status, text = 401, b""
        for _ in range(2 if self._is_jwt else 1):
            request.headers["authorization"] = await self._authorization()
            status, text = await self._send(request, max_bytes)
            if status != 401:
                break
            self._access = ""
        return status, text

    async def _send(self, request: "httpx.Request", max_bytes: int) -> tuple[int, bytes]:
        import httpx

        found = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(await self._http.send(request, stream=True)) as reply,
            ):
                async for chunk in reply.aiter_bytes():
                    found += chunk
                    if len(found) > max_bytes:
                        raise PayloadTooLarge(f"Label Studio's reply is larger than {max_bytes} bytes")
                return reply.status_code, bytes(found)
        except (httpx.HTTPError, OSError) as error:
            raise StudioAway(f"Label Studio can't be reached: {type(error).__name__}") from None

    async def _authorization(self) -> str:
        if not self._is_jwt:
            return f"Token {self._token}"
        async with self._refreshing:
            if not self._access or time.monotonic() >= self._access_until_s:
                asking = self._request("POST", "/api/token/refresh/", body={"refresh": self._token})
                status, text = await self._send(asking, _MAX_REPLY_BYTES)
                if not 200 <= status < 300:
                    raise StudioAway(f"Label Studio does not take the token of {_TOKEN}: {_reason(text)}")
                self._access, self._access_until_s = _access_of(text)
            return f"Bearer {self._access}"


def _checked(status: int, text: bytes) -> bytes:
    if 200 <= status < 300:
        return text
    reason = _reason(text)
    if status == 401:
        raise StudioAway(f"Label Studio does not take the token of {_TOKEN}: {reason}")
    if status in _AWAY or 300 <= status < 400:
        raise StudioAway(f"Label Studio answers with status {status}")
    if status >= 500:
        raise StudioFailed(f"Label Studio failed with status {status}")
    raise StudioRefused(status, reason)


def _access_of(text: bytes) -> tuple[str, float]:
    try:
        access = msgspec.json.decode(text)["access"]
        payload = access.split(".")[1]
        about = msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        left_s = float(about["exp"]) - float(about.get("iat", time.time()))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        raise StudioAway(f"the server at {_URL} is not Label Studio: it gives no access token") from None
    except (IndexError, ValueError, binascii.Error):
        left_s = _ACCESS_S
    return access, time.monotonic() + max(0.8 * left_s, 1.0)


def _reason(text: bytes) -> str:
    said: object = None
    try:
        said = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "no reason was given"
    if isinstance(said, dict):
        said = said.get("validation_errors") or said.get("detail") or said
    found = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    found = " ".join(found.split())
    return found if len(found) <= _MAX_REASON else found[:_MAX_REASON] + "…"


def check_address(settings: LabelingSettings) -> tuple[str, str]:
    """Returns the base URL and the token."""
    import httpx

    token = settings.token.get_secret_value().strip()
    try:
        parsed = httpx.URL(settings.url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    wrong = parsed.scheme not in ("http", "https") or not parsed.raw_host or parsed.query or parsed.fragment
    if wrong or parsed.userinfo:
        raise SettingsError(f"{_URL} has to be a URL such as https://label.example.org, without a password and a query")
    if not token or not (token.isascii() and token.isprintable()):
        raise SettingsError(f"{_TOKEN} is not set, or has other than ASCII characters; Label Studio asks for it")
    return str(parsed).rstrip("/"), token
