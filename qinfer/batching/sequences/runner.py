"""The runner of the steps of one model version: its scheduler, its instances, and a batch's way through both.

    SequenceScheduler.decide ─▶ assemble_steps ─▶ executor ─▶ SequenceScheduler.end_batch ─▶ decide …

Subclasses keep the states and answer: `SequenceBatcher` for stateful models, `Iterations` for iterative models.
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
from qinfer.batching.execution import Execution, Responder, WorkItem
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import (
    AnySteps,
    States,
    StepExecution,
    StreamedSteps,
    assemble_steps,
    state_shapes,
)
from qinfer.batching.sequences.scheduler import SequenceDecision, SequenceScheduler
from qinfer.batching.sequences.steps import StepBatch
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import QinferError
from qinfer.observe.stats import StatsTally

IDLE_SLACK_S = 0.1
"""Redis counts idle time from a step's commit."""

P = TypeVar("P", bound=WorkItem)


class StepRunner(ABC, Generic[P]):
    """Runs a model's steps; instants are on Redis' clock."""

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
        """Returns steps per second; 0 = unknown."""
        rows = self._sequences.max_rows
        full_s = (self._latency.best_s if at_best else self._latency.full_s)(rows)
        return self.model.executor.count * rows / full_s if full_s else 0.0

    def pump(self) -> None:
        """Starts and breaks due steps; one call serves many steps."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self.paused:
            now_s = self._clock.now_s()
            decision = self._scheduler.decide(now_s, self._latency)
            self._report_decision(decision)
            if not decision.batches:
                wait_s = decision.wake_at_s - now_s
                if wait_s != float("inf"):
                    self._timer = self._loop.call_later(max(wait_s, 0.0), self.pump)
                return
            for batch in decision.batches:
                self._start_batch(batch, now_s)

    @abstractmethod
    def _report_decision(self, decision: SequenceDecision[P]) -> None:
        """Handles refused steps and ended sequences."""

    @abstractmethod
    def _begin_batch(self, batch: StepBatch[P]) -> list[States]:
        """Begins a batch, and returns the states of its steps."""

    @abstractmethod
    def _refuse(self, items: Sequence[P], responses: Sequence[Response]) -> None:
        """Answers items that can't be assembled."""

    @abstractmethod
    def _finish_execution(self, execution: AnySteps, now_s: float, begin_s: float) -> None:
        """Keeps the results of an execution and answers."""

    def _batch_key(self, request: InferRequest, states: States) -> object:
        key = self._key_of(request)
        return (key, state_shapes(states)) if self._has_keys else key

    def _start_batch(self, batch: StepBatch[P], now_s: float) -> None:
        begin_ns = time.perf_counter_ns()
        items = [step.item for step in batch.steps]
        states = self._begin_batch(batch)
        try:
            assembled = assemble_steps(batch, states, self.model.spec)
        except QinferError as error:
            self._scheduler.end_batch(batch, now_s)
            self._refuse(items, self._responder.failures(items, error, now_s, self._tally))
            return
        execution = self._execution(batch, assembled, time.perf_counter_ns() - begin_ns)
        expected_s = self._latency.estimate_s(len(items))
        self.executing += len(items)
        self.expected_ends[execution] = now_s + expected_s
        # Iterations on the event loop would block it.
        may_run_now = not self._sequences.iterative
        if may_run_now and self.model.executor.run_now(execution, expected_s, batch.instance):
            self._count_execution(execution)
        else:
            self.model.executor.start(execution, self._on_execution_end, batch.instance)

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

    def _on_execution_end(self, execution: Execution) -> None:
        assert isinstance(execution, AnySteps), "it was started here"
        self._count_execution(execution)
        self.pump()

    def _count_execution(self, execution: AnySteps) -> None:
        now_s = self._clock.now_s()
        del self.expected_ends[execution]
        self.executing -= len(execution.items)
        if execution.error is None:
            seconds = (execution.end_ns - execution.begin_ns) / 1e9
            self._latency.observe(execution.batch.size, seconds, now_s)
        self._finish_execution(execution, now_s, now_s - (time.perf_counter_ns() - execution.begin_ns) / 1e9)
