"""When a supervised process that ended is started again, and what its end means: pure decisions, no processes."""

import signal
from dataclasses import dataclass

from qinfer.core.processes import signal_name
from qinfer.core.retry import pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a process that ended is treated.

    Attributes:
        first_delay_s: Seconds before the first restart; doubled with each failure in a row.
        max_delay_s: The longest delay.
        stable_s: A process that ran this long is forgiven its earlier failures.
        give_up_after: Failures in a row after which it is not started again; `None` = never give up.
        hopeless_codes: Exit codes that no restart can cure, such as 2 for wrong settings; only with `give_up_after`.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_s: float = 10.0
    give_up_after: int | None = None
    hopeless_codes: tuple[int, ...] = (2,)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after a process ended.

    Attributes:
        failures: Its failures in a row, this one included.
        delay_s: Seconds until it is started again; `None` = give up.
    """

    failures: int
    delay_s: float | None


def after_exit(policy: RestartPolicy, *, failures: int, ran_s: float, code: int) -> Verdict:
    """Decides about a process that ended without being asked to.

    Args:
        policy: How to treat it.
        failures: Its failures in a row before this one.
        ran_s: How long it ran.
        code: Its exit code; negative = the signal that killed it, as `subprocess` reports it.
    """
    failures = 1 if ran_s >= policy.stable_s else failures + 1
    if policy.give_up_after is not None and (failures >= policy.give_up_after or code in policy.hopeless_codes):
        return Verdict(failures, None)
    return Verdict(failures, pause_s(failures, policy.first_delay_s, policy.max_delay_s))


def describe_exit(code: int) -> str:
    """Says how a process ended: `ended with exit code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal_name(-code) or f"signal {-code}"
    hint = " (by hand, or by the system for lack of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
