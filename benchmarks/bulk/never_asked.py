"""A job on a model that nobody has asked before: how soon both workers are busy, and how long it takes.

The model sleeps a millisecond a row, and the input is one row group. The job is asked for as soon as the bulk worker
has started. The figures are from the model's own account of its executions, and from what a client sees of the job.
The cores are hardly used, so that a shared machine will do.

Run it as `python -m benchmarks.bulk.never_asked`; it prints, and takes about a minute.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import environments, processes
from benchmarks.bulk import sleepy
from benchmarks.bulk.contestants import PROCESSES, RunFailed, serving

WORK = environments.HERE / ".work" / "never_asked"
ROW_S = 1e-3
BUSY_BAR_S = 5.0
"""Seconds from asking for the job until every worker scores rows."""
TIME_BAR = 1.15
"""The job's time, as a multiple of what its rows alone take."""

_POLL_S = 0.25
_NAME = "sleepy"


class Execution(NamedTuple):
    """A batch: the process of the model, when it began, and its rows."""

    process: int
    at_s: float
    rows: int


class Look(NamedTuple):
    """A look at the job: when, the share of its rows that are behind it, and the seconds that are left by its word."""

    at_s: float
    progress: float
    eta_s: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    with processes.alone(WORK):
        source, out, trace = _write_input(rows), WORK / "out", WORK / "trace"
        sleepy.install(WORK / "installed")
        sleepy.write_model(WORK / "models", _NAME, ROW_S, trace)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        with serving(WORK, [_NAME], {}) as qinfer:
            _await_bulk_worker()
            trace.write_text("")  # what it did to warm up
            asked_s = time.time()
            job = qinfer.submit({"model": _NAME, "inputs": [source.as_uri()], "output": {"url": out.as_uri()}})
            looks, ended = _follow(f"{qinfer.url}/v1/jobs/{job['id']}")
        executions = [Execution(int(p), float(s), int(n)) for p, s, n in map(str.split, trace.read_text().splitlines())]
        if ended["state"] != "completed" or pq.read_table(out).num_rows != rows:
            raise RunFailed(f"the job ended as {ended['state']}: {ended['error']}")
    print("\n".join(verdicts(rows, asked_s, executions, looks, ended)))
    return 0


def verdicts(
    rows: int, asked_s: float, executions: Sequence[Execution], looks: Sequence[Look], ended: Mapping[str, Any]
) -> list[str]:
    """Returns what was found, a line each."""
    first_s = {one.process: one.at_s - asked_s for one in reversed(executions)}
    share = {process: sum(one.rows for one in executions if one.process == process) / rows for process in first_s}
    busy_s = max(first_s.values()) if len(first_s) == PROCESSES else float("inf")
    whole_s = datetime.fromisoformat(ended["ended_at"]).timestamp() - asked_s
    ideal_s = rows * ROW_S / PROCESSES
    begun = [look for look in looks if look.progress > 0]
    moves = [begun[0].at_s, *(b.at_s for a, b in pairwise(begun) if b.progress > a.progress)]
    pauses = [b - a for a, b in pairwise(moves)]
    end_s = asked_s + whole_s
    wrong = [abs(look.at_s + look.eta_s - end_s) / whole_s for look in begun if look.eta_s is not None]
    return [
        f"{_verdict(busy_s <= BUSY_BAR_S)}: every worker scores after {busy_s:.1f} s, at most {BUSY_BAR_S} s",
        f"{_verdict(whole_s <= TIME_BAR * ideal_s)}: {whole_s:.1f} s, {whole_s / ideal_s:.2f} x the ideal "
        f"{ideal_s:.1f} s, at most {TIME_BAR} x",
        f"shares of the rows: {', '.join(f'{part:.2f}' for part in share.values())}; {ended['shards']['total']} shards",
        f"progress after {begun[0].at_s - asked_s:.1f} s, then every {np.mean(pauses):.1f} s, "
        f"{max(pauses):.1f} s at most",
        f"the time left was wrong by {np.median(wrong):.0%} of the job's time in the median",
    ]


def _verdict(is_met: object) -> str:
    return "PASS" if is_met else "MISS"


def _await_bulk_worker() -> None:
    """Waits for the bulk worker, which `qinfer up` starts when the models are ready."""
    command = [str(Path(sys.executable).with_name("qinfer")), "status", "--data-dir", str(WORK / "data"), "--json"]
    while not json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["bulk_workers"]:
        time.sleep(_POLL_S)


def _follow(url: str) -> tuple[list[Look], dict[str, Any]]:
    looks = []
    while True:
        job = httpx.get(url, timeout=10).json()
        if job["ended_at"]:
            return looks, job
        looks.append(Look(time.time(), job["progress"], job["eta_s"]))
        time.sleep(_POLL_S)


def _write_input(rows: int) -> Path:
    path = WORK / f"in-{rows}.parquet"
    values = np.random.default_rng(1).uniform(size=4 * rows).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values), 4)})
    pq.write_table(table, path, row_group_size=rows)
    return path


if __name__ == "__main__":
    sys.exit(main())
