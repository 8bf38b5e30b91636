"""Triton's dynamic batcher, rule by rule (reference §3.3)."""

from dataclasses import dataclass

import pytest

from qinfer.batching.policy import NEVER_S, Item, Rules, Slots, decide
from qinfer.repository.spec import BatchingSpec, ModelSpec

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


def rules(limit: int = 8, preferred: tuple[int, ...] = (), delay_s: float = 0.0) -> Rules:
    sizes = preferred or (limit,)
    batching = BatchingSpec(preferred_sizes=sizes, max_queue_delay_s=delay_s)
    return Rules.of(ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=limit, batching=batching))


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

    decision = decide(pending, NOW_S, Slots(1), rules(limit, preferred, delay_s), Speed())

    assert decision.run == pending[:sent]
    assert decision.keep == pending[sent:]


def test_wait_ends_when_the_oldest_has_waited_the_delay() -> None:
    """Wakes at the oldest request's enqueue time plus the delay."""
    decision = decide([item(age_s=0.3), item()], NOW_S, Slots(1), rules(delay_s=1.0), Speed())

    assert decision.wake_at_s == pytest.approx(NOW_S + 0.7)


def test_other_shape_closes_the_batch() -> None:
    """A mismatch sends what is pending, without waiting for the delay."""
    pending = [item(key=(2,)), item(key=(2,)), item(key=(3,)), item(key=(2,))]

    decision = decide(pending, NOW_S, Slots(1), rules(delay_s=1.0), Speed())

    assert decision.run == pending[:2]


def test_no_batching_runs_each_request_alone() -> None:
    """The default scheduler never merges."""
    spec = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=8)

    assert len(decide([item(), item()], NOW_S, Slots(1), Rules.of(spec), Speed()).run) == 1


def test_no_batch_dimension_runs_each_request_alone() -> None:
    """Without a batch dimension nothing can be stacked, whatever dynamic_batching says."""
    batching = BatchingSpec(preferred_sizes=(4,))
    spec = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=0, batching=batching)

    assert len(decide([item(), item()], NOW_S, Slots(1), Rules.of(spec), Speed()).run) == 1


def test_suspect_runs_alone() -> None:
    """An item that must be alone closes the batch before it, and its own."""
    pending = [item(), item(alone=True), item()]

    first = decide(pending, NOW_S, Slots(1), rules(), Speed())
    second = decide(first.keep, NOW_S, Slots(1), rules(), Speed())

    assert first.run == pending[:1]
    assert second.run == pending[1:2]


def test_expired_is_not_run() -> None:
    """What is past its deadline is reported, wherever it stands."""
    pending = [item(), item(left_s=0.0), item()]

    decision = decide(pending, NOW_S, Slots(1), rules(), Speed())

    assert decision.expired == [pending[1]]
    assert decision.run == [pending[0], pending[2]]


def test_what_can_not_make_it_is_expired_before_it_costs_device_time() -> None:
    """The fastest execution known is longer than what is left."""
    pending = [item(left_s=0.1), item(left_s=0.3)]

    decision = decide(pending, NOW_S, Slots(1), rules(), Speed(least_s=0.2))

    assert decision.expired == pending[:1]


def test_batch_closes_early_for_its_earliest_deadline() -> None:
    """Waiting out the delay would leave too little time to execute."""
    pending = [item(), item(left_s=0.5)]

    decision = decide(pending, NOW_S, Slots(1), rules(delay_s=1.0), Speed(each_s=0.1))

    assert decision.wake_at_s == pytest.approx(NOW_S + 0.3)
    assert len(decide(pending, NOW_S + 0.31, Slots(1), rules(delay_s=1.0), Speed(each_s=0.1)).run) == 2


def test_without_a_slot_only_a_full_batch_is_placed_ahead() -> None:
    """A batch that can still grow stays open while every instance is busy."""
    some, full = [item()] * 3, [item()] * 8

    assert not decide(some, NOW_S, Slots(0, 1), rules(), Speed()).run
    assert len(decide(full, NOW_S, Slots(0, 1), rules(), Speed()).run) == 8
    assert not decide(full, NOW_S, Slots(0, 0), rules(), Speed()).run


def test_nothing_pending() -> None:
    """An empty queue asks for no wake-up."""
    nothing: list[Item] = []

    decision = decide(nothing, NOW_S, Slots(1), rules(), Speed())

    assert decision.run == []
    assert decision.wake_at_s == NEVER_S
