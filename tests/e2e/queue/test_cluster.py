"""Gateway and worker as programs of their own, their queue on a Redis Cluster of three nodes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qinfer.testing import wait_until
from tests.e2e.conftest import clean_environment, is_ready
from tests.support import models
from tests.support.servers.servers import RedisCluster, free_port, system_redis

pytestmark = pytest.mark.long

MODELS = 4
"""Enough for their slots to lie on several nodes."""


@contextmanager
def program(module: str, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Runs a program; it must drain and end with 0 when it is asked to."""
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0, log.read_text()


@pytest.mark.matrix
def test_models_are_served_over_a_cluster(tmp_path: Path) -> None:
    """Each model's queue is on the node of its slot; the replies come back on the gateway's."""
    for number in range(MODELS):
        models.add_sub(tmp_path / "models", f"add_sub_{number}")
    (tmp_path / "redis").mkdir()
    cluster = RedisCluster(system_redis(), tmp_path / "redis")
    port = free_port()
    environment = clean_environment() | {
        "QINFER_REDIS__URL": cluster.url,
        "QINFER_REDIS__CLUSTER": "true",
        "QINFER_REPOSITORY__PATH": str(tmp_path / "models"),
        "QINFER_HTTP__PORT": str(port),
        "QINFER_GRPC__PORT": "0",
        "QINFER_METRICS__PORT": "0",
    }
    try:
        with (
            program("qinfer_api", tmp_path / "gateway.log", environment),
            program("qinfer_workers.inference", tmp_path / "worker.log", environment),
        ):
            wait_until(lambda: is_ready(f"127.0.0.1:{port}"), 40.0, "readiness")

            answers = [ask(port, f"add_sub_{number}", value) for number in range(MODELS) for value in range(20)]

        assert answers == [[value + 1.0] * 4 for _ in range(MODELS) for value in range(20)]
    finally:
        cluster.stop()


def ask(port: int, model: str, value: int) -> list[float]:
    inputs = [
        {"name": name, "shape": [1, 4], "datatype": "FP32", "data": [data] * 4}
        for name, data in (("a", value), ("b", 1))
    ]
    reply = httpx.post(f"http://127.0.0.1:{port}/v2/models/{model}/infer", json={"inputs": inputs}, timeout=30)
    reply.raise_for_status()
    data: list[float] = reply.json()["outputs"][0]["data"]
    return data
