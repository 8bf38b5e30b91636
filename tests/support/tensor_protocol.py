"""Tensors beside the queue in miniature: immutable states, and the moves that lead from one to the next.

A gateway writes a request's tensors into a slot of its own memory, half by half, and appends an entry with a reference.
A worker copies both halves, checks the generation, executes, writes the reply into its own slot, and publishes where
that is. The gateway sends the halves to the caller and confirms; the worker then finishes the entry and uses its slot
again. Each process has one slot, so that every second use is a reuse. Processes may die between any two moves, or
sleep longer than their lease; replies and confirmations may be lost or come twice. A worker that held a dead gateway's
memory could read on; here it stops, because nothing that it publishes would be read. Each rule of the protocol can be
left out (`Rules`), to see that it is needed.
"""

from collections.abc import Iterator
from typing import NamedTuple

WORKERS = (0, 1)
NOBODY = -1
FINISHED = -2
"""An entry's owner, once it is gone."""

NEW, RECEIVING, PENDING, SENDING, ANSWERED, FAILED, LEFT, GONE = range(8)
"""The states of a request at its gateway; `GONE`: the gateway died, so that the caller's connection broke."""

COPIED, EXECUTED = 2, 3
FAULTS = frozenset({"kill worker", "kill gateway", "stall worker", "stall gateway", "lose", "repeat", "leave"})


class Rules(NamedTuple):
    """The rules of the protocol; a rule that is false is left out."""

    checks_the_generation_after_copying: bool = True
    raises_the_generation_first: bool = True
    references_name_the_epoch: bool = True
    writes_replies_into_its_own_memory: bool = True
    reuses_after_the_confirmation: bool = True
    finishes_after_the_confirmation: bool = True
    confirmations_name_the_generation: bool = True
    ignores_repeats_of_what_it_sends: bool = True
    publishes_again: bool = True
    frees_what_a_dead_gateway_leaves: bool = True
    drops_only_after_the_lease: bool = True
    ends_requests_with_the_lease: bool = True
    keeps_tensors_until_the_end: bool = True
    answers_once: bool = True
    counts_what_is_appended_again: bool = True


class Faults(NamedTuple):
    """The faults that are still to come; `losses` are messages that are lost, or come twice."""

    gateway_kills: int = 0
    worker_kills: int = 0
    gateway_stalls: int = 0
    worker_stalls: int = 0
    losses: int = 0
    leaves: int = 0


class Slot(NamedTuple):
    """Memory of one request or reply, in two halves: `n + 1` is a byte of request `n`, `-(n + 1)` of its reply."""

    generation: int = 0
    first: int = 0
    second: int = 0


class Request(NamedTuple):
    """A request, and its entry in Redis.

    Attributes:
        life: The gateway's process.
        epoch: The gateway's epoch that the reference names.
        generation: The slot's generation that the reference names.
        owner: The worker that holds the entry; `NOBODY` = it waits.
        number: How often it was appended.
        deliveries: The deliveries that Redis counts.
        begun: The deliveries that there were.
    """

    gateway: int
    status: int = NEW
    life: int = 0
    epoch: int = 0
    generation: int = 0
    owner: int = FINISHED
    number: int = 0
    deliveries: int = 0
    begun: int = 0


class Sent(NamedTuple):
    """A reply's place: the slot of a worker's process at a generation."""

    request: int
    number: int
    worker: int
    life: int
    generation: int


class Sending(NamedTuple):
    """A reply on its way to the caller; `frozen` is the memory of a worker that died meanwhile."""

    reply: Sent
    first: int = 0
    frozen: Slot | None = None


class Gateway(NamedTuple):
    """A gateway; `holder` is the request whose tensors are in its slot."""

    life: int = 0
    epoch: int = 0
    slot: Slot = Slot()
    holder: int = NOBODY
    lapsed: bool = False
    sending: Sending | None = None


class Work(NamedTuple):
    """A request in a worker; `phase` counts its moves."""

    request: int
    number: int
    phase: int = 0
    first: int = 0
    second: int = 0


class Worker(NamedTuple):
    """A worker; `awaits` is the reply in its slot that is not confirmed."""

    life: int = 0
    slot: Slot = Slot()
    work: Work | None = None
    awaits: Sent | None = None


class State(NamedTuple):
    """Everything; `replies` and `confirmed` are on their way, `broken` is the promise that was broken."""

    requests: tuple[Request, ...]
    gateways: tuple[Gateway, ...]
    workers: tuple[Worker, ...]
    faults: Faults
    replies: frozenset[Sent] = frozenset()
    confirmed: frozenset[Sent] = frozenset()
    broken: str = ""


Moves = Iterator[tuple[str, State]]


def first_state(gateways: tuple[int, ...], faults: Faults) -> State:
    """Returns the state before anything happened; `gateways` are those of the requests."""
    made = (Gateway(),) * (max(gateways) + 1)
    return State(tuple(map(Request, gateways)), made, (Worker(),) * len(WORKERS), faults)


def moves(state: State, rules: Rules) -> Moves:
    """Returns every move that is possible, and the state behind it."""
    for number, request in enumerate(state.requests):
        yield from _receives(state, number, request, rules)
    for number, worker in enumerate(state.workers):
        if worker.work is not None:
            yield from _works(state, number, worker, worker.work, rules)
        elif worker.awaits is None or not rules.reuses_after_the_confirmation:
            yield from _fetches(state, number)
        if worker.awaits is not None:
            yield from _awaits(state, number, worker.awaits, rules)
    for reply in state.replies:
        yield from _takes(state, reply, rules)
    for number, gateway in enumerate(state.gateways):
        yield from _sends(state, number, gateway, rules)
    for confirmed in state.confirmed:
        yield "hear", _heard(state, confirmed, rules)
    yield from _ends(state)
    if state.faults.leaves or state.faults.losses:
        yield from _leaves(state)


def missing(state: State) -> str:
    """Says what is left over when nothing moves any more; empty = nothing."""
    for request in state.requests:
        if request.status < ANSWERED:
            return "a request never ends"
        if request.owner != FINISHED:
            return "an entry is left"
    if any(each.holder != NOBODY for each in state.gateways) or any(each.awaits for each in state.workers):
        return "memory is left"
    return ""


def _receives(state: State, number: int, request: Request, rules: Rules) -> Moves:
    """The gateway's moves until the entry is in the queue, and one that frees tensors too soon."""
    gateway = state.gateways[request.gateway]
    slot, raised = gateway.slot, gateway.slot.generation + 1
    if request.status == NEW and gateway.holder == NOBODY:
        begun = slot._replace(first=number + 1)
        if rules.raises_the_generation_first:
            begun = begun._replace(generation=raised)
        state = _gateway(state, request.gateway, gateway._replace(slot=begun, holder=number))
        yield "receive", _request(state, number, request._replace(status=RECEIVING))
    elif request.status == RECEIVING:
        whole = slot._replace(second=number + 1)
        if not rules.raises_the_generation_first:
            whole = whole._replace(generation=raised)
        state = _gateway(state, request.gateway, gateway._replace(slot=whole))
        entry = request._replace(
            status=PENDING, life=gateway.life, epoch=gateway.epoch, generation=whole.generation, owner=NOBODY, number=1
        )
        yield "submit", _request(state, number, entry)
    elif not rules.keeps_tensors_until_the_end and gateway.holder == number and _is_copied(state, number):
        yield "free", _gateway(state, request.gateway, gateway._replace(holder=NOBODY))


def _is_copied(state: State, number: int) -> bool:
    return any(each.work and each.work.request == number and each.work.phase > COPIED for each in state.workers)


def _fetches(state: State, number: int) -> Moves:
    """A worker takes a waiting entry; a fresh second worker is like the first."""
    if number and state.workers[number] == state.workers[0] == Worker():
        return
    for place, request in enumerate(state.requests):
        if request.owner != NOBODY:
            continue
        worker = state.workers[number]._replace(work=Work(place, request.number))
        taken = request._replace(owner=number, deliveries=request.deliveries + 1, begun=request.begun + 1)
        after = _request(_worker(state, number, worker), place, taken)
        if taken.deliveries < taken.begun:
            after = after._replace(broken="a delivery was not counted")
        yield "fetch", after


def _works(state: State, number: int, worker: Worker, work: Work, rules: Rules) -> Moves:
    """The moves of a worker with an entry that it holds, or believes to hold."""
    request = state.requests[work.request]
    gateway = state.gateways[request.gateway]
    idle = _worker(state, number, worker._replace(work=None))
    is_over = request.epoch != gateway.epoch and rules.references_name_the_epoch
    if is_over or gateway.lapsed or not rules.drops_only_after_the_lease:
        yield "drop", _finished(idle, work.request, work.number)
    if is_over:
        return
    slot = gateway.slot
    if work.phase == 0:
        yield "copy", _worker(state, number, worker._replace(work=work._replace(phase=1, first=slot.first)))
    elif work.phase == 1:
        yield "copy", _worker(state, number, worker._replace(work=work._replace(phase=COPIED, second=slot.second)))
    elif work.phase == COPIED:
        if rules.checks_the_generation_after_copying and slot.generation != request.generation:
            yield "discard", _finished(idle, work.request, work.number)
            return
        after = _worker(state, number, worker._replace(work=work._replace(phase=EXECUTED)))
        if (work.first, work.second) != (work.request + 1,) * 2:
            after = after._replace(broken="a model gets bytes that are not its request's")
        yield "execute", after
    else:
        yield _replies(state, number, worker, work, rules)


def _replies(state: State, number: int, worker: Worker, work: Work, rules: Rules) -> tuple[str, State]:
    """Writes a half of the reply; publishes it with the second."""
    request, own = state.requests[work.request], worker.slot
    gateway = state.gateways[request.gateway]
    slot = gateway.slot
    if work.phase == EXECUTED:
        written = own._replace(generation=own.generation + 1, first=-work.first)
        after = _worker(state, number, worker._replace(slot=written, work=work._replace(phase=EXECUTED + 1)))
        if not rules.writes_replies_into_its_own_memory:
            after = _gateway(after, request.gateway, gateway._replace(slot=slot._replace(first=-work.first)))
        return "write", after
    reply = Sent(work.request, work.number, number, worker.life, own.generation)
    whole = worker._replace(slot=own._replace(second=-work.second), work=None, awaits=reply)
    after = _published(_worker(state, number, whole), reply)
    if not rules.writes_replies_into_its_own_memory:
        after = _gateway(after, request.gateway, gateway._replace(slot=slot._replace(second=-work.second)))
    if not rules.finishes_after_the_confirmation:
        after = _finished(after, work.request, work.number)
    return "publish", after


def _awaits(state: State, number: int, reply: Sent, rules: Rules) -> Moves:
    """A reply that is not confirmed."""
    request = state.requests[reply.request]
    gateway, worker = state.gateways[request.gateway], state.workers[number]
    if gateway.life != request.life:
        if rules.frees_what_a_dead_gateway_leaves:
            free = _worker(state, number, worker._replace(awaits=None))
            yield "free", _finished(free, reply.request, reply.number)
        return
    is_sent = gateway.sending is not None and gateway.sending.reply == reply
    if is_sent or reply in state.confirmed:
        if state.faults.losses and reply not in state.replies:
            yield "repeat", _published(_faulty(state, losses=1), reply)
    elif rules.publishes_again and reply not in state.replies:
        yield "publish again", _published(state, reply)


def _takes(state: State, reply: Sent, rules: Rules) -> Moves:
    """The gateway reads a reply's place: it sends, confirms what it does not want, or appends the request again."""
    request, worker = state.requests[reply.request], state.workers[reply.worker]
    gateway, after = state.gateways[request.gateway], state._replace(replies=state.replies - {reply})
    if state.faults.losses:
        yield "lose", _faulty(after, losses=1)
    if gateway.sending is not None and gateway.sending.reply == reply and rules.ignores_repeats_of_what_it_sends:
        yield "ignore", after
    elif request.status != PENDING and (rules.answers_once or request.status != ANSWERED):
        yield "confirm", _confirming(after, reply)
    elif (worker.life, worker.slot.generation) != (reply.life, reply.generation):
        deliveries = request.deliveries if rules.counts_what_is_appended_again else 0
        again = request._replace(owner=NOBODY, number=request.number + 1, deliveries=deliveries)
        yield "append again", _request(after, reply.request, again)
    elif gateway.sending is None:
        after = _gateway(after, request.gateway, gateway._replace(sending=Sending(reply)))
        if request.status == ANSWERED:
            after = after._replace(broken="a caller gets two answers")
        yield "take", _request(after, reply.request, request._replace(status=SENDING))


def _sends(state: State, number: int, gateway: Gateway, rules: Rules) -> Moves:
    """A gateway sends a reply, or notices that its lease has ended."""
    if gateway.lapsed:
        after = _gateway(state, number, gateway._replace(lapsed=False))
        if rules.ends_requests_with_the_lease:
            after = _gateway(state, number, gateway._replace(lapsed=False, epoch=gateway.epoch + 1))
            for place, request in enumerate(state.requests):
                if request.gateway == number and request.status == PENDING:
                    after = _ended(after, place, FAILED)
        yield "renew", after
    if gateway.sending is None:
        return
    reply, first, frozen = gateway.sending
    slot = state.workers[reply.worker].slot if frozen is None else frozen
    if not rules.writes_replies_into_its_own_memory:
        slot = gateway.slot
    if not first:
        begun = Sending(reply, slot.first, frozen)
        yield "send", _gateway(state, number, gateway._replace(sending=begun))
        return
    after = _ended(_gateway(state, number, gateway._replace(sending=None)), reply.request, ANSWERED)
    if (first, slot.second) != (-reply.request - 1,) * 2:
        after = after._replace(broken="a caller gets bytes that are not its reply's")
    yield "answer", _confirming(after, reply)


def _heard(state: State, reply: Sent, rules: Rules) -> State:
    """The worker finishes what the gateway confirmed, and may use its slot again."""
    worker, state = state.workers[reply.worker], state._replace(confirmed=state.confirmed - {reply})
    awaited = worker.awaits
    if awaited is None or (rules.confirmations_name_the_generation and awaited != reply):
        return state
    state = _worker(state, reply.worker, worker._replace(awaits=None))
    return _finished(state, awaited.request, awaited.number)


def _ends(state: State) -> Moves:
    """Deaths, and leases that end unnoticed."""
    faults = state.faults
    for number, worker in enumerate(state.workers):
        if worker.work is None and worker.awaits is None:
            continue
        if faults.worker_kills:
            yield "kill worker", _without_worker(_faulty(state, worker_kills=1), number)
        if faults.worker_stalls and any(each.owner == number for each in state.requests):
            yield "stall worker", _released(_faulty(state, worker_stalls=1), number)
    for number, gateway in enumerate(state.gateways):
        if all(each.gateway != number or each.status == NEW for each in state.requests):
            continue
        if faults.gateway_kills:
            yield "kill gateway", _without_gateway(_faulty(state, gateway_kills=1), number)
        if faults.gateway_stalls and not gateway.lapsed:
            yield "stall gateway", _gateway(_faulty(state, gateway_stalls=1), number, gateway._replace(lapsed=True))


def _leaves(state: State) -> Moves:
    """Callers that leave, and confirmations that are lost."""
    for number, request in enumerate(state.requests):
        if state.faults.leaves and request.status == PENDING:
            yield "leave", _ended(_faulty(state, leaves=1), number, LEFT)
    if state.faults.losses:
        for reply in state.confirmed:
            yield "lose", _faulty(state._replace(confirmed=state.confirmed - {reply}), losses=1)


def _without_worker(state: State, number: int) -> State:
    """A worker died: its memory stays for who sends from it, and its entries wait for another."""
    dead = state.workers[number]
    for place, gateway in enumerate(state.gateways):
        sending = gateway.sending
        if sending is not None and sending.reply.worker == number and sending.frozen is None:
            state = _gateway(state, place, gateway._replace(sending=sending._replace(frozen=dead.slot)))
    confirmed = frozenset(each for each in state.confirmed if each.worker != number)
    state = _worker(state._replace(confirmed=confirmed), number, Worker(life=dead.life + 1))
    return _released(state, number)


def _without_gateway(state: State, number: int) -> State:
    """A gateway died, with its callers' connections, its memory and its reply stream; another begins in its place."""
    dead = state.gateways[number]
    for place, request in enumerate(state.requests):
        if request.gateway == number and NEW < request.status < ANSWERED:
            state = _request(state, place, request._replace(status=GONE))
    replies = frozenset(each for each in state.replies if state.requests[each.request].gateway != number)
    state = state._replace(replies=replies)
    return _gateway(state, number, Gateway(life=dead.life + 1, epoch=dead.epoch + 1))


def _released(state: State, number: int) -> State:
    for place, request in enumerate(state.requests):
        if request.owner == number:
            state = _request(state, place, request._replace(owner=NOBODY))
    return state


def _published(state: State, reply: Sent) -> State:
    """Appends to the gateway's reply stream, if it still has one."""
    request = state.requests[reply.request]
    if state.gateways[request.gateway].life != request.life:
        return state
    return state._replace(replies=state.replies | {reply})


def _confirming(state: State, reply: Sent) -> State:
    if state.workers[reply.worker].life != reply.life:
        return state
    return state._replace(confirmed=state.confirmed | {reply})


def _ended(state: State, number: int, status: int) -> State:
    """Ends a request, and frees its tensors."""
    request = state.requests[number]
    gateway = state.gateways[request.gateway]
    if gateway.holder == number:
        state = _gateway(state, request.gateway, gateway._replace(holder=NOBODY))
    return _request(state, number, request._replace(status=status))


def _finished(state: State, number: int, appended: int) -> State:
    request = state.requests[number]
    return _request(state, number, request._replace(owner=FINISHED)) if request.number == appended else state


def _faulty(state: State, **used: int) -> State:
    ((name, count),) = used.items()
    return state._replace(faults=state.faults._replace(**{name: getattr(state.faults, name) - count}))


def _request(state: State, number: int, request: Request) -> State:
    others = state.requests
    return state._replace(requests=(*others[:number], request, *others[number + 1 :]))


def _gateway(state: State, number: int, gateway: Gateway) -> State:
    others = state.gateways
    return state._replace(gateways=(*others[:number], gateway, *others[number + 1 :]))


def _worker(state: State, number: int, worker: Worker) -> State:
    others = state.workers
    return state._replace(workers=(*others[:number], worker, *others[number + 1 :]))
