"""Priority levels → lanes, however many levels there are."""

import pytest

from qinfer.models.spec import MAX_LANES, BatchingSpec, ModelSpec, QueuePolicy, lane_name, lanes_of


def leveled(levels: int, **policies: QueuePolicy) -> ModelSpec:
    batching = BatchingSpec(
        preferred_sizes=(1,),
        priority_levels=levels,
        default_priority=1,
        default_policy=policies.pop("default", QueuePolicy()),
        policies={int(level.removeprefix("p")): policy for level, policy in policies.items()},
    )
    return ModelSpec(name="m", backend="stub", inputs=(), outputs=(), batching=batching)


def test_lanes_of_levels() -> None:
    """A lane for each level, highest first; a delayed one behind it where its policy delays."""
    spec = leveled(3, p3=QueuePolicy(timeout_s=1.0, delay=True))

    assert [lane.name for lane in lanes_of(spec, 1)] == ["p1", "p2", "p3", "p3.delayed"]


@pytest.mark.parametrize("levels", [0, 1, 3, 12, 32, 33, 48, 64, 1001])
def test_many_levels_share_lanes(levels: int) -> None:
    """Every level has a lane among those that are read, a higher level never a later one; no lane is without level."""
    spec = leveled(levels)
    names = [lane.name for lane in lanes_of(spec, 1)]

    of_levels = [lane_name(levels, level) for level in range(min(levels, 1), levels + 1)]

    assert len(names) <= MAX_LANES
    assert list(dict.fromkeys(of_levels)) == names


@pytest.mark.parametrize("levels", [3, 9, 33, 1001])
def test_shared_lanes_are_delayed_where_one_of_their_levels_is(levels: int) -> None:
    """By its own policy, or by the default one where it has none."""
    delay, reject = QueuePolicy(timeout_s=1.0, delay=True), QueuePolicy(timeout_s=1.0)
    first = [level for level in range(1, levels + 1) if lane_name(levels, level) == "p1"]
    rejects = {f"p{level}": reject for level in first}

    by_own = [lane.name for lane in lanes_of(leveled(levels, p1=delay), 1)]
    by_default = [lane.name for lane in lanes_of(leveled(levels, default=delay, **rejects), 1)]

    assert [name for name in by_own if name.endswith(".delayed")] == ["p1.delayed"]
    assert [name for name in by_default if name in ("p1", "p1.delayed")] == ["p1"]
    assert {f"{name}.delayed" for name in by_default if name != "p1" and "." not in name} <= set(by_default)


def test_the_most_levels_there_can_be() -> None:
    """Triton's limit is that of its integers: nothing goes through all levels."""
    spec = leveled(2**64 - 1, default=QueuePolicy(timeout_s=1.0, delay=True))

    assert len(lanes_of(spec, 1)) == 2 * MAX_LANES
    assert lane_name(2**64 - 1, 2**64 - 1) == f"p{MAX_LANES}"
