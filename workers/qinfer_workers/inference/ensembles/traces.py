"""The spans of recorded requests of ensembles: one for each ensemble, and one for each step beneath it.

The request has a `queue` span until its first steps begin, and an `ensemble` span until the last one has ended. Beneath
it are a `step` span (submitted → answered; its worker's spans are beneath it) for each step, an `ensemble` span for
each
nested one, and `publish`. `tracing` makes those of other requests.
"""

import logging
from collections.abc import Callable

from qinfer.batching.execution import WorkItem
from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.models.ensemble_graph import EnsemblePlan, PlanStep
from qinfer.observe.logs import ErrorLogger
from qinfer.observe.tracing import ATTEMPT, MODEL, REQUEST_ID, VERSION, Attributes, Span, Tracer, of_tenant
from qinfer.submission.pending import ResponseSink
from qinfer_workers.inference.ensembles.run import StepHandle, StepSubmitter

_FENCE = ErrorLogger(logging.getLogger(__name__), "spans lost")
_LEFT = Failure("cancelled", "the caller has left")


class RunTrace:
    """The spans of one recorded request."""

    def __init__(self, tracer: Tracer, now_s: Callable[[], float], item: WorkItem, plan: EnsemblePlan) -> None:
        self._tracer = tracer
        self._now_s = now_s
        self._plan = plan
        self._failure: Failure | None = _LEFT
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

    def over(self, steps: StepSubmitter) -> StepSubmitter:
        """Returns a way of steps that records them."""
        return _TracedSteps(self, steps)

    def set_failure(self, failure: Failure | None) -> None:
        """Notes the end; without it, the caller has left."""
        self._failure = failure

    def close(self) -> None:
        """Ends the spans."""
        with _FENCE:
            now_s, error = self._now_s(), _span_error(self._failure)
            for span, about in self._nested.values():
                span.end(now_s, about, error)
            self._span.end(now_s, self._about, error)

    def start(self, step: PlanStep) -> Span:
        """Begins the span of a step and its nested ensembles."""
        parent, now_s = self._span, self._now_s()
        for position in step.within:
            if position not in self._nested:
                nested = self._plan.nested[position]
                about: Attributes = {MODEL: nested.ensemble, VERSION: nested.version}
                self._nested[position] = self._tracer.start("ensemble", parent.trace, now_s), about
            parent = self._nested[position][0]
        return self._tracer.start("step", parent.trace, now_s)

    def end_span(self, span: Span, step: PlanStep, failure: Failure | None) -> None:
        """Ends the span of a step."""
        with _FENCE:
            span.end(self._now_s(), {MODEL: step.model.name, VERSION: step.version}, _span_error(failure))


class _TracedSteps:
    def __init__(self, trace: RunTrace, steps: StepSubmitter) -> None:
        self._trace = trace
        self._steps = steps

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> StepHandle:
        traced: _TracedSink | None = None
        with _FENCE:  # the step runs without it
            traced = _TracedSink(self._trace, step, sink, self._trace.start(step))
            request.trace = traced.span.trace
        if traced is None:
            return self._steps.submit_step(step, request, sink, timeout_s)
        try:
            submitted = self._steps.submit_step(step, request, traced, timeout_s)
        except BaseException as error:
            traced.end_span(Failure.from_error(error))
            raise
        return _TracedSubmitted(submitted, traced)


class _TracedSink:
    no_stream = ""

    def __init__(self, trace: RunTrace, step: PlanStep, sink: ResponseSink, span: Span) -> None:
        self.span = span
        self._has_ended = False
        self._trace = trace
        self._step = step
        self._sink = sink

    def deliver(self, response: Response) -> None:
        if response.final:
            self.end_span(response.failure)
        self._sink.deliver(response)

    def end_span(self, failure: Failure | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._trace.end_span(self.span, self._step, failure)


class _TracedSubmitted:
    def __init__(self, submitted: StepHandle, sink: _TracedSink) -> None:
        self._submitted = submitted
        self._sink = sink

    @property
    def is_taken(self) -> bool:
        return self._submitted.is_taken

    def cancel(self) -> None:
        self._submitted.cancel()
        self._sink.end_span(_LEFT)

    def took(self, nbytes: int) -> None:
        self._submitted.took(nbytes)


def _span_error(failure: Failure | None) -> tuple[str, str] | None:
    return None if failure is None else (failure.code, failure.message)
