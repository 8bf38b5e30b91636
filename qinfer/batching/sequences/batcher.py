"""The batcher of sequences: one per model version and worker, on the event loop, beside `Batcher` for plain requests.

    adopt, admit ─▶ SequenceScheduler ─▶ assemble_steps ─▶ executor ─▶ outlet.executed
                          └─▶ outlet.broken, outlet.idle

It keeps the state of each sequence that its worker owns, from step to step, and does no I/O: what is executed is
committed and published by its outlet, which also asks Redis whether a sequence has ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import AnySteps, States
from qinfer.batching.sequences.runner import StepRunner
from qinfer.batching.sequences.scheduler import Decision, Ending
from qinfer.batching.sequences.steps import PendingStep, Step, StepBatch
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Response
from qinfer.errors import QinferError, SequenceLost
from qinfer.observe.stats import StatsTally
from qinfer.queue.sequence_records import SequenceId


class StepOutlet(Protocol):
    """Where steps go when the batcher is done with them; none of its calls blocks."""

    def executed(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        """Commits steps with their states, publishes the responses, and finishes the entries."""
        ...

    def broken(self, step: PendingStep, error: QinferError) -> None:
        """Ends the sequence of a step that is not executed, and answers the steps that are left of it."""
        ...

    def idle(self, sequences: Sequence[SequenceId]) -> None:
        """Ends sequences whose time is over, if they were idle by Redis' clock, too."""
        ...

    def lost(self, sequences: Sequence[SequenceId], error: QinferError) -> None:
        """Ends sequences whose state, in the model's memory, is gone."""
        ...


class _Kept:
    """A sequence that this worker owns.

    Attributes:
        states: Its states after the last step that was executed here, or from before; empty = it has none.
        waiting: Its steps that wait or execute.
        instance: The instance that has executed a step of it; -1 = none has.
    """

    __slots__ = ("instance", "states", "waiting")

    def __init__(self, states: States) -> None:
        self.states = states
        self.waiting: dict[PendingStep, Step[PendingStep]] = {}
        self.instance = -1


class SequenceBatcher(StepRunner[PendingStep]):
    """See the module docstring.

    Args:
        model: A model with sequences, and what to run it on.
        clock: The broker's time, in which deadlines and enqueue times are.
        outlet: Where steps go.
        latency: What warm-up runs taught about the model's speed.
        initial: The states of a sequence before its first step.

    Attributes:
        model: The same.
        executing: Steps that execute.
        completed: Steps that have been executed.
        expected_ends: The executions under way, and when each should end.
        tally: The statistics.
        paused: Nothing new is executed.
    """

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
        self._kept: dict[SequenceId, _Kept] = {}
        self._end: Callable[[int], None] = lambda _: None
        self._idle = asyncio.Event()
        self._idle.set()
        self.completed = self.waiting = 0

    @property
    def free_slots(self) -> int:
        """How many sequences more would get a slot at once."""
        return self._scheduler.free_slots

    def is_idle(self, sequence: SequenceId) -> bool:
        """Tells whether nothing of a sequence executes or waits to."""
        kept = self._kept.get(sequence)
        return kept is None or not kept.waiting

    @property
    def has_work(self) -> bool:
        """Whether anything executes or waits to; for any thread."""
        return bool(self.executing or self.waiting)

    def adopt(self, sequence: SequenceId, committed: int, states: States | None) -> None:
        """Takes a sequence that this worker owns now.

        Args:
            sequence: The sequence.
            committed: How many of its steps were committed.
            states: The states that were committed; `None` = those from before the first step.
        """
        self._kept[sequence] = _Kept(self._initial if states is None else states)
        if committed:
            self._scheduler.adopt(sequence, committed)
            self.pump()

    def resize(self, model: LoadedModel, added: int, surplus: int, end: Callable[[int], None]) -> None:
        """Goes on under another generation with more instances, which the executor has already, or with fewer.

        The callback `end` ends an instance of the executor, once the last of its sequences has ended.
        """
        self.model, self._end = model, end
        self._scheduler.grow(added)
        self._scheduler.shrink(surplus)
        self.pump()

    def admit(self, step: PendingStep) -> None:
        """Takes a step of a sequence that was adopted; those of one sequence come in their order. Then `pump`.

        Raises:
            InvalidRequest: It is not the first step, and its sequence has ended here.
            SequenceEnded: As before, by an error.
        """
        kept = self._kept[step.place.sequence]
        step.key = self._key(step.request, kept.states)
        flags = step.request.sequence
        told_id = None if flags is None else flags.id
        listed = Step(item=step, sequence=step.place.sequence, start=step.start, end=step.end, told_id=told_id)
        self._scheduler.admit(listed, self._clock.now_s())
        kept.waiting[step] = listed
        self.waiting += 1

    def drop(self, sequence: SequenceId) -> None:
        """Forgets a sequence that has ended, or that another worker owns; what executes is not answered."""
        kept = self._kept.pop(sequence, None)
        if kept is None:
            return
        for step in kept.waiting:
            step.lose()
        self.waiting -= len(self._scheduler.drop(sequence, self._clock.now_s()))
        self.pump()

    def cancel(self, sequence: SequenceId, number: int) -> bool:
        """Breaks a sequence at a step that waits; False where that step executes, or is not here."""
        kept = self._kept.get(sequence)
        waiting = kept.waiting.items() if kept else ()
        listed = next((listed for step, listed in waiting if step.place.number == number), None)
        if listed is None or self._scheduler.executes(listed):
            return False
        self._scheduler.cancel(listed, self._clock.now_s())
        self.pump()
        return True

    def fail(self, step: PendingStep, error: QinferError) -> None:
        """Answers a step that does not end, because the worker does: the state stays as it was before.

        A sequence whose state is in the memory of the worker ends.
        """
        if not self._sequences.states:
            self._outlet.broken(step, SequenceLost(error.message))
            return
        self._outlet.executed([step], self._responder.failures([step], error, self._clock.now_s(), self.tally))

    @property
    def moving(self) -> set[SequenceId]:
        """The sequences of which a step executes."""
        steps = [item for execution in self.expected_ends for item in execution.items]
        return {step.place.sequence for step in steps if isinstance(step, PendingStep)}

    async def pause(self) -> None:
        """Begins no execution any more, and waits until none is under way."""
        self.paused = True
        await self._idle.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False
        self.pump()

    def close(self) -> None:
        """Stops its timer and has the instances unloaded."""
        self.paused = True
        self.pump()
        self.model.executor.retire()

    def _tell(self, decision: Decision[PendingStep]) -> None:
        """Tells the outlet which sequences have ended, or may have, and ends the instances that may."""
        for instance in decision.left:
            self._end(instance)
        broken = {ended.sequence for ended in decision.ended if ended.ending is not Ending.RESTARTED}
        for refused, error in decision.refused:
            step = refused.item
            self.waiting -= 1
            if kept := self._kept.get(step.place.sequence):
                kept.waiting.pop(step, None)
            if step.place.sequence in broken:
                # The first one tells why; the queue knows those behind it.
                broken.discard(step.place.sequence)
                self._outlet.broken(step, error)
        if decision.idle:
            self._outlet.idle(decision.idle)

    def _begin(self, batch: StepBatch[PendingStep]) -> list[States]:
        """See the base: the states are those that the last step has left."""
        self._idle.clear()
        self.waiting -= len(batch.steps)
        return [self._kept[step.item.place.sequence].states for step in batch.steps]

    def _refuse(self, items: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        """See the base."""
        self._rest()
        for item in items:
            self._kept[item.place.sequence].waiting.pop(item, None)
        self._outlet.executed(items, responses)

    def _take(self, execution: AnySteps, now_s: float, begin_s: float) -> None:
        """See the base: it goes to the outlet."""
        self._rest()
        self.completed += len(execution.items)
        self._keep(execution)
        self._scheduler.ended(execution.steps, now_s)
        if isinstance(execution.error, SequenceLost) and not self._sequences.states:
            # The end of their sequences answers these steps, too.
            self._responder.observe(execution, begin_s)
            self._lose(execution.steps.instance, execution.error)
            return
        items, responses = self._responder.responses(execution, begin_s, self.tally)
        if items:
            steps = [item for item in items if isinstance(item, PendingStep)]
            self._outlet.executed(steps, responses)

    def _rest(self) -> None:
        """Takes note if nothing executes any more."""
        if not self.executing:
            self._idle.set()

    def _keep(self, execution: AnySteps) -> None:
        """Keeps the states that an execution has left, for the next steps."""
        for item, states in zip(execution.items, execution.states, strict=True):
            assert isinstance(item, PendingStep), "it was admitted here"
            item.state = states
            kept = self._kept.get(item.place.sequence)
            if kept is None or kept.waiting.pop(item, None) is None:
                continue  # it was dropped meanwhile
            kept.instance = execution.steps.instance
            if states:
                kept.states = states
                if self._has_keys:
                    for waiting in kept.waiting:
                        waiting.key = self._key(waiting.request, kept.states)

    def _lose(self, instance: int, error: QinferError) -> None:
        """Ends the sequences whose state was in the memory of an instance that is gone."""
        lost = [sequence for sequence, kept in self._kept.items() if kept.instance == instance]
        self._outlet.lost(lost, error)
        for sequence in lost:  # those of its steps that wait would run on a memory that does not know it
            self.drop(sequence)
