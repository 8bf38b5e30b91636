"""The segments of a process: what is in them, what they cost, and what a reader may do with them."""

import errno
import mmap
import os
from collections.abc import Iterator

import pytest

from qinfer.core.messages import MemoryReference
from qinfer.segments import memory as segments
from qinfer.segments.memory import HeldTensors, OwnMemory, OwnSegment
from qinfer.segments.slabs import HEADER_BYTES, Place

MIB = 2**20


@pytest.fixture
def memory() -> Iterator[OwnMemory]:
    own = OwnMemory("gateway-a", 8 * MIB, lambda: 100.0)
    yield own
    own.close()


def written(memory: OwnMemory, *parts: bytes, tenant: str = "") -> HeldTensors:
    held = memory.write(parts, sum(map(len, parts)), tenant)
    assert held is not None
    return held


def seen(memory: OwnMemory, reference: MemoryReference) -> tuple[int, bytes]:
    """Returns generation and tensors as a reader sees them."""
    segment = memory.segments[reference.segment]
    descriptor = segment.open_for_readers()
    with mmap.mmap(descriptor, segment.size, access=mmap.ACCESS_READ) as view:
        os.close(descriptor)
        begin = reference.offset + HEADER_BYTES
        return int.from_bytes(view[reference.offset : reference.offset + 8], "little"), view[
            begin : begin + reference.size
        ]


def pages_of(memory: OwnMemory) -> int:
    """Returns the bytes that the kernel holds for the segments."""
    return sum(os.fstat(segment.descriptor).st_blocks * 512 for segment in memory.segments.values())


def test_tensors_are_written_one_after_the_other(memory: OwnMemory) -> None:
    held = written(memory, b"abcd", b"\0" * 4, b"xyz")

    assert seen(memory, held.reference) == (held.reference.generation, b"abcd\0\0\0\0xyz")
    assert held.reference.owner == "gateway-a"


def test_a_released_slab_is_known_as_free_before_it_is_used_again(memory: OwnMemory) -> None:
    held = written(memory, b"first")
    held.release()

    assert seen(memory, held.reference) == (0, b"first")
    again = written(memory, b"other")

    assert again.reference == MemoryReference("gateway-a", 1, 0, 5, held.reference.generation + 1)
    assert seen(memory, again.reference)[1] == b"other"


def test_a_slab_is_released_once(memory: OwnMemory) -> None:
    """The second release may not free what somebody else holds by then."""
    held = written(memory, b"first")
    held.release()
    other = written(memory, b"other")
    held.release()

    assert memory.held_bytes == other.place.size
    assert seen(memory, other.reference)[0] == other.reference.generation


def test_a_slab_is_released_by_the_last_that_holds_it(memory: OwnMemory) -> None:
    """Parts of a request refer to the same tensors."""
    held = written(memory, b"both")
    other = held.hold()
    held.release()
    assert seen(memory, held.reference) == (held.reference.generation, b"both")

    other.release()

    assert memory.held_bytes == 0


def test_the_slab_of_an_unanswered_request_is_not_used_again_at_once(memory: OwnMemory) -> None:
    """A worker may be about to copy it for a model's code, which must not see bytes of others."""
    first = written(memory, b"a")
    first.hold()
    first.release(unanswered=True)
    first.release()

    assert written(memory, b"b").place != first.place


def test_a_segment_can_neither_shrink_nor_grow_and_readers_can_not_write(memory: OwnMemory) -> None:
    """A reader whose pages went away would be killed by a signal."""
    written(memory, b"x")
    (segment,) = memory.segments.values()
    for size in (0, segment.size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)
    descriptor = segment.open_for_readers()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, segment.size)
    os.close(descriptor)


def test_only_used_slabs_have_pages_and_idle_ones_give_them_back(memory: OwnMemory) -> None:
    held = [written(memory, bytes(MIB)) for _ in range(3)]
    full = pages_of(memory)
    for each in held[:2]:
        each.release()
    assert list(memory.trim(before_s=100.0))

    assert full == memory.segments[1].size - 64 * MIB + 3 * held[0].place.size
    assert pages_of(memory) == held[0].place.size
    assert seen(memory, held[0].reference) == (0, bytes(MIB))
    assert seen(memory, held[2].reference)[0] == held[2].reference.generation


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.ENOMEM])
def test_without_pages_nothing_is_written(memory: OwnMemory, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small container: a write to a page that can't be had would end the gateway."""
    full = [True]

    def allocate(segment: OwnSegment, place: Place) -> None:
        if full[0]:
            raise OSError(error, "no room")
        os.posix_fallocate(segment.descriptor, place.offset, place.size)

    monkeypatch.setattr(segments, "allocate", allocate)
    refused = memory.write([b"abc"], 3, "")
    full[0] = False

    assert refused is None
    assert memory.held_bytes == 0
    assert seen(memory, written(memory, b"abc").reference)[1] == b"abc"


def test_pages_are_counted_as_they_come_and_go(memory: OwnMemory) -> None:
    """A slab that is taken in pieces has few of its pages."""
    held = memory.take(6 * MIB, "", in_pieces=True)
    assert held is not None
    assert held.has_pages(2 * MIB)
    assert memory.held_bytes == memory.paged_bytes == pages_of(memory) == 3 * MIB

    held.release()
    assert (memory.held_bytes, memory.paged_bytes) == (0, 3 * MIB)
    list(memory.trim(before_s=100.0))

    assert memory.paged_bytes == pages_of(memory) == 0


def test_beyond_the_bound_nothing_is_written(memory: OwnMemory) -> None:
    assert memory.write([bytes(9 * MIB)], 9 * MIB, "") is None
    assert memory.segments == {}


def test_a_large_slab_has_a_segment_of_its_own(memory: OwnMemory, request: pytest.FixtureRequest) -> None:
    large = OwnMemory("gateway-b", 256 * MIB)
    request.addfinalizer(large.close)
    told: list[int] = []
    large.opened = lambda number, _: told.append(number)
    small, whole = written(large, b"x"), written(large, bytes(100 * MIB))

    assert (small.reference.segment, whole.reference.segment, told) == (1, 2, [1, 2])
    assert large.segments[2].size >= 100 * MIB
