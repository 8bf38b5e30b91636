"""Two tenants of one model: `python -m benchmarks.tenants` (6 minutes; `--help` for the length of a round).

The model takes 10 ms and 0.1 ms a row, in batches of 16: a full batch takes hardly longer than one request, else none
could be as fast beside others as alone, however they are scheduled. A *light* tenant asks it alone, and then beside a
*heavy* one, which asks 50 times as often; together they offer twice what the model can do. The heavy tenant has a
process of its own. What is compared is measured by turns, for the machine may change meanwhile.
"""

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import numpy as np

from benchmarks import processes
from benchmarks.bulk.stream import Answer, offer
from benchmarks.overload import BATCH, WORK, Case, Kind, Server, raw_request, running, write_repository
from qinfer.core.api_keys import Scope, add_key

OFFERED = 2.0
"""Times the capacity."""
HEAVIER = 50
CONNECTIONS = {"light": 64, "heavy": 1500}
WORST_P99 = 2.0
"""Times the p99 alone that the light tenant's may be."""
LEAST_CAPACITY = 0.97
PATIENCE_S = 5.0
BASE_S, ROW_S, GAP_S = 0.010, 0.0001, 0.002
CAPACITY = BATCH / (BASE_S + BATCH * ROW_S + GAP_S)
"""Requests a second in full batches, with 2 ms between two of them."""
PLAIN = Case(name="plain", batching="", kinds=(Kind(parameters={}, queue_timeout_s=0.0),), base_s=BASE_S, row_s=ROW_S)


def ask(port: int, key: str, tenant: str, rate: float, seconds: float) -> list[Answer]:
    """Sends the requests of a tenant."""
    request = raw_request(PLAIN, PLAIN.kinds[0], key)
    return offer(port, [request], rate, seconds, CONNECTIONS[tenant], PATIENCE_S)


def executed(server: Server, key: str) -> int:
    """Returns how many requests the model has executed so far."""
    reply = httpx.get(f"http://127.0.0.1:{server.port}/v2/models/{PLAIN.name}/stats", headers={"X-API-Key": key})
    return int(reply.json()["model_stats"][0]["inference_count"])


class Flooded(NamedTuple):
    """While the heavy tenant sends more than the model can do: how much is executed, and the other's answers."""

    executed_rps: float
    light: Sequence[Answer]


def flooded(server: Server, keys: dict[str, str], light_rps: float, seconds: float, *, alone: bool) -> Flooded:
    """Measures while the heavy tenant floods the model, after two seconds in which it fills the queue."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        words = (server.port, keys["heavy"], "heavy", HEAVIER * light_rps, seconds + 4.0)
        heavy = pool.apply_async(ask, words)
        time.sleep(3.0)
        before, began_s, light = executed(server, keys["light"]), time.monotonic(), list[Answer]()
        if alone:
            time.sleep(seconds)
        else:
            light = ask(server.port, keys["light"], "light", light_rps, seconds)
        count, took_s = executed(server, keys["light"]) - before, time.monotonic() - began_s
        heavy.get()
    return Flooded(count / took_s, light)


def percentiles(answers: Sequence[Answer]) -> tuple[float, float]:
    """Returns the median and the p99 of a tenant's latencies, in ms; all must be good."""
    assert all(answer.status == 200 for answer in answers)
    p50, p99 = np.percentile(np.array([answer.latency_s for answer in answers]) * 1000, [50, 99])
    return float(p50), float(p99)


def main() -> int:
    """Measures by turns and prints a table; returns 1 where something is missed and `--check` is given."""
    parser = argparse.ArgumentParser(description="Two tenants of one model.")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="a missed bar is the exit code")
    options = parser.parse_args()
    light_rps, seconds = OFFERED * CAPACITY / (HEAVIER + 1), options.seconds
    quiet, beside, alone_rps, both_rps = list[Answer](), list[Answer](), list[float](), list[float]()
    with processes.alone(WORK.parent):
        shutil.rmtree(WORK, ignore_errors=True)
        write_repository(WORK / "repository", [PLAIN])
        file = WORK / "keys.json"
        keys = {tenant: add_key(file, tenant, (Scope.INFER,), tenant)[1] for tenant in CONNECTIONS}
        settings = {"QINFER_AUTH__MODE": "keys", "QINFER_AUTH__KEYS_FILE": str(file)}
        with running("qinfer", WORK / "repository", settings) as server:
            ask(server.port, keys["heavy"], "heavy", 0.8 * CAPACITY, 2.0)
            for _ in range(options.rounds):
                quiet += ask(server.port, keys["light"], "light", light_rps, seconds)
                alone_rps.append(flooded(server, keys, light_rps, seconds, alone=True).executed_rps)
                ask(server.port, keys["light"], "light", light_rps, PATIENCE_S)  # until the queue is empty
                both = flooded(server, keys, light_rps, seconds, alone=False)
                both_rps.append(both.executed_rps)
                beside += both.light
                ask(server.port, keys["light"], "light", light_rps, PATIENCE_S)
    (p50, p99), (p50_beside, p99_beside) = percentiles(quiet), percentiles(beside)
    one_rps, all_rps = float(np.median(alone_rps)), float(np.median(both_rps))
    print("| | light p50 ms | light p99 ms | executed/s |\n|---|---|---|---|")
    print(f"| light alone | {p50:.1f} | {p99:.1f} | {light_rps:.0f} |\n| heavy alone | - | - | {one_rps:,.0f} |")
    print(f"| both | {p50_beside:.1f} | {p99_beside:.1f} | {all_rps:,.0f} |")
    slower, share = p99_beside / p99, all_rps / one_rps
    bars = [
        (slower <= WORST_P99, f"the light tenant's p99 is {slower:.2f} x that alone, at most {WORST_P99:g}"),
        (share >= LEAST_CAPACITY, f"both have {share:.2f} of what one has, at least {LEAST_CAPACITY}"),
    ]
    print("\n".join(f"- {'PASS' if fine else 'MISS'}: {text}" for fine, text in bars))
    return int(options.check and not all(fine for fine, _ in bars))


if __name__ == "__main__":
    sys.exit(main())
