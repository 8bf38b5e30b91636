"""Label Studio's calls, answered at once: `/label-studio/{model}/predict` and what comes before it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import LabelingSettings, LimitSettings, Settings
from qinfer.errors import SettingsError
from qinfer.models.state import DesiredState, State, VersionState, WorkerRecord
from qinfer.testing import eventually
from qinfer_api.app import build
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.sequences import stored
from tests.support.servers.label_studio_server import CONFIG
from tests.support.step_worker import SUM

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROJECT = "12.1735689600"
LABELS = """
name: labels
model: text
inputs: {x: {field: text}}
results: [{type: choices, from_name: label, to_name: text, label: y}]
"""
SCORED = """
name: {name}
model: {model}
project: 12
inputs: {{x: {{field: vector, kind: tensor}}}}
results: [{{type: choices, from_name: label, to_name: text, scores: y, labels: [neg, pos, neg, pos], top: 1}}]
"""


def written(directory: Path, **files: str) -> str:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    return str(directory)


def with_labeling(mappings: str, **changes: Any) -> Settings:
    labeling = LabelingSettings.model_validate({"mappings": mappings, **changes})
    return settings_of().model_copy(update={"labeling": labeling})


def call(*texts: str, **more: Any) -> dict[str, Any]:
    tasks = [{"id": number, "project": 12, "data": {"text": text}} for number, text in enumerate(texts, 1)]
    return {"project": PROJECT, "label_config": CONFIG, "tasks": tasks, "params": {"context": None}, **more}


def vectors(model: str, count: int) -> dict[str, Any]:
    tasks = [{"id": number, "data": {"vector": [0.1, 0.2, 0.3, 0.9]}} for number in range(1, count + 1)]
    return {"project": PROJECT, "label_config": CONFIG, "tasks": tasks}


def write_mappings(folder: Path) -> str:
    scored = {name: SCORED.format(name=name, model=name) for name in ("echo", "fails", "stuck", "small", "loading")}
    return written(folder / "mappings", labels=LABELS, **scored)


@pytest.fixture
def mappings(tmp_path: Path) -> str:
    return write_mappings(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One for all tests that need no other settings: each asks models of its own for what stays."""
    mappings = write_mappings(tmp_path_factory.mktemp("labeling"))
    async with running_gateway(with_labeling(mappings, predict_timeout_s=0.5)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened


async def test_a_project_is_connected(client: httpx.AsyncClient) -> None:
    """Health, set-up and versions, as Label Studio asks for them when a model is added to a project."""
    health = await client.get("/label-studio/echo/health")
    body = {"project": PROJECT, "schema": CONFIG, "hostname": "http://evil", "access_token": "t", "extra_params": None}
    setup = await client.post("/label-studio/echo/setup", json=body)
    versions = await client.request("GET", "/label-studio/echo/versions")

    assert (health.status_code, health.json()) == (200, {"status": "UP", "model_class": "echo"})
    assert (setup.status_code, setup.json()) == (200, {"model_version": "echo:2"})
    assert versions.json() == {"versions": ["echo:2", "echo:1"]}


async def test_tasks_are_answered_in_order(mappings: str) -> None:
    """One prediction each, whose version is that of set-up: Label Studio compares them. More than wait at a time."""
    texts = ["pos" if number % 3 else "neg" for number in range(600)]

    async with running_gateway(with_labeling(mappings)) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/text/predict", json=call(*texts), timeout=30)

    assert reply.status_code == 200
    results = reply.json()["results"]
    assert [each["result"][0]["value"]["choices"] for each in results] == [[text] for text in texts]
    assert {each["model_version"] for each in results} == {"text:1"} == {reply.json()["model_version"]}
    assert {(each["result"][0]["from_name"], each["result"][0]["to_name"]) for each in results} == {("label", "text")}
    assert len(running.requests) == 600


async def test_scores_are_the_confidence(client: httpx.AsyncClient) -> None:
    """What Label Studio sorts by."""
    reply = await client.post("/label-studio/echo/predict", json=vectors("echo", 2))

    first, second = reply.json()["results"]
    assert first["result"][0]["value"] == {"choices": ["pos"]}
    assert (first["score"], second["score"]) == (pytest.approx(0.9), pytest.approx(0.9))


async def test_a_task_fails_alone(client: httpx.AsyncClient) -> None:
    """It has no `result`: Label Studio logs that, and asks for it again; the others have theirs."""
    body = call("pos", "", "neg")
    body["tasks"][1]["data"] = {"other": 1}
    body["tasks"].append({"id": 9, "data": {"text": "not a label"}})

    reply = await client.post("/label-studio/text/predict", json=body)

    assert reply.status_code == 200
    first, bad, third, unfit = reply.json()["results"]
    assert [first["result"][0]["value"]["choices"], third["result"][0]["value"]["choices"]] == [["pos"], ["neg"]]
    assert "result" not in bad
    assert "'text'" in bad["error"]
    assert "result" not in unfit
    assert "not a label" in unfit["error"]


async def test_files_are_fetched_for_their_tasks(mappings: str) -> None:
    """From where they may; a task whose file can't be had fails alone."""
    (Path(mappings) / "labels.yaml").write_text(LABELS.replace("{field: text}", "{field: text, kind: file}"))
    async with running_gateway(with_labeling(mappings)) as running, httpx.AsyncClient(base_url=running.url) as client:
        texts = [
            "data:text/plain;base64,cG9z",
            "http://169.254.169.254/latest",
            "/data/upload/1/a.txt",
            "file:///etc/x",
        ]
        reply = await client.post("/label-studio/text/predict", json=call(*texts))

        first, *others = reply.json()["results"]
        assert first["result"][0]["value"]["choices"] == ["pos"]
        assert ["result" in each for each in others] == [False] * 3
        settings = ("QINFER_LABELING__FILE_HOSTS", "QINFER_LABELING__URL", "QINFER_STORES__ALLOW")
        assert all(name in each["error"] for name, each in zip(settings, others, strict=True))


@pytest.mark.parametrize("mode", ["", "mode: push"])
async def test_a_model_that_keeps_state_is_refused(tmp_path: Path, mode: str) -> None:
    """At once, when it is connected and when it is asked: no task would name a sequence."""
    mappings = written(tmp_path / "mappings", sums=SCORED.format(name="sums", model="sum") + mode)
    settings = with_labeling(mappings, url="http://127.0.0.1:1", token="t")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        await running.store.put_model(stored(SUM, 1))
        await running.store.set_desired(DesiredState("sum", 1))
        ready = {"sum": {1: VersionState(State.READY, 1)}}
        await running.store.heartbeat(WorkerRecord(id="w2", started_at=0.0, models=ready), ttl_s=3600)
        await running.refresh()

        body = {"project": PROJECT, "label_config": CONFIG}
        replies = [
            await client.post("/label-studio/sum/setup", json=body),
            await client.post("/label-studio/sum/predict", json=vectors("sum", 2)),
        ]

    for reply in replies:
        assert reply.status_code == 400
        assert "model 'sum' keeps state from request to request" in reply.text


async def test_a_model_that_fails_is_told_of_each_task(client: httpx.AsyncClient) -> None:
    """With the request's id, which is the task's; a person who waits for one gets the status too."""
    reply = await client.post("/label-studio/fails/predict", json=vectors("fails", 2))
    interactive = vectors("fails", 1) | {"params": {"context": {"result": []}}}
    waiting = await client.post("/label-studio/fails/predict", json=interactive)

    assert (reply.status_code, waiting.status_code) == (200, 500)
    assert reply.json()["results"][1] == {"error": "the model raised: boom"}
    assert waiting.json() == {"error": "the model raised: boom"}


async def test_no_call_takes_longer_than_it_may(running: Running, client: httpx.AsyncClient) -> None:
    """The time of all tasks together is bounded, and nothing is left in the queue."""
    reply = await client.post("/label-studio/stuck/predict", json=vectors("stuck", 300))

    assert reply.status_code == 503
    assert "timeout expired" in reply.json()["error"]

    async def is_empty() -> bool:
        return await running.depth("stuck") == 0

    await eventually(is_empty)


async def test_overload_is_told_at_once(running: Running, client: httpx.AsyncClient) -> None:
    """As it is on every other route, so that the call can be made again later; not one task is left behind."""
    body: Mapping[str, Any] = {
        "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
    }
    for _ in range(50):
        await client.post("/v1/models/small/requests", json=body)

    async def is_refused() -> bool:
        reply = await client.post("/label-studio/small/predict", json=vectors("small", 3))
        if reply.status_code == 503 and "maximum queue size" in reply.text:
            assert int(reply.headers["retry-after"]) >= 1
            return True
        return False

    await eventually(is_refused)
    assert await running.depth("small") == 50


async def test_a_lane_that_fills_up_delays_a_call(mappings: str) -> None:
    """More tasks than a lane takes wait within the call, and none fails for it."""
    settings = with_labeling(mappings).model_copy(update={"limits": LimitSettings(lane_capacity=3)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/text/predict", json=call(*["pos"] * 40), timeout=30)

        assert reply.status_code == 200
        assert all("result" in each for each in reply.json()["results"])


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/label-studio/nothing/predict", 404, ["'nothing'"]),
        ("/label-studio/half/predict", 400, ["'half'", "project 12", "QINFER_LABELING__MAPPINGS"]),
        ("/label-studio/loading/predict", 503, ["'loading'"]),
    ],
)
async def test_what_is_unknown_is_named(client: httpx.AsyncClient, path: str, status: int, words: list[str]) -> None:
    """The model, the project, and what to do."""
    reply = await client.post(path, json=call("a"))

    assert reply.status_code == status
    assert all(word in reply.json()["error"] for word in words)


async def test_setup_names_what_does_not_fit(client: httpx.AsyncClient) -> None:
    """Everything, also in the log, since Label Studio shows the status only."""
    config = CONFIG.replace('name="label"', 'name="sentiment"')
    reply = await client.post("/label-studio/echo/setup", json={"project": PROJECT, "schema": config})

    assert reply.status_code == 400
    assert "'label'" in reply.json()["error"]
    assert (await client.post("/label-studio/echo/setup", json={"schema": "<!DOCTYPE x><x/>"})).status_code == 400


async def test_setup_names_what_pushing_lacks(mappings: str) -> None:
    """Before there are tasks whose predictions could go nowhere."""
    (Path(mappings) / "pushed.yaml").write_text("mode: push\n" + SCORED.format(name="pushed", model="hasty"))
    async with running_gateway(with_labeling(mappings)) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/hasty/setup", json={"project": PROJECT, "schema": CONFIG})

        assert reply.status_code == 501
        assert "QINFER_LABELING__URL" in reply.json()["error"]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"tasks": 1}', b'{"tasks": [1]}', b'{"project": "a"}', b'{"project": [1]}', b"\xff",
     b'{"label_config": 7}', b"[" * 500],
)  # fmt: skip
async def test_what_is_no_call_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    """Wherever it comes, with what was wrong."""
    for path in ("predict", "webhook"):
        reply = await client.post(f"/label-studio/text/{path}", content=body)
        assert reply.status_code == 400, (path, reply.text)
        assert reply.json()["error"]


async def test_no_tasks_are_no_trouble(client: httpx.AsyncClient) -> None:
    """An empty selection is answered with nothing."""
    reply = await client.post("/label-studio/text/predict", json=call())

    assert reply.json() == {"results": [], "model_version": "text:1"}


async def test_bodies_are_bounded(mappings: str) -> None:
    """As everywhere."""
    settings = with_labeling(mappings)
    settings = settings.model_copy(update={"http": settings.http.model_copy(update={"max_input_bytes": 1000})})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post("/label-studio/text/predict", json=call("a" * 2000))

        assert reply.status_code == 400
        assert "1000" in reply.json()["error"]


async def test_a_key_is_the_password(mappings: str, tmp_path: Path) -> None:
    """Of Basic authentication, with any user name; a bearer's key will do too."""
    from qinfer.core.api_keys import Scope, add_key

    path = tmp_path / "keys.json"
    _, key = add_key(path, "acme", (Scope.INFER,))
    settings = with_labeling(mappings).model_copy(
        update={"auth": settings_of(auth={"mode": "keys", "keys_file": str(path)}).auth}
    )
    basic = base64.b64encode(f"anyone:{key}".encode()).decode()
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        statuses = [
            (await client.get("/label-studio/text/health", headers={"authorization": value})).status_code
            for value in (f"Basic {basic}", f"Bearer {key}", "Basic ?", "Basic " + basic[:-8], "")
        ]
        assert statuses == [200, 200, 401, 401, 401]
        headers = {"authorization": f"Basic {basic}"}
        reply = await client.post("/label-studio/text/predict", json=call("pos"), headers=headers)
        assert reply.json()["results"][0]["result"]


async def test_a_mapping_may_be_of_one_tenant(tmp_path: Path) -> None:
    """Tenants share one Label Studio: another's projects and files are none of theirs."""
    path = tmp_path / "keys.json"
    tokens = {tenant: add_key(path, tenant, (Scope.INFER,))[1] for tenant in ("acme", "other")}
    mappings = written(tmp_path / "mappings", labels=LABELS + "tenant: acme\n")
    settings = with_labeling(mappings).model_copy(
        update={"auth": settings_of(auth={"mode": "keys", "keys_file": str(path)}).auth}
    )
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        for call_of, body in (("setup", {"project": PROJECT, "schema": CONFIG}), ("predict", call("pos"))):
            statuses = {
                tenant: (
                    await client.post(
                        f"/label-studio/text/{call_of}", json=body, headers={"authorization": f"Bearer {token}"}
                    )
                ).status_code
                for tenant, token in tokens.items()
            }
            assert statuses == {"acme": 200, "other": 403}


async def test_a_mapping_without_tenants_is_nobodys_where_there_are_several(tmp_path: Path) -> None:
    """It leads to all that Label Studio shows to the server."""
    path = tmp_path / "keys.json"
    tokens = [add_key(path, tenant, (Scope.INFER,))[1] for tenant in ("acme", "other")]
    settings = with_labeling(written(tmp_path / "mappings", labels=LABELS)).model_copy(
        update={"auth": settings_of(auth={"mode": "keys", "keys_file": str(path)}).auth}
    )
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        for token in tokens:
            headers = {"authorization": f"Bearer {token}"}
            for name, body in (("setup", {"project": PROJECT, "schema": CONFIG}), ("predict", call("pos"))):
                reply = await client.post(f"/label-studio/text/{name}", json=body, headers=headers)
                assert (reply.status_code, "names no tenant" in reply.text) == (403, True), reply.text


async def test_new_mappings_are_seen(mappings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a restart; a file that can't be read leaves the others as they were."""
    monkeypatch.setattr("qinfer.labeling.mapping.LOOK_EVERY_S", 0.0)
    text = SCORED.format(name="more", model="hasty")

    async def status(client: httpx.AsyncClient) -> int:
        body = {"project": PROJECT, "schema": CONFIG}
        return (await client.post("/label-studio/hasty/setup", json=body)).status_code

    async with running_gateway(with_labeling(mappings)) as running, httpx.AsyncClient(base_url=running.url) as client:
        (Path(mappings) / "more.yaml").write_text(text)
        assert await status(client) == 200
        (Path(mappings) / "broken.yaml").write_text("{")
        assert await status(client) == 200


async def test_without_mappings_nothing_is_served() -> None:
    """The text says what would change that."""
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        for path in ("/label-studio/text/health", "/v1/label-studio/text/projects/1/tasks"):
            reply = await client.get(path)
            assert reply.status_code == 501
            assert "QINFER_LABELING__MAPPINGS" in reply.json()["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "http://label"}, "TOKEN is not set"),
        ({"url": "label.example.org", "token": "t"}, "has to be a URL"),
        ({"url": "http://user:secret@label", "token": "t"}, "has to be a URL"),
        ({"mappings": "", "url": "http://label", "token": "t"}, "MAPPINGS, which it needs"),
        ({"mappings": "/nowhere"}, "can't be read"),
        ({"file_hosts": ["a/b"]}, "FILE_HOSTS: 'a/b' is not a host"),
    ],
)
async def test_wrong_settings_are_said_at_the_start(mappings: str, changes: Mapping[str, Any], words: str) -> None:
    """By name, before anything is opened."""
    with pytest.raises(SettingsError, match=words):
        await build(with_labeling(**{"mappings": mappings, **changes}))


async def test_a_wrong_mapping_is_said_at_the_start(mappings: str) -> None:
    """With its file."""
    (Path(mappings) / "labels.yaml").write_text("model: text")
    with pytest.raises(SettingsError, match=r"labels\.yaml"):
        await build(with_labeling(mappings))


async def test_a_caller_who_leaves_takes_the_tasks_along(running: Running) -> None:
    """What nobody waits for is not executed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    body = json.dumps(vectors("stuck", 5)).encode()
    head = f"POST /label-studio/stuck/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)

    async def depth_is(wanted: int) -> bool:
        return await running.depth("stuck") == wanted

    await eventually(lambda: depth_is(5))
    writer.close()
    await eventually(lambda: depth_is(0))
    assert not await reader.read()
