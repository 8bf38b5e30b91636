"""What the Kubernetes manifests start, started without containers: their commands, their environment, their probes.

The test is Kubernetes and KEDA: it keeps to what the manifests in the repository say, and changes only where paths and
ports of a pod's own are meant.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.api_keys import hash_key
from scripts.generate_deployment import KUSTOMIZE
from tests.support import models
from tests.support.deploy.kubernetes import Object, base_files, containers, environment, named, parse
from tests.support.servers.servers import RedisServer, free_port, system_redis, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

KEY = "a-key-of-the-test"
PORTS = ("QINFER_HTTP__PORT", "QINFER_GRPC__PORT", "QINFER_METRICS__PORT")
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


class Pods:
    """Starts containers of the manifests as processes of this machine.

    Args:
        redis_url: What the Secret `qinfer-redis` has.
        directory: Where the volumes are.
    """

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._redis_url = redis_url
        self._directory = directory
        self._ports = {name: str(free_port()) for name in PORTS}
        self._containers = {container["name"]: (spec, container) for _, spec, container in containers(base_files())}
        self.running: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['QINFER_HTTP__PORT']}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['QINFER_METRICS__PORT']}/metrics"

    def _variables(self, container: Object) -> dict[str, str]:
        own = environment(base_files(), container) | {"QINFER_REDIS__URL": self._redis_url}
        moved = {mount["mountPath"]: str(self._directory / mount["name"]) for mount in container["volumeMounts"]}
        for name, value in own.items():
            for path, there in moved.items():
                if value == path or value.startswith(f"{path}/"):
                    own[name] = there + value.removeprefix(path)
        return own | {name: port for name, port in self._ports.items() if name in own}

    def run(self, name: str, words: list[str] | None = None) -> "subprocess.Popen[bytes]":
        """Starts a container, or another command in it."""
        _, container = self._containers[name]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = self._variables(container) | {"PATH": path}
        return subprocess.Popen(words or container["args"], env=variables, stdout=subprocess.DEVNULL)

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """Starts a container, and waits until its startup probe and its readiness probe are content."""
        self.running.append(self.run(name))
        for probe in ("startupProbe", "readinessProbe"):
            wait_until(partial(self.probe, name, probe), 60.0)
        return self.running[-1]

    def probe(self, name: str, probe: str) -> bool:
        asked = self._containers[name][1][probe]
        if "exec" in asked:
            return self.run(name, asked["exec"]["command"]).wait() == 0
        try:
            return httpx.get(self.url + asked["httpGet"]["path"]).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def end(self, name: str, process: "subprocess.Popen[bytes]") -> int:
        """Ends a container as Kubernetes does: SIGTERM, and the time that the pod has."""
        process.send_signal(signal.SIGTERM)
        return process.wait(self._containers[name][0]["terminationGracePeriodSeconds"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Pods]:
    """Makes volumes and Secrets as the how-to says, with the model `identity_fp32`, which waits for workers."""
    for volume in ("tmp", "cache", "spool", "keys", "redis"):
        (tmp_path / volume).mkdir()
    name = models.identity(tmp_path / "models", "FP32")
    config = tmp_path / "models" / name / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "qinfer.min_workers" value { string_value: "0" } }')
    entry = {"id": "k", "sha256": hash_key(KEY), "tenant": "t", "scopes": ["infer"]}
    (tmp_path / "keys" / "keys.json").write_text(json.dumps({"keys": [entry]}))
    redis = RedisServer(system_redis(), tmp_path / "redis", "--appendonly", "yes")
    pods = Pods(redis.url, tmp_path)
    try:
        yield pods
    finally:
        for process in pods.running:
            process.kill()
            process.wait()
        redis.stop()


def trigger() -> Mapping[str, str]:
    """Returns what KEDA is told by the overlay."""
    objects = parse((KUSTOMIZE / "overlays" / "keda" / "keda.yaml").read_text())
    metadata: dict[str, str] = named(objects, "ScaledObject", "-default")["spec"]["triggers"][0]["metadata"]
    return metadata


def test_from_zero_and_back(cluster: Pods) -> None:
    """A request without a worker is accepted, KEDA sees work, the worker's pod answers it, and then there is none."""
    gateway = cluster.start("gateway")
    metadata = trigger()
    path = httpx.URL(metadata["url"]).path.replace("/digits/", "/identity_fp32/")

    with httpx.Client(base_url=cluster.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60.0) as client:

        def work() -> float:
            answer: dict[str, Any] = client.get(path).raise_for_status().json()
            return float(answer[metadata["valueLocation"]])

        assert httpx.get(cluster.url + path).status_code == httpx.codes.UNAUTHORIZED
        assert work() <= float(metadata["activationTargetValue"])
        accepted = client.post("/v1/models/identity_fp32/requests", json=BODY)
        assert accepted.status_code == httpx.codes.ACCEPTED, accepted.text
        assert work() > float(metadata["activationTargetValue"])

        worker = cluster.start("worker")
        result = client.get(f"/v1/requests/{accepted.json()['id']}/result", params={"wait": 30})
        assert result.status_code == httpx.codes.OK, result.text
        wait_until(lambda: work() == 0)
        assert cluster.probe("worker", "livenessProbe")
        assert cluster.end("worker", worker) == 0

        assert client.get("/v2/models/identity_fp32/ready").status_code == httpx.codes.OK
    for scope, name in (("cluster", "qinfer_backlog_work_seconds"), ("process", "qinfer_requests_total")):
        assert name in httpx.get(cluster.metrics_url, params={"scope": scope}).text
    assert cluster.end("gateway", gateway) == 0
