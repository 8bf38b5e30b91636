"""How long a job rests whose shards a worker can't run."""

from qinfer_workers.inference.bulk.shard_loop import JobRests


class Time:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_job_rests_longer_each_time_up_to_a_bound() -> None:
    time = Time()
    rests = JobRests(time)
    seen = []
    for _ in range(7):
        rests.begin_rest("a", 0.0)
        seen.append(rests.left_s("a"))
        time.now += seen[-1]
        assert rests.left_s("a") == 0.0

    assert seen == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_job_rests_for_as_long_as_it_was_tried() -> None:
    """Where each try takes a minute, because a store does not answer, other jobs have the next one."""
    rests = JobRests(Time())
    rests.begin_rest("a", 60.0)

    assert rests.left_s("a") == 60.0
    assert rests.left_s("b") == 0.0


def test_a_shard_that_ran_ends_its_job_s_rest() -> None:
    rests = JobRests(Time())
    rests.begin_rest("a", 0.0)
    rests.begin_rest("a", 0.0)
    rests.end_rest("a")
    assert rests.left_s("a") == 0.0

    rests.begin_rest("a", 0.0)
    assert rests.left_s("a") == 1.0


def test_jobs_that_rested_long_ago_are_forgotten() -> None:
    time = Time()
    rests = JobRests(time)
    for number in range(1000):
        rests.begin_rest(f"job{number}", 0.0)
        time.now += 1.0

    assert len(rests._jobs) < 40
