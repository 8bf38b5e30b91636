"""A tenant beside a hostile one, attack by attack, and beside a harmless one that has the server compute as much.

`QINFER_TEST_HOSTILE_S` are the seconds of all attacks together, ten minutes by default, and an hour before a release;
`QINFER_TEST_HOSTILE_EACH_S` are those of one attack, an equal share by default. Half of them the attack goes on, and
half the harmless tenant takes its place, in turns, so that both have the same machine. `QINFER_TEST_FUZZ_TABLE` names a
file that gets the table and what explains the slowest requests, after each attack; `QINFER_TEST_HOSTILE` is the
beginning of the names of some attacks.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from qinfer.testing import wait_until
from tests.fuzz.attacks import ATTACKS
from tests.fuzz.beside import Beside
from tests.fuzz.outliers import MOST, SLOW_S
from tests.fuzz.server import ServerMemory, WholeServer, whole_server

SECONDS = float(os.environ.get("QINFER_TEST_HOSTILE_S", "600"))
WORST = 2.0
"""Times the p99 beside the harmless tenant that the p99 beside an attack may be."""
LOOK_S = 0.5
NAMES = [
    "JSON: empty strings, of another shape",
    "JSON: the same, 1000 times smaller by gzip",
    "JSON: as many strings as may be",
    "JSON: long numbers and their answer",
    "gRPC: the same by gzip",
    "gRPC: empty bytes_contents",
    "answers of tiny requests: 100 times the largest body",
    "Arrow: a hundred thousand columns",
    "pipelined requests that are not read",
    "HTTP/2: claims of large messages that drip",
    "HTTP/2: settings",
    "HTTP/2: streams that are reset at once",
    "shares: long polls",
    "shares: stored results",
    "shares: streams that are not read",
    "shares: slots of sequences",
    "shares: a model that calls itself",
    "shares: regions of shared memory",
]
CHOSEN = [name for name in NAMES if name.startswith(os.environ.get("QINFER_TEST_HOSTILE", ""))]
EACH_S = float(os.environ.get("QINFER_TEST_HOSTILE_EACH_S", SECONDS / max(len(CHOSEN), 1)))
TURNS = max(int(EACH_S // 60), 1)
"""How often attack and harmless tenant take turns."""
TURN_S = max(EACH_S / TURNS / 2 - 2.0, 2.0)
HEAD = "| attack | CPUs, harmless | p99 ms | p99 harmless | times | slowest ms, harmless |\n|---|---|---|---|---|---|\n"

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * EACH_S + 300)]


class Used(NamedTuple):
    """The CPUs that were busy, as a part of one: the server's, and the attacker's own."""

    server: float
    attacker: float


class Attacker:
    """A process of the tenant `evil`, at the lowest priority."""

    def __init__(self, server: WholeServer, name: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.attacks", name, str(3 * TURN_S + 60)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._cpu = psutil.Process(self._process.pid)
        self.tell(server.dump())

    def tell(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def cpu_s(self) -> float:
        """Returns the seconds that it has computed."""
        times = self._cpu.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def attacking(server: WholeServer, name: str) -> Iterator[Attacker]:
    """Runs an attacker during the block."""
    attacker = Attacker(server, name)
    try:
        time.sleep(2.0)  # it begins
        yield attacker
    finally:
        attacker.close()


def watched(memory: ServerMemory, attacker: Attacker, like: Used | None = None) -> Used:
    """Looks at what is used for the time of an attack; has the attacker follow what another has used."""
    begin_s, server_s, own_s = time.monotonic(), memory.cpu_s(), attacker.cpu_s()
    pause_s, busy, last_s, before = 0.02, 0.0, begin_s, (server_s, own_s)
    while (now_s := time.monotonic()) - begin_s < TURN_S:
        if like is not None and now_s > last_s:
            server_used, own_used = memory.cpu_s() - before[0], attacker.cpu_s() - before[1]
            pause_s = min(max(pause_s * (1.25 if server_used > like.server * (now_s - last_s) else 0.8), 0.0002), 1.0)
            busy = min(max(busy + like.attacker - own_used / (now_s - last_s), 0.0), 1.0)
            attacker.tell(f"{pause_s} {busy}")
            last_s, before = now_s, (memory.cpu_s(), attacker.cpu_s())
        time.sleep(LOOK_S)
    took_s = time.monotonic() - begin_s
    return Used((memory.cpu_s() - server_s) / took_s, (attacker.cpu_s() - own_s) / took_s)


class Compared(NamedTuple):
    """The latencies of another tenant beside an attack, and beside as much harmless work, and its slowest requests."""

    name: str
    used: list[Used]
    hostile_s: list[float]
    harmless_s: list[float]
    wrong: list[str]
    slowest: list[tuple[float, str]]

    @property
    def times(self) -> float:
        """How many times the p99 beside harmless work the p99 beside the attack is."""
        return float(np.quantile(self.hostile_s, 0.99) / np.quantile(self.harmless_s, 0.99))

    def row(self) -> str:
        """Returns its row of the table."""
        (p99, slowest), (harmless, slowest_harmless) = (
            (np.quantile(each, 0.99) * 1000, max(each) * 1000) for each in (self.hostile_s, self.harmless_s)
        )
        busy = ", ".join(f"{np.mean([sum(one) for one in each]):.1f}" for each in (self.used[::2], self.used[1::2]))
        return (
            f"| {self.name} | {busy} | {p99:.0f} | {harmless:.0f} | {self.times:.2f} "
            f"| {slowest:.0f}, {slowest_harmless:.0f} |\n"
        )


def compare(server: WholeServer, memory: ServerMemory, name: str) -> Compared:
    """Measures beside an attack, and beside as much harmless work, in turns."""
    compared = Compared(name, [], [], [], [], [])
    for _ in range(TURNS):
        with attacking(server, name) as attacker, Beside(server) as hostile:
            used = watched(memory, attacker)
        with attacking(server, "harmless") as attacker, Beside(server) as harmless:
            as_much = watched(memory, attacker, used)
        for whom, beside in ((name, hostile), ("harmless work", harmless)):
            compared.slowest.extend((took_s, f"beside {whom}: {text}") for took_s, text in beside.outliers.told)
        compared.used.extend((used, as_much))
        compared.hostile_s.extend(hostile.latencies_s)
        compared.harmless_s.extend(harmless.latencies_s)
        compared.wrong.extend([*hostile.wrong, *(f"beside harmless work: {each}" for each in harmless.wrong)])
    return compared


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("whole")) as server:
        yield server


class Report:
    """The table of all attacks, and what explains the slowest requests, in a file that has each attack at once."""

    def __init__(self) -> None:
        self._rows: list[str] = []
        self._slowest: list[str] = []

    def add(self, compared: Compared) -> None:
        """Adds an attack."""
        self._rows.append(compared.row())
        self._slowest.extend(f"- {text}\n" for _, text in sorted(compared.slowest, reverse=True)[:MOST])
        if path := os.environ.get("QINFER_TEST_FUZZ_TABLE"):
            Path(path).write_text(self.text())

    def text(self) -> str:
        """Returns the report."""
        slowest = "".join(self._slowest) or "no request\n"
        return f"{HEAD}{''.join(self._rows)}\nRequests of more than {SLOW_S} s:\n\n{slowest}\n"


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    report = Report()
    yield report
    sys.stdout.write(f"\n{report.text()}load {os.getloadavg()}\n")


@pytest.mark.parametrize("name", CHOSEN)
def test_an_attack_costs_others_no_more_than_harmless_work(server: WholeServer, report: Report, name: str) -> None:
    """The other's p99 is at most twice as long, no request of its is refused, and nothing is seen or changed."""
    compared = compare(server, ServerMemory(server.pid), name)
    report.add(compared)

    assert compared.wrong == []
    assert compared.times <= WORST, compared.row()


def test_every_attack_beside_a_tenant_exists() -> None:
    assert set(NAMES) <= set(ATTACKS)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("worker", "worker T"),
        ("gateway", "gateway gives no sign of life"),
        ("Redis", "Redis gives no sign of life"),
    ],
)
def test_a_slow_request_is_explained_by_the_process_that_stands_still(
    server: WholeServer, kind: str, words: str
) -> None:
    stopped = [pid for pid, its in ServerMemory(server.pid).kinds().items() if its == kind]
    with Beside(server) as beside:
        beside.more(3)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: bool(beside.outliers.looks), 10.0, "a look at the server")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        beside.more(3)

    assert words in beside.outliers.told[0][1]
