"""Who gives up a slot for whom."""

import pytest

from qinfer.batching.sequences.steps import PATIENCE_S, TURN_S, SlotTurn, turns
from qinfer.queue.sequences.records import SlotShare


def share(tenant: str, held: int, waited_s: float = -1.0, weight: int = 1) -> SlotShare:
    return SlotShare(tenant, weight, held, waited_s)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ((4, 0), [SlotTurn("evil", "acme", 0.0)]),
        ((3, 1), [SlotTurn("evil", "acme", 0.0)]),
        ((2, 2), []),
        ((2, 1), []),
        ((3, 2), []),
        ((2, 0), [SlotTurn("evil", "acme", 0.0)]),
        ((1, 0), [SlotTurn("evil", "acme", TURN_S)]),
        ((1, 1), []),
        ((0, 0), []),
    ],
)
def test_slots_are_given_up_until_all_have_their_share(held: tuple[int, int], expected: list[SlotTurn]) -> None:
    shares = [share("evil", held[0], 9.0), share("acme", held[1], 5.0)]

    assert turns(shares, {"evil"}) == expected


def test_weights_count() -> None:
    shares = [share("evil", 6, weight=3), share("acme", 2, 9.0)]

    assert turns(shares, {"evil", "acme"}) == []
    assert turns([share("evil", 6), share("acme", 2, 9.0, weight=3)], {"evil", "acme"}) == [
        SlotTurn("evil", "acme", 0.0)
    ]


def test_one_that_has_not_waited_long_gets_nothing() -> None:
    assert turns([share("evil", 4), share("acme", 0, PATIENCE_S / 2)], {"evil"}) == []


def test_only_tenants_with_slots_of_this_worker_give_any_up() -> None:
    shares = [share("evil", 9), share("third", 4), share("acme", 0, 9.0)]

    assert turns(shares, {"third"}) == [SlotTurn("third", "acme", 0.0)]
    assert turns(shares, set()) == []


def test_several_wait_for_slots_of_one() -> None:
    """The longest wait goes first, and what is given up counts."""
    shares = [share("evil", 3), share("a", 0, 2.0), share("b", 0, 3.0), share("c", 0, 4.0)]

    assert turns(shares, {"evil"}) == [
        SlotTurn("evil", "c", 0.0),
        SlotTurn("evil", "b", 0.0),
        SlotTurn("evil", "a", TURN_S),
    ]
