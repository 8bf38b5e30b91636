"""The memory that a gateway lends to bodies of requests that have not come in whole, and to large answers.

A body reserves its bytes before its client may send them. When the budget is spent, a large body waits for its turn and
its client is held back by flow control; a small one, whose bytes are under way already, is refused. An eighth of the
budget is kept for small bodies, so that large uploads do not shut them out. A compressed body reserves what may come of
it, too, and holds what has come of it until it is decoded: a few kilobytes can be the memory of many. Bodies whose
decoding makes much of them are decoded one at a time, and what each becomes is counted, too. A large answer waits in
Redis for its memory, and has it until its client has read it.

Each owner has at most twice as much as it leaves free, so that one tenant never has all of it (the rule of Choudhury
and Hahne for buffers that switches share, IEEE/ACM Transactions on Networking 6(2), 1998). A large body whose bytes
come too slowly is given up, from the start: its memory is for those who send.
"""

import asyncio
import ctypes
import gc
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from itertools import count

from qinfer.errors import Overloaded

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are let in at once, or refused; flow control lets clients send as much unasked."""

MAX_WAITING = 256
"""Large bodies that may wait for their turn; each may have sent `SMALL_BYTES` by then."""

PATIENCE_S = 10
"""Seconds that a large body may be late."""

LEAST_BYTES_PER_S = 64 * 1024
"""A large body comes at this rate, or in `WHOLE_WITHIN_S`."""

WHOLE_WITHIN_S = 60

SPENT = (
    "the gateway receives as many bytes as it may (QINFER_LIMITS__MAX_RECEIVING_BYTES); try again, or another gateway"
)
"""The text of refusals."""

TOO_SLOW = "the body came too slowly: send 64 KiB a second, or all of it in a minute"
"""The text of the error of a body that is given up."""

ANSWER_BYTES = 3
"""The memory that an answer takes for a byte of its outputs: that byte, and what it becomes in JSON."""

TRIM_BYTES, TRIM_EVERY_S = 32 * 2**20, 5
"""Allocators keep what large bodies needed: the system gets it when so many bytes were lent, and so seldom."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
_SHARE = 2  # an owner has at most so many times what is free


class Reservation:
    """The memory of one body, or of one answer.

    Attributes:
        owner: Who is counted for it.
        size: Bytes.
        granted: Called when its turn comes, unless it came at once.
        is_granted: The client may send the body, or the answer may be fetched.
        is_answer: It is the memory of an answer.
    """

    __slots__ = ("_arrived", "_budget", "_late", "_seconds", "granted", "is_answer", "is_granted", "owner", "size")

    def __init__(self, budget: "ReceivingBudget", owner: Hashable, size: int, granted: Callable[[], None]) -> None:
        self._budget = budget
        self._arrived: Callable[[], int] | None = None
        self._late: Callable[[], None] | None = None
        self._seconds = 0
        self.owner = owner
        self.size = size
        self.granted = granted
        self.is_granted = self.is_answer = False

    def watch(self, arrived: Callable[[], int], late: Callable[[], None]) -> None:
        """Has a body given up that comes too slowly once it may, or an answer that is read too slowly by its client.

        Args:
            arrived: Tells how many bytes have come, or were read.
            late: Gives the body or the answer up.
        """
        self._arrived, self._late = arrived, late
        self._budget.watched[self] = None

    def unwatch(self) -> None:
        """Takes note that the body has come in whole."""
        if self._late is not None:
            self._arrived = self._late = None
            del self._budget.watched[self]

    def second_passed(self) -> None:
        """Gives the body up if it is late; an answer only while others wait for memory."""
        if self._arrived is None or self._late is None or not self.is_granted or self.size <= SMALL_BYTES:
            return
        self._seconds += 1
        if self.is_answer and not self._budget.waiting:
            return
        rate = min(self.size / WHOLE_WITHIN_S, LEAST_BYTES_PER_S)
        if self._arrived() < rate * (self._seconds - PATIENCE_S):
            late = self._late
            self.unwatch()
            late()

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

    def become(self, size: int) -> None:
        """Makes the granted reservation of an answer as large as that has become."""
        size = max(self._budget.counted(size), 1)
        if size < self.size:
            self._budget.shrink(self, size)
        elif self.size:
            self._budget.enlarge(self, size)

    def withdraw(self) -> None:
        """Stops waiting, as if its turn had not come in time; changes nothing once it is granted."""
        if not self.is_granted:
            self.release()
            self.granted()

    def release(self) -> None:
        """Gives the memory back, or stops waiting for it; a second time changes nothing."""
        self.unwatch()
        if self.size:
            self._budget.released(self)


def _needed(size: int, held: int) -> int:
    """Returns the free bytes, times `_SHARE`, without which an owner that holds so much gets no more."""
    return max(_SHARE * size, held + size)


class _WaitingReservations:
    """The bodies and answers that wait for their turn. There may be thousands, so no step looks at all of them.

    A huge one waits until it is alone, and later ones wait behind it: else it would wait for ever.

    Args:
        huge_bytes: More is huge.
        held: The bytes that each owner holds.

    Attributes:
        bodies: How many bodies of each owner wait.
    """

    def __init__(self, huge_bytes: int, held: Counter[Hashable]) -> None:
        self._huge_bytes = huge_bytes
        self._held = held
        self._numbers = count()
        self.bodies: Counter[Hashable] = Counter()
        self._places: dict[Reservation, tuple[int, int, Reservation]] = {}
        self._own: dict[Hashable, list[tuple[int, int, Reservation]]] = {}
        """The places of each owner's, by size and arrival."""
        self._firsts: list[tuple[int, int, int, Reservation]] = []
        """The first one of each owner, by what it needs, what the owner holds, and arrival."""
        self._first: dict[Hashable, tuple[int, int, int, Reservation]] = {}
        self._behind: OrderedDict[Reservation, None] = OrderedDict()
        """The first huge one, and all that have come after it."""

    def __len__(self) -> int:
        return len(self._places) + len(self._behind)

    @property
    def has_huge(self) -> bool:
        """Whether a huge one waits."""
        return bool(self._behind)

    def enter(self, one: Reservation) -> None:
        """Takes one that waits."""
        if not one.is_answer:
            self.bodies[one.owner] += 1
        if self._behind or one.size > self._huge_bytes:
            self._behind[one] = None
        else:
            self._put_in_order(one)

    def take_out(self, one: Reservation) -> None:
        """Forgets one, which has its turn or waits no more."""
        if not one.is_answer:
            self.bodies -= Counter((one.owner,))
        if place := self._places.pop(one, None):
            own = self._own[one.owner]
            del own[bisect_left(own, place)]
            self.holds(one.owner)
            return
        del self._behind[one]
        while self._behind and (first := next(iter(self._behind))).size <= self._huge_bytes:
            del self._behind[first]
            self._put_in_order(first)

    def first(self) -> Reservation:
        """Returns the one whose turn comes next; there must be one."""
        return self._firsts[0][-1] if self._firsts else next(iter(self._behind))

    def holds(self, owner: Hashable) -> None:
        """Finds the place of an owner, which holds more or less now, or of which another one is the first."""
        if first := self._first.pop(owner, None):
            del self._firsts[bisect_left(self._firsts, first)]
        if owner not in self._own:
            return
        if not self._own[owner]:
            del self._own[owner]
            return
        size, number, one = self._own[owner][0]
        held = self._held[owner]
        first = self._first[owner] = _needed(size, held), held, number, one
        insort(self._firsts, first)

    def _put_in_order(self, one: Reservation) -> None:
        place = self._places[one] = one.size, next(self._numbers), one
        insort(self._own.setdefault(one.owner, []), place)
        self.holds(one.owner)


class ReceivingBudget:
    """Grants memory to bodies; the smaller ones of owners that hold less go first.

    Args:
        max_bytes: The memory of all bodies together. A larger body is let in alone.

    Attributes:
        held_bytes: Bytes that are granted.
        watched: The reservations of bodies that may be given up.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_large_bytes = max_bytes - max_bytes // 8
        self.held_bytes = 0
        self.watched: dict[Reservation, None] = {}
        self._large = 0
        self._held: Counter[Hashable] = Counter()
        self._waiting = _WaitingReservations(self._max_large_bytes, self._held)
        self._decoding = asyncio.Lock()
        self._becoming = 0  # of what is held, what bodies become that are decoded
        self._untrimmed = self._seconds = 0

    @property
    def waiting(self) -> int:
        """Number of bodies and answers that wait for their turn."""
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
        if self._fits(one) and (size <= SMALL_BYTES or not self._waiting.has_huge):
            self._grant(one)
        elif size <= SMALL_BYTES or not self._may_wait(owner):
            return None
        else:
            self._waiting.enter(one)
        return one

    def second_passed(self) -> None:
        """Gives up the bodies that come too slowly, and returns to the system what bodies and answers have needed."""
        for one in tuple(self.watched):
            one.second_passed()
        self._seconds += 1
        if self._untrimmed >= TRIM_BYTES and self._seconds >= TRIM_EVERY_S:
            self._untrimmed = self.held_bytes
            self._seconds = 0
            self._trim()

    @staticmethod
    def _trim() -> None:
        """Frees what is in cycles, and has the allocator return what it keeps, in a thread."""
        gc.collect()
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)

    @asynccontextmanager
    async def reserved(
        self, owner: Hashable, size: int, within_s: float, waits: Callable[[Reservation], None] | None = None
    ) -> AsyncIterator[Reservation]:
        """Holds memory for a body during the block, from its turn on.

        Args:
            owner: Who is counted for it.
            size: Bytes, more than 0.
            within_s: How long its turn may take.
            waits: Gets the reservation if it has to wait, and may withdraw it.

        Raises:
            Overloaded: The budget is spent.
        """
        one = await self.granted(owner, size, within_s, waits)
        try:
            yield one
        finally:
            one.release()

    async def granted(
        self, owner: Hashable, size: int, within_s: float, waits: Callable[[Reservation], None] | None = None
    ) -> Reservation:
        """Waits for the turn of a body: see `reserved`; the caller releases what it returns."""
        turn = asyncio.Event()
        one = self.reserve(owner, size, turn.set)
        if one is None:
            raise Overloaded(SPENT)
        try:
            if not one.is_granted:
                if waits is not None:
                    waits(one)
                async with asyncio.timeout(within_s):
                    await turn.wait()
        except TimeoutError:
            one.release()
        except BaseException:
            one.release()
            raise
        if not one.is_granted:
            raise Overloaded(SPENT)
        return one

    async def lent(self, owner: Hashable, nbytes: int) -> Reservation:
        """Waits for the memory of an answer, for as long as it takes; the caller releases what it returns.

        Args:
            owner: Who is counted for it.
            nbytes: The bytes of its outputs, more than `SMALL_BYTES`.
        """
        turn = asyncio.Event()
        one = Reservation(self, owner, self.counted(ANSWER_BYTES * nbytes), turn.set)
        one.is_answer = True
        if self._fits(one) and not self._waiting.has_huge:
            self._grant(one)
            return one
        self._waiting.enter(one)
        try:
            await turn.wait()
        except BaseException:
            one.release()
            raise
        return one

    def counted(self, size: int) -> int:
        """Returns what an answer of so many bytes counts: the largest one leaves a third to others."""
        return min(size, 2 * self._max_large_bytes // 3)

    @asynccontextmanager
    async def decoding(self, size: int) -> AsyncIterator[None]:
        """Has large bodies decoded one at a time, and counts what this one becomes during the block.

        What it becomes counts beyond the limit, too, so that no body waits for memory that others hold who wait for
        this turn; meanwhile, new large bodies wait, and small ones do not.

        Args:
            size: The most bytes that it becomes.
        """
        async with self._decoding:
            self.held_bytes += size
            self._becoming = size
            self._untrimmed += size
            try:
                yield
            finally:
                self.held_bytes -= size
                self._becoming = 0
                self._grant_next()

    def grow(self, one: Reservation, size: int) -> bool:
        """Makes a granted reservation larger; `False` = the budget is spent, and the body can't wait."""
        more, was_large = size - one.size, one.size > SMALL_BYTES
        free = self._max_large_bytes - self.held_bytes
        is_alone = self._large == was_large
        if not is_alone and max(_SHARE * more, self._held[one.owner] + more) > _SHARE * free:
            return False
        self.enlarge(one, size)
        return True

    def enlarge(self, one: Reservation, size: int) -> None:
        """Makes a granted reservation larger, whatever is free."""
        more, was_large = size - one.size, one.size > SMALL_BYTES
        self._large += (size > SMALL_BYTES) - was_large
        one.size = size
        self._untrimmed += more
        self._hold(one.owner, more)

    def shrink(self, one: Reservation, size: int) -> None:
        """Makes a granted reservation smaller."""
        self._large -= (one.size > SMALL_BYTES) - (size > SMALL_BYTES)
        less, one.size = one.size - size, size
        self._hold(one.owner, -less)
        self._grant_next()

    def released(self, one: Reservation) -> None:
        """Takes a reservation back."""
        size, one.size = one.size, 0
        if not one.is_granted:
            self._waiting.take_out(one)
            if size > self._max_large_bytes:
                self._grant_next()
            return
        self._large -= size > SMALL_BYTES
        self._hold(one.owner, -size)
        self._grant_next()

    def _hold(self, owner: Hashable, more: int) -> None:
        """Counts what an owner holds more, or less."""
        self.held_bytes += more
        self._held[owner] += more
        if not self._held[owner]:
            del self._held[owner]
        self._waiting.holds(owner)

    def _fits(self, one: Reservation) -> bool:
        needed = _needed(one.size, self._held[one.owner])
        if one.size <= SMALL_BYTES:
            return needed <= _SHARE * (self._max_bytes + self._becoming - self.held_bytes)
        return not self._large or needed <= _SHARE * (self._max_large_bytes - self.held_bytes)

    def _may_wait(self, owner: Hashable) -> bool:
        free = MAX_WAITING - self._waiting.bodies.total()
        return free > 0 and self._waiting.bodies[owner] < _SHARE * free

    def _grant(self, one: Reservation) -> None:
        one.is_granted = True
        self._untrimmed += one.size
        self._large += one.size > SMALL_BYTES
        self._hold(one.owner, one.size)

    def _grant_next(self) -> None:
        while self._waiting and self._fits(one := self._waiting.first()):
            self._waiting.take_out(one)
            self._grant(one)
            one.granted()


class AnswerMemory:
    """The memory of an answer that no pending request has.

    Args:
        budget: Lends it.
        owner: Who is counted for it.

    Attributes:
        memory: It; `None` = the answer is small, or is not to be read yet.
    """

    def __init__(self, budget: ReceivingBudget, owner: Hashable) -> None:
        self._budget = budget
        self._owner = owner
        self.memory: Reservation | None = None

    async def room(self, nbytes: int) -> None:
        """Waits for the memory of an answer that is to be read."""
        self.memory = self.memory or await self._budget.lent(self._owner, nbytes)

    def release(self) -> None:
        """Gives the memory back."""
        if self.memory is not None:
            self.memory.release()
