"""Tenants of one gateway: the key of one sees and changes nothing of another, and no form is sent in its place."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.routing import Route

from qinfer.core.messages import InferRequest
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.job import JobSpec, JobState, Output, encode_spec
from qinfer.jobs.queue.jobs import Jobs, cursor_of
from qinfer.jobs.queue.records import JobRecord
from qinfer.labeling.tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestState, Settlement
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_api.console.history import ChartPoint
from qinfer_api.console.routes import HEADERS
from qinfer_api.requests.records import failed_outcome
from tests.e2e.console.scene import put
from tests.integration.console.test_console_pages import PAGES, token_of
from tests.support.gateway import TenantScene, declare_more

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HIDDEN = "confidential"
"""All contents of the tenant `acme` have this word."""
PART = "nfidenti"
LANE = Lane("echo", 1, "p32")
GUARDS = {name: value for name, value in HEADERS.items() if name != "cache-control"}


class Scene(TenantScene):
    """The contents of the tenant `acme`; `ids` replaces their names in paths."""

    ids: dict[str, str]

    async def fill(self) -> None:
        queue = self.running.delivery
        await queue.ensure([LANE])
        letter = InferRequest(model="echo", version=1, id="own-letter@acme", inputs=(), timeout_s=30.0, tenant="acme")
        await put(queue, LANE, letter)
        (lease,) = await queue.fetch([LANE], "test", 1, 5)
        await queue.bury(lease, letter.id, "inference_failed", f"a {HIDDEN} reason")
        for name in ("own-request", "own-failure"):
            await self._store(name)
        address = EntryAddress("echo", 0, "own-failure@acme")
        failed = failed_outcome(address, RequestState.FAILED, BrokerUnavailable(f"a {HIDDEN} message"), 1)
        await queue.requests.settle([Settlement(address=address, outcome=failed)])
        await self._add_job_and_task()
        body = {"action": "cancel", "filter": {"model": "echo", "error": f"a {HIDDEN} filter"}, "dry_run": True}
        operation = (await self.clients["acme"].post("/v1/operations", json=body)).json()["id"]
        (kept,) = await queue.dead_letters.list("echo")
        cursors = {"CURSOR": await self._cursor(), "JOBS": cursor_of(99999999999999, "zzz")}
        self.ids = {"LETTER": kept.id, "OPERATION": operation, **cursors}
        await self.running.refresh()

    async def _store(self, name: str) -> None:
        address = EntryAddress("echo", 0, f"{name}@acme")
        frame = encode_request(InferRequest(model="echo", inputs=(), id=address.id, version=1, tenant="acme"))
        acceptance = Acceptance(
            address=address, lane=LANE, frame=frame, timeout_s=3600.0, body_hash=name, tenant="acme", client_id=HIDDEN
        )
        await self.running.delivery.requests.accept(acceptance)

    async def _add_job_and_task(self) -> None:
        spec = JobSpec(
            "echo", (f"s3://{HIDDEN}/in",), Output(f"s3://{HIDDEN}/out"), metadata={"note": HIDDEN}, version=1
        )
        record = JobRecord(
            id="own-job@acme", model="echo", version=1, tenant="acme", state=JobState.FAILED, spec=encode_spec(spec),
            ended_at=1.0, error=f"a {HIDDEN} error",
        )  # fmt: skip
        jobs, tasks, board = Jobs(self.running.delivery), LabelTasks(self.running.delivery), Board("echo", "acme", 1)
        assert await jobs.create(record)
        await jobs.note(record.id, f"a {HIDDEN} line")
        await tasks.put(board, [LabelTask(task=1, request_id="r", version=1)], ttl_s=3600, limit=10)
        failed = LabelTask(task=1, request_id="r", version=1, state=LabelState.FAILED, error=f"a {HIDDEN} task")
        await tasks.move(board, [failed], ttl_s=3600)

    async def _cursor(self) -> str:
        page = (await self.clients["acme"].get("/v1/requests", params={"limit": 1})).json()
        return str(page["next"])

    def path(self, text: str) -> str:
        """Returns a path with the ids of the contents."""
        for name, found in self.ids.items():
            text = text.replace(name, found)
        return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with Scene.opened(tmp_path_factory.mktemp("keys") / "keys.json") as scene:
        await scene.fill()
        yield scene


async def has_guards(reply: httpx.Response) -> None:
    assert {name: reply.headers.get(name) for name in GUARDS} == GUARDS, reply.url


@asynccontextmanager
async def signed_in(scene: Scene, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has signed in, with the token of its forms as the header `x-token`; each answer has its guards."""
    url, hooks = f"{scene.running.url}/console/", {"response": [has_guards]}
    async with httpx.AsyncClient(base_url=url, follow_redirects=True, event_hooks=hooks) as client:
        page = await client.post("sign-in", data={"key": scene.keys[key]})
        client.headers["x-token"] = token_of(page.text)
        yield client


LISTS = (
    *PAGES, f"requests?error={PART}", "requests?id_prefix=ow", "requests?model=echo", "requests?state=queued",
    "requests?after=CURSOR", "requests?model=echo&after=CURSOR", f"letters?error={PART}", "letters?id_prefix=ow",
    "letters?model=echo&after=echo:0-1", "jobs?model=echo", "jobs?state=failed", "jobs?after=JOBS",
    f"models?q={PART}", f"queues?q={PART}", f"workers?q={PART}", f"try?q={PART}", f"endpoints?q={PART}",
)  # fmt: skip
OTHERS = ("requests?tenant=acme", "letters?tenant=acme", "letters?model=echo&tenant=acme")
OWN = (
    "requests/own-request?model=echo", "requests/own-failure?model=echo", "requests/own-failure?model=echo&tenant=acme",
    "letters/echo/LETTER", "jobs/own-job", "jobs/own-job@acme", "operations/OPERATION",
)  # fmt: skip


async def test_its_own_key_sees_the_contents(scene: Scene) -> None:
    """The other tests would prove nothing otherwise."""
    async with signed_in(scene, "acme") as client:
        for path in (
            *OWN[:2],
            *OWN[3:5],
            OWN[6],
            f"letters?error={PART}",
            f"requests?error={PART}",
            "jobs",
            "labeling",
        ):
            reply = await client.get(scene.path(path))

            assert reply.status_code == 200, path
            assert HIDDEN in reply.text or "own-request" in path, path


@pytest.mark.parametrize("path", LISTS)
async def test_lists_and_searches_show_another_tenant_nothing(scene: Scene, path: str) -> None:
    async with signed_in(scene, "other") as client:
        reply = await client.get(scene.path(path))

    assert reply.status_code == (403 if path in ("tenants", "audit") else 200)
    for text in (HIDDEN, "acme", "own-", scene.ids["LETTER"], scene.ids["OPERATION"]):
        assert text not in reply.text


@pytest.mark.parametrize("path", [*OWN, *OTHERS])
async def test_what_another_tenant_names_is_unknown(scene: Scene, path: str) -> None:
    async with signed_in(scene, "other") as client:
        reply = await client.get(scene.path(path))

    assert reply.status_code == (404 if path in OWN else 200)
    assert HIDDEN not in reply.text
    assert "own-" not in reply.text.replace("own-request", "").replace("own-failure", "").replace("own-job", "")


@pytest.mark.parametrize(
    ("path", "form"),
    [
        *(("requests/own-request?model=echo" + more, {"do": "cancel"}) for more in ("", "&tenant=acme")),
        *(("letters", {"do": act, "id": "echo/LETTER"}) for act in ("replay", "purge")),
        *(("letters/echo/LETTER", {"do": act}) for act in ("replay", "purge")),
        *(("jobs/own-job", {"do": act}) for act in ("cancel", "resume", "delete")),
        *(("operations/OPERATION", {"do": act}) for act in ("again", "stop")),
    ],
)
async def test_another_tenant_changes_nothing(scene: Scene, path: str, form: dict[str, str]) -> None:
    async with signed_in(scene, "other") as client:
        sent = {name: scene.path(value) for name, value in form.items()}
        reply = await client.post(scene.path(path), data={**sent, "csrf": client.headers["x-token"]})

    assert reply.status_code == 404
    assert HIDDEN not in reply.text
    acme = scene.clients["acme"]
    request = (await acme.get("/v1/models/echo/requests/own-request")).json()
    assert request["state"] == "queued"
    assert (await acme.get("/v1/dead-letters", params={"model": "echo"})).json()["dead_letters"] != []
    assert (await acme.get("/v1/jobs/own-job")).json()["state"] == "failed"
    assert (await acme.get(f"/v1/operations/{scene.ids['OPERATION']}")).json()["dry_run"] is True


@pytest.mark.parametrize(
    ("page", "action"), [("letters", "replay"), ("letters", "discard"), ("requests", "cancel"), ("requests", "purge")]
)
async def test_an_operation_finds_nothing_of_another_tenant(scene: Scene, page: str, action: str) -> None:
    async with signed_in(scene, "other") as client:
        form = {"csrf": client.headers["x-token"], "do": "operate", "action": action}
        reply = await client.post(f"{page}?model=echo", data=form)
        operation = reply.url.path.rpartition("/")[2]
        await client.post(f"operations/{operation}", data={"csrf": client.headers["x-token"], "do": "again"})
        found = [await _ended(scene, each["id"]) for each in await _operations(scene, "other")]

    assert {(one["found"], one["changed"], one["total"]) for one in found} == {(0, 0, None)}
    assert {(await scene.running.delivery.dead_letters.count("echo"))} == {1}


async def _operations(scene: Scene, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await scene.clients[key].get("/v1/operations")).json()["operations"]
    return found


async def _ended(scene: Scene, operation: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_done() -> bool:
        found.update((await scene.clients["other"].get(f"/v1/operations/{operation}")).json())
        return bool(found["state"] == "done")

    await eventually(is_done, description="the end of an operation")
    return found


async def test_the_stream_tells_another_tenant_figures_of_the_installation_alone(scene: Scene) -> None:
    """No count of dead letters, and no list that has changed."""
    live = scene.running.gateway._console._parts.live
    async with (
        signed_in(scene, "other") as other,
        signed_in(scene, "admin") as admin,
        other.stream("GET", "live") as his,
        admin.stream("GET", "live") as hers,
    ):
        his_lines, her_lines, his_events, her_events = his.aiter_lines(), hers.aiter_lines(), Events(), Events()
        for name in ("first", "second"):  # figures change, and lists
            await declare_more(scene.running, name, is_ready=True)
            await scene.running.refresh()
            live.recount()
            await live._tick()
            await his_events.read(his_lines, f"{name}:1/work")
            await her_events.read(her_lines, f"{name}:1/work")

    assert {event for event, _ in his_events} == {"figures"}
    assert {event for event, _ in her_events} == {"figures", "topics"}
    assert "letters" in her_events[0][1]
    assert not [name for _, told in his_events for name in told if "letters" in name or "acme" in name]


class Events(list[tuple[str, Any]]):
    """The events of a stream: their names, and their data."""

    async def read(self, lines: AsyncIterator[str], figure: str) -> None:
        """Reads events up to one that tells a figure."""
        name = ""
        async for line in lines:
            field, _, value = line.partition(": ")
            name = value if field == "event" else name
            if field == "data":
                self.append((name, json.loads(value)))
                if figure in self[-1][1]:
                    return


@pytest.mark.parametrize("series", ["", "echo:1", "(others)", "acme", "nothing"])
async def test_a_chart_has_numbers_alone(scene: Scene, series: str) -> None:
    async with signed_in(scene, "other") as client:
        columns = (await client.get("history", params={"of": series})).json()

    assert set(columns) == set(ChartPoint._fields)
    assert all(value is None or isinstance(value, int | float) for column in columns.values() for value in column)


async def test_a_viewer_sees_no_contents(scene: Scene) -> None:
    """The states and ids of its tenant, without messages, rows, tensors or addresses."""
    async with signed_in(scene, "viewer") as client:
        requests, letters = (await client.get("requests")).text, (await client.get("letters")).text
        paths = (
            "requests/own-failure?model=echo",
            "letters/echo/LETTER",
            f"letters?error={PART}",
            f"requests?error={PART}",
        )
        replies = [await client.get(scene.path(path)) for path in paths]

    assert "own-failure" in requests
    assert "own-letter" in letters
    assert [reply.status_code for reply in replies] == [200, 403, 200, 200]
    assert HIDDEN not in "".join([requests, letters, *(reply.text for reply in replies)])


def posted(scene: Scene) -> list[str]:
    """Returns the address of each page that takes forms."""
    site = scene.running.gateway._console._site
    assert site is not None
    routes = [route for route in site._router.routes if isinstance(route, Route)]
    return [re.sub(r"{\w+}", "echo", route.path) for route in routes if "POST" in (route.methods or ())]


@pytest.mark.parametrize(
    ("form", "headers"),
    [
        ({}, {}),
        ({"csrf": "0" * 64}, {}),
        ({"csrf": "ANOTHER"}, {}),
        ({"csrf": "OWN"}, {"sec-fetch-site": "cross-site"}),
        ({"csrf": "OWN"}, {"sec-fetch-site": "same-site"}),
        ({"csrf": "OWN"}, {"origin": "http://evil.example"}),
        ({"csrf": "OWN"}, {"origin": "null"}),
    ],
)
async def test_no_page_takes_a_forged_form(scene: Scene, form: dict[str, str], headers: dict[str, str]) -> None:
    async with signed_in(scene, "other") as another, signed_in(scene, "admin") as client:
        tokens = {"OWN": client.headers["x-token"], "ANOTHER": another.headers["x-token"]}
        sent = {name: tokens.get(value, value) for name, value in form.items()}
        paths = [path for path in posted(scene) if path != "/sign-in"]
        statuses = {
            path: (await client.post(f".{path}", data={"do": "load", **sent}, headers=headers)).status_code
            for path in paths
        }

        assert len(paths) >= 10
        assert statuses == dict.fromkeys(paths, 403)
        assert (await client.get("audit")).status_code == 200, "it is signed in still"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_every_answer_has_the_guards(scene: Scene, method: str) -> None:
    """Answers with errors, of files, and to strangers have them too."""
    paths = (
        *("", "models", "models/none", "letters/echo/0-0", "nothing", "static/console.js", "static/live.js"),
        *("static/none.js", "static/..%2frender.py", "%ff", "sign-in", "sign-out", "history", "a/b/c/d", "x" * 5000),
    )
    url, hooks = f"{scene.running.url}/console/", {"response": [has_guards]}
    async with signed_in(scene, "acme") as client, httpx.AsyncClient(base_url=url, event_hooks=hooks) as stranger:
        replies = [await one.request(method, path) for path in paths for one in (client, stranger)]
        replies.append(await client.request(method, "", headers={"host": "evil.example"}))

    assert all(reply.status_code != 500 for reply in replies)


async def test_no_page_is_for_a_stranger(scene: Scene) -> None:
    url = f"{scene.running.url}/console/"
    async with httpx.AsyncClient(base_url=url, follow_redirects=True) as client:
        for path in (*LISTS, *OWN, "history", "live"):
            reply = await client.get(scene.path(path))

            assert reply.url.path.endswith("/sign-in") or reply.status_code == 401, path
            assert "acme" not in reply.text or "acme" in str(reply.url)
