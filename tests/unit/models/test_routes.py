"""Where a request waits, by its priority and the model's queue policies."""

from qinfer.models.spec import BatchingSpec, ModelSpec, QueuePolicy, Routes
from qinfer.queue.entries import Lane


def routes(batching: BatchingSpec | None) -> Routes:
    return Routes(ModelSpec(name="m", backend="stub", inputs=(), outputs=(), batching=batching), 3)


def test_without_batching_there_is_one_way() -> None:
    """The default scheduler ignores priorities (reference §1.12)."""
    plain = routes(None)

    assert plain.are_plain
    assert plain.for_priority(7) == plain.default == (Lane("m", 3), QueuePolicy(), (Lane("m", 3),))


def test_levels_have_lanes_and_policies_of_their_own() -> None:
    """Level 0 and those that do not exist are the default's; a delayed lane is ahead of the next level."""
    delay = QueuePolicy(timeout_s=1.0, delay=True)
    levels = routes(BatchingSpec(preferred_sizes=(8,), priority_levels=3, default_priority=2, policies={1: delay}))

    names = {asked: levels.for_priority(asked).lane.name for asked in (0, 1, 2, 3, 4)}

    assert not levels.are_plain
    assert names == {0: "p2", 1: "p1", 2: "p2", 3: "p3", 4: "p2"}
    assert levels.for_priority(1).policy is delay
    assert [lane.name for lane in levels.for_priority(1).ahead] == ["p1"]
    assert [lane.name for lane in levels.for_priority(3).ahead] == ["p1", "p1.delayed", "p2", "p3"]
    assert levels.default.lane.name == "p2"


def test_each_of_twelve_levels_has_a_lane_and_a_policy() -> None:
    """Its own timeout, size and action, and no other level's."""
    policies = {
        level: QueuePolicy(max_queue_size=level, timeout_s=float(level), delay=level % 2 == 0) for level in range(1, 13)
    }

    levels = routes(BatchingSpec(preferred_sizes=(8,), priority_levels=12, default_priority=1, policies=policies))

    found = [levels.for_priority(level) for level in range(1, 13)]
    assert [route.lane.name for route in found] == [f"p{level}" for level in range(1, 13)]
    assert [route.policy for route in found] == list(policies.values())


def test_a_policy_without_levels_makes_the_way_special() -> None:
    """Every request has to ask for its queue timeout then."""
    policy = QueuePolicy(max_queue_size=3)

    bounded = routes(BatchingSpec(preferred_sizes=(8,), default_policy=policy))

    assert not bounded.are_plain
    assert bounded.for_priority(5) == (Lane("m", 3), policy, (Lane("m", 3),))


def test_very_many_levels_share_lanes() -> None:
    """A configuration may have 2³² of them."""
    many = routes(BatchingSpec(preferred_sizes=(8,), priority_levels=2**32, default_priority=2**31))

    assert [many.for_priority(level).lane.name for level in (1, 0, 2**32)] == ["p1", "p16", "p32"]
