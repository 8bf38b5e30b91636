"""Instances that are lent, for bulk work: how requests are fetched that wait for them. Pure arithmetic.

What comes while they are away makes one batch when they are back, so it is fetched in a few steps. It does not wait for
long: an idle worker may have it.
"""

from qinfer.batching.policy import NEVER_S

PATIENCE_S = 0.25
"""Requests that have waited so long for a lent instance are given back to the queue. Nearly all bulk batches take a
tenth of it, even where the machine has too few cores; and what is given back begins its way anew."""

FETCH_EVERY_S = 0.003
"""The pause between two fetches while requests wait."""


class Loans:
    """See the module docstring.

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
