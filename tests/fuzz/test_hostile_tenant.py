"""A tenant beside a hostile one, attack by attack, and beside a harmless one that has the server compute as much.

`QINFER_TEST_HOSTILE_S` are the seconds of all attacks together, ten minutes by default, and an hour before a release;
each attack has its share twice: while it goes on, and while the harmless tenant takes its place.
`QINFER_TEST_FUZZ_TABLE` names a file that gets the table, `QINFER_TEST_HOSTILE` the beginning of the names of some.
"""

import json
import os
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

from tests.fuzz.attacks import ATTACKS
from tests.fuzz.beside import Beside
from tests.fuzz.server import ServerMemory, WholeServer, whole_server

SECONDS = float(os.environ.get("QINFER_TEST_HOSTILE_S", "600"))
WORST = 2.0
"""Times the p99 beside the harmless tenant that the p99 beside the hostile one may be."""
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
EACH_S = max(SECONDS / len(CHOSEN) / 2 - 1.0, 2.0)
HEAD = "| attack | CPUs, harmless | p99 ms | p99 harmless | slowest ms, harmless |\n|---|---|---|---|---|\n"

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SECONDS + 300)]


class Used(NamedTuple):
    """The CPUs that were busy, as a part of one: the server's, and the attacker's own."""

    server: float
    attacker: float


class Attacker:
    """A process of the tenant `evil`, at the lowest priority."""

    def __init__(self, server: WholeServer, name: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.attacks", name, str(3 * EACH_S + 60)]
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
    while (now_s := time.monotonic()) - begin_s < EACH_S:
        if like is not None and now_s > last_s:
            server_used, own_used = memory.cpu_s() - before[0], attacker.cpu_s() - before[1]
            pause_s = min(max(pause_s * (1.25 if server_used > like.server * (now_s - last_s) else 0.8), 0.0002), 1.0)
            busy = min(max(busy + like.attacker - own_used / (now_s - last_s), 0.0), 1.0)
            attacker.tell(f"{pause_s} {busy}")
            last_s, before = now_s, (memory.cpu_s(), attacker.cpu_s())
        time.sleep(LOOK_S)
    took_s = time.monotonic() - begin_s
    return Used((memory.cpu_s() - server_s) / took_s, (attacker.cpu_s() - own_s) / took_s)


def both(server: WholeServer, memory: ServerMemory, name: str) -> tuple[Used, Beside, Used, Beside]:
    """Measures beside an attack, and beside as much harmless work."""
    with attacking(server, name) as attacker, Beside(server) as hostile:
        used = watched(memory, attacker)
    with attacking(server, "harmless") as attacker:
        watched_like = used
        with Beside(server) as harmless:
            as_much = watched(memory, attacker, watched_like)
    return used, hostile, as_much, harmless


def test_a_hostile_tenant_costs_others_no_more_than_a_harmless_one(tmp_path: Path) -> None:
    """The other's p99 is at most twice as long, no request of its is refused, and nothing is seen or changed."""
    assert set(NAMES) <= set(ATTACKS)
    table, wrong, all_hostile, all_harmless = HEAD, list[str](), list[float](), list[float]()
    with whole_server(tmp_path) as server:
        memory = ServerMemory(server.pid)
        for name in CHOSEN:
            used, hostile, as_much, harmless = both(server, memory, name)
            all_hostile += hostile.latencies_s
            all_harmless += harmless.latencies_s
            wrong += [f"{name}: {each}" for each in hostile.wrong] + [f"harmless: {each}" for each in harmless.wrong]
            busy = f"{sum(used):.1f}, {sum(as_much):.1f}"
            row = f"| {name} | {busy} | {hostile.quantile_ms(0.99):.0f} | {harmless.quantile_ms(0.99):.0f} |"
            table += f"{row} {hostile.quantile_ms(1.0):.0f}, {harmless.quantile_ms(1.0):.0f} |\n"
            sys.stdout.write(table.splitlines()[-1] + "\n")
    p99, p99_harmless = (float(np.quantile(each, 0.99)) * 1000 for each in (all_hostile, all_harmless))
    table += f"| all | | {p99:.0f} | {p99_harmless:.0f} | |\n"
    sys.stdout.write(f"{table}load {json.dumps(os.getloadavg())}\n")
    if path := os.environ.get("QINFER_TEST_FUZZ_TABLE"):
        Path(path).write_text(table)
    assert wrong == []
    assert p99 <= WORST * p99_harmless
