"""Triton's dynamic batcher, rule by rule (reference §3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from qinfer.batching.policy import (
    CLOSED,
    FETCH_LEAD_S,
    NEVER_S,
    OVERDUE_S,
    FetchGate,
    FreeSlots,
    Item,
    LatencyModel,
    Rules,
    decide,
    decide_gate,
)
from qinfer.models.spec import BatchingSpec, ModelSpec

NOW_S = 1000.0


@dataclass
class Speed:
    """A latency model that says what it is told."""

    each_s: float = 0.0
    least_s: float = 0.0

    def estimate_s(self, rows: int) -> float:
        return self.each_s * rows

    def floor_s(self, now_s: float) -> float:
        return self.least_s


def item(rows: int = 1, key: object = None, age_s: float = 0.0, left_s: float = 60.0, *, alone: bool = False) -> Item:
    return Item(rows=rows, key=key, enqueued_s=NOW_S - age_s, deadline_s=NOW_S + left_s, alone=alone)


def queued(rows: int, level: int, at_s: float, timeout_s: float, *, delays: bool = False) -> Item:
    """An item of a model with levels, enqueued `at_s` seconds from now, with a queue timeout."""
    enqueued_s = NOW_S + at_s
    return Item(
        rows=rows,
        key=None,
        enqueued_s=enqueued_s,
        deadline_s=enqueued_s + 60,
        level=level,
        queue_deadline_s=enqueued_s + timeout_s,
        delays=delays,
    )


def rules(limit: int = 8, preferred: tuple[int, ...] = (), delay_s: float = 0.0, levels: int = 0) -> Rules:
    sizes = preferred or (limit,)
    batching = BatchingSpec(
        preferred_sizes=sizes, max_queue_delay_s=delay_s, priority_levels=levels, default_priority=levels
    )
    return Rules.from_spec(
        ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=limit, batching=batching)
    )


@pytest.mark.parametrize(
    ("rows", "limit", "preferred", "delay_s", "age_s", "sent"),
    [
        ([1, 1, 1], 8, (), 0.0, 0.0, 3),  # delay 0: what is there leaves as soon as a slot is open
        ([1] * 10, 8, (), 0.0, 0.0, 8),  # never above max_batch_size
        ([3, 3, 3], 8, (), 0.0, 0.0, 2),  # a request is never split
        ([4, 8], 8, (), 0.0, 0.0, 1),  # nor reordered to fit
        ([1] * 6, 8, (4,), 0.0, 0.0, 4),  # a preferred size is stopped at
        ([1] * 6, 8, (2, 4), 0.0, 0.0, 4),  # the largest reachable one
        ([1, 1, 1], 8, (4,), 0.0, 0.0, 3),  # none reached, delay 0: all of it
        ([3, 3], 8, (4,), 1.0, 0.0, 1),  # passing the largest preferred marks the point before it
        ([1] * 7, 8, (4,), 1.0, 2.0, 7),  # delay exceeded: all that fits, above the preferred size
        ([1] * 9, 8, (4,), 1.0, 2.0, 8),  # but not above the maximum
        ([1, 1], 8, (), 1.0, 0.5, 0),  # delay not exceeded: wait
        ([1, 1], 8, (), 1.0, 1.0, 2),  # the oldest has waited the delay
        ([1] * 8, 8, (), 1.0, 0.0, 8),  # full: no wait
        ([2, 2, 5], 8, (), 1.0, 0.0, 2),  # the next can't join: closed, no wait
        ([9], 8, (), 0.0, 0.0, 1),  # larger than the maximum: validation's affair, not a hang
    ],
)
def test_walk(rows: list[int], limit: int, preferred: tuple[int, ...], delay_s: float, age_s: float, sent: int) -> None:
    """Takes as many requests as Triton's walk does."""
    pending = [item(r, age_s=age_s) for r in rows]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(limit, preferred, delay_s), Speed())

    assert decision.run == pending[:sent]
    assert decision.keep == pending[sent:]


def test_wait_ends_when_the_oldest_has_waited_the_delay() -> None:
    """Wakes at the oldest request's enqueue time plus the delay."""
    decision = decide([item(age_s=0.3), item()], NOW_S, FreeSlots(1), rules(delay_s=1.0), Speed())

    assert decision.wake_at_s == pytest.approx(NOW_S + 0.7)


def test_other_shape_closes_the_batch() -> None:
    """A mismatch sends what is pending, without waiting for the delay."""
    pending = [item(key=(2,)), item(key=(2,)), item(key=(3,)), item(key=(2,))]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(delay_s=1.0), Speed())

    assert decision.run == pending[:2]


def test_no_batching_runs_each_request_alone() -> None:
    """The default scheduler never merges."""
    spec = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=8)

    assert len(decide([item(), item()], NOW_S, FreeSlots(1), Rules.from_spec(spec), Speed()).run) == 1


def test_no_batch_dimension_runs_each_request_alone() -> None:
    """Without a batch dimension nothing can be stacked, whatever dynamic_batching says."""
    batching = BatchingSpec(preferred_sizes=(4,))
    spec = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=0, batching=batching)

    assert len(decide([item(), item()], NOW_S, FreeSlots(1), Rules.from_spec(spec), Speed()).run) == 1


def test_suspect_runs_alone() -> None:
    """An item that must be alone closes the batch before it, and its own."""
    pending = [item(), item(alone=True), item()]

    first = decide(pending, NOW_S, FreeSlots(1), rules(), Speed())
    second = decide(first.keep, NOW_S, FreeSlots(1), rules(), Speed())

    assert first.run == pending[:1]
    assert second.run == pending[1:2]


def test_expired_is_not_run() -> None:
    """What is past its deadline is reported, wherever it stands."""
    pending = [item(), item(left_s=0.0), item()]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(), Speed())

    assert decision.expired == [pending[1]]
    assert decision.run == [pending[0], pending[2]]


def test_what_can_not_make_it_is_expired_before_it_costs_device_time() -> None:
    """The fastest execution known is longer than what is left."""
    pending = [item(left_s=0.1), item(left_s=0.3)]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(), Speed(least_s=0.2))

    assert decision.expired == pending[:1]


def test_batch_closes_early_for_its_earliest_deadline() -> None:
    """Waiting out the delay would leave too little time to execute."""
    pending = [item(), item(left_s=0.5)]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(delay_s=1.0), Speed(each_s=0.1))

    assert decision.wake_at_s == pytest.approx(NOW_S + 0.3)
    assert len(decide(pending, NOW_S + 0.31, FreeSlots(1), rules(delay_s=1.0), Speed(each_s=0.1)).run) == 2


def test_without_a_slot_only_a_full_batch_is_placed_ahead() -> None:
    """A batch that can still grow stays open while every instance is busy."""
    some, full = [item()] * 3, [item()] * 8

    assert not decide(some, NOW_S, FreeSlots(0, 1), rules(), Speed()).run
    assert len(decide(full, NOW_S, FreeSlots(0, 1), rules(), Speed()).run) == 8
    assert not decide(full, NOW_S, FreeSlots(0, 0), rules(), Speed()).run


def test_nothing_pending() -> None:
    """An empty queue asks for no wake-up."""
    nothing: list[Item] = []

    decision = decide(nothing, NOW_S, FreeSlots(1), rules(), Speed())

    assert decision.run == []
    assert decision.wake_at_s == NEVER_S


def test_levels_then_delayed_then_order_of_arrival() -> None:
    """The queue is walked by level; within one, what was delayed first is the first of those behind."""
    low, high = queued(1, 2, 0.0, 9.0), queued(1, 1, 0.0, 9.0)
    second = queued(1, 1, -2.0, 1.5, delays=True)
    first = queued(1, 1, -1.0, 0.1, delays=True)

    decision = decide([low, second, first, high], NOW_S, FreeSlots(0), rules(levels=2), Speed())

    assert decision.keep == [high, first, second, low]


def test_levels_mean_nothing_to_a_model_without_them() -> None:
    """Nor do queue timeouts."""
    pending = [queued(1, 2, -2.0, 1.0), queued(1, 1, -2.0, 1.0)]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(), Speed())

    assert decision.run == pending


def test_the_oldest_of_the_batch_counts_for_the_delay() -> None:
    """Not the first in the queue."""
    pending = [queued(1, 1, 0.0, 9.0), queued(1, 2, -0.8, 9.0)]

    decision = decide(pending, NOW_S, FreeSlots(1), rules(delay_s=1.0, levels=2), Speed())

    assert decision.wake_at_s == pytest.approx(NOW_S + 0.2)


@pytest.mark.parametrize("slots", [FreeSlots(1), FreeSlots(0)])
@pytest.mark.parametrize("delays", [False, True])
def test_wakes_when_somebody_has_waited_too_long(slots: FreeSlots, delays: bool) -> None:  # noqa: FBT001  a parameter
    """To refuse it in time, or because another batch may be the best then; also without an idle instance."""
    pending = [queued(1, 1, 0.0, 0.5, delays=delays)]

    decision = decide(pending, NOW_S, slots, rules(delay_s=5.0, levels=2), Speed())

    assert decision.wake_at_s == NOW_S + 0.5


def test_priorities_with_policies_as_triton_tests_them() -> None:
    """Triton's `test_priority_with_policy`: two levels, DELAY and REJECT, preferred sizes 4, 8 and 32, delay 10 s."""
    a2 = queued(2, 1, 0.0, 11.0, delays=True)
    a1 = queued(1, 1, 0.2, 1.0, delays=True)
    a2_again = queued(2, 1, 0.4, 11.0, delays=True)
    b2, b3, b6 = queued(2, 2, 0.6, 2.0), queued(3, 2, 0.8, 11.0), queued(6, 2, 1.0, 11.0)
    pending: Sequence[Item] = [a2, a1, a2_again, b2, b3, b6]
    now_s, runs, expired = NOW_S + 1.0, [], []

    while pending:
        decision = decide(pending, now_s, FreeSlots(1), rules(32, (4, 8, 32), 10.0, levels=2), Speed())
        pending = decision.keep
        expired += decision.expired
        if decision.run:
            runs.append((round(now_s - NOW_S, 3), decision.run))
        else:
            now_s = decision.wake_at_s

    assert runs == [(1.2, [a2, a2_again]), (2.6, [a1, b3]), (11.0, [b6])]
    assert expired == [b2]


# --- the highest speed that observations allow ---


def learned(*seconds: float, rows: int = 1) -> LatencyModel:
    latency = LatencyModel()
    for each_s in seconds:
        latency.observe(rows, each_s, NOW_S)
    return latency


def test_a_few_executions_give_no_bound() -> None:
    assert learned(*[5.0] * 7).best_s(1) == 0.0
    assert learned(*[5.0] * 8).best_s(1) > 0.0


def test_the_bound_narrows_with_each_execution() -> None:
    few, many = (learned(*[0.1] * count).best_s(1) for count in (8, 200))

    assert 0.08 < few < many
    assert many == pytest.approx(0.1, rel=0.03)


def test_slow_first_executions_bound_nothing() -> None:
    """Of a model that loads the rest of itself then."""
    assert learned(10.0, 10.0, 10.0, *[0.01] * 5).best_s(1) < 0.02


def test_a_model_that_becomes_quicker_is_as_quick_at_once() -> None:
    latency = learned(*[1.0] * 100, *[0.01] * 5)

    assert latency.estimate_s(1) > 0.5
    assert latency.best_s(1) < 0.02


def test_executions_that_differ_widen_the_bound() -> None:
    equal, different = learned(*[1.0] * 100), learned(*[0.5, 1.5] * 50)

    assert different.best_s(1) < 0.95 * equal.best_s(1)


def test_a_larger_batch_than_any_may_take_no_longer() -> None:
    """Nor does it take less."""
    assert learned(*[0.1] * 100).best_s(16) == pytest.approx(0.1, rel=0.03)
    assert learned(*[0.1] * 100).estimate_s(16) == pytest.approx(1.6)


def test_sizes_that_were_seen_bound_a_full_batch() -> None:
    latency = LatencyModel()
    for rows in (1, 16) * 50:
        latency.observe(rows, 0.004 + rows * 0.0005, NOW_S)

    assert latency.best_s(16) == pytest.approx(0.012, rel=0.05)


def test_one_long_gap_is_an_accident() -> None:
    latency = learned(*[0.001] * 20)
    latency.observe_gap(1.0, 1.1, 9.0, 1)
    latency.observe_gap(1.2, 1.3, 9.0, 1)

    assert latency.gap_s > 0.04
    assert latency.best_s(1) < 0.002


# --- when busy instances fetch ---


@pytest.mark.parametrize(
    ("now_s", "is_placed", "fetches_ahead", "expected"),
    [
        (1.0, False, True, FetchGate(2.0 - FETCH_LEAD_S, FETCH_LEAD_S, again_at_s=2.0 + OVERDUE_S)),
        (1.0, False, False, FetchGate(NEVER_S, FETCH_LEAD_S, again_at_s=2.0 + OVERDUE_S)),
        (2.0 + OVERDUE_S, False, True, FetchGate(again_at_s=3.0 + OVERDUE_S, gives_back=True)),
        (2.0 + OVERDUE_S, True, False, FetchGate(gives_back=True, recalls=True)),
        (3.0 + OVERDUE_S, False, True, FetchGate(gives_back=True, recalls=True)),
    ],
    ids=["just before the first end", "no place", "one is overdue", "one is overdue with a batch ahead", "all are"],
)
def test_busy_instances_fetch_until_one_is_overdue(
    now_s: float, *, is_placed: bool, fetches_ahead: bool, expected: FetchGate
) -> None:
    """Executions are expected to end at 2 and 3 s."""
    assert decide_gate(now_s, [3.0, 2.0], 0.01, is_placed=is_placed, fetches_ahead=fetches_ahead) == expected


def test_a_long_execution_is_overdue_later() -> None:
    assert decide_gate(2.4, [2.0], 0.5, is_placed=False, fetches_ahead=False).again_at_s == 2.5


def test_a_closed_gate_waits_for_an_event() -> None:
    assert (CLOSED.open_at_s, CLOSED.again_at_s, CLOSED.gives_back) == (NEVER_S, NEVER_S, False)
