"""The sequences of one model version in a worker: owns them, takes their steps, and gives them back.

    join ─▶ own ─▶ take_steps ─▶ SequenceBatcher ─▶ StepPublisher

The loop owns as many sequences as there are free slots. A life that ends sends its owner a ticket, which `take_steps`
returns. If its lease ends, the loop drops all. Idle, it gives up the lease until a sequence waits for an owner.
`qinfer.queue.sequences.ownership` describes the protocol.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.batcher import SequenceBatcher, StepOutlet
from qinfer.batching.sequences.execution import States
from qinfer.batching.sequences.steps import PendingStep, SlotTurn, turns
from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.retry import OutageLog
from qinfer.core.settings import WorkerSettings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import (
    LEFT,
    TIMED_OUT,
    BrokerUnavailable,
    Cancelled,
    CorruptEntry,
    DeadlineExceeded,
    QinferError,
    RequestError,
    SequenceLost,
)
from qinfer.models.state import CALLERS
from qinfer.models.store import ControlStore
from qinfer.queue import readers
from qinfer.queue.entries import Entry, Lease
from qinfer.queue.lanes import Queue
from qinfer.queue.readers import FoundEntries
from qinfer.queue.sequences.answers import answer_lost, answer_rest, answer_step, is_callers
from qinfer.queue.sequences.records import (
    NOBODYS,
    DeliveredStep,
    Delivery,
    OwnedLife,
    SequenceId,
    StepPlace,
    UnansweredStep,
    decode_states,
    done_name,
)
from qinfer.submission.validate import validate
from qinfer.wire.frame import PayloadApart, RequestReader, decode_request
from qinfer_workers.inference.ensembles.runs import EnsembleSteps
from qinfer_workers.inference.intake import LEAST_DELIVERIES, given_up
from qinfer_workers.inference.publisher import LeaseKeeper, OwnerLease, Publisher
from qinfer_workers.inference.sequences.lives import NEVER, HeldLife, StepFate
from qinfer_workers.inference.sequences.publisher import StepPublisher

logger = logging.getLogger(__name__)

RESTARTED = "Redis was restarted or failed over, and may have lost steps of it"
GIVEN_UP = "another tenant waited for a slot of the model, and this one had the most slots"
RELOADED = "the model was loaded anew with another configuration"
# The only partition, until models are spread over several.
_PARTITION = 0
_RETRY_S = 0.5
_LOOK_S = 0.2
_LOOK_AT_SLOTS_S = 0.5
_CORRUPT = "the step of the sequence can't be decoded"
_MAX_WAITING = 2000
_CLOSED = "closed:"


class Parts(NamedTuple):
    """The parts of a worker that its sequence services share."""

    queue: Queue
    keeper: LeaseKeeper
    publisher: Publisher
    tasks: asyncio.TaskGroup
    store: ControlStore
    settings: WorkerSettings
    worker_id: str
    metrics: MetricsSettings


class SequenceService:
    """Owns sequences of a stateful model version and runs their steps.

    Sequences of all `generations` continue here.
    """

    def __init__(
        self,
        model: LoadedModel,
        parts: Parts,
        latency: LatencyModel | None = None,
        initial: States = (),
        ensemble: "Callable[[StepOutlet], EnsembleSteps] | None" = None,
    ) -> None:
        self._parts = parts
        self._model, self._version = model.spec.name, model.version
        self._sequences = parts.queue.sequences(self._model, _PARTITION)
        # the name has the generation, so that an old generation drains its own sequences
        self._name = f"{parts.worker_id}-{model.version}-{model.generation}"
        self._owner = self._name
        self.batcher: SequenceBatcher | EnsembleSteps
        if ensemble is None:
            self.batcher = SequenceBatcher(model, parts.queue.clock, self, latency, initial)
        else:
            self.batcher = ensemble(self)
        assert model.spec.sequences is not None, "only stateful models have a service"
        # an ensemble's models get other ids
        self._told_bits = None if model.spec.sequences.of_steps else model.spec.sequences.told_bits
        self._is_explicit = model.spec.sequences.is_explicit
        idle_s = model.spec.sequences.max_idle_s
        self._steps = StepPublisher(
            self._sequences, parts.publisher, idle_s, self._is_explicit, self._settled, self.broken
        )
        self._steps.finished = self._finished
        self.generations = {model.generation}
        self._held: dict[SequenceId, HeldLife] = {}
        self._changed = asyncio.Event()
        self._tickets = self._sequences.reader(self._owner, self._version, parts.queue.doorbell)
        self._unfinished: OrderedDict[str, None] = OrderedDict()
        """The ids of unfinished entries in the lane, in order."""
        self._ticket = ""
        """The last entry of the lane that was read; kept over outages, as no step may be numbered twice."""
        self._era = b""
        self._reader = RequestReader()
        self._is_draining = False
        self._is_leaving = False
        """Whether other workers are to own its sequences, or it may own some unknowingly."""
        self._look_at_s = 0.0
        self._is_waited_for = False
        self._outage = OutageLog(logger, "no steps taken, trying again", "steps are taken again")
        self._loops: list[asyncio.Task[None]] = []

    @property
    def has_open(self) -> bool:
        """Whether the service owns sequences."""
        return bool(self._held)

    def start(self) -> None:
        """Begins to own sequences."""
        self._loops = [self._parts.tasks.create_task(loop) for loop in (self._run_service(), self._steps.run())]

    def executed(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        """Commits steps, publishes responses, finishes entries."""
        for step in steps:
            held = self._held.get(step.place.sequence)
            if held is not None and held.owned.token == step.token:
                held.executed = step.place.number
        self._steps.put(steps, responses)

    def broken(self, step: PendingStep, error: QinferError) -> None:
        """Ends the sequence of a step that was not executed, and answers its remaining steps."""
        self._end_life(step.place, step.token, error)

    def idle(self, sequences: Sequence[SequenceId]) -> None:
        """Ends sequences that are idle by Redis' clock."""
        for sequence in sequences:
            held = self._held.get(sequence)
            if held is not None and not held.entries:
                self._end_idle(held)

    def lost(self, sequences: Sequence[SequenceId], error: QinferError) -> None:
        """Ends sequences whose state in memory is lost."""
        for sequence in sequences:
            if held := self._held.get(sequence):
                self._end_life(held.next_place, held.owned.token, error)

    async def drain(self, limit_s: float, is_wanted: Callable[[], bool], *, hands_over: bool) -> bool:
        """Gives back all sequences within `limit_s`; returns false if the version is wanted again.

        If other workers have the version (`hands_over`), only sequences with state in memory hold it up, while a
        submitting program is live.
        """
        self._is_draining = True
        self._tickets.ring()  # the loop notices an ended lease
        if self._is_explicit or not hands_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    while self._held and not (is_wanted() or (hands_over and await self._is_deserted())):
                        self._changed.clear()
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_LOOK_S):
                                await self._changed.wait()
        if is_wanted():
            self._is_draining = False
            self._tickets.ring()
            self.batcher.resume_batching()  # an earlier attempt may have failed half-way
            return False
        await self._hand_over_all()
        await self._end_lease()
        await self.close()
        return True

    async def _hand_over_all(self) -> None:
        """Gives back all sequences once no step executes; their next owners read what waits in the closed lane."""
        await self.batcher.pause_batching()
        await self._steps.flush()
        await self._sequences.close_lanes(self._owner, [self._version])
        await self._sequences.hand_over(self._owner, list(self._held))

    async def _give_all_back(self) -> None:
        """Lets all workers share the sequences anew, this one too."""
        await self._hand_over_all()
        self._forget_all()
        self._is_leaving = False
        self.batcher.resume_batching()

    async def give_up(self, overdue: PendingStep | None, error: QinferError) -> None:
        """Gives back sequences because an instance hangs; its `overdue` step fails."""
        batcher = self.batcher
        if isinstance(batcher, EnsembleSteps):
            await self.drain(0.0, lambda: False, hands_over=True)
            return
        self._is_draining = batcher.paused = True
        moving = batcher.moving
        if overdue is not None:
            batcher.fail(overdue, error)
            await self._steps.flush()
            moving.discard(overdue.place.sequence)
        await self._sequences.close_lanes(self._owner, [self._version])
        await self._sequences.hand_over(self._owner, [one for one in self._held if one not in moving])
        await batcher.pause_batching()
        await self._steps.flush()
        await self._sequences.hand_over(self._owner, list(moving))

    async def _is_deserted(self) -> bool:
        with suppress(BrokerUnavailable):
            return not any([await self._parts.store.live_processes(program) for program in CALLERS])
        return False

    async def close(self) -> None:
        """Stops at once; the lease expires."""
        self._parts.keeper.owners.pop(self._owner, None)
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        self._forget_all()
        self.batcher.close()
        await self._tickets.close()

    async def _run_service(self) -> None:
        is_owner = False
        while True:
            try:
                if isinstance(self.batcher, EnsembleSteps):
                    await self.batcher.follow()
                if not is_owner:
                    await self._join()
                    is_owner = True
                is_left = await self._serve_sequences()
                is_owner = False
                if is_left:
                    await self._end_lease()
                else:
                    await self._lose()
            except QinferError as error:
                self._outage.failed(error.message)
                await asyncio.sleep(_RETRY_S)

    async def _join(self) -> None:
        found = await self._tickets.wait("", _LOOK_S, has_slots=True)
        self._recover()
        while not found.sequences:
            found = await self._tickets.sleep("", has_slots=True)
        # no gateway that knew the lane of before finds this one
        self._owner = f"{self._name}-{os.urandom(4).hex()}"
        self._tickets.read_for(self._sequences.lease_keys(self._owner, [self._version])[-1])
        await self._sequences.join(self._owner, [self._version], self._parts.settings.lease_s)
        self._ticket = ""
        names = self._sequences.lease_keys(self._owner, [self._version])
        self._parts.keeper.owners[self._owner] = OwnerLease(names, self._tickets.ring)

    async def _end_lease(self) -> None:
        self._parts.keeper.owners.pop(self._owner, None)
        while not await self._sequences.end_lease(self._owner, [self._version]):
            # It may own sequences unknowingly, if a reply was lost.
            await self._sequences.renew(self._owner, [self._version], 0.0)
            await self._sequences.reap()

    async def _lose(self) -> None:
        logger.warning("lease on sequences lost", extra={"model": self._model, "count": len(self._held)})
        self._parts.keeper.owners.pop(self._owner, None)
        self._forget_all()
        # Executing steps would meet the same sequences again.
        await self.batcher.pause_batching()
        self.batcher.resume_batching()

    async def _serve_sequences(self) -> bool:
        """Returns true when idle or to join again, false without a lease."""
        sequences, owner, version = self._sequences, self._owner, self._version
        busy_s, found = time.monotonic(), FoundEntries(steps=True, sequences=True)
        while True:
            if self._is_leaving and not self._is_draining:
                await self._give_all_back()
                return True
            has_slots = not self._is_draining and self.batcher.free_slots > 0
            owned = await self._own(self.batcher.free_slots) if has_slots and found.sequences else []
            if owned is None:
                return False
            needed = next(iter(self._unfinished), "")
            news = await sequences.take_steps(owner, version, self._ticket, needed=needed)
            if news is None:
                return False
            self._recover()
            self._ticket = news.ticket
            self._follow_era(news.era)
            for taken in news.taken:
                self._take_in(taken)
            self.batcher.pump()
            await self._share_slots()
            if news.taken or owned:
                await self._slow_down()
            if news.taken or owned or self.batcher.has_work:
                busy_s = time.monotonic()
            is_idle = time.monotonic() - busy_s >= readers.AWAKE_S and not self._is_waited_for
            if is_idle and has_slots and not self._held:
                return True
            found = await self._wait(self._ticket, has_slots=has_slots, is_idle=is_idle)

    async def _own(self, count: int) -> list[OwnedLife] | None:
        """Adopts sequences; after an error, states that other workers can continue from are theirs."""
        try:
            owned = await self._sequences.own(self._owner, self._version, count, told_bits=self._told_bits)
            for problem in await asyncio.gather(*map(self._adopt, owned or ())):
                if problem is not None:
                    raise problem
        except QinferError:
            self._is_leaving = not self._is_explicit
            raise
        return owned

    def _follow_era(self, era: bytes) -> None:
        """Ends all lives whose steps are in the lane if Redis may have lost some of them."""
        if self._era and era != self._era:
            self._ticket = ""  # new entries may have lower ids
            for held in list(self._held.values()):
                self._end_life(held.next_place, held.owned.token, SequenceLost(RESTARTED))
        self._era = era

    async def _slow_down(self) -> None:
        if self.batcher.waiting > _MAX_WAITING:
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self, ticket: str, *, has_slots: bool, is_idle: bool) -> FoundEntries:
        if is_idle:  # a waiting sequence may need its slot
            self._look_at_s = 0.0
            return await self._tickets.sleep(ticket, has_slots=has_slots or not self._is_draining)
        return await self._tickets.wait(ticket, self._parts.settings.max_wait_s, has_slots=has_slots)

    def _recover(self) -> None:
        if self._outage.is_out:
            self._outage.over()

    async def _share_slots(self) -> None:
        if self._is_draining or self.batcher.free_slots > 0:
            self._is_waited_for = False
            return
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_AT_SLOTS_S
        shares = await self._sequences.shares(self._version)
        self._is_waited_for = any(share.waited_s >= 0 for share in shares)
        for turn in turns(shares, {sequence.tenant for sequence in self._held}):
            victim = self._to_give_up(turn)
            if victim is not None and await self._sequences.claim(turn.taker, _LOOK_AT_SLOTS_S):
                await self._give_up_slot(victim)

    def _to_give_up(self, turn: SlotTurn) -> SequenceId | None:
        before_s = time.monotonic() - turn.least_s
        of_giver = [
            sequence
            for sequence, held in self._held.items()
            if sequence.tenant == turn.giver and held.since_s <= before_s and held.ends_at == NEVER
        ]
        return min(of_giver, key=lambda one: (not self.batcher.is_idle(one), self._held[one].since_s), default=None)

    async def _give_up_slot(self, sequence: SequenceId) -> None:
        """Gives all sequences back, so that tenants take turns; one with state in memory ends."""
        held = self._held.get(sequence)
        if not self._is_explicit:
            self._is_leaving = True
        elif held is not None:
            self._end_life(held.next_place, held.owned.token, SequenceLost(GIVEN_UP))

    async def _adopt(self, owned: OwnedLife) -> QinferError | None:
        """Returns the error if its states can't be read now."""
        self._follow_era(owned.era)
        held = HeldLife(owned)
        if owned.generation not in self.generations:
            self._end_life(held.next_place, owned.token, SequenceLost(RELOADED))
            return None
        states: States | None = None
        left: Sequence[DeliveredStep] = ()
        try:
            if owned.committed and not self._is_explicit:
                raw = await self._sequences.state(owned.sequence)
                states = None if raw is None else decode_states(raw)
            left = await self._sequences.left_steps(self._owner, owned)
        except CorruptEntry as error:
            self._end_life(held.next_place, owned.token, SequenceLost(error.message))
            return None
        except QinferError as error:
            return error
        self._drop_sequence(owned.sequence)
        self._held[owned.sequence] = held
        self.batcher.adopt(owned.sequence, owned.committed, states)
        for step in left:
            self._take_in(step)
        return None

    def _take_in(self, taken: DeliveredStep) -> None:
        place, lease = taken.place, taken.lease
        held = self._held.get(place.sequence)
        is_mine = held is not None and held.owned.token == taken.token and held.owned.life == place.life
        if lease is None:
            self._note(held if is_mine else None, taken)
            return
        if taken.what is Delivery.STEP:
            self._take_direct(held if is_mine else None, taken, lease)
        else:
            self._take_ticket(held, taken, lease, is_mine=is_mine)

    def _take_direct(self, held: HeldLife | None, taken: DeliveredStep, lease: Lease) -> None:
        if _is_left(lease.entry):
            assert held is not None, "its new owner reads it"
            self._number(held, taken, lease)
            return
        self._unfinished[lease.entry.entry_id] = None
        if held is None or held.is_restarted:
            step = UnansweredStep(taken.place, lease.entry, lease.frame, None, taken.sender)
            self._spawn(partial(self._move, step, taken.token))
        else:
            self._number(held, taken, lease)

    def _take_ticket(self, held: HeldLife | None, taken: DeliveredStep, lease: Lease, *, is_mine: bool) -> None:
        if held is None:  # a reply was lost
            self._spawn(partial(self._sequences.hand_over, self._owner, [taken.place.sequence]))
        elif is_mine and lease.entry.entry_id not in held.told:
            held.told.add(lease.entry.entry_id)
            self._number(held, taken, lease)

    def _note(self, held: HeldLife | None, news: DeliveredStep) -> None:
        place = news.place
        if news.entry_id:  # of a step in the lane
            found = self._held.get(place.sequence)
            steps = found.direct.items() if found is not None else ()
            number = next((number for number, step in steps if step.entry.entry_id == news.entry_id), 0)
            if found is not None and number:
                self._cancel(found, found.place(number), news.code)
        elif held is None:
            return
        elif news.what is Delivery.CANCEL:
            self._cancel(held, place)
        elif news.what is Delivery.RESTART:
            held.is_restarted = True
            self._make_way(held)
        else:
            self._drop_sequence(place.sequence)

    def _cancel(self, held: HeldLife, place: StepPlace, code: str = Cancelled.code) -> None:
        if code != Cancelled.code:
            self._end_life(place, held.owned.token, DeadlineExceeded(TIMED_OUT))
            return
        is_here = place.number in held.entries and place.number > held.executed
        if is_here and not self.batcher.cancel(place.sequence, place.number):
            self._end_life(place, held.owned.token, Cancelled(LEFT))

    def _number(self, held: HeldLife, taken: DeliveredStep, lease: Lease) -> None:
        """Gives a step its number, answers a repeated one, or refuses it; later steps go on."""
        request, is_apart = self._decode(lease)
        flags = request.sequence if request is not None else None
        done = held.owned.done.get(done_name(lease.entry), 0)
        number = done or (flags.step if flags is not None else 0) or held.accepted + 1
        place = held.place(number)
        step = UnansweredStep(place, lease.entry, lease.frame, None)
        fate = StepFate.ANSWERED if done else held.judge(self._model, number, taken.limit)
        if isinstance(fate, QinferError):
            self._refuse_step(step, fate)
        elif fate is StepFate.WAITS:
            held.repeated.append(step)
        elif fate is StepFate.ANSWERED:
            if done:
                self._steps.keep(place)
            self._answer(step, is_kept=done > 0)
        else:
            held.accept(number, lease.entry, is_end=flags is not None and flags.end)
            if taken.what is Delivery.STEP:
                held.direct[number] = step
            if number < held.ends_at and request is not None:
                self._receive(held, place, lease, request, is_apart=is_apart)
            elif request is None:
                self._end_life(place, taken.token, CorruptEntry(_CORRUPT))

    def _refuse_step(self, step: UnansweredStep, error: QinferError) -> None:
        unnumbered = StepPlace(step.place.sequence, step.place.life, 0)  # another step has its number
        self._answer(UnansweredStep(unnumbered, step.entry, step.frame, Failure.from_error(error)))

    def _answer(self, step: UnansweredStep, *, is_kept: bool = False) -> None:
        async def work() -> None:
            await answer_step(self._parts.queue, self._sequences, step)
            if is_kept:
                self._steps.answered(step.place)
            self._finished(step.entry)

        self._spawn(work)

    async def _move(self, step: UnansweredStep, token: int) -> None:
        await answer_lost(self._parts.queue, self._sequences, step, token)
        self._finished(step.entry)

    def _finished(self, entry: Entry) -> None:
        self._unfinished.pop(entry.entry_id, None)

    def _end_idle(self, held: HeldLife) -> None:
        self._spawn(partial(self._sequences.end_idle, held.place(held.committed), held.owned.token, self._ticket))

    def _make_way(self, held: HeldLife) -> None:
        """Ends a life without steps for the one behind it."""
        if held.is_restarted and not held.entries:
            self._end_idle(held)

    def _decode(self, lease: Lease) -> tuple[InferRequest | None, bool]:
        """Returns a step's request, if it is readable, and whether its tensors are yet to be fetched."""
        try:
            return self._reader.decode(lease.frame), False
        except PayloadApart as apart:
            return apart.request, True
        except CorruptEntry as error:
            extra = {"model": self._model, "entry_id": lease.entry.entry_id, "error": error.message}
            logger.error("corrupt step", extra=extra)
            return None, False

    def _receive(
        self, held: HeldLife, place: StepPlace, lease: Lease, request: InferRequest, *, is_apart: bool
    ) -> None:
        step = self._pending(held, place, lease, request)
        step.is_direct = place.number in held.direct
        if lease.deliveries > 1:
            self.batcher.tally.redelivered()
        if lease.deliveries > max(self._parts.settings.max_deliveries, LEAST_DELIVERIES):
            self.broken(step, given_up(lease.deliveries, self.batcher.model.spec))
        elif is_apart or held.arriving is not None:
            held.arriving = self._parts.tasks.create_task(self._arrive(held, held.arriving, step, is_apart=is_apart))
        else:
            self._admit(step)

    def _pending(self, held: HeldLife, place: StepPlace, lease: Lease, request: InferRequest) -> PendingStep:
        enqueued_s = lease.entry.enqueued_s
        held.set_told_id(request)
        return PendingStep(
            rows=1,
            key=None,
            enqueued_s=enqueued_s,
            deadline_s=enqueued_s + (request.timeout_s or self.batcher.model.spec.default_timeout_s),
            alone=lease.suspect,
            lease=lease,
            request=request,
            place=place,
            token=held.owned.token,
            start=place.number == 1,
            end=request.sequence is not None and request.sequence.end,
        )

    async def _arrive(
        self, held: HeldLife, before: "asyncio.Task[None] | None", step: PendingStep, *, is_apart: bool
    ) -> None:
        problem: QinferError | None = None
        if is_apart:
            try:
                payload = await self._parts.queue.payload(step.lease.entry, step.request.id, step.request.tenant)
                if payload is None:
                    problem = CorruptEntry("the tensors of the request are gone")
                else:
                    step.request = decode_request(step.lease.frame, payload)
                    held.set_told_id(step.request)
            except QinferError as error:
                problem = error
        if before is not None:
            await asyncio.wait([before])
        if problem is not None:
            self.broken(step, problem)
        elif not step.lost and step.place.number < held.ends_at and self._held.get(step.place.sequence) is held:
            self._admit(step)
            self.batcher.pump()
        if held.arriving is asyncio.current_task():
            held.arriving = None

    def _admit(self, step: PendingStep) -> None:
        try:
            if step.request.generation not in self.generations:
                validate(step.request, self.batcher.model.spec)
            self.batcher.add_step(step)
        except RequestError as error:
            self.broken(step, error)

    def _settled(self, step: PendingStep, is_committed: bool) -> None:  # noqa: FBT001  the callback of a publisher
        self._changed.set()
        if step.is_direct and not is_committed and not _is_left(step.lease.entry):
            refused = UnansweredStep(step.place, step.lease.entry, step.lease.frame, None)
            self._spawn(partial(self._move, refused, NOBODYS))
        held = self._held.get(step.place.sequence)
        if held is None or held.owned.token != step.token:
            return
        if not is_committed:
            self._drop_sequence(step.place.sequence)
            return
        held.committed = step.place.number
        held.entries.pop(step.place.number, None)
        held.direct.pop(step.place.number, None)
        if held.repeated:
            self._answer_repeated(held)
        if held.ending is not None:
            self._end_if_due(held, held.ending)
        self._make_way(held)

    def _answer_repeated(self, held: HeldLife) -> None:
        ready = [step for step in held.repeated if step.place.number <= held.committed]
        held.repeated = [step for step in held.repeated if step not in ready]
        for step in ready:
            self._answer(step)

    def _drop_sequence(self, sequence: SequenceId) -> None:
        held = self._held.get(sequence)
        if held is None:
            return
        self._forget(sequence)
        waiting = [step for number, step in held.direct.items() if number > held.executed]
        for step in [*waiting, *held.repeated]:
            if held.error is not None:
                self._answer(self._sequences.failed(step, Failure.from_error(held.error), held.ends_at))
            elif not _is_left(step.entry):
                self._spawn(partial(self._move, step, NOBODYS))

    def _forget(self, sequence: SequenceId) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            self._answer_repeated(held)
            self.batcher.drop(sequence)
            self._changed.set()
            self._tickets.ring()

    def _forget_all(self) -> None:
        """The lane is closed, and its steps are answered by others."""
        for sequence in list(self._held):
            self._forget(sequence)
        self._unfinished.clear()
        self._era = b""

    def _end_life(self, place: StepPlace, token: int, error: QinferError) -> None:
        """Ends a life once earlier steps are committed; a deadline ends it at once."""
        held = self._held.get(place.sequence)
        self._changed.set()
        if held is None or held.owned.token != token:
            self._end_now(place, token, error)
        elif place.number < held.ends_at:
            held.ends_at, held.ending, held.error = place.number, error, error
            self._end_if_due(held, error)

    def _end_if_due(self, held: HeldLife, error: QinferError) -> None:
        if isinstance(error, DeadlineExceeded) or not any(number < held.ends_at for number in held.entries):
            held.ending = None
            self._end_now(held.place(held.ends_at), held.owned.token, error)

    def _end_now(self, place: StepPlace, token: int, error: QinferError) -> None:
        async def work() -> None:
            await self._sequences.fail(place, Failure.from_error(error), token)
            for _, failure in await answer_rest(self._parts.queue, self._sequences):
                if not is_callers(failure):
                    self.batcher.tally.failed(failure.code)

        logger.info("sequence ended", extra={"model": self._model, "step": place.number, "reason": error.message})
        self._spawn(work)

    def _spawn(self, work: Callable[[], object]) -> None:
        async def run() -> None:
            outcome = work()
            if asyncio.iscoroutine(outcome):
                await outcome

        self._parts.publisher.spawn(run)


def _is_left(entry: Entry) -> bool:
    """Tells whether a former owner left an entry in its lane; once its life is over, others answer it there."""
    return entry.lane.name.startswith(_CLOSED)
