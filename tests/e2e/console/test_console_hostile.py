"""The console in a browser with hostile texts in everything that it shows, and below a path of a proxy.

No page runs a text as code, loads from elsewhere, or breaks its own content security policy.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest

from tests.e2e.console.hostile import HOSTILE_NAMES, JOB, KINDS, LETTERS_OF, RESULTS_OF, fill, told
from tests.integration.console.test_console_pages import PAGES
from tests.integration.console.test_console_security import HOSTILE
from tests.support.foreign import tool
from tests.support.gateway import TenantScene
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from playwright import async_api
else:
    async_api = pytest.importorskip("playwright.async_api")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WAIT_MS = 60_000
PREFIX = "/some/path"

LOOK = """() => {
  const isOwn = (url) => url === "" || url.startsWith("data:image/") || new URL(url, location).host === location.host;
  const bad = [];
  for (const element of document.querySelectorAll("*")) {
    const source = element.getAttribute("src") || "";
    const isOwnScript = /^(\\.\\/|(\\.\\.\\/)+)static\\/[\\w.]+\\.js\\?v=\\w+$/.test(source);
    const isScript = element.tagName === "SCRIPT" && !isOwnScript;
    const isForeign = element.matches("iframe, object, embed, base, style, math, marquee, body *:is(link, meta)");
    const attributes = [...element.attributes];
    const isCode = attributes.some(({ name }) => /^(on|hx-on|data-hx-on)/.test(name));
    const isElsewhere = attributes.some(({ name, value }) =>
      ["href", "src", "action", "formaction", "data", "hx-get", "hx-post"].includes(name) && !isOwn(value));
    if (isScript || isForeign || isCode || isElsewhere) bad.push(element.outerHTML.slice(0, 300));
  }
  const attributes = [...document.querySelectorAll("[title], [value], [data-confirm]")];
  const texts = attributes.flatMap((one) => [one.title, one.getAttribute("value"), one.dataset.confirm]);
  return { bad, text: [document.title, document.body.textContent, ...texts].join("\\n") };
}"""
"""Looks for elements that no template has, and returns the text of the page."""

REPLACE = """() => typeof htmx === "undefined" ? null
  : htmx.ajax("GET", location.href, { target: "#main", select: "#main", swap: "outerHTML" })"""
"""Fetches the page's part as htmx does; an answer that is no page has no htmx."""


class Visitor:
    """A browser that has signed in, and the problems that it has met."""

    def __init__(self, page: "async_api.Page", console: str) -> None:
        self.page, self.console = page, console
        self.problems: list[str] = []
        self.seen: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._dismiss)
        page.context.on("request", self._check_request)
        page.context.on("response", self._check_response)

    async def sign_in(self, key: str) -> None:
        await self.page.goto(self.console)
        await self.page.fill("input[name=key]", key)
        await self.page.click("button")
        await self.page.wait_for_url(f"{self.console}**")
        await async_api.expect(self.page.locator("[data-connection]")).to_have_text("live", timeout=WAIT_MS)

    async def look(self, path: str) -> None:
        """Opens a page, and lets htmx replace its part; notes elements that are no template's."""
        await self.page.goto(self.console + path)
        await self.check(path)
        await self.page.evaluate(REPLACE)
        await self.check(path)

    async def check(self, path: str) -> None:
        """Notes elements of the open page that are no template's."""
        found: dict[str, Any] = await self.page.evaluate(LOOK)
        self.problems += [f"{path}: {element}" for element in found["bad"]]
        self.seen.append(found["text"])

    def _hear(self, message: "async_api.ConsoleMessage") -> None:
        if message.type == "error" and "the server responded with a status" not in message.text:
            self.problems.append(f"console: {message.text}")

    async def _dismiss(self, dialog: "async_api.Dialog") -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _check_request(self, request: "async_api.Request") -> None:
        if not request.url.startswith((self.console.removesuffix("/"), "data:")):
            self.problems.append(f"request of {request.url}")

    def _check_response(self, response: "async_api.Response") -> None:
        policy = response.headers.get("content-security-policy", "")
        if not response.url.startswith("data:") and "frame-ancestors 'none'" not in policy:
            self.problems.append(f"without a policy: {response.url}")


@contextlib.asynccontextmanager
async def visiting(scene: TenantScene, url: str) -> AsyncIterator[Visitor]:
    """Opens the console of a gateway in a browser, as its administrator; there must be no problem."""
    path = tool("chromium", "usr/bin/chromium") / "usr/bin/chromium"
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(path))
        page = await browser.new_page()
        page.set_default_timeout(WAIT_MS)
        visitor = Visitor(page, f"{url}/console/")
        await visitor.sign_in(scene.keys["admin"])
        yield visitor
        await browser.close()
    assert visitor.problems == []


async def test_no_text_becomes_code(tmp_path: Path) -> None:
    async with TenantScene.opened(tmp_path / "keys.json") as scene:
        await fill(scene)
        async with visiting(scene, scene.running.url) as visitor:
            operations = (await scene.clients["admin"].get("/v1/operations")).json()["operations"]
            letters = await scene.running.delivery.dead_letters.list(LETTERS_OF)
            models = [quote(name, safe="") for name in HOSTILE_NAMES]
            ended = -(-len(HOSTILE) // 8)
            places = [
                *PAGES, "models/pair", "models/named", "try/named", f"jobs/{JOB}", "jobs?state=failed",
                f"letters?model={LETTERS_OF}", f"letters/{LETTERS_OF}/{letters[-1].id}",
                *(f"{page}/{name}" for page in ("models", "try") for name in models),
                *(f"operations/{each['id']}" for each in operations),
                *(f"endpoints/of-{number}" for number in range(len(models))),
                *(f"requests/ended-{number}?model={RESULTS_OF}" for number in range(ended)),
                *(f"requests/failed-{number}?model=echo&tenant={quote(told('tenant')[number])}" for number in range(3)),
            ]  # fmt: skip
            for place in places:
                await visitor.look(place)
            for text in HOSTILE:
                asked = quote(text, safe="")
                await visitor.look(
                    f"requests?model={asked}&error={asked}&id_prefix={asked}&tenant={asked}&state={asked}"
                )
                await visitor.look(f"jobs/{asked}?state={asked}&after={asked}&q={asked}&page={asked}")
            await answer_a_form(visitor)
            await ask_before_an_act(visitor)
            seen = "\n".join(visitor.seen)

    in_json = {text: json.dumps(text, ensure_ascii=False)[1:-1] for kind in KINDS for text in told(kind)}
    assert [text for text, escaped in in_json.items() if text not in seen and escaped not in seen] == []
    assert [name for name in HOSTILE_NAMES if name not in seen] == []


async def answer_a_form(visitor: Visitor) -> None:
    """Sends the texts to a model that answers with them."""
    page = visitor.page
    await page.goto(f"{visitor.console}try/text")
    await page.locator("textarea").fill("\n".join(HOSTILE))
    await page.get_by_role("button", name="Run").click()
    await async_api.expect(page.locator("main")).to_contain_text("answered in")
    await visitor.check("the answer")
    answered = await page.locator(".tensor pre.text").all_text_contents()
    assert [text for text in HOSTILE if text not in "\n".join(answered)] == []


async def ask_before_an_act(visitor: Visitor) -> None:
    """Asks about an act on a model, and does it, with the name in question and answer."""
    name = HOSTILE_NAMES[0]
    page = visitor.page
    await page.goto(f"{visitor.console}models/{quote(name, safe='')}")
    await page.get_by_role("button", name="Pause").click()
    await async_api.expect(page.locator("#confirm-text")).to_contain_text(name)
    await visitor.check("the question")
    await page.get_by_role("button", name="Go on").click()
    await async_api.expect(page.locator("main")).to_contain_text("The model is paused")
    await visitor.check("the act")


async def test_the_console_works_below_a_path_of_a_proxy(tmp_path: Path) -> None:
    """All that the browser asks for is below that path."""
    async with TenantScene.opened(tmp_path / "keys.json") as scene:
        with Proxy(scene.running.port, PREFIX) as proxy:
            async with visiting(scene, f"http://127.0.0.1:{proxy.port}{PREFIX}") as visitor:
                page = visitor.page
                for place in (*PAGES, "letters/echo/1-0", "requests/none?model=echo"):
                    await visitor.look(place)
                await page.goto(f"{visitor.console}models/echo")
                await page.get_by_role("link", name="Try it").last.click()
                await page.wait_for_url(f"{visitor.console}try/echo")
                await page.locator("textarea").fill("1, 2, 3, 4")
                await page.get_by_role("button", name="Run").click()
                await async_api.expect(page.locator("main")).to_contain_text("answered in")
                await page.goto(f"{visitor.console}letters?model=echo")
                await page.goto(f"{visitor.console}models?q=ech")
                await async_api.expect(page.locator("[data-connection]")).to_have_text("live")
                cookies = await page.context.cookies()
                await page.get_by_role("button", name="Sign out").click()
                await page.wait_for_url(f"{visitor.console}sign-in")
                await page.goto(f"{visitor.console}models?q=ech")
                assert urlsplit(page.url).path == f"{PREFIX}/console/sign-in"

    assert [cookie["path"] for cookie in cookies] == [f"{PREFIX}/console"]


async def test_no_page_shows_the_console_in_a_frame(tmp_path: Path) -> None:
    found = {}
    async with TenantScene.opened(tmp_path / "keys.json") as scene, visiting(scene, scene.running.url) as visitor:
        for path in ("", "models", "sign-in", "nothing", "static/console.js"):
            await visitor.page.goto("about:blank")
            await visitor.page.set_content(f'<iframe src="{visitor.console}{path}"></iframe>')
            found[path], *_ = [frame.url for frame in visitor.page.frames[1:]]
        visitor.problems.clear()  # the browser tells each

    assert set(found.values()) == {"chrome-error://chromewebdata/"}
