"""The batcher of a model whose executions need resources: it forms a batch once an instance has them.

    add_items ─▶ pending ─▶ want ─▶ (the rate limiter grants) ─▶ permitted ─▶ policy.decide ─▶ executor …

While it waits for resources, a batch grows. After a short wait its requests go back to the queue, for other workers.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from qinfer.batching import policy
from qinfer.batching.batcher import Batcher, Executor, LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.batching.policy import NEVER_S, FreeSlots, LatencyModel, LentInstances
from qinfer.core.messages import ResourceHolder
from qinfer.errors import InferenceFailed

LOOK_S = 0.05
"""How long a permit waits for a fetch."""


class PermittedExecutor(Executor, Protocol):
    """Instances with permits: `start` uses one, `permitted` announces one."""

    permits: int
    permitted: Callable[[], None]

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        """Waits for `count` permits, and returns surplus permits."""
        ...

    def is_held(self, callers: Sequence[ResourceHolder]) -> bool:
        """Returns whether a caller holds resources."""
        ...

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        """Returns why these callers' request can't be executed."""
        ...


class LimitedBatcher(Batcher):
    """A batcher whose model's executor is a `PermittedExecutor`."""

    keeps_for_calls = False

    def _adopt(self, model: LoadedModel, latency: LatencyModel | None) -> None:
        self._blocked, self._is_gating = LentInstances(), False
        self._permits_until_s = 0.0
        self._executor = cast("PermittedExecutor", model.executor)
        self._executor.permitted = self._permitted
        super()._adopt(model, latency)

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Takes items; refuses those whose callers would wait for themselves."""
        self._permits_until_s = 0.0
        refused = [(item, self._executor.refusal(item.request.holders)) for item in items if item.request.holders]
        for item, reason in refused:
            if reason:
                self.fail([item], InferenceFailed(reason))
        failed = {item for item, reason in refused if reason}
        super().add_items([item for item in items if item not in failed] if failed else items)

    def _permitted(self) -> None:
        self._blocked = LentInstances()
        if not self._has_waiting:
            self._permits_until_s = self._clock.now_s() + LOOK_S
        self._pump()

    def _give_back(self) -> None:
        """Keeps those whose callers hold resources that others in the lane may wait for."""
        kept = [] if self.paused else [item for item in self._pending if self._executor.is_held(item.request.holders)]
        if kept:
            self._pending = [item for item in self._pending if item not in kept]
        super()._give_back()
        self._pending = [*kept, *self._pending]

    @property
    def _has_room(self) -> bool:
        is_full = self._waiting_rows >= self._rules.max_rows if self._rules.merge else bool(self._pending)
        return not (is_full or self._bisection)

    @property
    def _has_waiting(self) -> bool:
        return bool(self._pending or self._bisection)

    def _idle_count(self) -> int:
        idle = super()._idle_count()
        return min(idle, self._executor.permits) if self._has_waiting or self._blocked.is_overdue else idle

    def _slots(self) -> FreeSlots:
        """Returns the free slots; the place ahead counts only for the fetch gate."""
        idle = self._idle_count()
        return FreeSlots(max(idle, 0), int(self._is_gating and self._rules.ahead and self._has_room))

    def _pump(self, *, more: bool = False) -> None:
        super()._pump(more=more)
        self._request_permits()

    def _request_permits(self) -> None:
        now_s, idle = self._clock.now_s(), max(super()._idle_count(), 0)
        count = 0
        if self._has_waiting:
            count = self._batches(now_s)
        elif not self.paused and (self._blocked.is_overdue or now_s < self._permits_until_s):
            count = 1
        else:
            self._blocked = LentInstances()
        self._executor.want(min(count, idle), self._callers() if count else ())

    def _batches(self, now_s: float) -> int:
        if self._bisection:
            return len(self._bisection)
        if not policy.decide(self._pending, now_s, FreeSlots(1), self._rules, self._latency).run:
            return 0
        return -(-self._waiting_rows // self._rules.max_rows) if self._rules.merge else len(self._pending)

    def _callers(self) -> list[ResourceHolder]:
        items = [*self._pending, *(item for batch in self._bisection for item in batch)]
        return list({holder.token: holder for item in items for holder in item.request.holders}.values())

    def _set_gate(self, now_s: float, wake_at_s: float) -> float:
        """Keeps the gate open while a batch that waits for resources has room."""
        idle = super()._idle_count()
        if not self._has_waiting and now_s < self._permits_until_s:
            self._fetchable.set()
            self._fetch_wait_s = 0.0
            return self._permits_until_s
        is_blocked = idle > 0 and not self._executor.permits and (self._has_waiting or self._blocked.is_overdue)
        if not is_blocked or self.paused or self._lent.count:
            self._is_gating = True
            try:
                return super()._set_gate(now_s, wake_at_s)
            finally:
                self._is_gating = False
        if self._pending and not self._bisection and not self._batches(now_s):
            due_s = policy.decide(self._pending, now_s, FreeSlots(1), self._rules, self._latency).wake_at_s
            self._fetchable.set()
            self._fetch_wait_s = max(due_s - now_s, 0.001)
            return due_s
        is_open, again_at_s = self._blocked.decide_fetch(now_s, len(self._pending) + len(self._bisection))
        (self._fetchable.set if is_open and self._has_room else self._fetchable.clear)()
        self._fetch_wait_s = NEVER_S
        if self._blocked.is_overdue:
            self._give_back()
        return again_at_s
