"""The gateway's garbage collector: each look is short, also while a flood makes thousands of objects that stay."""

import gc
from collections.abc import Iterator

import pytest

from qinfer_api.__main__ import GC_THRESHOLDS


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The objects that each look goes through, but for looks at the oldest."""
    found, before = list[int](), gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 2:
            found.append(sum(len(gc.get_objects(each)) for each in range(info["generation"] + 1)))

    gc.set_threshold(*GC_THRESHOLDS)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_a_look_goes_through_few_objects(looks: list[int]) -> None:
    kept = [[number] for number in range(200_000)]

    assert len(looks) > 10
    assert max(looks) < 25_000 < len(kept)
