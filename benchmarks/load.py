"""Load: runs wrk with one fixed body over a closed loop of connections, and reads its exact counters.

One wrk thread always: on two cores a second one takes time from the servers without adding load (wrk needs about
3 µs per request). wrk builds the request once when the script defines no `request` function.
"""

import json
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bodies import Body

TIMEOUT_S = 30
"""wrk's own limit for one answer; a request beyond it counts as an error."""

_SCRIPT = """\
local file = assert(io.open({path}, "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
file:close()
{headers}

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\nRESULT {{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"max_us":%d,' ..
    '"errors":{{"connect":%d,"read":%d,"write":%d,"timeout":%d,"status":%d}}}}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), latency.max,
    e.connect, e.read, e.write, e.timeout, e.status))
end
"""


class LoadFailed(Exception):
    """wrk itself did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What one run of wrk counted.

    Attributes:
        requests: Answers received, also refused ones.
        duration_s: Seconds that wrk measured.
        p50_us: Median latency.
        p99_us: 99th percentile of the latency.
        max_us: Longest latency.
        errors: Kind of error (`connect`, `read`, `write`, `timeout`, `status`: not 2xx or 3xx) → count, without zeros.
        client_cpu_s: CPU time of wrk.
    """

    requests: int
    duration_s: float
    p50_us: float
    p99_us: float
    max_us: float
    errors: dict[str, int]
    client_cpu_s: float

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.duration_s if self.duration_s else 0.0


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
    """Writes the Lua script that sends this body, beside it."""
    headers = "\n".join(f"wrk.headers[{json.dumps(k)}] = {json.dumps(v)}" for k, v in body.headers.items())
    path = body.path.with_suffix(body.path.suffix + ".lua")
    path.write_text(_SCRIPT.format(path=json.dumps(str(body.path)), headers=headers))
    return path


def wrk_command(url: str, body: Body, connections: int, seconds: float) -> list[str]:
    """Returns the command line that loads `url`; its output is for `parse`."""
    options = ["-t", "1", "-c", str(connections), "-d", f"{max(1, round(seconds))}s", "--timeout", f"{TIMEOUT_S}s"]
    return [require_wrk(), *options, "-s", str(write_script(body)), url]


def run_wrk(url: str, body: Body, connections: int, seconds: float) -> LoadResult:
    """Loads `url` for `seconds` with `connections` connections that each ask again as soon as they are answered.

    Raises:
        LoadFailed: wrk ended with an error or printed no result.
    """
    before = _child_cpu_s()
    process = subprocess.run(
        wrk_command(url, body, connections, seconds),
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + TIMEOUT_S + 30,
    )
    client_cpu_s = _child_cpu_s() - before
    if process.returncode != 0:
        raise LoadFailed(f"wrk ended with {process.returncode}: {(process.stderr or process.stdout)[-500:]}")
    return parse(process.stdout, client_cpu_s)


def parse(output: str, client_cpu_s: float) -> LoadResult:
    """Reads the line that our script adds to wrk's output.

    Raises:
        LoadFailed: There is no such line.
    """
    for line in output.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            duration_s = found.pop("duration_us") / 1e6
            errors = {kind: count for kind, count in found.pop("errors").items() if count}
            return LoadResult(duration_s=duration_s, errors=errors, client_cpu_s=client_cpu_s, **found)
    raise LoadFailed(f"wrk printed no result: {output[-500:]}")


def _child_cpu_s() -> float:
    """CPU time of the children that ended: between two calls only wrk does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
