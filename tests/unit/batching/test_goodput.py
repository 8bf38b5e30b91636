"""Goodput under overload: what is answered in time, against the most that any schedule could have answered."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from qinfer.models.spec import BatchingSpec, QueuePolicy
from tests.support.overload import CAPACITY_RPS, FULL_S, TRIP_S, Caller, Setting, optimum_rows, simulate

TIMEOUT_S = 0.25
REJECTS = QueuePolicy(timeout_s=TIMEOUT_S)
SECONDS = 1.5
LONGER_SECONDS = 4.0
"""For traces at whose end a schedule that knows of the end has kept much to do."""
RATES = (1.2, 1.7, 3.0)


def batching(policy: QueuePolicy = REJECTS, levels: int = 0) -> BatchingSpec:
    return BatchingSpec(preferred_sizes=(16,), priority_levels=levels, default_priority=levels, default_policy=policy)


def trace(rate: float, seconds: float = SECONDS, begin_s: float = 0.0, seed: int = 1) -> list[Caller]:
    """Returns requests that come at random, `rate` a second on average."""
    instants = np.random.default_rng(seed).uniform(begin_s, begin_s + seconds, int(rate * seconds))
    return [Caller(arrives_s=float(instant)) for instant in np.sort(instants)]


def bursts(rate: float) -> list[Caller]:
    """Returns half seconds of many requests and of few, in turns; `rate` on average."""
    parts = int(2 * SECONDS)
    return [
        caller
        for part in range(parts)
        for caller in trace(rate * (1.8, 0.2)[part % 2], SECONDS / parts, part * SECONDS / parts, seed=part)
    ]


def own_timeouts(rate: float) -> list[Caller]:
    """Returns requests that ask for timeouts of 0.1 to 0.5 s."""
    callers = trace(rate, LONGER_SECONDS)
    for number, caller in enumerate(callers):
        caller.asked_s = (0.1, 0.25, 0.5, 0.25)[number % 4]
    return callers


def sizes(rate: float) -> list[Caller]:
    """Returns requests of one to four rows, `rate` rows a second."""
    callers = trace(rate / 2.5, LONGER_SECONDS)
    for number, caller in enumerate(callers):
        caller.rows = 1 + number % 4
    return callers


def patient(rate: float) -> list[Caller]:
    """Returns requests whose deadline is half a second away."""
    callers = trace(rate, LONGER_SECONDS)
    for caller in callers:
        caller.deadline_s = 2 * TIMEOUT_S
    return callers


def shorter(rate: float) -> list[Caller]:
    """Returns requests of a shorter time: there are more of them."""
    return trace(rate, SECONDS / 2)


def levels(rate: float) -> list[Caller]:
    """Returns requests of which a fourth has the higher level."""
    callers = trace(rate, LONGER_SECONDS)
    for number, caller in enumerate(callers):
        caller.level = 2 if number % 4 else 1
    return callers


CASES: dict[str, tuple[Setting, Callable[[float], list[Caller]]]] = {
    "one timeout": (Setting(batching=batching()), trace),
    "the worker alone": (Setting(batching=batching(), has_door=False), trace),
    "bursts": (Setting(batching=batching(), jitter=0.3), bursts),
    "own timeouts": (Setting(batching=batching(QueuePolicy(timeout_s=1.0, allow_override=True))), own_timeouts),
    "sizes": (Setting(batching=batching()), sizes),
    "levels": (Setting(batching=batching(levels=2)), levels),
    "DELAY": (Setting(batching=batching(QueuePolicy(timeout_s=TIMEOUT_S, delay=True))), patient),
    "workers and gateways": (Setting(batching=batching(), workers=2, instances=2, gateways=2), shorter),
}


def limit_s(caller: Caller, setting: Setting) -> float:
    """Returns how long a request may wait; with DELAY its deadline ends the wait, with REJECT its queue timeout."""
    return caller.deadline_s if setting.batching.default_policy.delay else caller.asked_s or TIMEOUT_S


def is_in_time(caller: Caller, setting: Setting) -> bool:
    """Tells whether a request was begun in time, as its answer shows."""
    longest_s = limit_s(caller, setting) + TRIP_S + FULL_S * (1 + setting.jitter)
    return caller.is_fine and caller.answered_s - caller.arrives_s <= longest_s + 1e-3


@cache
def offer(name: str, times: float) -> tuple[Setting, list[Caller]]:
    """Offers a case's trace at so many times the capacity."""
    setting, make = CASES[name]
    callers = make(times * CAPACITY_RPS * setting.workers * setting.instances)
    simulate(setting, callers)
    return setting, callers


def share_of_optimum(setting: Setting, callers: Sequence[Caller]) -> float:
    """Returns the rows that were answered in time as a share of the most that could have been."""
    most = optimum_rows(callers, [limit_s(caller, setting) for caller in callers], setting)
    return sum(caller.rows for caller in callers if is_in_time(caller, setting)) / most


@pytest.mark.parametrize("times", RATES)
@pytest.mark.parametrize("name", CASES)
def test_goodput_is_near_the_optimum(name: str, times: float) -> None:
    """At least nine tenths of what an omniscient schedule could do, whose instances never wait and divide requests."""
    setting, callers = offer(name, times)

    assert share_of_optimum(setting, callers) >= 0.9


@pytest.mark.parametrize("name", CASES)
def test_no_answer_comes_after_its_deadline(name: str) -> None:
    """A result is in time, or there is none."""
    setting, callers = offer(name, 1.7)

    assert [caller for caller in callers if caller.is_fine and not is_in_time(caller, setting)] == []


@pytest.mark.parametrize("times", RATES)
def test_the_higher_level_is_served_whole(times: float) -> None:
    _, callers = offer("levels", times)

    assert all(caller.is_fine for caller in callers if caller.level == 1)


def test_most_refusals_are_early() -> None:
    """A request that has no chance does not wait for that."""
    _, callers = offer("one timeout", 3.0)
    refused = [caller for caller in callers if not caller.is_fine]

    assert sum(caller.is_turned_away for caller in refused) > 0.9 * len(refused)


def test_nothing_is_refused_that_can_be_done() -> None:
    _, callers = offer("one timeout", 0.8)

    assert all(caller.is_fine for caller in callers)


def test_the_optimum_is_all_or_what_the_instances_can_do() -> None:
    setting = CASES["one timeout"][0]
    few, many = trace(0.5 * CAPACITY_RPS), trace(9 * CAPACITY_RPS)

    assert optimum_rows(few, [1.0] * len(few), setting) == pytest.approx(len(few))
    most = CAPACITY_RPS * (SECONDS + TIMEOUT_S + FULL_S)
    assert optimum_rows(many, [TIMEOUT_S] * len(many), setting) == pytest.approx(most, rel=0.01)
