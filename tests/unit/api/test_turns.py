"""Turns of the event loop: connections that have sent much go on one after the other, and none waits for ever."""

import asyncio
import contextlib
from itertools import pairwise

import pytest

from qinfer_api import turns
from qinfer_api.turns import LEAST_S, MOST_WAITING, START_S, TURN_S, SharedLimit, Turns


class Clock:
    """The time that turns see."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "time", made)
    return made


class Reader:
    """A connection that reads on for a while whenever it may."""

    def __init__(self, ours: Turns, clock: Clock, served: list[str], name: str) -> None:
        self.ours, self.clock, self.served, self.name = ours, clock, served, name

    def read(self) -> None:
        """Reads for the rest of the turn, and has more."""
        assert self.ours.may_read()
        self.served.append(self.name)
        self.clock.now_s += TURN_S
        self.ours.wait(self.read, is_fresh=False)


async def test_all_that_is_read_in_one_turn_of_the_loop_has_one_time(clock: Clock) -> None:
    ours = Turns()

    found = [ours.may_read()]
    clock.now_s += TURN_S / 2
    found.append(ours.may_read())
    clock.now_s += TURN_S
    found.append(ours.may_read())
    await asyncio.sleep(0)
    found.append(ours.may_read())

    assert found == [True, True, False, True]


async def test_who_waits_goes_on_in_order_as_long_as_a_turn_lasts(clock: Clock) -> None:
    ours, served = Turns(), list[int]()

    def go_on(number: int) -> None:
        served.append(number)
        clock.now_s += 0.6 * TURN_S

    ours.may_read()
    for number in range(5):
        ours.wait(lambda number=number: go_on(number), is_fresh=True)  # type: ignore[misc]
    found = []
    for _ in range(4):
        await asyncio.sleep(0)
        found.append(len(served))

    assert found == [2, 4, 5, 5]
    assert served == [0, 1, 2, 3, 4]


async def test_who_reads_long_has_a_turn_each(clock: Clock) -> None:
    ours, served = Turns(), list[str]()
    for name in "abc":
        ours.wait(Reader(ours, clock, served, name).read, is_fresh=False)

    ours.may_read()
    for _ in range(7):
        await asyncio.sleep(0)

    assert "".join(served) == "abcabca"


async def test_who_has_just_sent_goes_first_and_keeps_no_one_waiting_for_ever(clock: Clock) -> None:
    ours, served = Turns(), list[str]()
    ours.wait(Reader(ours, clock, served, "a").read, is_fresh=False)

    ours.may_read()
    for name in ("x", "y"):
        ours.wait(Reader(ours, clock, served, name).read, is_fresh=True)
        await asyncio.sleep(0)

    assert "".join(served) == "xayx"


async def test_tasks_start_in_turns_and_in_order(clock: Clock) -> None:
    ours, served = Turns(), list[int]()

    async def start(number: int) -> None:
        await ours.start()
        served.append(number)

    tasks = [asyncio.create_task(start(number)) for number in range(5)]
    found = []
    for _ in range(10):
        await asyncio.sleep(0)
        found.append(len(served))

    assert max(later - earlier for earlier, later in pairwise(found)) <= TURN_S / START_S < len(tasks)
    assert served == [0, 1, 2, 3, 4]


async def test_a_failure_stops_no_one_else(clock: Clock) -> None:
    ours, served = Turns(), list[str]()
    seen = list[BaseException | None]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context.get("exception")))

    def fail() -> None:
        raise ValueError("a defect")

    ours.may_read()
    ours.wait(fail, is_fresh=True)
    ours.wait(lambda: served.append("next"), is_fresh=False)
    for _ in range(3):
        await asyncio.sleep(0)

    assert served == ["next"]
    assert [type(each) for each in seen] == [ValueError]


async def test_an_application_that_starts_uses_its_part_of_a_turn(clock: Clock) -> None:
    ours = Turns()

    started = 0
    while ours.may_start():
        started += 1

    assert started == round(TURN_S / START_S)
    await asyncio.sleep(0)
    assert ours.may_start()


async def test_who_waits_while_no_turn_goes_on_has_the_next_one(clock: Clock) -> None:
    ours, served = Turns(), list[str]()
    ours.wait(lambda: served.append("a"), is_fresh=False)
    before = (ours.is_awaited, list(served))

    await asyncio.sleep(0)

    assert (before, ours.is_awaited, served) == ((True, []), False, ["a"])


async def test_floods_are_to_be_cut_once_the_most_wait(clock: Clock) -> None:
    """Those that have just sent do not count."""
    ours, served = Turns(), list[int]()

    for number in range(2 * MOST_WAITING):
        ours.wait(lambda number=number: served.append(number), is_fresh=True)  # type: ignore[misc]
    found = [ours.is_full]
    for number in range(MOST_WAITING):
        found.append(ours.is_full)
        ours.wait(lambda number=number: served.append(number), is_fresh=False)  # type: ignore[misc]
    found.append(ours.is_full)
    await asyncio.sleep(0)

    assert found == [False] * (MOST_WAITING + 1) + [True]
    assert (ours.is_full, len(served)) == (False, 3 * MOST_WAITING)


async def test_periodic_work_on_many_connections_takes_turns(clock: Clock) -> None:
    """Others are served in between."""
    ours, found = Turns(), list[int]()

    async def work() -> None:
        async for number in ours.in_turns(range(9)):
            found.append(number)
            clock.now_s += 0.4 * TURN_S

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        counts = []
        while len(found) < 9:
            await asyncio.sleep(0)
            counts.append(len(found))

    assert found == list(range(9))
    assert max(later - earlier for earlier, later in pairwise([0, *counts])) <= 4


async def test_periodic_work_has_its_part_of_each_turn_beside_floods(clock: Clock) -> None:
    """Else each connection would wait for a turn of its own: thousands would be checked in minutes."""
    ours, served, count = Turns(), list[str](), 1000
    ours.wait(Reader(ours, clock, served, "flood").read, is_fresh=False)

    async for _ in ours.in_turns(range(count)):
        clock.now_s += LEAST_S / 100

    assert len(served) <= count / 100 + 2


def taken(limit: SharedLimit, places: contextlib.ExitStack, tenant: str, most: int = 12) -> int:
    """Returns how many places a tenant gets that takes all it can."""
    count = 0
    while limit.has_room(most, tenant):
        places.enter_context(limit.place(tenant))
        count += 1
    return count


def test_a_tenant_that_takes_all_it_can_leaves_as_many_to_the_others() -> None:
    limit = SharedLimit()
    with contextlib.ExitStack() as places:
        assert [taken(limit, places, tenant) for tenant in ("evil", "acme", "other")] == [6, 3, 2]
        assert limit.taken == 11


def test_places_come_back() -> None:
    limit = SharedLimit()
    with contextlib.ExitStack() as places:
        taken(limit, places, "evil")
        assert not limit.has_room(12, "evil")

    assert limit.taken == 0
    assert limit.has_room(1, "evil")


def test_who_shares_with_no_other_takes_all() -> None:
    with contextlib.ExitStack() as places:
        assert taken(SharedLimit(), places, "") == 12
