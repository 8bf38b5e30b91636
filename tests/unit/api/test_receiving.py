"""The memory that bodies share: who waits, who is refused, and whose turn comes next."""

import asyncio
import contextlib
from collections import Counter

import pytest

from qinfer.errors import Overloaded
from qinfer_api.receiving import (
    LEAST_BYTES_PER_S,
    MAX_WAITING,
    PATIENCE_S,
    SMALL_BYTES,
    WHOLE_WITHIN_S,
    ReceivingBudget,
    Reservation,
)

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
    ours = [bodies.ask(f"small {number}", SMALL_BYTES) for number in range(MAX_BYTES // SMALL_BYTES)]

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


def test_who_fits_does_not_wait_behind_those_who_do_not() -> None:
    bodies = Bodies()
    for name in ("first", "second", "third"):
        bodies.ask(name, LARGE)

    bodies.ask("less", 2 * SMALL_BYTES - 1)

    assert bodies.granted == ["first", "second"]
    assert bodies.budget.waiting == 2
    assert bodies.ask("little", SMALL_BYTES + 1) is not None
    assert bodies.granted == ["first", "second", "little"]


@pytest.mark.parametrize("size", [1000, 10_000, LARGE // 4, 48_000_000])
def test_one_owner_leaves_memory_for_others(size: int) -> None:
    """Whatever one asks for: another one's body, large or small, is let in at once."""
    bodies = Bodies()
    bodies.budget = ReceivingBudget(max(MAX_BYTES, 20 * size))
    for _ in range(2 * bodies.budget._max_bytes // size):
        bodies.ask("greedy", size)
    bodies.granted.clear()

    bodies.ask("other", SMALL_BYTES + 1)
    bodies.ask("small", SMALL_BYTES)

    assert bodies.granted == ["other", "small"]


def test_one_owner_leaves_others_a_place_to_wait() -> None:
    bodies = Bodies()
    bodies.ask("first", MAX_BYTES)
    for _ in range(2 * MAX_WAITING):
        bodies.ask("greedy", LARGE)

    assert bodies.budget.waiting < MAX_WAITING
    assert bodies.ask("other", LARGE) is not None


def test_a_body_that_grows_leaves_memory_for_others() -> None:
    bodies = Bodies()
    grown = [bodies.ask("greedy", 1) for _ in range(3)]
    for one in grown:
        assert one is not None
        with contextlib.suppress(Overloaded):
            one.grow(LARGE - 1)
    bodies.granted.clear()

    bodies.ask("other", SMALL_BYTES + 1)

    assert bodies.granted == ["other"]


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


def test_small_bodies_do_not_keep_a_huge_one_waiting_for_ever() -> None:
    bodies = Bodies()
    first, huge = bodies.ask("first", LARGE), bodies.ask("huge", 10 * MAX_BYTES)
    later = bodies.ask("later", 2 * SMALL_BYTES)
    assert bodies.granted == ["first"]

    assert first is not None
    first.release()
    assert bodies.granted == ["first", "huge"]

    assert huge is not None
    assert later is not None
    huge.release()
    assert bodies.granted == ["first", "huge", "later"]


def test_a_huge_one_that_leaves_lets_those_behind_it_in() -> None:
    bodies = Bodies()
    bodies.ask("first", LARGE)
    huge = bodies.ask("huge", 10 * MAX_BYTES)
    bodies.ask("later", 2 * SMALL_BYTES)

    assert huge is not None
    huge.release()

    assert bodies.granted == ["first", "later"]


class CountedOwner:
    """Somebody who is looked up, and counts how often."""

    lookups = 0

    def __hash__(self) -> int:
        CountedOwner.lookups += 1
        return id(self)


def test_a_release_does_not_look_at_all_that_wait() -> None:
    """Answers may wait by the thousands."""
    budget, count = ReceivingBudget(MAX_BYTES), MAX_WAITING // 2
    first, second = (budget.reserve(name, MAX_BYTES // 3, lambda: None) for name in "ab")
    for _ in range(count):
        budget.reserve(CountedOwner(), 3 * MAX_BYTES // 4, lambda: None)
    assert first is not None
    assert second is not None
    CountedOwner.lookups = 0

    first.release()

    assert budget.waiting == count
    assert CountedOwner.lookups < 10


def test_a_body_that_leaves_does_not_look_at_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subtraction of counters visits every owner."""
    bodies = Bodies()
    for name in ("first", "second"):
        bodies.ask(name, LARGE)
    one, _ = bodies.ask("one", LARGE), bodies.ask("other", LARGE)
    assert one is not None
    monkeypatch.setattr(Counter, "_keep_positive", None)

    one.release()

    assert bodies.budget._waiting.bodies == {"other": 1}


@pytest.mark.parametrize(
    ("size", "rate", "seconds"),
    [
        pytest.param(10 * 2**20, 0, PATIENCE_S + 1, id="nothing"),
        pytest.param(10 * 2**20, LEAST_BYTES_PER_S // 2, 2 * PATIENCE_S + 1, id="half of the rate"),
        pytest.param(10 * 2**20, LEAST_BYTES_PER_S, 0, id="the rate"),
        pytest.param(2 * SMALL_BYTES, 2 * SMALL_BYTES / WHOLE_WITHIN_S, 0, id="a body of a minute"),
        pytest.param(SMALL_BYTES, 0, 0, id="a small body"),
    ],
)
def test_a_large_body_that_comes_too_slowly_is_given_up(size: int, rate: float, seconds: int) -> None:
    budget, second, ended = ReceivingBudget(2**30), 0, []
    one = budget.reserve("", size, lambda: None)
    assert one is not None
    one.watch(lambda: int(rate * second) + 1, lambda: ended.append(second))

    for second in range(1, 100):  # noqa: B007 - what has come by then is worked out of it
        budget.second_passed()

    assert ended == ([seconds] if seconds else [])


def test_who_waits_or_has_sent_all_is_not_late() -> None:
    bodies, ended = Bodies(), list[str]()
    first, late = bodies.ask("first", MAX_BYTES), bodies.ask("late", LARGE)
    for one in (first, late):
        assert one is not None
        one.watch(lambda: 0, lambda: ended.append("late"))
    assert first is not None
    first.unwatch()

    for _ in range(100):
        bodies.budget.second_passed()

    assert ended == []
    first.release()
    assert list(bodies.budget.watched) == [late]


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


async def test_a_body_whose_client_leaves_waits_no_longer() -> None:
    bodies = Bodies()
    bodies.ask("first", MAX_BYTES)

    with pytest.raises(Overloaded):
        await bodies.budget.granted("late", LARGE, 60.0, lambda one: one.withdraw())

    assert bodies.budget.waiting == 0


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


async def test_large_bodies_are_decoded_one_at_a_time() -> None:
    budget, order = ReceivingBudget(MAX_BYTES), list[str]()

    async def decode(name: str) -> None:
        async with budget.decoding(1):
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    async with asyncio.TaskGroup() as group:
        for name in ("one", "two"):
            group.create_task(decode(name))

    assert order == ["one begins", "one ends", "two begins", "two ends"]


async def test_what_a_body_becomes_counts_beyond_the_limit_and_others_wait_meanwhile() -> None:
    budget, turn = ReceivingBudget(MAX_BYTES), asyncio.Event()
    held = budget.reserve("a", MAX_BYTES // 2, lambda: None)
    assert held is not None

    async with budget.decoding(MAX_BYTES):
        assert budget.held_bytes == MAX_BYTES // 2 + MAX_BYTES
        late = budget.reserve("b", SMALL_BYTES + 1, turn.set)
        assert late is not None
        assert not late.is_granted

    assert late.is_granted
    assert budget.held_bytes == MAX_BYTES // 2 + SMALL_BYTES + 1


async def test_small_bodies_come_in_while_one_is_decoded() -> None:
    budget = ReceivingBudget(MAX_BYTES)

    async with budget.decoding(2 * MAX_BYTES):
        small = budget.reserve("b", SMALL_BYTES, lambda: None)

    assert small is not None


async def test_a_body_that_can_not_be_decoded_gives_its_turn_on() -> None:
    budget = ReceivingBudget(MAX_BYTES)

    with pytest.raises(ValueError, match="broken"):
        async with budget.decoding(1):
            raise ValueError("broken")

    async with budget.decoding(1):
        assert budget.held_bytes == 1


async def test_an_answer_waits_for_its_memory() -> None:
    budget = ReceivingBudget(MAX_BYTES)
    body = budget.reserve("a", 2 * LARGE, lambda: None)
    assert body is not None

    answer = asyncio.ensure_future(budget.lent("b", LARGE // 2))
    await asyncio.sleep(0)
    assert not answer.done()
    body.release()

    (await answer).release()
    assert budget.held_bytes == 0


async def test_answers_that_wait_keep_no_body_from_waiting() -> None:
    budget = ReceivingBudget(MAX_BYTES)
    first = await budget.lent("a", LARGE)
    answers = [asyncio.ensure_future(budget.lent("a", LARGE)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)

    assert budget.waiting == MAX_WAITING
    assert budget.reserve("b", LARGE, lambda: None) is not None
    for answer in answers:
        answer.cancel()
    await asyncio.wait(answers)
    first.release()


async def test_an_answer_that_nobody_wants_any_more_does_not_wait() -> None:
    budget = ReceivingBudget(MAX_BYTES)
    first = await budget.lent("a", LARGE)
    answer = asyncio.ensure_future(budget.lent("b", LARGE))
    await asyncio.sleep(0)

    answer.cancel()
    await asyncio.wait([answer])

    assert budget.waiting == 0
    first.release()
    assert budget.held_bytes == 0


async def test_an_answer_counts_with_what_it_has_become() -> None:
    budget = ReceivingBudget(MAX_BYTES)
    answer = await budget.lent("a", SMALL_BYTES)

    answer.become(LARGE)
    assert budget.held_bytes == LARGE
    answer.become(SMALL_BYTES)

    assert budget.held_bytes == SMALL_BYTES
    answer.release()
    assert budget.held_bytes == 0


async def test_the_largest_answer_leaves_memory_to_the_bodies_of_others() -> None:
    budget = ReceivingBudget(MAX_BYTES)
    answer = await budget.lent("a", 10 * MAX_BYTES)
    answer.become(20 * MAX_BYTES)

    for size in (SMALL_BYTES, SMALL_BYTES + 1):
        body = budget.reserve("b", size, lambda: None)
        assert body is not None
        assert body.is_granted


@pytest.mark.parametrize("others_wait", [True, False])
async def test_an_answer_that_is_read_too_slowly_is_given_up_where_others_wait(*, others_wait: bool) -> None:
    budget, late = ReceivingBudget(MAX_BYTES), list[str]()
    answer = await budget.lent("a", LARGE)
    answer.watch(lambda: 0, lambda: late.append("late"))
    if others_wait:
        budget.reserve("b", LARGE, lambda: None)

    for _ in range(PATIENCE_S + 1):
        budget.second_passed()

    assert late == ["late"] * others_wait


def test_a_body_of_no_bytes_takes_none() -> None:
    bodies = Bodies()
    one = bodies.ask("empty", 0)
    assert one is not None
    one.release()

    assert bodies.granted == ["empty"]
    assert bodies.budget.held_bytes == 0
