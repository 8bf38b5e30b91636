"""The guard of a live model: how often it stops a search, with and without a reason."""

import math
import subprocess
from threading import Event
from unittest import mock

import numpy as np
import pytest

from qinfer.cli.analyze.guard import GuardState, Probes
from qinfer.cli.analyze.live import LiveGuard
from qinfer.cli.console import CommandFailed

WINDOWS, PROBES = 150, 40


def latencies(random: np.random.Generator, count: int, times: float = 1.0) -> list[float]:
    """Returns latencies with a long tail, in milliseconds."""
    return [float(one) for one in times * random.lognormal(1.0, 0.5, count)]


def windows_until_tripped(seed: int, times: float, drift: float = 0.0) -> int:
    """Returns after how many windows a search stops; `WINDOWS` = it does not.

    Under load, latencies are `times` those without; both grow by `drift` over the search.
    """
    random = np.random.default_rng(seed)
    state = GuardState.begun(latencies(random, 400))
    for number in range(WINDOWS):
        slower = 1.0 + drift * number / WINDOWS
        state = state.with_probes(latencies(random, PROBES, slower), latencies(random, PROBES, slower * times))
        if state.is_tripped:
            return number + 1
    return WINDOWS


def test_without_a_difference_it_seldom_stops() -> None:
    assert sum(windows_until_tripped(seed, 1.0) < WINDOWS for seed in range(20)) <= 1


def test_a_model_that_becomes_slower_by_itself_is_no_reason() -> None:
    """Both halves of the comparison are of the same time."""
    assert sum(windows_until_tripped(seed, 1.0, drift=3.0) < WINDOWS for seed in range(20)) <= 1


@pytest.mark.parametrize(("times", "within"), [(1.5, 30), (3.0, 3)])
def test_load_that_callers_notice_stops_it_soon(times: float, within: int) -> None:
    assert all(windows_until_tripped(seed, times) <= within for seed in range(20))


def test_failures_are_bad_and_named() -> None:
    state = GuardState.begun([1.0] * 400)
    for _ in range(3):
        state = state.with_probes([1.0] * PROBES, [math.inf] * PROBES)

    assert state.is_tripped
    assert state.reason() == "120 of 120 requests were slower than 1.1 ms under load, and 0 of 120 without"


def test_probes_measure_answers_and_failures_until_they_are_closed() -> None:
    asked = Event()
    answers = iter([None, ValueError("no")])

    def ask() -> None:
        answer = next(answers, None)
        if answer is not None:
            asked.set()
            raise answer

    probes = Probes(ask)
    assert asked.wait(10)
    probes.close()

    first, second, *_ = probes.taken()
    assert first < math.inf == second
    assert probes.taken() == []


@pytest.mark.parametrize("before_ms", [[], [math.inf], [2.0, math.inf]])
def test_a_model_that_does_not_answer_well_is_not_analysed(before_ms: list[float]) -> None:
    """No latency would be beyond the limit, so that the guard could not stop."""
    probes = mock.Mock(spec=Probes)
    probes.during.return_value = before_ms

    with pytest.raises(CommandFailed, match="before anything is tried"):
        LiveGuard(mock.Mock(spec=subprocess.Popen), probes)
