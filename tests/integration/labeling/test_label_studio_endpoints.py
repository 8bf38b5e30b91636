"""Mappings that name an endpoint: each task is given to a target, and one that is pushed is scored once."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.settings import LabelingSettings, RequestSettings
from qinfer.testing import eventually
from tests.support.endpoints import canary, declare, split
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.label_studio_server import PERSONAL, LabelStudioServer, label_studio

MAPPING = """
name: {name}
model: {name}
mode: {mode}
inputs: {{x: {{field: vector, kind: tensor}}}}
results: [{{type: choices, from_name: label, to_name: text, scores: y, labels: [neg, pos, neg, pos], top: 1}}]
"""
BOTH = {"echo:1", "echo:2"}


@pytest.fixture
async def studio() -> AsyncIterator[LabelStudioServer]:
    async with label_studio() as studio:
        yield studio


@pytest.fixture
async def running(studio: LabelStudioServer, tmp_path: Path) -> AsyncIterator[Running]:
    for name, mode in (("reader", "predict"), ("pushed", "push")):
        (tmp_path / f"{name}.yaml").write_text(MAPPING.format(name=name, mode=mode))
    labeling = LabelingSettings.model_validate({"mappings": str(tmp_path), "url": studio.url, "token": PERSONAL})
    requests = RequestSettings(sweep_every_s=0.02)
    async with running_gateway(settings_of().model_copy(update={"labeling": labeling, "requests": requests})) as one:
        yield one


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened


def vectors(studio: LabelStudioServer, count: int) -> list[dict[str, Any]]:
    """Adds tasks with numbers that `echo` gives back."""
    tasks = studio.add(*["pos"] * count)
    for task in tasks:
        task["data"]["vector"] = [0.1, 0.9, 0.2, 0.3]
    return tasks


async def test_predictions_are_shared_out(
    running: Running, client: httpx.AsyncClient, studio: LabelStudioServer
) -> None:
    await declare([running], "reader", split(canary(0.5)))
    setup = await client.post("/label-studio/reader/setup", json={"project": "12.1", "schema": ""})
    health = await client.get("/label-studio/reader/health")
    versions = await client.get("/label-studio/reader/versions")

    reply = await client.post("/label-studio/reader/predict", json={"tasks": vectors(studio, 60)})

    assert (health.status_code, setup.json()) == (200, {"model_version": "echo:1"})
    assert versions.json() == {"versions": ["echo:2", "echo:1"]}
    assert reply.json()["model_version"] == "echo:1"
    results = reply.json()["results"]
    assert {each["result"][0]["value"]["choices"][0] for each in results} == {"pos"}
    shares = Counter(each["model_version"] for each in results)
    assert set(shares) == BOTH
    assert Counter(f"{each.model}:{each.version}" for each in running.requests) == shares
    counted = running.gateway.dispatcher.targets
    assert {target: counted.requests("reader", *target) for target in (("echo", 1), ("echo", 2))} == {
        ("echo", version): shares[f"echo:{version}"] for version in (1, 2)
    }


async def test_pushed_tasks_are_shared_out_and_scored_once(
    running: Running, client: httpx.AsyncClient, studio: LabelStudioServer
) -> None:
    await declare([running], "pushed", split(canary(0.4), canary(0.3, "späte modelle:1")))
    tasks = vectors(studio, 60)
    event = {"action": "TASKS_CREATED", "tasks": tasks, "project": {"id": 12}}
    where = "/v1/label-studio/pushed/projects/12/tasks"

    async def are_done() -> bool:
        counts = (await client.get(where)).json()["counts"]
        assert not counts["failed"], (await client.get(where, params={"state": "failed"})).text
        return bool(counts["done"] == 60)

    first = await client.post("/label-studio/pushed/webhook", json=event)
    await eventually(are_done, description="pushed predictions")
    await declare([running], "pushed", split(canary(0.9)))
    again = await client.post("/label-studio/pushed/webhook", json=event)

    assert (first.json()["queued"], again.json()["queued"]) == (60, 0)
    assert len(running.requests) == len(studio.predictions) == 60
    shares = Counter(each["model_version"] for each in studio.predictions)
    assert set(shares) == {*BOTH, "späte modelle:1"}
    page = (await client.get(where, params={"limit": 1000})).json()["tasks"]
    assert Counter(task["model_version"] for task in page) == shares
    assert {(await client.get(task["request"])).json()["state"] for task in page[:10]} == {"succeeded"}
