"""A model that sums, in workers and gateways as small as the protocol of sequences allows."""

from dataclasses import dataclass, field

import msgspec

from qinfer.core.messages import Failure
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import StoredModel
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import (
    CommittedStep,
    DeliveredStep,
    Delivery,
    OwnedLife,
    SequenceId,
    SequencePin,
    StepPlace,
    StepRequest,
    SubmittedStep,
    done_name,
)

SEVEN = SequenceId("acme", 7)
EIGHT = SequenceId("acme", "eight")
LEASE_S = 10.0
TIMEOUT_S = 60.0
IDLE_S = 1.0
STATEFUL = """
name: "sum" backend: "stub" max_batch_size: 2
input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }
sequence_batching { direct {} } instance_group { count: 2 kind: KIND_CPU }
"""


def stored(text: str, *versions: int) -> StoredModel:
    """Returns a model as it is stored."""
    config = normalise(parse(text), parse(text).name, ["model.stub"])
    return StoredModel(config.name, 1, to_json(config), versions)


def sequences_of(queue: Queue, *, is_fragile: bool = False) -> Sequences:
    """Returns the sequences of the model that sums."""
    return Sequences(queue.router, queue._values, queue.durability, "sum", is_fragile=is_fragile)


def first(value: int, *, explicit: bool = False, version: int = 1, end: bool = False, number: int = 0) -> StepRequest:
    """Returns a step with START."""
    pin = SequencePin(version=version, generation=3, is_explicit=explicit, idle_s=IDLE_S)
    frame, digest = _frame(value, end=end), str(value)
    return StepRequest(frame=frame, timeout_s=TIMEOUT_S, start=pin, end=end, number=number, digest=digest)


def later(value: int, *, end: bool = False, number: int = 0, timeout_s: float = TIMEOUT_S) -> StepRequest:
    """Returns a step without START."""
    return StepRequest(frame=_frame(value, end=end), timeout_s=timeout_s, end=end, number=number)


def _frame(value: int, *, end: bool) -> bytes:
    return b"%d%s" % (value, b"!" if end else b"")


@dataclass
class Gateway:
    """Submits steps, and has the responses that were published; the same one may come twice."""

    sequences: Sequences
    responses: dict[StepPlace, set[bytes | Failure]] = field(default_factory=dict)

    async def send(self, sequence: SequenceId, *steps: StepRequest) -> list[SubmittedStep]:
        """Submits steps in order."""
        return [await self.sequences.submit(sequence, step) for step in steps]

    def publish(self, place: StepPlace, response: bytes | Failure) -> None:
        """Receives a response."""
        self.responses.setdefault(place, set()).add(response)

    @property
    def texts(self) -> list[str]:
        """The responses in order of life and number; several of one step are a defect."""
        found = sorted(self.responses.items(), key=lambda item: (item[0].sequence.name, item[0].life, item[0].number))
        return ["|".join(sorted(map(_text, responses))) for _, responses in found]

    async def answer_rest(self) -> None:
        """Answers the steps of lives that have ended, as a janitor does."""
        for each in await self.sequences.unanswered():
            stored = None if each.failure else await self.sequences.response(each.place)
            self.publish(each.place, stored or each.failure or b"")
            await self.sequences.finish([(each.place, each.entry)])


@dataclass
class Held:
    """A sequence of a worker: who owns it by which token, its state, and how many steps it has taken."""

    owned: OwnedLife
    total: int
    committed: int
    accepted: int
    is_restarted: bool = False
    taken: set[str] = field(default_factory=set)


class Worker:
    """Owns sequences, and executes their steps one by one; each of its methods is what a crash may come behind."""

    def __init__(self, gateway: Gateway, name: str, version: int = 1) -> None:
        self.gateway = gateway
        self.sequences = gateway.sequences
        self.name = name
        self.version = version
        self.held: dict[SequenceId, Held] = {}
        self.waiting: list[DeliveredStep] = []
        self.ticket = ""
        self.executed: list[StepPlace] = []

    async def join(self, lease_s: float = LEASE_S) -> "Worker":
        """Begins its lease."""
        await self.sequences.join(self.name, [self.version], lease_s)
        return self

    async def own(self, count: int = 10) -> list[OwnedLife]:
        """Takes sequences, with their states."""
        found = await self.sequences.own(self.name, self.version, count)
        for owned in found or []:
            state = await self.sequences.state(owned.sequence) if owned.committed else None
            self.held[owned.sequence] = Held(owned, int(state or 0), owned.committed, owned.committed)
            for taken in await self.sequences.left_steps(self.name, owned):
                self._accept(self.held[owned.sequence], taken, is_left=True)
        return found or []

    async def take(self) -> list[DeliveredStep]:
        """Takes steps; what it has already, and what is of sequences that it does not hold, is dropped."""
        news = await self.sequences.take_steps(self.name, self.version, self.ticket)
        if news is None:
            self.held, self.waiting = {}, []
            return []
        self.ticket = news.ticket
        for taken in news.taken:
            held = self.held.get(taken.place.sequence)
            if held is None or held.owned.token != taken.token:
                continue
            if taken.what is Delivery.RESTART:
                held.is_restarted = True
                await self._make_way(held)
            elif taken.what is Delivery.OVER:
                del self.held[taken.place.sequence]
                self.waiting = [each for each in self.waiting if each.place.sequence != taken.place.sequence]
            else:
                self._accept(held, taken)
        return list(news.taken)

    def _accept(self, held: Held, taken: DeliveredStep, *, is_left: bool = False) -> None:
        """Numbers a step of a lane; a repeated one has the number of the first."""
        lease = taken.lease
        if lease is None or done_name(lease.entry) in held.taken:
            return
        held.taken.add(done_name(lease.entry))
        done = held.owned.done.get(done_name(lease.entry), 0)
        is_counted = taken.what is Delivery.TICKET and not is_left
        number = done or (taken.place.number if is_counted else held.accepted + 1)
        held.accepted = max(held.accepted, number)
        place = StepPlace(taken.place.sequence, taken.place.life, number)
        self.waiting.append(msgspec.structs.replace(taken, place=place))

    async def commit(self, taken: DeliveredStep) -> bool:
        """Executes a step, and commits it; one that is committed already is not executed."""
        held = self.held[taken.place.sequence]
        assert taken.lease is not None
        if taken.place.number <= held.committed:
            return True
        total = held.total + int(taken.lease.frame.rstrip(b"!"))
        self.executed.append(taken.place)
        state = None if held.owned.is_explicit else b"%d" % total
        step = CommittedStep(
            place=taken.place,
            token=taken.token,
            response=b"=%d" % total,
            state=state,
            ends=taken.lease.frame.endswith(b"!"),
            keeps_previous=any(each.place.number == taken.place.number - 1 for each in self.waiting),
            entry_id=done_name(taken.lease.entry),
        )
        (is_committed,) = await self.sequences.commit([step])
        if is_committed:
            held.total, held.committed = total, taken.place.number
        else:
            self.drop(taken.place.sequence)
        return is_committed

    async def publish(self, taken: DeliveredStep) -> None:
        """Publishes the stored response of a committed step."""
        response = await self.sequences.response(taken.place)
        if response is not None:
            self.gateway.publish(taken.place, response)

    async def answer(self, taken: DeliveredStep) -> None:
        """Executes a step of an explicit sequence, and answers it without a commit."""
        held = self.held[taken.place.sequence]
        assert taken.lease is not None
        held.total, held.committed = held.total + int(taken.lease.frame.rstrip(b"!")), taken.place.number
        self.gateway.publish(taken.place, b"=%d" % held.total)
        await self.finish(taken)

    async def finish(self, taken: DeliveredStep) -> None:
        """Removes a step that is answered."""
        assert taken.lease is not None
        await self.sequences.finish([(taken.place, taken.lease.entry)])
        self.waiting.remove(taken)
        if taken.place.sequence in self.held:
            await self._make_way(self.held[taken.place.sequence])

    async def _make_way(self, held: Held) -> None:
        """Ends a life without steps for the one behind it."""
        sequence = held.owned.sequence
        if held.is_restarted and all(each.place.sequence != sequence for each in self.waiting):
            place = StepPlace(sequence, held.owned.life, held.accepted)
            await self.sequences.end_idle(place, held.owned.token, self.ticket)

    def drop(self, sequence: SequenceId) -> None:
        """Forgets a sequence that another one owns."""
        self.held.pop(sequence, None)
        self.waiting = [each for each in self.waiting if each.place.sequence != sequence]

    async def leave(self) -> None:
        """Hands over its sequences."""
        await self.sequences.close_lanes(self.name, [self.version])
        await self.sequences.hand_over(self.name, list(self.held))
        self.held, self.waiting = {}, []

    async def work(self) -> None:
        """Does everything that there is to do."""
        while True:
            owned, news = await self.own(), await self.take()
            if not (owned or news or self.waiting):
                return
            if not self.waiting:
                continue
            taken = self.waiting[0]
            if await self.commit(taken):
                await self.publish(taken)
                await self.finish(taken)


def _text(response: bytes | Failure) -> str:
    return response.decode() if isinstance(response, bytes) else f"{response.code}: {response.message}"
