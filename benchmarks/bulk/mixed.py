"""Online requests and a bulk job on the same workers: what the one costs the other.

    python -m benchmarks.bulk.mixed          writes its section of RESULTS.md (about 4 minutes)

Both use `mlp`. Online requests come as an open stream at a third of what the server can do: a request's latency runs
from the moment it was due, whether or not the server kept up. Rounds alternate: without the job, with it. The job's
share is judged by its rows per second beside the stream, against those it has alone times the two thirds that are left.
"""

import argparse
import dataclasses
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from benchmarks import environments, load, page, processes
from benchmarks.bodies import BINARY, Body, write_body
from benchmarks.bulk.contestants import Qinfer, RunFailed, serving
from benchmarks.bulk.data import DATA_SETS
from benchmarks.bulk.stream import Latencies, stream
from benchmarks.machine import describe
from benchmarks.models import MODELS

WORK = environments.HERE / ".work" / "mixed"
DATA = dataclasses.replace(DATA_SETS["lists"], name="mixed", group_rows=5000)
"""Small row groups, and parts of one each, so that the count of its rows moves often."""
SHARE = 1 / 3
CONNECTIONS = 64
P99_BAR, JOB_BAR = 2.0, 0.6


def raw_request(body: Body) -> bytes:
    """Returns the request as it goes over the socket."""
    content = body.path.read_bytes()
    headers = {**body.headers, "Host": "127.0.0.1", "Content-Length": str(len(content))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /v2/models/{body.model.name}/infer HTTP/1.1\r\n{lines}\r\n".encode() + content


class Job:
    """A job that is long enough to be under way for a whole measurement."""

    def __init__(self, qinfer: Qinfer, files: Sequence[str], number: int) -> None:
        out = WORK / f"out-{number}"
        shutil.rmtree(out, ignore_errors=True)
        asked: dict[str, object] = {
            "model": DATA.model,
            "inputs": list(files),
            "output": {"url": out.as_uri(), "rows_per_part": DATA.group_rows},
        }
        self._url = f"{qinfer.url}/v1/jobs/{qinfer.submit(asked)['id']}"
        while self._get()["rows"]["done"] == 0:  # the first part
            time.sleep(0.05)
        self._begin = (time.monotonic(), self._get()["rows"]["done"])

    def rows_per_s(self) -> float:
        """Returns what it did since the last call.

        Raises:
            RunFailed: It has ended: more rows are needed to measure.
        """
        job = self._get()
        if job["ended_at"]:
            raise RunFailed(f"the job was {job['state']} before the measurement was over; give it more rows")
        (then_s, before), self._begin = self._begin, (time.monotonic(), job["rows"]["done"])
        return float((self._begin[1] - before) / (self._begin[0] - then_s))

    def cancel(self) -> None:
        """Ends it."""
        httpx.post(f"{self._url}/cancel", timeout=10).raise_for_status()
        while not self._get()["ended_at"]:
            time.sleep(0.05)

    def _get(self) -> dict[str, dict[str, int]]:
        body: dict[str, dict[str, int]] = httpx.get(self._url, timeout=10).json()
        return body


class Round(NamedTuple):
    """One round."""

    alone: Latencies
    beside: Latencies
    job_alone: float
    job_beside: float


def measure(rounds: int, seconds: float, rows: int) -> tuple[float, list[Round]]:
    """Returns the server's capacity in requests per second, and the rounds."""
    body = write_body(MODELS[DATA.model], BINARY, MODELS[DATA.model].example(), WORK)
    files = [path.as_uri() for path in DATA.write(WORK, rows)]
    found = []
    with serving(WORK, [DATA.model], {DATA.model: DATA.batch}) as qinfer:
        url, port = f"{qinfer.url}/v2/models/{DATA.model}/infer", int(qinfer.url.rpartition(":")[2])
        load.run_wrk(url, body, CONNECTIONS, 2)
        capacity = load.run_wrk(url, body, CONNECTIONS, seconds).rate
        rate, request = capacity * SHARE, raw_request(body)
        print(f"capacity {capacity:,.0f} requests/s; the stream has {rate:,.0f}", flush=True)
        for number in range(rounds):
            alone = stream(port, request, rate, seconds)
            job = Job(qinfer, files, number)
            job.rows_per_s()
            time.sleep(seconds)
            job_alone = job.rows_per_s()
            beside = stream(port, request, rate, seconds)
            found.append(Round(alone, beside, job_alone, job.rows_per_s()))
            job.cancel()
            print(found[-1], flush=True)
    return capacity, found


def table(capacity: float, rounds: Sequence[Round]) -> str:
    """Returns the figures and the verdicts as Markdown."""
    alone, beside = (
        [statistics.median(values) for values in zip(*runs, strict=True)]
        for runs in ([one.alone for one in rounds], [one.beside for one in rounds])
    )
    job_alone = statistics.median(one.job_alone for one in rounds)
    job_beside = statistics.median(one.job_beside for one in rounds)
    ratio, share = beside[1] / alone[1], job_beside / (job_alone * (1 - SHARE))
    failed = sum(one.alone.failed + one.beside.failed for one in rounds)
    return "\n".join(
        [
            f"Capacity: {capacity:,.0f} requests/s; the stream has a third of it. {failed} requests failed.",
            "",
            "| | p50 ms | p99 ms | job rows/s |",
            "|---|---:|---:|---:|",
            f"| stream alone | {alone[0]:.1f} | {alone[1]:.1f} | |",
            f"| job alone | | | {job_alone:,.0f} |",
            f"| both | {beside[0]:.1f} | {beside[1]:.1f} | {job_beside:,.0f} |",
            "",
            f"- {'PASS' if ratio <= P99_BAR else 'MISS'}: p99 beside the job is {ratio:.2f} x, at most {P99_BAR}",
            f"- {'PASS' if share >= JOB_BAR else 'MISS'}: the job has {share:.0%} of the idle capacity, at least "
            f"{JOB_BAR:.0%}",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--rows", type=int, default=DATA.rows, help="of the job")
    options = parser.parse_args()
    with processes.alone(WORK):
        text = table(*measure(options.rounds, options.seconds, options.rows))
    print(text)
    if (options.rounds, options.seconds) >= (3, 20.0):
        page.write("mixed", f"Made by `python -m benchmarks.bulk.mixed`. {text}", describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
