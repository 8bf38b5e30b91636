"""How autoscalers of the same models share the work, rule by rule."""

import pytest

from qinfer.models.state import ScalerRecord
from qinfer.scaling.policy import (
    RECORD_TTL_S,
    Peers,
    QueueObservation,
    ScalingPolicy,
    ScalingState,
    SharedDecision,
    adopt,
    apportion,
    decide,
    decide_share,
    policy_of_all,
)

POLICY = ScalingPolicy(max_workers=4, target_s=10, down_after_s=60, idle_s=300, cooldown_s=30)


def peer(id_: str, share: int = 0, *, least: int = 0, most: int = 4, live: int | None = None) -> ScalerRecord:
    serving = share if live is None else live
    return ScalerRecord(
        id=id_, min_workers=least, max_workers=most, target=share, live=serving, starting=share - serving
    )


def look(state: ScalingState, now_s: float, work_s: float, own: ScalerRecord, *others: ScalerRecord) -> SharedDecision:
    seen = QueueObservation(now_s=now_s, work_s=work_s, entries=int(work_s > 0))
    return decide_share(POLICY, state, seen, own, others)


@pytest.mark.parametrize(
    ("total", "most", "shares"),
    [
        (1, (4, 4), (1, 0)),  # ties by id
        (1, (2, 4), (0, 1)),
        (3, (4, 4), (2, 1)),
        (3, (2, 4), (1, 2)),
        (5, (1, 4), (1, 4)),
        (99, (1, 4), (1, 4)),
    ],
)
def test_from_nothing_in_proportion_to_the_most(total: int, most: tuple[int, int], shares: tuple[int, int]) -> None:
    """One at most gets the first worker; who is full leaves the rest to the other."""
    a, b = (peer(id_, most=count) for id_, count in zip("ab", most, strict=True))

    assert apportion(total, [a, b]) == dict(zip("ab", shares, strict=True))


def test_the_fewest_come_first() -> None:
    """Whatever the total is."""
    assert apportion(1, [peer("a"), peer("b", least=2)]) == {"a": 0, "b": 2}
    assert apportion(3, [peer("a"), peer("b", 2, least=2)]) == {"a": 1, "b": 2}


def test_a_newcomer_takes_nothing_away() -> None:
    """What runs stays where it is; the next ones go to the newcomer, and the fullest gives first."""
    assert apportion(4, [peer("a", 4), peer("b")]) == {"a": 4, "b": 0}
    assert apportion(6, [peer("a", 4), peer("b")]) == {"a": 4, "b": 2}
    assert apportion(3, [peer("a", 4), peer("b", 1)]) == {"a": 2, "b": 1}


def test_workers_that_do_not_serve_go_first() -> None:
    """Those that crash, or have only just begun."""
    assert apportion(3, [peer("a", 3), peer("b", 1, live=0)]) == {"a": 3, "b": 0}


def test_limits_add_up() -> None:
    """The rest of the policy is one's own."""
    limits = policy_of_all(POLICY, [peer("b", least=1, most=2), peer("c", most=1)])

    assert (limits.min_workers, limits.max_workers, limits.target_s) == (1, 7, 10)
    assert policy_of_all(POLICY, []) == POLICY


def test_alone_it_decides_as_it_always_did() -> None:
    """The number, the reason and what is remembered."""
    state = mine = ScalingState.initial(0.0, 0)
    share = 0
    for second, work_s in enumerate([0, 5, 95, 95, *[0] * 400, 12, *[3] * 200], start=1):
        seen = QueueObservation(now_s=float(second), work_s=work_s, entries=int(work_s > 0), live=share)
        decision, state = decide(POLICY, state, seen)
        alone = decide_share(POLICY, mine, seen, peer("a", share), ())
        mine, share = alone.state, alone.share

        assert (alone.total, alone.share, alone.state) == (decision, decision.target, state)


def test_what_others_have_to_do_is_not_remembered_as_done() -> None:
    """It is when they do it, and then it was a step up for all."""
    begun = ScalingState.initial(0.0, 0)
    waiting = look(begun, 100.0, 5.0, peer("b"), peer("a"))

    assert (waiting.total.target, waiting.share) == (1, 0)
    assert (waiting.state.target, waiting.state.grown_at_s) == (0, 0.0)

    after = look(waiting.state, 101.0, 5.0, peer("b"), peer("a", 1))
    assert (after.total.reason, after.share) == ("enough", 0)
    assert (after.state.target, after.state.grown_at_s) == (1, 101.0)


def test_each_waits_for_the_same_time() -> None:
    """That another has done its part begins no new time for the rest of us."""
    policy = ScalingPolicy(max_workers=4, up_after_s=5)
    state = ScalingState.initial(0.0, 2)
    for now_s in range(1, 6):
        seen = QueueObservation(now_s=float(now_s), work_s=40.0, entries=1)
        state = decide_share(policy, state, seen, peer("b", 1), [peer("a", 1)]).state
    seen = QueueObservation(now_s=6.0, work_s=40.0, entries=1)

    assert decide_share(policy, state, seen, peer("b", 1), [peer("a", 2)]).share == 2


def test_a_step_of_others_is_a_step() -> None:
    """Cooldown and patience go by it, whoever it was."""
    state = ScalingState.initial(0.0, 2)

    assert adopt(POLICY, state, 50.0, 2) is state
    assert adopt(POLICY, state, 50.0, 3).grown_at_s == 50.0
    assert adopt(POLICY, state, 50.0, 0).shrunk_at_s == state.shrunk_at_s
    fewer = adopt(POLICY, state, 50.0, 1)
    assert (fewer.shrunk_at_s, fewer.patience) == (50.0, 1)
    back = adopt(POLICY, fewer, 60.0, 2)
    assert (back.patience, adopt(POLICY, back, 61.0, 3).patience) == (2, 2)


def test_the_share_of_one_that_is_gone_is_taken_over() -> None:
    """At once, and with its reason: those that are left keep up the number, within their limits."""
    state = ScalingState.initial(0.0, 6)
    seen = QueueObservation(now_s=5.0, work_s=0.0, entries=0, live=3)

    decided = decide_share(POLICY, state, seen, peer("a", 3), (), has_lost_peers=True)

    assert (decided.share, decided.state.target) == (4, 4)
    assert decided.total.reason == "the workers of an autoscaler that is gone are taken over"


def test_of_several_each_takes_its_part_over() -> None:
    """Whether or not the other has done it already."""
    state = ScalingState.initial(0.0, 6)
    seen = QueueObservation(now_s=5.0, work_s=0.0, entries=0, live=4)
    for of_a in (2, 3):
        decided = decide_share(POLICY, state, seen, peer("b", 2), [peer("a", of_a)], has_lost_peers=True)

        assert (decided.share, decided.total.target) == (3, 6)


def own_and(*others: ScalerRecord) -> list[ScalerRecord]:
    return [peer("own"), *others]


def test_peers_are_those_for_the_same_models() -> None:
    """In whatever order they name them; others have their own work."""
    peers = Peers("own", ["a", "b*"])
    same = ScalerRecord(id="same", places=("b*", "a"))

    peers.update(0.0, own_and(same, ScalerRecord(id="other", places=("a",)), ScalerRecord(id="all")))

    assert (peers.others, peers.has_lost_peers) == ((same,), False)


def test_a_peer_is_gone_when_its_record_is() -> None:
    """It is told once."""
    peers = Peers("own", ["*"])
    peers.update(0.0, own_and(peer("a"), peer("b")))
    peers.update(1.0, own_and(peer("b")))
    assert ([one.id for one in peers.others], peers.has_lost_peers) == (["b"], True)

    peers.update(2.0, own_and(peer("b")))
    assert not peers.has_lost_peers


def test_one_whose_workers_can_not_run_does_not_count() -> None:
    """Others do its share, until one of its workers runs."""
    peers = Peers("own", ["*"])
    broken = ScalerRecord(id="a", target=2)
    for record, counts in (
        (ScalerRecord(id="a"), True),
        (broken, False),
        (ScalerRecord(id="a", target=2, starting=1), True),
        (ScalerRecord(id="a", target=2, draining=1), True),
    ):
        peers.update(0.0, own_and(record))

        assert bool(peers.others) is counts


@pytest.mark.parametrize("is_told", [True, False])
def test_after_an_outage_missing_records_are_late_ones(is_told: bool) -> None:  # noqa: FBT001 (a parameter)
    """Of autoscalers that were known; whether it was seen as one, or Redis has lost them all."""
    peers = Peers("own", ["*"])
    peers.update(0.0, own_and(peer("a", 2)))
    if is_told:
        peers.distrust_missing()
    peers.update(100.0, own_and() if is_told else [])
    peers.update(101.0, own_and(peer("b")))
    assert ([one.id for one in peers.others], peers.has_lost_peers) == (["a", "b"], False)

    peers.update(100.0 + RECORD_TTL_S, own_and(peer("b")))
    assert ([one.id for one in peers.others], peers.has_lost_peers) == (["b"], True)
