"""The retry budget: how many repetitions the calls of a client have together."""

from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer import errors
from qinfer.core.retry import RESERVE_PER_S, WINDOW_S, RetryBudget
from tests.support.scripted_gateway import Server, X, answer, reply

RESERVE = int(RESERVE_PER_S * WINDOW_S)
BUSY = reply(503, error="Exceeds maximum queue size")


def spent(budget: RetryBudget, now_s: float) -> int:
    """Takes all tokens that are there at once; returns how many."""
    taken = 0
    while budget.take(now_s, 0.0) is not None:
        taken += 1
    return taken


def test_the_reserve_needs_no_calls() -> None:
    budget = RetryBudget()

    assert spent(budget, 0.0) == RESERVE
    assert spent(budget, 1.0) == RESERVE_PER_S
    assert spent(budget, 1000.0) == RESERVE


def test_calls_add_their_share() -> None:
    budget = RetryBudget(0.25)
    for _ in range(401):
        budget.add(0.0)

    assert spent(budget, 0.0) == RESERVE + 100


def test_what_calls_have_added_is_forgotten() -> None:
    budget = RetryBudget(0.5)
    for _ in range(1000):
        budget.add(0.0)

    assert RESERVE < spent(budget, 2 * WINDOW_S) < RESERVE + 100
    assert spent(budget, 100 * WINDOW_S) == RESERVE


def test_repetitions_wait_for_the_reserve_one_behind_the_other() -> None:
    budget = RetryBudget()
    spent(budget, 0.0)

    waits = [budget.take(0.0, 60.0) for _ in range(3)]

    assert waits == pytest.approx([0.1, 0.2, 0.3])
    assert budget.take(0.0, 0.3) is None
    assert budget.take(0.2, 0.3) == pytest.approx(0.2)


def test_without_a_budget_there_is_no_limit() -> None:
    budget = RetryBudget(None)

    assert [budget.take(0.0, 0.0) for _ in range(10 * RESERVE)] == [0.0] * 10 * RESERVE


@pytest.mark.parametrize("share", [-0.1, float("inf"), float("nan"), "0.2"])
def test_a_share_that_is_none(share: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="retry_share is"):
        RetryBudget(share)


@settings(max_examples=100)
@given(st.floats(0, 1), st.randoms(use_true_random=False), st.integers(1, 400))
def test_repetitions_are_never_more_than_share_and_reserve(share: float, random: Random, events: int) -> None:
    """Those that had to wait count at the time at which they happen."""
    budget, now_s, calls, repetitions = RetryBudget(share), 0.0, 0, []
    for _ in range(events):
        now_s += random.choice([0.0, 0.001, 0.1, 5.0])
        if random.random() < 0.5:
            budget.add(now_s)
            calls += 1
        elif (wait_s := budget.take(now_s, random.choice([0.0, 1.0, 60.0]))) is not None:
            repetitions.append(now_s + wait_s)

    last_s = max([now_s, *repetitions])
    assert len(repetitions) <= share * calls + RESERVE + RESERVE_PER_S * last_s + 1e-6


def test_calls_that_fail_together_are_no_storm() -> None:
    """Each call alone would be repeated more than ten times."""
    server = Server(BUSY)
    client = server.client(timeout_s=30.0, retry_share=0.0)
    began_s = server.clock.monotonic_s()

    for _ in range(100):
        with pytest.raises(errors.Overloaded):
            client.infer("m", {"x": X})

    passed_s = server.clock.monotonic_s() - began_s
    assert len(server.requests) - 100 <= RESERVE + RESERVE_PER_S * passed_s


def test_a_call_without_a_token_in_its_time_is_not_repeated() -> None:
    server = Server(BUSY)
    client = server.client(timeout_s=5.0, retry_share=0.0)
    for _ in range(RESERVE + 60):
        client._policy.budget.take(server.clock.monotonic_s(), 60.0)

    with pytest.raises(errors.Overloaded) as caught:
        client.infer("m", {"x": X})

    assert len(server.requests) == 1
    assert "retry budget" in "".join(caught.value.__notes__)


def test_a_gateway_that_never_got_the_request_costs_nothing() -> None:
    server = Server(httpx.ConnectError("refused"), answer())
    client = server.client(["http://a", "http://b"], retry_share=0.0)
    budget = client._policy.budget
    before = spent(budget, server.clock.monotonic_s())

    client.infer("m", {"x": X})

    assert before == RESERVE
    assert server.pauses == []
