"""The spans of recorded requests of ensembles: one for each ensemble, and one for each step beneath it.

The request has a `queue` span until its first steps begin, and an `ensemble` span until the last one has ended. Beneath
it are a `step` span (submitted → answered; its worker's spans are beneath it) for each step, an `ensemble` span for
each nested one, and `publish`. `tracing` makes those of other requests.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from qinfer.batching.execution import WorkItem
from qinfer.core.messages import Failure, OutgoingRequest
from qinfer.models.ensemble_graph import EnsemblePlan, PlanStep
from qinfer.observe.logs import ErrorLogger
from qinfer.observe.tracing import ATTEMPT, MODEL, REQUEST_ID, VERSION, Attributes, Span, Tracer, of_tenant

_FENCE = ErrorLogger(logging.getLogger(__name__), "spans lost")
LEFT = Failure("cancelled", "the caller has left")


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


def _span_error(failure: Failure | None) -> tuple[str, str] | None:
    return None if failure is None else (failure.code, failure.message)
