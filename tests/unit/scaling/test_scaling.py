"""The scaling policy's rules, one by one."""

import pytest

from qinfer.errors import SettingsError
from qinfer.scaling.policy import (
    MAX_PATIENCE,
    QueueObservation,
    ScalingDecision,
    ScalingPolicy,
    ScalingState,
    Throughput,
    decide,
)

POLICY = ScalingPolicy(max_workers=4, target_s=10, down_after_s=60, idle_s=300, cooldown_s=30)
KEY = ("m", 1)


class Scaler:
    """A policy with its memory."""

    def __init__(self, policy: ScalingPolicy = POLICY, workers: int = 0) -> None:
        self.policy = policy
        self.state = ScalingState.initial(0.0, workers)

    def see(self, now_s: float, work_s: float = 0.0, **more: float) -> ScalingDecision:
        fields = {"entries": int(work_s > 0), **more}
        decision, self.state = decide(
            self.policy,
            self.state,
            QueueObservation(now_s=now_s, work_s=work_s, **fields),  # type: ignore[arg-type]  # of several types
        )
        return decision

    def watch(self, begin_s: int, end_s: int, work_s: float = 0.0, **more: float) -> int:
        """Sees the same each second; returns the last target."""
        return [self.see(float(now), work_s, **more).target for now in range(begin_s, end_s)][-1]


@pytest.mark.parametrize(
    ("work_s", "target"), [(0.001, 1), (10.0, 1), (10.1, 2), (39.9, 4), (1e9, 4), (float("inf"), 4)]
)
def test_as_many_as_the_work_asks_for(work_s: float, target: int) -> None:
    """Seconds of work by the seconds that one may have, upwards, at once, up to the most."""
    assert Scaler().see(1.0, work_s).target == target


def test_the_reason_has_the_numbers() -> None:
    """People read it."""
    scaler = Scaler()

    assert scaler.see(1.0, 23.14).reason == "23.1 s of work at 10 s a worker"
    assert scaler.see(2.0, 95.0).reason == "95.0 s of work at 10 s a worker asks for 10, the maximum is 4"
    assert scaler.see(3.0, 95.0).reason == "enough"


def test_the_first_worker_needs_no_patience_and_the_second_does() -> None:
    """`up_after_s` is for more than one."""
    scaler = Scaler(ScalingPolicy(max_workers=4, up_after_s=5))

    assert scaler.see(1.0, 35.0).target == 1
    assert scaler.watch(2, 6, 35.0) == 1
    assert scaler.see(6.0, 5.0).target == 1
    assert scaler.watch(7, 12, 35.0) == 1
    assert scaler.watch(12, 14, 35.0) == 4


def test_less_must_suffice_for_a_while() -> None:
    """The most that was needed within that time stays; then it goes down in one step."""
    scaler = Scaler()
    scaler.see(0.0, 35.0)

    assert scaler.watch(1, 50, 5.0) == 4
    assert scaler.see(50.0, 15.0).target == 4
    assert scaler.see(60.0, 5.0).target == 2
    assert scaler.see(109.0, 5.0).target == 2
    assert scaler.see(110.0, 5.0).target == 1


def test_the_last_worker_leaves_after_idleness_only() -> None:
    """Not when less has sufficed: work would find nobody."""
    scaler = Scaler()
    scaler.see(0.0, 5.0)

    assert scaler.watch(1, 300) == 1
    decision = scaler.see(300.0)
    assert (decision.target, decision.reason) == (0, "nothing to do for 300 s")


def test_what_was_executed_between_two_looks_is_no_idleness() -> None:
    """Requests that are answered within a second are never seen in the queue."""
    scaler = Scaler()
    scaler.see(0.0, 5.0)
    scaler.see(200.0, executed=True)

    assert scaler.see(499.0).target == 1
    assert scaler.see(500.0).target == 0


def test_no_step_down_while_the_last_step_up_has_not_had_its_time() -> None:
    """The cooldown, or what a worker needs to load and a margin."""
    policy = ScalingPolicy(max_workers=4, down_after_s=0, idle_s=0, cooldown_s=30)
    quick, slow = Scaler(policy), Scaler(policy)
    quick.see(0.0, 35.0)
    slow.see(0.0, 35.0)

    assert [quick.watch(1, 30), quick.see(30.0).target] == [4, 0]
    assert [slow.watch(1, 150, load_s=100), slow.see(150.0, load_s=100).target] == [4, 0]


def test_workers_that_start_are_waited_for() -> None:
    """They count, so that nothing is started twice; and they are not sent away for having done nothing."""
    scaler = Scaler()
    scaler.see(0.0, 35.0, starting=0)

    assert scaler.see(1.0, 38.0, live=0, starting=4).reason == "enough"
    assert scaler.watch(2, 200, 5.0, live=1, starting=3) == 4
    assert scaler.see(200.0, 5.0, live=4, starting=0).target == 1


def test_what_the_throughput_keeps_busy_stays() -> None:
    """Workers that keep up with the load have no backlog, and are needed all the same; nobody is added for it."""
    scaler = Scaler()
    scaler.see(0.0, 25.0)

    assert scaler.watch(1, 1000, 1.0, used=2.4) == 3
    assert scaler.watch(1000, 2000, 1.0, used=9.0) == 3
    assert scaler.watch(2000, 2100, 1.0, used=1.1) == 2


def test_steps_down_that_are_taken_back_are_made_later_each_time() -> None:
    """Up, down, up, down … is what flapping is."""
    scaler, now, waited = Scaler(), 0, []
    for _ in range(6):
        scaler.see(float(now), 15.0)
        begin = now
        while scaler.see(float(now), 5.0).target > 1:
            now += 1
        waited.append(now - begin)
        now += 1

    assert waited == [60, 120, 240, 480, 960, 960]
    assert MAX_PATIENCE == 16


def test_patience_is_forgiven() -> None:
    """A step up long after the last step down is no flapping."""
    scaler = Scaler()
    scaler.see(0.0, 15.0)
    scaler.watch(1, 62, 5.0)
    scaler.see(62.0, 15.0)
    scaler.watch(63, 600, 5.0)

    scaler.see(600.0, 15.0)

    assert scaler.state.patience == 1


def test_a_time_without_sight_counts_for_nothing() -> None:
    """Redis was away: idleness and hysteresis begin anew."""
    scaler = Scaler()
    scaler.see(0.0, 15.0)
    scaler.watch(1, 59)

    scaler.state = scaler.state.after_gap(1000.0)

    assert scaler.watch(1000, 1060) == 2
    assert scaler.see(1060.0).target == 1
    assert scaler.see(1299.0).target == 1
    assert scaler.see(1300.0).target == 0


def test_a_model_that_wants_a_worker_keeps_it() -> None:
    """Its requests would be refused without."""
    scaler = Scaler()

    assert scaler.see(1.0, floor=1).target == 1
    assert scaler.state.target == 1
    assert scaler.watch(2, 1000, floor=1) == 1
    assert scaler.see(1000.0).target == 0


def test_open_sequences_keep_as_many_workers_as_have_slots_for_them() -> None:
    """A sequence may have nothing to execute for long, and has its slot all the time."""
    scaler = Scaler()

    decision = scaler.see(1.0, sequence_workers=3)
    assert (decision.target, decision.reason) == (3, "open sequences need the slots of 3")
    assert scaler.watch(2, 1000, sequence_workers=2) == 2
    assert scaler.watch(1000, 1059) == 2
    assert scaler.watch(1059, 1299) == 1
    assert scaler.see(1299.0).target == 0


def test_sequences_and_work_do_not_add_up() -> None:
    """A worker with a slot does the work of the others, too; the greater of both counts."""
    scaler = Scaler()

    assert scaler.see(1.0, 15.0, sequence_workers=3).target == 3
    assert scaler.see(2.0, 35.0, sequence_workers=3).reason == "35.0 s of work at 10 s a worker"
    assert scaler.see(3.0, 35.0, sequence_workers=9).target == 4
    assert Scaler().see(1.0, sequence_workers=9).reason == "open sequences need the slots of 9, the maximum is 4"


def test_a_sequence_that_waits_starts_the_first_worker_at_once() -> None:
    scaler = Scaler(ScalingPolicy(max_workers=4, up_after_s=5))

    assert scaler.see(1.0, sequence_workers=2).target == 1
    assert scaler.watch(2, 7, sequence_workers=2) == 1
    assert scaler.see(7.0, sequence_workers=2).target == 2


def test_the_fewest_are_there_from_the_start() -> None:
    """And come back when they should be."""
    scaler = Scaler(ScalingPolicy(min_workers=2, max_workers=3))

    decision = scaler.see(0.0)

    assert (decision.target, decision.reason) == (2, "the minimum is 2")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"min_workers": 3, "max_workers": 2}, "3 to 2 workers"),
        ({"max_workers": 0}, "0 to 0 workers"),
        ({"min_workers": -1}, "-1 to 1 workers"),
        ({"target_s": 0.0}, "got 0.0"),
        ({"target_s": float("inf")}, "got inf"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, float], text: str) -> None:
    """With the numbers."""
    with pytest.raises(SettingsError, match=text):
        ScalingPolicy(**fields)  # type: ignore[arg-type]  # of several types


class TestThroughput:
    """Workers that the rows of late keep busy."""

    def test_is_rows_a_second_by_the_speed(self) -> None:
        """Over the last ten seconds, of all versions; a version that just came counts from now on."""
        throughput = Throughput()
        rows = [
            throughput.observe(float(now), {KEY: 50 * now, ("n", 1): 10 * now}, {KEY: 100.0, ("n", 1): 10.0}, 4, 0.1)
            for now in range(30)
        ]

        assert rows[0] == 0.0
        assert rows[29] == pytest.approx(1.5)
        assert throughput.executed
        assert throughput.observe(30.0, {KEY: 50 * 29, ("n", 1): 290, ("o", 1): 10**6}, {("o", 1): 1.0}, 4, 0.1) == 0.0

    def test_unknown_speed_and_a_reset_count_nothing(self) -> None:
        """Statistics may be removed by hand."""
        throughput = Throughput()
        throughput.observe(0.0, {KEY: 100}, {KEY: 10.0}, 1, 0.1)

        assert throughput.observe(1.0, {KEY: 5}, {KEY: 10.0}, 1, 0.1) == 0.0
        assert throughput.observe(2.0, {KEY: 50}, {KEY: 0.0}, 1, 0.1) == 0.0

    def test_a_speed_that_is_not_reached_is_corrected(self) -> None:
        """Two workers with a backlog did what one and a half are said to do: each is slower than that."""
        throughput = Throughput()
        for now in range(11):
            full = throughput.observe(float(now), {KEY: 15 * now}, {KEY: 10.0}, 2, 30.0)
        for now in range(11, 40):
            light = throughput.observe(float(now), {KEY: 165 + 9 * (now - 11)}, {KEY: 10.0}, 2, 0.1)

        assert full == pytest.approx(2.0)
        assert light == pytest.approx(0.9 * 2 / 1.5)
