"""What the scaling policy never does, whatever it is given."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.scaling.policy import QueueObservation, ScalingPolicy, ScalingState, decide

seconds = st.floats(0, 1000)


@st.composite
def policies(draw: st.DrawFn) -> ScalingPolicy:
    most = draw(st.integers(1, 20))
    return ScalingPolicy(
        min_workers=draw(st.integers(0, most)),
        max_workers=most,
        target_s=draw(st.floats(0.1, 100)),
        up_after_s=draw(st.sampled_from([0.0, 5.0])),
        down_after_s=draw(seconds),
        idle_s=draw(seconds),
        cooldown_s=draw(seconds),
    )


@st.composite
def stories(draw: st.DrawFn) -> list[QueueObservation]:
    """What an autoscaler may see one after the other: also what makes no sense, such as workers from nowhere."""
    now_s, story = 0.0, []
    for _ in range(draw(st.integers(1, 15))):
        now_s += draw(st.floats(0, 200))
        entries = draw(st.integers(0, 3) | st.integers(0, 10**9))
        story.append(
            QueueObservation(
                now_s=now_s,
                work_s=draw(st.floats(0, 1e12)) if entries else 0.0,
                entries=entries,
                executed=draw(st.booleans()),
                used=draw(st.floats(0, 50)),
                live=draw(st.integers(0, 20)),
                starting=draw(st.integers(0, 3)),
                load_s=draw(st.floats(0, 100)),
                floor=draw(st.sampled_from([0, 0, 1, 30])),
                sequence_workers=draw(st.sampled_from([0, 0, 1, 3, 30])),
            )
        )
    return story


def told(policy: ScalingPolicy, story: list[QueueObservation]) -> ScalingState:
    state = ScalingState.initial(0.0, policy.min_workers)
    for seen in story:
        _, state = decide(policy, state, seen)
    return state


@settings(max_examples=30)
@given(policies(), stories())
def test_the_number_stays_within_its_limits(policy: ScalingPolicy, story: list[QueueObservation]) -> None:
    """Whatever is seen."""
    state = ScalingState.initial(0.0, policy.min_workers)
    for seen in story:
        decision, state = decide(policy, state, seen)

        assert policy.min_workers <= decision.target <= policy.max_workers
        assert decision.target == state.target
        assert decision.reason


@settings(max_examples=30)
@given(policies(), stories())
def test_work_never_finds_nobody(policy: ScalingPolicy, story: list[QueueObservation]) -> None:
    """Where anything waits or executes there is a worker, at once; and as many as a model wants."""
    state = ScalingState.initial(0.0, policy.min_workers)
    for seen in story:
        decision, state = decide(policy, state, seen)

        assert decision.target >= (seen.entries > 0)
        assert decision.target >= min(seen.floor, policy.max_workers)
        assert decision.target >= (seen.sequence_workers > 0)


@settings(max_examples=30)
@given(policies(), stories())
def test_open_sequences_keep_their_slots(policy: ScalingPolicy, story: list[QueueObservation]) -> None:
    """No step down leaves fewer slots than there are open sequences; a step up gives all of them some, in its time."""
    state = ScalingState.initial(0.0, policy.min_workers)
    for seen in story:
        before = state.target
        decision, state = decide(policy, state, seen)

        needed = min(seen.sequence_workers, policy.max_workers)
        assert decision.wanted >= needed
        assert decision.target >= min(needed, before if policy.up_after_s else needed)


@settings(max_examples=30)
@given(policies(), stories(), st.floats(0, 1e6))
def test_more_work_never_means_fewer_workers(
    policy: ScalingPolicy, story: list[QueueObservation], more_s: float
) -> None:
    """With all else alike."""
    *before, last = story
    state = told(policy, before)
    more = replace(last, work_s=last.work_s + more_s, entries=last.entries + 1)

    fewer, _ = decide(policy, state, last)
    decision, _ = decide(policy, state, more)

    assert decision.target >= fewer.target


@settings(max_examples=30)
@given(policies(), stories())
def test_a_step_down_keeps_its_distance(policy: ScalingPolicy, story: list[QueueObservation]) -> None:
    """From the last step up: the cooldown and the load time."""
    state = ScalingState.initial(0.0, policy.min_workers)
    for seen in story:
        before = state
        decision, state = decide(policy, state, seen)

        if decision.target < before.target:
            assert seen.now_s - before.grown_at_s >= max(policy.cooldown_s, seen.load_s)


@settings(max_examples=30)
@given(policies(), stories())
def test_memory_is_bounded(policy: ScalingPolicy, story: list[QueueObservation]) -> None:
    """An autoscaler runs for months."""
    assert len(told(policy, story).needs) <= policy.max_workers + 1
