"""The memory that a gateway lends to bodies of requests that have not come in whole.

A body reserves its bytes before its client may send them. When the budget is spent, a large body waits for its turn and
its client is held back by flow control; a small one, whose bytes are under way already, is refused. An eighth of the
budget is kept for small bodies, so that large uploads do not shut them out.
"""

from collections.abc import Callable, Hashable

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are let in at once, or refused; flow control lets clients send as much unasked."""

MAX_WAITING = 256
"""Large bodies that may wait for their turn; each may have sent `SMALL_BYTES` by then."""


class Reservation:
    """The memory of one body.

    Attributes:
        owner: Who is counted for it.
        size: Bytes.
        granted: Called when its turn comes, unless it came at once.
        is_granted: The client may send the body.
    """

    __slots__ = ("_budget", "granted", "is_granted", "owner", "size")

    def __init__(self, budget: "ReceivingBudget", owner: Hashable, size: int, granted: Callable[[], None]) -> None:
        self._budget = budget
        self.owner = owner
        self.size = size
        self.granted = granted
        self.is_granted = False

    def release(self) -> None:
        """Gives the memory back, or stops waiting for it; a second time changes nothing."""
        if self.size:
            self._budget.released(self)


class ReceivingBudget:
    """Grants memory to bodies; those who hold least go first.

    Args:
        max_bytes: The memory of all bodies together. A larger body is let in alone.

    Attributes:
        held_bytes: Bytes that are granted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0
        self._large = 0
        self._held: dict[Hashable, int] = {}
        self._waiting: dict[Reservation, None] = {}  # in the order of their arrival

    def reserve(self, owner: Hashable, size: int, granted: Callable[[], None]) -> Reservation | None:
        """Reserves memory for a body.

        Args:
            owner: Who is counted for it: a tenant, or a connection.
            size: Bytes, more than 0.
            granted: Called when its turn comes, if the reservation is not granted at once.

        Returns:
            The reservation; `None` = the budget is spent, and the body can't wait.
        """
        one = Reservation(self, owner, size, granted)
        if (size <= SMALL_BYTES or not self._waiting) and self._fits(size):
            self._grant(one)
        elif size <= SMALL_BYTES or len(self._waiting) >= MAX_WAITING:
            return None
        else:
            self._waiting[one] = None
        return one

    def released(self, one: Reservation) -> None:
        """Takes a reservation back."""
        size, one.size = one.size, 0
        if not one.is_granted:
            del self._waiting[one]
            return
        self.held_bytes -= size
        self._large -= size > SMALL_BYTES
        self._held[one.owner] -= size
        if not self._held[one.owner]:
            del self._held[one.owner]
        self._grant_next()

    def _fits(self, size: int) -> bool:
        if size <= SMALL_BYTES:
            return self.held_bytes + size <= self._max_bytes
        return not self._large or self.held_bytes + size <= self._max_bytes - self._max_bytes // 8

    def _grant(self, one: Reservation) -> None:
        one.is_granted = True
        self.held_bytes += one.size
        self._large += one.size > SMALL_BYTES
        self._held[one.owner] = self._held.get(one.owner, 0) + one.size

    def _grant_next(self) -> None:
        while self._waiting:
            one = min(self._waiting, key=lambda each: self._held.get(each.owner, 0))
            if not self._fits(one.size):
                return
            del self._waiting[one]
            self._grant(one)
            one.granted()
