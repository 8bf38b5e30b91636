"""The sequences of a stateful ensemble in a worker, with the interface of a `SequenceBatcher`.

    adopt, add_step ─▶ EnsembleRuns, one step of each sequence at a time ─▶ outlet.executed, or outlet.broken

A step of the ensemble makes a step of each stateful model, with the same correlation id. The ensemble's state is the
number of steps that each model has received: a step repeated after a crash has the same numbers, and gets the committed
responses.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.batching.sequences.batcher import StepOutlet
from qinfer.batching.sequences.execution import States
from qinfer.batching.sequences.steps import PendingStep
from qinfer.core.messages import Response
from qinfer.core.messages import SequenceFlags as Flags
from qinfer.errors import (
    LEFT,
    TIMED_OUT,
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    QinferError,
    SequenceEnded,
    SequenceLost,
)
from qinfer.models.ensemble_graph import EnsemblePlan
from qinfer.models.sequence_spec import MAX_ENSEMBLE_SEQUENCES
from qinfer.queue.sequences.records import SequenceId, start_missing
from qinfer.tensors import from_numpy, to_numpy
from qinfer_workers.inference.ensembles.runs import EnsembleRuns, RunParts
from qinfer_workers.inference.ensembles.steps import StepCall

_STATE = "steps"
_ENDINGS: dict[str, type[QinferError]] = {
    error.code.value: error for error in (SequenceEnded, SequenceLost, DeadlineExceeded, Cancelled, BrokerUnavailable)
}
"""Errors of steps that may have ended the sequence."""


class _EnsembleSequence:
    __slots__ = ("counts", "is_over", "running", "waiting")

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.waiting: deque[PendingStep] = deque()
        self.running: _NumberedSteps | None = None
        self.is_over = False


class EnsembleSteps(EnsembleRuns):
    """Runs the sequences of an ensemble."""

    def __init__(self, model: LoadedModel, plan: EnsemblePlan, parts: RunParts, outlet: StepOutlet) -> None:
        super().__init__(model, plan, parts)
        self._outlet = outlet
        self._stateful = plan.stateful
        self._kept: dict[SequenceId, _EnsembleSequence] = {}
        self._ready: dict[SequenceId, None] = {}
        self.waiting = 0

    @property
    def has_work(self) -> bool:
        """Whether any step is here; any thread."""
        return bool(self.executing or self.waiting)

    @property
    def free_slots(self) -> int:
        """How many more sequences this worker takes."""
        return max(MAX_ENSEMBLE_SEQUENCES - len(self._kept), 0)

    def is_idle(self, sequence: SequenceId) -> bool:
        """Returns whether a sequence has no step here."""
        kept = self._kept.get(sequence)
        return kept is None or (kept.running is None and not kept.waiting)

    async def follow(self) -> None:
        """Waits until steps may be submitted."""
        await self._parts.follow()

    def adopt(self, sequence: SequenceId, committed: int, states: States | None) -> None:
        """Takes a newly owned sequence."""
        del committed
        counts = to_numpy(states[0]).tolist() if states else [0] * len(self._stateful)
        self._kept[sequence] = _EnsembleSequence(dict(zip(self._stateful, counts, strict=True)))

    def add_step(self, step: PendingStep) -> None:
        """Takes the next step; call `pump` afterwards."""
        kept = self._kept[step.place.sequence]
        kept.waiting.append(step)
        self.waiting += 1
        self._ready[step.place.sequence] = None

    def pump(self) -> None:
        """Begins the next step of each idle sequence."""
        while self._ready and not self.paused:
            sequence, _ = self._ready.popitem()
            if (kept := self._kept.get(sequence)) is not None:
                self._begin_step(kept)

    def drop(self, sequence: SequenceId) -> None:
        """Removes a sequence that ended or has another owner."""
        kept = self._kept.pop(sequence, None)
        if kept is None:
            return
        for step in kept.waiting:
            step.lose()
        self.waiting -= len(kept.waiting)
        if kept.running is not None:
            kept.running.item.lose()
            self.stop(kept.running.item)
        self._update_idle()

    def cancel(self, sequence: SequenceId, number: int) -> bool:
        """Breaks a sequence at a waiting step; returns false if the step does not wait here."""
        kept = self._kept.get(sequence)
        steps = list(kept.waiting) if kept else []
        broken = [step for step in steps if step.place.number >= number]
        if kept is None or not broken or broken[0].place.number != number:
            return False
        kept.waiting = deque(step for step in steps if step not in broken)
        self.waiting -= len(broken)
        self._outlet.broken(broken[0], Cancelled(LEFT))
        return True

    def resume_batching(self) -> None:
        """Runs steps again after `pause_batching`."""
        self.paused = False
        self.pump()

    def close(self) -> None:
        """Stops at once."""
        self.paused = True
        for sequence in list(self._kept):
            self.drop(sequence)

    def _begin_step(self, kept: _EnsembleSequence) -> None:
        if kept.running is not None or kept.is_over or not kept.waiting:
            return
        step = kept.waiting.popleft()
        self.waiting -= 1
        if step.deadline_s <= self._clock.now_s():
            self._break(kept, step, DeadlineExceeded(TIMED_OUT))
            return
        kept.running = _NumberedSteps(step, kept.counts)
        self.start_run(step, kept.running.add)

    def answered(self, item: WorkItem, response: Response | None) -> None:
        """Hands over an ended step, and begins the next of its sequence."""
        self._update_idle()
        assert isinstance(item, PendingStep), "it was admitted here"
        assert response is not None, "no stateful ensemble is decoupled"
        kept = self._kept[item.place.sequence]
        steps, kept.running = kept.running, None
        assert steps is not None, "it was under way"
        failure = response.failure
        if failure is not None and (failure.code in _ENDINGS or not self._is_certain(item, steps)):
            self._break(kept, item, _ENDINGS.get(failure.code, InferenceFailed)(failure.message))
            return
        kept.counts = steps.counts()
        # models before the failed one may have changed their states
        counts = np.array([kept.counts[model] for model in self._stateful], "<i8")
        item.state, item.changes_failing = (from_numpy(_STATE, counts),), True
        self._outlet.executed([item], [response])
        self._ready[item.place.sequence] = None
        self.pump()

    def _is_certain(self, item: PendingStep, steps: "_NumberedSteps") -> bool:
        """Returns whether all models that received a failed step are known; a dead worker may have reached others."""
        return steps.are_known and (item.lease.deliveries <= 1 or steps.are_all(self._stateful))

    def _break(self, kept: _EnsembleSequence, step: PendingStep, error: QinferError) -> None:
        kept.is_over = True
        self._outlet.broken(step, error)

    def _update_idle(self) -> None:
        (self._idle.clear if len(self._runs) else self._idle.set)()


class _NumberedSteps:
    def __init__(self, item: PendingStep, counts: dict[str, int]) -> None:
        self.item = item
        self._counts = counts
        self._calls: dict[str, StepCall] = {}

    @property
    def are_known(self) -> bool:
        return all(call.is_known for call in self._calls.values())

    def are_all(self, stateful: Sequence[str]) -> bool:
        return all(model in self._calls and self._calls[model].is_taken for model in stateful)

    def counts(self) -> dict[str, int]:
        taken = [model for model, call in self._calls.items() if call.is_taken]
        return self._counts | {model: self._counts[model] + 1 for model in taken}

    def add(self, call: StepCall) -> None:
        model, flags, request = call.step.model.name, self.item.request.sequence, call.request
        assert flags is not None, "a step has flags"
        number = self._counts[model] + 1
        if number == 1 and not self.item.start:
            raise start_missing(model, flags.callers_id)
        request.sequence = Flags(flags.callers_id, start=self.item.start, end=flags.end, step=number)
        if self.item.start:
            request.step_key = f"{self.item.request.id}/{model}"
        self._calls[model] = call
