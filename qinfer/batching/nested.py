"""Nested requests, whose callers hold instances of the same model, go first and have instances kept for them.

    level 0   no instance of the model waits for the request
    level n   n instances wait for it

The deepest chain of calls so far needs `depth` instances. Requests of level 0 may use all instances of a worker but
`depth - 1`, those of level 1 all but `depth - 2`, and so on (resource ordering: Havender, "Avoiding deadlock in
multitasking systems", 1968), so some chain can always proceed. If a deeper chain makes all executions wait, one of them
gives way and runs again. Pure.
"""

from collections.abc import Collection, Sequence

from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.policy import NEVER_S
from qinfer.core.call_chain import level_of


class NestedRequests:
    """A version's nested requests, deepest first."""

    def __init__(self) -> None:
        self.depth = 1
        self.waiting: list[WorkItem] = []

    def split_off(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Takes the nested requests; returns the other requests."""
        others = [item for item in items if not level(item)]
        if len(others) < len(items):
            nested = [item for item in items if level(item)]
            self.waiting = sorted([*self.waiting, *nested], key=level, reverse=True)
            self.depth = max(self.depth, level(self.waiting[0]) + 1)
        return others

    @property
    def first_deadline_s(self) -> float:
        """The earliest expiry of a waiting request."""
        return min([item.ends_s for item in self.waiting]) if self.waiting else NEVER_S

    def late(self, now_s: float) -> list[WorkItem]:
        """Removes and returns expired requests."""
        late = [item for item in self.waiting if item.ends_s <= now_s]
        self.waiting = [item for item in self.waiting if item.ends_s > now_s]
        return late

    def count_free(self, of_level: int, executions: Collection[Execution], count: int) -> int:
        """Returns how many executions of a level fit."""
        kept = max(min(self.depth, count) - 1 - of_level, 0)
        return count - kept - sum(level(one.items[0]) <= of_level for one in executions)

    def next(self, executions: Collection[Execution], count: int) -> WorkItem | None:
        """Removes and returns the next request."""
        for item in self.waiting:
            if self.count_free(level(item), executions, count) > 0:
                self.waiting.remove(item)
                return item
        return None

    def victim(self, executions: Collection[Execution]) -> Execution | None:
        """Returns the execution that gives way if all wait."""
        tokens = {holder.token for item in self.waiting for holder in item.request.holders}
        if not all(one.is_one_of(tokens) and not (one.gives_way or one.end_ns) for one in executions):
            return None
        return min(executions, key=lambda one: (level(one.items[0]), -one.begin_ns), default=None)

    def waiting_for(self, execution: Execution) -> list[WorkItem]:
        """Removes and returns an execution's requests."""
        found = [item for item in self.waiting if execution.is_one_of({one.token for one in item.request.holders})]
        self.waiting = [item for item in self.waiting if item not in found]
        return found


def level(item: WorkItem) -> int:
    """Returns how many instances wait for a request."""
    request = item.request
    return level_of(request.holders, request.model, request.version) if request.holders else 0
