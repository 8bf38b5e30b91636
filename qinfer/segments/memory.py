"""The segments of this process: files in memory into which only it writes.

A segment is a `memfd`, sealed against shrinking and growing: a reader can't be killed by a page that is gone. In front
of a slab's tensors is its generation, a number that this process gives to no other use; 0 = free. A reader copies the
tensors and then compares the generation: bytes of a later use come after a change of it. (On x86 stores are seen in
order.)

Pages are taken only while all memory cgroups have some left: at the limit of one the kernel refuses no page, it kills
a process.
"""

import asyncio
import errno
import fcntl
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from qinfer.core.messages import MemoryReference
from qinfer.segments.slabs import HEADER_BYTES, LARGE_BYTES, Place, Slabs
from qinfer.tensors import Bytes

SPARE_SHARE = 8
"""A cgroup keeps this part of its limit for what is no segment."""

_NO_LIMIT = 2**60
_FILES = ("inactive_file", "active_file")
"""Pages that the kernel gives back before it kills."""


class MemoryGroup(NamedTuple):
    """The files of a group."""

    limit: Path
    usage: Path
    pages: Path

    def left(self, nbytes: int) -> int:
        """Returns the bytes that `nbytes` and the spare part leave; negative = there are too few."""
        limit = int(self.limit.read_text())
        left = limit - limit // SPARE_SHARE - int(self.usage.read_text()) - nbytes
        return left if left >= 0 else left + self._of_files()

    def _of_files(self) -> int:
        found = [line.partition(" ") for line in self.pages.read_text().splitlines()]
        counts = {name: int(count) for name, _, count in found}
        # Without `total_`, v1 does not count the groups within.
        return sum([counts.get(f"total_{name}", counts.get(name, 0)) for name in _FILES])


def has_spare(nbytes: int, root: Path = Path("/")) -> bool:
    """Returns whether all memory cgroups of this process, v1 or v2, have so many bytes left, and something beside."""
    for group in _groups(root):
        try:
            if group.left(nbytes) < 0:
                return False
        except (OSError, ValueError):  # it has no limit any more
            continue
    return True


@cache
def _groups(root: Path) -> tuple[MemoryGroup, ...]:
    """Returns the groups around this process that had a limit at the first call; a container sees its own at most."""
    return tuple(_read_groups(root))


def _read_groups(root: Path) -> Iterator[MemoryGroup]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        inner = base / path.lstrip("/")
        for directory in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # it is not there, or is `max`
                if directory.is_relative_to(base) and int((directory / limit).read_text()) < _NO_LIMIT:
                    yield MemoryGroup(directory / limit, directory / usage, directory / "memory.stat")


SEGMENT_BYTES = 64 * 2**20
"""The least bytes of a segment; they cost nothing before they are used."""

IDLE_S = 5.0
"""A free slab keeps its pages so long, unless it is large."""

PIECE_BYTES = 2**20
"""The pages of large slabs that come and go in one turn of the event loop; they take 0.3 ms."""

_GENERATION = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OwnSegment(msgspec.Struct, frozen=True):
    """A segment; its descriptor can write."""

    size: int
    descriptor: int
    memory: mmap.mmap
    view: memoryview

    def open_for_readers(self) -> int:
        """Returns a descriptor that can't write, which the caller closes."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class HeldTensors(msgspec.Struct):
    """Tensors in this process's memory, until each of the `holders` has released them."""

    reference: MemoryReference
    tenant: str
    place: Place
    memory: "OwnMemory"
    holders: int = 1
    rests: bool = False

    def view(self) -> memoryview:
        """Returns the bytes of the tensors, to be written."""
        begin = self.place.offset + HEADER_BYTES
        return self.memory.segments[self.place.segment].view[begin : begin + self.reference.size]

    def has_pages(self, nbytes: int) -> bool:
        """Returns whether the first `nbytes` may be written, after an attempt to get pages for them."""
        return self.memory.has_pages(self, HEADER_BYTES + nbytes)

    def hold(self) -> "HeldTensors":
        """Returns them to one more that holds them: several requests may refer to parts of the same tensors."""
        self.holders += 1
        return self

    def release(self, *, unanswered: bool = False) -> None:
        """Gives the memory back with the last that holds them; once for each."""
        self.holders -= 1
        self.rests |= unanswered
        if not self.holders:
            self.memory.release(self)


class OwnMemory:
    """Takes tensors of pending requests, `most_bytes` at a time.

    `owner` names this process in references. `opened` gets each new segment and its number before its first reference;
    if it raises `OSError`, the segment is not used.
    """

    def __init__(self, owner: str, most_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.owner = owner
        self.opened: Callable[[int, OwnSegment], None] = lambda _, __: None
        self._now_s = now_s
        self.segments: dict[int, OwnSegment] = {}
        """The segments by number."""
        self._slabs = Slabs(most_bytes, SEGMENT_BYTES, now_s, self._drop)
        self._paged: dict[Place, int] = {}
        """How many bytes of a slab have pages, from its begin."""
        self.paged_bytes = 0
        """Bytes that the machine's memory holds for this process's segments."""
        self.held_bytes = 0
        """Bytes of slabs with tensors of pending requests."""
        self._has_worn = asyncio.Event()
        self._generations = itertools.count(1)
        self._since_s: dict[int, float] = {}
        """When each held generation was written, the oldest first."""

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest held tensors were written; 0 without any."""
        now_s = self._now_s()
        return now_s - next(iter(self._since_s.values()), now_s)

    def has_room(self, nbytes: int, tenant: str) -> bool:
        """Returns whether `take` has room for so many bytes of a tenant."""
        return self._slabs.has_room(nbytes, tenant)

    def write(self, parts: Sequence[Bytes], nbytes: int, tenant: str) -> HeldTensors | None:
        """Copies `parts`, `nbytes` together, into a slab; `None` without room."""
        held = self.take(nbytes, tenant)
        if held is not None:
            view, position = self.segments[held.place.segment].view, held.place.offset + HEADER_BYTES
            for part in parts:
                end = position + len(part)
                view[position:end] = part
                position = end
        return held

    def take(self, nbytes: int, tenant: str, *, in_pieces: bool = False) -> HeldTensors | None:
        """Takes a slab for so many bytes, to be written, `in_pieces` only after `HeldTensors.has_pages`.

        `None` without room.
        """
        place = self._slabs.take(nbytes, tenant)
        if place is None:
            return None
        needed = HEADER_BYTES if in_pieces else place.size
        if self._paged.get(place, 0) < needed and not self._get_pages(place, needed):
            self._drop(place)
            self._slabs.give_up(place, tenant)
            return None
        self.held_bytes += self._paged[place]
        generation = next(self._generations)
        _GENERATION.pack_into(self.segments[place.segment].memory, place.offset, generation)
        self._since_s[generation] = self._now_s()
        reference = MemoryReference(self.owner, place.segment, place.offset, nbytes, generation)
        return HeldTensors(reference, tenant, place, self)

    def release(self, held: HeldTensors) -> None:
        """Frees a slab, whose readers know it from now on."""
        place = held.place
        if (segment := self.segments.get(place.segment)) is not None:
            _GENERATION.pack_into(segment.memory, place.offset, 0)
        del self._since_s[held.reference.generation]
        self.held_bytes -= self._paged.get(place, 0)
        self._slabs.free(place, held.tenant, rests=held.rests)
        if place.size > LARGE_BYTES:
            self._has_worn.set()

    async def run(self) -> None:
        """Gives back the pages of slabs that have been free for `IDLE_S`, of large ones at once, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S / 2):
                    await self._has_worn.wait()
            self._has_worn.clear()
            for _ in self.trim(self._now_s() - IDLE_S):
                await asyncio.sleep(0)

    def trim(self, before_s: float) -> Iterator[None]:
        """Gives back the pages of large free slabs, and of those that have been free since `before_s`, in pieces."""
        for place in self._slabs.worn(before_s):
            for begin in reversed(range(0, self._paged.get(place, 0), PIECE_BYTES)):
                self._drop(place, begin)
                yield
            self._slabs.stripped(place)

    def close(self) -> None:
        """Closes the descriptors; the memory ends with its last reader."""
        for segment in self.segments.values():
            os.close(segment.descriptor)
        self.segments.clear()

    def has_pages(self, held: HeldTensors, nbytes: int) -> bool:
        """See `HeldTensors.has_pages`: a write to a page that can't be had would kill us."""
        before = self._paged[held.place]
        has_pages = self._get_pages(held.place, nbytes)
        self.held_bytes += self._paged[held.place] - before
        return has_pages

    def _get_pages(self, place: Place, nbytes: int) -> bool:
        paged = self._paged.get(place, 0)
        if paged < nbytes:
            try:
                segment = self.segments.get(place.segment) or self._open(place)
                end = min(-(-nbytes // PIECE_BYTES) * PIECE_BYTES, place.size)
                allocate(segment, Place(place.segment, place.offset + paged, end - paged))
            except OSError:
                return False
            self._paged[place] = end
            self.paged_bytes += end - paged
        return True

    def _open(self, place: Place) -> OwnSegment:
        segment = open_segment(max(place.size, SEGMENT_BYTES))
        try:
            self.opened(place.segment, segment)
        except OSError:
            os.close(segment.descriptor)
            raise
        self.segments[place.segment] = segment
        return segment

    def _drop(self, place: Place, begin: int = 0) -> None:
        """Gives back the pages of a slab from `begin` on."""
        size = self._paged.pop(place, 0) - begin
        if begin:
            self._paged[place] = begin
        self.paged_bytes -= size
        if size > 0:
            with suppress(OSError):
                self.segments[place.segment].memory.madvise(mmap.MADV_REMOVE, place.offset + begin, size)


def open_segment(size: int) -> OwnSegment:
    """Opens a segment; raises `OSError`."""
    descriptor = os.memfd_create("qinfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(descriptor, size)
        return OwnSegment(size, descriptor, memory, memoryview(memory))
    except OSError:
        os.close(descriptor)
        raise


def allocate(segment: OwnSegment, place: Place) -> None:
    """Gives a slab its pages; raises `OSError`, such as ENOSPC."""
    if not has_spare(place.size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(segment.descriptor, place.offset, place.size)
