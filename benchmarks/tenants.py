"""Two tenants of one model: `python -m benchmarks.tenants` (1 minute; `--help` for the length of a round).

The model of `overload` takes 4 ms and 0.5 ms a row, in batches of 16. A *light* tenant asks it alone, and then beside a
*heavy* one, which asks 50 times as often; together they offer twice what the model can do. The heavy tenant has a
process of its own. What it takes a tenant alone is measured first and last, for the machine may change meanwhile.
"""

import argparse
import multiprocessing
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import processes
from benchmarks.bulk.stream import Answer, offer
from benchmarks.overload import CAPACITY, WORK, Case, Kind, Server, raw_request, running, write_repository
from qinfer.core.api_keys import Scope, add_key

OFFERED = 2.0
"""Times the capacity."""
HEAVIER = 50
CONNECTIONS = {"light": 64, "heavy": 1500}
WORST_P99 = 2.0
"""Times the p99 alone that the light tenant's may be."""
LEAST_CAPACITY = 0.97
PATIENCE_S = 5.0
PLAIN = Case(name="plain", batching="", kinds=(Kind(parameters={}, queue_timeout_s=0.0),))


class Seen(NamedTuple):
    """What came of the requests of a tenant."""

    p50_ms: float
    p99_ms: float
    good_rps: float
    refused: int

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> "Seen":
        """Adds up answers."""
        good = [answer.latency_s * 1000 for answer in answers if answer.status == 200]
        p50, p99 = np.percentile(np.array(good), [50, 99]) if good else (0.0, 0.0)
        return cls(float(p50), float(p99), len(good) / seconds, len(answers) - len(good))

    def row(self, name: str) -> str:
        """Returns it as a row of the table."""
        return f"| {name} | {self.p50_ms:.1f} | {self.p99_ms:.1f} | {self.good_rps:,.0f} | {self.refused} |"


def ask(port: int, key: str, tenant: str, rate: float, seconds: float) -> list[Answer]:
    """Sends the requests of a tenant."""
    request = raw_request(PLAIN, PLAIN.kinds[0], key)
    return offer(port, [request], rate, seconds, CONNECTIONS[tenant], PATIENCE_S)


def beside(server: Server, keys: dict[str, str], light_rps: float, seconds: float) -> dict[str, Sequence[Answer]]:
    """Sends the requests of both tenants at once; the light one begins when the heavy one has filled the queue."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        words = (server.port, keys["heavy"], "heavy", HEAVIER * light_rps, seconds + 2.0)
        heavy = pool.apply_async(ask, words)
        ask(server.port, keys["light"], "light", light_rps, 1.0)
        light = ask(server.port, keys["light"], "light", light_rps, seconds)
        return {"light": light, "heavy": heavy.get()}


def main() -> int:
    """Measures and prints a table; returns 1 where something is missed and `--check` is given."""
    parser = argparse.ArgumentParser(description="Two tenants of one model.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--check", action="store_true", help="a missed bar is the exit code")
    options = parser.parse_args()
    light_rps, seconds = OFFERED * CAPACITY / (HEAVIER + 1), options.seconds
    with processes.alone(WORK.parent):
        shutil.rmtree(WORK, ignore_errors=True)
        write_repository(WORK / "repository", [PLAIN])
        file = WORK / "keys.json"
        keys = {tenant: add_key(file, tenant, (Scope.INFER,), tenant)[1] for tenant in CONNECTIONS}
        settings = {"QINFER_AUTH__MODE": "keys", "QINFER_AUTH__KEYS_FILE": str(file)}
        with running("qinfer", WORK / "repository", settings) as server:
            ask(server.port, keys["heavy"], "heavy", 0.8 * CAPACITY, 2.0)
            most = ask(server.port, keys["heavy"], "heavy", OFFERED * CAPACITY, seconds)
            alone = ask(server.port, keys["light"], "light", light_rps, seconds)
            both = beside(server, keys, light_rps, seconds)
            again = ask(server.port, keys["light"], "light", light_rps, seconds)
    seen = {
        "heavy alone": Seen.of(most, seconds),
        "light alone": Seen.of(alone, seconds),
        "light beside heavy": Seen.of(both["light"], seconds),
        "heavy beside light": Seen.of(both["heavy"], seconds + 2.0),
        "light alone again": Seen.of(again, seconds),
    }
    print("| tenant | p50 ms | p99 ms | good/s | not answered in time |\n|---|---|---|---|---|")
    print("\n".join(one.row(name) for name, one in seen.items()))
    slower = seen["light beside heavy"].p99_ms / Seen.of([*alone, *again], seconds).p99_ms
    share = (seen["light beside heavy"].good_rps + seen["heavy beside light"].good_rps) / seen["heavy alone"].good_rps
    bars = [
        (slower <= WORST_P99, f"the light tenant's p99 is {slower:.2f} x that alone, at most {WORST_P99:g}"),
        (share >= LEAST_CAPACITY, f"both have {share:.2f} of what one has, at least {LEAST_CAPACITY}"),
    ]
    print("\n".join(f"- {'PASS' if fine else 'MISS'}: {text}" for fine, text in bars))
    return int(options.check and not all(fine for fine, _ in bars))


if __name__ == "__main__":
    sys.exit(main())
