"""Predictions that are pushed: from Label Studio's webhook to its API, with the state of each task in between."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.settings import LabelingSettings, LimitSettings, RedisSettings, RequestSettings, Settings
from qinfer.labeling.tasks import Board
from qinfer.queue import keys
from qinfer.queue.deliveries import outbox
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.labeling.intake import OUTBOX
from qinfer_api.labeling.pusher import Pusher
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.label_studio_server import LEGACY, PERSONAL, LabelStudioServer, label_studio
from tests.support.servers.servers import RedisServer, system_redis

MAPPING = """
name: {model}
model: {model}
mode: {mode}
inputs: {{x: {{field: text}}}}
results: [{{type: choices, from_name: label, to_name: text, label: y}}]
"""
TASKS = "/v1/label-studio/text/projects/12/tasks"


def settings_for(studio: LabelStudioServer, directory: Path, **changes: Any) -> Settings:
    directory.mkdir(exist_ok=True)
    (directory / "text.yaml").write_text(MAPPING.format(model="text", mode="push"))
    (directory / "one.yaml").write_text(MAPPING.format(model="one", mode="predict"))
    about = {"mappings": str(directory), "url": studio.url, "token": PERSONAL, "call_timeout_s": 5.0, **changes}
    labeling = LabelingSettings.model_validate(about)
    return settings_of().model_copy(update={"labeling": labeling, "requests": RequestSettings(sweep_every_s=0.02)})


def event(tasks: list[dict[str, Any]], action: str = "TASKS_CREATED") -> dict[str, Any]:
    return {"action": action, "tasks": tasks, "project": {"id": 12, "title": "a project"}}


@pytest.fixture
async def studio() -> AsyncIterator[LabelStudioServer]:
    async with label_studio() as studio:
        yield studio


@pytest.fixture
async def running(studio: LabelStudioServer, tmp_path: Path) -> AsyncIterator[Running]:
    settings = settings_for(studio, tmp_path / "mappings")
    async with running_gateway(settings) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened


async def states(client: httpx.AsyncClient) -> dict[int, str]:
    found = (await client.get(TASKS, params={"limit": 1000})).json()
    return {task["task"]: task["state"] for task in found["tasks"]}


async def all_are(client: httpx.AsyncClient, state: str, count: int) -> None:
    async def is_so() -> bool:
        return list((await states(client)).values()) == [state] * count

    await eventually(is_so)


async def told(client: httpx.AsyncClient, task: int) -> dict[str, Any]:
    found = (await client.get(f"{TASKS}/{task}")).json()
    assert isinstance(found, dict)
    return found


async def test_new_tasks_get_their_predictions(
    client: httpx.AsyncClient, studio: LabelStudioServer, running: Running
) -> None:
    """Told by the webhook once, scored once, pushed together, and to be seen in between and after."""
    tasks = studio.add(*["pos", "neg"] * 60)

    reply = await client.post("/label-studio/text/webhook", json=event(tasks))

    assert (reply.status_code, reply.json()) == (201, {"action": "TASKS_CREATED", "queued": 120})
    await all_are(client, "done", 120)
    assert len(studio.predictions) == len(running.requests) == 120
    assert all(
        each["result"][0]["value"]["choices"] == [studio.tasks[each["task"]]["data"]["text"]]
        and each["model_version"] == "text:1"
        for each in studio.predictions
    )
    page = (await client.get(TASKS, params={"limit": 2, "after": 3})).json()
    assert page["counts"] == {"queued": 0, "processing": 0, "sending": 0, "done": 120, "failed": 0}
    assert ([task["task"] for task in page["tasks"]], page["next"]) == ([4, 5], 5)
    last = (await client.get(TASKS, params={"limit": 2, "after": 118, "state": "done"})).json()
    assert last["next"] == 120
    assert (await client.get(TASKS, params={"after": 120})).json()["tasks"] == []
    assert (await client.get(TASKS, params={"state": "failed"})).json()["tasks"] == []
    one = await told(client, 7)
    assert (one["state"], one["error"], one["model_version"], one["attempt"]) == ("done", None, "text:1", 1)
    assert (await client.get(one["request"])).json()["state"] == "succeeded"


async def test_a_repeated_webhook_changes_nothing(
    client: httpx.AsyncClient, studio: LabelStudioServer, running: Running
) -> None:
    """While the task waits, and when it is done; new data is a new request."""
    tasks = studio.add("pos")
    for _ in range(2):
        await client.post("/label-studio/text/webhook", json=event(tasks))
    await all_are(client, "done", 1)

    again = await client.post("/label-studio/text/webhook", json=event(tasks))

    assert again.json()["queued"] == 0
    assert len(studio.predictions) == len(running.requests) == 1
    tasks[0]["data"]["text"] = "neg"
    assert (await client.post("/label-studio/text/webhook", json=event(tasks))).json()["queued"] == 1
    await eventually(lambda: len(studio.predictions) == 2)


async def test_tasks_that_redis_lost_are_queued_by_the_next_call(
    client: httpx.AsyncClient, studio: LabelStudioServer, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is known of them, and the gateway goes on: the next call for them has them scored."""
    tasks = studio.add(*["pos", "neg"] * 60)
    await client.post("/label-studio/text/webhook", json=event(tasks))
    await eventually(lambda: bool(studio.predictions), description="some that were pushed")

    await running.store.client.flushdb()
    await running.refresh()
    assert running.serving is not None
    await client.post("/label-studio/text/webhook", json=event(tasks))

    await all_are(client, "done", 120)
    assert {each["task"] for each in studio.predictions} == set(range(1, 121))
    assert not running.serving.done()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "Redis has lost its data; this gateway restores the part that it knows"
    ]


async def test_predict_answers_nothing_and_queues(client: httpx.AsyncClient, studio: LabelStudioServer) -> None:
    """An empty list for each task, which Label Studio takes for no prediction."""
    tasks = studio.add("pos", "neg")
    body = {"project": "12.17", "tasks": tasks, "label_config": studio.configs[12]}

    reply = await client.post("/label-studio/text/predict", json=body)

    assert reply.json() == {"results": [[], []], "model_version": "text:1"}
    await all_are(client, "done", 2)


async def test_a_call_of_predict_without_a_project_uses_the_mapping_of_its_tasks(
    studio: LabelStudioServer, tmp_path: Path
) -> None:
    settings = settings_for(studio, tmp_path)
    (tmp_path / "text.yaml").write_text(MAPPING.format(model="text", mode="push") + "project: 12\n")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/text/predict", json={"tasks": studio.add("pos")})

    assert reply.json() == {"results": [[]], "model_version": "text:1"}


async def test_other_events_are_taken(client: httpx.AsyncClient, studio: LabelStudioServer) -> None:
    """Label Studio sends all of them to an ML backend; and those of projects whose predictions are not pushed."""
    tasks = studio.add("pos")
    replies = [
        await client.post("/label-studio/text/webhook", json=event(tasks, "ANNOTATION_CREATED")),
        await client.post("/label-studio/text/webhook", json={"action": "START_TRAINING", "project": {"id": 12}}),
        await client.post("/label-studio/one/webhook", json=event(tasks)),
    ]

    assert [(reply.status_code, reply.json()["queued"]) for reply in replies] == [(201, 0)] * 3
    no_tasks = await client.post("/label-studio/text/webhook", json={"action": "TASKS_CREATED", "project": {"id": 12}})
    assert no_tasks.status_code == 400
    assert (await states(client)) == {}


async def test_what_label_studio_refuses_fails_alone(client: httpx.AsyncClient, studio: LabelStudioServer) -> None:
    """A task that was deleted meanwhile, one whose label is none, one without the field: each with its reason."""
    tasks = [dict(task) for task in studio.add("pos", "neg", "maybe", "pos")]
    del studio.tasks[2]
    tasks[3]["data"] = {"other": 1}

    await client.post("/label-studio/text/webhook", json=event(tasks))

    async def are_over() -> bool:
        return sorted((await states(client)).values()) == ["done", "failed", "failed", "failed"]

    await eventually(are_over)
    assert "task ID not found in project" in (await told(client, 2))["error"]
    assert "maybe" in (await told(client, 3))["error"]
    assert "'text'" in (await told(client, 4))["error"]
    assert [each["task"] for each in studio.predictions] == [1]


async def test_nothing_is_lost_while_label_studio_is_away(
    client: httpx.AsyncClient, studio: LabelStudioServer, running: Running
) -> None:
    """What is scored stays, says why, and is pushed once afterwards; nothing is scored again."""
    tasks = studio.add("pos", "neg")
    studio.failures["/api/projects/12/import"] = [503] * 1000

    await client.post("/label-studio/text/webhook", json=event(tasks))

    async def is_sending() -> bool:
        found = (await client.get(TASKS, params={"state": "sending"})).json()
        return [task["error"] for task in found["tasks"]] == ["Label Studio answers with status 503"] * 2

    await eventually(is_sending)
    studio.failures.clear()
    await have_it_again(running)
    await all_are(client, "done", 2)
    assert len(studio.predictions) == len(running.requests) == 2


async def test_a_prediction_is_not_there_twice(
    client: httpx.AsyncClient, studio: LabelStudioServer, running: Running
) -> None:
    """Where a push has succeeded and its answer was lost."""
    tasks = studio.add("pos", "neg")
    answer = studio._import

    def losing(project: int, items: list[dict[str, Any]]) -> tuple[int, Any]:
        answer(project, items)
        return 502, {}

    studio._import = losing  # type: ignore[method-assign]  # the test's
    await client.post("/label-studio/text/webhook", json=event(tasks))
    await eventually(lambda: len(studio.predictions) == 2)
    await all_are(client, "sending", 2)

    await have_it_again(running)

    await all_are(client, "done", 2)
    assert len(studio.predictions) == 2


async def test_what_label_studio_fails_on_is_given_up(
    studio: LabelStudioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many pushes as the settings say, one by one; the others are pushed."""
    push, both = Pusher.push, asyncio.Event()

    async def together(self: Pusher) -> int:
        await both.wait()
        return await push(self)

    monkeypatch.setattr(Pusher, "push", together)
    tasks = studio.add("pos", "neg")
    settings = settings_for(studio, tmp_path / "mappings", max_attempts=1)
    studio.failures["/api/projects/12/import"] = [500, 500]
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/label-studio/text/webhook", json=event(tasks))

        async def are_scored() -> bool:
            return len(running.requests) == 2 and await running.depth("text") == 0

        await eventually(are_scored)
        both.set()

        async def are_over() -> bool:
            return sorted((await states(client)).values()) == ["done", "failed"]

        await eventually(are_over)
        failed = (await client.get(TASKS, params={"state": "failed"})).json()["tasks"]
        assert failed[0]["error"] == "Label Studio failed with status 500"


async def test_an_absence_is_no_failure(studio: LabelStudioServer, tmp_path: Path) -> None:
    """However often it was not there: only what it fails on counts against a prediction."""
    settings = settings_for(studio, tmp_path / "mappings", max_attempts=2)
    studio.failures["/api/projects/12/import"] = [503, 503, 503, 500]
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await have_it_again(running)
        await client.post("/label-studio/text/webhook", json=event(studio.add("pos")))
        await all_are(client, "done", 1)
    assert studio.failures["/api/projects/12/import"] == []


async def test_a_project_is_queued_by_hand(client: httpx.AsyncClient, studio: LabelStudioServer) -> None:
    """Every task without a prediction, page by page; what failed before is scored again, what is done is not."""
    studio.add(*["pos"] * 230)
    studio.predictions.append({"task": 1, "model_version": "theirs", "result": []})
    studio.tasks[2]["data"] = {}

    reply = await client.post(TASKS)

    assert (reply.status_code, reply.json()) == (202, {"found": 229, "queued": 229, "next": None})

    async def are_over() -> bool:
        counts = (await client.get(TASKS)).json()["counts"]
        return (counts["done"], counts["failed"]) == (228, 1)

    await eventually(are_over)
    studio.tasks[2]["data"] = {}
    again = (await client.post(TASKS)).json()
    assert again == {"found": 1, "queued": 1, "next": None}

    async def is_tried_again() -> bool:
        found = await told(client, 2)
        return (found["state"], found["attempt"]) == ("failed", 2)

    await eventually(is_tried_again)
    assert (await client.post(TASKS, params={"all": "true"})).json()["queued"] == 2
    assert (await client.post(TASKS, params={"page": 9})).json() == {"found": 0, "queued": 0, "next": None}


async def test_a_full_lane_keeps_tasks_waiting(studio: LabelStudioServer, tmp_path: Path) -> None:
    """The webhook has promised them all; they are fed as there is room. One whose time is over fails."""
    settings = settings_for(studio, tmp_path / "mappings").model_copy(update={"limits": LimitSettings(lane_capacity=2)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/text/webhook", json=event(studio.add(*["pos"] * 5)))
        assert reply.json()["queued"] == 5
        await all_are(client, "done", 5)

    settings = settings_for(studio, tmp_path / "mappings", task_timeout_s=0.01)
    (tmp_path / "mappings" / "text.yaml").write_text(MAPPING.format(model="small", mode="push"))
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/label-studio/small/webhook", json=event(studio.add(*["pos"] * 2)))
        path = "/v1/label-studio/small/projects/12/tasks"

        async def have_failed() -> bool:
            return bool((await client.get(path)).json()["counts"]["failed"] == 2)

        await eventually(have_failed)


async def test_calls_that_make_no_sense_are_refused(client: httpx.AsyncClient, studio: LabelStudioServer) -> None:
    """With what would."""
    asked = [
        ("GET", f"{TASKS}?state=lost", 400, "queued, processing"),
        ("GET", f"{TASKS}?limit=0", 400, "limit"),
        ("GET", f"{TASKS}?after=x", 400, "after"),
        ("GET", "/v1/label-studio/text/projects/none/tasks", 400, "project"),
        ("GET", f"{TASKS}/999", 404, "task 999 of project 12"),
        ("GET", "/v1/label-studio/nothing/projects/12/tasks", 404, "'nothing'"),
        ("POST", f"{TASKS}?all=maybe", 400, "true or false"),
        ("POST", "/v1/label-studio/text/projects/99/tasks", 400, "status 404"),
        ("POST", "/v1/label-studio/one/projects/12/tasks", 400, "mode: push"),
    ]
    studio.configs.pop(99, None)
    studio.failures["/api/tasks/"] = [404]
    for method, path, status, words in asked:
        reply = await client.request(method, path)
        assert (reply.status_code, words in reply.json()["error"]) == (status, True), (path, reply.text)


async def test_legacy_tokens_are_sent_as_they_are(studio: LabelStudioServer, tmp_path: Path) -> None:
    """Personal ones are exchanged, and again when they are over."""
    settings = settings_for(studio, tmp_path / "mappings", token=LEGACY)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/label-studio/text/webhook", json=event(studio.add("pos")))
        await all_are(client, "done", 1)
        assert studio.refreshes == 0

    settings = settings_for(studio, tmp_path / "mappings")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        for count in (1, 2):
            studio.forget_access()
            await client.post("/label-studio/text/webhook", json=event(studio.add("neg")))
            await all_are(client, "done", count)
        assert studio.refreshes == 2


async def test_a_wrong_token_keeps_what_there_is(studio: LabelStudioServer, tmp_path: Path) -> None:
    """Until the operator has set the right one; the text names the setting, and not the token."""
    settings = settings_for(studio, tmp_path / "mappings", token="wrong")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/label-studio/text/webhook", json=event(studio.add("pos")))
        await all_are(client, "sending", 1)

        async def is_said() -> bool:
            error = (await told(client, 1))["error"]
            return bool(error and "QINFER_LABELING__TOKEN" in error and "wrong" not in error)

        await eventually(is_said)


async def test_addresses_in_calls_are_not_believed(client: httpx.AsyncClient, studio: LabelStudioServer) -> None:
    """Whatever a body says of where Label Studio is."""
    async with label_studio() as other:
        tasks = studio.add("pos")
        body = {"project": "12.17", "schema": studio.configs[12], "hostname": other.url, "access_token": "t"}
        await client.post("/label-studio/text/setup", json=body)
        await client.post("/label-studio/text/webhook", json={**event(tasks), "hostname": other.url})
        await all_are(client, "done", 1)

        assert other.calls == []


async def test_a_gateway_that_dies_leaves_it_to_another(studio: LabelStudioServer, tmp_path: Path) -> None:
    """What a webhook was answered for is pushed by whoever is there."""
    with RedisServer(system_redis(), tmp_path) as server:
        settings = settings_for(studio, tmp_path / "mappings")
        redis = RedisSettings.model_validate({"url": server.url})
        async with running_gateway(settings, await Queue.connect(redis)) as running:
            running.gateway._labeling.intake.feed = _never  # type: ignore[method-assign]  # dies before it takes a task
            async with httpx.AsyncClient(base_url=running.url) as client:
                reply = await client.post("/label-studio/text/webhook", json=event(studio.add("pos", "neg")))
                assert reply.json()["queued"] == 2
        async with (
            running_gateway(settings, await Queue.connect(redis)) as running,
            httpx.AsyncClient(base_url=running.url) as client,
        ):
            await all_are(client, "done", 2)
    assert len(studio.predictions) == 2


async def _never(board: Board) -> int:
    await asyncio.Event().wait()
    return 0


async def have_it_again(running: Running) -> None:
    """Has what was taken and not pushed handed out at once, as it is after its pause."""
    pusher = running.gateway._labeling.pusher
    assert pusher is not None
    pusher._kind = outbox(OUTBOX, 0.0)
    name = keys.deliveries("text", 0, pusher._kind.name)
    router, slot = running.delivery.router, keys.slot(name)
    for item_id in await router.call(slot, b"ZRANGE", f"{name}|later", 0, -1):
        await router.call(slot, b"ZINCRBY", f"{name}|later", -900_000, item_id)
