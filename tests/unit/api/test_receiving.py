"""The memory that bodies share: who waits, who is refused, and whose turn comes next."""

import asyncio

import pytest

from qinfer.errors import Overloaded
from qinfer_api.receiving import MAX_WAITING, SMALL_BYTES, ReceivingBudget, Reservation

MAX_BYTES = 800 * 1024
LARGE = 300 * 1024


class Bodies:
    """Bodies that want memory, by name."""

    def __init__(self) -> None:
        self.budget = ReceivingBudget(MAX_BYTES)
        self.granted: list[str] = []

    def ask(self, name: str, size: int, owner: str = "") -> Reservation | None:
        one = self.budget.reserve(owner or name, size, lambda: self.granted.append(name))
        if one is not None and one.is_granted:
            self.granted.append(name)
        return one


def test_what_does_not_fit_waits_and_small_bodies_do_not() -> None:
    bodies = Bodies()
    first, _, third = bodies.ask("first", LARGE), bodies.ask("second", LARGE), bodies.ask("third", LARGE)
    assert bodies.ask("small", SMALL_BYTES) is not None
    assert bodies.granted == ["first", "second", "small"]
    assert third is not None
    assert not third.is_granted

    assert first is not None
    first.release()

    assert bodies.granted == ["first", "second", "small", "third"]
    assert bodies.budget.held_bytes == 2 * LARGE + SMALL_BYTES


def test_small_bodies_are_refused_when_all_is_spent() -> None:
    bodies = Bodies()
    ours = [bodies.ask("small", SMALL_BYTES) for _ in range(MAX_BYTES // SMALL_BYTES)]

    assert None not in ours
    assert bodies.ask("one too many", SMALL_BYTES) is None


def test_who_holds_least_goes_first() -> None:
    bodies = Bodies()
    held = [bodies.ask("a1", LARGE, "a"), bodies.ask("a2", LARGE, "a")]
    for name in ("a3", "a4", "b1"):
        bodies.ask(name, LARGE, name[0])

    assert held[0] is not None
    held[0].release()

    assert bodies.granted == ["a1", "a2", "b1"]


def test_what_is_larger_than_the_budget_comes_in_alone() -> None:
    bodies = Bodies()
    first = bodies.ask("first", LARGE)
    huge = bodies.ask("huge", 10 * MAX_BYTES)
    assert bodies.granted == ["first"]

    assert first is not None
    first.release()
    assert bodies.granted == ["first", "huge"]

    assert huge is not None
    huge.release()
    huge.release()
    assert bodies.budget.held_bytes == 0


def test_who_stops_waiting_is_forgotten_and_the_waiting_are_bounded() -> None:
    bodies = Bodies()
    first = bodies.ask("first", MAX_BYTES)
    waiting = [bodies.ask(f"{number}", LARGE) for number in range(MAX_WAITING)]

    assert bodies.ask("one too many", LARGE) is None
    for one in waiting:
        assert one is not None
        one.release()
    assert first is not None
    first.release()
    assert bodies.granted == ["first"]


def test_a_body_of_unknown_size_grows_while_there_is_memory() -> None:
    bodies = Bodies()
    chunked, first = bodies.ask("chunked", SMALL_BYTES), bodies.ask("first", LARGE)
    assert chunked is not None
    assert first is not None

    chunked.grow(1)
    assert bodies.budget.held_bytes == SMALL_BYTES + LARGE
    chunked.grow(LARGE)
    assert bodies.budget.held_bytes == 2 * LARGE
    with pytest.raises(Overloaded, match="QINFER_LIMITS__MAX_RECEIVING_BYTES"):
        chunked.grow(MAX_BYTES)
    assert bodies.budget.held_bytes == 2 * LARGE

    first.release()
    chunked.grow(10 * MAX_BYTES)
    chunked.release()
    assert bodies.budget.held_bytes == 0


def test_what_a_body_does_not_need_lets_others_in() -> None:
    bodies = Bodies()
    first, late = bodies.ask("first", MAX_BYTES), bodies.ask("late", LARGE)
    assert first is not None
    assert late is not None

    first.shrink(1)

    assert bodies.granted == ["first", "late"]
    assert bodies.budget.held_bytes == 1 + LARGE
    for one in (first, late):
        one.release()
    assert bodies.budget.held_bytes == 0


async def test_a_turn_that_does_not_come_is_a_refusal() -> None:
    bodies = Bodies()
    first = bodies.ask("first", MAX_BYTES)
    with pytest.raises(Overloaded):
        async with bodies.budget.reserved("late", LARGE, within_s=0.0):
            raise AssertionError("it was let in")
    with pytest.raises(Overloaded):
        async with bodies.budget.reserved("small", SMALL_BYTES, within_s=0.0):
            raise AssertionError("it was let in")

    assert first is not None
    first.release()
    assert bodies.budget.held_bytes == 0


async def test_whoever_waits_is_let_in_at_the_end_of_another() -> None:
    bodies = Bodies()
    first = bodies.ask("first", MAX_BYTES)

    async def wait() -> int:
        async with bodies.budget.reserved("late", LARGE, within_s=60.0):
            return bodies.budget.held_bytes

    late, left = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    left.cancel()
    assert first is not None
    first.release()

    assert await late == LARGE
    assert bodies.budget.held_bytes == 0
