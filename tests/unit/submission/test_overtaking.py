"""What higher lanes take from those below: few observations say little."""

import pytest

from qinfer.submission.backlog import Overtaking


def seen(looks: int, ended: int, *, is_occupied: bool = True, every_s: float = 0.1) -> Overtaking:
    overtaking = Overtaking()
    for _ in range(looks):
        overtaking.observe(ended, every_s, is_occupied=is_occupied)
    return overtaking


def test_one_request_is_no_rate() -> None:
    assert seen(1, 1).least_rps(0.25) == 0.0


@pytest.mark.parametrize("wait_s", [0.25, 2.0, 60.0, 1000.0])
def test_a_steady_rate_is_known_after_some_time(wait_s: float) -> None:
    assert seen(6000, 10).least_rps(wait_s) == pytest.approx(100.0, rel=0.35)


def test_a_burst_is_no_rate_for_a_request_that_may_wait_for_long() -> None:
    burst = seen(5, 20)

    assert burst.least_rps(0.25) > 70.0
    assert burst.least_rps(60.0) < 1.0


def test_a_lane_takes_no_more_than_the_time_in_which_it_is_not_empty() -> None:
    """Requests that end at once are many, and take little."""
    assert seen(100, 50, is_occupied=False).least_part(60.0, rps=1.0) == 0.0
    assert seen(100, 50).least_part(0.25, rps=1.0) == pytest.approx(1.0, abs=0.01)


def test_slow_requests_that_wait_take_no_more_than_what_ends() -> None:
    """A lane in which one request waits for another is never empty."""
    assert seen(600, 0).least_part(60.0, rps=1.0) == 0.0


def test_a_flood_that_has_ended_is_forgotten_soon() -> None:
    flood = seen(1200, 10)
    before = flood.least_part(60.0, rps=100.0)

    for _ in range(30):
        flood.observe(0, 0.1, is_occupied=False)

    assert before > 0.5
    assert flood.least_part(60.0, rps=100.0) < 0.06
