"""Tries of planning or finishing a job, as its log tells them: when the first began, and whether to go on. Pure.

A try that ends badly for now writes why, one that is killed writes nothing: so a beginning that follows a beginning
tells that the process died of it, or with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from qinfer.delivery.jobs import LogLine

MAX_DEATHS = 5
"""So often a process may die over one job before that is taken for the job's fault."""


class Step(NamedTuple):
    """What is tried, in words.

    Attributes:
        name: `planning` or `finishing`.
    """

    name: str

    @property
    def began(self) -> str:
        """The line of a beginning."""
        return f"{self.name} began"

    @property
    def waits(self) -> str:
        """How the line begins that says why it is tried again."""
        return f"{self.name} is tried again: "


PLANNING = Step("planning")
FINISHING = Step("finishing")


class Attempts(NamedTuple):
    """The tries so far.

    Attributes:
        since_at: When the first began, in the broker's time; 0 = there was none.
        deaths: How many of them ended without a word.
        reason: Why the last is tried again; empty = there is no such line.
    """

    since_at: float = 0.0
    deaths: int = 0
    reason: str = ""


def attempts_of(step: Step, log: Sequence[LogLine]) -> Attempts:
    """Reads the tries of the present turn: the lines at the end of a job's log that are about this step."""
    turn: list[LogLine] = []
    for line in reversed(log):
        if line.text != step.began and not line.text.startswith(step.waits):
            break
        turn.append(line)
    if not turn:
        return Attempts()
    turn.reverse()
    deaths = sum(line.text == step.began for line in turn)
    last = turn[-1].text
    reason = last.removeprefix(step.waits) if last != step.began else ""
    return Attempts(turn[0].at, deaths - bool(reason), reason)


def verdict(step: Step, attempts: Attempts, now_s: float, timeout_s: float) -> str:
    """Says why it is not to be tried again; empty = it is."""
    if attempts.deaths >= MAX_DEATHS:
        return f"{step.name} was broken off {attempts.deaths} times by the end of the bulk worker; its log says why"
    if attempts.since_at and now_s - attempts.since_at > timeout_s:
        return too_long(step, timeout_s, attempts.reason)
    return ""


def too_long(step: Step, timeout_s: float, reason: str) -> str:
    """Says that a step took too long, and why or what to do."""
    why = f": {reason}" if reason else "; is a store slow or stuck? resume the job when it is well"
    return f"{step.name} took more than {timeout_s:g} s{why}"
