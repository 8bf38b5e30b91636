"""Fetches the files of tasks from Label Studio, and from hosts and stores that the operator allows.

File names come from users. Redirects are not followed, because their targets are unchecked.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

from qinfer.core.settings import LabelingSettings, StoreSettings, WebhookSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Forbidden, InvalidRequest, PayloadTooLarge, Unreachable
from qinfer.storage.open import readable, store_for
from qinfer_api.labeling.studio import LabelStudio
from qinfer_api.requests.webhooks import MAX_URL_CHARACTERS, Resolve, Targets, TargetTexts, open_client

if TYPE_CHECKING:
    import httpx

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
