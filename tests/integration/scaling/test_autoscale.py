"""`qinfer up --autoscale` and `qinfer autoscale`, the real things: bursts, idleness, crashes, a Redis that is away."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from qinfer.queue import keys
from qinfer.testing import wait_until
from tests.support import models
from tests.support.servers import servers

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

WITHIN_S = 60.0
QUICK = {
    "QINFER_AUTOSCALE__TARGET_S": "0.5",
    "QINFER_AUTOSCALE__DOWN_AFTER_S": "1",
    "QINFER_AUTOSCALE__IDLE_S": "1",
    "QINFER_AUTOSCALE__COOLDOWN_S": "1",
    "QINFER_AUTOSCALE__EVERY_S": "0.2",
    "QINFER_WORKER__HEARTBEAT_EVERY_S": "0.3",
}
BODY = {
    "inputs": [
        {"name": "a", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
        {"name": "b", "shape": [1, 4], "datatype": "FP32", "data": [4, 3, 2, 1]},
    ]
}


class Program:
    """A program of qinfer in a process of its own, with what it prints."""

    def __init__(self, log: Path, module: str, *words: str, env: dict[str, str]) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *words], stdout=out, stderr=out, env=clean | env
            )

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def says(self, text: str) -> None:
        """Waits until it has printed something, by a regular expression."""
        found = re.compile(text)
        ends = lambda: bool(found.search(self.printed)) or self.process.poll() is not None  # noqa: E731
        wait_until(ends, WITHIN_S, lambda: f"{text!r} in:\n{self.printed}")
        assert found.search(self.printed), self.printed

    @property
    def workers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if _is_worker(child)]

    def decisions(self) -> list[tuple[int, int]]:
        """The decisions that it logged as JSON: from, to."""
        lines = [json.loads(line) for line in self.printed.splitlines() if '"workers scaled"' in line]
        return [(line["from"], line["to"]) for line in lines]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WITHIN_S)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "qinfer_workers.inference" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Program] = []

    def program(module: str, *words: str, **env: str) -> Program:
        started.append(Program(tmp_path / f"{len(started)}.log", module, *words, env=QUICK | env))
        return started[-1]

    yield program
    for one in reversed(started):
        if one.process.poll() is None and one.stop() != 0:
            pytest.fail(one.printed)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.add_sub(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[servers.RedisServer]:
    (tmp_path / "redis").mkdir()
    with servers.RedisServer(servers.system_redis(), tmp_path / "redis", "--appendonly", "yes") as server:
        yield server


def infer(url: str, timeout_s: float = WITHIN_S) -> int:
    return httpx.post(f"{url}/v2/models/add_sub/infer", json=BODY, timeout=timeout_s).status_code


def burst(url: str, count: int) -> set[int]:
    """Sends requests at once; returns the status codes."""
    with ThreadPoolExecutor(count) as pool:
        return set(pool.map(infer, [url] * count))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def record(url: str) -> dict[str, Any]:
    """What the autoscaler says of itself in Redis."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        said = client.hvals(keys.scalers())
    return json.loads(said[0].partition(" ")[2]) if said else {}


def test_up_scales_with_a_burst_to_zero_and_back(start: Start, repository: Path, tmp_path: Path) -> None:
    """No worker at first and the model is ready; no request fails, whatever comes when; the end drains all."""
    up = start(
        "qinfer.cli.main",
        *("up", "--autoscale", "0:2", "--model-repository", str(repository), "--data-dir", str(tmp_path / "data")),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    )
    up.says("Stop  ")
    url = up.printed.partition("URL")[2].split()[0]
    assert "1 of 1 ready" in up.printed
    assert "0 to 2, one for each 0.5 s of work; the models are ready without one" in up.printed
    assert up.workers == []

    assert burst(url, 40) == {200}
    up.says("2 workers instead of .: .* s of work at 0.5 s a worker")
    up.says("0 workers instead of .: nothing to do for")
    wait_until(lambda: up.workers == [], WITHIN_S)
    assert is_ready(url)
    told = len(up.printed)
    assert infer(url) == 200

    assert "1 worker instead of 0" in up.printed[told:]
    assert up.stop() == 0


def step(url: str, sequence: int, value: float, **flags: bool) -> float:
    """Sends a step of a sequence to the model that sums."""
    tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    body = {"parameters": {"sequence_id": sequence, **flags}, "inputs": [tensor]}
    reply = httpx.post(f"{url}/v2/models/sums/infer", json=body, timeout=WITHIN_S)
    assert reply.status_code == 200, reply.text
    return float(reply.json()["outputs"][0]["data"][0])


def test_up_keeps_workers_for_open_sequences(start: Start, tmp_path: Path) -> None:
    """The first START starts a worker; two instances with a slot each are full with two sequences of three."""
    models.accumulator(
        tmp_path / "models",
        "sums",
        strategy=models.DIRECT,
        max_batch_size=1,
        more="max_sequence_idle_microseconds: 60000000",
    )
    up = start(
        "qinfer.cli.main",
        *("up", "--autoscale", "0:2", "--model-repository", str(tmp_path / "models")),
        *("--data-dir", str(tmp_path / "data"), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    )
    up.says("Stop  ")
    url = up.printed.partition("URL")[2].split()[0]
    assert up.workers == []

    with ThreadPoolExecutor(3) as pool:
        first = list(pool.map(lambda n: step(url, n, float(n), sequence_start=True), (1, 2, 3)))
    up.says("2 workers instead of .: open sequences need the slots of 2")
    wait_until(lambda: httpx.get(f"{url}/v1/models/sums/backlog").json()["workers"] == 2, WITHIN_S, "both workers")
    told = len(up.printed)
    last = [step(url, n, 10.0, sequence_end=True) for n in (1, 2, 3)]
    up.says("0 workers instead of .: nothing to do for")

    assert first == [1.0, 2.0, 3.0]
    assert last == [11.0, 12.0, 13.0]
    assert "instead of" not in up.printed[:told].rpartition("slots of 2")[2]
    assert up.stop() == 0


@pytest.fixture
def gateway(start: Start, repository: Path, outside: servers.RedisServer) -> Callable[..., str]:
    def serve(**env: str) -> str:
        """Starts a gateway without workers; returns its URL."""
        port = servers.free_port()
        ports = {"QINFER_HTTP__PORT": str(port), "QINFER_GRPC__ENABLED": "false", "QINFER_METRICS__ENABLED": "false"}
        where = {"QINFER_REDIS__URL": outside.url, "QINFER_REPOSITORY__PATH": str(repository)}
        program = start("qinfer_api", **ports, **where, **env)
        wait_until(lambda: servers.is_listening(port) or program.process.poll() is not None, WITHIN_S)
        assert program.process.poll() is None, program.printed
        return f"http://127.0.0.1:{port}"

    return serve


def test_autoscale_beside_a_gateway(
    start: Start, gateway: Callable[..., str], repository: Path, outside: servers.RedisServer
) -> None:
    """It scales, restarts what crashes, keeps what runs while Redis is away, says what it does; its end drains all."""
    url = gateway(QINFER_REPOSITORY__MIN_WORKERS="0")
    wait_until(lambda: is_ready(url), WITHIN_S, "a gateway that is ready without a worker")
    words = ("autoscale", "--min", "0", "--max", "2", "--idle-s", "10", "--redis", outside.url)
    scaler = start("qinfer.cli.main", *words, QINFER_REPOSITORY__PATH=str(repository))

    assert burst(url, 40) == {200}
    scaler.says('"workers scaled".*"to": ?2')
    said = record(outside.url)
    assert (said["min_workers"], said["max_workers"], said["target"]) == (0, 2, 2)
    scaler.workers[0].kill()
    scaler.says("was killed by SIGKILL.*restarting it")
    assert infer(url) == 200

    wait_until(lambda: len(scaler.workers) == 2, WITHIN_S, "the worker that is started again")
    kept = {worker.pid for worker in scaler.workers}
    outside.stop()
    scaler.says("queue not read")
    assert {worker.pid for worker in scaler.workers} == kept
    outside.start()
    scaler.says("queue read again")
    wait_until(lambda: infer(url) == 200, WITHIN_S, "an answer; until then requests are refused")

    scaler.says('"workers scaled".*"to": ?0')
    wait_until(lambda: scaler.workers == [], WITHIN_S)
    assert infer(url) == 200
    assert scaler.decisions()[0][0] == 0
    assert scaler.decisions()[-1] == (0, 1)
    workers = scaler.workers
    assert scaler.stop() == 0
    assert [worker.is_running() for worker in workers] == [False]
    assert record(outside.url) == {}
    with redis.Redis.from_url(outside.url, decode_responses=True) as client:
        counts = {name: int(count) for name, count in client.hgetall(keys.scaler_counts()).items()}
    steps = scaler.decisions()
    assert counts["up"] == sum(before < after for before, after in steps)
    assert counts["down"] == sum(before > after for before, after in steps)
    assert counts["restarts"] == 1


def test_two_autoscalers_share_the_work(
    start: Start, gateway: Callable[..., str], repository: Path, outside: servers.RedisServer
) -> None:
    """One of them starts the worker that is asked for; when it ends, the other takes over."""
    url = gateway(QINFER_REPOSITORY__MIN_WORKERS="0")
    wait_until(lambda: is_ready(url), WITHIN_S, "a gateway that is ready without a worker")
    words = ("autoscale", "--max", "2", "--target-s", "1000", "--idle-s", "600", "--redis", outside.url)
    scalers = [start("qinfer.cli.main", *words, QINFER_REPOSITORY__PATH=str(repository)) for _ in range(2)]
    with redis.Redis.from_url(outside.url) as client:
        wait_until(lambda: client.hlen(keys.scalers()) == 2, WITHIN_S, "both autoscalers")

    assert burst(url, 40) == {200}
    one, other = sorted(scalers, key=lambda scaler: -len(scaler.workers))
    assert [len(scaler.workers) for scaler in (one, other)] == [1, 0]
    assert (one.decisions(), other.decisions()) == ([(0, 1)], [])

    assert one.stop() == 0
    other.says('"workers scaled".*"to": ?1')
    assert "the workers of an autoscaler that is gone are taken over" in other.printed
    assert infer(url) == 200


def test_a_model_that_wants_a_worker_keeps_one(
    start: Start, gateway: Callable[..., str], repository: Path, outside: servers.RedisServer
) -> None:
    """Without the setting a model is not ready at zero, and its requests would be refused. The log names it."""
    url = gateway()
    scaler = start(
        "qinfer.cli.main", "autoscale", "--max", "1", "--redis", outside.url, QINFER_REPOSITORY__PATH=str(repository)
    )

    scaler.says('models want live workers.*"add_sub"')
    wait_until(lambda: is_ready(url), WITHIN_S, "a worker")

    assert scaler.decisions() == [(0, 1)]
    assert infer(url) == 200
    assert "a model needs 1 live" in scaler.printed
