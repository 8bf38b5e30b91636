"""The gateway's memory budget for incoming bodies and large answers.

- A body reserves its bytes before its client may send them. If the budget is spent, a large body waits and flow control
  stops its client; a small one, whose bytes are already under way, is refused.
- An eighth of the budget is kept for small bodies, so that large uploads do not block them.
- A compressed body also reserves its decompressed size until it is decoded.
- Bodies that grow by decoding are decoded one at a time, and their decoded size is counted.
- A large answer waits in Redis for memory, which it holds until its client has read it.
- An owner gets at most twice as much as it leaves free (the rule of Choudhury and Hahne for buffers that switches
  share, IEEE/ACM Transactions on Networking 6(2), 1998).
- A large body that arrives too slowly is given up.
"""

import asyncio
import ctypes
import gc
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from itertools import count

import msgspec

from qinfer.errors import Overloaded

SMALL_BYTES = 64 * 1024
"""Smaller bodies are admitted or refused at once."""

MAX_WAITING = 256
"""Each may have sent `SMALL_BYTES`."""

PATIENCE_S = 10
"""Seconds that a large body may be late."""

LEAST_BYTES_PER_S = 64 * 1024

WHOLE_WITHIN_S = 60

SPENT = "the gateway has no memory left for bodies (QINFER_LIMITS__MAX_RECEIVING_BYTES); try again, or another gateway"

NO_ROOM = "the gateway has no memory left for tensors; try again, or another gateway"

AGAIN_S = 1
"""Seconds after which a client that was refused memory, or reached a gateway that ends, may try again."""

TOO_SLOW = "the body came too slowly: send 64 KiB a second, or all of it in a minute"

ANSWER_BYTES = 3
"""The memory that a byte of output takes: the byte, and its JSON."""

TRIM_BYTES, TRIM_EVERY_S = 32 * 2**20, 5
"""Memory is trimmed after so many lent bytes, at most this often."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
# The limit of an owner, as a multiple of the free bytes.
_SHARE = 2

READ_BYTES = 256 * 1024
"""The bytes that connections read at once, into one buffer of all."""


class Reservation(msgspec.Struct, eq=False):
    """Memory of a body or answer; `granted` is called in its turn."""

    _budget: "ReceivingBudget"
    owner: Hashable
    size: int
    granted: Callable[[], None]
    is_granted: bool = False
    is_answer: bool = False
    _arrived: Callable[[], int] | None = None
    _late: Callable[[], None] | None = None
    _seconds: int = 0

    def watch(self, arrived: Callable[[], int], late: Callable[[], None]) -> None:
        """Calls `late` if a body or an answer's reader is too slow."""
        self._arrived, self._late = arrived, late
        self._budget.watched[self] = None

    def unwatch(self) -> None:
        """Stops watching, as the body has arrived."""
        if self._late is not None:
            self._arrived = self._late = None
            del self._budget.watched[self]

    def second_passed(self) -> None:
        """Gives up a late body; an answer only while others wait."""
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
        """Enlarges a granted reservation."""
        if size > self.size and not self._budget.grow(self, size):
            raise Overloaded(SPENT)

    def shrink(self, size: int) -> None:
        """Shrinks a granted reservation, to 1 at least."""
        if size < self.size:
            self._budget.shrink(self, size)

    def become(self, size: int) -> None:
        """Resizes an answer's reservation to its encoded size."""
        size = max(self._budget.counted(size), 1)
        if size < self.size:
            self._budget.shrink(self, size)
        elif self.size:
            self._budget.enlarge(self, size)

    def withdraw(self) -> None:
        """Stops waiting; does nothing once granted."""
        if not self.is_granted:
            self.release()
            self.granted()

    def release(self) -> None:
        """Releases the memory, or stops waiting; idempotent."""
        if self._late is not None:
            self.unwatch()
        if self.size:
            self._budget.released(self)


def _needed(size: int, held: int) -> int:
    return max(_SHARE * size, held + size)


class _WaitingReservations:
    """The waiting bodies and answers; no operation visits all of them.

    Later reservations wait behind a huge one, which waits until it is alone.
    """

    def __init__(self, huge_bytes: int, held: Mapping[Hashable, int]) -> None:
        self._huge_bytes = huge_bytes
        self._held = held
        self._numbers = count()
        self.bodies: Counter[Hashable] = Counter()
        self.places: dict[Reservation, tuple[int, int, Reservation]] = {}
        self.own: dict[Hashable, list[tuple[int, int, Reservation]]] = {}
        """The waiting reservations of each owner, by size and arrival."""
        self._firsts: list[tuple[int, int, int, Reservation]] = []
        """The first reservation of each owner, by bytes needed, bytes held, and arrival."""
        self._first: dict[Hashable, tuple[int, int, int, Reservation]] = {}
        self.behind: OrderedDict[Reservation, None] = OrderedDict()
        """The first huge reservation, and the reservations after it."""

    def __len__(self) -> int:
        return len(self.places) + len(self.behind)

    def enter(self, one: Reservation) -> None:
        if not one.is_answer:
            self.bodies[one.owner] += 1
        if self.behind or one.size > self._huge_bytes:
            self.behind[one] = None
        else:
            self._put_in_order(one)

    def take_out(self, one: Reservation) -> None:
        if not one.is_answer:
            self.bodies[one.owner] -= 1
            if not self.bodies[one.owner]:
                del self.bodies[one.owner]
        if place := self.places.pop(one, None):
            own = self.own[one.owner]
            del own[bisect_left(own, place)]
            self.holds(one.owner)
            return
        del self.behind[one]
        while self.behind and (first := next(iter(self.behind))).size <= self._huge_bytes:
            del self.behind[first]
            self._put_in_order(first)

    def first(self) -> Reservation:
        return self._firsts[0][-1] if self._firsts else next(iter(self.behind))

    def holds(self, owner: Hashable) -> None:
        if first := self._first.pop(owner, None):
            del self._firsts[bisect_left(self._firsts, first)]
        if owner not in self.own:
            return
        if not self.own[owner]:
            del self.own[owner]
            return
        size, number, one = self.own[owner][0]
        held = self._held.get(owner, 0)
        first = self._first[owner] = _needed(size, held), held, number, one
        insort(self._firsts, first)

    def _put_in_order(self, one: Reservation) -> None:
        place = self.places[one] = one.size, next(self._numbers), one
        insort(self.own.setdefault(one.owner, []), place)
        self.holds(one.owner)


class ReceivingBudget:
    """Grants memory, first to small bodies of owners that hold little."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_large_bytes = max_bytes - max_bytes // 8
        self.held_bytes = 0
        self.watched: dict[Reservation, None] = {}
        self._large = 0
        self._held: dict[Hashable, int] = {}
        self._waiting = _WaitingReservations(self._max_large_bytes, self._held)
        self._decoding = asyncio.Lock()
        self._becoming = 0  # for a body being decoded
        self._untrimmed = self._seconds = 0

    @property
    def waiting(self) -> int:
        """Number of waiting bodies and answers."""
        return len(self._waiting)

    def reserve(self, owner: Hashable, size: int, granted: Callable[[], None]) -> Reservation | None:
        """Reserves memory for a body; `None` = refused."""
        one = Reservation(self, owner, size, granted)
        if self.has_room(one.owner, one.size) and (size <= SMALL_BYTES or not self._waiting.behind):
            self._grant(one)
        elif size <= SMALL_BYTES or not self._may_wait(owner):
            return None
        else:
            self._waiting.enter(one)
        return one

    def second_passed(self) -> None:
        """Gives up slow bodies, and returns unused memory."""
        for one in tuple(self.watched):
            one.second_passed()
        self._seconds += 1
        if self._untrimmed >= TRIM_BYTES and self._seconds >= TRIM_EVERY_S:
            self._untrimmed = self.held_bytes
            self._seconds = 0
            self._trim()

    @staticmethod
    def _trim() -> None:
        gc.collect()
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)

    @asynccontextmanager
    async def reserved(
        self, owner: Hashable, size: int, within_s: float, waits: Callable[[Reservation], None] | None = None
    ) -> AsyncIterator[Reservation]:
        """Waits at most `within_s` for memory; `waits` gets a waiting reservation."""
        one = await self.granted(owner, size, within_s, waits)
        try:
            yield one
        finally:
            one.release()

    async def granted(
        self, owner: Hashable, size: int, within_s: float, waits: Callable[[Reservation], None] | None = None
    ) -> Reservation:
        """Waits as `reserved` does; the caller releases it."""
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
        """Waits for an answer's memory; the caller releases it."""
        turn = asyncio.Event()
        one = Reservation(self, owner, self.counted(ANSWER_BYTES * nbytes), turn.set)
        one.is_answer = True
        if self.has_room(one.owner, one.size) and not self._waiting.behind:
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
        """Returns an answer's bytes; the largest answer leaves a third of the memory to others."""
        return min(size, 2 * self._max_large_bytes // 3)

    @asynccontextmanager
    async def decoding(self, size: int) -> AsyncIterator[None]:
        """Serialises the decoding of large bodies, and counts the decoded size.

        It may exceed the limit, so that no body waits for memory of others that wait for this turn.
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
        """Enlarges a reservation, or returns `False`."""
        more, was_large = size - one.size, one.size > SMALL_BYTES
        free = self._max_large_bytes - self.held_bytes
        is_alone = self._large == was_large
        if not is_alone and max(_SHARE * more, self._held[one.owner] + more) > _SHARE * free:
            return False
        self.enlarge(one, size)
        return True

    def enlarge(self, one: Reservation, size: int) -> None:
        """Enlarges a reservation beyond the budget."""
        more, was_large = size - one.size, one.size > SMALL_BYTES
        self._large += (size > SMALL_BYTES) - was_large
        one.size = size
        self._untrimmed += more
        self._hold(one.owner, more)

    def shrink(self, one: Reservation, size: int) -> None:
        """Shrinks a granted reservation."""
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
        if self._waiting.places or self._waiting.behind:  # mostly nothing does
            self._grant_next()

    def _hold(self, owner: Hashable, more: int) -> None:
        self.held_bytes += more
        if held := self._held.get(owner, 0) + more:
            self._held[owner] = held
        else:
            self._held.pop(owner, None)
        if owner in self._waiting.own:
            self._waiting.holds(owner)

    def has_room(self, owner: Hashable, size: int) -> bool:
        """Returns whether there is memory, beside what the owner and others hold; larger bodies also wait in order."""
        needed = _needed(size, self._held.get(owner, 0))
        if size <= SMALL_BYTES:
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
        waiting = self._waiting
        while (waiting.places or waiting.behind) and self.has_room((one := waiting.first()).owner, one.size):
            waiting.take_out(one)
            self._grant(one)
            one.granted()


class AnswerMemory:
    """An answer's memory; `None` if small or unread."""

    def __init__(self, budget: ReceivingBudget, owner: Hashable) -> None:
        self._budget = budget
        self.owner = owner
        self.memory: Reservation | None = None

    async def reserve_memory(self, nbytes: int) -> None:
        """Waits for memory before an answer is read."""
        self.memory = self.memory or await self._budget.lent(self.owner, nbytes)

    def release(self) -> None:
        """Releases the memory."""
        if self.memory is not None:
            self.memory.release()


class SwitchingConnection(asyncio.Protocol):
    """A connection that can read into memory that it names, so that large bodies need no `bytes` of their own.

    It costs each read a little. So connections begin with `data_received`, and change with their first large body.
    """

    _is_buffered = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for the next read."""
        raise NotImplementedError

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the bytes that were read."""
        raise NotImplementedError

    def _buffer_reads(self, transport: asyncio.Transport, *, is_paused: bool) -> None:
        """Reads into `get_buffer` from now on."""
        if self._is_buffered or transport.is_closing():
            return
        self._is_buffered = True
        transport.set_protocol(_BufferedReads(self))
        if not is_paused:  # a transport asks for the way of its reads when it begins to read
            transport.pause_reading()
            transport.resume_reading()


_OF_TRANSPORT = ("get_buffer", "buffer_updated", "eof_received", "connection_lost", "pause_writing", "resume_writing")


class _BufferedReads(asyncio.BufferedProtocol):
    def __init__(self, connection: SwitchingConnection) -> None:
        for name in _OF_TRANSPORT:  # without a call between
            setattr(self, name, getattr(connection, name))
