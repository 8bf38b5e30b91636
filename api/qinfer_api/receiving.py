"""The memory that a gateway lends to bodies of requests that have not come in whole.

A body reserves its bytes before its client may send them. When the budget is spent, a large body waits for its turn and
its client is held back by flow control; a small one, whose bytes are under way already, is refused. An eighth of the
budget is kept for small bodies, so that large uploads do not shut them out. A compressed body reserves what may come of
it, too, and holds what has come of it until it is decoded: a few kilobytes can be the memory of many.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager

from qinfer.errors import Overloaded

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are let in at once, or refused; flow control lets clients send as much unasked."""

MAX_WAITING = 256
"""Large bodies that may wait for their turn; each may have sent `SMALL_BYTES` by then."""

SPENT = (
    "the gateway receives as many bytes as it may (QINFER_LIMITS__MAX_RECEIVING_BYTES); try again, or another gateway"
)
"""The text of refusals."""


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

    def grow(self, size: int) -> None:
        """Makes a granted reservation as large as a body whose size was not known before has become.

        Raises:
            Overloaded: The budget is spent.
        """
        if size > self.size and not self._budget.grow(self, size):
            raise Overloaded(SPENT)

    def shrink(self, size: int) -> None:
        """Gives back what is more than so many bytes, at least 1, of a granted reservation."""
        if size < self.size:
            self._budget.shrink(self, size)

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

    @property
    def waiting(self) -> int:
        """Number of bodies that wait for their turn."""
        return len(self._waiting)

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

    @asynccontextmanager
    async def reserved(self, owner: Hashable, size: int, within_s: float) -> AsyncIterator[Reservation]:
        """Holds memory for a body during the block, from its turn on.

        Args:
            owner: Who is counted for it.
            size: Bytes, more than 0.
            within_s: How long its turn may take.

        Raises:
            Overloaded: The budget is spent.
        """
        one = await self.granted(owner, size, within_s)
        try:
            yield one
        finally:
            one.release()

    async def granted(self, owner: Hashable, size: int, within_s: float) -> Reservation:
        """Waits for the turn of a body: see `reserved`; the caller releases what it returns."""
        turn = asyncio.Event()
        one = self.reserve(owner, size, turn.set)
        if one is None:
            raise Overloaded(SPENT)
        try:
            if not one.is_granted:
                async with asyncio.timeout(within_s):
                    await turn.wait()
        except TimeoutError:
            one.release()
            raise Overloaded(SPENT) from None
        except BaseException:
            one.release()
            raise
        return one

    def grow(self, one: Reservation, size: int) -> bool:
        """Makes a granted reservation larger; `False` = the budget is spent, and the body can't wait."""
        more, was_large = size - one.size, one.size > SMALL_BYTES
        is_alone = self._large == was_large
        if not is_alone and self.held_bytes + more > self._max_bytes - self._max_bytes // 8:
            return False
        self._large += (size > SMALL_BYTES) - was_large
        one.size = size
        self.held_bytes += more
        self._held[one.owner] += more
        return True

    def shrink(self, one: Reservation, size: int) -> None:
        """Makes a granted reservation smaller."""
        self._large -= (one.size > SMALL_BYTES) - (size > SMALL_BYTES)
        self.held_bytes -= one.size - size
        self._held[one.owner] -= one.size - size
        one.size = size
        self._grant_next()

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
