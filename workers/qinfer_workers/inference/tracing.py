"""The worker's spans of recorded requests; any other request costs one check of its `trace` (`is_sampled`).

    request (the gateway's) ─┬─ queue     enqueued → its batch begins; linked to the batch
                             └─ batch     inputs made → executed; linked to all its requests
                                ├─ execute
                                └─ publish

A batch is in the trace of its first recorded request, a job's `shard` in that of the request that created the job.

A request of an ensemble has a `queue` span until its first steps begin, and an `ensemble` span until the last one has
ended. Beneath it are a `step` span (submitted → answered; its worker's spans are beneath it) for each step, an
`ensemble` span for each nested one, and `publish`.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from qinfer.batching.execution import Execution, WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, OutgoingRequest
from qinfer.errors import QinferError
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.models.ensemble_graph import EnsemblePlan, PlanStep
from qinfer.observe.logs import ErrorLogger
from qinfer.observe.tracing import (
    ATTEMPT,
    BATCH_ID,
    BATCH_SIZE,
    JOB_ID,
    MESSAGE_COUNT,
    MESSAGE_ID,
    MODEL,
    REQUEST_ID,
    VERSION,
    Attributes,
    Span,
    Tracer,
    is_sampled,
    of_lane,
    of_tenant,
)

_FENCE = ErrorLogger(logging.getLogger(__name__), "spans lost")  # tracing never stops work
_Work = Callable[[], Awaitable[None]]


class ShardPlace(NamedTuple):
    """One execution of a shard; `deliveries` includes it."""

    record: JobRecord
    number: int
    rows: int
    deliveries: int


class Spans:
    """The `Observer` of the worker's batchers, and of its publisher."""

    def __init__(self, tracer: Tracer, clock: ServerClock) -> None:
        self._tracer = tracer
        self._now_s = clock.now_s

    def executed(self, execution: Execution, begin_s: float) -> None:
        """Records an execution."""
        recorded = [item for item in execution.items if is_sampled(item.request.trace)]
        if not recorded:
            return
        input_s = execution.input_ns / 1e9
        begin_s = max(begin_s, max(item.enqueued_s for item in recorded) + input_s)  # clocks differ a bit
        begins_s = begin_s - input_s
        end_s = begin_s + (execution.end_ns - execution.begin_ns) / 1e9
        lane = recorded[0].lease.entry.lane
        about: Attributes = {
            MODEL: lane.model,
            VERSION: lane.version,
            BATCH_ID: execution.batch_id,
            BATCH_SIZE: execution.batch.size,
            **of_lane(lane.model, lane.version, lane.name, "process"),
        }
        error = _span_error(execution.error)
        requests = [item.request.trace for item in recorded]
        batch = self._tracer.start("batch", requests[0], begins_s, requests)
        if not execution.apart:  # repeated items waited before
            for item in recorded:
                queue = self._tracer.start("queue", item.request.trace, item.enqueued_s, (batch.trace,))
                queue.end(begins_s, {**about, **_about(item)})
        self._tracer.start("execute", batch.trace, begin_s).end(end_s, about, error)
        counts = {"qinfer.requests": len(execution.items), MESSAGE_COUNT: len(execution.items)}
        batch.end(end_s, {**about, **counts}, error)
        for item, answer in zip(execution.items, execution.answers, strict=True):
            if answer is not None and is_sampled(item.request.trace):
                item.request.trace = batch.trace

    def refused(self, items: Sequence[WorkItem], error: QinferError, now_s: float) -> None:
        """Records items that were refused."""
        for item in items:
            if is_sampled(item.request.trace):
                queue = self._tracer.start("queue", item.request.trace, item.enqueued_s)
                queue.end(max(now_s, item.enqueued_s), _about(item), _span_error(error))

    def ensemble(self, item: WorkItem, plan: EnsemblePlan) -> "RunTrace | None":
        """Begins spans of an ensemble's request; `None` = not recorded."""
        if not is_sampled(item.request.trace):
            return None
        with _FENCE:
            return RunTrace(self._tracer, self._now_s, item, plan)
        return None

    def shard(
        self, place: ShardPlace, outcome: ShardOutcome | None, begin_s: float, error: tuple[str, str] | None
    ) -> None:
        """Records an ended execution of a shard; `outcome` is `None` if it failed."""
        record = place.record
        if not is_sampled(record.trace):
            return
        about: Attributes = {
            MODEL: record.model,
            VERSION: record.version,
            JOB_ID: record.id,
            ATTEMPT: place.deliveries,
            **of_tenant(record.tenant),
            "qinfer.shard": place.number,
            "qinfer.rows": place.rows,
        }
        if outcome is not None:
            about = {**about, "qinfer.failed_rows": outcome.failed_rows}
        with _FENCE:
            self._tracer.start("shard", record.trace, begin_s).end(self._now_s(), about, error)

    def around(self, items: Sequence[WorkItem], publish: _Work) -> _Work:
        """Returns publishing work with spans, if a request is recorded."""
        batches = list(dict.fromkeys(item.request.trace for item in items if is_sampled(item.request.trace)))
        if not batches:
            return publish
        lane = items[0].lease.entry.lane
        about: Attributes = {MODEL: lane.model, VERSION: lane.version}

        async def recorded() -> None:
            spans = self._publishing(batches)
            error = None
            try:
                await publish()
            except QinferError as raised:
                error = _span_error(raised)
                raise
            finally:
                self._published(spans, about, error)

        return recorded

    def _publishing(self, batches: Sequence[str]) -> list[Span]:
        with _FENCE:
            return [self._tracer.start("publish", batch, self._now_s()) for batch in batches]
        return []

    def _published(self, spans: Sequence[Span], about: Attributes, error: tuple[str, str] | None) -> None:
        with _FENCE:
            for span in spans:
                span.end(self._now_s(), about, error)


class RunTrace:
    """The spans of one recorded request."""

    def __init__(self, tracer: Tracer, now_s: Callable[[], float], item: WorkItem, plan: EnsemblePlan) -> None:
        self._tracer = tracer
        self._now_s = now_s
        self._plan = plan
        self._nested: dict[int, tuple[Span, Attributes]] = {}
        request, lane, begin_s = item.request, item.lease.entry.lane, now_s()
        self._about: Attributes = {
            MODEL: lane.model,
            VERSION: lane.version,
            REQUEST_ID: request.id,
            ATTEMPT: item.lease.deliveries,
            **of_tenant(request.tenant),
        }
        queue = tracer.start("queue", request.trace, item.enqueued_s)
        self._span = tracer.start("ensemble", request.trace, max(begin_s, item.enqueued_s))
        queue.end(max(begin_s, item.enqueued_s), self._about)
        request.trace = self._span.trace

    def close(self, failure: Failure | None) -> None:
        """Ends the spans."""
        with _FENCE:
            now_s, error = self._now_s(), _span_error(failure)
            for span, about in self._nested.values():
                span.end(now_s, about, error)
            self._span.end(now_s, self._about, error)

    def begin(self, step: PlanStep, request: OutgoingRequest) -> "StepSpan | None":
        """Begins the span of a step and its nested ensembles; the step runs without a lost one."""
        with _FENCE:
            parent, now_s = self._span, self._now_s()
            for position in step.within:
                if position not in self._nested:
                    nested = self._plan.nested[position]
                    about: Attributes = {MODEL: nested.ensemble, VERSION: nested.version}
                    self._nested[position] = self._tracer.start("ensemble", parent.trace, now_s), about
                parent = self._nested[position][0]
            span = self._tracer.start("step", parent.trace, now_s)
            request.trace = span.trace
            return StepSpan(span, self._now_s, step)
        return None


class StepSpan(NamedTuple):
    """The span of a step."""

    span: Span
    now_s: Callable[[], float]
    step: PlanStep

    def end(self, failure: Failure | None) -> None:
        """Ends the span."""
        with _FENCE:
            self.span.end(self.now_s(), {MODEL: self.step.model.name, VERSION: self.step.version}, _span_error(failure))


def _about(item: WorkItem) -> Attributes:
    lane = item.lease.entry.lane
    return {
        MODEL: lane.model,
        VERSION: lane.version,
        REQUEST_ID: item.request.id,
        ATTEMPT: item.lease.deliveries,
        **of_tenant(item.request.tenant),
        MESSAGE_ID: item.request.id,
        **of_lane(lane.model, lane.version, lane.name, "receive"),
    }


def _span_error(error: QinferError | Failure | None) -> tuple[str, str] | None:
    return None if error is None else (str(error.code), error.message)
