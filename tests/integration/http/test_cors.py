"""CORS: what a browser is told of pages of other origins, the same on the fast path and on the route.

`Page` keeps the rules of the Fetch standard that browsers keep; `test_browsers.py` asks a real one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings_sections import CorsSettings
from tests.support.gateway import Running, running_gateway, settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/echo/infer"
APP, OTHER = "https://app.example.org", "https://other.example.org"
SAFE_HEADERS = {"accept", "accept-language", "content-language"}
SAFE_TYPES = {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
READABLE = {"cache-control", "content-language", "content-length", "content-type", "expires", "last-modified", "pragma"}


class Blocked(Exception):
    """A browser would not let the page send its request, or read the reply."""


class Page:
    """A page of an origin in a browser."""

    def __init__(self, client: httpx.AsyncClient, origin: str) -> None:
        self._client, self._origin = client, origin
        self.preflights = 0

    async def fetch(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, Any, dict[str, str]]:
        """Returns status, body and the headers that the page may read."""
        request = self._client.build_request(method, path, headers=headers, **options)
        request.headers["origin"] = self._origin
        special = sorted(set(headers or {}) - SAFE_HEADERS)
        if request.headers.get("content-type", "text/plain") not in SAFE_TYPES:
            special = sorted({*special, "content-type"})
        if special or method not in ("GET", "HEAD", "POST"):
            await self._preflight(method, path, special)
        reply = await self._client.send(request)
        self._check(reply)
        exposed = READABLE | set(_names(reply, "access-control-expose-headers"))
        readable = {name: value for name, value in reply.headers.items() if name in exposed}
        return reply.status_code, reply.json() if reply.content else None, readable

    async def _preflight(self, method: str, path: str, special: list[str]) -> None:
        self.preflights += 1
        asked = {"origin": self._origin, "access-control-request-method": method}
        if special:
            asked["access-control-request-headers"] = ",".join(special)
        reply = await self._client.options(path, headers=asked)
        self._check(reply)
        if not reply.is_success:
            raise Blocked(f"preflight: {reply.status_code}")
        if method not in ("GET", "HEAD", "POST") and method.lower() not in _names(
            reply, "access-control-allow-methods"
        ):
            raise Blocked(method)
        if missing := set(special) - set(_names(reply, "access-control-allow-headers")):
            raise Blocked(str(missing))

    def _check(self, reply: httpx.Response) -> None:
        if reply.headers.get("access-control-allow-origin") not in ("*", self._origin):
            raise Blocked(self._origin)


def _names(reply: httpx.Response, header: str) -> list[str]:
    return [name.strip().lower() for name in reply.headers.get(header, "").split(",")]


class Scene:
    """A gateway that asks for keys, with its client, and a key."""

    def __init__(self, running: Running, client: httpx.AsyncClient, key: str) -> None:
        self.running, self.client, self.key = running, client, key

    def page(self, origin: str) -> Page:
        return Page(self.client, origin)


@contextlib.asynccontextmanager
async def scene_of(directory: Path, cors: CorsSettings, *, fast_path: bool = True) -> AsyncIterator[Scene]:
    file = directory / "keys.json"
    key = add_key(file, "acme", (Scope.INFER,), "acme")[1]
    settings = settings_of({"fast_path": fast_path}, auth={"mode": "keys", "keys_file": str(file)})
    settings = settings.model_copy(update={"cors": cors})
    plain = {"accept-encoding": "identity"}  # what is compressed varies by it, too
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url, headers=plain) as client:
        yield Scene(running, client, key)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fast", "route"])
async def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """Pages of one origin may call."""
    cors = CorsSettings(allow_origins=(APP,), max_age_s=60)
    async with scene_of(tmp_path_factory.mktemp("keys"), cors, fast_path=request.param == "fast") as found:
        yield found


async def test_a_page_infers_with_a_key(scene: Scene) -> None:
    """The preflight, which has no key, is let through; the reply has what the page may read."""
    page = scene.page(APP)

    for _ in range(2):  # the second head is a remembered one
        status, body, headers = await page.fetch("POST", INFER, {"x-api-key": scene.key}, json=BODY)

        assert (status, body["outputs"][0]["data"]) == (200, [1, 2, 3, 4])
        assert headers["qinfer-request-id"]
    assert page.preflights == 2


async def test_a_page_reads_binary_outputs(scene: Scene) -> None:
    asked = BODY | {"parameters": {"binary_data_output": True}}
    request = scene.client.build_request("POST", INFER, json=asked, headers={"x-api-key": scene.key, "origin": APP})

    reply = await scene.client.send(request)

    assert "Inference-Header-Content-Length" in reply.headers["access-control-expose-headers"]
    assert int(reply.headers["inference-header-content-length"]) < len(reply.content)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", INFER, 401),
        ("POST", "/v2/models/nothing/infer", 401),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/nowhere", 404),
        ("PATCH", "/v2", None),
        ("POST", "/v2/models/echo/generate", 401),
        ("DELETE", "/v1/requests/x", 401),
    ],
)
async def test_errors_can_be_read_too(scene: Scene, method: str, path: str, status: int | None) -> None:
    """What a page may not read it can't explain; a method that is not allowed is not sent."""
    page = scene.page(APP)

    if status is None:
        with pytest.raises(Blocked, match=method):
            await page.fetch(method, path)
        return
    found, _, headers = await page.fetch(method, path, json=BODY if method == "POST" else None)

    assert found == status
    assert "qinfer-request-id" in headers


@pytest.mark.parametrize(
    ("header", "status"),
    [(f"x-long: {'x' * 1_000_000}", 431), ("transfer-encoding: gzip, chunked", 501)],
)
async def test_what_is_refused_while_it_is_read_can_be_read_too(scene: Scene, header: str, status: int) -> None:
    """The origin is known by then: it is among the headers that were read."""
    url = scene.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    with contextlib.closing(writer):
        writer.write(f"POST {INFER} HTTP/1.1\r\nhost: localhost\r\norigin: {APP}\r\n{header}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()

    assert int(head.split()[1]) == status
    assert f"access-control-allow-origin: {APP}\r\n" in head


async def test_a_refusal_says_when_to_try_again(scene: Scene) -> None:
    """`Retry-After` is readable, which a page needs to keep it."""
    status, body, headers = await scene.page(APP).fetch(
        "POST", "/v2/models/loading/infer", {"x-api-key": scene.key}, json=BODY
    )

    assert (status, list(body)) == (503, ["error"])
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("origin", [OTHER, "http://app.example.org", "https://app.example.org.evil.example", "null"])
async def test_a_page_of_another_origin_is_blocked(scene: Scene, origin: str) -> None:
    """With and without a preflight."""
    with pytest.raises(Blocked):
        await scene.page(origin).fetch("POST", INFER, {"x-api-key": scene.key}, json=BODY)
    with pytest.raises(Blocked):
        await scene.page(origin).fetch("GET", "/v2/health/live")


async def test_caches_keep_the_replies_of_origins_apart(scene: Scene) -> None:
    """Also those to nobody's page."""
    key = {"x-api-key": scene.key}
    replies = [
        await scene.client.post(INFER, json=BODY, headers=key | origin)
        for origin in ({}, {"origin": APP}, {"origin": OTHER})
    ]

    assert [reply.status_code for reply in replies] == [200, 200, 200]
    assert [reply.headers["vary"] for reply in replies] == ["origin"] * 3
    assert [reply.headers.get("access-control-allow-origin") for reply in replies] == [None, APP, None]


async def test_a_refused_preflight_says_why(scene: Scene) -> None:
    headers = {"origin": OTHER, "access-control-request-method": "POST"}

    reply = await scene.client.options(INFER, headers=headers)

    assert reply.status_code == 403
    assert reply.json()["error"].startswith(f"pages of '{OTHER}' may not call this server")


async def test_options_that_are_no_preflight_are_none(scene: Scene) -> None:
    """They meet the route, which has no such method."""
    assert (await scene.client.options(INFER)).status_code == 405


@pytest.mark.parametrize("fast_path", [True, False])
async def test_any_page_may_call(tmp_path: Path, *, fast_path: bool) -> None:
    """With `*`, whose replies are the same for all, so that caches need not keep them apart."""
    async with scene_of(tmp_path, CorsSettings(allow_origins=("*",)), fast_path=fast_path) as scene:
        found = await scene.page(OTHER).fetch("POST", INFER, {"authorization": f"Bearer {scene.key}"}, json=BODY)
        reply = await scene.client.post(INFER, json=BODY)

    assert found[0] == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "vary" not in reply.headers


async def test_credentials_are_allowed_by_name(tmp_path: Path) -> None:
    cors = CorsSettings(allow_origins=(APP,), allow_credentials=True)
    async with scene_of(tmp_path, cors) as scene:
        replies = [await scene.client.get("/v2/health/live", headers={"origin": origin}) for origin in (APP, OTHER)]

    assert [reply.headers.get("access-control-allow-credentials") for reply in replies] == ["true", None]


@pytest.mark.parametrize("fast_path", [True, False])
async def test_it_is_off_by_default(tmp_path: Path, *, fast_path: bool) -> None:
    """No reply differs, and a preflight is a method that no route has."""
    async with scene_of(tmp_path, CorsSettings(), fast_path=fast_path) as scene:
        asked = {"origin": APP, "access-control-request-method": "POST"}
        reply = await scene.client.post(INFER, json=BODY, headers={"x-api-key": scene.key, "origin": APP})
        preflight = await scene.client.options(INFER, headers=asked)

    assert reply.status_code == 200
    assert preflight.status_code == 405
    assert not [
        name for each in (reply, preflight) for name in each.headers if "access-control" in name or name == "vary"
    ]
