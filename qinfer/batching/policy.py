"""The policy of batching, which requests run together and when: one pure function, `decide`.

It owns Triton's walk over the queue (reference §3.3, steps 4 and 5), its priorities and queue policies, and the
deadline rules of docs/explanation/batching.md. It awaits nothing, reads no clock and keeps nothing between calls:
property tests and simulators drive what production runs.

    decision = decide(pending, now_s, slots, rules, latency)
    pending == decision.expired + decision.run + decision.keep       each item in exactly one of them, in queue order
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from qinfer.models.spec import ModelSpec

_DECAY = 0.98
"""Weight that an observation keeps for each later one: about the last 50 count."""

_WINDOW = 32
"""Observations over which the floor is the minimum; two windows are looked at, so that it is never of one run."""

FETCH_S = 0.001
"""The time of one fetch more, for which a short batch may wait."""

_LONGEST_GAP_S = 0.05
"""A longer gap between two executions counts as this one: it is an accident, not the instance's way of working."""

_RUN = 5
"""Executions of a run, whose mean is not of one that was quick by chance."""

_COLD = 3
"""The first executions, which are often much slower than all others: there is no bound until a run comes after them."""

_FRESH_S = 5.0
"""Older knowledge expires no request: were the floor wrong and all deadlines below it, nothing would correct it."""


class LatencyModel:
    """Exponentially weighted least squares over (rows, seconds), and the fastest recent execution.

    Attributes:
        gap_s: How long an instance stands still between two executions though requests wait: the mean of about the
            last 50 such gaps, in which the next batch is fetched and handed over.
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
        """How long the last executions took, measured by what was expected; judged when somebody asks."""
        self._count = self._judged = 0
        self._quickest = 1.0
        self._free_at_s: deque[float] = deque()

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    def observe(self, rows: int, seconds: float, now_s: float) -> None:
        """Learns from one execution.

        Args:
            rows: Rows of the batch.
            seconds: How long it took.
            now_s: When it ended, on the clock that `floor_s` is asked with.
        """
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
        """Learns how long an instance stood still before an execution, if there were requests for it all that time.

        Args:
            begin_s: When the execution began, on any clock.
            end_s: When it ended, on the same clock.
            waited_s: How long its oldest request had been in the queue when it ended.
            instances: How many instances there are; the one that became free first is taken to have run it.
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
        """Returns the expected duration of a batch of `rows` rows; 0 when nothing is known."""
        return self._base_s + self._per_row_s * rows

    def full_s(self, rows: int) -> float:
        """Returns the expected time from one batch of `rows` rows to the next; 0 when nothing is known."""
        expected_s = self.estimate_s(rows)
        return expected_s + self.gap_s if expected_s else 0.0

    def best_s(self, rows: int) -> float:
        """Returns the shortest time from one batch of `rows` rows to the next that the observations allow.

        The bound is wide after few executions, for sizes far from those seen, and where executions differ; it follows
        at once where they become quicker: the quickest run of the last 64 counts. It is 0 until eight were seen.
        """
        weight = self._weight
        if self._count < _COLD + _RUN:
            return 0.0
        # One deviation of 100 % is assumed besides those that were seen: executions may be equal by chance.
        error2 = (1.0 + self._deviation2) / (1.0 + weight) / weight
        mean_rows, mean_s = self._rows / weight, self._seconds / weight
        distance2, variance = (rows - mean_rows) ** 2, self._rows2 / weight - mean_rows * mean_rows
        lever = distance2 / max(variance, 1e-9) if distance2 > 0.25 else 0.0
        # The standard error of a regression at `rows`; but a larger batch is not quicker than those that were seen.
        regressed_s = self.estimate_s(rows) / (1.0 + math.sqrt(error2 * (1.0 + lever)))
        seen_s = mean_s * min(rows / mean_rows, 1.0) / (1.0 + math.sqrt(error2))
        gap_s = self.gap_s * max(1.0 - 2.0 / math.sqrt(self._gap_weight), 0.0) if self._gap_weight else 0.0
        return max(regressed_s, seen_s) * self._quickest_run() + gap_s

    def floor_s(self, now_s: float) -> float:
        """Returns the shortest of the last 32 to 64 executions; 0 before there were so many, or when they are old."""
        return 0.0 if now_s - self._observed_at_s > _FRESH_S else self._floor_s

    def _quickest_run(self) -> float:
        """Returns how long the quickest run took, measured by what was expected; at most 1."""
        if self._judged != self._count:
            ratios = list(self._ratios)
            runs = (sum(ratios[end - _RUN : end]) / _RUN for end in range(_RUN, len(ratios) + 1))
            self._judged, self._quickest = self._count, min(1.0, *runs)
        return self._quickest

    def _fit(self) -> None:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows2 / self._weight - mean_rows * mean_rows
        if variance < 1e-6:
            # Only one size was seen: assume that a larger batch takes proportionally longer, never less than this.
            self._base_s, self._per_row_s = 0.0, mean_s / mean_rows
            return
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        self._per_row_s = min(max(covariance / variance, 0.0), mean_s / mean_rows)
        self._base_s = mean_s - self._per_row_s * mean_rows


NEVER_S = float("inf")


class Item(msgspec.Struct, eq=False):
    """A request, as far as the policy has to know it.

    Attributes:
        rows: Its size along the batch dimension; 1 when the model has none.
        key: Items may share a batch only if their keys are equal (`assemble.key_function`).
        enqueued_s: When it entered the queue.
        deadline_s: When its answer is worth nothing any more, on the same clock.
        alone: It must not share a batch, because it may have killed a worker.
        level: Its priority level, 1 = the highest; 0 where the model has none.
        queue_deadline_s: Until when it may wait; from then on it is refused, or delayed. Read like the next two only
            where `Rules.prefetch` is false.
        delays: It is delayed then and not refused: it waits behind the others of its level (Triton's DELAY).
        delayed: It was delayed before it came here.
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
        """The instant from which it is answered as expired."""
        return self.deadline_s if self.delays or self.delayed else min(self.deadline_s, self.queue_deadline_s)

    def overstays(self, now_s: float) -> bool:
        """Tells whether it has to be moved behind the others of its level, where it is not yet."""
        return self.delays and not self.delayed and self.queue_deadline_s <= now_s


T = TypeVar("T", bound=Item)


class Latency(Protocol):
    """Latency estimates that the policy needs; `LatencyModel` implements them."""

    def estimate_s(self, rows: int) -> float:
        """Returns how long a batch of so many rows probably takes; 0 when nothing is known."""
        ...

    def floor_s(self, now_s: float) -> float:
        """Returns what every execution surely takes; 0 when nothing recent is known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A model's batching rules, ready for the walk.

    Attributes:
        max_rows: No batch has more rows than this.
        preferred: Sizes worth stopping at.
        largest_preferred: The largest of them.
        delay_s: How long the oldest request may wait for its batch to fill; 0 = send what is there.
        merge: False for the default scheduler, which runs each request alone.
        prefetch: Requests run in the order in which they came, until their deadlines. False where the model has
            priority levels or a queue policy with a timeout.
        ahead: A batch may be formed before an instance waits for it: no request can come that goes before it.
        levels: The model has priority levels: the last request to come may be the first to run.
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
    def of(cls, spec: ModelSpec) -> "Rules":
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
        """Tells whether the next batch, of which so many rows are here, lacks some; where it is not formed before."""
        return not self.prefetch and rows < self.max_rows


class Slots(msgspec.Struct, frozen=True):
    """Where a batch can go now: to idle instances, or to the one place ahead of busy ones."""

    idle: int
    ahead: int = 0


class Decision(msgspec.Struct, Generic[T], frozen=True):
    """A decision of the policy.

    Attributes:
        expired: Answer these as expired: they can't be executed in time, or have waited too long.
        run: Run these as one batch; empty = nothing to run yet.
        keep: What stays pending, in queue order.
        wake_at_s: When to decide again, if nothing else happens; `NEVER_S` = only when something does.
    """

    expired: list[T]
    run: list[T]
    keep: Sequence[T]
    wake_at_s: float


def decide(pending: Sequence[T], now_s: float, slots: Slots, rules: Rules, latency: Latency) -> Decision[T]:
    """Decides about the pending items; O(len(pending)) where they are the `keep` of the last decision and a few more.

    Args:
        pending: The items in the order in which they came, or as `keep` had them.
        now_s: The present, on the clock of the items' instants.
        slots: How many batches can be placed.
        rules: The model's batching rules.
        latency: What is known of the model's speed.

    Returns:
        The decision about at most one batch: ask again with `keep` until `run` is empty.
    """
    horizon_s = now_s + latency.floor_s(now_s)
    if rules.prefetch:
        expired = [item for item in pending if item.deadline_s <= horizon_s]
        live = [item for item in pending if item.deadline_s > horizon_s] if expired else pending
    else:
        expired, live = _queue(pending, now_s, horizon_s)
    if not live:
        return Decision(expired, [], [], NEVER_S)
    walk = _walk(live, rules)
    wake_at_s = _due_at_s(live, now_s, slots, rules, walk, latency)
    if wake_at_s > now_s:
        return Decision(expired, [], live, wake_at_s)
    delayed_too_long = rules.delay_s > 0 and now_s - _oldest_s(live, rules, walk) >= rules.delay_s
    count = walk.best if walk.best and not delayed_too_long else walk.items
    if count == len(live):
        return Decision(expired, list(live), [], NEVER_S)
    return Decision(expired, list(live[:count]), live[count:], NEVER_S)


def next_batch(pending: Sequence[T], rules: Rules) -> Sequence[T]:
    """Returns what the next batch can have at the most: the first pending items, as many as have `max_rows` rows.

    Args:
        pending: The items, as the `keep` of a decision has them.
        rules: The model's batching rules.
    """
    rows = 0
    for count, item in enumerate(pending, start=1):
        rows += item.rows
        if rows >= rules.max_rows:
            return pending[:count]
    return pending


def is_worth_filling(run: Sequence[Item], now_s: float, rules: Rules, latency: Latency) -> bool:
    """Tells whether a short batch should wait for one more fetch, when it is likely that requests wait in the queue.

    It should where a full batch, begun `FETCH_S` later, executes more rows a second, and where all its requests can
    wait that long.

    Args:
        run: The requests of the batch, which could begin now.
        now_s: The present, on the clock of their instants.
        rules: The model's batching rules.
        latency: What is known of the model's speed.
    """
    rows = sum(item.rows for item in run)
    short_s, full_s = latency.estimate_s(rows), latency.estimate_s(rules.max_rows)
    if not rules.merge or not short_s or rows * (full_s + FETCH_S) >= rules.max_rows * short_s:
        return False
    # A batch of more rows takes longer: it may not make those late that are in time now.
    latest_s = min(item.deadline_s for item in run) - full_s
    refused_s = min(item.queue_deadline_s if not item.delays else NEVER_S for item in run)
    return now_s + 2 * FETCH_S < min(latest_s, refused_s)


def _queue(pending: Sequence[T], now_s: float, horizon_s: float) -> tuple[list[T], Sequence[T]]:
    """Returns what expires, and the rest by level; in each level what is delayed behind what is not."""
    expired: list[T] = []
    live: list[T] = []
    for item in pending:
        is_over = item.ends_s <= now_s or item.deadline_s <= horizon_s
        (expired if is_over else live).append(item)
    live.sort(key=lambda item: _rank(item, now_s))  # stable, and quick where little changed since the last time
    return expired, live


def _rank(item: Item, now_s: float) -> tuple[int, float]:
    """Returns an item's place in the queue; among the delayed, the first to have been delayed is the first."""
    if item.delayed or (item.delays and item.queue_deadline_s <= now_s):
        return item.level, item.queue_deadline_s
    return item.level, -NEVER_S


class _Walk(msgspec.Struct, frozen=True):
    """The result of a walk: items that fit, their rows, the best mark among them (0 = none), if more could join."""

    items: int
    rows: int
    best: int
    closed: bool


def _walk(live: Sequence[T], rules: Rules) -> _Walk:
    """Goes through the queue until an item can't join (reference §3.3 step 4)."""
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


def _due_at_s(live: Sequence[T], now_s: float, slots: Slots, rules: Rules, walk: _Walk, latency: Latency) -> float:
    """Returns when the batch of this walk should leave, or the queue changes: `now_s` for at once (§3.3 step 5)."""
    timeout_s = NEVER_S if rules.prefetch else _next_timeout_s(live, now_s)
    if not slots.idle:
        full = walk.closed or walk.rows >= rules.largest_preferred
        # A batch that can still grow is not placed ahead: it would only shrink what the instance gets next.
        return now_s if slots.ahead and full else min(_first_deadline_s(live), timeout_s)
    if walk.best or walk.closed or walk.rows >= rules.largest_preferred or rules.delay_s <= 0:
        return now_s
    # Waiting longer than this would miss the earliest deadline.
    latest_start_s = _first_deadline_s(live) - latency.estimate_s(walk.rows)
    return max(now_s, min(_oldest_s(live, rules, walk) + rules.delay_s, latest_start_s, timeout_s))


def _oldest_s(live: Sequence[T], rules: Rules, walk: _Walk) -> float:
    """Returns when the oldest item of the batch was enqueued."""
    return live[0].enqueued_s if rules.prefetch else min(item.enqueued_s for item in live[: walk.items])


def _first_deadline_s(live: Sequence[T]) -> float:
    return min(item.deadline_s for item in live)


def _next_timeout_s(live: Sequence[T], now_s: float) -> float:
    """Returns when the next item will have waited too long; what is delayed then may make another batch the best."""
    return min((item.queue_deadline_s for item in live if item.queue_deadline_s > now_s), default=NEVER_S)


PATIENCE_S = 0.25
"""Requests that have waited so long for a lent instance are given back to the queue. Nearly all bulk batches take a
tenth of it, even where the machine has too few cores; and what is given back begins its way anew."""

FETCH_EVERY_S = 0.003
"""The pause between two fetches while requests wait."""


class LentInstances:
    """Instances that are lent for bulk work: how requests are fetched that wait for them. Pure arithmetic.

    What comes while they are away makes one batch when they are back, so it is fetched in a few steps. It does not wait
    for long: an idle worker may have it.

    Attributes:
        count: How many instances are away.
        is_overdue: Requests were given back: nothing is fetched until an instance is back.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_overdue = False
        self._waiting = 0
        self._fetched_s = NEVER_S
        self._since_s = NEVER_S

    def change(self, count: int) -> None:
        """Takes note that so many instances more are away, or, if negative, are back."""
        self.count += count
        if count < 0 or not self.count:
            self.is_overdue, self._waiting, self._since_s = False, 0, NEVER_S

    def look(self, now_s: float, waiting: int) -> tuple[bool, float]:
        """Decides what to do while all instances are away.

        Args:
            now_s: Now.
            waiting: How many requests wait here.

        Returns:
            Whether to fetch now, and when to look again. Where requests have waited for too long, `is_overdue` is set.
        """
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
