"""Slabs: which bytes are free, and who may take them."""

import random
from itertools import pairwise

import pytest

from qinfer.segments.slabs import HEADER_BYTES, REST_S, Place, Slabs, slab_size

MIB = 2**20


class Scene:
    """Slabs of 8 MiB at most in segments of 4 MiB, on a clock that the test moves."""

    def __init__(self, most_bytes: int = 8 * MIB) -> None:
        self.now_s = 0.0
        self.dropped: list[Place] = []
        self.slabs = Slabs(most_bytes, 4 * MIB, lambda: self.now_s, self.dropped.append)

    def take(self, nbytes: int, tenant: str = "") -> Place:
        place = self.slabs.take(nbytes, tenant)
        assert place is not None
        return place


@pytest.mark.parametrize("nbytes", [1, 4000, 4096, 16_384, 66_000, 602_112, 4_816_896, 64 * MIB])
def test_a_slab_has_whole_pages_and_at_most_a_quarter_too_many(nbytes: int) -> None:
    size = slab_size(nbytes)

    assert size % 4096 == 0
    assert nbytes + HEADER_BYTES <= size <= max((nbytes + HEADER_BYTES) * 1.25 + 1, 8192)


def test_a_freed_slab_is_used_again_at_once() -> None:
    """Its pages are warm."""
    scene = Scene()
    first = scene.take(MIB - HEADER_BYTES)
    scene.take(MIB - HEADER_BYTES)
    scene.slabs.free(first, "")

    assert scene.take(MIB - 100) == first
    assert scene.dropped == []


def test_a_slab_that_may_be_read_rests() -> None:
    """It counts for its tenant no longer, but against the bound."""
    scene = Scene()
    first = scene.take(MIB - HEADER_BYTES)
    scene.slabs.free(first, "", rests=True)

    second = scene.take(MIB - HEADER_BYTES)
    assert second != first
    assert scene.slabs.held_bytes == MIB
    left = scene.slabs.most_bytes - 2 * MIB
    assert scene.slabs.take(left + 1, "") is None
    scene.now_s = REST_S
    assert scene.take(MIB - HEADER_BYTES) == first


def test_a_tenant_whose_slabs_rest_takes_no_more_than_its_half() -> None:
    """One that sends and leaves at once would take the room of all."""
    scene = Scene()
    taken = 0
    while (place := scene.slabs.take(MIB - HEADER_BYTES, "rude")) is not None:
        scene.slabs.free(place, "rude", rests=True)
        taken += place.size

    assert taken == scene.slabs.most_bytes // 2
    assert scene.slabs.take(MIB - HEADER_BYTES, "other") is not None
    scene.now_s = REST_S
    assert scene.slabs.take(MIB - HEADER_BYTES, "rude") is not None


def test_slabs_do_not_overlap() -> None:
    """Of many sizes, taken and freed at random."""
    scene, chosen, held = Scene(64 * MIB), random.Random(7), dict[Place, int]()
    for _ in range(2000):
        if held and chosen.random() < 0.5:
            place = chosen.choice(list(held))
            del held[place]
            scene.slabs.free(place, "")
            continue
        nbytes = chosen.choice([1000, 20_000, 150_000, 602_112, 5 * MIB])
        taken = scene.slabs.take(nbytes, "")
        if taken is not None:
            held[taken] = nbytes
    ranges = sorted((one.segment, one.offset, one.offset + one.size) for one in held)

    assert len(ranges) > 10
    for (segment, _, end), (next_segment, begin, _) in pairwise(ranges):
        assert segment != next_segment or end <= begin
    assert scene.slabs.held_bytes == sum(one.size for one in held) <= scene.slabs.paged_bytes <= 64 * MIB


def test_more_than_the_bound_is_refused() -> None:
    scene = Scene()
    held = [scene.take(3 * MIB) for _ in range(2)]
    assert scene.slabs.take(3 * MIB, "") is None

    scene.slabs.free(held[0], "")

    assert scene.slabs.take(3 * MIB, "") == held[0]


def test_free_slabs_of_another_size_make_room() -> None:
    scene = Scene()
    for place in [scene.take(MIB - HEADER_BYTES) for _ in range(8)]:
        scene.slabs.free(place, "")

    scene.take(2 * MIB - HEADER_BYTES)

    assert len(scene.dropped) == 2
    assert scene.slabs.paged_bytes == 8 * MIB


def test_one_tenant_beside_others_holds_at_most_half() -> None:
    """A request larger than half may be the only one of its tenant."""
    scene = Scene()
    scene.take(2 * MIB, "a")

    assert scene.slabs.take(2 * MIB, "a") is None
    assert scene.slabs.take(5 * MIB - HEADER_BYTES, "b") is not None


def test_pages_of_idle_slabs_are_given_back() -> None:
    scene = Scene()
    old, young = scene.take(MIB), scene.take(MIB)
    scene.slabs.free(old, "")
    scene.now_s = 4.0
    scene.slabs.free(young, "")

    worn = list(scene.slabs.worn(before_s=1.0))
    assert worn == [old]
    scene.slabs.stripped(old)

    assert scene.slabs.paged_bytes == young.size
    assert scene.take(MIB) == young
    assert scene.take(MIB) == old


def test_a_slab_without_pages_counts_for_nothing() -> None:
    scene = Scene()
    place = scene.take(MIB)

    scene.slabs.give_up(place, "")

    assert (scene.slabs.held_bytes, scene.slabs.paged_bytes) == (0, 0)
    assert scene.take(MIB) == place
