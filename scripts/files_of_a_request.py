"""Lists the source files of qinfer in which a function runs for one request, in the gateway and in the worker.

    python -m scripts.files_of_a_request

The script takes a minute. It starts an embedded Redis, a gateway and a worker with the model of `qinfer example
digits`, sends 100 requests of each kind, and then one online request (`POST /v2/models/digits/infer`) and one stored
request (`POST /v1/models/digits/requests`, until its result is stored), three times: a file counts if all three passed
it. Both programs run under a profiler (`sys.setprofile`, in every thread) that notes the file of each call and its
*root*: the coroutine of the task or the callback of the event loop below which the call was made. Roots that are active
while there is no request are background work and are left out, but for those that wait for requests (`WAITING`). The
script fails if such a root is renamed.
"""

import atexit
import json
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType

import httpx

from qinfer.cli import example
from qinfer.queue.embedded import EmbeddedRedis
from qinfer.testing import wait_until
from scripts.features import FOLDERS, ROOT
from scripts.rooms import free_port

PROGRAMS = {"gateway": "qinfer_api", "worker": "qinfer_workers.inference"}
TIMES, WARM_UPS = 3, 100
KEPT_CALLS = 2_000_000
READY_WITHIN_S, STOP_WITHIN_S, IDLE_S = 60.0, 20.0, 6.0
SETTLED_WITHIN_S = 0.5
SOCKETS = {"QinferHttpProtocol.data_received", "RedisConnection.data_received", "RedisConnection._flush"}
WAITING = {"online": {*SOCKETS, "Worker._fetch_loop", "Queue.listen"}, "stored": {*SOCKETS, "Worker._fetch_loop"}}
"""Roots that are active without a request, and on the way of each: they read a socket or wait for an entry."""
LATER = {"ControlStore.add_stats"}
"""Roots that add up many requests, at intervals, and run only after requests."""

Call = tuple[float, str, str]
"""When a function of the project was entered (monotonic), its file, and its root."""
Window = tuple[float, float]


def main() -> None:
    """Measures and prints both lists."""
    with tempfile.TemporaryDirectory(prefix="qinfer-files-") as name:
        windows = _send(Path(name))
        calls = {program: json.loads((Path(name) / f"{program}.json").read_text()) for program in PROGRAMS}
    gone = {*WAITING["online"], *LATER} - {root for each in calls.values() for _, _, root in each}
    if gone:
        sys.exit(f"no root has these names now, so the lists would be wrong; correct WAITING and LATER: {sorted(gone)}")
    for kind, waiting in WAITING.items():
        passed: dict[str, list[str]] = {}
        for program in PROGRAMS:
            idle = {root for _, _, root in _within(calls[program], windows["idle"][0])}
            background = LATER | idle - waiting
            each = [_within(calls[program], window) for window in windows[kind]]
            for file in set.intersection(*({file for _, file, root in one if root not in background} for one in each)):
                passed.setdefault(file, []).append(program)
        lines = {file: len((ROOT / file).read_text().splitlines()) for file in sorted(passed)}
        print(f"{kind} request: {len(lines)} files, {sum(lines.values())} lines")
        print(*(f"{lines[file]:7}  {file} ({', '.join(passed[file])})" for file in lines), "", sep="\n")


def _send(directory: Path) -> dict[str, list[Window]]:
    """Runs both programs and sends requests; returns when the measured ones were under way."""
    example.write(example.Name.digits, directory)
    body = (directory / "digit.json").read_bytes()
    windows: dict[str, list[Window]] = defaultdict(list)
    with EmbeddedRedis(directory / "data") as redis, _running(directory, redis.url) as client:
        online = partial(client.post, "/v2/models/digits/infer", content=body)
        stored = partial(client.post, "/v1/models/digits/requests", content=body)
        _warm_up(online, stored)
        with _timed(windows["idle"]):
            time.sleep(IDLE_S)
        for _ in range(TIMES):
            _warm_up(online, stored)
            with _timed(windows["online"]):
                online()
            _warm_up(stored)
            with _timed(windows["stored"]):
                accepted = stored()
            state = client.get(accepted.headers["location"]).json()["state"]
            assert state == "succeeded", state
    return windows


def _warm_up(*kinds: Callable[[], object]) -> None:
    for send in kinds:
        for _ in range(WARM_UPS):
            send()
    time.sleep(SETTLED_WITHIN_S)


@contextmanager
def _timed(windows: list[Window]) -> Iterator[None]:
    """Notes when a request began, and when the worker must have removed its entry and stored its result."""
    began_s = time.monotonic()
    yield
    time.sleep(SETTLED_WITHIN_S)
    windows.append((began_s, time.monotonic()))


def _within(calls: list[Call], window: Window) -> Iterator[Call]:
    return (call for call in calls if window[0] <= call[0] <= window[1])


@contextmanager
def _running(directory: Path, redis_url: str) -> Iterator[httpx.Client]:
    """Runs a gateway and a worker under the profiler; yields a client of the gateway, once it is ready."""
    port = free_port()
    settings = [f"QINFER_REDIS__URL={redis_url}", f"QINFER_REPOSITORY__PATH={directory / 'models'}"]
    settings += [f"QINFER_HTTP__PORT={port}", "QINFER_GRPC__ENABLED=false", "QINFER_METRICS__PORT=0"]
    logs = {program: directory / f"{program}.log" for program in PROGRAMS}
    processes = []
    try:
        for program, log in logs.items():
            calls = directory / f"{program}.json"
            command = ["env", *settings, sys.executable, "-m", "scripts.files_of_a_request", program, str(calls)]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log.open("wb"), stderr=subprocess.STDOUT))
        hooks = {"response": [httpx.Response.raise_for_status]}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0, event_hooks=hooks) as client:
            wait_until(partial(_is_ready, client), READY_WITHIN_S, "the model is ready")
            yield client
    except BaseException:
        print(*(log.read_text()[-3000:] for log in logs.values() if log.exists()), sep="\n", file=sys.stderr)
        raise
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(STOP_WITHIN_S)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/v2/models/digits/ready").is_success
    except httpx.HTTPError:
        return False


# --- within a program ------------------------------------------------------------------------------------------------


def profile(program: str, path: Path) -> None:
    """Runs a program as `python -m` does, and writes its last calls when it ends."""
    calls: deque[Call] = deque(maxlen=KEPT_CALLS)
    folders = tuple(f"{ROOT / folder}/" for folder in FOLDERS)

    @cache
    def name_of(filename: str) -> str:
        return filename.removeprefix(f"{ROOT}/") if filename.startswith(folders) else ""

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
    if len(sys.argv) == 3:
        profile(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
