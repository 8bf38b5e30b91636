"""The batcher of sequences: one per model version and worker, on the event loop, beside `Batcher` for plain requests.

    adopt, add_step ─▶ SequenceScheduler ─▶ assemble_steps ─▶ executor ─▶ outlet.executed
                             └─▶ outlet.broken, outlet.idle

It keeps its sequences' states and does no I/O: the outlet commits steps, and asks Redis whether a sequence has ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import AnySteps, States, StepRunner
from qinfer.batching.sequences.scheduler import SequenceDecision
from qinfer.batching.sequences.steps import PendingStep, SequenceStep, StepBatch
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Response
from qinfer.errors import QinferError, SequenceLost
from qinfer.observe.stats import StatsTally
from qinfer.queue.sequences.records import SequenceId


class StepOutlet(Protocol):
    """Receives finished steps; its calls don't block."""

    def executed(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        """Commits steps and states, publishes responses, finishes entries."""
        ...

    def broken(self, step: PendingStep, error: QinferError) -> None:
        """Ends a refused step's sequence; answers its steps."""
        ...

    def idle(self, sequences: Sequence[SequenceId]) -> None:
        """Ends sequences idle by Redis' clock, too."""
        ...

    def lost(self, sequences: Sequence[SequenceId], error: QinferError) -> None:
        """Ends sequences without their state."""
        ...


class _OwnedSequence:
    """A sequence of this worker; `instance` is -1 before its first step."""

    __slots__ = ("instance", "states", "waiting")

    def __init__(self, states: States) -> None:
        self.states = states
        self.waiting: dict[PendingStep, SequenceStep[PendingStep]] = {}
        self.instance = -1


class SequenceBatcher(StepRunner[PendingStep]):
    """Executes one worker's sequences; instants are on Redis' clock."""

    def __init__(
        self,
        model: LoadedModel,
        clock: ServerClock,
        outlet: StepOutlet,
        latency: LatencyModel | None = None,
        initial: States = (),
    ) -> None:
        self.tally = StatsTally()
        super().__init__(model, clock, self.tally, latency)
        self._outlet = outlet
        self._initial = initial
        self._kept: dict[SequenceId, _OwnedSequence] = {}
        self._end: Callable[[int], None] = lambda _: None
        self._idle = asyncio.Event()
        self._idle.set()
        self.completed = self.waiting = 0

    @property
    def free_slots(self) -> int:
        """How many more sequences would get a slot."""
        return self._scheduler.free_slots

    def is_idle(self, sequence: SequenceId) -> bool:
        """Returns whether a sequence has no steps here."""
        kept = self._kept.get(sequence)
        return kept is None or not kept.waiting

    @property
    def has_work(self) -> bool:
        """Whether a step is here; for any thread."""
        return bool(self.executing or self.waiting)

    def adopt(self, sequence: SequenceId, committed: int, states: States | None) -> None:
        """Takes over a sequence after `committed` steps; `None` = initial states."""
        self._kept[sequence] = _OwnedSequence(self._initial if states is None else states)
        if committed:
            self._scheduler.adopt(sequence, committed)
            self.pump()

    def resize(self, model: LoadedModel, added: int, surplus: int, end: Callable[[int], None]) -> None:
        """Switches to another generation with more or fewer instances.

        `end` ends an instance of the executor, after the last of its sequences.
        """
        self.model, self._end = model, end
        self._scheduler.grow(added)
        self._scheduler.shrink(surplus)
        self.pump()

    def add_step(self, step: PendingStep) -> None:
        """Takes a sequence's next step, before `pump`.

        Raises `InvalidRequest` for a later step of an ended sequence, `SequenceEnded` after an error.
        """
        kept = self._kept[step.place.sequence]
        step.key = self._batch_key(step.request, kept.states)
        flags = step.request.sequence
        told_id = None if flags is None else flags.id
        listed = SequenceStep(item=step, sequence=step.place.sequence, start=step.start, end=step.end, told_id=told_id)
        self._scheduler.add_step(listed, self._clock.now_s())
        kept.waiting[step] = listed
        self.waiting += 1

    def drop(self, sequence: SequenceId) -> None:
        """Forgets a sequence and its steps."""
        kept = self._kept.pop(sequence, None)
        if kept is None:
            return
        for step in kept.waiting:
            step.lose()
        self.waiting -= len(self._scheduler.drop(sequence, self._clock.now_s()))
        self.pump()

    def cancel(self, sequence: SequenceId, number: int) -> bool:
        """Breaks a sequence at a waiting step, if here."""
        kept = self._kept.get(sequence)
        waiting = kept.waiting.items() if kept else ()
        listed = next((listed for step, listed in waiting if step.place.number == number), None)
        if listed is None or self._scheduler.executes(listed):
            return False
        self._scheduler.cancel(listed, self._clock.now_s())
        self.pump()
        return True

    def fail(self, step: PendingStep, error: QinferError) -> None:
        """Answers a stopping worker's step; its sequence keeps its stored state, or ends."""
        if not self._sequences.states:
            self._outlet.broken(step, SequenceLost(error.message))
            return
        self._outlet.executed([step], self._responder.failures([step], error, self._clock.now_s(), self.tally))

    @property
    def moving(self) -> set[SequenceId]:
        """The sequences with an executing step."""
        steps = [item for execution in self.expected_ends for item in execution.items]
        return {step.place.sequence for step in steps if isinstance(step, PendingStep)}

    async def pause_batching(self) -> None:
        """Stops, and waits for the running executions."""
        self.paused = True
        await self._idle.wait()

    def resume_batching(self) -> None:
        """Forms batches again after `pause_batching`."""
        self.paused = False
        self.pump()

    def close(self) -> None:
        """Stops the timer and unloads the instances."""
        self.paused = True
        self.pump()
        self.model.executor.retire()

    def _report_decision(self, decision: SequenceDecision[PendingStep]) -> None:
        for instance in decision.left:
            self._end(instance)
        broken = set(decision.ended)
        for refused, error in decision.refused:
            step = refused.item
            self.waiting -= 1
            if kept := self._kept.get(step.place.sequence):
                kept.waiting.pop(step, None)
            if step.place.sequence in broken:
                broken.discard(step.place.sequence)
                self._outlet.broken(step, error)
        if decision.idle:
            self._outlet.idle(decision.idle)

    def _begin_batch(self, batch: StepBatch[PendingStep]) -> list[States]:
        self._idle.clear()
        self.waiting -= len(batch.steps)
        return [self._kept[step.item.place.sequence].states for step in batch.steps]

    def _refuse(self, items: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        self._rest()
        for item in items:
            self._kept[item.place.sequence].waiting.pop(item, None)
        self._outlet.executed(items, responses)

    def _finish_execution(self, execution: AnySteps, now_s: float, begin_s: float) -> None:
        self._rest()
        self.completed += len(execution.items)
        self._store_states(execution)
        self._scheduler.end_batch(execution.steps, now_s)
        if isinstance(execution.error, SequenceLost) and not self._sequences.states:
            # Their sequences' end answers these, too.
            self._responder.observe(execution, begin_s)
            self._lose(execution.steps.instance, execution.error)
            return
        items, responses = self._responder.build_responses(execution, begin_s, self.tally)
        if items:
            steps = [item for item in items if isinstance(item, PendingStep)]
            self._outlet.executed(steps, responses)

    def _rest(self) -> None:
        if not self.executing:
            self._idle.set()

    def _store_states(self, execution: AnySteps) -> None:
        for item, states in zip(execution.items, execution.states, strict=True):
            assert isinstance(item, PendingStep), "it was admitted here"
            item.state = states
            kept = self._kept.get(item.place.sequence)
            if kept is None or kept.waiting.pop(item, None) is None:
                continue
            kept.instance = execution.steps.instance
            if states:
                kept.states = states
                if self._has_keys:
                    for waiting in kept.waiting:
                        waiting.key = self._batch_key(waiting.request, kept.states)

    def _lose(self, instance: int, error: QinferError) -> None:
        lost = [sequence for sequence, kept in self._kept.items() if kept.instance == instance]
        self._outlet.lost(lost, error)
        for sequence in lost:  # waiting steps must not run on a new memory
            self.drop(sequence)
