"""The protocol of sequences in miniature: immutable states, and the moves that lead from one to the next.

A caller submits steps 1, 2, 3 of each sequence; the model adds a step's number to its state. A worker commits a step,
and executes the next one while the response of the former is on its way. It may die between any two moves, or lose its
lease without noticing; another one, or itself anew, then owns its sequences. A gateway drops responses that it has
seen. Each rule of the protocol can be left out (`Rules`), to see that it is needed.
"""

from collections.abc import Iterator
from typing import NamedTuple

WORKERS = (0, 1)
NOBODY = -1


class Rules(NamedTuple):
    """The rules of the protocol; a rule that is false is left out."""

    commit_checks_token: bool = True
    publishes_after_commit: bool = True
    finishes_after_publish: bool = True
    publishes_the_stored_response: bool = True
    keeps_the_response_before_the_last: bool = True
    tells_steps_in_order: bool = True


class Sequence(NamedTuple):
    """A sequence in Redis, and what its caller has seen.

    Attributes:
        submitted: So many steps were submitted.
        entries: The steps that are not finished, in order.
        owner: The worker; `NOBODY` = it waits for one.
        token: Rises with each owner.
        committed: The number of the last committed step.
        state: The state that was committed with it.
        responses: The stored responses: (step, sum).
        seen: The steps whose response the caller has.
        by: The token of the last commit.
        broken: The promise that was broken; empty = none.
    """

    submitted: int = 0
    entries: tuple[int, ...] = ()
    owner: int = NOBODY
    token: int = 0
    committed: int = 0
    state: int = 0
    responses: tuple[tuple[int, int], ...] = ()
    seen: tuple[int, ...] = ()
    by: int = 0
    broken: str = ""


class Work(NamedTuple):
    """A sequence in a worker's memory.

    Attributes:
        token: By which the worker owns it, or believes to.
        state: The sum that it has computed.
        done: The last step that it has executed, or found committed.
        is_executed: That step is not committed yet.
        answering: Committed steps that are not finished: (step, whether its response was published).
    """

    token: int
    state: int
    done: int
    is_executed: bool = False
    answering: tuple[tuple[int, bool], ...] = ()


class State(NamedTuple):
    """Everything: the sequences, and what each worker holds of each (`None` = nothing).

    Attributes:
        sequences: In Redis.
        held: By worker, then by sequence.
        lapsed: The workers whose lease has ended and whose sequences were not handed over yet.
        deaths: So many workers are still to die, and
        stalls: so many leases are to end before their time.
    """

    sequences: tuple[Sequence, ...]
    held: tuple[tuple[Work | None, ...], ...]
    lapsed: frozenset[int]
    deaths: int
    stalls: int


class Move(NamedTuple):
    """The name of a move, and whose it is."""

    name: str
    sequence: int = -1
    worker: int = -1


def first_state(sequences: int, deaths: int, stalls: int) -> State:
    """Returns the state in which nothing has happened."""
    nothing = tuple((None,) * sequences for _ in WORKERS)
    return State((Sequence(),) * sequences, nothing, frozenset(), deaths, stalls)


def moves(state: State, steps: int, rules: Rules) -> Iterator[tuple[Move, State]]:
    """Returns every move that is possible, and the state behind it."""
    for number, sequence in enumerate(state.sequences):
        if sequence.submitted < steps:
            step = sequence.submitted + 1
            appended = sequence._replace(submitted=step, entries=(*sequence.entries, step))
            yield Move("submit", number), _with(state, number, appended)
    for worker in WORKERS:
        yield from _fates(state, worker)
        for number, sequence in enumerate(state.sequences):
            work = state.held[worker][number]
            if work is not None:
                for name, after, left in _works(sequence, work, worker, rules):
                    yield Move(name, number, worker), _holding(_with(state, number, after), number, worker, left)
            elif sequence.owner == NOBODY and sequence.submitted and worker not in state.lapsed:
                owned = sequence._replace(owner=worker, token=sequence.token + 1)
                begun = Work(owned.token, owned.state, owned.committed if rules.publishes_the_stored_response else 0)
                yield Move("own", number, worker), _holding(_with(state, number, owned), number, worker, begun)


def missing(sequence: Sequence, steps: int) -> str:
    """Says what is missing of a sequence at the end; empty = nothing."""
    if len(sequence.seen) != steps or sequence.entries or sequence.committed != steps:
        return f"{len(sequence.seen)} of {steps} steps have a response, {len(sequence.entries)} are not finished"
    return ""


def _fates(state: State, worker: int) -> Iterator[tuple[Move, State]]:
    """Deaths, leases that end, and hand-overs."""
    if worker in state.lapsed:
        freed = tuple(each._replace(owner=NOBODY) if each.owner == worker else each for each in state.sequences)
        yield Move("hand over", worker=worker), state._replace(sequences=freed, lapsed=state.lapsed - {worker})
        return
    lapsed = state.lapsed | {worker}
    if state.deaths:
        held = tuple((None,) * len(each) if number == worker else each for number, each in enumerate(state.held))
        yield Move("die", worker=worker), state._replace(held=held, deaths=state.deaths - 1, lapsed=lapsed)
    if state.stalls:
        yield Move("stall", worker=worker), state._replace(stalls=state.stalls - 1, lapsed=lapsed)


def _works(sequence: Sequence, work: Work, worker: int, rules: Rules) -> Iterator[tuple[str, Sequence, Work | None]]:
    """The moves of a worker with a sequence that it holds, or believes to hold."""
    yield from _answers(sequence, work, rules)
    is_mine = sequence.owner == worker and sequence.token == work.token
    if work.is_executed:
        yield _commit(sequence, work, is_allowed=is_mine or not rules.commit_checks_token)
        return
    known = {step for step, _ in work.answering}
    told = [step for step in sequence.entries if step not in known] if is_mine else []
    if not told:
        if not is_mine and not work.answering:
            yield "drop", sequence, None
        return
    step = told[0] if rules.tells_steps_in_order or work.token == 1 else told[-1]
    if step <= work.done:
        yield "find", sequence, work._replace(answering=(*work.answering, (step, False)))
        return
    executed = work._replace(state=work.state + step, done=step, is_executed=True)
    if not rules.publishes_after_commit:
        sequence = _published(sequence, step, executed.state)
    yield "execute", sequence, executed


def _commit(sequence: Sequence, work: Work, *, is_allowed: bool) -> tuple[str, Sequence, Work | None]:
    """Stores state, response and number of a step together; a former owner drops the sequence."""
    if not is_allowed or work.done != sequence.committed + 1:
        return "drop", sequence, None
    kept = tuple(each for each in sequence.responses if each[0] in sequence.entries)
    committed = sequence._replace(
        committed=work.done,
        state=work.state,
        responses=(*kept, (work.done, work.state)),
        by=work.token,
    )
    if work.token < sequence.by:
        committed = committed._replace(broken="a former owner committed")
    if work.state != _sum(work.done):
        committed = committed._replace(broken="the state is not that of its steps, each once and in order")
    return "commit", committed, work._replace(is_executed=False, answering=(*work.answering, (work.done, False)))


def _answers(sequence: Sequence, work: Work, rules: Rules) -> Iterator[tuple[str, Sequence, Work]]:
    """Publishes the response to a committed step, and then finishes the step."""
    for place, (step, is_published) in enumerate(work.answering):
        rest = (*work.answering[:place], *work.answering[place + 1 :])
        if not is_published and rules.finishes_after_publish:
            after = (*work.answering[:place], (step, True), *work.answering[place + 1 :])
            stored = dict(sequence.responses)
            if not rules.keeps_the_response_before_the_last and step < sequence.committed:
                stored = {}
            published = _published(sequence, step, stored[step]) if step in stored else sequence
            yield "publish", published, work._replace(answering=after)
            continue
        entries = tuple(each for each in sequence.entries if each != step)
        kept = tuple(each for each in sequence.responses if each[0] != step or step == sequence.committed)
        finished = sequence._replace(entries=entries, responses=kept)
        if step not in sequence.seen:
            finished = finished._replace(broken="a step is gone without its response")
        yield "finish", finished, work._replace(answering=rest)


def _published(sequence: Sequence, step: int, total: int) -> Sequence:
    """Shows the caller a response; the same one may come again."""
    if total != _sum(step):
        return sequence._replace(broken="a response is not that of its step")
    if sequence.committed < step:
        return sequence._replace(broken="a response was seen before its step was committed")
    return sequence._replace(seen=tuple(sorted({*sequence.seen, step})))


def _sum(step: int) -> int:
    return step * (step + 1) // 2


def _with(state: State, number: int, sequence: Sequence) -> State:
    found = list(state.sequences)
    found[number] = sequence
    return state._replace(sequences=tuple(found))


def _holding(state: State, number: int, worker: int, work: Work | None) -> State:
    held = [list(each) for each in state.held]
    held[worker][number] = work
    return state._replace(held=tuple(map(tuple, held)))
