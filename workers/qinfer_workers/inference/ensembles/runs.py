"""The requests of an ensemble version that are in progress in a worker; their owner publishes the responses."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Execution, Responder, WorkItem, due
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, Response, Timing
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import OutputMismatch, QinferError
from qinfer.models.ensemble_graph import EnsemblePlan
from qinfer.observe.responses import end_of
from qinfer.observe.stats import ModelCounts, StatsTally
from qinfer_workers.inference.ensembles.insistent import RetryingSteps
from qinfer_workers.inference.ensembles.limits import StepLimits
from qinfer_workers.inference.ensembles.run import EnsembleRun, Outcome, StepSubmitter, StepTimes
from qinfer_workers.inference.ensembles.streams import StreamedResponses
from qinfer_workers.inference.ensembles.traces import RunTrace
from qinfer_workers.inference.tracing import Spans

STEP_FAILED = "step_failed"
"""Triton's OTHER (reference §4)."""


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

    def way_of(self, item: WorkItem) -> StepSubmitter:
        """Returns a request's way of steps: a suspect's use the queue, so that a crash is counted."""
        return RetryingSteps(self.far if item.alone else self.near, is_stored=not item.request.reply_to)


class Runs:
    """Requests in progress; `answered` gets each ended one, with the response to publish, if any."""

    def __init__(
        self,
        model: LoadedModel,
        plan: EnsemblePlan,
        parts: RunParts,
        answered: Callable[[WorkItem, Response | None], None],
    ) -> None:
        self._clock, self._nested = parts.clock, parts.nested
        self._answered = answered
        self._runs: dict[WorkItem, EnsembleRun] = {}
        self._streamed: dict[WorkItem, StreamedResponses] = {}
        self._traces: dict[WorkItem, RunTrace] = {}
        self.tally = StatsTally()
        self.completed = 0
        self.replace(model, plan)

    def replace(self, model: LoadedModel, plan: EnsemblePlan) -> None:
        """Continues with another generation; current requests keep theirs."""
        self._model = model
        self._plan = plan
        most = plan.spec.max_inflight
        call_later = asyncio.get_running_loop().call_later
        self._limits = StepLimits(most, self._clock.now_s, call_later) if most else None
        self._responder = Responder(model.spec, model.version, model.observer)

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, item: WorkItem) -> bool:
        return item in self._runs

    @property
    def versions(self) -> frozenset[tuple[str, int]]:
        """The versions that requests run."""
        return self._plan.versions.union(*[run.plan.versions for run in self._runs.values()])

    def start_run(self, item: WorkItem, steps: StepSubmitter) -> None:
        """Begins a request."""
        streamed = self._open_stream(item)
        recorded = self._recorded(item, steps if self._limits is None else self._limits.over(steps))
        run = self._runs[item] = EnsembleRun(item, self._plan, recorded, self._clock.now_s, self._on_run_end, streamed)
        if streamed is not None:
            streamed.follow(run)
        run.submit_first_steps()

    def stop(self, item: WorkItem) -> None:
        """Ends a request without an answer."""
        self._runs[item].stop()
        self._remove_run(item)

    def failures(self, items: Sequence[WorkItem], error: QinferError) -> list[Response]:
        """Returns the responses to requests that fail before they begin."""
        return self._responder.failures(items, error, self._clock.now_s(), self.tally)

    def _recorded(self, item: WorkItem, steps: StepSubmitter) -> StepSubmitter:
        spans = self._model.observer
        trace = spans.ensemble(item, self._plan) if isinstance(spans, Spans) else None
        if trace is None:
            return steps
        self._traces[item] = trace
        return trace.over(steps)

    def _open_stream(self, item: WorkItem) -> StreamedResponses | None:
        table = self._model.streams
        if table is None:
            return None
        streamed = StreamedResponses(table, item, self._responder, self._count_stream, self._cancel_run)
        self._streamed[item] = streamed
        return streamed

    def _cancel_run(self, item: WorkItem) -> None:
        if item in self._runs:
            self.stop(item)
            self._answered(item, None)

    def _on_run_end(self, run: EnsembleRun, item: WorkItem, outcome: Outcome) -> None:
        failure = outcome if isinstance(outcome, Failure) else None
        if item in self._traces:
            self._traces[item].set_failure(failure)
        streamed = self._streamed.get(item)
        self._remove_run(item)
        self.completed += 1
        if streamed is not None:
            streamed.send_final(failure)
            self._answered(item, None)
        else:
            self._answered(item, self._response(run, item, outcome))

    def _response(self, run: EnsembleRun, item: WorkItem, outcome: Outcome) -> Response:
        waited_ns = self._waited_ns(run, item)
        failure = outcome if isinstance(outcome, Failure) else None
        if not isinstance(outcome, Failure):
            problem = self._responder.problem(outcome, due(item.request), item.rows)
            if problem is not None:
                failure = Failure.from_error(OutputMismatch(f"in ensemble '{self._model.spec.name}', {problem}"))
        self._count_request(run, item, waited_ns, failure)
        spent = run.spent
        return Response(
            request_id=item.request.id,
            model=self._model.spec.name,
            version=self._model.version,
            outputs=outcome if failure is None and not isinstance(outcome, Failure) else (),
            failure=failure,
            attempt=item.lease.deliveries,
            timing=Timing(waited_ns, spent.input_ns, spent.infer_ns, spent.output_ns, item.rows),
            parameters={} if failure is not None else run.parameters,
            called=() if item.request.calls is None else item.request.calls.ended,
        )

    def _waited_ns(self, run: EnsembleRun, item: WorkItem) -> int:
        lasted_ns = (run.spent.end_ns or time.perf_counter_ns()) - run.spent.begin_ns
        return max(int((self._clock.now_s() - item.enqueued_s) * 1e9) - lasted_ns, 0)

    def _count_stream(self, run: EnsembleRun, item: WorkItem, response: Response) -> None:
        timing = response.timing or Timing()
        self.tally.responses.responded(response.index, end_of(response), timing.infer_ns)
        if not response.index and response.failure is None:
            self.tally.first_response(timing.queue_ns + timing.infer_ns)
        if response.final:
            run.spent.end_ns = run.spent.end_ns or time.perf_counter_ns()
            self._count_request(run, item, self._waited_ns(run, item), response.failure)

    def _count_request(self, run: EnsembleRun, item: WorkItem, waited_ns: int, failure: Failure | None) -> None:
        begin_s = self._clock.now_s() - (time.perf_counter_ns() - run.spent.begin_ns) / 1e9
        if failure is None:
            _count_success(self.tally, item.rows, run.spent, waited_ns, begin_s)
        else:
            self.tally.failed(STEP_FAILED)
            self.tally.spent_failing(waited_ns + run.spent.end_ns - run.spent.begin_ns)
        for position, spent in run.nested.items():
            one = run.plan.nested[position]
            tally = self._nested.tally(one.ensemble, one.version)
            if failure is None:
                _count_success(tally, item.rows, spent, 0, begin_s)
            elif position in run.failed_in:
                tally.failed(STEP_FAILED)
                tally.spent_failing(run.spent.end_ns - spent.begin_ns)

    def _remove_run(self, item: WorkItem) -> None:
        del self._runs[item]
        self._streamed.pop(item, None)
        if item in self._traces:
            self._traces.pop(item).close()


def _count_success(tally: StatsTally, rows: int, spent: StepTimes, waited_ns: int, begin_s: float) -> None:
    tally.executed(rows, [waited_ns], spent.input_ns, spent.infer_ns, spent.output_ns, begin_s)
    tally.lasted_longer(spent.end_ns - spent.begin_ns - spent.computed_ns)
