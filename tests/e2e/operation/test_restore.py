"""A restore brings back more than requests: all else that lies in Redis goes on where the backup found it."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import qinfer
from qinfer.client import Job
from qinfer.testing import wait_until
from tests.chaos.repository import write_stub
from tests.e2e.async_load import body
from tests.e2e.operation.test_backup import DURABLE, copy, started
from tests.support import models
from tests.support.endpoints import split
from tests.support.installation import WITHIN_S, Installation
from tests.support.jobs.job_proof import parquet
from tests.support.servers.label_studio_server import PERSONAL, LabelStudioServer, label_studio

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SLOW, ENDPOINT = "slow", "front"
ROWS, TASKS = 100, 20
LABELS = "/v1/label-studio/identity_bytes/projects/12/tasks"
MAPPING = """
model: identity_bytes
mode: push
inputs: {x: {field: text}}
results: [{type: choices, from_name: label, to_name: text, label: y}]
"""


class Scene:
    """What is done with an installation before the backup, and looked at after the restore.

    Args:
        directory: For models, mappings, and files of jobs.
        studio: Where predictions are pushed to.

    Attributes:
        caller: A client of the gateway that runs, for jobs.
    """

    caller: qinfer.Client

    def __init__(self, directory: Path, studio: LabelStudioServer) -> None:
        self._directory, self.studio = directory, studio
        self._models = directory / "models"
        write_stub(self._models, SLOW, dim=4, max_batch_size=2, delay_s=0.2)
        self._labels = models.identity(self._models, "BYTES")
        (directory / "mappings").mkdir()
        (directory / "mappings" / "text.yaml").write_text(MAPPING)

    @contextmanager
    def serving(self, redis_url: str, *, workers: bool) -> Iterator[httpx.Client]:
        """Runs a gateway, and workers where they are wanted; yields a client of the gateway."""
        installation = Installation(
            self._directory,
            self._models,
            redis_url,
            QINFER_REPOSITORY__CONTROL_MODE="explicit",
            QINFER_STORES__ALLOW=json.dumps([f"file://{self._directory}"]),
            QINFER_BULK__MAX_ROWS_PER_SHARD="10",
            QINFER_BULK__DEFAULT_ROWS_PER_SHARD="10",
            QINFER_LABELING__MAPPINGS=str(self._directory / "mappings"),
            QINFER_LABELING__URL=self.studio.url,
            QINFER_LABELING__TOKEN=PERSONAL,
        )
        with ExitStack() as stack:
            url = stack.enter_context(installation.gateway())
            client = stack.enter_context(httpx.Client(base_url=url, timeout=40.0))
            self.caller = stack.enter_context(qinfer.Client(url))
            if workers:
                stack.enter_context(installation.worker())
                stack.enter_context(installation.bulk_worker())
            yield client

    def load(self, client: httpx.Client) -> None:
        """Has the models loaded, and waits until they are ready."""
        for model in (SLOW, self._labels):
            client.post(f"/v2/repository/models/{model}/load").raise_for_status()
            wait_until(partial(self.is_ready, client, model), WITHIN_S, model)

    def is_ready(self, client: httpx.Client, model: str) -> bool:
        return client.get(f"/v2/models/{model}/ready").status_code == 200

    def begin_job(self) -> Job:
        """Submits a job, and waits until a part of it is done."""
        column = pa.array(np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4).tolist(), pa.list_(pa.float32()))
        (self._directory / "in.parquet").write_bytes(
            parquet(pa.table({"id": pa.array(range(ROWS)), "a": column, "b": column}))
        )
        job = self.caller.submit_job(SLOW, self._directory / "in.parquet", self._directory / "out", key="id")
        wait_until(lambda: job.status().shards_done >= 2, WITHIN_S, "a part of the job")
        return job

    def output(self) -> dict[int, list[float]]:
        """Returns what the job has written: row → sums; each row is there once."""
        table = pq.read_table(sorted((self._directory / "out").glob("part-*.parquet")))
        assert table.num_rows == ROWS
        return dict(zip(table["id"].to_pylist(), table["sum"].to_pylist(), strict=True))

    def label(self, client: httpx.Client) -> None:
        """Has Label Studio tell of new tasks."""
        event = {"action": "TASKS_CREATED", "tasks": self.studio.add(*["pos", "neg"] * (TASKS // 2))}
        reply = client.post(f"/label-studio/{self._labels}/webhook", json=event | {"project": {"id": 12}})
        assert (reply.status_code, reply.json()["queued"]) == (201, TASKS)


def submit(client: httpx.Client, model: str, number: int) -> httpx.Response:
    """Submits a request with the idempotency key of its number."""
    return client.post(f"/v1/models/{model}/requests", json=body(number), headers={"idempotency-key": f"k{number}"})


def result(client: httpx.Client, place: str) -> Any:
    reply = client.get(f"{place}/result?wait=30")
    return reply.json()["outputs"][0]["data"] if reply.status_code == 200 else reply.text


async def test_all_that_lies_in_redis_goes_on_after_a_restore(tmp_path: Path) -> None:
    """Idempotency keys, an interrupted job, tasks to be labeled, endpoints, loaded models and settings."""
    async with label_studio() as studio:
        await asyncio.to_thread(_journey, Scene(tmp_path, studio), tmp_path)


def _journey(scene: Scene, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = started(tmp_path / "source", *DURABLE, "--appendfsync", "always")
        with scene.serving(server.url, workers=True) as client:
            scene.load(client)
            declared = client.put(f"/v1/endpoints/{ENDPOINT}", json=split(stable=f"{SLOW}:1"))
            ended = submit(client, SLOW, 1).headers["location"]
            assert result(client, ended) == [2.0] * 4
            job_id = scene.begin_job().id
        with scene.serving(server.url, workers=False) as client:
            waiting = submit(client, SLOW, 2).headers["location"]
            routed = submit(client, ENDPOINT, 3).headers["location"]
            scene.label(client)
            client.post("/v2/logging", json={"log_verbose_level": 1}).raise_for_status()
            job = scene.caller.job(job_id).status()
        restored = stack.enter_context(copy(server, tmp_path / "source", tmp_path / "restored"))

        client = stack.enter_context(scene.serving(restored.url, workers=True))
        again = [submit(client, *each) for each in ((SLOW, 1), (SLOW, 2), (ENDPOINT, 3))]
        results = [result(client, place) for place in (ended, waiting, routed)]
        done = scene.caller.job(job_id).wait(timeout_s=WITHIN_S)
        wait_until(lambda: client.get(LABELS).json()["counts"]["done"] == TASKS, WITHIN_S, "labels")
        endpoint = client.get(f"/v1/endpoints/{ENDPOINT}").json()
        logging = client.get("/v2/logging").json()

    assert [reply.headers["location"] for reply in again] == [ended, waiting, routed]
    assert results == [[number + 1.0] * 4 for number in (1, 2, 3)]
    assert job.state == "running"
    assert 0 < job.rows_done < ROWS
    assert (done.state, done.rows_done) == ("completed", ROWS)
    assert scene.output() == {row: [2.0 * (row * 4 + n) for n in range(4)] for row in range(ROWS)}
    assert sorted(each["task"] for each in scene.studio.predictions) == list(range(1, TASKS + 1))
    assert endpoint["endpoint"]["revision"] == declared.json()["endpoint"]["revision"]
    assert logging["log_verbose_level"] == 1
