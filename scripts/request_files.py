"""Lists the source files of qinfer in which a function runs for one request, in the gateway and in the worker.

    scripts/files_of_a_request

It takes no arguments, and half a minute. The script starts an embedded Redis, a gateway and a worker with a tiny ONNX
model, sends 100 requests of each kind, and then one online request (`POST /v2/models/m/infer`) and one stored request
(`POST /v1/models/m/requests`, until its result is stored). Both programs run under a profiler (`sys.setprofile`, in
every thread) that notes the file of each call and its *root*: the coroutine of the task or the callback of the event
loop below which the call was made. Roots that are active while there is no request are background work and are left
out, but for those that wait for requests (`WAITING`).
"""

import atexit
import json
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import httpx
import onnx
from onnx import TensorProto, helper

from qinfer.queue.embedded import EmbeddedRedis

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {"gateway": "qinfer_api", "worker": "qinfer_workers.inference"}
FOLDERS = {"qinfer": ROOT / "qinfer", "qinfer_api": ROOT / "api", "qinfer_workers": ROOT / "workers"}
MODEL = "m"
CONFIG = """name: "m" backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
WARM_UPS = 100
KEPT_CALLS = 2_000_000
READY_WITHIN_S, STOP_WITHIN_S, IDLE_S = 60.0, 20.0, 6.0
STORED_WITHIN_S, SETTLED_WITHIN_S = 1.0, 0.5
WAITING = {
    "QinferHttpProtocol.data_received",
    "Queue.listen",
    "Connection.data_received",
    "Connection._flush",
    "Worker._fetch_loop",
}
"""Roots that are active without a request, and on the way of each: they read a socket or wait for an entry."""

Call = tuple[float, str, str]
"""When a function of the project was entered (monotonic), its file, and its root."""


def main() -> int:
    """Measures and prints both lists."""
    with tempfile.TemporaryDirectory(prefix="qinfer-files-") as name:
        directory = Path(name)
        windows = _send(directory)
        calls = {program: _read(directory / f"{program}.json") for program in PROGRAMS}
    idle = windows.pop("idle")
    for kind, window in windows.items():
        passed: set[str] = set()
        for program in PROGRAMS:
            background = {root for _, _, root in _within(calls[program], idle)} - WAITING
            files = {file for _, file, root in _within(calls[program], window) if root not in background}
            passed |= files
            print(f"{kind} request, {program}: {len(files)}", *sorted(files), sep="\n    ")
        print(f"{kind} request, together: {len(passed)}\n")
    return 0


def _send(directory: Path) -> dict[str, tuple[float, float]]:
    """Runs both programs and sends requests; returns when the measured ones were under way."""
    repository = directory / "models"
    _write_model(repository / MODEL)
    with (
        EmbeddedRedis(directory / "data") as redis,
        _running(directory, redis.url, repository) as url,
        httpx.Client(base_url=url, timeout=30.0) as client,
    ):
        _wait_until_ready(client)
        online = partial(_post, client, f"/v2/models/{MODEL}/infer")
        stored = partial(_post, client, f"/v1/models/{MODEL}/requests")
        _warm_up(online, stored)
        windows = {"idle": _timed(lambda: time.sleep(IDLE_S))}
        _warm_up(online, stored)
        windows["online"] = _timed(online)
        _warm_up(stored)
        location: list[str] = []
        windows["stored"] = _timed(partial(_store, stored, location))
        state = client.get(location[0]).raise_for_status().json()["state"]
        assert state == "succeeded", state
    return windows


def _post(client: httpx.Client, path: str) -> str:
    """Sends a request; returns where its result will be, if it is a stored one."""
    return str(client.post(path, json=BODY).raise_for_status().headers.get("location", ""))


def _store(send: Callable[[], str], location: list[str]) -> None:
    """Sends a stored request, and waits until its result must have been stored."""
    location.append(send())
    time.sleep(STORED_WITHIN_S)


def _warm_up(*kinds: Callable[[], object]) -> None:
    for send in kinds:
        for _ in range(WARM_UPS):
            send()
    time.sleep(SETTLED_WITHIN_S)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    began_s = time.monotonic()
    work()
    return began_s, time.monotonic()


def _within(calls: list[Call], window: tuple[float, float]) -> Iterator[Call]:
    return (call for call in calls if window[0] <= call[0] <= window[1])


def _read(path: Path) -> list[Call]:
    return [(at_s, file, root) for at_s, file, root in json.loads(path.read_text())]


def _write_model(directory: Path) -> None:
    inputs, outputs = ([helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4])] for n in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], MODEL, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    onnx.save(model, str(directory / "1" / "model.onnx"))


@contextmanager
def _running(directory: Path, redis_url: str, repository: Path) -> Iterator[str]:
    """Runs a gateway and a worker under the profiler; yields the gateway's address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = [
        f"QINFER_REDIS__URL={redis_url}",
        f"QINFER_REPOSITORY__PATH={repository}",
        f"QINFER_HTTP__PORT={port}",
        "QINFER_GRPC__ENABLED=false",
        "QINFER_METRICS__PORT=0",
    ]
    processes = []
    try:
        for program in PROGRAMS:
            arguments = ["-m", "scripts.request_files", program, str(directory / f"{program}.json")]
            command = ["env", *settings, sys.executable, *arguments]
            log = (directory / f"{program}.log").open("wb")
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        try:
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            for program in PROGRAMS:
                print((directory / f"{program}.log").read_text()[-3000:], file=sys.stderr)
            raise
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(STOP_WITHIN_S)


def _wait_until_ready(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            if client.get(f"/v2/models/{MODEL}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not ready within {READY_WITHIN_S:g} s")
        time.sleep(0.2)


# --- within a program ------------------------------------------------------------------------------------------------


def profile(program: str, path: Path) -> None:
    """Runs a program as `python -m` does, and writes its last calls when it ends."""
    calls: deque[Call] = deque(maxlen=KEPT_CALLS)
    names: dict[str, str] = {}

    def name_of(filename: str) -> str:
        found = names.get(filename)
        if found is None:
            inside = any(filename.startswith(f"{folder}/") for folder in FOLDERS.values())
            found = names[filename] = filename.removeprefix(f"{ROOT}/") if inside else ""
        return found

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := name_of(frame.f_code.co_filename)):
            calls.append((time.monotonic(), file, root_of(frame)))

    def root_of(frame: FrameType) -> str:
        root, outer = frame, frame.f_back
        while outer is not None and not outer.f_code.co_filename.endswith("asyncio/runners.py"):
            if name_of(outer.f_code.co_filename):
                root = outer
            outer = outer.f_back
        return root.f_code.co_qualname

    atexit.register(lambda: path.write_text(json.dumps(list(calls))))
    threading.setprofile(note)
    sys.setprofile(note)
    sys.argv = [program]
    runpy.run_module(PROGRAMS[program], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if set(sys.argv) & {"-h", "--help"}:
        sys.stdout.write(__doc__ or "")
    elif len(sys.argv) == 3:
        profile(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
