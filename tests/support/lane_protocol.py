"""Steps in the lanes of owners in miniature (ADR 0042): immutable states, and the moves that lead from one to the next.

One correlation id, whose state is the steps that its owner has executed: in the owner's memory only, or committed
(`Script.is_implicit`), so that another worker goes on. Its caller sends steps by two gateways. Until a life has an
owner, its steps wait in the sequence's own stream; then a gateway that knows the owner appends to the owner's lane, and
others by script. Two workers may die between any two moves, leave, or lose their lease without noticing; Redis may lose
the last entry of a lane, and an owner the reply that gave it a life or steps, or confirmed a commit. Each rule of the
protocol can be left out (`Rules`), to see that it is needed.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")

WORKERS = (0, 1)
NOBODY = -1
ALIVE, LAPSED, FENCED = range(3)
"""The lease of a worker: it has ended, and its lane is closed, too."""
NOTHING, RESPONSE, ERROR = range(3)
"""The first answer to a step."""
TICKET, STEP, RESTART, OVER = "ticket", "step", "restart", "over"
FAULTS = frozenset(
    {
        "kill", "stall", "lose a reply", "lose an owner's reply", "idle", "restart redis", "lose a read",
        "lose a commit's reply", "leave", "forget its owner",
    }
)  # fmt: skip


class Rules(NamedTuple):
    """The rules of the protocol; a rule that is false is left out."""

    appends_to_open_lanes_only: bool = True
    closes_lanes_with_their_entries: bool = True
    answers_closed_lanes: bool = True
    keeps_old_steps_from_later_lives: bool = True
    never_appends_again: bool = True
    appends_in_order: bool = True
    asks_the_owner_for_a_restart: bool = True
    makes_way_when_all_is_answered: bool = True
    moves_steps_behind_a_restart: bool = True
    moves_and_removes_at_once: bool = True
    idles_only_after_reading: bool = True
    drops_a_life_that_is_over: bool = True
    checks_the_token_of_steps: bool = True
    commits_by_token: bool = True
    keeps_the_response_of_the_end: bool = True
    finishes_after_publishing: bool = True
    finishes_what_it_has_read_later: bool = True
    compares_eras: bool = True
    ends_lives_it_does_not_know: bool = True
    tells_new_owners_of_successors: bool = True
    knows_what_a_gateway_sent_before: bool = True
    reads_on_after_an_outage: bool = True
    begins_with_the_committed_state: bool = True
    reads_closed_lanes: bool = True
    orders_steps_by_owners: bool = True
    knows_committed_entries: bool = True
    forgets_entries_that_it_removes: bool = True
    leaves_open_lives_to_their_owners: bool = True
    publishes_after_commit: bool = True
    commits_again_as_it_was: bool = True
    closes_its_lane_to_leave: bool = True
    names_its_lane_anew: bool = True
    leaves_after_a_lost_reply: bool = True


class Faults(NamedTuple):
    """The faults that are still to come."""

    kills: int = 0
    stalls: int = 0
    replies: int = 0
    owners: int = 0
    idles: int = 0
    restarts: int = 0
    reads: int = 0
    commits: int = 0
    leaves: int = 0
    expiries: int = 0


class Script(NamedTuple):
    """What the caller sends: of each step the gateway, whether it is START, and whether it is END.

    If it `waits`, each step is sent after the answer to the one before. States that are `is_implicit` are committed.
    """

    steps: tuple[tuple[int, bool, bool], ...]
    waits: bool
    is_implicit: bool = False

    def life_of(self, step: int) -> tuple[int, ...]:
        """Returns the steps of a step's life up to it."""
        begin = max(number for number in range(step + 1) if self.steps[number][1])
        return tuple(range(begin, step + 1))


class Entry(NamedTuple):
    """An entry of a lane, or of the sequence's own stream (`TICKET`), where `token` is that of the last owner."""

    kind: str
    step: int
    life: int
    token: int = 0
    is_closed: bool = False


class Work(NamedTuple):
    """A life in a worker's memory.

    Attributes:
        memory: The steps that it has executed.
        todo: Steps that it has read, in order.
        doing: The executed step that is not finished, and how far it is: 0 executed, 1 committed or needs no commit,
            2 published.
        known: Entries that were committed before.
    """

    token: int
    life: int
    era: int
    memory: tuple[int, ...] = ()
    todo: tuple[Entry, ...] = ()
    doing: tuple[Entry, int] | None = None
    is_restarted: bool = False
    known: frozenset[int] = frozenset()


class State(NamedTuple):
    """Everything.

    Attributes:
        sent: So many steps were sent.
        fallback: By gateway, steps that found no lane and go by script next.
        routes: By gateway, the owner that it knows: (worker, life, token, its joins).
        starts: The START of each life.
        life: The executing life, open or ended; 0 = none yet.
        waiting: The sequence's own stream.
        lanes: By worker; `None` = there is none.
        read: So many entries of each lane were read.
        closed: Entries of closed lanes.
        refused: Steps of living lives that closed lanes had; they get a retryable error.
        kept: The committed steps of the executing life, whose state is implicit.
        done: Those whose entry is not removed.
        joins: By worker, how often it has begun a lane.
        is_calm: No fault happens.
        broken: The promise that was broken; empty = none.
    """

    faults: Faults
    sent: int = 0
    fallback: tuple[tuple[int, ...], ...] = ((), ())
    routes: tuple[tuple[int, int, int, int] | None, ...] = (None, None)
    starts: tuple[int, ...] = ()
    life: int = 0
    is_open: bool = False
    owner: int = NOBODY
    token: int = 0
    of_era: int = 0
    era: int = 0
    waiting: tuple[Entry, ...] = ()
    lanes: tuple[tuple[Entry, ...] | None, ...] = (None, None)
    read: tuple[int, ...] = (0, 0)
    closed: tuple[Entry, ...] = ()
    held: tuple[Work | None, ...] = (None, None)
    leases: tuple[int, ...] = (ALIVE, ALIVE)
    dead: frozenset[int] = frozenset()
    answers: tuple[int, ...] = ()
    committed: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    kept: tuple[int, ...] = ()
    done: frozenset[int] = frozenset()
    joins: tuple[int, ...] = (0, 0)
    is_calm: bool = False
    broken: str = ""


def first_state(script: Script, faults: Faults) -> State:
    """Returns the state in which nothing has happened."""
    return State(faults, answers=(NOTHING,) * len(script.steps), is_calm=faults == Faults())


def missing(state: State) -> str:
    """Says what is missing at the end; empty = nothing."""
    if NOTHING in state.answers:
        return f"step {state.answers.index(NOTHING)} has no answer"
    if any(entry.kind in (TICKET, STEP) for entry in (*state.waiting, *state.closed)):
        return "an entry is left"
    if any(entry.kind == STEP for lane in state.lanes for entry in lane or ()):
        return "an entry is left in a lane"
    return ""


class Protocol:
    """The moves by a script of steps and by rules."""

    def __init__(self, script: Script, rules: Rules) -> None:
        self._script, self._rules = script, rules

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Returns every move that is possible, and the state behind it."""
        yield from self._sends(state)
        for gateway, route in enumerate(state.routes):
            if route is not None and state.faults.expiries:
                faults = state.faults._replace(expiries=state.faults.expiries - 1)
                yield "forget its owner", state._replace(faults=faults, routes=_put(state.routes, gateway, None))
        for gateway, steps in enumerate(state.fallback):
            if steps:
                left = _put(state.fallback, gateway, steps[1:])
                yield "append by script", self._submit(state._replace(fallback=left), steps[0], gateway)
        for worker in WORKERS:
            yield from self._fates(state, worker)
            yield from self._reads(state, worker)
            if state.held[worker] is not None:
                yield from self._works(state, worker)
        yield from self._janitor(state)
        if state.faults.restarts:
            yield "restart redis", _restart(state)

    # --- gateways ---

    def _sends(self, state: State) -> Iterator[tuple[str, State]]:
        step = state.sent
        if step == len(self._script.steps) or (self._script.waits and NOTHING in state.answers[:step]):
            return
        gateway, is_start, _ = self._script.steps[step]
        if state.fallback[gateway] and self._rules.appends_in_order:
            return
        state, route = state._replace(sent=step + 1), state.routes[gateway]
        if is_start:
            state, route = state._replace(routes=_put(state.routes, gateway, None)), None
        if route is None:
            yield "send by script", self._submit(state, step, gateway)
            return
        worker, life, token, join = route
        lane, entry = state.lanes[worker], Entry(STEP, step, life, token)
        if join != state.joins[worker] and self._rules.names_its_lane_anew:
            lane = None
        if lane is None and not self._rules.appends_to_open_lanes_only:
            lane = ()
        if lane is None:
            fallback = _put(state.fallback, gateway, (*state.fallback[gateway], step))
            yield "find no lane", state._replace(fallback=fallback, routes=_put(state.routes, gateway, None))
            return
        appended = state._replace(lanes=_put(state.lanes, worker, (*lane, entry)))
        yield "append", appended
        if state.faults.replies:
            lost = appended._replace(faults=state.faults._replace(replies=state.faults.replies - 1))
            if self._rules.never_appends_again:
                yield "lose a reply", lost._replace(answers=_put(lost.answers, step, ERROR))
            else:
                yield "lose a reply", lost._replace(lanes=_put(state.lanes, worker, (*lane, entry, entry)))

    # --- scripts ---

    def _submit(self, state: State, step: int, gateway: int) -> State:
        state = self._check_era(state)
        if self._script.steps[step][1]:
            return self._start(state, step)
        found, state = self._append(state, step)
        if found == ERROR:
            return self._answer(state, step, ERROR)
        if state.is_open and state.owner != NOBODY and state.life == len(state.starts):
            route = state.owner, state.life, state.token, state.joins[state.owner]
            state = state._replace(routes=_put(state.routes, gateway, route))
        return state

    def _start(self, state: State, step: int) -> State:
        starts = (*state.starts, step)
        waiting = (*state.waiting, Entry(TICKET, step, len(starts), state.token))
        state = state._replace(starts=starts, waiting=waiting)
        if not state.is_open:
            return state._replace(life=len(starts), is_open=True, owner=NOBODY, of_era=state.era, kept=())
        if state.owner == NOBODY:
            return state
        if state.lanes[state.owner] is None:
            return self._hand_over(state)
        if not self._rules.asks_the_owner_for_a_restart:
            is_idle = not any(entry.life == state.life for entry in state.waiting)
            return _over(state) if is_idle else _tell(state, RESTART)
        return _tell(state, RESTART)

    def _append(self, state: State, step: int) -> tuple[int, State]:
        """Appends a step to the owner's lane, or to the sequence's own stream; returns `ERROR` if there is no life."""
        if not state.is_open:
            return ERROR, state
        if state.life == len(state.starts) and state.owner != NOBODY and state.lanes[state.owner] is None:
            state = self._hand_over(state)
            if not state.is_open:
                return ERROR, state
        if state.life < len(state.starts) or state.owner == NOBODY:
            ticket = Entry(TICKET, step, len(state.starts), state.token)
            return NOTHING, state._replace(waiting=(*state.waiting, ticket))
        lane = state.lanes[state.owner]
        assert lane is not None
        entry = Entry(STEP, step, state.life, state.token)
        return NOTHING, state._replace(lanes=_put(state.lanes, state.owner, (*lane, entry)))

    def _move(self, state: State, entry: Entry, worker: int, token: int) -> State:
        """Submits a step anew; `worker` is that of the lane, or `NOBODY` for a closed lane."""
        state, step = self._check_era(state), entry.step
        if step in state.committed and self._rules.keeps_the_response_of_the_end:
            return _removed(self._answer(state, step, RESPONSE), entry, worker)
        is_of_earlier = entry.life != len(state.starts)
        is_old = is_of_earlier and token == 0 and self._rules.keeps_old_steps_from_later_lives
        if is_of_earlier and self._rules.knows_what_a_gateway_sent_before:
            start, steps = state.starts[-1], self._script.steps
            is_old = is_old or (step < start and steps[step][0] == steps[start][0])
        is_unknown = state.is_open and state.owner == worker != NOBODY and token in (0, state.token)
        if is_unknown and state.life == len(state.starts) and self._rules.ends_lives_it_does_not_know:
            state = _over(state)
        if is_old:  # a closed lane does not tell to which life a step of a gateway belongs that knew the former owner
            is_live = state.is_open and state.starts[state.life - 1] == self._script.life_of(step)[0]
            if worker == NOBODY and is_live:
                state = state._replace(refused=state.refused | {step})
            return _removed(self._answer(state, step, ERROR, may_fail=worker == NOBODY), entry, worker)
        before = state
        found, state = self._append(state, step)
        if found == ERROR:
            return _removed(self._answer(state, step, ERROR), entry, worker)
        if not self._rules.moves_and_removes_at_once and before != state:
            return state if worker == NOBODY else _unread(state, worker, entry)
        return _removed(state, entry, worker)

    def _hand_over(self, state: State) -> State:
        """Offers the life of an owner that has died or left; ends it if its state was in that owner's memory."""
        return state._replace(owner=NOBODY) if self._script.is_implicit else _over(state)

    def _check_era(self, state: State) -> State:
        if not self._rules.compares_eras:
            return state
        while state.is_open and state.of_era != state.era:
            state = _over(state)
        return state

    def _answer(self, state: State, step: int, answer: int, *, may_fail: bool = False) -> State:
        life = self._script.life_of(step)
        if answer == RESPONSE and self._script.is_implicit and step not in state.committed:
            state = state._replace(broken="a step is answered that is not committed")
        is_live = state.is_open and state.starts[state.life - 1] == life[0]
        if answer == ERROR and state.answers[step] == NOTHING:
            if step in state.committed:
                state = state._replace(broken="a committed step gets an error")
            elif state.is_calm:
                state = state._replace(broken="a step gets an error without a fault")
            elif is_live and not may_fail and state.owner != NOBODY and state.leases[state.owner] == ALIVE:
                state = state._replace(broken="a step of a living life gets an error")
        return state._replace(answers=_put(state.answers, step, state.answers[step] or answer))

    # --- workers ---

    def _fates(self, state: State, worker: int) -> Iterator[tuple[str, State]]:
        lease, faults = state.leases[worker], state.faults
        if lease == ALIVE:
            lapsed = state._replace(leases=_put(state.leases, worker, LAPSED))
            if faults.kills:
                dead = lapsed._replace(faults=faults._replace(kills=faults.kills - 1), dead=state.dead | {worker})
                yield "kill", dead._replace(held=_put(state.held, worker, None))
            if faults.stalls:
                yield "stall", lapsed._replace(faults=faults._replace(stalls=faults.stalls - 1))
            work = state.held[worker]
            if faults.leaves and state.owner == worker and (work is None or work.doing is None):
                yield "leave", self._leave(state._replace(faults=faults._replace(leaves=faults.leaves - 1)), worker)
        elif lease == LAPSED:
            yield "close its lane", self._close(state._replace(leases=_put(state.leases, worker, FENCED)), worker)
        elif state.is_open and state.owner == worker:
            yield "hand over", self._hand_over(state)
        elif worker not in state.dead:
            back = state._replace(leases=_put(state.leases, worker, ALIVE), held=_put(state.held, worker, None))
            yield "join again", back
        if lease == ALIVE and state.is_open and state.owner == NOBODY:
            yield from self._owns(self._check_era(state), worker)

    def _close(self, state: State, worker: int) -> State:
        kept = (state.lanes[worker] or ()) if self._rules.closes_lanes_with_their_entries else ()
        closed = (*state.closed, *(entry._replace(is_closed=True) for entry in kept))
        return state._replace(closed=closed, lanes=_put(state.lanes, worker, None), read=_put(state.read, worker, 0))

    def _leave(self, state: State, worker: int) -> State:
        """Gives back what the worker owns, once no step executes; it may own again in another lane."""
        work = state.held[worker]
        left = None if work is None or work.doing is None else work._replace(todo=(), token=-1)
        if self._rules.closes_its_lane_to_leave:
            state = self._close(state, worker)
        return self._hand_over(state)._replace(held=_put(state.held, worker, left))

    def _owns(self, state: State, worker: int) -> Iterator[tuple[str, State]]:
        if not state.is_open or state.owner != NOBODY:
            yield "find it lost", state
            return
        token = state.token + 1
        work = Work(token, state.life, state.era)
        told = [each for each in state.waiting if each.life == state.life]
        if self._script.is_implicit:
            work, told = self._adopt(state, work, told), []
        if state.lanes[worker] is None:
            state = state._replace(joins=_put(state.joins, worker, state.joins[worker] + 1))
        tickets = [each._replace(token=token) for each in told]
        lanes = _put(state.lanes, worker, (*(state.lanes[worker] or ()), *tickets))
        owned = state._replace(owner=worker, token=token, lanes=lanes)
        if state.life < len(state.starts) and self._rules.tells_new_owners_of_successors:
            owned = _tell(owned, RESTART)
        if state.held[worker] is None or not self._rules.drops_a_life_that_is_over:
            yield "own", owned._replace(held=_put(state.held, worker, work))
        if state.faults.owners:
            lost = owned._replace(faults=state.faults._replace(owners=state.faults.owners - 1))
            is_safe = self._script.is_implicit and self._rules.leaves_after_a_lost_reply
            yield "lose an owner's reply", self._leave(lost, worker) if is_safe else lost

    def _adopt(self, state: State, work: Work, told: list[Entry]) -> Work:
        """Returns a life that goes on from its committed state, with the steps that its former owners have left."""
        left: list[Entry] = []
        for entry in state.closed if self._rules.reads_closed_lanes else ():
            if entry.life == state.life and entry.kind == RESTART:
                break
            if entry.life == state.life and entry.kind == STEP:
                left.append(entry)
        todo = [*left, *told]
        if self._rules.orders_steps_by_owners:
            todo.sort(key=lambda entry: (entry.token, entry.kind == TICKET))
        memory = state.kept if self._rules.begins_with_the_committed_state else ()
        known = state.done if self._rules.knows_committed_entries else frozenset()
        return work._replace(memory=memory, todo=tuple(todo), known=known)

    def _reads(self, state: State, worker: int) -> Iterator[tuple[str, State]]:
        lane, at, work = state.lanes[worker], state.read[worker], state.held[worker]
        if state.leases[worker] != ALIVE or lane is None:
            return
        if state.faults.reads and at:
            begin = at if self._rules.reads_on_after_an_outage else 0
            faults = state.faults._replace(reads=state.faults.reads - 1)
            yield "lose a read", state._replace(faults=faults, read=_put(state.read, worker, begin))
        if at == len(lane):
            return
        if work is not None and self._rules.compares_eras and work.era != state.era:
            yield "see another era", self._drop(self._check_era(state), worker, work)
            return
        entry = lane[at]
        state = state._replace(read=_put(state.read, worker, at + 1))
        if entry.kind != STEP or not self._rules.finishes_what_it_has_read_later:
            state = _removed(state, entry, worker)
        yield "read", self._take_in(state, worker, work, entry)

    def _take_in(self, state: State, worker: int, work: Work | None, entry: Entry) -> State:
        is_mine = work is not None and (entry.token == work.token or not self._rules.checks_the_token_of_steps)
        if entry.kind == STEP:
            is_behind = work is not None and work.is_restarted and self._rules.moves_steps_behind_a_restart
            if work is None or not is_mine or is_behind:
                return self._move(state, entry, worker, entry.token)
        if work is None or not is_mine:
            is_forgotten = work is None or work.token < 0
            is_unknown = entry.kind == TICKET and is_forgotten and state.is_open and state.token == entry.token
            return _over(state) if is_unknown and self._rules.ends_lives_it_does_not_know else state
        if entry.kind == OVER:
            return self._drop(state, worker, work) if self._rules.drops_a_life_that_is_over else state
        if entry.kind == RESTART:
            return state._replace(held=_put(state.held, worker, work._replace(is_restarted=True)))
        return state._replace(held=_put(state.held, worker, work._replace(todo=(*work.todo, entry))))

    def _drop(self, state: State, worker: int, work: Work) -> State:
        """Forgets a life, and answers the steps that it has read; the executed one goes on its way."""
        left = None if work.doing is None else work._replace(todo=(), token=-1)
        state = state._replace(held=_put(state.held, worker, left))
        for entry in work.todo:
            if entry.kind == STEP and not entry.is_closed:
                state = self._move(state, entry, worker, 0)
        return state

    def _works(self, state: State, worker: int) -> Iterator[tuple[str, State]]:
        work = state.held[worker]
        assert work is not None
        if work.doing is not None:
            if work.doing[1] == 0:
                commits = self._commit_state if self._script.is_implicit else self._commit
                yield from commits(state, worker, work, work.doing[0])
            else:
                yield self._finishes(state, worker, work, *work.doing)
            return
        if work.todo and work.todo[0].step in work.known:
            known = work._replace(todo=work.todo[1:], doing=(work.todo[0], 1))
            yield "answer again", state._replace(held=_put(state.held, worker, known))
        elif work.todo:
            step = work.todo[0].step
            memory = (*work.memory, step)
            is_committed = self._script.is_implicit or self._script.steps[step][2]
            doing = (work.todo[0], 0 if is_committed else 1)
            done = work._replace(memory=memory, todo=work.todo[1:], doing=doing)
            after = state._replace(held=_put(state.held, worker, done))
            if self._script.is_implicit and not self._rules.publishes_after_commit:
                after = self._answer(after, step, RESPONSE)
            life = self._script.life_of(step)
            if memory != tuple(each for each in life if each in memory or each not in state.refused):
                after = after._replace(broken="a step is not executed once, in order, in its own life")
            yield "execute", after
        elif not work.is_restarted and state.faults.idles and state.leases[worker] == ALIVE:
            yield from self._idles(state, worker, work)
        if work.is_restarted and not (work.todo and self._rules.makes_way_when_all_is_answered):
            is_mine = state.is_open and state.life == work.life and state.token == work.token
            if is_mine:
                yield "make way", self._drop(_over(state), worker, work)

    def _idles(self, state: State, worker: int, work: Work) -> Iterator[tuple[str, State]]:
        is_mine = state.is_open and state.life == work.life == len(state.starts) and state.token == work.token
        lane = state.lanes[worker] or ()
        has_unread = state.read[worker] < len(lane)
        if not is_mine or (has_unread and self._rules.idles_only_after_reading):
            return
        ended = _over(state._replace(faults=state.faults._replace(idles=state.faults.idles - 1)))
        if any(each.kind == STEP and each.token == work.token for each in lane[state.read[worker] :]):
            ended = ended._replace(broken="an idle life ends with a waiting step")
        yield "idle", ended

    def _finishes(self, state: State, worker: int, work: Work, entry: Entry, stage: int) -> tuple[str, State]:
        rest = work._replace(doing=None) if work.token >= 0 else None
        publishes = stage == (1 if self._rules.finishes_after_publishing else 2)
        if publishes:
            state = self._answer(state, entry.step, RESPONSE)
        else:
            removed = _removed(state, entry, worker) if entry.kind == STEP else _settled(state, entry)
            if removed != state or not self._rules.forgets_entries_that_it_removes:
                removed = removed._replace(done=removed.done - {entry.step})
            state = removed
        if stage == 1:
            return "publish", state._replace(held=_put(state.held, worker, work._replace(doing=(entry, 2))))
        return "finish", state._replace(held=_put(state.held, worker, rest))

    def _commit(self, state: State, worker: int, work: Work, entry: Entry) -> Iterator[tuple[str, State]]:
        state = self._check_era(state)
        is_mine = state.is_open and state.owner == worker and state.token == work.token and state.life == work.life
        if not is_mine and self._rules.commits_by_token:
            yield "find it lost", self._find_it_lost(state, worker, work, entry)
            return
        if state.is_open and state.starts[state.life - 1] != work.memory[0]:
            state = state._replace(broken="a former owner ends another life")
        ended = _over(state._replace(committed=state.committed | {entry.step}))
        yield "commit", ended._replace(held=_put(ended.held, worker, work._replace(doing=(entry, 1))))

    def _find_it_lost(self, state: State, worker: int, work: Work, entry: Entry) -> State:
        state = state._replace(held=_put(state.held, worker, None))
        for each in (entry, *work.todo):
            if each.kind == STEP and each in (state.lanes[worker] or ()):
                state = self._move(state, each, worker, 0)
        return state

    def _commit_state(self, state: State, worker: int, work: Work, entry: Entry) -> Iterator[tuple[str, State]]:
        """Stores a step with the state behind it; a repeated commit changes nothing."""
        state = self._check_era(state)
        is_mine = state.is_open and state.owner == worker and state.token == work.token and state.life == work.life
        committed = work._replace(doing=(entry, 1))
        if entry.step in state.committed and state.token == work.token and self._rules.commits_again_as_it_was:
            yield "commit again", state._replace(held=_put(state.held, worker, committed))
            return
        if not is_mine and self._rules.commits_by_token:
            yield "find it lost", self._find_it_lost(state, worker, work, entry)
            return
        if not is_mine or (*state.kept, entry.step) != work.memory:
            state = state._replace(broken="a commit does not follow the one before")
        known = state.committed | {entry.step}
        state = state._replace(kept=work.memory, committed=known, done=state.done | {entry.step})
        if self._script.steps[entry.step][2]:
            state = _over(state)
        yield "commit", state._replace(held=_put(state.held, worker, committed))
        if state.faults.commits:
            faults = state.faults._replace(commits=state.faults.commits - 1)
            yield "lose a commit's reply", state._replace(faults=faults)

    # --- janitor ---

    def _janitor(self, state: State) -> Iterator[tuple[str, State]]:
        for entry in state.waiting:
            if entry.life < state.life or (entry.life == state.life and not state.is_open):
                has_response = entry.step in state.committed and self._rules.keeps_the_response_of_the_end
                answer = RESPONSE if has_response else ERROR
                yield "answer the rest", _settled(self._answer(state, entry.step, answer), entry)
                break
        for entry in state.closed if self._rules.answers_closed_lanes else ():
            is_owners = self._script.is_implicit and state.is_open and entry.life == state.life
            if is_owners and self._rules.leaves_open_lives_to_their_owners:
                continue
            if entry.kind == STEP:
                yield "answer a closed lane", self._move(state, entry, NOBODY, 0)
            else:
                yield "drop a ticket", state._replace(closed=_without(state.closed, entry))
            break


def _over(state: State) -> State:
    """Ends the executing life, and begins the next one."""
    if state.owner != NOBODY and state.lanes[state.owner] is not None:
        state = _tell(state, OVER)
    if state.life < len(state.starts):
        return state._replace(life=state.life + 1, owner=NOBODY, kept=())
    return state._replace(is_open=False, owner=NOBODY, kept=())


def _tell(state: State, kind: str) -> State:
    lane = state.lanes[state.owner]
    assert lane is not None
    told = Entry(kind, NOBODY, state.life, state.token)
    return state._replace(lanes=_put(state.lanes, state.owner, (*lane, told)))


def _restart(state: State) -> State:
    """Loses the last entry of a lane, whose caller gets an error with the lost connection."""
    state = state._replace(era=state.era + 1, faults=state.faults._replace(restarts=state.faults.restarts - 1))
    for worker, lane in enumerate(state.lanes):
        if lane and lane[-1].kind == STEP and state.read[worker] < len(lane):
            lost = lane[-1].step
            answers = _put(state.answers, lost, state.answers[lost] or ERROR)
            return state._replace(lanes=_put(state.lanes, worker, lane[:-1]), answers=answers)
    return state


def _unread(state: State, worker: int, entry: Entry) -> State:
    """Puts the cursor back before an entry."""
    lane = state.lanes[worker] or ()
    at = lane.index(entry) if entry in lane else state.read[worker]
    return state._replace(read=_put(state.read, worker, min(at, state.read[worker])))


def _removed(state: State, entry: Entry, worker: int) -> State:
    """Removes an entry of a lane, or of a closed one (`NOBODY`)."""
    if worker == NOBODY or entry.is_closed:
        return state._replace(closed=_without(state.closed, entry))
    lane = state.lanes[worker]
    if lane is None or entry not in lane:
        return state
    at = lane.index(entry)
    read = state.read[worker] - (at < state.read[worker])
    return state._replace(lanes=_put(state.lanes, worker, _without(lane, entry)), read=_put(state.read, worker, read))


def _settled(state: State, entry: Entry) -> State:
    return state._replace(waiting=tuple(each for each in state.waiting if each.step != entry.step))


def _without(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    if entry not in entries:
        return entries
    at = entries.index(entry)
    return (*entries[:at], *entries[at + 1 :])


def _put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
