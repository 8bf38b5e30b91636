"""What dividing workers among autoscalers never does, whatever their records say."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.models.state import ScalerRecord
from qinfer.scaling.policy import apportion

totals = st.integers(0, 60)


@st.composite
def peers(draw: st.DrawFn) -> list[ScalerRecord]:
    """Records of one to five autoscalers; each has a share within its limits."""
    found = []
    for id_ in draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True)):
        most = draw(st.integers(1, 12))
        least = draw(st.integers(0, most))
        share = draw(st.integers(least, most))
        live = draw(st.integers(0, share))
        found.append(ScalerRecord(id=id_, min_workers=least, max_workers=most, target=share, live=live))
    return found


def bounded(total: int, records: list[ScalerRecord]) -> int:
    return min(max(total, sum(one.min_workers for one in records)), sum(one.max_workers for one in records))


@settings(max_examples=200)
@given(totals, peers())
def test_the_shares_are_all_there_is(total: int, records: list[ScalerRecord]) -> None:
    """Their sum is the total, within the limits of all; each is within its own."""
    shares = apportion(total, records)

    assert sum(shares.values()) == bounded(total, records)
    assert all(one.min_workers <= shares[one.id] <= one.max_workers for one in records)


@settings(max_examples=200)
@given(totals, peers(), st.randoms(use_true_random=False))
def test_all_come_to_the_same_shares(total: int, records: list[ScalerRecord], random: Random) -> None:
    """In whatever order they have the records."""
    shuffled = random.sample(records, len(records))

    assert apportion(total, shuffled) == apportion(total, records)


@settings(max_examples=200)
@given(totals, peers())
def test_no_worker_moves(total: int, records: list[ScalerRecord]) -> None:
    """Where there are to be more nobody has fewer, and the other way round: as few change as can be."""
    shares = apportion(total, records)

    steps = [shares[one.id] - one.target for one in records]
    assert sum(map(abs, steps)) == abs(bounded(total, records) - sum(one.target for one in records))


@settings(max_examples=200)
@given(totals, peers())
def test_who_gets_one_more_is_not_fuller_than_another_would_be(total: int, records: list[ScalerRecord]) -> None:
    """In proportion to the most workers of each, as far as that takes nothing from anyone."""
    shares = apportion(total, records)

    with_room = [one for one in records if shares[one.id] < one.max_workers]
    for got in (one for one in records if shares[one.id] > one.target):
        fullness = shares[got.id] / got.max_workers
        assert all(fullness <= (shares[one.id] + 1) / one.max_workers for one in with_room)
