"""A Redis Cluster with replicas loses a primary under load: its replica goes on, and no accepted request is lost."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.delivery import keys
from qinfer.testing import wait_until
from tests import models
from tests.e2e.conftest import clean_environment, free_port, is_ready
from tests.e2e.test_cluster import program
from tests.servers import RedisCluster, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

MODELS = [f"add_sub_{number}" for number in range(4)]
"""Enough for their slots to lie on several nodes."""

AROUND = 150
"""Requests accepted before the primary is killed, and after its successor has taken over."""


class Load(threading.Thread):
    """Submits asynchronous requests to all models in turn, each again until it is accepted.

    Attributes:
        accepted: Number of a request → where it is.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.accepted: dict[int, str] = {}
        self.stop = threading.Event()
        self._url = url

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=15.0) as client:
            number = 0
            while not self.stop.is_set():
                if (place := self._submit(client, number)) is None:
                    self.stop.wait(0.05)
                else:
                    self.accepted[number] = place
                    number += 1

    def _submit(self, client: httpx.Client, number: int) -> str | None:
        model, key = MODELS[number % len(MODELS)], {"idempotency-key": f"k{number}"}
        try:
            reply = client.post(f"/v1/models/{model}/requests", json=body(number), headers=key)
        except httpx.HTTPError:
            return None
        return reply.headers["location"] if reply.status_code in (200, 202) else None


def body(number: int) -> dict[str, Any]:
    values = (("a", float(number)), ("b", 1.0))
    return {"inputs": [{"name": n, "shape": [1, 4], "datatype": "FP32", "data": [v] * 4} for n, v in values]}


def test_a_primary_is_killed(tmp_path: Path) -> None:
    """Every accepted request has its own answer, whether it was accepted before the kill, during it, or after."""
    for name in MODELS:
        models.add_sub(tmp_path / "models", name)
    (tmp_path / "redis").mkdir()
    cluster = RedisCluster(system_redis(), tmp_path / "redis", replicated=True)
    port = free_port()
    environment = clean_environment() | {
        "QINFER_REDIS__URL": cluster.url,
        "QINFER_REDIS__CLUSTER": "true",
        "QINFER_REDIS__MIN_REPLICAS": "1",
        "QINFER_REPOSITORY__PATH": str(tmp_path / "models"),
        "QINFER_HTTP__PORT": str(port),
        "QINFER_GRPC__PORT": "0",
        "QINFER_METRICS__PORT": "0",
    }
    load = Load(f"http://127.0.0.1:{port}")
    try:
        with (
            program("qinfer_api", tmp_path / "gateway.log", environment),
            program("qinfer_workers.inference", tmp_path / "worker.log", environment),
        ):
            wait_until(lambda: is_ready(f"127.0.0.1:{port}"), 40.0, "readiness")
            load.start()
            wait_until(lambda: len(load.accepted) >= AROUND, 60.0, "requests accepted")

            key = keys.prefix(MODELS[0], 0)
            killed = cluster.primary(key)
            killed.kill()
            wait_until(lambda: cluster.primary(key) is not killed, 60.0, "a successor")
            killed.start()  # it follows its successor, which accepts nothing without a replica
            before = len(load.accepted)
            wait_until(lambda: len(load.accepted) >= before + AROUND, 60.0, "requests accepted again")
            load.stop.set()
            load.join(30.0)
            answers = results(f"http://127.0.0.1:{port}", load.accepted)
    finally:
        load.stop.set()
        cluster.stop()

    assert answers == {number: [number + 1.0] * 4 for number in load.accepted}
    assert len(answers) >= 2 * AROUND


def results(url: str, accepted: dict[int, str]) -> dict[int, list[float]]:
    """Returns the first output of each request; waits for those that have not ended."""
    found = {}
    with httpx.Client(base_url=url, timeout=40.0) as client:
        for number, place in accepted.items():
            reply = client.get(f"{place}/result?wait=30")
            reply.raise_for_status()
            found[number] = reply.json()["outputs"][0]["data"]
    return found
