"""The runner of the steps of one model version: its scheduler, its instances, and the way of a batch through both.

    SequenceScheduler.decide ─▶ assemble_steps ─▶ executor ─▶ SequenceScheduler.ended ─▶ decide …

What a step begins from and what becomes of it is its owner's business: `SequenceBatcher` for stateful models,
`Iterations` for iterative ones.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from qinfer.backends.base import Batch
from qinfer.batching.assemble import KeyFunction, key_function
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Execution, Pending, Responder
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import (
    AnySteps,
    States,
    StepExecution,
    StreamedSteps,
    assemble_steps,
    state_shapes,
)
from qinfer.batching.sequences.scheduler import Decision, SequenceScheduler
from qinfer.batching.sequences.steps import StepBatch
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import QinferError
from qinfer.observe.stats import StatsTally

IDLE_SLACK_S = 0.1
"""Redis' clock says a little later that a sequence is idle: since its last step was committed, not executed."""

P = TypeVar("P", bound=Pending)


class StepRunner(ABC, Generic[P]):
    """See the module docstring.

    Args:
        model: A model with sequences, and what to run it on.
        clock: The broker's time, in which deadlines and enqueue times are.
        tally: Counts what was executed.
        latency: What warm-up runs taught about the model's speed.

    Attributes:
        model: The same.
        executing: Steps that execute.
        expected_ends: The executions under way, and when each should end.
        paused: Nothing new is executed.
    """

    def __init__(
        self, model: LoadedModel, clock: ServerClock, tally: StatsTally, latency: LatencyModel | None = None
    ) -> None:
        assert model.spec.sequences is not None, "only a model with sequences has steps"
        self.model = model
        self.executing = 0
        self.expected_ends: dict[AnySteps, float] = {}
        self.paused = False
        self._clock = clock
        self._tally = tally
        self._latency = latency or LatencyModel()
        self._sequences = model.spec.sequences
        later = replace(self._sequences, max_idle_s=self._sequences.max_idle_s + IDLE_SLACK_S)
        self._scheduler = SequenceScheduler[P](model.spec.name, later, model.executor.count)
        self._responder = Responder(model.spec, model.version, model.observer)
        self._key_of: KeyFunction = key_function(model.spec)
        self._has_keys = any(-1 in state.dims for state in self._sequences.states)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def speed_rps(self, *, at_best: bool = False) -> float:
        """Returns how many steps a second all instances can execute in full batches; 0 = not known yet.

        At best, it is the highest speed that the observations allow.
        """
        rows = self._sequences.max_rows
        full_s = (self._latency.best_s if at_best else self._latency.full_s)(rows)
        return self.model.executor.count * rows / full_s if full_s else 0.0

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

    @abstractmethod
    def _tell(self, decision: Decision[P]) -> None:
        """Takes note of what a decision says besides batches."""

    @abstractmethod
    def _begin(self, batch: StepBatch[P]) -> list[States]:
        """Takes note that a batch begins; returns the states that its steps begin from."""

    @abstractmethod
    def _refuse(self, items: Sequence[P], responses: Sequence[Response]) -> None:
        """Answers the steps of a batch that can't be assembled."""

    @abstractmethod
    def _take(self, execution: AnySteps, now_s: float, begin_s: float) -> None:
        """Takes what an execution has left, tells the scheduler that it has ended, and answers."""

    def _key(self, request: InferRequest, states: States) -> object:
        """Returns what steps that share a batch have in common: the shapes of inputs, and of states if they vary."""
        key = self._key_of(request)
        return (key, state_shapes(states)) if self._has_keys else key

    def _start(self, batch: StepBatch[P], now_s: float) -> None:
        """Assembles a batch, and has its instance execute it."""
        begin_ns = time.perf_counter_ns()
        items = [step.item for step in batch.steps]
        states = self._begin(batch)
        try:
            assembled = assemble_steps(batch, states, self.model.spec)
        except QinferError as error:
            self._scheduler.ended(batch, now_s)
            self._refuse(items, self._responder.failures(items, error, now_s, self._tally))
            return
        execution = self._execution(batch, assembled, time.perf_counter_ns() - begin_ns)
        expected_s = self._latency.estimate_s(len(items))
        self.executing += len(items)
        self.expected_ends[execution] = now_s + expected_s
        # What is iterated on the event loop would leave it to nothing else.
        may_run_now = not self._sequences.iterative
        if may_run_now and self.model.executor.run_now(execution, expected_s, batch.instance):
            self._count(execution)
        else:
            self.model.executor.start(execution, self._ended, batch.instance)

    def _execution(self, steps: StepBatch[P], batch: Batch, input_ns: int) -> AnySteps:
        model, items = self.model, [step.item for step in steps.steps]
        if model.streams is None:
            return StepExecution(items, batch, input_ns, model.caller, steps=steps, sequences=self._sequences)
        return StreamedSteps(
            items,
            batch,
            input_ns,
            model.caller,
            steps=steps,
            table=model.streams,
            responder=self._responder,
            tally=self._tally,
        )

    def _ended(self, execution: Execution) -> None:
        """Takes an execution back from its instance, and starts the next one."""
        assert isinstance(execution, AnySteps), "it was started here"
        self._count(execution)
        self.pump()

    def _count(self, execution: AnySteps) -> None:
        """Takes note of what was executed, and how fast."""
        now_s = self._clock.now_s()
        del self.expected_ends[execution]
        self.executing -= len(execution.items)
        if execution.error is None:
            seconds = (execution.end_ns - execution.begin_ns) / 1e9
            self._latency.observe(execution.batch.size, seconds, now_s)
        self._take(execution, now_s, now_s - (time.perf_counter_ns() - execution.begin_ns) / 1e9)
