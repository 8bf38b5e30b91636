"""The memory of gateway, worker, models and Redis under each attack, several of it at once: bounded, and given back.

`QINFER_TEST_FUZZ_TABLE` names a file that gets the table of all of them, which is printed, too.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qinfer.queue.dead_letters import MAX_BYTES
from tests.fuzz.attacks import ATTACKS
from tests.fuzz.beside import Beside
from tests.fuzz.server import MAX_INPUT_BYTES, MIB, ServerMemory, Sizes, WholeServer, whole_server
from tests.support.fuzzing import within_limits

pytestmark = [pytest.mark.long, within_limits]

AT_ONCE = 5
MORE_BYTES = 4 * MAX_INPUT_BYTES + 64 * MIB
"""The memory that the gateway may take beside that before the attack, with a margin for threads and allocators."""
MODELS_BYTES = 8 * MAX_INPUT_BYTES + 256 * MIB
"""The same for the worker and all models together: a batch, as tensors and as a million strings, and its answers."""
KEPT_BYTES = 96 * MIB
"""The memory that may be left 10 s after an attack: the gateway's beside that at its start, Redis' beside that before:
allocators keep some of what they had."""
LETTERS, REPLIES = "frame in a lane: ", "frame in a reply stream: "
"""Attacks that need access to Redis, against which SECURITY.md promises nothing. What they write counts beside the
bounds of all: frames in a lane become dead letters, of which each model keeps `MAX_BYTES` for a week (`qinfer dlq`),
and a gateway reads the new frames of its reply stream at once, `AT_ONCE` of them and the copy of one."""
UNBOUNDED = ("answers of tiny requests: 100 times the largest body", "shares: stored results")
"""Attacks whose answers the worker holds until Redis has them, and its models in shared memory until they are asked
again: neither is bounded, so that the table alone tells how much it is."""
HEAD = "| attack | gateway MiB | worker | models | Redis | p99 ms | slowest ms |\n|---|---|---|---|---|---|---|\n"


class Rows:
    """The table."""

    def __init__(self) -> None:
        self._rows: list[str] = []

    def add(self, name: str, before: Sizes, peak: Sizes, after: Sizes, beside: Beside) -> None:
        """Adds an attack."""
        sizes = [" → ".join(f"{size / MIB:.0f}" for size in each) for each in zip(before, peak, after, strict=True)]
        p99, slowest = beside.quantile_ms(0.99), beside.quantile_ms(1.0)
        self._rows.append(f"| {name} | {' | '.join(sizes)} | {p99:.0f} | {slowest:.0f} |\n")

    def write(self) -> None:
        """Prints the table, and writes it where it is wanted."""
        text = HEAD + "".join(self._rows)
        sys.stdout.write(text)
        if path := os.environ.get("QINFER_TEST_FUZZ_TABLE"):
            Path(path).write_text(text)


class Attacked:
    """A server that is attacked, and what it had at first."""

    def __init__(self, server: WholeServer) -> None:
        self.server, self.memory, self.rows = server, ServerMemory(server.pid), Rows()
        with Beside(server) as beside:
            beside.more()
        ATTACKS["plain requests, as fast as they are answered"](server)
        self.base = self.memory.now()

    def run(self, name: str) -> None:
        """Attacks, and sees what it cost."""
        memory, server = self.memory, self.server
        before = memory.now()
        memory.forget_peak()
        with Beside(server) as beside, ThreadPoolExecutor(AT_ONCE) as pool:
            beside.more()
            for one in [pool.submit(ATTACKS[name], server) for _ in range(AT_ONCE)]:
                one.result()
        given_back = before._replace(gateway=self.base.gateway)
        peak, after = memory.peak(), memory.settled(given_back, KEPT_BYTES)
        self.rows.add(name, before, peak, after, beside)
        assert beside.wrong == []
        read_bytes = (AT_ONCE + 1) * MAX_INPUT_BYTES + 64 * MIB if name.startswith(REPLIES) else MORE_BYTES
        assert peak.gateway - before.gateway < read_bytes
        assert after.gateway - self.base.gateway < KEPT_BYTES
        if name not in UNBOUNDED:
            assert peak.worker + peak.model - before.worker - before.model < MODELS_BYTES
            letter_bytes = MAX_BYTES if name.startswith(LETTERS) else 0
            assert after.redis - before.redis < KEPT_BYTES + letter_bytes


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with whole_server(tmp_path_factory.mktemp("whole")) as server:
        one = Attacked(server)
        yield one
        one.rows.write()


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_cost_a_bounded_memory_that_is_given_back(attacked: Attacked, name: str) -> None:
    """A plain request of another tenant is answered beside each."""
    attacked.run(name)
