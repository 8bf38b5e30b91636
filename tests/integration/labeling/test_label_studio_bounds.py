"""Label Studio's side under load and in failures: no call, project or task may cost the others much."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.settings import LabelingSettings, LimitSettings, RedisSettings, RequestSettings, Settings
from qinfer.labeling.tasks import Board, LabelTask, LabelTasks
from qinfer.queue.deliveries import outbox
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.labeling import predict
from qinfer_api.labeling.intake import OUTBOX, TaskIntake
from qinfer_api.labeling.studio import Files
from tests.integration.labeling.test_label_studio_push import have_it_again
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.label_studio_server import CONFIG, PERSONAL, LabelStudioServer, label_studio
from tests.support.servers.servers import RedisServer, system_redis

MAPPING = """
model: text
mode: {mode}
inputs: {{x: {{field: text, kind: {kind}}}}}
results: [{{type: choices, from_name: label, to_name: text, label: y}}]
"""
TASKS = "/v1/label-studio/text/projects/12/tasks"
DATA = "data:text/plain;base64,cG9z"


def settings_for(directory: Path, mode: str, kind: str = "text", **labeling: Any) -> Settings:
    directory.mkdir(exist_ok=True)
    (directory / "text.yaml").write_text(MAPPING.format(mode=mode, kind=kind))
    about = LabelingSettings.model_validate({"mappings": str(directory), "token": PERSONAL, **labeling})
    requests = RequestSettings(sweep_every_s=0.02)
    return settings_of().model_copy(update={"labeling": about, "requests": requests})


def call(count: int, **data: Any) -> dict[str, Any]:
    tasks = [{"id": number, "data": data} for number in range(1, count + 1)]
    return {"project": "12", "label_config": CONFIG, "tasks": tasks}


def event(tasks: list[dict[str, Any]], project: int = 12) -> dict[str, Any]:
    return {"action": "TASKS_CREATED", "tasks": tasks, "project": {"id": project}}


@pytest.fixture
async def studio() -> AsyncIterator[LabelStudioServer]:
    async with label_studio() as studio:
        yield studio


async def test_tasks_that_fail_at_once_let_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many a call has: the event loop serves everything else in between."""
    tried = longest = 0
    make = predict.request_of

    async def counted(*words: Any) -> Any:
        nonlocal tried
        tried += 1
        return await make(*words)

    async def watch() -> None:
        nonlocal tried, longest
        while True:
            longest, tried = max(longest, tried), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(predict, "request_of", counted)
    settings = settings_for(tmp_path / "m", "predict")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        watching = asyncio.create_task(watch())
        reply = await client.post("/label-studio/text/predict", json=call(2000, other=1), timeout=30)
        watching.cancel()

    assert all("'text'" in each["error"] for each in reply.json()["results"])
    assert 0 < longest <= 2 * predict.MADE_AT_ONCE


async def test_a_full_lane_is_not_stormed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place that becomes free is asked for by a few of those that wait, not by all."""
    asked = 0
    submit = Dispatcher.submit

    def counted(self: Dispatcher, *words: Any) -> Any:
        nonlocal asked
        asked += 1
        return submit(self, *words)

    monkeypatch.setattr(Dispatcher, "submit", counted)
    settings = settings_for(tmp_path / "m", "predict").model_copy(update={"limits": LimitSettings(lane_capacity=3)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/text/predict", json=call(300, text="pos"), timeout=30)

    assert all("result" in each for each in reply.json()["results"])
    assert asked <= 2 * 300 * predict.MADE_AT_ONCE  # each asking at each place: 45,000


@pytest.mark.parametrize("mode", ["predict", "push"])
async def test_few_files_are_in_memory_at_a_time(
    tmp_path: Path, studio: LabelStudioServer, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Each may be large; what has become a request is in the queue."""
    fetching = most = 0
    fetch = Files.fetch

    async def counted(self: Files, reference: str, **whose: Any) -> bytes:
        nonlocal fetching, most
        fetching += 1
        most = max(most, fetching)
        for _ in range(5):
            await asyncio.sleep(0)  # as from a host
        fetching -= 1
        return await fetch(self, reference, **whose)

    monkeypatch.setattr(Files, "fetch", counted)
    settings = settings_for(tmp_path / "m", mode, "file", url=studio.url)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        if mode == "predict":
            reply = await client.post("/label-studio/text/predict", json=call(100, text=DATA), timeout=30)
            assert all("result" in each for each in reply.json()["results"])
        else:
            await client.post("/label-studio/text/webhook", json=event(studio.add(*[DATA] * 100)))
            await _all_are_done(client, 100)

    assert 1 < most <= 16


async def test_projects_take_turns(tmp_path: Path, studio: LabelStudioServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with many tasks, or slow ones, does not hold up another that comes later."""
    order: list[int] = []
    submit = TaskIntake._submit

    async def noted(self: TaskIntake, board: Board, entry: LabelTask) -> LabelTask:
        order.append(board.project)
        if len(order) == 1:
            await other_is_told.wait()
        return await submit(self, board, entry)

    other_is_told = asyncio.Event()
    monkeypatch.setattr(TaskIntake, "_submit", noted)
    studio.configs[13] = CONFIG
    settings = settings_for(tmp_path / "m", "push", url=studio.url)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/label-studio/text/webhook", json=event(studio.add(*["pos"] * 200)))
        await client.post("/label-studio/text/webhook", json=event(studio.add("neg", project=13), 13))
        other_is_told.set()
        await eventually(lambda: len(order) == 201)

    assert order.index(13) < 50


async def test_a_defect_of_labeling_leaves_the_gateway_running(
    tmp_path: Path, studio: LabelStudioServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is; it is logged, and tried again."""
    settings = settings_for(tmp_path / "m", "push", url=studio.url)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        boards, failed = LabelTasks.boards, asyncio.Event()

        async def broken(tasks: LabelTasks, model: str) -> list[Board]:
            if not failed.is_set():
                failed.set()
                raise ValueError("an entry of another version")
            return await boards(tasks, model)

        monkeypatch.setattr(LabelTasks, "boards", broken)
        await client.post("/label-studio/text/webhook", json=event(studio.add("pos")))
        await _all_are_done(client, 1)
        assert failed.is_set()


async def test_a_reply_that_is_too_long_leaves_the_gateway_running(
    tmp_path: Path, studio: LabelStudioServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as a failure of Label Studio's."""
    settings = settings_for(tmp_path / "m", "push", url=studio.url, max_attempts=1)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        studio.failures["/api/projects/12/import"] = [503]
        await client.post("/label-studio/text/webhook", json=event(studio.add("pos")))
        await eventually(lambda: not studio.failures["/api/projects/12/import"])
        monkeypatch.setattr("qinfer_api.labeling.studio._MAX_REPLY_BYTES", 5)
        await have_it_again(running)

        async def has_failed() -> bool:
            found = (await client.get(f"{TASKS}/1")).json()
            return found["state"] == "failed" and "larger than 5 bytes" in found["error"]

        await eventually(has_failed)


async def test_who_was_too_slow_does_not_push(tmp_path: Path, studio: LabelStudioServer) -> None:
    """Another gateway has taken over by then, and has pushed: no prediction is there twice."""
    settings = settings_for(tmp_path / "m", "push", url=studio.url)
    with RedisServer(system_redis(), tmp_path) as server:
        redis = RedisSettings.model_validate({"url": server.url})
        async with (
            running_gateway(settings, await Queue.connect(redis)) as slow,
            httpx.AsyncClient(base_url=slow.url) as client,
        ):
            pusher, asked, answered, over = _pusher(slow), asyncio.Event(), asyncio.Event(), asyncio.Event()
            label_config, push_all = pusher._studio.label_config, pusher._push_all

            async def late(project: int) -> Any:
                asked.set()
                await answered.wait()
                return await label_config(project)

            async def noted(*words: Any) -> None:
                await push_all(*words)
                over.set()

            pusher._step_s, pusher._kind = 0.05, outbox(OUTBOX, 0.06)
            pusher._studio.label_config = late
            pusher._push_all = noted
            await client.post("/label-studio/text/webhook", json=event(studio.add("pos")))
            await asked.wait()
            async with running_gateway(settings, await Queue.connect(redis)):
                await _all_are_done(client, 1)
            answered.set()
            await over.wait()

    assert len(studio.predictions) == 1


async def test_large_data_is_read_of_the_projects_own_tasks_only(tmp_path: Path, studio: LabelStudioServer) -> None:
    """What is not kept is asked for with the operator's token, which opens other projects, too."""
    settings = settings_for(tmp_path / "m", "push", url=studio.url)
    large = "pos" + " " * 70_000
    studio.tasks[1] = {"id": 1, "project": 13, "data": {"text": large}}
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/label-studio/text/webhook", json=event([{"id": 1, "data": {"text": large}}]))

        async def has_failed() -> bool:
            found = (await client.get(f"{TASKS}/1")).json()
            return found["state"] == "failed" and "not of project 12" in found["error"]

        await eventually(has_failed)
        assert running.requests == []


async def _all_are_done(client: httpx.AsyncClient, count: int) -> None:
    async def are_done() -> bool:
        return bool((await client.get(TASKS)).json()["counts"]["done"] == count)

    await eventually(are_done)


def _pusher(running: Running) -> Any:
    pusher = running.gateway._labeling.pusher
    assert pusher is not None
    return pusher
