"""Each page and act of the console, by a user's clicks in a browser, against a whole server; and its screenshots.

The screenshots of all pages are in the folder of `QINFER_TEST_SCREENSHOTS`, the pictures of the documents in that of
`QINFER_TEST_PICTURES` (`make pictures`); without these variables, both are in temporary ones.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from qinfer.testing import wait_until
from tests.e2e.console.scene import LETTERS, Scene, fruit_picture, showing
from tests.support.foreign import tool

if TYPE_CHECKING:
    from playwright import sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

PAGES = (
    "", "models", "models/digits", "try", "try/digits", "workers", "queues", "letters", "jobs", "jobs/nightly-scores",
    "requests", "operations", "endpoints", "endpoints/reader", "sequences", "labeling", "tenants", "audit",
)  # fmt: skip
AXE = "node_modules/axe-core/axe.min.js"
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
MOST_PICTURE_BYTES = 200 * 1024
DOCUMENTS = (Path("README.md"), Path("docs/how-to/use-the-console.md"))
WIDTHS = {1440: 900, 1024: 768, 390: 844}
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
WAIT_MS = 60_000
sync_api.expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    tool("chromium", "usr/bin/chromium")
    with showing(tmp_path_factory.mktemp("console")) as one:
        yield one


@pytest.fixture(scope="module")
def chromium() -> Iterator["sync_api.Browser"]:
    path = tool("chromium", "usr/bin/chromium") / "usr/bin/chromium"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(path))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: "sync_api.Browser", scene: Scene) -> Iterator["sync_api.Page"]:
    """A page that has opened the console, in a browser of its own; it must report no error."""
    context = chromium.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(scene.console)
    yield page
    context.close()
    assert [each for each in problems if "the server responded with a status" not in each] == []


def go_to(page: "sync_api.Page", section: str, path: str) -> None:
    """Opens a section by its link in the menu."""
    page.locator("#nav").get_by_text(section).click()
    page.wait_for_url(f"**/console/{path}")


def test_pages_are_live(page: "sync_api.Page") -> None:
    """Figures change without a reload, by one stream that the pages of a browser share."""
    sync_api.expect(page.locator("[data-connection]")).to_have_text("live")
    rate = page.locator('dd [data-live="/rate"]')
    sync_api.expect(rate).not_to_have_text("0")
    before = rate.inner_text()
    sync_api.expect(rate).not_to_have_text(before)
    assert page.locator(".charts canvas").count() == 4


def test_the_menu_and_the_keyboard_lead_everywhere(page: "sync_api.Page") -> None:
    titles = page.locator("#nav > a").all_inner_texts()
    for _ in titles[1:]:
        with page.expect_navigation():
            page.keyboard.press("]")
    assert page.url.endswith("/audit")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    go_to(page, "Models", "models")
    page.keyboard.press("/")
    page.keyboard.type("dig")
    sync_api.expect(page.locator("#rows tbody tr")).to_have_count(2)
    assert page.url.endswith("q=dig")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/models/digits")
    page.keyboard.press("t")
    assert page.locator("html").get_attribute("data-theme") in THEMES
    page.reload()
    assert page.locator("html").get_attribute("data-theme") in THEMES


def test_a_list_is_sorted(page: "sync_api.Page") -> None:
    go_to(page, "Models", "models")
    page.get_by_role("button", name="Requests/s").click()
    first = page.locator("#rows tbody tr").first
    sync_api.expect(first).to_contain_text("digits")
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Requests/s")


def test_a_model_is_tried_with_numbers_text_and_an_image(page: "sync_api.Page", scene: Scene, tmp_path: Path) -> None:
    from qinfer_api.console.tensors import png

    page.goto(f"{scene.console}try/digits")
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.locator("main")).to_contain_text("answered in")
    assert "probabilities" in page.locator(".tensor").all_inner_texts()[1]
    image = tmp_path / "three.png"
    image.write_bytes(png(np.full((16, 16), 255, np.uint8)))
    page.locator("input[type=file]").set_input_files(image)
    page.locator("[data-scale]").select_option("16")
    sync_api.expect(page.locator("textarea")).to_have_value(", ".join(["16"] * 64))
    page.goto(f"{scene.console}try/shout")
    page.locator("textarea").fill("a <b>word</b>")
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.locator(".tensor")).to_contain_text("A <B>WORD</B>")
    page.goto(f"{scene.console}try/tell")
    page.locator("textarea").fill("one two three")
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.locator("main")).to_contain_text("Response 3")
    page.goto(f"{scene.console}try/rate")
    page.locator("textarea").fill("bad")
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.locator("main > .note.bad")).to_contain_text("the text is <b>bad</b>")


def show(page: "sync_api.Page", scene: Scene, path: str) -> None:
    """Opens a page, and waits for what it loads by itself; of the detector, its answer."""
    if path == "try/fruit":
        find_fruit(page, scene)
        return
    page.goto(scene.console + path)
    sync_api.expect(page.locator("[data-connection]")).to_have_text("live")
    if path.startswith("jobs/"):
        sync_api.expect(page.locator("#preview table")).to_be_visible()
    if not path:
        sync_api.expect(page.locator(".charts canvas")).to_have_count(4)


def find_fruit(page: "sync_api.Page", scene: Scene) -> None:
    """Drops a picture on the form of the detector, and runs it."""
    page.goto(f"{scene.console}try/fruit")
    page.locator("input[type=file]").set_input_files(
        {"name": "fruit.png", "mimeType": "image/png", "buffer": fruit_picture()}
    )
    sync_api.expect(page.locator("textarea")).not_to_have_value("")
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.locator(".drawn text")).to_have_count(3)


def test_boxes_are_drawn_over_the_dropped_image(page: "sync_api.Page", scene: Scene) -> None:
    """At their places in the browser's own image, which stays in the form for the next run."""
    find_fruit(page, scene)

    table = page.locator(".picture tbody tr")
    size = page.locator(".drawn img").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    edges = {
        box.get_attribute("class"): [float(box.get_attribute(name) or 0) for name in ("x", "y", "width", "height")]
        for box in page.locator(".drawn rect:not(.tag)").all()
    }
    plum = table.filter(has_text="plum")
    place = edges[f"colour-{plum.get_attribute('data-colour')}"]
    assert size == [640, 480]
    assert np.allclose(place, [330 - 92, 250 - 92, 2 * 92, 2 * 92], atol=6)
    page.locator("[data-form]").select_option("xywh")
    wider = page.locator(f".drawn rect.colour-{plum.get_attribute('data-colour')}:not(.tag)").get_attribute("width")
    assert float(wider or 0) > 2 * place[2]
    page.locator("[data-least]").fill("1")
    sync_api.expect(page.locator(".drawn text")).to_have_count(0)
    page.get_by_role("button", name="Run").click()
    sync_api.expect(page.locator(".drawn text")).to_have_count(3)


def test_rows_of_a_job_are_looked_at(page: "sync_api.Page", scene: Scene) -> None:
    page.goto(f"{scene.console}jobs/nightly-scores")
    sync_api.expect(page.locator(".head .pill")).to_have_text("completed", timeout=120_000)
    page.reload()

    rows = page.locator("#preview tbody tr")
    sync_api.expect(rows).to_have_count(20)
    sync_api.expect(page.locator("#preview thead")).to_contain_text("probabilities")
    page.locator("#preview").get_by_role("link", name="Failed").click()
    sync_api.expect(rows).to_have_count(1)
    sync_api.expect(rows).to_contain_text("pixels")
    page.locator("#preview").get_by_role("link", name="Input").click()
    sync_api.expect(page.locator("#preview")).to_contain_text("rows.jsonl")
    assert page.url.endswith("/jobs/nightly-scores")


def test_a_model_is_paused_and_unloaded_and_loaded(page: "sync_api.Page", scene: Scene) -> None:
    page.goto(f"{scene.console}models/tell")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main")).to_contain_text("The model is paused")
    page.get_by_role("button", name="Resume").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("goes on")
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("button", name="Keep").click()
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("is unloaded")
    page.get_by_role("button", name="Load", exact=True).click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("is loaded")
    page.goto(f"{scene.console}audit")
    assert "/console/models/tell unload" in page.locator("main").inner_text()


def test_dead_letters_are_looked_at_replayed_and_removed(page: "sync_api.Page", scene: Scene) -> None:
    go_to(page, "Dead letters", "letters")
    rows = page.locator("#rows tbody tr")
    sync_api.expect(rows).to_have_count(LETTERS)
    rows.first.get_by_role("link").click()
    sync_api.expect(page.locator("main")).to_contain_text("while it executed image 0")
    page.get_by_role("button", name="Replay").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("at the end of its lane")
    page.goto(f"{scene.console}letters?model=digits&error=image+1")
    sync_api.expect(rows).to_have_count(1)
    page.get_by_role("button", name="Replay all…").click()
    page.wait_for_url("**/operations/*")
    sync_api.expect(page.locator("main")).to_contain_text("Nothing is changed yet")
    page.get_by_role("button", name="Replay 1").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator(".tiles")).to_contain_text("Changed\n1", use_inner_text=True)
    page.goto(f"{scene.console}letters")
    page.keyboard.press("j")
    page.keyboard.press("x")
    sync_api.expect(page.locator("[data-chosen]")).to_have_text("1 chosen")
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("1 dead letter was removed")
    sync_api.expect(page.locator("main")).to_contain_text("There are no dead letters")


def test_a_job_is_followed_resumed_and_deleted(page: "sync_api.Page", scene: Scene) -> None:
    go_to(page, "Jobs", "jobs")
    page.get_by_role("link", name="strict-scores").click()
    sync_api.expect(page.locator(".head .pill")).to_have_text("failed", timeout=120_000)
    assert page.locator(".cells i").count() == 25
    page.locator("input[name=error_threshold]").fill("-1")
    page.get_by_role("button", name="Resume").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("goes on")
    sync_api.expect(page.locator(".head .pill")).to_have_text("completed", timeout=120_000)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("record is deleted")


def test_a_stored_request_is_found_with_its_timeline(page: "sync_api.Page", scene: Scene) -> None:
    body = {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["hello"]}]}
    reply = page.request.post(f"{scene.url}/v1/models/shout/requests", data=body)
    assert reply.ok, reply.text()
    go_to(page, "Requests", "requests")
    page.locator("#id_prefix").fill(reply.json()["id"][:20])
    page.get_by_role("button", name="Search").click()
    page.locator("#rows tbody tr").first.get_by_role("link").click()
    sync_api.expect(page.locator(".steps")).to_contain_text("executed")
    sync_api.expect(page.locator(".tensor")).to_contain_text("HELLO")
    page.get_by_role("button", name="Remove the result").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("result is removed")


def test_a_canary_is_paused_promoted_and_aborted(page: "sync_api.Page", scene: Scene) -> None:
    go_to(page, "Endpoints", "endpoints")
    page.get_by_role("link", name="reader").click()
    page.get_by_role("button", name="Pause").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("paused")
    page.get_by_role("button", name="Resume").click()
    sync_api.expect(page.locator("main > .note.ok")).to_contain_text("goes on")
    page.get_by_role("button", name="Promote").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("table").first).to_contain_text("50 %")
    page.get_by_role("button", name="Abort").click()
    page.get_by_role("button", name="Go on").click()
    sync_api.expect(page.locator("main")).to_contain_text("rolled back")


@pytest.mark.parametrize("theme", THEMES)
def test_every_page_fits_every_screen(chromium: "sync_api.Browser", scene: Scene, theme: Theme, tmp_path: Path) -> None:
    """Nothing overflows sideways; the screenshots are kept."""
    folder = Path(os.environ.get("QINFER_TEST_SCREENSHOTS", tmp_path))
    for width, height in WIDTHS.items():
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        page = context.new_page()
        for path in (*PAGES, "try/fruit"):
            show(page, scene, path)
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow == 0, (path, width)
            name = path.replace("/", "-") or "overview"
            page.screenshot(path=folder / f"{name}-{width}-{theme}.png", full_page=width < 1000)
        context.close()


def _has_history(chromium: "sync_api.Browser", scene: Scene) -> bool:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(scene.console)
    points = page.evaluate("fetch('history?of=').then(reply => reply.json())")
    context.close()
    return sum(value is not None for value in points["p50_s"]) > 36


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [1440, 390])
def test_every_page_is_accessible(chromium: "sync_api.Browser", scene: Scene, theme: Theme, width: int) -> None:
    """WCAG 2.2, level AA, as far as axe-core can tell; with the answer of a model, and both dialogs."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    context.set_default_timeout(WAIT_MS)
    context.add_init_script(path=tool("axe", AXE) / AXE)
    page, problems = context.new_page(), list[tuple[str, str, list[str]]]()

    def look(what: str) -> None:
        found = page.evaluate("tags => axe.run(document, { runOnly: tags })", WCAG)
        for one in found["violations"]:
            problems.append((what, one["id"], [node["html"][:200] for node in one["nodes"][:3]]))

    for path in (*PAGES, "try/fruit"):
        show(page, scene, path)
        look(path)
    page.keyboard.press("?")
    look("keys")
    page.goto(f"{scene.console}models/digits")
    page.get_by_role("button", name="Unload").click()
    look("question")
    context.close()
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.timeout(600)
def test_the_pictures_of_the_documents(chromium: "sync_api.Browser", scene: Scene, tmp_path: Path) -> None:
    """The pictures are small, and each is in a document; those that are kept show some minutes of traffic."""
    folder = Path(os.environ.get("QINFER_TEST_PICTURES", tmp_path))
    if folder != tmp_path:
        wait_until(lambda: _has_history(chromium, scene), 400, "three minutes of traffic")

    def take(name: str, path: str, theme: Theme = "light") -> None:
        context = chromium.new_context(viewport={"width": 1440, "height": 900}, color_scheme=theme)
        page = context.new_page()
        show(page, scene, path)
        page.screenshot(path=folder / name)
        context.close()

    take("console-overview.png", "")
    take("console-dark.png", "", "dark")
    take("console-jobs.png", "jobs/nightly-scores")
    take("console-try.png", "try/fruit")
    take("console-endpoints.png", "endpoints/reader")
    made = {path.name: path.stat().st_size for path in folder.glob("console-*.png")}
    shown = "".join(path.read_text() for path in DOCUMENTS)
    assert len(made) == 5
    assert max(made.values()) <= MOST_PICTURE_BYTES, made
    assert all(f"images/{name})" in shown for name in made)
