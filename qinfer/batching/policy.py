"""The batching policy: pure functions that decide which requests run together (`decide`) and when to fetch.

It owns Triton's walk over the queue (reference §3.3, steps 4 and 5), its priorities and queue policies, and the
deadline rules of docs/explanation/batching.md. It keeps no state and reads no clock.

    decision = decide(pending, now_s, slots, rules, latency)
    pending == decision.expired + decision.run + decision.keep       each item in exactly one of them, in queue order
"""

import math
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from qinfer.models.spec import ModelSpec

_DECAY = 0.98
"""The factor by which each later observation lowers an observation's weight, so that about 50 observations count."""

_WINDOW = 32
"""Observations; two windows give the floor."""

FETCH_S = 0.001
"""The time of one more fetch."""

_LONGEST_GAP_S = 0.05
"""Longer gaps count as this."""

_RUN = 5
"""Executions; their mean hides a chance."""

_COLD = 3
"""The first executions, often slow."""

_FRESH_S = 5.0
"""An older floor expires no request, because no execution would correct a wrong one."""


class LatencyModel:
    """Exponentially weighted least squares over (rows, seconds), and the fastest recent execution.

    `gap_s` is the mean time between executions while requests wait.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows2 = self._rows_seconds = 0.0
        self._base_s = 0.0
        self._per_row_s = 0.0
        self._floors = (float("inf"), float("inf"))
        self._floor_s = 0.0
        self._in_window = 0
        self._observed_at_s = float("-inf")
        self.gap_s = 0.0
        self._gap_weight = 0.0
        self._deviation2 = 0.0
        self._ratios: deque[float] = deque(maxlen=2 * _WINDOW)
        self._count = self._judged = 0
        self._quickest = 1.0
        self._free_at_s: deque[float] = deque()

    @property
    def known(self) -> bool:
        """Whether an execution was observed."""
        return self._weight > 0

    def observe(self, rows: int, seconds: float, now_s: float) -> None:
        """Learns from an execution that ended at `now_s`."""
        self._weight = self._weight * _DECAY + 1.0
        self._rows = self._rows * _DECAY + rows
        self._seconds = self._seconds * _DECAY + seconds
        self._rows2 = self._rows2 * _DECAY + rows * rows
        self._rows_seconds = self._rows_seconds * _DECAY + rows * seconds
        self._fit()
        expected_s = self._base_s + self._per_row_s * rows
        ratio = seconds / expected_s if expected_s else 1.0
        self._deviation2 = self._deviation2 * _DECAY + (ratio - 1.0) * (ratio - 1.0)
        self._ratios.append(ratio)
        self._count += 1
        current, previous = self._floors
        if self._in_window == _WINDOW:
            current, previous, self._in_window = seconds, current, 0
        current = min(current, seconds)
        self._floors = (current, previous)
        self._floor_s = 0.0 if previous == float("inf") else min(current, previous)
        self._in_window += 1
        self._observed_at_s = now_s

    def observe_gap(self, begin_s: float, end_s: float, waited_s: float, instances: int) -> None:
        """Learns how long an instance stood still although requests waited.

        `waited_s` is the oldest one's age at the end.
        """
        free_at_s = end_s
        while len(self._free_at_s) >= instances:
            free_at_s = self._free_at_s.popleft()
        self._free_at_s.append(end_s)
        if free_at_s < end_s <= free_at_s + waited_s:
            gap_s = min(max(begin_s - free_at_s, 0.0), _LONGEST_GAP_S)
            self._gap_weight = self._gap_weight * _DECAY + 1.0
            self.gap_s += (gap_s - self.gap_s) / self._gap_weight

    def estimate_s(self, rows: int) -> float:
        """Returns a batch's expected duration; 0 = unknown."""
        return self._base_s + self._per_row_s * rows

    def full_s(self, rows: int) -> float:
        """Returns the expected time between batches; 0 = unknown."""
        expected_s = self.estimate_s(rows)
        return expected_s + self.gap_s if expected_s else 0.0

    def best_s(self, rows: int) -> float:
        """Returns the shortest possible time between batches; 0 before eight executions.

        The bound is wide after few executions, for other sizes, and for varying durations. The quickest run of the last
        64 counts, so a speed-up shows at once.
        """
        weight = self._weight
        if self._count < _COLD + _RUN:
            return 0.0
        # A few durations may be equal by chance: add a deviation of 100 %.
        error2 = (1.0 + self._deviation2) / (1.0 + weight) / weight
        mean_rows, mean_s = self._rows / weight, self._seconds / weight
        distance2, variance = (rows - mean_rows) ** 2, self._rows2 / weight - mean_rows * mean_rows
        lever = distance2 / max(variance, 1e-9) if distance2 > 0.25 else 0.0
        # A regression's standard error; a larger batch is not quicker.
        regressed_s = self.estimate_s(rows) / (1.0 + math.sqrt(error2 * (1.0 + lever)))
        seen_s = mean_s * min(rows / mean_rows, 1.0) / (1.0 + math.sqrt(error2))
        gap_s = self.gap_s * max(1.0 - 2.0 / math.sqrt(self._gap_weight), 0.0) if self._gap_weight else 0.0
        return max(regressed_s, seen_s) * self._quickest_run() + gap_s

    def floor_s(self, now_s: float) -> float:
        """Returns the shortest recent execution; 0 if unknown or old."""
        return 0.0 if now_s - self._observed_at_s > _FRESH_S else self._floor_s

    def _quickest_run(self) -> float:
        if self._judged != self._count:
            ratios = list(self._ratios)
            runs = (sum(ratios[end - _RUN : end]) / _RUN for end in range(_RUN, len(ratios) + 1))
            self._judged, self._quickest = self._count, min(1.0, *runs)
        return self._quickest

    def _fit(self) -> None:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows2 / self._weight - mean_rows * mean_rows
        if variance < 1e-6:
            # For one size, time is proportional to rows.
            self._base_s, self._per_row_s = 0.0, mean_s / mean_rows
            return
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        self._per_row_s = min(max(covariance / variance, 0.0), mean_s / mean_rows)
        self._base_s = mean_s - self._per_row_s * mean_rows


NEVER_S = float("inf")


class Item(msgspec.Struct, eq=False):
    """The part of a request that the policy reads.

    Attributes:
        rows: The size of the request along the batch dimension, or 1.
        key: Only items with equal keys may share a batch (`assemble.key_function`).
        alone: Whether the request may have killed a worker, and must not share a batch.
        level: The priority level, from 1 = the highest; 0 for a model without levels.
        queue_deadline_s: The end of the queue timeout; unused with `Rules.prefetch`.
        delays: Whether the timeout moves the request behind the others of its level (Triton's DELAY).
        delayed: Whether the request was delayed before this batcher got it.
    """

    rows: int
    key: Hashable
    enqueued_s: float
    deadline_s: float
    alone: bool = False
    level: int = 0
    queue_deadline_s: float = NEVER_S
    delays: bool = False
    delayed: bool = False

    @property
    def ends_s(self) -> float:
        """The instant at which the request is answered as expired."""
        return self.deadline_s if self.delays or self.delayed else min(self.deadline_s, self.queue_deadline_s)

    def overstays(self, now_s: float) -> bool:
        """Returns whether the request moves behind the others of its level."""
        return self.delays and not self.delayed and self.queue_deadline_s <= now_s


T = TypeVar("T", bound=Item)


class Latency(Protocol):
    """Latency estimates, such as `LatencyModel`."""

    def estimate_s(self, rows: int) -> float:
        """Returns a batch's probable duration; 0 = unknown."""
        ...

    def floor_s(self, now_s: float) -> float:
        """Returns an execution's least duration; 0 = unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A model's batching rules.

    Attributes:
        delay_s: The longest wait of the oldest request for its batch to fill.
        prefetch: Requests run in order of arrival: there are no priority levels or queue timeouts.
        ahead: A batch may be formed before an instance is free: no later request precedes it.
        levels: The last request to arrive may be the first to run.
    """

    max_rows: int
    preferred: frozenset[int]
    largest_preferred: int
    delay_s: float = 0.0
    merge: bool = True
    prefetch: bool = True
    ahead: bool = True
    levels: bool = False

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> "Rules":
        """Derives the rules from a model's configuration."""
        limit = max(spec.max_batch_size, 1)
        prefetch = spec.batching is None or spec.batching.may_prefetch
        if spec.batching is None or spec.max_batch_size == 0:
            return cls(
                max_rows=limit,
                preferred=frozenset(),
                largest_preferred=limit,
                merge=False,
                prefetch=prefetch,
                ahead=prefetch,
            )
        sizes = spec.batching.preferred_sizes or (limit,)
        return cls(
            max_rows=limit,
            preferred=frozenset(sizes),
            largest_preferred=max(sizes),
            delay_s=spec.batching.max_queue_delay_s,
            prefetch=prefetch,
            ahead=prefetch or spec.batching.is_in_order,
            levels=spec.batching.priority_levels > 0,
        )

    def may_grow(self, rows: int) -> bool:
        """Returns whether a batch may grow; never with `prefetch`."""
        return not self.prefetch and rows < self.max_rows


class FreeSlots(msgspec.Struct, frozen=True):
    """The number of idle instances, and a place ahead of busy instances."""

    idle: int
    ahead: int = 0


class BatchDecision(msgspec.Struct, Generic[T], frozen=True):
    """A decision of the policy.

    Attributes:
        wake_at_s: When to decide again without an event; `NEVER_S` = never.
    """

    expired: list[T]
    run: list[T]
    keep: Sequence[T]
    wake_at_s: float


def decide(pending: Sequence[T], now_s: float, slots: FreeSlots, rules: Rules, latency: Latency) -> BatchDecision[T]:
    """Decides about one batch; call it again with `keep` until `run` is empty.

    Takes O(len(pending)) for the last `keep` and a few more items.
    """
    horizon_s = now_s + latency.floor_s(now_s)
    if rules.prefetch:
        expired = [item for item in pending if item.deadline_s <= horizon_s]
        live = [item for item in pending if item.deadline_s > horizon_s] if expired else pending
    else:
        expired, live = _queue(pending, now_s, horizon_s)
    if not live:
        return BatchDecision(expired, [], [], NEVER_S)
    walk = _walk(live, rules)
    wake_at_s = _due_at_s(live, now_s, slots, rules, walk, latency)
    if wake_at_s > now_s:
        return BatchDecision(expired, [], live, wake_at_s)
    delayed_too_long = rules.delay_s > 0 and now_s - _oldest_s(live, rules, walk) >= rules.delay_s
    count = walk.best if walk.best and not delayed_too_long else walk.items
    if count == len(live):
        return BatchDecision(expired, list(live), [], NEVER_S)
    return BatchDecision(expired, list(live[:count]), live[count:], NEVER_S)


def next_batch(pending: Sequence[T], rules: Rules) -> Sequence[T]:
    """Returns the first items, up to `max_rows` rows."""
    rows = 0
    for count, item in enumerate(pending, start=1):
        rows += item.rows
        if rows >= rules.max_rows:
            return pending[:count]
    return pending


def is_worth_filling(run: Sequence[Item], now_s: float, rules: Rules, latency: Latency) -> bool:
    """Returns whether a short batch should wait for one more fetch.

    The batch should fill up if a full batch executes more rows per second, and no request would expire.
    """
    rows = sum(item.rows for item in run)
    short_s, full_s = latency.estimate_s(rows), latency.estimate_s(rules.max_rows)
    if not rules.merge or not short_s or rows * (full_s + FETCH_S) >= rules.max_rows * short_s:
        return False
    # A larger batch must not make requests late.
    latest_s = min(item.deadline_s for item in run) - full_s
    refused_s = min(item.queue_deadline_s if not item.delays else NEVER_S for item in run)
    return now_s + 2 * FETCH_S < min(latest_s, refused_s)


def _queue(pending: Sequence[T], now_s: float, horizon_s: float) -> tuple[list[T], Sequence[T]]:
    expired: list[T] = []
    live: list[T] = []
    for item in pending:
        is_over = item.ends_s <= now_s or item.deadline_s <= horizon_s
        (expired if is_over else live).append(item)
    live.sort(key=lambda item: _rank(item, now_s))  # quick where little changed
    return expired, live


def _rank(item: Item, now_s: float) -> tuple[int, float]:
    """Returns the sort key; delayed items keep the order of queue deadlines."""
    if item.delayed or (item.delays and item.queue_deadline_s <= now_s):
        return item.level, item.queue_deadline_s
    return item.level, -NEVER_S


class _Walk(msgspec.Struct, frozen=True):
    """`best` counts the items at the best preferred size."""

    items: int
    rows: int
    best: int
    closed: bool


def _walk(live: Sequence[T], rules: Rules) -> _Walk:
    """Counts the items until one can't join (reference §3.3 step 4)."""
    first = live[0]
    if not rules.merge or first.alone:
        return _Walk(1, first.rows, 0, True)
    key, rows, best, count = first.key, 0, 0, 0
    preferred, largest, limit = rules.preferred, rules.largest_preferred, rules.max_rows
    for item in live:
        after = rows + item.rows
        if after > largest and not best:
            best = count
        if (after > limit and count) or item.key != key or item.alone:
            return _Walk(count, rows, best, True)
        rows = after
        count += 1
        if rows in preferred:
            best = count
    return _Walk(count, rows, best, rows >= limit)


def _due_at_s(live: Sequence[T], now_s: float, slots: FreeSlots, rules: Rules, walk: _Walk, latency: Latency) -> float:
    """Returns when the policy decides again, unless the queue changes before (§3.3 step 5)."""
    timeout_s = NEVER_S if rules.prefetch else _next_timeout_s(live, now_s)
    if not slots.idle:
        full = walk.closed or walk.rows >= rules.largest_preferred
        # Ahead, a batch could not grow.
        return now_s if slots.ahead and full else min(_first_deadline_s(live), timeout_s)
    if walk.best or walk.closed or walk.rows >= rules.largest_preferred or rules.delay_s <= 0:
        return now_s
    # The latest start for the earliest deadline.
    latest_start_s = _first_deadline_s(live) - latency.estimate_s(walk.rows)
    return max(now_s, min(_oldest_s(live, rules, walk) + rules.delay_s, latest_start_s, timeout_s))


def _oldest_s(live: Sequence[T], rules: Rules, walk: _Walk) -> float:
    return live[0].enqueued_s if rules.prefetch else min(item.enqueued_s for item in live[: walk.items])


def _first_deadline_s(live: Sequence[T]) -> float:
    return min(item.deadline_s for item in live)


def _next_timeout_s(live: Sequence[T], now_s: float) -> float:
    return min((item.queue_deadline_s for item in live if item.queue_deadline_s > now_s), default=NEVER_S)


FETCH_LEAD_S = 0.003
"""A fetch's lead before an expected end: a few round trips."""

OVERDUE_S = 0.05
"""An execution late by this, or by its usual duration if longer, gives back the batch behind it."""


class FetchGate(msgspec.Struct, frozen=True):
    """A decision about the next fetch.

    Attributes:
        open_at_s: When it may begin; `NEVER_S` = not before an event.
        gives_back: Idle workers may have the waiting requests: give these back, then decide again.
        recalls: They may have the batches that have not begun, too.
    """

    open_at_s: float = NEVER_S
    wait_s: float = NEVER_S
    again_at_s: float = NEVER_S
    gives_back: bool = False
    recalls: bool = False


CLOSED = FetchGate()
"""No fetch before an event."""


def decide_gate(
    now_s: float, ends_s: Collection[float], usual_s: float, *, is_placed: bool, fetches_ahead: bool
) -> FetchGate:
    """Decides when busy instances fetch: just before the first of their expected ends, if requests may be ahead.

    The end of an overdue execution is unknown: neither requests nor a placed batch wait behind it. If all are overdue,
    batches that an instance has not begun don't wait, either.
    """
    margin_s = max(OVERDUE_S, usual_s)
    first_s, last_s = min(ends_s), max(ends_s)
    if now_s < first_s + margin_s:
        open_at_s = first_s - FETCH_LEAD_S if fetches_ahead else NEVER_S
        return FetchGate(open_at_s, FETCH_LEAD_S, again_at_s=first_s + margin_s)
    if is_placed or now_s >= last_s + margin_s:
        return FetchGate(gives_back=True, recalls=True)
    return FetchGate(again_at_s=last_s + margin_s, gives_back=True)


PATIENCE_S = 0.25
"""The longest wait for a lent instance; most bulk batches take a tenth of it."""

FETCH_EVERY_S = 0.003
"""The pause between two fetches while requests wait."""


class LentInstances:
    """Decides how to fetch while no idle instance can begin: all are lent for bulk work, or lack resources.

    Requests make one batch, fetched in a few steps. After `PATIENCE_S` they go back to the queue (`is_overdue`).
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_overdue = False
        self._waiting = 0
        self._fetched_s = NEVER_S
        self._since_s = NEVER_S

    def change(self, count: int) -> None:
        """Lends instances; a negative count returns them."""
        self.count += count
        if count < 0 or not self.count:
            self.reset()

    def reset(self) -> None:
        """Ends the wait."""
        self.is_overdue, self._waiting, self._since_s = False, 0, NEVER_S

    def decide_fetch(self, now_s: float, waiting: int) -> tuple[bool, float]:
        """Returns whether to fetch now, and when to look again."""
        if self.is_overdue or not waiting:
            return not self.is_overdue, NEVER_S
        if waiting != self._waiting:
            self._waiting, self._fetched_s = waiting, now_s
        self._since_s = min(self._since_s, now_s)
        overdue_at_s, fetch_at_s = self._since_s + PATIENCE_S, self._fetched_s + FETCH_EVERY_S
        if now_s >= overdue_at_s:
            self.is_overdue = True
            return False, NEVER_S
        return now_s >= fetch_at_s, overdue_at_s if now_s >= fetch_at_s else min(overdue_at_s, fetch_at_s)
