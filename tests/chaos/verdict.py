"""What a run has shown: a ledger of numbered requests becomes one line, and a list of what broke the promise.

Pure: no clock, no network. The promise is docs/explanation/delivery.md; what is counted here is what it forbids.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

WINDOW_S = 2.0
"""Under `everysec`, what Redis answered in so many seconds before it was killed may be lost: a sync was under way."""

TERMINAL = ("succeeded", "failed", "expired", "cancelled")

_REPLY_S = 0.5
"""Longest time that a reply which accepts a request is under way."""

_SHOWN = 20  # problems of one kind


class Wish(StrEnum):
    """How a request is meant to end; whether it does is a race that either side may win."""

    ANSWER = "answer"
    CANCEL = "cancel"
    EXPIRE = "expire"


class Sighting(NamedTuple):
    """What a reader was told of a request.

    Attributes:
        at_s: When, by the monotonic clock.
        state: The state; `unknown` after a 404 or a 410.
        value: The first number of the answer; `None` where none was read.
    """

    at_s: float
    state: str
    value: float | None = None


@dataclass(slots=True, kw_only=True)
class Call:
    """One asynchronous request: its number n is what it asks for, and 2n + 1 the right answer."""

    number: int
    wish: Wish
    link: str = ""
    """Its path, from the reply that accepted it; empty = not accepted."""
    accepted_s: float = 0.0
    sightings: list[Sighting] = field(default_factory=list)
    reason: str = ""
    """The error that it ended with."""
    webhook: str = ""
    """Where its end is to be told."""
    told: int = 0
    """How often it was told; more than once is allowed, for a notice whose confirmation was lost comes again."""


@dataclass(slots=True)
class Ledger:
    """Everything that the clients have seen."""

    calls: list[Call] = field(default_factory=list)
    answered: int = 0
    """Synchronous requests with their right answer."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Why synchronous requests were not accepted, with how often; each was tried again."""
    failures: list[str] = field(default_factory=list)
    """Texts of synchronous requests that were executed in vain."""
    problems: list[str] = field(default_factory=list)
    """What may never happen: a wrong answer, a status that no route has."""


class Verdict(NamedTuple):
    """What came out.

    Attributes:
        line: The counts, for people and for comparisons.
        problems: Why the run has failed; empty when it has not.
    """

    line: str
    problems: list[str]


def expected(number: int) -> float:
    """Returns the right answer to a request."""
    return 2.0 * number + 1.0


def judge(ledger: Ledger, *, kills: int, dead_letters: int, broker_kills: Sequence[float] = ()) -> Verdict:
    """Counts, and says what is wrong.

    Args:
        ledger: What the clients have seen.
        kills: Processes that were killed.
        dead_letters: Entries that were buried.
        broker_kills: When Redis was killed in a mode that may lose the last `WINDOW_S` before; empty where nothing
            may be lost.
    """
    counts: Counter[str] = Counter()
    problems = ledger.problems[:_SHOWN]
    counts["accepted"] = ledger.answered + len(ledger.failures)
    counts["succeeded"], counts["failed"] = ledger.answered, len(ledger.failures)
    for call in ledger.calls:
        if not call.link:
            problems.append(f"request {call.number} was never accepted, however often it was handed in")
            continue
        counts["accepted"] += 1
        outcome, problem = _judge_call(call, broker_kills)
        counts[outcome] += 1
        if problem:
            problems.append(f"request {call.number} ({call.link}): {problem}")
    if counts["failed"] > dead_letters:
        texts = {*ledger.failures, *(call.reason for call in ledger.calls if call.reason)}
        problems.append(f"{counts['failed']} failed and only {dead_letters} are dead letters: {sorted(texts)[:_SHOWN]}")
    for name in ("lost", "duplicates"):
        if counts[name]:
            problems.insert(0, f"{counts[name]} {name}")
    words = [*("accepted", *TERMINAL, "lost", "duplicates")]
    line = " ".join(f"{word}={counts[word]}" for word in words) + f" kills={kills}"
    if broker_kills:
        line += f" in_window={counts['in_window']}"
    return Verdict(line, problems)


def _judge_call(call: Call, broker_kills: Sequence[float]) -> tuple[str, str]:
    """Returns what an accepted request counts as, and what is wrong with it."""
    seen = [sighting for sighting in call.sightings if not _may_be_lost(sighting.at_s, broker_kills)]
    states = {sighting.state for sighting in seen}
    if not states or states.isdisjoint(TERMINAL):
        if _may_be_lost(call.accepted_s, broker_kills):
            return "in_window", ""
        return "lost", f"has no terminal state, but {sorted(states)}: {call.reason}"
    values = {sighting.value for sighting in seen if sighting.value is not None}
    if len(states) > 1 or len(values) > 1:
        return "duplicates", f"was seen as {sorted(states)} with the answers {sorted(values)}: {call.reason}"
    state = states.pop()
    if call.webhook and not call.told and not broker_kills:
        return state, "has a webhook that was never told"
    return state, "was read only once" if len(seen) < 2 else _misfit(call, state, values)


class Flushed(NamedTuple):
    """Outcome of a run in which Redis lost its data.

    Attributes:
        accepted: Requests that were accepted.
        lost: Those whose end is not known, because they were accepted before such a loss.
        problems: Everything else that is wrong.
    """

    accepted: int
    lost: int
    problems: list[str]


def judge_flushed(ledger: Ledger, losses: Sequence[float]) -> Flushed:
    """Counts; `losses` are the times at which Redis had lost its data."""
    problems = [*ledger.problems, *ledger.failures]
    accepted, lost = ledger.answered + len(ledger.failures), 0
    for call in ledger.calls:
        if not call.link:
            problems.append(f"request {call.number} was never accepted, however often it was handed in")
            continue
        accepted += 1
        is_excused = any(call.accepted_s <= at_s + _REPLY_S for at_s in losses)
        states = {sighting.state for sighting in call.sightings}
        if is_excused:
            states.discard("unknown")
        values = {sighting.value for sighting in call.sightings if sighting.value is not None}
        ends = states.intersection(TERMINAL)
        if is_excused and not ends:
            lost += 1
        elif len(ends) != 1 or "unknown" in states or len(values) > 1:
            problems.append(f"request {call.number} ({call.link}) was seen as {sorted(states)} with {sorted(values)}")
        elif problem := _misfit(call, ends.pop(), values):
            problems.append(f"request {call.number} ({call.link}): {problem}")
    return Flushed(accepted, lost, problems)


def _misfit(call: Call, state: str, values: set[float]) -> str:
    """Says how an outcome does not fit what was asked; a DELETE after the end has removed the result."""
    is_removed = call.wish is Wish.CANCEL and not values
    if state == "succeeded" and not is_removed and values != {expected(call.number)}:
        return f"has the answers {sorted(values)} and not {expected(call.number)}"
    if (state == "expired" and call.wish is not Wish.EXPIRE) or (state == "cancelled" and call.wish is not Wish.CANCEL):
        return f"is {state}, which nobody wished"
    return ""


def _may_be_lost(at_s: float, broker_kills: Sequence[float]) -> bool:
    return any(kill_s - WINDOW_S <= at_s <= kill_s for kill_s in broker_kills)


class Key(NamedTuple):
    """A Redis key at the end of a run.

    Attributes:
        name: Its name.
        kind: Its type, as Redis calls it.
        ttl_ms: Its time to live; -1 = none.
        length: Entries of a stream, members of a sorted set.
        pending: Entries of a stream that some consumer holds.
    """

    name: str
    kind: str
    ttl_ms: int
    length: int = 0
    pending: int = 0


_LANE = re.compile(r"qinfer:\{.+#\d+\}:\d+:(p[1-8](\.delayed)?|bulk[123]?|seq(\.handed)?)")
_EMPTY = re.compile(r"qinfer:\{.+#\d+\}:(due|deliveries:.+|sequences|sequence-endings)|qinfer:jobs:open")
# The lane of shadows may keep what a gateway left that died together with the declaration (decision 0026).
_PERMANENT = re.compile(
    r"qinfer:(\{.+#\d+\}:(\d+:shadow|dlq|config|stats:\d+|sequence-(owners|lanes|counts)|declared|trials)"
    r"|installation|segment-secret|desired|control|workers|scaler-counts|jobs(:places)?|\{counts\}:(asked|added))"
)


def leftovers(keys: Iterable[Key]) -> list[str]:
    """Says what is still in Redis that should not be: work in lanes, deadlines, notices, keys that live for ever."""
    problems = []
    for key in keys:
        if _LANE.fullmatch(key.name) or _EMPTY.fullmatch(key.name):
            if key.length or key.pending:
                problems.append(f"{key.name} holds {key.length} entries, {key.pending} of them pending")
        elif key.ttl_ms < 0 and not _PERMANENT.fullmatch(key.name):
            problems.append(f"{key.name} ({key.kind}) has no time to live")
    return problems[:_SHOWN]
