"""The turns of bodies and answers that wait for memory, against a list that is looked through at each of them."""

from collections import Counter
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from qinfer_api.receiving import SMALL_BYTES, ReceivingBudget, Reservation

UNIT = SMALL_BYTES + 1
MAX_BYTES = 16 * UNIT
HUGE_BYTES = MAX_BYTES - MAX_BYTES // 8

steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "release", "shrink", "enlarge"]),
        st.integers(0, 30),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([1, 2, 2, 3, 5, 8, 40]),
    ),
    max_size=60,
)


class Watched(ReceivingBudget):
    """Checks whose turn it is when one is granted that has waited."""

    def __init__(self) -> None:
        super().__init__(MAX_BYTES)
        self.waited: list[Reservation] = []
        """All that wait, in the order of their arrival."""

    def chosen(self) -> Reservation:
        """Returns the one whose turn is next."""
        huge = next((one for one in self.waited if one.size > HUGE_BYTES), None)
        ahead = list(takewhile(lambda one: one is not huge, self.waited)) or self.waited[:1]
        held = Counter(self._held)
        return min(ahead, key=lambda one: (max(2 * one.size, held[one.owner] + one.size), held[one.owner]))

    def _grant(self, one: Reservation) -> None:
        if one in self.waited:
            assert one is self.chosen(), "another one was to go first"
            self.waited.remove(one)
        super()._grant(one)


def step(budget: Watched, known: list[Reservation], asked: tuple[str, int, str, int]) -> None:
    """Has something happen to the budget."""
    what, choice, owner, units = asked
    if what == "ask":
        one = budget.reserve(owner, units * UNIT, lambda: None)
        assert one is not None, "few wait"
        known.append(one)
        budget.waited += [] if one.is_granted else [one]
        return
    if not known:
        return
    one = known[choice % len(known)]
    if what == "release":
        known.remove(one)
        budget.waited = [each for each in budget.waited if each is not one]
        one.release()
    elif one.is_granted and what == "shrink":
        one.shrink(one.size // 2 + 1)
    elif one.is_granted:
        budget.enlarge(one, one.size + UNIT)


@given(steps)
def test_turns_come_as_if_all_that_wait_were_looked_at(steps: list[tuple[str, int, str, int]]) -> None:
    """And none waits that fits and is next, whatever has become of the others."""
    budget, known = Watched(), list[Reservation]()

    for asked in steps:
        step(budget, known, asked)

        assert budget.waiting == len(budget.waited)
        assert budget.held_bytes == sum(one.size for one in known if one.is_granted)
        assert not budget.waited or not budget.has_room(budget.chosen().owner, budget.chosen().size)
    while known:
        step(budget, known, ("release", 0, "a", 1))
    assert budget.held_bytes == budget.waiting == len(budget._held) == len(budget._waiting.own) == 0
