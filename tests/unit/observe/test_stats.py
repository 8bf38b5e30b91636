"""What workers count, and how it adds up."""

import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.observe import stats
from qinfer.observe.stats import GatewayTally, StatsTally, buckets

NS = 1_000_000_000


def test_an_execution_is_counted_as_triton_does() -> None:
    """Rows, executions and requests apart; every request is charged the whole batch's durations."""
    tally = StatsTally()

    tally.executed(5, [1000, 3000], input_ns=10, infer_ns=100, output_ns=1)

    assert tally.drain() == {
        stats.SUCCESS_COUNT: 2,
        stats.SUCCESS_NS: 4222,
        stats.INFERENCE_COUNT: 5,
        stats.EXECUTION_COUNT: 1,
        stats.EXECUTION_NS: 111,
        stats.QUEUE_NS: 4000,
        stats.INPUT_NS: 20,
        stats.INFER_NS: 200,
        stats.OUTPUT_NS: 2,
        "queue:0.0005": 2,
        "execution:0.0005": 1,
        "batch:8": 1,
        "assemble:2e-05": 1,
        "batch_count:5": 1,
        "batch_input_ns:5": 10,
        "batch_infer_ns:5": 100,
        "batch_output_ns:5": 1,
    }


def test_what_gateways_end_is_counted_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; apart from what fails in workers."""
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    tally = GatewayTally()
    tally.count_ended("m", 1, "queue_full")
    tally.count_ended("m", 1, "cancelled", 9.5)
    tally.count_ended("m", 2, "queue_full", 9.75)

    drained = tally.refusals.drain()

    assert drained == {
        ("m", 1): {"refusals:queue_full": 1, "refusals:cancelled": 1, stats.FAIL_NS: NS // 2},
        ("m", 2): {"refusals:queue_full": 1, stats.FAIL_NS: NS // 4},
    }
    assert tally.refusals.drain() == {}
    assert stats.failure_count(drained["m", 1] | {"failures:inference_failed": 3, "retries": 9}) == 5


def test_drain_gives_each_count_once() -> None:
    """So that deltas can be added without counting anything twice."""
    tally = StatsTally()
    tally.executed(1, [0], 0, 1, 0)
    tally.failed("inference_failed", 3)

    first, second = tally.drain(), tally.drain()

    assert first["failures:inference_failed"] == 3
    assert second == {}


def test_buckets_are_cumulative_and_bounds_belong_to_them() -> None:
    """A value equal to a bound is in that bound's bucket; what exceeds all is in the infinite one."""
    tally = StatsTally()
    tally.executed(512, [NS, NS + 1, 10**6 * NS], 0, 0, 0)
    totals = tally.drain()

    queue = dict(buckets(totals, stats.QUEUE))

    assert (queue[0.5], queue[1.0], queue[2.5], queue[60.0], queue[float("inf")]) == (0, 1, 2, 2, 3)
    assert dict(buckets(totals, stats.BATCH))[512.0] == 1


def test_buckets_of_another_version_of_qinfer_still_count() -> None:
    """A bound that is no longer in the list keeps its place, because its name says it."""
    assert (0.003, 4) in buckets({"queue:0.003": 4}, stats.QUEUE)


@given(st.lists(st.lists(st.integers(0, 10**12), min_size=1, max_size=9), max_size=9), st.integers(1, 5))
def test_totals_of_all_workers_are_those_of_one(batches: list[list[int]], workers: int) -> None:
    """However executions are spread over workers, the sums and histograms are the same, and histograms grow upwards."""
    tallies = [StatsTally() for _ in range(workers)]
    alone = StatsTally()
    for number, queue_ns in enumerate(batches):
        for tally in (alone, tallies[number % workers]):
            tally.executed(len(queue_ns), queue_ns, 1, 2, 3)
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally.drain())

    assert dict(total) == alone.drain()

    cumulative = buckets(total, stats.QUEUE)

    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(cumulative))
    assert cumulative[-1][1] == sum(len(batch) for batch in batches)
