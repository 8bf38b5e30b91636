"""Load: runs a load generator over a closed loop of connections, and reads its exact counters.

wrk speaks HTTP, h2load gRPC, `replay.py` gRPC with headers that differ, and `callers.py` both, for sequences and
streams. One thread always: on two cores a second
one takes time from the servers without adding load (wrk needs about 3 µs per request). wrk builds the request once when
the script defines no `request` function; of a recording it sends one request after the other.
"""

import json
import math
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import numpy as np

from benchmarks.bodies import GRPC, GRPC_PREFIX_BYTES, Body, grpc_reply
from benchmarks.callers import Calls
from benchmarks.environments import ROOT
from benchmarks.proxied import GRPC_PROXIED, JSON_PROXIED

TIMEOUT_S = 30
"""wrk's own limit for one answer; a request beyond it counts as an error."""

NO_H2LOAD = "h2load is not here; `scripts/tools h2load` fetches it, on Debian: apt-get install nghttp2-client"

_SEND_BODY = """\
local file = assert(io.open({path}, "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
"""

_SEND_RECORDING = """\
local requests, next_one = {}, 0
local file = assert(io.open({path}, "rb"))
for length in function() return file:read("*l") end do
  requests[#requests + 1] = file:read(tonumber(length))
end
file:close()

function request()
  next_one = next_one % #requests + 1
  return requests[next_one]
end
"""

_PRINT_RESULT = """
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\nRESULT {"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"max_us":%d,' ..
    '"errors":{"connect":%d,"read":%d,"write":%d,"timeout":%d,"status":%d}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), latency.max,
    e.connect, e.read, e.write, e.timeout, e.status))
end
"""


class LoadFailed(Exception):
    """The load generator itself did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The counts of one run of a load generator.

    Attributes:
        requests: Answers received, also refused ones; of streams all responses.
        duration_s: Seconds that it measured.
        p50_us: Median latency.
        p99_us: 99th percentile of the latency.
        max_us: Longest latency.
        errors: Kind of error → count, without zeros; wrk's are `connect`, `read`, `write`, `timeout`, and `status`: not
            2xx or 3xx.
        client_cpu_s: CPU time of the load generator.
        late: Answers after the measured time, to what had begun in it.
    """

    requests: int
    duration_s: float
    p50_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    client_cpu_s: float = 0.0
    late: int = 0

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.duration_s if self.duration_s else 0.0


def find_h2load() -> str | None:
    """Returns the path of h2load, of the system or as `scripts/tools` fetches it, or None where there is none."""
    fetched = ROOT / ".venv/tools/h2load/h2load"
    return shutil.which("h2load") or (str(fetched) if fetched.exists() else None)


def require_wrk() -> str:
    """Returns the path of wrk.

    Raises:
        LoadFailed: It is not installed.
    """
    path = shutil.which("wrk")
    if path is None:
        raise LoadFailed("wrk is not installed; on Debian: apt-get install wrk")
    return path


def write_script(body: Body) -> Path:
    """Writes the Lua script that sends this body, or the requests of this recording, beside it."""
    headers = "\n".join(f"wrk.headers[{json.dumps(k)}] = {json.dumps(v)}" for k, v in body.headers.items())
    send = _SEND_RECORDING if body.encoding == JSON_PROXIED else _SEND_BODY + headers
    path = body.path.with_suffix(body.path.suffix + ".lua")
    path.write_text(send.replace("{path}", json.dumps(str(body.path))) + _PRINT_RESULT)
    return path


def wrk_command(url: str, body: Body, connections: int, seconds: float) -> list[str]:
    """Returns the command line that loads `url`; its output is for `parse`."""
    options = ["-t", "1", "-c", str(connections), "-d", f"{max(1, round(seconds))}s", "--timeout", f"{TIMEOUT_S}s"]
    return [require_wrk(), *options, "-s", str(write_script(body)), url]


def run(url: str, body: Body, connections: int, seconds: float, *, streams: int = 1, fresh: bool = False) -> LoadResult:
    """Loads `url` for `seconds`: each of `streams` calls on each connection asks again as soon as it is answered.

    Over HTTP `fresh` asks the server to close the connection after each answer, and connects anew for each request.

    Raises:
        LoadFailed: The load generator is not here, ended with an error, or printed no result.
        WrongAnswer: A call before the load had another answer than OK.
    """
    if body.encoding == GRPC:
        return run_h2load(url, body, connections, seconds, streams=streams)
    if body.encoding == GRPC_PROXIED:
        return run_replay(url, body, seconds)
    if fresh:
        body = replace(body, headers={**body.headers, "Connection": "close"})
    return run_wrk(url, body, connections, seconds)


def run_wrk(url: str, body: Body, connections: int, seconds: float) -> LoadResult:
    """Loads `url` for `seconds` with `connections` connections that each ask again as soon as they are answered.

    Raises:
        LoadFailed: wrk ended with an error or printed no result.
    """
    output, client_cpu_s = _run(wrk_command(url, body, connections, seconds), seconds)
    return parse(output, client_cpu_s)


def run_h2load(url: str, body: Body, connections: int, seconds: float, *, streams: int = 1) -> LoadResult:
    """Loads a gRPC server with one fixed call, `streams` at once on each of the connections.

    h2load sees the status of HTTP only, which is 200 also for a call that failed. But such a reply has no message: the
    bytes of DATA frames tell how many of the replies had one of the length that a call before the load had.

    Raises:
        LoadFailed: h2load is not here, ended with an error, or printed no result.
        WrongAnswer: The call before the load had another answer than OK.
    """
    program = find_h2load()
    if program is None:
        raise LoadFailed(
            "h2load is not here; `scripts/tools h2load` fetches it, on Debian: apt-get install nghttp2-client"
        )
    reply_bytes = GRPC_PREFIX_BYTES + len(grpc_reply(url, body.path.read_bytes()))
    log = body.path.with_suffix(f"{body.path.suffix}.log")
    log.unlink(missing_ok=True)
    headers = [option for name, value in body.headers.items() for option in ("-H", f"{name}: {value}")]
    shape = ["-t", "1", "-c", str(connections), "-m", str(streams), "-D", str(max(1, round(seconds)))]
    command = [program, *shape, *headers, "-d", str(body.path), f"--log-file={log}", url]
    output, client_cpu_s = _run(command, seconds)
    return parse_h2load(output, log.read_text(), reply_bytes, client_cpu_s)


def run_replay(url: str, body: Body, seconds: float) -> LoadResult:
    """Loads a gRPC server with a recording, over as many connections as were recorded.

    Raises:
        LoadFailed: The client ended with an error or printed no result.
        WrongAnswer: The call before the load had another answer than OK.
    """
    reply_bytes = GRPC_PREFIX_BYTES + len(grpc_reply(url, body.samples[0].path.read_bytes()))
    host, port = httpx.URL(url).host, str(httpx.URL(url).port)
    command = [sys.executable, "-m", "benchmarks.replay", host, port, str(body.path), str(seconds), str(reply_bytes)]
    output, client_cpu_s = _run(command, seconds)
    return parse(output, client_cpu_s)


def run_callers(calls: Calls, seconds: float) -> LoadResult:
    """Loads a server by callers of sequences or streams, whose responses are counted.

    Raises:
        LoadFailed: The client ended with an error or printed no result.
    """
    command = [sys.executable, "-m", "benchmarks.callers", msgspec.json.encode(calls).decode(), str(seconds)]
    output, client_cpu_s = _run(command, seconds)
    return parse(output, client_cpu_s)


def _run(command: Sequence[str], seconds: float) -> tuple[str, float]:
    """Runs a load generator and returns what it printed, and its CPU time in seconds."""
    before = _child_cpu_s()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=seconds + TIMEOUT_S + 30, cwd=ROOT
    )
    if done.returncode != 0:
        raise LoadFailed(f"{Path(command[0]).name} ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout, _child_cpu_s() - before


def parse(output: str, client_cpu_s: float) -> LoadResult:
    """Reads the line that our script adds to wrk's output, and `replay.py` prints.

    Raises:
        LoadFailed: There is no such line.
    """
    for line in output.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            duration_s = found.pop("duration_us") / 1e6
            errors = {kind: count for kind, count in found.pop("errors").items() if count}
            return LoadResult(duration_s=duration_s, errors=errors, **{"client_cpu_s": client_cpu_s, **found})
    raise LoadFailed(f"the load generator printed no result: {output[-500:]}")


def parse_h2load(output: str, log: str, reply_bytes: int, client_cpu_s: float) -> LoadResult:
    """Reads the counters that h2load prints, and the latencies of its log.

    Args:
        output: What it printed.
        log: A line for each reply: its start, the status of HTTP, its microseconds.
        reply_bytes: Bytes of DATA frames in a good reply.
        client_cpu_s: CPU time of h2load.

    Raises:
        LoadFailed: The output has no result.
    """
    rate = re.search(r"finished in \S+, ([\d.]+) req/s", output)
    counts = re.search(r"(\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", output)
    data = re.search(r"\((\d+)\) data", output)
    latencies = np.array([line.rsplit("\t", 1)[1] for line in log.splitlines()], np.float64)
    if not (rate and counts and data and len(latencies)):
        raise LoadFailed(f"h2load printed no result: {output[-500:]}")
    done, succeeded, _, errored, timeout = map(int, counts.groups())
    kinds = {
        "status": done - succeeded,
        "errored": errored,
        "timeout": timeout,
        # Replies that came in part when the time was over add bytes, so that this is a lower bound.
        "without message": math.ceil(max(0, succeeded * reply_bytes - int(data[1])) / reply_bytes),
    }
    return LoadResult(
        requests=done,
        duration_s=done / float(rate[1]) if float(rate[1]) else 0.0,
        p50_us=float(np.percentile(latencies, 50)),
        p99_us=float(np.percentile(latencies, 99)),
        max_us=float(latencies.max()),
        errors={kind: count for kind, count in kinds.items() if count},
        client_cpu_s=client_cpu_s,
    )


def _child_cpu_s() -> float:
    """CPU time of the children that ended: between two calls only wrk does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
