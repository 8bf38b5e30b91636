"""What a batch that raised was cut into (DESIGN.md §2.5).

    [a b c d] raises ─▶ [a b] [c d] ─▶ [a b] raises ─▶ [a] [b] [c d] ─▶ …        c and d never meet a and b again

So an item gets the model's error only from an execution in which it was alone, and one bad item of n costs about
2·log2(n) executions more. A batch that can't be assembled is cut in the same way.
"""

from collections import deque
from collections.abc import Sequence

from qinfer.batching.execution import Pending
from qinfer.batching.policy import NEVER_S


class Halves(deque[list[Pending]]):
    """Batches that wait for an instance and run as they are, the one that was cut last first: a `deque` of them."""

    def cut(self, items: Sequence[Pending]) -> None:
        """Adds the two halves of a batch, in order, before all others; a single item is a batch by itself."""
        middle = (len(items) + 1) // 2
        if len(items) > 1:
            self.appendleft(list(items[middle:]))
        self.appendleft(list(items[:middle]))

    def take_all(self) -> list[Pending]:
        """Removes and returns every item, in order."""
        items = [item for batch in self for item in batch]
        self.clear()
        return items

    def take_late(self, horizon_s: float) -> list[Pending]:
        """Removes and returns the items whose deadline is not after `horizon_s`."""
        late = [item for batch in self for item in batch if item.deadline_s <= horizon_s]
        for item in late:
            self.drop(item)
        return late

    def drop(self, item: Pending) -> bool:
        """Removes an item; tells whether it was here."""
        for batch in self:
            if item in batch:
                batch.remove(item)
                if not batch:
                    self.remove(batch)
                return True
        return False

    @property
    def first_deadline_s(self) -> float:
        """The earliest deadline of all items; `NEVER_S` without any."""
        return min((item.deadline_s for batch in self for item in batch), default=NEVER_S)
