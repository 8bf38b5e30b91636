"""The turns of a model whose executions need resources: its batcher forms a batch when the rate limiter lets it begin.

    add_items ─▶ pending ─▶ want ─▶ (the rate limiter: its turn) ─▶ policy.decide ─▶ executor …

While it waits for resources, a batch grows. After a short wait its requests go back to the queue, for other workers,
and are fetched again when it is the model's turn.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from qinfer.batching.execution import WorkItem
from qinfer.batching.rate_limiter import Ledger
from qinfer.core.messages import ResourceHolder

LOOK_S = 0.05
"""How long resources stay reserved for a fetch."""


class LimitedInstances(Protocol):
    """Instances that may begin while they are ready; `turn` is called if one is, after a wait."""

    ledger: Ledger
    turn: Callable[[], None]

    @property
    def ready(self) -> int:
        """How many executions may begin now."""
        ...

    def want(self, count: int, callers: Sequence[ResourceHolder]) -> None:
        """Lets `count` idle instances wait for resources, and no more."""
        ...

    def refusal(self, callers: Sequence[ResourceHolder]) -> str:
        """Returns why these callers' request can't be executed."""
        ...


class ResourceTurns:
    """The place of a batcher in the rate limiter's line."""

    def __init__(self, instances: LimitedInstances, changed: Callable[[], None]) -> None:
        self.wanted = 0
        self.looks_until_s = 0.0
        """The end of a fetch's reservation, or 0."""
        self._is_looking = False
        self._instances = instances
        instances.turn = changed

    @property
    def ready(self) -> int:
        """How many executions may begin now."""
        return self._instances.ready

    @property
    def waits(self) -> bool:
        """Whether batches wait, and may not begin."""
        return self.wanted > 0 and not self._instances.ready

    def line_up(self, items: Sequence[WorkItem], count: int) -> None:
        """Lets `count` instances wait."""
        self.wanted = max(count, 0)
        callers = {holder.token: holder for item in items for holder in item.request.holders}
        self._instances.want(self.wanted, list(callers.values()) if self.wanted else ())

    def begin_fetch(self) -> None:
        """Notes whether resources are reserved; an earlier fetch may have missed requests."""
        self._is_looking = self.looks_until_s > 0

    def end_fetch(self, *, is_empty: bool) -> None:
        """Ends the reservation after a fetch within it."""
        if self._is_looking or not is_empty:
            self.looks_until_s = 0.0

    def refusal(self, item: WorkItem) -> str:
        """Returns why an item would wait for its callers, or ""."""
        return self._instances.refusal(item.request.holders) if item.request.holders else ""

    def holds(self, item: WorkItem) -> bool:
        """Returns whether its callers hold resources that others in the lane may wait for."""
        return self._instances.ledger.holds(item.request.holders)
