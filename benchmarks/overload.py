"""Goodput under overload: `python -m benchmarks.overload` (6 minutes; writes RESULTS.md; `--help` for parts of it).

A model of 4 ms and 0.5 ms a row, in batches of 16, is offered more than it can do, in qinfer and, where it is here, in
Triton, by turns: an open loop sends each request when it is due, from a process of its own. Good is a result that came
in time: within its queue timeout, the time of its batch, and `WAY_S`. The model sleeps, so that the cores are left to
the servers and the client.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks import environments, page, processes
from benchmarks.bulk.stream import Answer, offer
from benchmarks.machine import describe
from benchmarks.servers import KINDS, START_WAIT_S, Launch, ServerFailed, triton_command, why_not
from qinfer.testing import wait_until

CAPACITY = 1150.0
"""Requests a second in full batches, with 2 ms between two of them: 1333 without."""
BATCH, BASE_S, ROW_S = 16, 0.004, 0.0005
WAY_S = 0.1
"""Time of a good answer beside its queue timeout and batch: the way there and back, a wait for the running batch."""
RATES = (1.2, 1.7, 3.0)
SECONDS = 15.0
WARM_UP_S = 2.0
CONNECTIONS = 2000
PATIENCE_S = 3.0
"""Triton leaves the last requests that it rejects without an answer until others come."""
GOODPUT_BAR = 0.95
"""Least share of the capacity that counts as good."""
NOISE = 0.98
"""Goodput of no less than this share of Triton's counts as no less."""
WORK = environments.HERE / ".work" / "overload"

_MODEL = """
import os
import sys
import time

# Triton starts its interpreter isolated, so that PYTHONPATH says nothing to it.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        time.sleep(BASE_S + ROW_S * sum(len(array) for array in arrays))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in arrays]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of the requests that are sent in turn.

    Attributes:
        parameters: Its request parameters.
        queue_timeout_s: How long it may wait.
    """

    parameters: dict[str, int]
    queue_timeout_s: float

    @property
    def deadline_s(self) -> float:
        """The longest latency of a good answer."""
        return self.queue_timeout_s + BASE_S + ROW_S * BATCH + WAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model's policy, and what is asked of it.

    Attributes:
        name: Its name, the model's too.
        batching: The contents of `dynamic_batching`.
        kinds: The requests, sent in turn.
        base_s: What a batch takes, and besides
        row_s: each of its rows.
    """

    name: str
    batching: str
    kinds: Sequence[Kind]
    base_s: float = BASE_S
    row_s: float = ROW_S


def _policy(timeout_ms: int, *, own: bool = False) -> str:
    allowed = " allow_timeout_override: true" if own else ""
    return f"timeout_action: REJECT default_timeout_microseconds: {timeout_ms * 1000}{allowed}"


CASES = {
    case.name: case
    for case in (
        Case(
            name="queue",
            batching=f"default_queue_policy {{ {_policy(250)} }}",
            kinds=(Kind(parameters={}, queue_timeout_s=0.25),),
        ),
        Case(
            name="own",
            batching=f"default_queue_policy {{ {_policy(1000, own=True)} }}",
            kinds=tuple(
                Kind(parameters={"timeout": ms * 1000}, queue_timeout_s=ms / 1000) for ms in (100, 250, 500, 250)
            ),
        ),
        Case(
            name="levels",
            batching=f"priority_levels: 2 default_priority_level: 2 default_queue_policy {{ {_policy(250)} }}",
            kinds=tuple(Kind(parameters={"priority": level}, queue_timeout_s=0.25) for level in (1, 2, 2, 2)),
        ),
    )
}


def write_repository(root: Path, cases: Iterable[Case]) -> None:
    """Writes one model for each case."""
    for case in cases:
        path = root / case.name / "1" / "model.py"
        path.parent.mkdir(parents=True)
        path.write_text(_MODEL.replace("BASE_S", str(case.base_s)).replace("ROW_S", str(case.row_s)))
        tensors = "".join(
            f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }}\n'
            for side, name in (("input", "x"), ("output", "y"))
        )
        config = f'backend: "python"\nmax_batch_size: {BATCH}\n{tensors}dynamic_batching {{ {case.batching} }}\n'
        (root / case.name / "config.pbtxt").write_text(config)


def raw_request(case: Case, kind: Kind, key: str = "") -> bytes:
    """Returns a request of one row as it goes over the socket, with an API key where there is one."""
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}
    body = json.dumps({"inputs": [tensor], "parameters": kind.parameters}).encode()
    head = f"POST /v2/models/{case.name}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"X-API-Key: {key}\r\n" if key else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs, with one model for each case."""

    name: str
    port: int
    root: psutil.Popen

    def usage(self) -> processes.Usage:
        """Returns CPU time and memory of its processes by role."""
        return processes.usage([self.root], (*KINDS[self.name].roles, ("python_host", "model")))


@contextmanager
def running(name: str, repository: Path, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Starts a server, waits until it is ready, and stops it whatever happens.

    Args:
        name: Which.
        repository: Its models.
        settings: Variables for it.

    Raises:
        ServerFailed: It is not ready in time.
    """
    port, directory = processes.free_port(), WORK / name
    directory.mkdir()
    launch = Launch(
        model="", model_file=WORK, repository=repository, directory=directory, port=port,
        grpc_port=processes.free_port(),
    )  # fmt: skip
    command = triton_command(launch, repository) if name == "triton" else KINDS[name].commands(launch)[0]
    env = {key: value for key, value in os.environ.items() if not key.startswith("QINFER_")} | dict(command.env)
    env |= settings or {}
    env |= {"QINFER_REPOSITORY__STRICT_READINESS": "true"}  # it is measured when every model is loaded
    root = processes.start(command.argv, log=directory / "log", env=env, cwd=environments.ROOT)
    try:
        _wait_until_ready(port, directory / "log")
        yield Server(name=name, port=port, root=root)
    finally:
        processes.stop([root])


def _wait_until_ready(port: int, log: Path) -> None:
    def is_ready() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
        return False

    try:
        wait_until(is_ready, START_WAIT_S)
    except TimeoutError:
        raise ServerFailed(f"the server is not ready after {START_WAIT_S:g} s; its log is {log}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case at one rate on one server.

    Attributes:
        server: Its name.
        case: What was asked.
        times: The rate, in capacities.
        answers: All answers.
        seconds: How long requests were sent.
        cores: Cores that each role took, the client among them.
        memory_mib: Resident memory of all the server's processes before and after.
    """

    server: str
    case: Case
    times: float
    answers: Sequence[Answer]
    seconds: float
    cores: dict[str, float]
    memory_mib: tuple[float, float]

    @property
    def good(self) -> list[Answer]:
        """The results that came in time."""
        kinds = self.case.kinds
        return [a for a in self.answers if a.status == 200 and a.latency_s <= kinds[a.kind].deadline_s]

    @property
    def goodput(self) -> float:
        """Good answers a second."""
        return len(self.good) / self.seconds

    @property
    def late(self) -> int:
        """The number of results that came too late."""
        return sum(answer.status == 200 for answer in self.answers) - len(self.good)

    def row(self) -> str:
        """Returns the figures as a row of the table."""
        good, kinds = self.good, range(len(self.case.kinds))
        shares = (
            sum(answer.kind == kind for answer in good) / sum(answer.kind == kind for answer in self.answers)
            for kind in kinds
        )
        refused = [answer.latency_s for answer in self.answers if answer.status != 200]
        cells = (
            self.case.name,
            f"{self.times:g} x",
            self.server,
            f"{self.goodput:,.0f}",
            f"{self.goodput / CAPACITY:.2f}",
            " ".join(f"{share:.0%}" for share in shares),
            f"{self.late}",
            _percentiles([answer.latency_s for answer in good]),
            _percentiles(refused),
            " ".join(f"{role} {used:.2f}" for role, used in self.cores.items() if used >= 0.005),
            _percentiles([answer.lag_s for answer in self.answers]),
            f"{self.memory_mib[0]:.0f} → {self.memory_mib[1]:.0f}",
        )
        return f"| {' | '.join(cells)} |"


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return " / ".join(f"{value:.0f}" for value in np.percentile(np.array(seconds) * 1000, [50, 99]))


HEAD = (
    "| case | offered | server | good/s | of capacity | good by kind | late | good after ms p50 / p99 | "
    "refused after ms p50 / p99 | cores | sent late ms p50 / p99 | MiB |\n" + "|---" * 12 + "|"
)


def measure(server: Server, case: Case, times: float, seconds: float) -> Measured:
    """Offers a case to a server."""
    requests = [raw_request(case, kind) for kind in case.kinds]
    before, mine_s = server.usage(), time.process_time()
    answers = offer(server.port, requests, times * CAPACITY, seconds, CONNECTIONS, PATIENCE_S)
    after, mine_s = server.usage(), time.process_time() - mine_s
    cores = {role: used / seconds for role, used in {**after.cpu_since(before), "client": mine_s}.items()}
    memory_mib = tuple(sum(usage.rss_bytes.values()) / 2**20 for usage in (before, after))
    return Measured(
        server=server.name, case=case, times=times, answers=answers, seconds=seconds, cores=cores,
        memory_mib=(memory_mib[0], memory_mib[1]),
    )  # fmt: skip


def verdicts(found: Sequence[Measured]) -> list[str]:
    """Returns what is held and what is missed, one line each."""
    theirs = {(one.case.name, one.times): one.goodput for one in found if one.server == "triton"}
    lines = []
    for one in found:
        if one.server != "qinfer":
            continue
        share, triton = one.goodput / CAPACITY, theirs.get((one.case.name, one.times))
        beats = triton is None or one.goodput >= NOISE * triton
        fine = share >= GOODPUT_BAR and beats and not one.late
        beside = "" if triton is None else f"; {one.goodput / triton:.2f} x Triton's, at least {NOISE}"
        lines.append(
            f"- {'PASS' if fine else 'MISS'}: {one.case.name} at {one.times:g} x: {share:.2f} of the capacity, "
            f"at least {GOODPUT_BAR}{beside}; {one.late} late"
        )
    return lines


def main() -> int:
    """Measures the cases and prints a table; returns 1 where something is missed and `--check` is given."""
    parser = argparse.ArgumentParser(description="Goodput under overload.")
    parser.add_argument("--cases", default=",".join(CASES), help="of them, separated by commas")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="times the capacity")
    parser.add_argument("--servers", default="qinfer,triton")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--check", action="store_true", help="a missed bar is the exit code")
    options = parser.parse_args()
    names, cases = options.servers.split(","), [CASES[name] for name in options.cases.split(",")]
    found: list[Measured] = []
    with processes.alone(WORK.parent), ExitStack() as stack:
        shutil.rmtree(WORK, ignore_errors=True)
        write_repository(WORK / "repository", CASES.values())
        for reason in filter(None, map(why_not, names)):
            print(reason, file=sys.stderr)
        servers = [stack.enter_context(running(name, WORK / "repository")) for name in names if not why_not(name)]
        print(HEAD, flush=True)
        for case in cases:
            for server in servers:
                measure(server, case, 0.8, WARM_UP_S)
            for times in map(float, options.rates.split(",")):
                for server in servers:
                    found.append(measure(server, case, times, options.seconds))
                    print(found[-1].row(), flush=True)
    lines = verdicts(found)
    print("\n".join(lines))
    if len(found) == len(CASES) * len(RATES) * 2 and options.seconds >= SECONDS:
        table = "\n".join((HEAD, *(one.row() for one in found), "", *lines, ""))
        page.write("overload", f"Made by `python -m benchmarks.overload`.\n\n{table}", describe())
    return int(options.check and any("MISS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
