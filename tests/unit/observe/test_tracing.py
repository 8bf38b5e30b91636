"""The port to OpenTelemetry: when traces are wanted, what is refused, and what a span says."""

import os
import re
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from qinfer.errors import SettingsError
from qinfer.observe.tracing import ERROR, GATEWAY, Tracer, context_text, is_sampled, is_wanted, open_tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Tracer:
    return Tracer([SimpleSpanProcessor(spans)])


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_standard_variables_switch_it_on(environ: dict[str, str], *, wanted: bool) -> None:
    """As the specification of OpenTelemetry has them."""
    assert is_wanted(environ) is wanted
    if not wanted:
        assert open_tracer(environ, GATEWAY) is None


@pytest.mark.parametrize(
    ("trace", "sampled"),
    [(SAMPLED, True), (UNSAMPLED, False), ("", False), ("01", False), ("x" * 55, False), (f"{SAMPLED}-more", True)],
)
def test_the_flags_tell_whether_a_trace_is_recorded(trace: str, *, sampled: bool) -> None:
    """What is no `traceparent` is none."""
    assert is_sampled(trace) is sampled


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """With the extra that has them, and what asked for them."""
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT asks .* pip install 'qinfer-ml\[tracing\]'"):
        open_tracer(ENDPOINT, GATEWAY)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER=zipkin is not known here; use otlp, console or none",
        ),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported; use http/protobuf",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "_TRACES_PROTOCOL=http/json is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_at_the_start(variables: dict[str, str], text: str) -> None:
    """Not noticed hours later, when nothing has arrived."""
    with pytest.raises(SettingsError, match=text):
        open_tracer({**ENDPOINT, **variables}, GATEWAY)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "-3", r"OTEL_SPAN_LINK_COUNT_LIMIT must be .* OTEL_SDK_DISABLED"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10", r"OTEL_….* must be less than or equal to max_queue_size"),
    ],
)
def test_what_the_sdk_refuses_is_told(monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str) -> None:
    """With what to do, and not as a crash."""
    for variable, given in (ENDPOINT | {name: value}).items():
        monkeypatch.setenv(variable, given)

    with pytest.raises(SettingsError, match=text):
        open_tracer(os.environ, GATEWAY)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, GATEWAY),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=a,service.name=ours"}, "ours"),
    ],
)
def test_a_service_has_a_name(
    monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter, variables: dict[str, str], name: str
) -> None:
    """Its own, unless the environment has another."""
    monkeypatch.setattr("qinfer.observe.tracing._processors", lambda _: [SimpleSpanProcessor(spans)])
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)

    tracer = open_tracer({**os.environ, **ENDPOINT}, GATEWAY, "gateway-1")
    assert tracer is not None
    tracer.start("request", "", 1.0).end(2.0, {})

    (span,) = spans.get_finished_spans()
    assert (span.resource.attributes["service.name"], span.resource.attributes["service.instance.id"]) == (
        name,
        "gateway-1",
    )


def test_a_span_goes_on_with_its_parents_trace(tracer: Tracer, spans: InMemorySpanExporter) -> None:
    """Its own context is what it hands on; links that can't be read are left out."""
    span = tracer.start("request", SAMPLED, 1.5, links=(SAMPLED, "nonsense"))
    span.end(2.5, {"qinfer.model": "m"})
    span.end(9.5, {})

    (ended,) = spans.get_finished_spans()
    assert ended.context is not None
    assert ended.parent is not None
    assert span.trace == f"00-{TRACE}-{ended.context.span_id:016x}-01"
    assert (f"{ended.parent.span_id:016x}", [f"{link.context.span_id:016x}" for link in ended.links]) == (
        PARENT,
        [PARENT],
    )
    assert (ended.start_time, ended.end_time) == (1_500_000_000, 2_500_000_000)
    assert (ended.kind, ended.attributes, ended.status.status_code) == (
        SpanKind.SERVER,
        {"qinfer.model": "m"},
        StatusCode.UNSET,
    )


def test_the_state_of_a_trace_goes_along(tracer: Tracer) -> None:
    """Of what a vendor has put there; what is too long, or no state, is left out."""
    kept = tracer.start("request", context_text(SAMPLED, "vendor=1,other=2"), 1.0)
    child = tracer.start("queue", kept.trace, 1.0)

    assert kept.trace.partition(" ")[2] == child.trace.partition(" ")[2] == "vendor=1,other=2"
    assert is_sampled(child.trace)
    assert [context_text(SAMPLED, state) for state in (None, "", "v=" + "x" * 511, "v=ä")] == [SAMPLED] * 4
    assert context_text(None, "vendor=1") == ""


def test_an_error_is_a_spans_status(tracer: Tracer, spans: InMemorySpanExporter) -> None:
    """Its code is an attribute, its text the description."""
    tracer.start("execute", "", 1.0).end(2.0, {}, ("inference_failed", "boom"))

    (span,) = spans.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "boom")
    assert span.attributes == {ERROR: "inference_failed"}


@pytest.mark.parametrize(
    ("sampler", "parent", "recorded"),
    [
        ("parentbased_always_on", UNSAMPLED, False),
        ("parentbased_always_on", "", True),
        ("parentbased_always_off", SAMPLED, True),
        ("always_off", SAMPLED, False),
        ("always_on", UNSAMPLED, True),
    ],
)
def test_the_sampler_is_the_environments(
    monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter, sampler: str, parent: str, *, recorded: bool
) -> None:
    """What it decides is what is handed on."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)

    span = Tracer([SimpleSpanProcessor(spans)]).start("request", parent, 1.0)
    span.end(2.0, {})

    assert (span.is_recorded, is_sampled(span.trace), len(spans.get_finished_spans())) == (False, recorded, recorded)


def test_only_one_module_knows_opentelemetry() -> None:
    """And it imports it where it is used: only types are taken at its top."""
    root = Path(__file__).resolve().parents[3]
    files = [path for folder in ("qinfer", "api", "workers") for path in (root / folder).rglob("*.py")]

    knowing = [path for path in files if re.search(r"^\s*(from|import) opentelemetry", path.read_text(), re.MULTILINE)]

    assert [str(path.relative_to(root)) for path in knowing] == ["qinfer/observe/tracing.py"]
    assert not re.search(r"^(from|import) opentelemetry", knowing[0].read_text(), re.MULTILINE)
