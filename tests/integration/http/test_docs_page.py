"""`/docs` without the internet: the page, what it loads, and what its browser is told to load nothing from."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from html.parser import HTMLParser

import httpx
import pytest

from tests.support.gateway import running_gateway

PAGE = "/docs"


class References(HTMLParser):
    """The addresses in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        addresses = [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        self.found += addresses
        self.inline += (tag == "script" and not addresses) or tag == "style"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        yield client


async def test_the_page_references_nothing_outside(client: httpx.AsyncClient) -> None:
    """All of its addresses are relative, so that a proxy may put a path before them, and the gateway serves each."""
    page = await client.get(PAGE)
    references = References(page.text)
    loaded = [address for address in references.found if not address.startswith("data:")]

    replies = [await client.get(page.url.join(address)) for address in loaded]

    assert len(loaded) == 3
    assert not [address for address in loaded if ":" in address or address.startswith("/")]
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    assert references.inline == 0
    start = replies[loaded.index("docs/start.js")].text
    assert 'url: "openapi.json"' in start
    assert "validatorUrl: null" in start  # or its makers' server would be asked to read the document


async def test_the_style_sheet_loads_nothing(client: httpx.AsyncClient) -> None:
    style = (await client.get("/docs/swagger-ui.css")).text

    assert len(style) > 100_000
    assert set(re.findall(r"url\(['\"]?(\w+):", style)) <= {"data"}
    assert "@import" not in style


async def test_the_browser_is_told_to_load_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    policy = (await client.get(PAGE)).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    assert rules["default-src"] == "'none'"
    sources = {source for sources in rules.values() for source in sources.split()}
    assert sources == {"'none'", "'self'", "data:"}
    assert rules["script-src"] == "'self'"


@pytest.mark.parametrize(("accepted", "encoding"), [("gzip, br", "gzip"), ("identity", None), ("gzip;q=0", None)])
async def test_large_files_come_as_the_client_takes_them(
    client: httpx.AsyncClient, accepted: str, encoding: str | None
) -> None:
    reply = await client.get("/docs/swagger-ui-bundle.js", headers={"accept-encoding": accepted})

    assert reply.headers.get("content-encoding") == encoding
    assert reply.headers["vary"] == "accept-encoding"
    assert "SwaggerUIBundle" in reply.text[:2000]


@pytest.mark.parametrize("path", ["/redoc", "/docs/", "/docs/SOURCE.json", "/docs/../app.py", "/docs/oauth2-redirect"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
async def test_calls_of_the_page_ask_for_strict_json(client: httpx.AsyncClient) -> None:
    """Its browser could not read NaN."""
    start = (await client.get("/docs/start.js")).text
    asked = 'console.log(options.requestInterceptor({headers: {accept: "application/json"}}).headers.accept)'
    node = await asyncio.create_subprocess_exec(
        "node", "-e", f"const SwaggerUIBundle = (options) => {asked}; {start}", stdout=asyncio.subprocess.PIPE
    )

    printed, _ = await node.communicate()

    assert printed.decode().strip() == "application/json;strict=true"
