"""The restart policy: who is started again, and when."""

import signal

import pytest

from qinfer.cli.local.supervisor import RestartPolicy, Verdict, after_exit, describe_exit

WORKER = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0, stable_s=10.0)
GATEWAY = RestartPolicy(give_up_after=3)


def test_delay_doubles_with_each_failure_in_a_row() -> None:
    """A process that fails at once is tried less and less often."""
    delays = [after_exit(WORKER, failures=n, ran_s=0.1, code=1).delay_s for n in range(5)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("failures", [10, 10_000])
def test_delay_is_bounded(failures: int) -> None:
    """However often it failed, the next try comes."""
    assert after_exit(WORKER, failures=failures, ran_s=0.1, code=1).delay_s == 30.0


def test_stable_run_is_forgiven() -> None:
    """A crash after a long run is restarted as the first one was."""
    assert after_exit(WORKER, failures=7, ran_s=10.0, code=-9) == Verdict(1, 0.5)


def test_gives_up_after_the_limit() -> None:
    """What nothing works without ends the whole after a few tries in a row."""
    verdicts = [after_exit(GATEWAY, failures=n, ran_s=0.1, code=1) for n in range(3)]

    assert [v.delay_s is None for v in verdicts] == [False, False, True]


def test_hopeless_code_gives_up_at_once() -> None:
    """Wrong settings stay wrong."""
    assert after_exit(GATEWAY, failures=0, ran_s=0.1, code=2).delay_s is None


def test_without_a_limit_no_code_is_hopeless() -> None:
    """A worker keeps being tried: its cause may be cured from outside."""
    assert after_exit(WORKER, failures=0, ran_s=0.1, code=2).delay_s == 0.5


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_end_is_described(code: int, text: str) -> None:
    """People read names, not negative numbers."""
    assert describe_exit(code) == text


def test_sigkill_hints_at_memory() -> None:
    """The kernel's out-of-memory killer is the likeliest sender."""
    assert "memory" in describe_exit(-signal.SIGKILL)
