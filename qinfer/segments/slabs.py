"""Slabs: which bytes of this process's segments are free, and how many each tenant holds; pure.

A slab has one of a few sizes, so that one that is freed fits the next request of its kind. Its pages stay until it is
`worn`, or another size needs the room; a slab that was never used has no pages.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

HEADER_BYTES = 64
"""The generation is in front of the tensors, which begin at a cache line."""

LARGE_BYTES = 8 * 2**20
"""The pages of larger slabs come and go in pieces, because all at once would take milliseconds."""

REST_S = 1.0
"""A worker may still copy tensors of an unanswered request."""

_SMALLEST = 4096
_STEPS = 4
"""Sizes between one power of two and the next: at most a quarter of a slab is unused."""


class Place(NamedTuple):
    """Bytes of a segment, in whole pages."""

    segment: int
    offset: int
    size: int


class _Idle(msgspec.Struct, frozen=True):
    place: Place
    since_s: float


class _Resting(NamedTuple):
    place: Place
    since_s: float
    tenant: str


@lru_cache(maxsize=1024)
def slab_size(nbytes: int) -> int:
    """Returns the size of the slab for so many bytes of tensors.

    >>> slab_size(602_112), slab_size(1)
    (655360, 4096)
    """
    needed = max(nbytes + HEADER_BYTES, _SMALLEST)
    step = max((1 << (needed - 1).bit_length()) // (2 * _STEPS), _SMALLEST)
    return -(-needed // step) * step


class Slabs:
    """The slabs of one process.

    `most_bytes` bounds the pages of all slabs, and half of that those of one tenant beside others. `drop` gives back
    the pages of a free slab.
    """

    def __init__(
        self, most_bytes: int, segment_bytes: int, now_s: Callable[[], float], drop: Callable[[Place], None]
    ) -> None:
        self.most_bytes = most_bytes
        self._segment_bytes = segment_bytes
        self._now_s = now_s
        self._drop = drop
        self._idle: dict[int, list[_Idle]] = {}
        self._bare: dict[int, list[Place]] = {}
        """Free slabs without pages."""
        self._resting: deque[_Resting] = deque()
        self._resting_bytes = 0
        self._end = Place(0, 0, 0)
        """The segment that slabs are cut from, and what is left of it."""
        self.held_bytes = 0
        self.paged_bytes = 0
        """Bytes with pages: those that are held, and those of free slabs."""
        self._held_by = defaultdict[object, int](int)

    def has_room(self, nbytes: int, tenant: str) -> bool:
        """Returns whether the bound, and the tenant's share, allow another slab for so many bytes."""
        if self._resting:
            self._end_rests()
        size = slab_size(nbytes)
        is_free = self.held_bytes + self._resting_bytes + size <= self.most_bytes
        return is_free and (not tenant or self._has_share(size, tenant))

    def take(self, nbytes: int, tenant: str) -> Place | None:
        """Takes a slab for so many bytes of tensors; `None` if the bound or the tenant's share does not allow it."""
        size = slab_size(nbytes)
        if not self.has_room(nbytes, tenant):
            return None
        if idle := self._idle.get(size):
            place = idle.pop().place
        else:
            self._make_room(size)
            bare = self._bare.get(size)
            place = bare.pop() if bare else self._cut(size)
            self.paged_bytes += size
        self.held_bytes += size
        self._held_by[tenant] += size
        return place

    def free(self, place: Place, tenant: str, *, rests: bool = False) -> None:
        """Frees a slab."""
        self.held_bytes -= place.size
        if rests:
            self._resting.append(_Resting(place, self._now_s(), tenant))
            self._resting_bytes += place.size
        else:
            self._idled(place, tenant, self._now_s())

    def give_up(self, place: Place, tenant: str) -> None:
        """Frees a slab that could get no pages."""
        self.free(place, tenant)
        self.stripped(self._idle[place.size].pop().place)

    def worn(self, before_s: float) -> Iterator[Place]:
        """Takes out the large slabs that are free, and others that have been free since `before_s`, to be stripped."""
        self._end_rests()
        for idle in list(self._idle.values()):
            while idle and idle[0].since_s <= before_s:
                yield idle.pop(0).place

    def stripped(self, place: Place) -> None:
        """Notes that a slab that was taken out has no pages any more."""
        self.paged_bytes -= place.size
        self._bare.setdefault(place.size, []).append(place)

    def _end_rests(self) -> None:
        before_s = self._now_s() - REST_S
        while self._resting and self._resting[0].since_s <= before_s:
            one = self._resting.popleft()
            self._resting_bytes -= one.place.size
            self._idled(one.place, one.tenant, one.since_s)

    def _idled(self, place: Place, tenant: str, since_s: float) -> None:
        size = place.size
        self._held_by[tenant] -= size
        if not self._held_by[tenant]:
            del self._held_by[tenant]
        self._idle.setdefault(size, []).append(_Idle(place, since_s if size <= LARGE_BYTES else -math.inf))

    def _has_share(self, size: int, tenant: str) -> bool:
        held = self._held_by.get(tenant, 0)
        return not held or held + size <= self.most_bytes // 2

    def _make_room(self, size: int) -> None:
        """Strips free slabs of other sizes until there is room; not large ones, which are about to be."""
        for of_size, idle in self._idle.items():
            while of_size <= LARGE_BYTES and idle and self.paged_bytes + size > self.most_bytes:
                place = idle.pop(0).place
                self._drop(place)
                self.stripped(place)

    def _cut(self, size: int) -> Place:
        segment, offset, left = self._end
        if size > left:
            segment, offset, left = segment + 1, 0, max(size, self._segment_bytes)
        self._end = Place(segment, offset + size, left - size)
        return Place(segment, offset, size)
