"""The batcher of a model whose executions need resources: it forms a batch when the rate limiter lets it begin.

    admit ─▶ pending ─▶ want ─▶ (the rate limiter: its turn) ─▶ policy.decide ─▶ executor …

While it waits for resources, a batch grows. After a short wait its requests go back to the queue, for other workers,
and are fetched again when it is the model's turn.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from qinfer.batching import policy
from qinfer.batching.batcher import Batcher, Executor, LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.batching.policy import FreeSlots, LatencyModel
from qinfer.batching.rate_limiter import Ledger
from qinfer.core.messages import ResourceHolder
from qinfer.errors import InferenceFailed

LOOK_S = 0.05
"""How long resources stay reserved for a fetch."""


class ReadyExecutor(Executor, Protocol):
    """Instances that may begin while they are ready; `turn` is called if one is, after a wait."""

    ledger: Ledger
    ready: int
    turn: Callable[[], None]

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        """Lets `count` idle instances wait for resources, and no more."""
        ...

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        """Returns why these callers' request can't be executed."""
        ...


class LimitedBatcher(Batcher):
    """A batcher whose model's executor is a `ReadyExecutor`."""

    keeps_for_calls = places_ahead = False

    def _adopt(self, model: LoadedModel, latency: LatencyModel | None) -> None:
        self._wanted, self._look_ends_s, self._is_looking = 0, 0.0, False
        self._executor = cast("ReadyExecutor", model.executor)
        self._executor.turn = self._on_turn
        super()._adopt(model, latency)

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Takes items; refuses those whose callers would wait for themselves."""
        if items or self._is_looking:
            self._look_ends_s = 0.0
        kept: list[WorkItem] = []
        for item in items:
            if item.request.holders and (reason := self._executor.refusal(item.request.holders)):
                self.fail([item], InferenceFailed(reason))
            else:
                kept.append(item)
        super().add_items(kept)

    def plan_fetch(self) -> tuple[int, float]:
        """Notes whether the fetch begins while resources are reserved; an earlier one may have missed requests."""
        self._is_looking = self._look_ends_s > 0
        return super().plan_fetch()

    def _on_turn(self) -> None:
        self._lent.reset()
        if not (self._has_waiting or self._look_ends_s):
            self._look_ends_s = self._clock.now_s() + LOOK_S
        self._pump()

    def _pump(self, now_s: float | None = None, *, more: bool = False) -> None:
        now_s = self._clock.now_s() if now_s is None else now_s
        self._line_up(now_s)
        super()._pump(now_s, more=more)
        self._line_up(now_s)

    def _line_up(self, now_s: float) -> None:
        if now_s >= self._look_ends_s:
            self._look_ends_s = 0.0
        count = self._due_batches(now_s)
        if not (self._has_waiting or self.paused):
            count = int(self._lent.is_overdue or self._look_ends_s > 0)
        self._wanted = max(min(count, super()._idle_count()), 0)
        items = [*self._pending, *(item for batch in self._bisection for item in batch)]
        callers = {holder.token: holder for item in items for holder in item.request.holders}
        self._executor.want(self._wanted, list(callers.values()) if self._wanted else ())

    def _due_batches(self, now_s: float) -> int:
        if self._bisection:
            return len(self._bisection)
        if not policy.decide(self._pending, now_s, FreeSlots(1), self._rules, self._latency).run:
            return 0
        return -(-self._waiting_rows // self._rules.max_rows) if self._rules.merge else len(self._pending)

    @property
    def _has_waiting(self) -> bool:
        return bool(self._pending or self._bisection)

    def _idle_count(self) -> int:
        idle = super()._idle_count()
        return min(idle, self._executor.ready) if self._wanted else idle

    def _set_gate(self, now_s: float, wake_at_s: float) -> float:
        if self._look_ends_s and not self._has_waiting:
            self._fetchable.set()
            self._fetch_wait_s = 0.0
            return self._look_ends_s
        if self._wanted and not self._executor.ready:
            return self._wait_for_instance(now_s)
        if not self._lent.count:
            self._lent.reset()
        return super()._set_gate(now_s, wake_at_s)

    def _wait_for_instance(self, now_s: float) -> float:
        """Fetches only while the waiting batch has room."""
        again_at_s = super()._wait_for_instance(now_s)
        if not self._next_has_room:
            self._fetchable.clear()
        return again_at_s

    def _give_back(self) -> None:
        """Keeps those whose callers hold resources that others in the lane may wait for."""
        kept = [] if self.paused else [i for i in self._pending if self._executor.ledger.holds(i.request.holders)]
        if kept:
            self._pending = [item for item in self._pending if item not in kept]
        super()._give_back()
        self._pending = [*kept, *self._pending]
