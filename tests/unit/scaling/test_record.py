"""What an autoscaler records, and what traffic is made out of it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from qinfer.errors import SettingsError
from qinfer.scaling.policy import QueueObservation, ScalingDecision
from qinfer.scaling.record import LAG_S, MOST_S, Moment, VersionTrace, decode, encode, traffic_of
from qinfer.scaling.simulation import as_recorded

BEGAN_S = 1_700_000_000.0


def moment(at_s: float, waiting: int, executed: int, *, live: int = 0, starting: int = 0, draining: int = 0) -> Moment:
    """One model whose worker does ten rows a second."""
    one = VersionTrace(model="m", version=1, requests=waiting, rows=waiting, executed=executed, rows_per_s=10.0)
    return Moment(at_s=BEGAN_S + at_s, live=live, starting=starting, draining=draining, versions=(one,))


def test_a_line_has_what_was_seen_and_decided() -> None:
    """And is read again as it was."""
    seen = QueueObservation(
        now_s=3.0,
        work_s=24.8,
        entries=248,
        executed=True,
        used=0.9,
        live=1,
        starting=2,
        load_s=1.2,
        floor=1,
        sequence_workers=2,
    )
    decision = ScalingDecision(target=3, wanted=3, reason="24.8 s of work at 10 s a worker")
    made = Moment.from_decision(
        BEGAN_S, seen, decision, before=1, draining=4, versions=(VersionTrace(model="m", version=1),)
    )

    line = encode(made)
    (read, _) = decode([line, encode(moment(1, 0, 0))])

    assert line.endswith(b"\n")
    assert read == made
    assert (read.before, read.target, read.wanted, read.draining, read.reason) == (1, 3, 3, 4, decision.reason)
    assert read.seen == replace(seen, now_s=BEGAN_S)


def test_what_arrives_is_what_was_executed_and_what_waits() -> None:
    """What was executed before the record began is no part of it; what waits then is."""
    moments = [moment(0, 4, 100), moment(1, 9, 110), moment(2, 0, 125), moment(3, 0, 125)]

    traffic = traffic_of(moments)

    assert traffic.arrivals == (4, 15, 6, 0)
    assert traffic.served == (0, 10, 15, 0)
    assert traffic.rows_per_s == 10.0


def test_workers_tell_late_what_they_executed() -> None:
    """Rows that have left the queue and are not counted yet did not arrive twice."""
    moments = [moment(0, 10, 0), moment(1, 0, 0), moment(2, 0, 7), moment(3, 2, 10), moment(4, 0, 12)]

    assert traffic_of(moments).arrivals == (10, 0, 0, 2, 0)


def test_what_was_cancelled_does_not_hide_what_comes_later() -> None:
    """Rows that leave the queue and are never executed are waited for, not for ever."""
    quiet = [moment(second, 0, 0) for second in range(1, int(LAG_S) + 3)]
    moments = [moment(0, 50, 0), *quiet, moment(30, 5, 0)]

    assert sum(traffic_of(moments).arrivals) == 55


def test_a_version_that_is_left_out_is_as_it_was() -> None:
    """Nothing of it waits; what it executes later is counted from where it was."""
    silent = [Moment(at_s=BEGAN_S + second) for second in range(1, 40)]
    moments = [moment(0, 0, 70), *silent, moment(40, 1, 72)]

    assert traffic_of(moments).arrivals[-1] == 3
    assert sum(traffic_of(moments).arrivals) == 3


def test_rows_count_by_the_work_that_they_are() -> None:
    """One of a model that is ten times slower counts as ten of the other."""

    def both(at_s: float, fast: int, slow: int) -> Moment:
        versions = (
            VersionTrace(model="fast", version=1, executed=fast, rows_per_s=10.0),
            VersionTrace(model="slow", version=2, executed=slow, rows_per_s=1.0),
        )
        return Moment(at_s=BEGAN_S + at_s, versions=versions)

    traffic = traffic_of([both(0, 0, 0), both(1, 10, 0), both(2, 10, 10)])

    assert sum(traffic.arrivals) == 20
    assert sum(traffic.arrivals) / traffic.rows_per_s == pytest.approx(11.0)
    assert traffic.arrivals[2] > traffic.arrivals[1] * 9


@pytest.mark.parametrize("every_s", [0.2, 1.0, 5.0])
def test_the_steps_of_a_record_do_not_matter(every_s: float) -> None:
    """Twelve rows a second for a minute, of which two stay."""
    steps = [every_s * number for number in range(int(60 / every_s) + 1)]
    moments = [moment(at_s, round(2 * at_s), round(10 * at_s), live=1) for at_s in steps]

    traffic = traffic_of(moments)

    assert sum(traffic.arrivals) == 720
    assert all(abs(count - 12) <= 1 for count in traffic.arrivals[1:])
    assert all(abs(count - 10) <= 1 for count in traffic.served[1:])
    assert len(traffic.arrivals) == 61
    outcome = as_recorded(traffic)
    assert (outcome.left, outcome.rows, outcome.worker_s) == (120, 720, 61)
    assert outcome.wait_s(1.0) == pytest.approx(11, abs=1)


def test_what_workers_take_to_start_and_to_leave() -> None:
    """As they did on average: of two that start one serves a second earlier."""
    shapes = [(0, 0, 0), (2, 0, 0), (2, 0, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (0, 1, 1), (0, 1, 0)]
    moments = [
        moment(second, 1, second, starting=starting, live=live, draining=draining)
        for second, (starting, live, draining) in enumerate(shapes)
    ]

    traffic = traffic_of(moments)

    assert (traffic.load_s, traffic.drain_s) == (2.5, 2.0)
    assert traffic.workers == (0, 2, 2, 2, 2, 2, 2, 1)


def test_a_line_that_a_crash_cut_off_is_left_out() -> None:
    """The next autoscaler goes on in the middle of it."""
    whole = [encode(moment(second, 0, second)) for second in range(5)]
    lines = [*whole[:2], whole[2][:20] + whole[3], whole[4], b"\n", whole[1]]

    read = decode(lines)

    assert [one.at_s - BEGAN_S for one in read] == [0, 1, 4]
    assert all(a.at_s < b.at_s for a, b in pairwise(read))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "at least two lines"),
        ([encode(moment(0, 0, 0))], "at least two lines"),
        ([b"time,rows\n", b"1,2\n"], "line 1 is not a line"),
        ([b'{"at": 1}\n', b"[]\n", b'{"at_s": "now"}\n'], "line 1 is not a line"),
        ([encode(moment(0, 0, 0)), encode(moment(MOST_S + 1, 0, 0))], "31 days"),
    ],
)
def test_what_is_no_record_is_said(lines: list[bytes], problem: str) -> None:
    """With what is wrong."""
    with pytest.raises(SettingsError, match=problem):
        decode(lines)


def test_a_record_without_traffic_tells_nothing() -> None:
    """Of anything that a policy could be tried with."""
    with pytest.raises(SettingsError, match="record some traffic"):
        traffic_of([moment(0, 0, 3), moment(1, 0, 3)])
