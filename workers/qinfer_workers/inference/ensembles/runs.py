"""The requests and sequences of an ensemble version in progress in a worker; their owner publishes the responses.

The sequences have the interface of a `SequenceBatcher`:

    adopt, add_step ─▶ EnsembleRuns, one step of each sequence at a time ─▶ outlet.executed, or outlet.broken

A step of the ensemble makes a step of each stateful model, with the same correlation id. The ensemble's state is the
number of steps that each model has received: a step repeated after a crash has the same numbers, and gets the committed
responses.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np

from qinfer.batching.batcher import LoadedModel, Outlet
from qinfer.batching.execution import Execution, Responder, WorkItem, due
from qinfer.batching.policy import NEVER_S
from qinfer.batching.sequences.batcher import StepOutlet
from qinfer.batching.sequences.execution import States
from qinfer.batching.sequences.steps import PendingStep
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, Response, Timing
from qinfer.core.messages import SequenceFlags as Flags
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import LEFT as CALLER_LEFT
from qinfer.errors import (
    TIMED_OUT,
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    OutputMismatch,
    QinferError,
    SequenceEnded,
    SequenceLost,
)
from qinfer.models.ensemble_graph import EnsemblePlan
from qinfer.models.sequence_spec import MAX_ENSEMBLE_SEQUENCES
from qinfer.observe.stats import ModelCounts, StatsTally, end_of
from qinfer.queue.entries import Lane
from qinfer.queue.sequences.records import SequenceId, start_missing
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer_workers.inference.ensembles.run import EnsembleRun, StepFailed, StepTimes, StreamedResponses
from qinfer_workers.inference.ensembles.steps import AWAY, LEFT, OF_STORED, StepCall, StepLimits, StepSubmitter, StepWay
from qinfer_workers.inference.tracing import Spans

logger = logging.getLogger(__name__)

STEP_FAILED = "step_failed"
"""Triton's OTHER (reference §4)."""

MAX_REQUESTS = 256

MAX_BYTES = 256 * 2**20
"""The input bytes of held requests above which no more requests are fetched."""


class NestedCounts(ModelCounts):
    """Statistics of nested ensembles."""

    def __init__(self, metrics: MetricsSettings) -> None:
        super().__init__()
        self._metrics = metrics
        self._tallies: dict[tuple[str, int], StatsTally] = {}

    def tally(self, ensemble: str, version: int) -> StatsTally:
        """Returns the tally of an ensemble version."""
        tally = self._tallies.get((ensemble, version))
        if tally is None:
            tally = self._tallies[ensemble, version] = StatsTally()
            tally.with_summaries = self._metrics.summary_latencies
            tally.with_histogram = self._metrics.histogram_latencies
        return tally

    def drain(self) -> dict[tuple[str, int], dict[str, int]]:
        """Returns the counts since the last drain."""
        for (ensemble, version), tally in self._tallies.items():
            self.merge(ensemble, version, tally.drain())
        self._tallies.clear()
        return super().drain()


class NoInstances:
    """The `Executor` of an ensemble."""

    count = 0

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Returns false."""
        del execution, expected_s, instance
        return False

    def start(self, execution: Execution, done: Callable[[Execution], None], instance: int = 0) -> None:
        """Fails: an ensemble makes no executions."""
        raise AssertionError("an ensemble has no instance to execute anything on", execution, done, instance)

    def recall(self) -> list[Execution]:
        """Returns nothing."""
        return []

    def retire(self) -> None:
        """Does nothing."""


class RunParts(NamedTuple):
    """Parts that a worker's ensembles share; `near` submits by the short cut, `far` through lanes."""

    clock: ServerClock
    near: StepSubmitter
    far: StepSubmitter
    nested: NestedCounts
    follow: Callable[[], Awaitable[None]]


class EnsembleRuns(ABC):
    """Requests in progress, of callers (`EnsembleBatcher`) or of sequences (`EnsembleSteps`)."""

    def __init__(self, model: LoadedModel, plan: EnsemblePlan, parts: RunParts) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._runs: dict[WorkItem, tuple[EnsembleRun, asyncio.Task[None]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.tally = StatsTally()
        self.completed = 0
        self.paused = False
        self.expected_ends: dict[Execution, float] = {}
        self.replace_plan(model, plan)

    def replace_plan(self, model: LoadedModel, plan: EnsemblePlan) -> None:
        """Continues with another generation; current requests keep theirs."""
        self.model = model
        self._plan = plan
        self._limits = StepLimits(plan.spec.max_inflight) if plan.spec.max_inflight else None
        self._responder = Responder(model.spec, model.version, model.observer)

    @abstractmethod
    def answered(self, item: WorkItem, response: Response | None) -> None:
        """Takes an ended request, with the response to publish, if any."""

    @property
    def executing(self) -> int:
        """Requests in progress."""
        return len(self._runs)

    @property
    def versions(self) -> frozenset[tuple[str, int]]:
        """The versions that requests run."""
        return self._plan.versions.union(*[run.plan.versions for run, _ in self._runs.values()])

    def speed_rps(self, *, at_best: bool = False) -> float:
        """Returns 0: models are shared with other requests."""
        return 0.0

    def hold(self) -> None:
        """Begins no more requests."""
        self.paused = True

    async def pause_batching(self) -> None:
        """Begins no more requests, and waits for current requests."""
        self.hold()
        await self._idle.wait()

    def start_run(self, item: WorkItem, numbers: Callable[[StepCall], None] | None = None) -> None:
        """Begins a request; the steps of a suspect use the queue, so that a crash is counted."""
        self._idle.clear()
        spans = self.model.observer
        way = StepWay(
            self._parts.far if item.alone else self._parts.near,
            self._clock.now_s,
            AWAY if item.request.reply_to else OF_STORED,
            self._limits,
            spans.ensemble(item, self._plan) if isinstance(spans, Spans) else None,
            numbers,
        )
        table, streamed = self.model.streams, None
        if table is not None:
            streamed = StreamedResponses(table, item, self._responder, self._count_stream, self._cancel_run)
        run = EnsembleRun(item, self._plan, way, streamed)
        self._runs[item] = run, asyncio.get_running_loop().create_task(self._run(run, way, streamed))
        if streamed is not None:
            streamed.follow(run)

    def stop(self, item: WorkItem) -> None:
        """Ends a request without an answer."""
        _, task = self._runs.pop(item)
        task.cancel()

    def _cancel_run(self, item: WorkItem) -> None:
        if item in self._runs:
            self.stop(item)
            self.answered(item, None)

    async def _run(self, run: EnsembleRun, way: StepWay, streamed: StreamedResponses | None) -> None:
        outputs: tuple[Tensor, ...] = ()
        failure: Failure | None = LEFT
        try:
            outputs = await run.run()
            failure = None
        except StepFailed as failed:
            failure = failed.failure
        except Exception:  # the boundary: no request may wait for ever
            logger.exception("ensemble failed")
            failure = Failure.from_error(InferenceFailed("the ensemble failed; the worker's log says why"))
        finally:
            if way.trace is not None:
                way.trace.close(failure)
        if self._runs.pop(run.item, None) is None:
            return  # it was stopped while it ended
        self.completed += 1
        if streamed is not None:
            streamed.send_final(failure)
            self.answered(run.item, None)
        else:
            self.answered(run.item, self._response(run, outputs, failure))

    def _response(self, run: EnsembleRun, outputs: tuple[Tensor, ...], failure: Failure | None) -> Response:
        item = run.item
        waited_ns = self._waited_ns(run)
        if failure is None and (problem := self._responder.problem(outputs, due(item.request), item.rows)) is not None:
            failure = Failure.from_error(OutputMismatch(f"in ensemble '{self.model.spec.name}', {problem}"))
        self._count_request(run, waited_ns, failure)
        spent = run.spent
        return Response(
            request_id=item.request.id,
            model=self.model.spec.name,
            version=self.model.version,
            outputs=outputs if failure is None else (),
            failure=failure,
            attempt=item.lease.deliveries,
            timing=Timing(waited_ns, spent.input_ns, spent.infer_ns, spent.output_ns, item.rows),
            parameters={} if failure is not None else run.parameters,
            called=() if item.request.calls is None else item.request.calls.ended,
        )

    def _waited_ns(self, run: EnsembleRun) -> int:
        lasted_ns = (run.spent.end_ns or time.perf_counter_ns()) - run.spent.begin_ns
        return max(int((self._clock.now_s() - run.item.enqueued_s) * 1e9) - lasted_ns, 0)

    def _count_stream(self, run: EnsembleRun, response: Response) -> None:
        timing = response.timing or Timing()
        self.tally.responses.responded(response.index, end_of(response), timing.infer_ns)
        if not response.index and response.failure is None:
            self.tally.first_response(timing.queue_ns + timing.infer_ns)
        if response.final:
            run.spent.end_ns = run.spent.end_ns or time.perf_counter_ns()
            self._count_request(run, self._waited_ns(run), response.failure)

    def _count_request(self, run: EnsembleRun, waited_ns: int, failure: Failure | None) -> None:
        rows = run.item.rows
        begin_s = run.item.enqueued_s + waited_ns / 1e9
        if failure is None:
            _count_success(self.tally, rows, run.spent, waited_ns, begin_s)
        else:
            self.tally.failed(STEP_FAILED)
            self.tally.spent_failing(waited_ns + run.spent.end_ns - run.spent.begin_ns)
        for position, spent in run.nested.items():
            one = run.plan.nested[position]
            tally = self._parts.nested.tally(one.ensemble, one.version)
            if failure is None:
                _count_success(tally, rows, spent, 0, begin_s)
            elif position in run.failed_in:
                tally.failed(STEP_FAILED)
                tally.spent_failing(run.spent.end_ns - spent.begin_ns)


class EnsembleBatcher(EnsembleRuns):
    """Holds the requests of an ensemble, with the interface of a `Batcher`; only the steps' models execute.

    Number and bytes of held requests are bounded. Answers of one loop turn are published together. Steps of nested
    ensembles are steps of the outer one, so that no request waits for another's place.
    """

    def __init__(self, model: LoadedModel, plan: EnsemblePlan, parts: RunParts, outlet: Outlet) -> None:
        super().__init__(model, plan, parts)
        self._outlet = outlet
        self._answers: list[tuple[WorkItem, Response]] = []
        self._call_soon = asyncio.get_running_loop().call_soon
        self._held_bytes = 0
        self._fetchable = asyncio.Event()
        self._update_gates()

    @property
    def has_work(self) -> bool:
        """Whether requests are here; any thread."""
        return not self._idle.is_set()

    def classify(self, item: WorkItem) -> None:
        """Does nothing: ensembles don't batch."""

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Begins items."""
        now_s = self._clock.now_s()
        for item in items:
            if item.deadline_s <= now_s:
                self.fail([item], DeadlineExceeded(TIMED_OUT))
                continue
            self._held_bytes += _nbytes(item)
            self.start_run(item)
        self._update_gates()

    async def fetchable(self) -> None:
        """Waits until more items may be fetched."""
        await self._fetchable.wait()

    def welcome(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Returns all lanes."""
        return lanes

    @property
    def has_room(self) -> bool:
        """Whether more requests may be fetched."""
        return self._fetchable.is_set()

    def plan_fetch(self) -> tuple[int, float]:
        """Returns how many entries to fetch, and no time limit."""
        return max(MAX_REQUESTS - len(self._runs), 1), NEVER_S

    def lost(self, item: WorkItem) -> None:
        """Ends an item whose lease is lost."""
        item.lose()
        if item in self._runs:
            self.stop(item)
            self._release_item(item)

    def fail(self, items: Sequence[WorkItem], error: QinferError) -> None:
        """Answers items with an error."""
        self._outlet.publish_responses(items, self._responder.failures(items, error, self._clock.now_s(), self.tally))

    def hold(self) -> None:
        """Stops fetching."""
        super().hold()
        self._update_gates()

    async def idle(self) -> None:
        """Waits until no request is here."""
        await self._idle.wait()

    def resume_batching(self) -> None:
        """Takes requests again after `pause_batching`."""
        self.paused = False
        self._update_gates()

    def answered(self, item: WorkItem, response: Response | None) -> None:
        """Collects the responses of one loop turn, which leave together, though their requests began apart."""
        if response is not None:
            if not self._answers:
                self._call_soon(self._hand_over)
            self._answers.append((item, response))
            self._held_bytes -= _nbytes(item)
        else:
            self._release_item(item)

    def _hand_over(self) -> None:
        answers, self._answers = self._answers, []
        self._outlet.publish_responses([item for item, _ in answers], [response for _, response in answers])
        self._update_gates()

    def _release_item(self, item: WorkItem) -> None:
        self._held_bytes -= _nbytes(item)
        self._update_gates()

    def _update_gates(self) -> None:
        (self._idle.clear if len(self._runs) or self._answers else self._idle.set)()
        is_open = not self.paused and len(self._runs) < MAX_REQUESTS and self._held_bytes < MAX_BYTES
        (self._fetchable.set if is_open else self._fetchable.clear)()


def _count_success(tally: StatsTally, rows: int, spent: StepTimes, waited_ns: int, begin_s: float) -> None:
    tally.executed(rows, [waited_ns], spent.input_ns, spent.infer_ns, spent.output_ns, begin_s)
    tally.lasted_longer(spent.end_ns - spent.begin_ns - spent.computed_ns)


def _nbytes(item: WorkItem) -> int:
    return sum([tensor.nbytes for tensor in item.request.inputs])


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
        self._outlet.broken(broken[0], Cancelled(CALLER_LEFT))
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
