"""The batcher of sequences: one per model version and worker, on the event loop, beside `Batcher` for plain requests.

    adopt, admit ─▶ SequenceScheduler ─▶ assemble_steps ─▶ executor ─▶ outlet.executed
                          └─▶ outlet.broken, outlet.idle

It keeps the state of each sequence that its worker owns, from step to step, and does no I/O: what is executed is
committed and published by its outlet, which also asks Redis whether a sequence has ended.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Execution, KeyFunction, Responder, key_function
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import States, StepExecution, assemble_steps, state_shapes
from qinfer.batching.sequences.scheduler import Decision, Ending, SequenceScheduler
from qinfer.batching.sequences.steps import PendingStep, Step, StepBatch
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Response
from qinfer.errors import QinferError, SequenceLost
from qinfer.observe.stats import StatsTally
from qinfer.queue.sequence_records import SequenceId

IDLE_SLACK_S = 0.1
"""By Redis' clock a sequence is idle a little later: since its last step was committed, not since it was executed."""


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


class SequenceBatcher:
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
        assert model.spec.sequences is not None, "only a model with sequences has steps"
        self.model = model
        self._clock = clock
        self._outlet = outlet
        self._latency = latency or LatencyModel()
        self._initial = initial
        self._sequences = model.spec.sequences
        later = replace(self._sequences, max_idle_s=self._sequences.max_idle_s + IDLE_SLACK_S)
        self._scheduler = SequenceScheduler[PendingStep](model.spec.name, later, model.executor.count)
        self._responder = Responder(model.spec, model.version, model.observer)
        self._key_of: KeyFunction = key_function(model.spec)
        self._has_keys = any(-1 in state.dims for state in self._sequences.states)
        self._loop = asyncio.get_running_loop()
        self._kept: dict[SequenceId, _Kept] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.executing = self.completed = self.waiting = 0
        self.expected_ends: dict[StepExecution, float] = {}
        self.tally = StatsTally()
        self.paused = False

    @property
    def free_slots(self) -> int:
        """How many sequences more would get a slot at once."""
        return self._scheduler.free_slots

    @property
    def has_work(self) -> bool:
        """Whether anything executes or waits to; for any thread."""
        return bool(self.executing or self.waiting)

    def speed_rps(self) -> float:
        """Returns how many steps a second all instances can execute in full batches; 0 = not known yet."""
        rows = self._sequences.max_rows
        expected_s = self._latency.estimate_s(rows)
        return self.model.executor.count * rows / (expected_s + self._latency.gap_s) if expected_s else 0.0

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

    def admit(self, step: PendingStep) -> None:
        """Takes a step of a sequence that was adopted; those of one sequence come in their order. Then `pump`.

        Raises:
            InvalidRequest: It is not the first step, and its sequence has ended here.
            SequenceEnded: As before, by an error.
        """
        kept = self._kept[step.place.sequence]
        step.key = self._key(step, kept)
        listed = Step(item=step, sequence=step.place.sequence, start=step.start, end=step.end)
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

    def _key(self, step: PendingStep, kept: _Kept) -> object:
        """Returns what steps that share a batch have in common: the shapes of inputs, and of states if they vary."""
        key = self._key_of(step.request)
        return (key, state_shapes(kept.states)) if self._has_keys else key

    def pump(self) -> None:
        """Starts and breaks what is due now, and sets the timer for what comes next.

        To be called once for all steps that came together: they may share batches.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self.paused:
            now_s = self._clock.now_s()
            decision = self._scheduler.decide(now_s, self._latency)
            self._tell(decision)
            if not decision.batches:
                wait_s = decision.wake_at_s - now_s
                if wait_s != float("inf"):
                    self._timer = self._loop.call_later(max(wait_s, 0.0), self.pump)
                return
            for batch in decision.batches:
                self._start(batch, now_s)

    def _tell(self, decision: Decision[PendingStep]) -> None:
        """Tells the outlet which sequences have ended, or may have."""
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

    def _start(self, batch: StepBatch[PendingStep], now_s: float) -> None:
        """Assembles a batch, and has its instance execute it."""
        begin_ns = time.perf_counter_ns()
        items = [step.item for step in batch.steps]
        self.waiting -= len(items)
        try:
            assembled = assemble_steps(batch, [self._kept[i.place.sequence].states for i in items], self.model.spec)
        except QinferError as error:
            self._scheduler.ended(batch, now_s)
            for item in items:
                self._kept[item.place.sequence].waiting.pop(item, None)
            self._outlet.executed(items, self._responder.failures(items, error, now_s, self.tally))
            return
        execution = StepExecution(
            items=items,
            batch=assembled,
            input_ns=time.perf_counter_ns() - begin_ns,
            caller=self.model.caller,
            steps=batch,
            sequences=self._sequences,
        )
        expected_s = self._latency.estimate_s(len(items))
        self.executing += len(items)
        self._idle.clear()
        self.expected_ends[execution] = now_s + expected_s
        if self.model.executor.run_now(execution, expected_s, batch.instance):
            self._count(execution)
        else:
            self.model.executor.start(execution, self._ended, batch.instance)

    def _ended(self, execution: Execution) -> None:
        """Takes an execution back from its instance: next batch first, then the answers of this one."""
        assert isinstance(execution, StepExecution), "it was started here"
        self._count(execution)
        self.pump()

    def _count(self, execution: StepExecution) -> None:
        """Takes note of what was executed, and hands it to the outlet."""
        now_s = self._clock.now_s()
        batch = execution.steps
        del self.expected_ends[execution]
        self.executing -= len(batch.steps)
        self.completed += len(batch.steps)
        if not self.executing:
            self._idle.set()
        self._keep(batch)
        self._scheduler.ended(batch, now_s)
        if execution.error is None:
            seconds = (execution.end_ns - execution.begin_ns) / 1e9
            self._latency.observe(execution.batch.size, seconds, now_s)
        begin_s = now_s - (time.perf_counter_ns() - execution.begin_ns) / 1e9
        if isinstance(execution.error, SequenceLost) and not self._sequences.states:
            # The end of their sequences answers these steps, too.
            self._responder.observe(execution, begin_s)
            self._lose(batch.instance, execution.error)
            return
        items, responses = self._responder.responses(execution, begin_s, self.tally)
        if items:
            steps = [item for item in items if isinstance(item, PendingStep)]
            self._outlet.executed(steps, responses)

    def _keep(self, batch: StepBatch[PendingStep]) -> None:
        """Keeps the states that an execution has left, for the next steps."""
        for listed in batch.steps:
            step = listed.item
            kept = self._kept.get(step.place.sequence)
            if kept is None or kept.waiting.pop(step, None) is None:
                continue  # it was dropped meanwhile
            kept.instance = batch.instance
            if step.state:
                kept.states = step.state
                if self._has_keys:
                    for waiting in kept.waiting:
                        waiting.key = self._key(waiting, kept)

    def _lose(self, instance: int, error: QinferError) -> None:
        """Ends the sequences whose state was in the memory of an instance that is gone."""
        lost = [sequence for sequence, kept in self._kept.items() if kept.instance == instance]
        self._outlet.lost(lost, error)
