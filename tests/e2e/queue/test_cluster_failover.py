"""A Redis Cluster with replicas loses a primary under load: its replica goes on, and no accepted request is lost."""

from pathlib import Path

import pytest

from qinfer.queue import keys
from qinfer.testing import wait_until
from tests.e2e.async_load import Load, wrong
from tests.e2e.conftest import clean_environment, is_ready
from tests.e2e.queue.test_cluster import program
from tests.support import models
from tests.support.servers.servers import RedisCluster, free_port, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

MODELS = [f"add_sub_{number}" for number in range(4)]
"""Enough for their slots to lie on several nodes."""

AROUND = 150
"""Requests accepted before the primary is killed, and after its successor has taken over."""


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
    load = Load(f"http://127.0.0.1:{port}", MODELS)
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
            load.stop()
            lost = wrong(f"http://127.0.0.1:{port}", load.accepted)
    finally:
        load.stop()
        cluster.stop()

    assert lost == {}
