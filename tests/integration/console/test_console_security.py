"""Refusals of the console: forged forms, strangers, keys without scopes, other tenants, and markup in texts."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest

from qinfer.core.api_keys import Scope, add_key, read_keys
from qinfer.core.messages import InferRequest
from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable
from qinfer.observe.logs import RecentLine, WorkerLog
from qinfer.queue.entries import Lane
from qinfer.tensors import from_numpy
from qinfer_api.auth import Auth
from qinfer_api.console import access as console_access
from qinfer_api.console.access import COOKIE, Access, ConsoleUser
from tests.e2e.console.scene import put
from tests.integration.console.test_console_pages import PAGES, token_of
from tests.support.gateway import Running, declare_more, running_gateway, settings_of

ADMIN_PAGES = ("tenants", "audit")
HOSTILE = (
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "\"><img src=x onerror=alert(1)>", "'><svg onload=alert(1)>", "<svg/onload=alert(1)>",
    "<iframe src=javascript:alert(1)>",
    "<a href=javascript:alert(1)>x</a>", "javascript:alert(1)", "data:text/html,<script>alert(1)</script>",
    "<body onload=alert(1)>", "<input autofocus onfocus=alert(1)>", "<details open ontoggle=alert(1)>",
    "<math><mtext></table></math><img src onerror=alert(1)>", "<style>*{background:url(//e.example)}</style>",
    "<link rel=stylesheet href=//e.example>", "<base href=//e.example>",
    "<meta http-equiv=refresh content=0;url=//e.example>",
    "<form action=//e.example><button>x</button></form>", "<object data=javascript:alert(1)>",
    "<embed src=//e.example>",
    "{{ 7 * 7 }}", "{% for x in range(9) %}x{% endfor %}", "{{ self.__init__.__globals__ }}", "${alert(1)}", "#{7*7}",
    "<div hx-get=//e.example hx-trigger=load>", "<div data-hx-on=x hx-on::load=alert(1)>", "\"hx-on:click=\"alert(1)\"",
    "<textarea></textarea><script>alert(1)</script>", "--><script>alert(1)</script><!--",
    "]]><script>alert(1)</script>",
    "\u2028alert(1)//", "\u202egnp.exe", "<\u017fcript>alert(1)</\u017fcript>", "\uff1cscript\uff1ealert(1)",
    "&lt;script&gt;",
    "&#60;script&#62;alert(1)", "%3Cscript%3Ealert(1)%3C/script%3E", "' onmouseover='alert(1)", "x\" style=\"color:red",
)  # fmt: skip
"""Texts that become code, or load something, where a page does not escape them."""


class Elements(HTMLParser):
    """The elements of a page as a browser reads them, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def check_page(text: str) -> None:
    """Asserts that a page has only elements of its template: no inline code, no style, no address elsewhere."""
    elements = Elements(text).found
    for tag, attributes in elements:
        assert tag not in {"iframe", "object", "embed", "base", "style", "math", "marquee"}, (tag, attributes)
        assert not [name for name in attributes if name.startswith(("on", "style", "hx-on"))], (tag, attributes)
        for name in ("href", "src", "action", "hx-get", "hx-post", "data"):
            address = attributes.get(name) or ""
            is_image = tag == "img" and address.startswith("data:image/")
            assert is_image or not (":" in address or address.startswith("/")), (tag, attributes)
    scripts = [attributes.get("src") or "" for tag, attributes in elements if tag == "script"]
    own = re.compile(r"(?:\./|(?:\.\./)+)?static/[\w.]+\.js\?v=\w+")
    assert scripts or "<html" not in text
    assert all(own.fullmatch(source) for source in scripts), scripts


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as one:
        await one.refresh()
        yield one


def browser(running: Running, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"{running.url}/console/", follow_redirects=True, **options)


async def test_every_page_has_a_strict_policy_and_only_its_own_code(running: Running) -> None:
    async with browser(running) as client:
        for page in PAGES:
            reply = await client.get(page)

            policy = dict(rule.strip().split(" ", 1) for rule in reply.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == "'self'"
            assert policy["frame-ancestors"] == "'none'"
            assert reply.headers["x-frame-options"] == "DENY"
            assert reply.headers["cache-control"] == "no-store"
            check_page(reply.text)


@pytest.mark.parametrize(
    ("form", "headers"),
    [
        ({"do": "run", "in:x": "1,2,3,4"}, {}),
        ({"do": "run", "in:x": "1,2,3,4", "csrf": "0" * 64}, {}),
        ({"do": "run", "in:x": "1,2,3,4", "csrf": "TOKEN"}, {"sec-fetch-site": "cross-site", "origin": "null"}),
        ({"do": "run", "in:x": "1,2,3,4", "csrf": "TOKEN"}, {"sec-fetch-site": "same-site"}),
    ],
)
async def test_a_forged_form_is_refused(running: Running, form: dict[str, str], headers: dict[str, str]) -> None:
    async with browser(running) as client:
        token = token_of((await client.get("try/echo")).text)
        sent = {name: token if value == "TOKEN" else value for name, value in form.items()}

        reply = await client.post("try/echo", data=sent, headers=headers)

        assert reply.status_code == 403
        assert not running.requests


async def test_a_name_of_another_site_is_refused(running: Running) -> None:
    """DNS rebinding: a page's own name points at this machine."""
    async with browser(running) as client:
        assert (await client.get("", headers={"host": "evil.example"})).status_code == 403


@pytest.mark.parametrize("body", [b"{}", b"csrf=\xff", b"a=1&" * 3000])
async def test_another_body_than_a_form_is_refused(running: Running, body: bytes) -> None:
    async with browser(running) as client:
        await client.get("")
        kind = "application/json" if body == b"{}" else "application/x-www-form-urlencoded"

        reply = await client.post("models/echo", content=body, headers={"content-type": kind})

        assert reply.status_code == 400


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_markup_in_texts_stays_text(running: Running) -> None:
    """In names of models, errors, reasons, ids and tensors; the script of a browser would not run it either."""
    lane = Lane("echo", 1, "p32")
    await running.delivery.ensure([lane])
    for number, text in enumerate(HOSTILE):
        tensors = (from_numpy(text or "x", np.array([[text.encode()]], dtype=object)),)
        request = InferRequest(
            model="echo", version=1, id=f"id{number}{text[:40]}", inputs=tensors, timeout_s=30.0, reply_to="",
            parameters={text: text},
        )  # fmt: skip
        await put(running.delivery, lane, request)
        (lease,) = await running.delivery.fetch([lane], "test", 1, 5)
        await running.delivery.bury(lease, request.id, text, text)
    for text in HOSTILE[:12]:
        if not set('/\\{}"') & set(text):
            await declare_more(running, text)
    await running.refresh()
    letters = await running.delivery.dead_letters.list("echo")

    async with browser(running) as client:
        for page in (*PAGES, *(f"letters/echo/{letter.id}" for letter in letters)):
            reply = await client.get(page)
            assert reply.status_code == 200, page
            check_page(reply.text)
        pages = ("models", "requests", "jobs", "endpoints", "try", "letters/echo", "operations")
        for number, text in enumerate(HOSTILE):
            path = f"{pages[number % len(pages)]}/{quote(text, safe='')}"
            check_page((await client.get(path, params={"q": text, "state": text, "model": text})).text)
            check_page((await client.get(pages[number % 3], params={"q": text, "state": text, "page": text})).text)

    assert len(letters) == len(HOSTILE) >= 40


async def test_markup_in_a_workers_log_stays_text(running: Running) -> None:
    lines = [RecentLine(text, text, text, text, {text: text}, text) for text in HOSTILE]
    await running.store.put_worker_log("w1", WorkerLog(lines), 60.0)

    async with browser(running) as client:
        check_page((await client.get("workers/w1")).text)
        for text in HOSTILE:
            check_page((await client.get(f"workers/{quote(text, safe='')}")).text)


async def test_only_administrators_read_a_workers_log_and_drain_it(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        line = RecentLine("", "ERROR", "qinfer", "load failed", {}, "Traceback: of m")
        await running.store.put_worker_log("w1", WorkerLog([line]), 60.0)
        await running.store.put_worker_log("ended", WorkerLog([line]), 60.0)
        await client.post("sign-in", data={"key": keys["acme"]})

        page = await client.get("workers/w1")
        ended = await client.get("workers/ended")
        drained = await client.post("workers/w1", data={"csrf": token_of(page.text), "do": "drain"})

    assert (page.status_code, ended.status_code, drained.status_code) == (200, 404, 403)
    assert "Traceback: of m" not in page.text
    assert ">Drain<" not in page.text


@asynccontextmanager
async def with_keys(tmp_path: Path) -> AsyncIterator[tuple[Running, dict[str, str], Path]]:
    """A gateway with keys: of an administrator, of a tenant, and of another."""
    file = tmp_path / "keys.json"
    keys = {
        "root": add_key(file, "acme", (Scope.ADMIN,), "root")[1],
        "acme": add_key(file, "acme", (Scope.INFER,), "acme")[1],
        "other": add_key(file, "other", (Scope.INFER,), "other")[1],
    }
    async with running_gateway(settings_of(auth={"mode": "keys", "keys_file": str(file)})) as running:
        await running.refresh()
        yield running, keys, file


async def test_a_key_opens_a_session_that_ends_with_it(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (running, keys, file), browser(running) as client:
        before = await client.get("models")
        wrong = await client.post("sign-in", data={"key": "wrong"})
        entered = await client.post("sign-in", data={"key": keys["root"]})
        cookie = entered.history[0].headers["set-cookie"].lower()

        assert "API key" in before.text
        assert "echo" not in before.text
        assert wrong.status_code == 401
        assert entered.status_code == 200
        assert keys["root"].lower() not in cookie
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path" not in cookie
        assert (await client.get("audit")).status_code == 200

        other = Auth(read_keys(file))
        access = Access(settings_of(auth={"mode": "keys", "keys_file": str(file)}), other, running.delivery.router)
        request = _request(client.cookies[COOKIE])
        assert await access.user(request) is not None  # at another gateway
        other.replace_keys([key for key in read_keys(file) if key.id != "root"])
        assert await access.user(request) is None  # its key was revoked


def _request(session: str) -> Any:
    from starlette.requests import Request

    cookie = f"{COOKIE}={session}".encode()
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [(b"cookie", cookie)]})


async def test_a_key_has_few_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one ends."""
    monkeypatch.setattr(console_access, "MOST_SESSIONS", 2)
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        client.follow_redirects = False
        sessions = []
        for name in ("root", "acme", "root", "root"):
            await client.post("sign-in", data={"key": keys[name]})
            sessions.append(client.cookies[COOKIE])
        access = running.gateway._console._parts.access
        users = [await access.user(_request(session)) for session in sessions]

        assert [user.name if user else "" for user in users] == ["", "acme", "root", "root"]


async def test_signing_out_ends_the_session(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        page = await client.post("sign-in", data={"key": keys["root"]})
        session = client.cookies[COOKIE]

        await client.post("sign-out", data={"csrf": token_of(page.text)})
        client.cookies.set(COOKIE, session)

        assert "API key" in (await client.get("models")).text


async def test_a_session_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_down(_: int) -> None:
        raise BrokerUnavailable("down")

    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        await client.post("sign-in", data={"key": keys["root"]})
        monkeypatch.setattr(running.gateway._delivery.router, "check_up", is_down)

        replies = [await client.get(page) for page in ("", "history", "live")]
        replies.append(await client.post("sign-in", data={"key": keys["root"]}))

    assert [reply.status_code for reply in replies] == [503] * 4
    assert {reply.headers["x-frame-options"] for reply in replies} == {"DENY"}
    assert "down" in replies[-1].text


async def test_every_answer_forbids_frames(tmp_path: Path) -> None:
    """Files, errors, redirections and refusals have the headers too."""
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        client.follow_redirects = False
        pages = ("", "models", "sign-in", "static/console.js", "static/nothing", "nothing", "live", "history")
        replies = [await client.get(page) for page in pages]
        replies.append(await client.post("sign-in", data={"key": keys["root"]}))
        replies.append(await client.post("models"))

        assert {reply.status_code for reply in replies} == {200, 303, 401, 404, 405}
        for reply in replies:
            assert "frame-ancestors 'none'" in reply.headers["content-security-policy"], reply.url
            assert reply.headers["x-frame-options"] == "DENY"
            assert reply.headers["x-content-type-options"] == "nosniff"
        kept = [reply for reply in replies if reply.headers["cache-control"] != "no-store"]
        assert [reply.url.path for reply in kept] == ["/console/static/console.js"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://OWN"}, 303),
        ({"origin": "http://gpu.example", "x-forwarded-host": "gpu.example"}, 303),
        ({"origin": "http://gpu.example:8080", "x-forwarded-host": "gpu.example"}, 303),
        ({}, 303),
    ],
)
async def test_another_site_signs_nobody_in(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    """Over plain HTTP too, where browsers send no Fetch Metadata."""
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        own = running.url.partition("://")[2]
        sent = {name: value.replace("OWN", own) for name, value in headers.items()}
        client.follow_redirects = False

        reply = await client.post("sign-in", data={"key": keys["root"]}, headers=sent)

        assert reply.status_code == status
        assert (COOKIE in client.cookies) == (status == 303)


async def test_a_stream_ends_where_its_key_allows_less(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (running, _, file):
        auth = Auth(read_keys(file))
        access = Access(settings_of(auth={"mode": "keys", "keys_file": str(file)}), auth, running.delivery.router)
        (root,) = [one for one in auth.holders() if one.key_id == "root"]
        context = auth.holder(root.sha256)
        assert context is not None
        user = ConsoleUser(context, "", is_anyone=False)

        assert access.is_valid(user)
        auth.replace_keys([msgspec.structs.replace(key, scopes=(Scope.VIEWER,)) for key in read_keys(file)])
        assert not access.is_valid(user)


async def test_a_key_without_a_scope_sees_and_does_less(tmp_path: Path) -> None:
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as client:
        home = await client.post("sign-in", data={"key": keys["acme"]})
        refused = {page: (await client.get(page)).status_code for page in ADMIN_PAGES}
        loaded = await client.post("models/echo", data={"csrf": token_of(home.text), "do": "load"})

        assert refused == dict.fromkeys(ADMIN_PAGES, 403)
        assert "Tenants" not in home.text
        assert loaded.status_code == 403


async def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    async with with_keys(tmp_path) as (running, keys, _), browser(running) as own, browser(running) as other:
        headers = {"authorization": f"Bearer {keys['acme']}"}
        reply = await own.post(f"{running.url}/v1/models/echo/requests", json=body, headers=headers)
        request_id = reply.json()["id"]
        await own.post("sign-in", data={"key": keys["acme"]})
        page = await other.post("sign-in", data={"key": keys["other"]})

        seen = await own.get(f"requests/{request_id}")
        hidden = await other.get(f"requests/{request_id}")
        form = {"csrf": token_of(page.text), "do": "cancel"}
        kept = await other.post(f"requests/{request_id}", data=form)

        assert seen.status_code == 200
        assert hidden.status_code == kept.status_code == 404
        for name in ("", "requests", "jobs", "queues", "labeling", "sequences", "endpoints", "models"):
            assert request_id not in (await other.get(name)).text
            assert "acme" not in (await other.get(name)).text


async def test_the_console_is_not_served_to_strangers() -> None:
    settings: Settings = settings_of({"allow_hosts": ("*",)})
    async with running_gateway(settings) as running, browser(running) as client:
        reply = await client.get("")

        assert reply.status_code == 404
        assert "QINFER_AUTH__MODE" in reply.text
