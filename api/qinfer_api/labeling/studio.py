"""A client of Label Studio's API, and of the hosts and stores that have the files of tasks.

A personal access token, the default of Label Studio 1.23, is exchanged for access tokens of minutes. A legacy token is
sent unchanged.

File names come from users. Files are fetched only from Label Studio and where the operator allows. Redirects are not
followed, because their targets are unchecked.
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

import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

from qinfer.core.settings import StoreSettings, WebhookSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Forbidden
from qinfer.storage.open import readable, store_for
from qinfer_api.requests.webhooks import MAX_URL_CHARACTERS, Resolve, Targets, TargetTexts, open_client

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


_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_KEPT_BY_STUDIO = "/data/"
_UPLOADED = re.compile(r"/data/upload/(\d{1,18})/")
_WEB = ("http", "https")
_WORDS = TargetTexts(
    "file",
    "files of tasks may not be fetched from",
    "QINFER_LABELING__FILE_HOSTS",
    "QINFER_LABELING__FILE_HOSTS_PRIVATE",
)
_threads = ThreadPoolExecutor(8, "label-files")  # a store may hang


class Files:
    """Fetches the files of tasks; each gateway has one."""

    def __init__(
        self,
        settings: LabelingSettings,
        stores: StoreSettings,
        studio: LabelStudio | None,
        resolve: Resolve | None = None,
        is_shared: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_shared = is_shared
        self._targets = targets_of(settings, resolve)
        self._stores = stores
        self._studio = studio
        self._max_bytes = settings.max_file_bytes
        self._timeout_s = settings.file_timeout_s
        self._http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Closes the HTTP client."""
        if self._http is not None:
            await self._http.aclose()

    def fetcher_for(self, tenant: str, projects: Sequence[int]) -> Callable[[str], Awaitable[bytes]]:
        """Returns `fetch` for a tenant's task."""
        return partial(self.fetch, tenant=tenant, projects=projects)

    async def fetch(self, reference: str, tenant: str = "", projects: Sequence[int] = ()) -> bytes:
        """Returns a file's content.

        `reference` is a path below Label Studio's `/data/`, a URL, or a `data:` URI. If several tenants have keys,
        files of other projects than `projects` (empty = all) are refused.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetch(reference, tenant, projects)
        except TimeoutError:
            raise Unreachable(f"a file of the task took longer than {self._timeout_s:g} s to fetch") from None

    async def _fetch(self, reference: str, tenant: str, projects: Sequence[int]) -> bytes:
        if reference[:5].lower() == "data:":
            return self._decoded(reference)
        kept = self._path_at_studio(reference)
        if kept:
            self._check_project(kept, projects)
            return await self._from_studio(kept)
        scheme = reference.partition("://")[0].lower()
        if scheme in _WEB:
            return await self._from_host(reference)
        grant = self._stores.grant_of(tenant, is_shared=self._is_shared())
        url = grant.check_read(reference)
        return await asyncio.get_running_loop().run_in_executor(_threads, self._from_store, url, grant)

    def _path_at_studio(self, reference: str) -> str:
        if reference.startswith("/"):
            return reference
        origin = self._studio.origin if self._studio is not None else ""
        if origin and reference.startswith(origin + "/"):
            return reference.removeprefix(origin)
        return ""

    def _check_project(self, path: str, projects: Sequence[int]) -> None:
        uploaded = _UPLOADED.match(unquote(path)) if projects and self._is_shared() else None
        if uploaded and int(uploaded[1]) not in projects:
            raise Forbidden(
                f"the file '{path[:100]}' was uploaded to project {uploaded[1]}, and the mapping is for "
                f"{', '.join(map(str, projects))}; upload it there"
            )

    async def _from_studio(self, path_and_query: str) -> bytes:
        path = unquote(path_and_query.partition("?")[0])
        wrong = (
            not path.startswith(_KEPT_BY_STUDIO)
            or {".", ".."}.intersection(path.split("/"))
            or "//" in path
            or "\\" in path
        )
        wrong = wrong or not path_and_query.isprintable() or len(path_and_query) > MAX_URL_CHARACTERS
        if wrong or "#" in path_and_query:
            raise InvalidRequest(
                f"a file that Label Studio keeps is below {_KEPT_BY_STUDIO}; '{path_and_query[:100]}' is not"
            )
        if self._studio is None:
            raise InvalidRequest("the file is kept by Label Studio, which QINFER_LABELING__URL does not name")
        return await self._studio.file(path_and_query, self._max_bytes)

    async def _from_host(self, url: str) -> bytes:
        import httpx

        target = await self._targets.check(url)
        if self._http is None:
            self._http = open_client(self._timeout_s, {"accept-encoding": "identity"})
        found = bytearray()
        try:
            async with target.stream(self._http, "GET") as reply:
                if reply.status_code != 200:
                    raise _status_error(target.host, reply.status_code)
                if reply.headers.get("content-encoding", "identity") != "identity":
                    raise InvalidRequest(f"file host '{target.host}' sends the file encoded; have it sent as it is")
                async for chunk in reply.aiter_raw():
                    found += chunk
                    if len(found) > self._max_bytes:
                        raise self._too_large()
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(f"file host '{target.host}' can't be reached: {type(error).__name__}") from None
        return bytes(found)

    def _from_store(self, url: str, grant: UrlGrant) -> bytes:
        store = readable(grant, store_for)(url)
        found = store.stat(url)
        if found is None:
            raise InvalidRequest(f"the file '{url[:200]}' of the task is not in its store")
        if found.size_bytes > self._max_bytes:
            raise self._too_large()
        return store.read(url, self._max_bytes)

    def _decoded(self, uri: str) -> bytes:
        found = _DATA_URI.match(uri)
        if found is None:
            raise InvalidRequest("a data: URI of a task is base64: data:<type>;base64,<content>")
        if len(uri) - found.end() > 4 * (self._max_bytes // 3 + 1):
            raise self._too_large()
        try:
            return base64.b64decode(uri[found.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest("the content of a data: URI of the task is not base64") from None

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"a file of the task is larger than {self._max_bytes} bytes, which QINFER_LABELING__MAX_FILE_BYTES allows"
        )


def targets_of(settings: LabelingSettings, resolve: Resolve | None = None) -> Targets:
    """Returns the allowed hosts."""
    allowing = WebhookSettings(allow=settings.file_hosts, allow_private=settings.file_hosts_private)
    return Targets(allowing, resolve, _WORDS)


def _status_error(host: str, status: int) -> Exception:
    if status in (408, 425, 429) or status >= 500:
        return Unreachable(f"file host '{host}' answers with status {status}")
    if 300 <= status < 400:
        return InvalidRequest(f"file host '{host}' redirects elsewhere; name where the file is in the task itself")
    return InvalidRequest(f"file host '{host}' answers with status {status}; the file is not there for this server")
