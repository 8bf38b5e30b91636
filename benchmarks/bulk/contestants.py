"""Who scores the data sets: qinfer's own workers, the loop one would write by hand, Ray Data; how each is run once."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import psutil

from benchmarks import environments, processes
from benchmarks.bulk.data import DataSet
from benchmarks.models import MODELS, THREADS, write_repository

PROCESSES = 2
"""Processes that score, for every contestant."""

RUN_WITHIN_S = 1800.0


class RunFailed(Exception):
    """A contestant did not end well; the message has the end of what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run took.

    Attributes:
        seconds: From the first to the last row, writing included.
        startup_s: Before that: from asking for the job to its first row; of qinfer to the first row that was scored.
        cpu_s: CPU seconds of all its processes in that time; 0 = not measured.
        memory_bytes: The most memory that one of the scoring processes held; 0 = not measured.
    """

    seconds: float
    startup_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be scored.

    Attributes:
        data: The data set.
        model_file: The ONNX file.
        files: The input, in order.
        out: An empty directory for the output.
        batch: Rows of a batch.
    """

    data: DataSet
    model_file: Path
    files: Sequence[Path]
    out: Path
    batch: int


Contestant = Callable[[Task], Run]


def hand_loop(task: Task) -> Run:
    """Runs the hand-written loop, in this project's environment."""
    return _script(sys.executable, "hand_loop/loop.py", task, "--processes", str(PROCESSES))


def ray_data(task: Task) -> Run:
    """Runs Ray Data with two actors, in an environment of its own."""
    return _script(str(environments.ensure("ray_data")), "ray_data/score.py", task)


def _script(python: str, script: str, task: Task, *more: str) -> Run:
    command = [python, str(environments.HERE / "peers" / script), *more]
    command += ["--model", str(task.model_file), "--out", str(task.out), "--batch", str(task.batch)]
    command += ["--columns", ",".join(task.data.columns), *map(str, task.files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_WITHIN_S)
    if done.returncode:
        raise RunFailed(f"{script} ended with {done.returncode}: {done.stderr[-1500:]}")
    return Run(**json.loads(done.stdout.strip().splitlines()[-1]))


class Qinfer:
    """A `qinfer up` with two workers that stays for all runs, as it would in production."""

    def __init__(self, url: str, root: psutil.Popen, spool: Path) -> None:
        self.url = url
        self._root = root
        self._spool = spool

    def __call__(self, task: Task) -> Run:
        """Runs a job; its output's rows are counted by who compares."""
        workers = self._workers()
        cpu_s = _cpu_s(workers)
        asked: dict[str, object] = {
            "model": task.data.model,
            "inputs": [path.as_uri() for path in task.files],
            "columns": {"x": list(task.data.columns) if len(task.data.columns) > 1 else task.data.columns[0]},
            "output": {"url": task.out.as_uri(), "compression": "snappy"},
        }
        asked_s = time.time()
        job = self.submit(asked)
        first_s = self._first_row(asked_s)
        peak, job = self._follow(job["id"], workers)
        if job["state"] != "completed":
            raise RunFailed(f"the job ended as {job['state']}: {job['error']}")
        began_s = datetime.fromisoformat(job["started_at"]).timestamp()
        ended_s = max(path.stat().st_mtime for path in task.out.iterdir() if not path.name.startswith("_"))
        used_s = _cpu_s(workers) - cpu_s
        return Run(seconds=ended_s - began_s, startup_s=first_s - asked_s, cpu_s=used_s, memory_bytes=peak)

    def submit(self, asked: dict[str, object]) -> dict[str, str]:
        """Creates a job and returns what the server says of it."""
        reply = httpx.post(f"{self.url}/v1/jobs", json=asked, timeout=60)
        if reply.status_code != 201:
            raise RunFailed(f"the job was refused: {reply.status_code} {reply.text}")
        created: dict[str, str] = reply.json()
        return created

    def _first_row(self, asked_s: float) -> float:
        """Waits for the part that is begun when the first rows are scored; returns when that was, at the latest."""
        while time.time() < asked_s + RUN_WITHIN_S:
            if any(self._spool.iterdir()):
                return time.time()
            time.sleep(0.005)
        raise RunFailed("the job scored nothing")

    def _follow(self, job_id: str, workers: Sequence[psutil.Process]) -> tuple[int, dict[str, str]]:
        peak, give_up_at = 0, time.monotonic() + RUN_WITHIN_S
        while time.monotonic() < give_up_at:
            job = httpx.get(f"{self.url}/v1/jobs/{job_id}", timeout=10).json()
            peak = max(peak, *(worker.memory_info().rss for worker in workers))
            if job["ended_at"]:
                return peak, job
            time.sleep(0.2)
        raise RunFailed(f"the job did not end within {RUN_WITHIN_S:.0f} s")

    def _workers(self) -> list[psutil.Process]:
        found = [p for p in processes.family([self._root]) if "qinfer_workers.inference" in " ".join(p.cmdline())]
        return [process for process in found if process.parent() == self._root]


def _cpu_s(found: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in found))


@contextlib.contextmanager
def serving(directory: Path, models: Sequence[str], batches: dict[str, int]) -> Iterator[Qinfer]:
    """Starts `qinfer up` with models, and stops it whatever happens.

    Args:
        directory: Where it may read and write; `models` in it is the repository.
        models: What is to be ready.
        batches: Batch sizes of those that are to be written; the others are there.
    """
    repository, port = directory / "models", processes.free_port()
    for name, batch in batches.items():
        write_repository(MODELS[name], repository)
        config = repository / name / "config.pbtxt"
        text = config.read_text().replace("max_batch_size: 64", f"max_batch_size: {batch}")
        config.write_text(text)
    shutil.rmtree(directory / "data", ignore_errors=True)
    command = [str(Path(sys.executable).with_name("qinfer")), "up", "--model-repository", str(repository)]
    command += ["--data-dir", str(directory / "data"), "--workers", str(PROCESSES), "--http-port", str(port)]
    command += ["--grpc-port", "0", "--metrics-port", "0", "--allow-store", directory.as_uri()]
    spool = directory / "spool"
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}
    env["QINFER_BULK__SPOOL_DIR"] = str(spool)
    root = processes.start(command, log=directory / "log", env=env, cwd=environments.ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, models, directory / "log")
        yield Qinfer(url, root, spool)
    finally:
        processes.stop([root])


def _wait_until_ready(url: str, models: Sequence[str], log: Path) -> None:
    give_up_at = time.monotonic() + 60
    while time.monotonic() < give_up_at:
        with contextlib.suppress(httpx.HTTPError):
            if all(httpx.get(f"{url}/v2/models/{name}/ready").status_code == 200 for name in models):
                return
        time.sleep(0.1)
    raise RunFailed(f"qinfer did not come up; its log ends:\n{log.read_text(errors='replace')[-2000:]}")


assert THREADS == 1, "the peers' scripts have one thread too"
