"""A collector of OpenTelemetry's traces, as a small HTTP server: takes OTLP over HTTP and keeps the spans."""

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from qinfer.testing import wait_until

WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One span: ids in hex, times in nanoseconds, links as (trace, span)."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: list[tuple[str, str]]
    attributes: dict[str, str | int]
    error: str
    begin_ns: int
    end_ns: int


@dataclass
class Collector:
    """See the module docstring; `url` is what OTEL_EXPORTER_OTLP_ENDPOINT takes."""

    url: str = ""
    spans: list[Seen] = field(default_factory=list)

    def of(self, trace: str, name: str = "") -> list[Seen]:
        """Returns the spans of one trace, of one name if it is given, in the order of their beginning."""
        found = [span for span in self.spans if span.trace == trace and name in ("", span.name)]
        return sorted(found, key=lambda span: span.begin_ns)

    def wait(self, trace: str, *names: str) -> dict[str, Seen]:
        """Waits for spans of one trace; returns the first of each name."""
        wait_until(lambda: all(self.of(trace, name) for name in names), WITHIN_S, f"{names} of {trace}")
        return {name: self.of(trace, name)[0] for name in names}

    def take(self, body: bytes) -> None:
        """Takes what an exporter sends."""
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = str(_attributes(group.resource.attributes)["service.name"])
            for scope in group.scope_spans:
                self.spans += [_seen(service, span) for span in scope.spans]


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Runs a collector on a free port of loopback."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _seen(service: str, span: WireSpan) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        attributes=_attributes(span.attributes),
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, str | int]:
    values = {pair.key: (pair.value.WhichOneof("value"), pair.value) for pair in pairs}
    return {
        key: value.int_value if kind == "int_value" else value.string_value for key, (kind, value) in values.items()
    }
