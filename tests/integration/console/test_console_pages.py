"""The console's pages over HTTP: what they show, and what they refuse."""

import json
import logging
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from qinfer.core.messages import InferRequest
from qinfer.models.state import Executing, State, VersionState, WorkerRecord
from qinfer.observe.host import MemoryUse
from qinfer.observe.logs import AUDIT, RecentLine, WorkerLog
from qinfer.queue.entries import Lane
from qinfer_api.console.render import MOST_REASON
from tests.e2e.console.scene import put
from tests.support.gateway import Running, running_gateway

PAGES = (
    "", "models", "try", "workers", "queues", "letters", "jobs", "requests", "endpoints", "sequences", "labeling",
    "tenants", "audit", "operations", "models/echo", "try/echo", "letters?model=echo", "models/sp%C3%A4te%20modelle",
    "workers/w1",
)  # fmt: skip


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as one:
        await one.refresh()
        yield one


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has opened the console: it has the cookie."""
    async with httpx.AsyncClient(base_url=f"{running.url}/console/", follow_redirects=True) as client:
        await client.get("")
        yield client


def token_of(page: str) -> str:
    """Returns the token of a page's forms."""
    found = re.search(r'name="csrf" value="(\w+)"', page)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_opens(client: httpx.AsyncClient, page: str) -> None:
    reply = await client.get(page)

    assert reply.status_code == 200, reply.text
    assert "<main" in reply.text
    assert reply.text.startswith("<!doctype html>")


async def test_a_form_runs_a_model(client: httpx.AsyncClient) -> None:
    page = (await client.get("try/echo")).text

    reply = await client.post("try/echo", data={"csrf": token_of(page), "do": "run", "in:x": "1, 2.5, 3, 4"})

    assert reply.status_code == 200, reply.text
    assert "1, 2.5, 3, 4" in reply.text
    assert "Version 2 answered" in reply.text


async def test_addresses_are_relative_wherever_a_proxy_puts_the_console(client: httpx.AsyncClient) -> None:
    first = await client.get(str(client.base_url).rstrip("/"))
    deep = await client.get("letters/echo/1-0")

    assert first.url.path == "/console/"
    assert 'href="../../static/' in deep.text
    assert not re.findall(r'(?:href|src|action|hx-get)="(?:/|https?:)', first.text + deep.text)


async def test_a_link_of_another_site_opens_the_console(running: Running) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    async with httpx.AsyncClient(follow_redirects=True, headers=headers) as client:
        reply = await client.get(f"{running.url}/console/models")

        assert reply.status_code == 200
        assert "echo" in reply.text


async def test_a_part_of_a_page_goes_to_htmx_alone(client: httpx.AsyncClient) -> None:
    part = await client.get("models?q=echo", headers={"hx-request": "true"})

    assert part.text.lstrip().startswith("<main")
    assert "echo" in part.text
    assert "stuck" not in part.text


async def test_static_files_are_kept_by_browsers_and_nothing_else_is_served(client: httpx.AsyncClient) -> None:
    script = await client.get("static/console.js")

    assert script.status_code == 200
    assert "immutable" in script.headers["cache-control"]
    for name in ("static/SOURCE.json", "static/..%2Frender.py", "static/../render.py", "nothing", "models/echo/1"):
        assert (await client.get(name)).status_code == 404


async def test_figures_come_by_one_stream(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "live") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.aiter_lines()
        assert await anext(lines) == "event: figures"
        figures = json.loads((await anext(lines)).removeprefix("data: "))

    assert figures["workers"] == 1
    assert figures["echo:2/work"] == 0
    assert len((await client.get("history", params={"of": "echo:2"})).json()["at_s"]) == 720


async def test_an_act_is_in_the_audit_trail(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=AUDIT)  # as a gateway's logging has it
    token = token_of((await client.get("try/echo")).text)
    await client.post("letters", data={"csrf": token, "do": "purge", "id": "echo/1-0"})

    page = (await client.get("audit")).text

    assert "/console/letters purge" in page
    assert "done" in page


async def test_a_worker_shows_what_executes_its_memory_and_its_log(client: httpx.AsyncClient, running: Running) -> None:
    record = WorkerRecord(
        id="w2", started_at=0.0, models={"echo": {1: VersionState(State.READY, 1)}}, memory_bytes=3 * 2**20,
        memory={"echo": {1: (MemoryUse("cpu", 0, 2 * 2**20),)}}, long=(Executing("echo", 1, 60.0, 7.5, 10.0),),
    )  # fmt: skip
    await running.store.heartbeat(record, 3600)
    line = RecentLine("2026-01-31T09:00:00.123Z", "ERROR", "qinfer", "load failed", {"model": "m"}, "Traceback: of m")
    for worker in ("w2", "ended"):
        await running.store.put_worker_log(worker, WorkerLog([line]), 60.0)
    await running.refresh()

    page, ended = (await client.get("workers/w2")).text, (await client.get("workers/ended")).text

    for text in ("3 MiB", "2 MiB", "1970-01-01 00:01:00 UTC", "7.50 s", "load failed", "model=m", "Traceback: of m"):
        assert text in page
    assert "not alive any more" in ended
    assert "Traceback: of m" in ended
    assert (await client.get("workers/gone")).status_code == 404


async def test_a_worker_is_drained(client: httpx.AsyncClient, running: Running) -> None:
    token = token_of((await client.get("workers/w1")).text)

    reply = await client.post("workers/w1", data={"csrf": token, "do": "drain"})
    gone = await client.post("workers/gone", data={"csrf": token, "do": "drain"})

    assert "The worker drains" in reply.text
    assert gone.status_code == 404
    (record,) = await running.store.workers()
    assert await running.store.heartbeat(record, 3600) == ""


async def test_an_error_of_an_act_is_told_on_its_page(client: httpx.AsyncClient) -> None:
    token = token_of((await client.get("try/echo")).text)

    reply = await client.post("try/echo", data={"csrf": token, "do": "run", "in:x": "1, 2"})

    assert reply.status_code == 400
    assert "has 2 values" in reply.text
    assert 'role="alert"' in reply.text


async def test_the_sign_in_leads_to_the_page_that_was_asked_for(running: Running) -> None:
    async with httpx.AsyncClient(base_url=f"{running.url}/console/", follow_redirects=True) as client:
        reply = await client.get("models/sp%C3%A4te%20modelle?q=a")

        assert reply.url.path == "/console/models/späte modelle"
        assert reply.url.query == b"q=a"
        for to in ("//e.example", "https://e.example", "../../docs", "\\e.example"):
            assert (await client.get("sign-in", params={"to": to})).url.path.startswith("/console/")


async def test_an_operation_is_done_as_its_dry_run_was_asked(client: httpx.AsyncClient, running: Running) -> None:
    chosen = {"model": "echo", "version": 2, "tenant": "", "newer_than_s": 0.0, "state": ["queued"]}
    body = {"action": "cancel", "filter": chosen, "dry_run": True}
    asked = (await client.post(f"{running.url}/v1/operations", json=body)).json()
    token = token_of((await client.get("try/echo")).text)

    reply = await client.post(f"operations/{asked['id']}", data={"csrf": token, "do": "again"})
    done = (await client.get(f"{running.url}/v1/operations/{reply.url.path.rpartition('/')[2]}")).json()

    assert done["id"] != asked["id"]
    assert (done["dry_run"], done["filter"]) == (False, asked["filter"])


async def test_a_list_cuts_a_long_reason_and_its_own_page_does_not(client: httpx.AsyncClient, running: Running) -> None:
    lane, reason = Lane("echo", 1, "p32"), "x" * 4000
    await running.delivery.ensure([lane])
    await put(running.delivery, lane, InferRequest(model="echo", version=1, id="r", inputs=(), timeout_s=30.0))
    (lease,) = await running.delivery.fetch([lane], "test", 1, 5)
    await running.delivery.bury(lease, "r", "inference_failed", reason)
    (letter,) = await running.delivery.dead_letters.list("echo")

    listed, whole = await client.get("letters"), await client.get(f"letters/echo/{letter.id}")

    assert f"{reason[:MOST_REASON]}…" in listed.text
    assert reason in whole.text


@pytest.mark.parametrize("age", ["inf", "nan", "1e400"])
async def test_an_age_without_end_is_refused(client: httpx.AsyncClient, running: Running, age: str) -> None:
    """JSON has no such number, so that its operation could not be read again."""
    token = token_of((await client.get("try/echo")).text)

    await client.post(
        f"requests?model=echo&newer_than_s={age}", data={"csrf": token, "do": "operate", "action": "purge"}
    )

    assert (await client.get(f"{running.url}/v1/operations")).json()["operations"] == []


@pytest.mark.parametrize(
    ("page", "form", "status"),
    [
        ("try/echo", {"do": "run", "in:x": "1, 2.5, 3, 4", "version": "second"}, 200),
        ("jobs/unknown", {"do": "resume", "error_threshold": "nan"}, 404),
        ("jobs/unknown", {"do": "resume", "error_threshold": "inf"}, 404),
    ],
)
async def test_a_number_that_is_none_is_no_defect(
    client: httpx.AsyncClient, page: str, form: dict[str, str], status: int
) -> None:
    token = token_of((await client.get("try/echo")).text)

    assert (await client.post(page, data={**form, "csrf": token})).status_code == status
