"""A gateway that traces: every way into it and every end of a request."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from qinfer.core.settings_sections import TraceSettings
from qinfer.errors import Overloaded
from qinfer.testing import eventually
from qinfer_api.observe.tracing import TracedSink
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.rpc import infer_request, stub_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
QUESTION = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
ON = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
AROUND = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]


class Scene:
    """A gateway that makes both kinds of traces, and what it made."""

    def __init__(self, running: Running, made: InMemorySpanExporter, file: Path) -> None:
        self.running = running
        self._made, self._file = made, file

    def clear(self) -> None:
        """Forgets what was made so far."""
        self._made.clear()
        self.running.requests.clear()
        for path in self._file.parent.iterdir():
            path.unlink(missing_ok=True)  # one that is being written has two names for a moment

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._made.get_finished_spans())

    async def span(self) -> ReadableSpan:
        """Waits for the first span."""
        await eventually(lambda: bool(self.spans))
        return self.spans[0]

    def files(self) -> list[list[dict[str, Any]]]:
        return [json.loads(path.read_text()) for path in sorted(self._file.parent.glob(f"{self._file.name}*"))]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    made, file = InMemorySpanExporter(), tmp_path_factory.mktemp("traces") / "trace.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        patch.setattr("qinfer.observe.tracing._processors", lambda _: [SimpleSpanProcessor(made)])
        settings = settings_of(limits={"default_timeout_s": 30.0}, grpc={})
        async with running_gateway(settings.model_copy(update={"trace": TraceSettings(file=str(file))})) as running:
            yield Scene(running, made, file)


@pytest.fixture
def scene(whole: Scene) -> Scene:
    whole.clear()
    return whole


@pytest_asyncio.fixture(loop_scope="module")
async def client(scene: Scene) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scene.running.url, headers=HEADER) as client:
        yield client


def error_of(span: ReadableSpan) -> object:
    return (span.attributes or {}).get("error.type")


async def _chunked() -> AsyncIterator[bytes]:
    yield json.dumps(QUESTION).encode()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v2/models/echo/infer", lambda: json.dumps(QUESTION).encode()),
        ("/v2/models/echo/infer", _chunked),
        ("/v2/models/echo/generate", lambda: b'{"x": [1, 2, 3, 4]}'),
    ],
)
async def test_every_way_in_is_traced(
    scene: Scene, client: httpx.AsyncClient, path: str, content: Callable[[], Any]
) -> None:
    """The fast path, the other one, and those of extensions; the frame carries the gateway's own context."""
    await client.post("/v2/trace/setting", json=ON)

    assert (await client.post(path, content=content(), headers={"tracestate": "vendor=1"})).status_code == 200

    span = await scene.span()
    assert span.parent is not None
    assert span.context is not None
    assert (f"{span.parent.span_id:016x}", f"{span.context.trace_id:032x}") == (PARENT, TRACE)
    (request,) = scene.running.requests
    assert request.trace == f"00-{TRACE}-{span.context.span_id:016x}-01 vendor=1"
    assert span.context.trace_state.to_header() == "vendor=1"
    about = span.attributes or {}
    assert about["qinfer.request_id"] == request.id
    assert "qinfer.tenant" not in about  # nobody has a key
    assert (about["http.request.method"], about["http.response.status_code"]) == ("POST", 200)
    await eventually(lambda: len(scene.files()) == 1)
    ((_, stamps),) = scene.files()
    assert [stamp["name"] for stamp in stamps["timestamps"]] == AROUND


async def test_a_recorded_request_is_an_exemplar_of_its_latency(scene: Scene, client: httpx.AsyncClient) -> None:
    """Its trace is found from the metrics, by those who take OpenMetrics; a failed request has no latency."""
    assert (await client.post("/v2/models/echo/infer", json=QUESTION)).status_code == 200
    await scene.span()

    page = await client.get("/metrics?scope=process", headers={"Accept": "application/openmetrics-text"})
    text = await client.get("/metrics?scope=process")

    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert f'# {{trace_id="{TRACE}"}}' in page.text
    assert "trace_id" not in text.text


async def test_tensors_of_requests_and_responses(scene: Scene, client: httpx.AsyncClient) -> None:
    """As Triton writes them, with the activities or without."""
    expected = [
        {"activity": activity, "tensor": {"name": name, "data": "1.0,2.0,3.0,4.0", "shape": "1,4", "dtype": "FP32"}}
        for activity, name in (("TENSOR_QUEUE_INPUT", "x"), ("TENSOR_BACKEND_OUTPUT", "y"))
    ]
    for levels, stamps in ((["TENSORS"], 0), (["TIMESTAMPS", "TENSORS"], 1)):
        shown = await client.post("/v2/trace/setting", json={**ON, "trace_level": levels})
        assert shown.json()["trace_level"] == levels

        assert (await client.post("/v2/models/echo/infer", json=QUESTION)).status_code == 200

        await eventually(lambda: len(scene.files()) == 1)
        ((about, *parts),) = scene.files()
        assert about["model_name"] == "echo"
        assert ["timestamps" in part for part in parts] == [True] * stamps + [False, False]
        assert parts[stamps:] == [{"id": about["id"], **part} for part in expected]
        scene.clear()


async def test_stored_requests_are_traced_when_they_have_ended(scene: Scene, client: httpx.AsyncClient) -> None:
    """By the gateway that accepted them, with their tensors."""
    await client.post("/v2/trace/setting", json={**ON, "trace_level": ["TIMESTAMPS", "TENSORS"]})

    reply = await client.post("/v1/models/echo/requests", json={**QUESTION, "id": "mine"})

    assert reply.status_code == 202
    await eventually(lambda: len(scene.files()) == 1)
    ((about, stamps, *tensors),) = scene.files()
    assert (about["model_name"], about["model_version"], about["request_id"]) == ("echo", 2, "mine")
    names = [stamp["name"] for stamp in stamps["timestamps"]]
    assert (names[:2], names[-1]) == (["REQUEST_START", "QUEUE_START"], "REQUEST_END")
    times = [stamp["ns"] for stamp in stamps["timestamps"]]
    assert times == sorted(times)
    assert [part["activity"] for part in tensors] == ["TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"]


async def test_a_stored_request_that_is_repeated_counts_once(scene: Scene, client: httpx.AsyncClient) -> None:
    await client.post("/v2/trace/setting", json={**ON, "trace_count": "5"})

    for _ in range(2):
        reply = await client.post("/v1/models/echo/requests", json=QUESTION, headers={"Idempotency-Key": "mine"})
        assert reply.status_code in (200, 202)

    assert (await client.get("/v2/trace/setting")).json()["trace_count"] == "4"
    await eventually(lambda: not scene.running.gateway._tracing.following, description="the end of the stored request")


async def test_several_headers_tracestate_are_one_list(scene: Scene, client: httpx.AsyncClient) -> None:
    """As W3C has it; over gRPC, too."""
    twice = [("tracestate", "one=1"), ("tracestate", "two=2")]
    async with grpc.aio.insecure_channel(scene.running.grpc_target) as channel:
        await client.post("/v2/models/echo/infer", json=QUESTION, headers=[*HEADER.items(), *twice])
        await stub_of(channel).ModelInfer(infer_request(), metadata=(*HEADER.items(), *twice))

    states = [span.context.trace_state.to_header() for span in scene.spans if span.context is not None]
    assert states == ["one=1,two=2"] * 2


async def test_refusals_are_errors(scene: Scene, client: httpx.AsyncClient) -> None:
    """They never came into the queue; what is the client's own fault is no error of a server's span."""
    await client.post("/v2/trace/setting", json={"trace_level": ["OFF"]})
    wrong = {"inputs": [{"name": "z", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    assert (await client.post("/v2/models/echo/infer", json=wrong)).status_code == 400
    assert (await client.post("/v2/models/nothing/infer", json=QUESTION)).status_code == 404

    assert [error_of(span) for span in scene.spans] == ["invalid_request", "model_not_found"]
    assert {span.status.status_code for span in scene.spans} == {StatusCode.UNSET}


@pytest.mark.usefixtures("collected")
async def test_a_caller_who_leaves_ends_the_traces(scene: Scene, client: httpx.AsyncClient) -> None:
    """As cancelled; nothing is left behind for the garbage collector."""
    await client.post("/v2/trace/setting", json=ON)
    asked = asyncio.ensure_future(client.post("/v2/models/stuck/infer", json=QUESTION))
    await eventually(lambda: scene.running.gateway.dispatcher.in_flight == 1)
    gc.collect()
    gc.disable()
    try:
        asked.cancel()
        assert error_of(await scene.span()) == "cancelled"
        await eventually(lambda: len(scene.files()) == 1)
        left = [one for one in gc.get_objects() if type(one) is TracedSink]  # isinstance asks the objects
    finally:
        gc.enable()

    assert left == []
    ((about, stamps),) = scene.files()
    assert (about["model_name"], [stamp["name"] for stamp in stamps["timestamps"]]) == ("stuck", AROUND)


async def test_failures_and_ends_of_the_gateway(scene: Scene, client: httpx.AsyncClient) -> None:
    """What a worker answers, and what waits when the gateway gives up."""
    await client.post("/v2/trace/setting", json={"trace_level": ["OFF"]})
    assert (await client.post("/v2/models/fails/infer", json=QUESTION)).status_code == 500
    asked = asyncio.ensure_future(client.post("/v2/models/stuck/infer", json=QUESTION))
    await eventually(lambda: scene.running.gateway.dispatcher.in_flight == 1)
    scene.running.gateway.dispatcher.submission.pending.fail_all(Overloaded("Server exiting"))

    assert (await asked).status_code == 503
    assert [error_of(span) for span in scene.spans] == ["inference_failed", Overloaded.code]
    assert {span.status.status_code for span in scene.spans} == {StatusCode.ERROR}


async def test_what_a_client_sends_is_kept_short(scene: Scene, client: httpx.AsyncClient) -> None:
    """Thousands of traces are held before they are written; ids and the names of unknown models may be long."""
    await client.post("/v2/trace/setting", json=ON)
    body = QUESTION | {"id": "i" * 5000}

    assert (await client.post("/v2/models/echo/infer", json=body)).status_code == 200
    assert (await client.post(f"/v2/models/{'m' * 300}/infer", json=QUESTION)).status_code == 404

    await eventually(lambda: len(scene.files()) == 2)
    (known, _), (unknown, _) = sorted(scene.files(), key=lambda traces: traces[0]["id"])
    assert known["request_id"] == "i" * 256
    assert unknown["model_name"] == "m" * 256
    assert len(str((scene.spans[1].attributes or {})["qinfer.model"])) == 256


@pytest.mark.parametrize(
    "broken",
    [
        "qinfer.observe.tracing.Tracer.start",
        "qinfer.observe.tracing.Span.end",
        "qinfer_api.observe.trace_file.TraceFile.sample",
        "qinfer_api.observe.trace_file.Sampling.add",
    ],
)
async def test_what_can_not_be_traced_is_served(
    scene: Scene, client: httpx.AsyncClient, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, refusals and asynchronous requests are what they are without traces, whatever part of these breaks."""
    await client.post("/v2/trace/setting", json=ON)
    asked = 0

    def boom(*_: object, **__: object) -> None:
        nonlocal asked
        asked += 1
        raise RuntimeError("it can't be traced")

    monkeypatch.setattr(broken, boom)

    assert (await client.post("/v2/models/echo/infer", json=QUESTION)).status_code == 200
    assert (await client.post("/v2/models/nothing/infer", json=QUESTION)).status_code == 404
    assert asked == 2
    apart = await client.post("/v2/models/echo/infer", json=QUESTION, headers={"Prefer": "respond-async"})
    assert apart.status_code == 202
    await eventually(lambda: not scene.running.gateway._tracing.following, description="the end of the stored request")
    await eventually(lambda: len(scene.files()) == (0 if "trace_file" in broken else 3))
