"""Traces of requests: spans for OpenTelemetry, and Triton's JSON files (`trace_file.py`).

`TraceStage` wraps the sinks of traced requests.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.core.messages import CallRecord, CallTraces, Failure, OutgoingRequest, Response, Timing
from qinfer.core.settings_sections import TraceSettings
from qinfer.errors import Cancelled, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.observe.logs import ErrorLogger
from qinfer.observe.stats import GatewayTally
from qinfer.observe.tracing import (
    ATTEMPT,
    BATCH_SIZE,
    ERROR,
    HTTP_METHOD,
    HTTP_STATUS,
    MODEL,
    REQUEST_ID,
    RPC_METHOD,
    RPC_SERVICE,
    RPC_STATUS,
    RPC_SYSTEM,
    VERSION,
    Attributes,
    Span,
    Tracer,
    of_lane,
    of_tenant,
)
from qinfer.submission.pending import PendingCall, ResponseSink
from qinfer_api.auth import CallerContext
from qinfer_api.dispatcher import Dispatcher, Ending, StoredTraces
from qinfer_api.http.fast import FastCall
from qinfer_api.observe.trace_file import (
    INPUT,
    OUTPUT,
    CallTrace,
    Sampling,
    Stamps,
    Taken,
    TraceFile,
    called,
    copy_tensors,
    start_of,
    weight_of,
)  # fmt: skip
from qinfer_api.stages import Passage, SinkWrapper, Stage, wrappers_of
from qinfer_api.status import GRPC_CODES, grpc_status, http_status

logger = logging.getLogger(__name__)

_FENCE = ErrorLogger(logging.getLogger(__name__), "traces lost, requests go on without")
# Characters of a client's text in a trace: thousands of traces are held.
_MOST_TEXT = 256
# Stored requests traced to their end: each costs a read a second.
_MOST_FOLLOWED = 256
# The weight (`weight_of`) above which a trace takes no more tensors.
_MOST_WEIGHT = 1000
_ROUNDING_S = 1e-6  # of floats since 1970


class Tracing:
    """The tracer and the trace file; each is `None` if it is off."""

    def __init__(self, trace: TraceSettings, tracer: Tracer | None = None) -> None:
        self.tracer = tracer
        self.following: set[asyncio.Task[None]] = set()
        self.file = TraceFile(Path(trace.file), start_of(trace)) if trace.file else None

    @property
    def is_on(self) -> bool:
        """Whether any request may be traced."""
        return self.tracer is not None or self.file is not None

    @property
    def call_type(self) -> type[FastCall]:
        """The class of requests on the fast path."""
        return TracedCall if self.is_on else FastCall

    async def close(self) -> None:
        """Writes and sends the remaining traces, which takes seconds at most."""
        if self.following:
            for task in self.following:
                task.cancel()
            await asyncio.wait(self.following)
        if self.file is not None:
            await self.file.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


class TracedCall(FastCall, eq=False):
    """Knows when its head and body were received."""

    received_s: float = msgspec.field(default_factory=time.monotonic)
    read_s: float = 0.0

    def start(self, dispatcher: Dispatcher) -> None:
        """Decodes and submits the request, as `FastCall.start`."""
        self.read_s = time.monotonic()
        super().start(dispatcher)


class TraceStage(Stage, StoredTraces):
    """Traces requests."""

    def __init__(self, tracing: Tracing, clock: ServerClock, tally: GatewayTally) -> None:
        self._tracer, self._file, self._following = tracing.tracer, tracing.file, tracing.following
        self._server_clock = clock
        self._tally = tally

    def before(self, passage: Passage) -> None:
        """Begins a span or a trace of the request."""
        request = passage.request
        sampling = self._sample(request.model)
        span = self._start_span(passage.context, passage.sink)
        if span is not None:
            passage.context = msgspec.structs.replace(passage.context, trace=span.trace)
            if not span.is_recorded:
                span = None
        if sampling is not None:
            request.calls = CallTraces(has_tensors=sampling.rule.has_tensors)
        if span is not None or sampling is not None:
            passage.sink = TracedSink(passage.sink, request, self._server_clock, span, sampling)

    def ended(self, pending: PendingCall, response: Response) -> None:
        """Makes a recorded request an exemplar of its latency."""
        for sink in wrappers_of(pending.sink):
            if isinstance(sink, TracedSink) and sink.trace_id and response.failure is None:
                seconds = time.monotonic() - pending.started_s
                self._tally.traced(pending.model, pending.version, seconds, sink.trace_id)

    def _sample(self, model: str) -> Sampling | None:
        with _FENCE:  # the request continues untraced
            return None if self._file is None else self._file.sample(model)
        return None

    def _start_span(self, context: CallerContext, sink: ResponseSink) -> Span | None:
        if self._tracer is None:
            return None
        begin_s = self._server_clock.now_s()
        if isinstance(sink, TracedCall):
            begin_s -= time.monotonic() - sink.received_s
        with _FENCE:
            return self._tracer.start("request", context.trace, begin_s)
        return None

    def trace_of(self, context: CallerContext, served: ServedVersion, name: Attributes) -> str:
        """Records an acceptance as a span; returns its trace context."""
        if self._tracer is None:
            return context.trace
        now_s = self._server_clock.now_s()
        with _FENCE:
            span = self._tracer.start("accept", context.trace, now_s)
            lane = of_lane(served.spec.name, served.version, served.lane.name, "send") if REQUEST_ID in name else {}
            about: dict[str, str | int] = {
                MODEL: served.spec.name,
                VERSION: served.version,
                **of_tenant(context.tenant),
            }
            span.end(now_s, {**about, **lane, **name})
            return span.trace
        return context.trace

    @contextmanager
    def trace_stored(self, request: OutgoingRequest) -> Iterator[Callable[[Ending], None]]:
        """Traces a request that is stored in the block, at its end."""
        if len(self._following) >= _MOST_FOLLOWED or (sampling := self._sample(request.model)) is None:
            yield lambda _: None
            return
        request.calls = CallTraces(has_tensors=sampling.rule.has_tensors)
        begin_s = self._server_clock.now_s()
        told: list[Ending] = []
        try:
            yield told.append
        finally:
            with _FENCE:
                if told:
                    taken = copy_tensors(INPUT, request.inputs) if sampling.rule.has_tensors else None
                    follow = self._follow(sampling, _about(request), begin_s, taken, told[0])
                    task = asyncio.get_running_loop().create_task(follow)
                    self._following.add(task)
                    task.add_done_callback(self._following.discard)
                else:
                    sampling.uncount_request()

    async def _follow(
        self,
        sampling: Sampling,
        about: dict[str, str | int],
        began_s: float,
        taken: Taken | None,
        ending: Ending,
    ) -> None:
        """Adds the trace of a stored request, even if its end is not seen."""
        stamps, calls = [("REQUEST_START", began_s)], list[CallTrace]()
        try:
            async with ending() as (record, response):
                if record is not None:
                    timing = None if response is None else response.timing
                    stamps += _computed(timing, record.created_at)
                    if record.finished_at:
                        stamps.append(("REQUEST_END", record.finished_at))
                if taken is not None and response is not None:
                    taken += copy_tensors(OUTPUT, response.outputs)
                calls += [] if response is None else [_trace_of(call, stamps[-1][1]) for call in response.called]
        except QinferError as error:
            logger.debug("end of a traced request not seen", extra={"reason": error.message})
        finally:
            with _FENCE:
                sampling.add(about, _ascending(stamps, stamps[-1][1]), taken, calls)


class TracedSink(SinkWrapper):
    """Ends a request's traces; `request` is not stamped yet."""

    __slots__ = (
        "_begin_s", "_clock", "_pending", "_request", "_sampling", "_span", "_tensors",
    )  # fmt: skip

    def __init__(
        self,
        sink: ResponseSink,
        request: OutgoingRequest,
        clock: ServerClock,
        span: Span | None,
        sampling: Sampling | None,
    ) -> None:
        super().__init__(sink)
        self._request: OutgoingRequest | None = request
        self._clock = clock
        self._span = span
        self._sampling = sampling
        self._begin_s = clock.now_s()
        self._pending: PendingCall | None = None
        self._tensors: Taken | None = None
        if sampling is not None and sampling.rule.has_tensors:
            with _FENCE:
                self._tensors = copy_tensors(INPUT, request.inputs)

    @property
    def trace_id(self) -> str:
        """The trace's id; empty without OpenTelemetry."""
        return "" if self._span is None else self._span.trace.split("-")[1]

    def submitted(self, request: OutgoingRequest, pending: PendingCall) -> None:
        """Notes the pending request, unless the request has ended."""
        if self._request is not None:
            self._pending = pending

    def refused(self, error: QinferError) -> None:
        """Ends the traces."""
        self.end_traces(Failure.from_error(error))

    def left(self, request_id: str, version: int) -> None:
        """Ends the traces."""
        self.end_traces(Failure.from_error(Cancelled("the caller went away")))

    def deliver(self, response: Response) -> None:
        """Passes responses on; the last ends the traces."""
        if self._tensors is not None and weight_of(self._tensors) < _MOST_WEIGHT:
            with _FENCE:
                self._tensors += copy_tensors(OUTPUT, response.outputs)
        if not response.final or self._request is None:
            self.inner.deliver(response)
            return
        end_s = self._clock.now_s()
        try:
            self.inner.deliver(response)
        finally:
            self.end_traces(response.failure, response, end_s)

    def end_traces(self, failure: Failure | None, response: Response | None = None, end_s: float = 0.0) -> None:
        """Ends the traces once; logs traces that are lost."""
        request, self._request = self._request, None
        if request is None:
            return
        now_s = self._clock.now_s()
        if self._span is not None:
            with _FENCE:
                self._end_span(self._span, request, failure, response, now_s)
        if self._sampling is not None:
            with _FENCE:
                self._add_trace(self._sampling, request, response, end_s or now_s, now_s)
        self._pending = None  # breaks a reference cycle

    def _end_span(
        self, span: Span, request: OutgoingRequest, failure: Failure | None, response: Response | None, now_s: float
    ) -> None:
        model = request.model[:_MOST_TEXT]
        about: dict[str, str | int] = {MODEL: model, VERSION: request.version, REQUEST_ID: request.id}
        about |= {**of_tenant(request.tenant), **self._of_server("" if failure is None else failure.code)}
        if response is not None:
            about[ATTEMPT] = response.attempt
            if response.timing is not None:
                about[BATCH_SIZE] = response.timing.batch_size
                now_s = max(now_s, self._executed_s(response.timing))
        if failure is not None and http_status(failure.code) < 500:
            span.end(now_s, {**about, ERROR: failure.code})
        else:
            span.end(now_s, about, None if failure is None else (failure.code, failure.message))

    def _of_server(self, code: str) -> dict[str, str | int]:
        if self.frontend == "HTTP":
            return {HTTP_METHOD: "POST", HTTP_STATUS: http_status(code) if code else 200}
        if self.frontend == "GRPC":
            name = grpc_status(code) if code else "OK"
            method = getattr(self.inner, "rpc_method", "ModelInfer")
            about = {RPC_SYSTEM: "grpc", RPC_SERVICE: "inference.GRPCInferenceService", RPC_METHOD: method}
            return {**about, RPC_STATUS: GRPC_CODES.index(name)}
        return {}

    def _executed_s(self, timing: Timing) -> float:
        took_ns = timing.queue_ns + timing.input_ns + timing.infer_ns + timing.output_ns
        return self._queued_s() + took_ns / 1e9 + _ROUNDING_S

    def _queued_s(self) -> float:
        entry = None if self._pending is None else self._pending.entry
        return self._begin_s if entry is None else entry.enqueued_s

    def _add_trace(
        self, sampling: Sampling, request: OutgoingRequest, response: Response | None, end_s: float, now_s: float
    ) -> None:
        timing = None if response is None else response.timing
        calls = [] if response is None else [_trace_of(call, end_s) for call in response.called]
        sampling.add(_about(request), self._stamps(timing, end_s, now_s), self._tensors, calls)

    def _stamps(self, timing: Timing | None, end_s: float, sent_s: float) -> Stamps:
        """Returns ascending stamps, although two clocks differ."""
        begin_s, sink = self._begin_s, self.inner
        frontend = self.frontend
        received_s = read_s = begin_s
        if isinstance(sink, TracedCall):
            offset_s = self._clock.now_s() - time.monotonic()
            received_s, read_s = sink.received_s + offset_s, sink.read_s + offset_s
        receive = {"HTTP": "HTTP_RECV", "GRPC": "GRPC_WAITREAD"}.get(frontend, "")
        stamps = [(f"{receive}_START", received_s), (f"{receive}_END", read_s)] if receive else []
        stamps.append(("REQUEST_START", begin_s))
        if timing is not None:
            stamps += [*_computed(timing, self._queued_s()), ("INFER_RESPONSE_COMPLETE", end_s)]
        stamps.append(("REQUEST_END", end_s))
        if receive:
            stamps += [(f"{frontend}_SEND_START", end_s), (f"{frontend}_SEND_END", sent_s)]
        return _ascending(stamps, sent_s)


def _trace_of(call: CallRecord, last_s: float) -> CallTrace:
    stamps = [("REQUEST_START", call.begin_s)]
    if call.timing is not None:
        stamps += [*_computed(call.timing, call.begin_s), ("INFER_RESPONSE_COMPLETE", call.end_s)]
    ended_s = min(call.end_s, last_s)
    about: dict[str, object] = {"model_name": call.model[:_MOST_TEXT], "model_version": call.version}
    if call.client_id:
        about["request_id"] = call.client_id[:_MOST_TEXT]
    calls = [_trace_of(inner, ended_s) for inner in call.calls]
    return CallTrace(about, _ascending([*stamps, ("REQUEST_END", ended_s)], ended_s), called(call.tensors), calls)


def _about(request: OutgoingRequest) -> dict[str, str | int]:
    about: dict[str, str | int] = {"model_name": request.model[:_MOST_TEXT], "model_version": request.version}
    if request.client_id or request.id:
        about["request_id"] = (request.client_id or request.id)[:_MOST_TEXT]
    return about


def _computed(timing: Timing | None, queued_s: float) -> list[tuple[str, float]]:
    stamps = [("QUEUE_START", queued_s)]
    if timing is None:
        return stamps
    compute_s = queued_s + timing.queue_ns / 1e9
    for name, ns in (
        ("COMPUTE_START", 0),
        ("COMPUTE_INPUT_END", timing.input_ns),
        ("COMPUTE_OUTPUT_START", timing.infer_ns),
        ("COMPUTE_END", timing.output_ns),
    ):
        compute_s += ns / 1e9
        stamps.append((name, compute_s))
    return stamps


def _ascending(stamps: list[tuple[str, float]], last_s: float) -> Stamps:
    ordered, earliest_s = [], 0.0
    for name, instant_s in stamps:
        earliest_s = max(earliest_s, min(instant_s, last_s))
        ordered.append((name, int(earliest_s * 1e9)))
    return ordered
