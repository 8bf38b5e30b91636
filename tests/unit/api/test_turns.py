"""Turns of the event loop: connections that have sent much go on one after the other, and nothing waits for ever."""

import asyncio

import pytest

from qinfer_api import turns
from qinfer_api.turns import LEAST_S, TURN_S, Turns


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


async def test_all_that_is_read_in_one_turn_of_the_loop_has_one_time(clock: Clock) -> None:
    ours = Turns()

    ends_s = [ours.begin()]
    clock.now_s += TURN_S
    ends_s.append(ours.begin())
    await asyncio.sleep(0)
    ends_s.append(ours.begin())

    assert ends_s == [100.0 + TURN_S, clock.now_s + LEAST_S, clock.now_s + TURN_S]


async def test_who_waits_goes_on_in_order_as_long_as_a_turn_lasts(clock: Clock) -> None:
    ours, served = Turns(), list[int]()

    def go_on(number: int) -> None:
        served.append(number)
        clock.now_s += TURN_S / 2

    ours.begin()
    for number in range(5):
        ours.wait(lambda number=number: go_on(number))  # type: ignore[misc]
    found = []
    for _ in range(4):
        await asyncio.sleep(0)
        found.append(len(served))

    assert found == [2, 4, 5, 5]
    assert served == [0, 1, 2, 3, 4]


async def test_who_waits_again_comes_behind_the_others(clock: Clock) -> None:
    ours, served = Turns(), list[str]()

    def go_on(name: str) -> None:
        served.append(name)
        clock.now_s = ours.begin()
        if len(served) < 6:
            ours.wait(lambda: go_on(name))

    ours.begin()
    for name in "abc":
        ours.wait(lambda name=name: go_on(name))  # type: ignore[misc]
    for _ in range(10):
        await asyncio.sleep(0)

    assert "".join(served) == "abcabcab"


async def test_a_failure_stops_no_one_else(clock: Clock) -> None:
    ours, served = Turns(), list[str]()
    seen = list[BaseException | None]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context.get("exception")))

    def fail() -> None:
        raise ValueError("a defect")

    ours.begin()
    ours.wait(fail)
    ours.wait(lambda: served.append("next"))
    for _ in range(3):
        await asyncio.sleep(0)

    assert served == ["next"]
    assert [type(each) for each in seen] == [ValueError]
