"""The rules on what was recorded of real outages: what fires, how soon, and that nothing did before.

Made by `python -m tests.support.record_outages`, which says how.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.reference_alerts import OUTAGES, RECORDED
from tests.unit.deploy.test_prometheus import ALERTS, run_cases

SOON_S = 120


class Expected(NamedTuple):
    """The alerts of an outage: those that fire within two minutes, and those that follow while it lasts."""

    soon: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()


BURNS = "QinferObjectiveBurnsFast"
EXPECTED = {
    "workers_killed": Expected(
        frozenset(("QinferWorkersGone", "QinferModelUnavailable", "QinferErrorRate", BURNS)),
        frozenset(("QinferNoWorkers",)),
    ),
    "load_failure": Expected(frozenset(("QinferModelLoadFailed", "QinferModelUnavailable", "QinferErrorRate"))),
    "failed_rollout": Expected(frozenset(("QinferModelLoadFailed",))),
    "slow_model": Expected(frozenset((BURNS,)), frozenset(("QinferLatencyHigh",))),
    "hang_10": Expected(frozenset(("QinferExecutionLate",))),
    "hang_60": Expected(frozenset(("QinferExecutionLate",))),
    "hang_300": Expected(later=frozenset(("QinferExecutionLate",))),
    "hangs_again": Expected(frozenset(("QinferExecutionLate",)), frozenset(("QinferExecutionErrors",))),
    "redis_full": Expected(
        frozenset(("QinferMostRefused", "QinferRedisMemoryFull", BURNS)), frozenset(("QinferRequestsRefused",))
    ),
    "redis_disk_full": Expected(frozenset(("QinferRedisCannotWrite", "QinferErrorRate", BURNS))),
    "redis_save_fails": Expected(
        frozenset(("QinferRedisCannotWrite", "QinferErrorRate", BURNS)), frozenset(("QinferRedisSaveFailed",))
    ),
    "redis_rewrite_fails": Expected(later=frozenset(("QinferRedisSaveFailed",))),
    "redis_memory_high": Expected(later=frozenset(("QinferRedisMemoryHigh",))),
    "redis_evicts": Expected(
        frozenset(("QinferRedisEvicts", "QinferRedisMemoryFull", "QinferMostRefused", BURNS)),
        frozenset(("QinferRequestsRefused",)),
    ),
    "redis_replica_lost": Expected(later=frozenset(("QinferRedisReplicaLost",))),
    "redis_replica_hangs": Expected(frozenset(("QinferRedisReplicaLags",)), frozenset(("QinferRedisReplicaLost",))),
    "redis_connections": Expected(frozenset(("QinferRedisConnections",))),
    "redis_node_down": Expected(frozenset(("QinferRedisNodeDown", "QinferStoreDown", "QinferErrorRate", BURNS))),
    "stuck_job": Expected(later=frozenset(("QinferJobStuck",))),
    "dead_bridge": Expected(frozenset(("QinferNoBridge",))),
    "healthy": Expected(),
    "redis_gone": Expected(frozenset(("QinferStoreDown", "QinferErrorRate", BURNS))),
}


def cases_of(outage: str) -> dict[str, Any]:
    """Returns promtool's test of one recording."""
    found = json.loads((RECORDED / f"{outage}.json").read_text())
    step_s, outage_s = found["step_s"], found["outage_step"] * found["step_s"]
    expected = EXPECTED[outage]
    steps = max(map(_steps, found["series"].values()))

    def fired(names: frozenset[str], pattern: str, at_s: int) -> dict[str, Any]:
        return {
            "expr": f'group by (alertname) (count_over_time(ALERTS{{alertstate="firing",alertname=~"{pattern}"}}[1h]))',
            "eval_time": f"{at_s}s",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
        }

    return {
        "evaluation_interval": "15s",
        "tests": [
            {
                "name": outage,
                "interval": f"{step_s}s",
                "input_series": [{"series": name, "values": of} for name, of in found["series"].items()],
                "promql_expr_test": [
                    fired(frozenset(), ".+", outage_s),
                    fired(expected.soon, "|".join(expected.soon) or "none", outage_s + SOON_S),
                    fired(expected.soon | expected.later, ".+", (steps - 1) * step_s),
                ],
            }
        ],
    }


def _steps(values: str) -> int:
    """Returns how many samples there are in promtool's notation."""
    return sum(1 + int(word.partition("x")[2] or 0) for word in values.split())


@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_rings(outage: str, tmp_path: Path) -> None:
    """Within two minutes by what names it, never before it, and by nothing else."""
    run_cases(tmp_path / "test.yml", cases_of(outage))


@pytest.mark.parametrize("outage", OUTAGES)
def test_what_fired_then_is_what_fires_in_the_tests(outage: str) -> None:
    """The table of the documentation has it from the recording, in which a real Prometheus saw it."""
    fired = json.loads((RECORDED / f"{outage}.json").read_text())["fired_after_s"]

    assert fired.keys() == EXPECTED[outage].soon | EXPECTED[outage].later


def test_callers_saw_what_is_said_of_them() -> None:
    """Each outage that callers notice has a critical alert; what they do not notice has none."""
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in ALERTS}
    for outage, expected in EXPECTED.items():
        statuses = json.loads((RECORDED / f"{outage}.json").read_text())["statuses"]
        is_noticed = any(status.startswith(("0", "5")) for status in statuses)
        is_critical = any(severity[name] == "critical" for name in expected.soon)

        assert is_noticed == is_critical or outage == "slow_model", (outage, statuses)
