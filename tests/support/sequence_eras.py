"""Lives of one sequence over restarts of Redis, in miniature: immutable states, and the moves between them.

Redis confirms what it has not written to its disk yet; a restart takes the last of it away and begins another *era*. A
caller begins a life, also behind one that runs, and sends its steps; whoever looks at the record ends the lives of an
older era; the worker executes steps, and the end of a life begins the next one. Each rule can be left out (`Rules`).
"""

from collections.abc import Iterator
from typing import NamedTuple

STEPS = 2
"""A life has so many steps."""


class Rules(NamedTuple):
    """The rules of the protocol; a model without one of them breaks a promise.

    Attributes:
        finish_keeps_era: A life that begins behind another that is finished has the era of the record (else none).
        end_keeps_era: The same, behind a life that ends because it is of an older era (else it has the new one).
        all_lives_end: Whoever finds a record of an older era ends all its lives.
        looks_before_start: A START ends lives of an older era before its own begins.
    """

    finish_keeps_era: bool = True
    end_keeps_era: bool = True
    all_lives_end: bool = True
    looks_before_start: bool = True


class Record(NamedTuple):
    """A sequence in Redis.

    Attributes:
        era: Of the record; -1 = it has none.
        lives: The numbers of the lives that have not ended, the one that executes first.
        steps: Life → steps that were accepted.
        done: Life → steps that were executed.
    """

    era: int = -1
    lives: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    done: tuple[int, ...] = ()


class State(NamedTuple):
    """Everything.

    Attributes:
        record: As Redis has it now.
        written: As its disk has it.
        era: Of Redis.
        confirmed: Life → steps that the caller was told are accepted.
        begun: Life → the era of its START.
        restarts: So many are still to come.
        broken: The promise that was broken; empty = none.
    """

    record: Record
    written: Record
    era: int = 0
    confirmed: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    restarts: int = 1
    broken: str = ""


def first_state(restarts: int) -> State:
    """Returns the state in which nothing has happened."""
    return State(Record(), Record(), restarts=restarts)


def moves(state: State, lives: int, rules: Rules) -> Iterator[tuple[str, State]]:
    """Returns every move that is possible, and the state behind it."""
    if state.record != state.written:
        yield "write", state._replace(written=state.record)
    if state.restarts:
        yield "restart", state._replace(record=state.written, era=state.era + 1, restarts=state.restarts - 1)
    if len(state.confirmed) < lives:
        yield "start", _started(state, rules)
    yield from _later_steps(state, rules)
    yield from _executions(state, rules)


def _looked(state: State, rules: Rules) -> State:
    """Ends lives of an older era, as each script does that reads a record in full."""
    record = state.record
    while record.lives and record.era != state.era:
        record = _over(record, record.era if rules.end_keeps_era else state.era)
        if not rules.all_lives_end:
            break
    return state._replace(record=record)


def _started(state: State, rules: Rules) -> State:
    """A life begins, at once or behind the last one; the caller has it confirmed."""
    if rules.looks_before_start:
        state = _looked(state, rules)
    record, number = state.record, len(state.confirmed)
    record = record._replace(
        era=record.era if record.lives else state.era,
        lives=(*record.lives, number),
        steps=_set(record.steps, number, 1),
        done=_set(record.done, number, 0),
    )
    return state._replace(record=record, confirmed=(*state.confirmed, 1), begun=(*state.begun, state.era))


def _later_steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """A step of the last life, where that is not refused."""
    if not state.confirmed or state.confirmed[-1] == STEPS:
        return
    state, last = _looked(state, rules), len(state.confirmed) - 1
    record = state.record
    if record.lives and record.lives[-1] == last:
        accepted = record.steps[last] + 1
        confirmed = (*state.confirmed[:-1], state.confirmed[-1] + 1)
        after = state._replace(record=record._replace(steps=_set(record.steps, last, accepted)), confirmed=confirmed)
        if accepted != confirmed[-1]:
            after = after._replace(broken="a step was accepted behind one that is lost")
        yield "step", after
    else:
        yield "refused step", state


def _executions(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """A step of the life that executes; its last step, or the last one of a life with another behind it, ends it.

    `finish`, which ends a life, does not look at the era: what it removes is answered already.
    """
    looked = _looked(state, rules)
    record = looked.record
    if record.lives and record.done[record.lives[0]] < record.steps[record.lives[0]]:
        life = record.lives[0]
        executed = record._replace(done=_set(record.done, life, record.done[life] + 1))
        yield "execute", looked._replace(record=executed)
    record = state.record
    if record.lives and record.done[record.lives[0]] == record.steps[record.lives[0]]:
        life = record.lives[0]
        if record.steps[life] == STEPS or len(record.lives) > 1:
            after = state._replace(record=_over(record, record.era if rules.finish_keeps_era else -1))
            if record.era == state.era and record.steps[life] < state.confirmed[life]:
                after = after._replace(broken="a life ended as whole of which a step is lost")
            yield "finish", after


def _over(record: Record, era: int) -> Record:
    """Ends the life that executes; the next one begins, in a record of that era."""
    return record._replace(lives=record.lives[1:], era=era)


def unsound(state: State, rules: Rules) -> str:
    """Says which life counts as whole though Redis has lost a step of it; empty = none does."""
    record = _looked(state, rules).record
    lost = [life for life in record.lives if record.steps[life] < state.confirmed[life]]
    return f"life {lost[0]} counts as whole and has lost a step" if lost else ""


def lost_for_nothing(state: State, rules: Rules) -> str:
    """Says which life ends as lost though Redis was not restarted since its START; empty = none does."""
    ended = {*state.record.lives} - {*_looked(state, rules).record.lives}
    sound = [life for life in sorted(ended) if state.begun[life] == state.era]
    return f"life {sound[0]} ends as lost though Redis was not restarted" if sound else ""


def _set(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    found = [*values, *[0] * (place + 1 - len(values))]
    found[place] = value
    return tuple(found)
