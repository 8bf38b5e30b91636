"""OpenTelemetry traces behind a small port; only this module imports `opentelemetry`, once traces are enabled.

The standard environment variables enable traces (`is_wanted`); the SDK reads the other variables. A trace context is a
string: a W3C `traceparent`, then after a blank its `tracestate`, if any. Instants are on the broker's clock, so that
spans of several machines fit.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qinfer.errors import SettingsError

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as SdkSpan
    from opentelemetry.trace import SpanContext

GATEWAY, WORKER = "qinfer-gateway", "qinfer-worker"
"""Names of services; `OTEL_SERVICE_NAME` takes precedence."""

MODEL, VERSION, REQUEST_ID, JOB_ID, BATCH_ID, BATCH_SIZE, ATTEMPT, TENANT, ERROR = (
    "qinfer.model",
    "qinfer.version",
    "qinfer.request_id",
    "qinfer.job_id",
    "qinfer.batch_id",
    "qinfer.batch_size",
    "qinfer.attempt",
    "qinfer.tenant",
    "error.type",
)
HTTP_METHOD, HTTP_STATUS = "http.request.method", "http.response.status_code"
RPC_SYSTEM, RPC_SERVICE, RPC_METHOD, RPC_STATUS = "rpc.system", "rpc.service", "rpc.method", "rpc.grpc.status_code"
MESSAGING_SYSTEM, DESTINATION, OPERATION, MESSAGE_ID, MESSAGE_COUNT = (
    "messaging.system",
    "messaging.destination.name",
    "messaging.operation.type",
    "messaging.message.id",
    "messaging.batch.message_count",
)
"""The destination is a lane."""

CLOSE_S = 3.0
"""The time for the export of the last spans at the end."""

Attributes = Mapping[str, str | int]
_SWITCHES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_MOST_STATE = 512
_LENGTH = 55  # of a traceparent of version 00: 00-<32 digits>-<16 digits>-<2 digits>


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Tells whether the environment enables traces."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return any(environ.get(name, "").strip() for name in _SWITCHES)


def is_sampled(trace: str) -> bool:
    """Tells whether a valid `traceparent`'s trace is recorded."""
    return len(trace) >= _LENGTH and trace[2] == "-" and trace[52] == "-" and trace[54] in "13579bdf"


def context_text(parent: str | None, state: str | None) -> str:
    """Returns `traceparent` and `tracestate` as one text."""
    if not parent or not state or len(state) > _MOST_STATE or not state.isascii():
        return parent or ""
    return f"{parent} {state}"


def of_tenant(tenant: str) -> dict[str, str | int]:
    """Returns the attribute of a tenant, if any."""
    return {TENANT: tenant} if tenant else {}


def of_lane(model: str, version: int, lane: str, operation: str) -> dict[str, str | int]:
    """Returns the attributes of entries that a lane gets or gives (`send`, `receive`, `process`)."""
    return {MESSAGING_SYSTEM: "redis", DESTINATION: f"{model}/{version}/{lane}", OPERATION: operation}


def open_tracer(environ: Mapping[str, str], service: str, instance: str = "") -> "Tracer | None":
    """Returns the tracer; `None` without an import if tracing is off. Raises `SettingsError`."""
    if not is_wanted(environ):
        return None
    try:
        import opentelemetry.sdk.trace  # noqa: F401  fails where the extra is missing
    except ImportError:
        raise SettingsError(
            f"{_asking(environ)} asks for traces, and the packages for it are not installed; "
            "pip install 'qinfer-ml[tracing]', or set OTEL_SDK_DISABLED=true"
        ) from None
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    attributes = {} if named else {"service.name": service}
    if instance:
        attributes["service.instance.id"] = instance
    from opentelemetry.sdk.resources import Resource

    try:
        return Tracer(_processors(environ), Resource.create(attributes))
    except ValueError as error:
        raise SettingsError(
            f"a variable of OpenTelemetry (OTEL_…) can't be used: {error}; correct it, or set OTEL_SDK_DISABLED=true"
        ) from None


class Span:
    """A span; `trace` is the context of its children."""

    __slots__ = ("_span", "trace")

    def __init__(self, span: "SdkSpan", trace: str) -> None:
        self._span = span
        self.trace = trace

    @property
    def is_recorded(self) -> bool:
        """Tells whether the sampler chose the span."""
        return self._span.is_recording()

    def end(self, end_s: float, attributes: Attributes, error: tuple[str, str] | None = None) -> None:
        """Ends the span, perhaps with an error; once."""
        span = self._span
        if span.is_recording():
            span.set_attributes(attributes)
            if error is not None:
                from opentelemetry.trace import Status, StatusCode

                span.set_attribute(ERROR, error[0])
                span.set_status(Status(StatusCode.ERROR, error[1]))
        span.end(_ns(end_s))


class Tracer:
    """Makes the spans of one process."""

    def __init__(self, processors: "Sequence[SpanProcessor]", resource: "Resource | None" = None) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("qinfer")
        self._kinds = {
            "request": trace.SpanKind.SERVER,
            "accept": trace.SpanKind.PRODUCER,
            "batch": trace.SpanKind.CONSUMER,
        }
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, parent: str, begin_s: float, links: Sequence[str] = ()) -> Span:
        """Begins a span; without a valid `parent`, it has a trace of its own."""
        trace = self._api
        others = [context for link in links if (context := self._context(link)).is_valid]
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.NonRecordingSpan(self._context(parent))),
            kind=self._kinds.get(name, trace.SpanKind.INTERNAL),
            links=[trace.Link(other) for other in others],
            start_time=_ns(begin_s),
        )
        context = span.get_span_context()
        flags = context.trace_flags
        text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
        return Span(span, context_text(text, context.trace_state.to_header()))

    def close(self) -> None:
        """Exports the remaining spans within `CLOSE_S`; blocks."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def _context(self, text: str) -> "SpanContext":
        parent, _, state = text.partition(" ")
        found = self._propagator.extract({"traceparent": parent, "tracestate": state}) if text else None
        return self._api.get_current_span(found).get_span_context() if found else self._api.INVALID_SPAN_CONTEXT


def _processors(environ: Mapping[str, str]) -> "list[SpanProcessor]":
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    processors: list[SpanProcessor] = []
    for name in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        exporter = name.strip().lower()
        if exporter == "otlp":
            processors.append(BatchSpanProcessor(_otlp(environ)))
        elif exporter == "console":
            processors.append(BatchSpanProcessor(ConsoleSpanExporter()))
        else:
            raise SettingsError(
                f"OTEL_TRACES_EXPORTER={name.strip()[:100]} is not known here; use otlp, console or none"
            )
    return processors


def _otlp(environ: Mapping[str, str]) -> "OTLPSpanExporter":
    for variable in _PROTOCOLS:
        protocol = environ.get(variable, _PROTOCOL).strip()
        if protocol and protocol != _PROTOCOL:
            raise SettingsError(f"{variable}={protocol[:100]} is not supported; use {_PROTOCOL}, usually on port 4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SettingsError(
            f"{_asking(environ)} asks for traces over OTLP, but the exporter is not installed; "
            "pip install 'qinfer-ml[tracing]'"
        ) from None
    return OTLPSpanExporter()


def _asking(environ: Mapping[str, str]) -> str:
    return next(name for name in _SWITCHES if environ.get(name, "").strip())


def _ns(instant_s: float) -> int:
    return int(instant_s * 1e9)
