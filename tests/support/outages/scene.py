"""A small installation on this machine that Prometheus watches with the shipped rules: what outages happen to."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import httpx
import yaml

from qinfer.testing import wait_until
from tests.chaos.repository import write_stub
from tests.e2e.conftest import EVERY_MODEL, clean_environment
from tests.support import faulty_backend
from tests.support.deploy.deployments import DEPLOY, tool
from tests.support.programs import ForkedProgram
from tests.support.servers.servers import RedisCluster, RedisServer, free_port, system_redis

MODELS = ("digits", "words")


class Scene:
    """A small installation under load, watched by Prometheus.

    Args:
        directory: For models, logs and data.
        stack: Ends what was started.
        is_cluster: Redis is a cluster of three nodes instead of one node.

    Attributes:
        redis: Redis, or the node of the cluster that programs are given.
        nodes: All that there are, replicas too.
        redis_home: The folder of Redis' files.
    """

    def __init__(self, directory: Path, stack: ExitStack, *, is_cluster: bool = False) -> None:
        self.directory, self.models = directory, directory / "models"
        self.stack = stack
        for name in MODELS:
            write_stub(self.models, name, delay_s=0.01)
        self.redis_home = directory / "redis"
        self.nodes = self._start_redis(is_cluster=is_cluster)
        self.redis = self.nodes[0]
        self._env = clean_environment() | {
            "QINFER_REDIS__URL": self.redis.url,
            "QINFER_REDIS__CLUSTER": str(is_cluster).lower(),
            "QINFER_REPOSITORY__PATH": str(self.models),
            "QINFER_REPOSITORY__CONTROL_MODE": "poll",
            "QINFER_REPOSITORY__POLL_S": "1",
            "QINFER_STORES__ALLOW": json.dumps([f"file://{directory}"]),
            "QINFER_GRPC__ENABLED": "false",
            "PYTHONPATH": faulty_backend.install(directory / "backend"),
        }
        self.workers = [self.worker() for _ in range(2)]
        self.bridges: list[subprocess.Popen[bytes]] = []
        self.gateways = [self.gateway(free_port(), free_port()) for _ in range(2)]
        targets = [f"127.0.0.1:{gateway.metrics_port}" for gateway in self.gateways]
        self.prometheus = watch(directory, stack, targets)

    def _start_redis(self, *, is_cluster: bool) -> list[RedisServer]:
        """Starts Redis in a folder of its own."""
        home = self.redis_home
        home.mkdir()
        if is_cluster:
            cluster = RedisCluster(system_redis(), home)
            self.stack.callback(cluster.stop)
            return cluster.nodes
        node = self.stack.enter_context(RedisServer(system_redis(), home, "--maxmemory-policy", "noeviction"))
        self.stack.callback(_end, node.process)  # one that can't save does not end by itself
        return [node]

    def worker(self) -> subprocess.Popen[bytes]:
        """Starts a worker."""
        return self.start("qinfer_workers.inference")

    def gateway(self, port: int, metrics_port: int) -> "Gateway":
        """Starts a gateway, and waits until every model is ready."""
        ports = {"QINFER_HTTP__PORT": str(port), "QINFER_METRICS__PORT": str(metrics_port)}
        gateway = Gateway(f"http://127.0.0.1:{port}", metrics_port, self.start("qinfer_api", more=ports | EVERY_MODEL))
        wait_until(lambda: answers(f"{gateway.url}/v2/health/ready"), 60, "a gateway")
        return gateway

    def start(
        self, module: str, *words: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[bytes]:
        """Starts a program with its arguments, and settings of its own."""
        with (self.directory / f"{module}.log").open("ab") as log:
            process = ForkedProgram([module, *words], self._env | dict(more), log=log)
        self.stack.callback(_end, process)
        return process


class Gateway(NamedTuple):
    """A gateway that runs."""

    url: str
    metrics_port: int
    process: subprocess.Popen[bytes]


def watch(directory: Path, stack: ExitStack, targets: list[str]) -> int:
    """Starts Prometheus with the shipped configuration and rules, and these addresses of gateways; returns its port."""
    port = free_port()
    shipped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in shipped["scrape_configs"]}
    jobs["qinfer-cluster"]["static_configs"] = [{"targets": targets[:1]}]
    del jobs["qinfer-gateways"]["dns_sd_configs"]
    jobs["qinfer-gateways"]["static_configs"] = [{"targets": targets}]
    shipped["scrape_configs"] = [jobs["qinfer-cluster"], jobs["qinfer-gateways"]]
    shutil.copytree(DEPLOY / "prometheus" / "rules", directory / "rules")
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(shipped))
    command = [str(tool("promtool", "prometheus")), f"--config.file={file}"]
    command += [f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (directory / "prometheus.log").open("wb") as log:
        stack.callback(_end, subprocess.Popen(command, stdout=log, stderr=log))
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), 60, "Prometheus")
    return port


def answers(url: str) -> bool:
    """Tells whether a GET of a URL is answered with 200."""
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that this one started, unless it has ended."""
    process.kill()
    process.wait()
