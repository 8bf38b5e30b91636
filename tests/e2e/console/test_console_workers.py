"""The pages of workers and the charts of a week, in a browser, at the console's own port of `qinfer up`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from qinfer.testing import wait_until
from tests.e2e.conftest import running
from tests.support.foreign import tool
from tests.support.models import add_sub
from tests.support.servers.servers import free_port

if TYPE_CHECKING:
    from playwright import sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TENSORS = " ".join(f'{kind} {{ name: "{kind}" data_type: TYPE_FP32 dims: [ 1 ] }}' for kind in ("input", "output"))
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("there are no weights")

    def execute(self, requests):
        return []
"""
WAIT_MS = 60_000
sync_api.expect.set_options(timeout=WAIT_MS)


class Scene(NamedTuple):
    """A running server: its API, the console at its own port, and the log of `qinfer up`."""

    api: str
    console: str
    log: Path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A server with two workers and a model that can't be loaded; the Prometheus that is named is away."""
    tool("chromium", "usr/bin/chromium")
    folder = tmp_path_factory.mktemp("workers")
    models = folder / "models"
    add_sub(models)
    broken = models / "broken"
    (broken / "1").mkdir(parents=True)
    (broken / "1" / "model.py").write_text(BROKEN)
    (broken / "config.pbtxt").write_text(f'name: "broken" backend: "python" {TENSORS}')
    port = free_port()
    more = {
        "QINFER_CONSOLE__PROMETHEUS_URL": f"http://127.0.0.1:{free_port()}",
        "QINFER_REPOSITORY__STRICT_READINESS": "false",
    }
    with running(models, folder, 2, ("--console-port", str(port)), **more) as stack:
        console = f"http://127.0.0.1:{port}/console/"
        log = folder / "log"
        wait_until(lambda: console in log.read_text(), 120, "the summary, which has the address of the console")
        yield Scene(f"http://{stack.address}", console, log)


@pytest.fixture
def page(scene: Scene) -> Iterator["sync_api.Page"]:
    """A page that has opened the console; it must report no error."""
    path = tool("chromium", "usr/bin/chromium") / "usr/bin/chromium"
    with (
        sync_api.sync_playwright() as playwright,
        contextlib.closing(playwright.chromium.launch(executable_path=str(path))) as browser,
    ):
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(scene.console)
        yield page
        assert problems == []


def test_the_port_of_http_has_no_console(scene: Scene) -> None:
    assert httpx.get(f"{scene.api}/console/").status_code == 404
    assert httpx.get(f"{scene.api}/v2").status_code == 200


def test_the_charts_say_why_prometheus_gives_none(page: "sync_api.Page") -> None:
    sync_api.expect(page.locator("[data-connection]")).to_have_text("live")
    sync_api.expect(page.locator(".charts canvas")).to_have_count(4)
    sync_api.expect(page.locator("[data-chart-note]")).to_be_hidden()
    page.get_by_role("link", name="7d").click()
    page.wait_for_url("**/?range=7d")
    sync_api.expect(page.locator("[data-chart-note]")).to_contain_text("Prometheus can't be reached")
    page.get_by_role("link", name="1h").click()
    sync_api.expect(page.locator(".charts canvas")).to_have_count(4)


def test_a_worker_is_looked_at_and_drained_and_replaced(page: "sync_api.Page", scene: Scene) -> None:
    page.locator("#nav").get_by_text("Workers").click()
    rows = page.locator("#rows tbody tr")
    sync_api.expect(rows).to_have_count(2)
    worker = rows.first.get_by_role("link").first
    name = worker.inner_text()
    worker.click()
    page.wait_for_url("**/console/workers/*")
    sync_api.expect(page.locator("#rows")).to_contain_text("add_sub")
    sync_api.expect(page.locator("#rows")).to_contain_text("MiB")
    line = page.locator(".lines li").filter(has_text="load failed").first
    sync_api.expect(line).to_contain_text("model=broken")
    sync_api.expect(line).to_contain_text("there are no weights")

    page.get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("The worker drains")
    sync_api.expect(page.locator("#rows")).to_contain_text("not alive any more")
    sync_api.expect(page.locator(".lines li").first).to_be_visible()

    page.goto(f"{scene.console}workers")
    sync_api.expect(rows).to_have_count(2)
    sync_api.expect(page.locator("#rows")).not_to_contain_text(name)
    wait_until(lambda: "ended with exit code 0; restarting it" in scene.log.read_text(), 60, "the restart")
    page.goto(f"{scene.console}audit")
    assert f"/console/workers/{name} drain" in page.locator("main").inner_text()
