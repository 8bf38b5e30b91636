"""Traces through the whole server: OpenTelemetry's spans at a collector, and Triton's JSON files."""

import asyncio
import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.grpc

from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, running
from tests.support import models, python_models
from tests.support.servers.collector import Collector, Seen, running_collector

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

CLIENT_SPAN = "00f067aa0ba902b7"
QUESTION = {
    "inputs": [{"name": name, "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]} for name in ("a", "b")]
}
ROW = np.ones((1, 4), np.float32)
HTTP_ORDER = [
    "HTTP_RECV_START",
    "HTTP_RECV_END",
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "INFER_RESPONSE_COMPLETE",
    "REQUEST_END",
    "HTTP_SEND_START",
    "HTTP_SEND_END",
]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs may read and write."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def stack(collector: Collector, folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    models.add_sub(repository)
    models.add_sub(repository, "alone")
    models.add_sub(repository, "slow")
    config = repository / "slow" / "config.pbtxt"
    batching = "dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 1000000 }"
    config.write_text(re.sub(r"dynamic_batching *{[^}]*}", batching, config.read_text()))
    python_models.write_model(repository, python_models.execute("raise ValueError('boom')"), "raises")
    with running(
        repository,
        tmp_path_factory.mktemp("up"),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
        QINFER_TRACE__FILE=str(folder / "trace.json"),
        QINFER_STORES__ALLOW=json.dumps([data.as_uri()]),
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{stack.address}", timeout=30) as client:
        yield client


def traceparent(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}"}


def infer(client: httpx.Client, model: str = "add_sub", **headers: str) -> httpx.Response:
    return client.post(f"/v2/models/{model}/infer", json=QUESTION, headers=headers)


def test_a_request_is_one_trace(client: httpx.Client, collector: Collector) -> None:
    """From the client's span on: the gateway's, the wait, the batch, its execution, its publication."""
    trace = secrets.token_hex(16)

    assert infer(client, **traceparent(trace)).status_code == 200
    spans = collector.wait(trace, "request", "queue", "batch", "execute", "publish")

    request, queue, batch = spans["request"], spans["queue"], spans["batch"]
    assert (request.parent, queue.parent, batch.parent) == (CLIENT_SPAN, request.id, request.id)
    assert (spans["execute"].parent, spans["publish"].parent) == (batch.id, batch.id)
    assert (batch.links, queue.links) == ([(trace, request.id)], [(trace, batch.id)])
    assert request.service == "qinfer-gateway"
    assert {spans[name].service for name in ("queue", "batch", "execute", "publish")} == {"qinfer-worker"}
    assert queue.attributes["qinfer.request_id"] == request.attributes["qinfer.request_id"]
    assert queue.attributes["qinfer.attempt"] == request.attributes["qinfer.attempt"] == 1
    assert queue.attributes["qinfer.batch_id"] == batch.attributes["qinfer.batch_id"]
    assert batch.attributes["qinfer.batch_size"] == 1
    for span in spans.values():
        assert (span.attributes["qinfer.model"], span.attributes["qinfer.version"], span.error) == ("add_sub", 1, "")
        assert not [name for name in span.attributes if "tenant" in name]
    assert queue.begin_ns <= queue.end_ns <= batch.begin_ns <= batch.end_ns == spans["execute"].end_ns
    assert batch.end_ns <= request.end_ns


async def test_a_batch_is_linked_to_its_requests(stack: Stack, collector: Collector) -> None:
    """One span for both; it is part of the trace of one, and linked to both, as their waits are to it."""
    traces = [secrets.token_hex(16) for _ in range(2)]
    url = f"http://{stack.address}/v2/models/slow/infer"
    async with httpx.AsyncClient(timeout=30) as client:
        replies = await asyncio.gather(
            *(client.post(url, json=QUESTION, headers=traceparent(trace)) for trace in traces)
        )
    assert [reply.status_code for reply in replies] == [200, 200]

    waits = [(await asyncio.to_thread(collector.wait, trace, "request", "queue"))["queue"] for trace in traces]
    (batch,) = [span for trace in traces for span in collector.of(trace, "batch")]

    assert batch.attributes["qinfer.batch_size"] == batch.attributes["qinfer.requests"] == 2
    assert sorted(batch.links) == sorted((trace, collector.of(trace, "request")[0].id) for trace in traces)
    assert [wait.links for wait in waits] == [[(batch.trace, batch.id)]] * 2


def test_what_the_client_does_not_record_is_not_recorded(client: httpx.Client, collector: Collector) -> None:
    """The flags of its `traceparent` say so; a later request, which is, shows that everything had arrived."""
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)

    assert infer(client, **traceparent(unsampled, "00")).status_code == 200
    assert infer(client, **traceparent(sampled)).status_code == 200
    collector.wait(sampled, "request", "publish")

    assert collector.of(unsampled) == []


@pytest.mark.parametrize("header", [{}, {"traceparent": "00-nonsense-01"}])
def test_without_a_context_a_trace_begins_here(
    client: httpx.Client, collector: Collector, header: dict[str, str]
) -> None:
    """The gateway's span has no parent then; no other test asks this model, which tells the request's spans."""
    before = {span.trace for span in collector.spans}

    assert infer(client, "alone", **header).status_code == 200

    def seen() -> list[Seen]:
        mine = [span for span in collector.spans if span.attributes.get("qinfer.model") == "alone"]
        return [span for span in mine if span.name == "request" and span.trace not in before]

    wait_until(lambda: bool(seen()), 20, "a span of the request")
    (request,) = seen()
    assert request.parent == ""
    collector.wait(request.trace, "request", "publish")


def test_errors_are_told(client: httpx.Client, collector: Collector) -> None:
    """That of a model is the status of the batch, the execution and the request; a refusal is the request's alone."""
    raised, refused = secrets.token_hex(16), secrets.token_hex(16)
    question = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}

    assert client.post("/v2/models/raises/infer", json=question, headers=traceparent(raised)).status_code == 500
    assert client.post("/v2/models/add_sub/infer", json=question, headers=traceparent(refused)).status_code == 400

    spans = collector.wait(raised, "request", "queue", "batch", "execute", "publish")
    assert all("boom" in spans[name].error for name in ("request", "batch", "execute"))
    assert (spans["queue"].error, spans["publish"].error) == ("", "")
    assert spans["request"].attributes["error.type"] == "inference_failed"
    request = collector.wait(refused, "request")["request"]
    assert request.attributes["error.type"] == "invalid_request"
    assert [span.name for span in collector.of(refused)] == ["request"]


def test_grpc_metadata_carries_the_context(stack: Stack, collector: Collector) -> None:
    """As the HTTP header does."""
    trace = secrets.token_hex(16)
    inputs = [tritonclient.grpc.InferInput(name, [1, 4], "FP32") for name in ("a", "b")]
    for tensor in inputs:
        tensor.set_data_from_numpy(ROW)
    with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as client:
        client.infer("add_sub", inputs, headers=traceparent(trace))

    spans = collector.wait(trace, "request", "publish")
    assert spans["request"].parent == CLIENT_SPAN


def test_an_asynchronous_request_keeps_its_context(client: httpx.Client, collector: Collector) -> None:
    """The gateway's span is that of its acceptance; its execution is part of the same trace."""
    trace = secrets.token_hex(16)

    accepted = client.post("/v1/models/add_sub/requests", json=QUESTION, headers=traceparent(trace))
    assert accepted.status_code == 202

    spans = collector.wait(trace, "accept", "queue", "batch", "publish")
    assert (spans["accept"].parent, spans["queue"].parent) == (CLIENT_SPAN, spans["accept"].id)
    assert accepted.json()["id"] == spans["queue"].attributes["qinfer.request_id"]


def test_a_job_s_shards_are_part_of_its_trace(client: httpx.Client, collector: Collector, data: Path) -> None:
    """From the client's span on: its acceptance, and each execution of a shard by a worker."""
    trace = secrets.token_hex(16)
    rows = pa.array([[1.0, 2.0, 3.0, 4.0]] * 5, pa.list_(pa.float32(), 4))
    pq.write_table(pa.table({"a": rows, "b": rows}), data / "in.parquet")
    job = {
        "model": "add_sub",
        "inputs": [(data / "in.parquet").as_uri()],
        "output": {"url": (data / "out").as_uri()},
    }

    created = client.post("/v1/jobs", json=job, headers=traceparent(trace))
    assert created.status_code == 201, created.text
    spans = collector.wait(trace, "accept", "shard")

    accept, shard = spans["accept"], spans["shard"]
    assert (accept.parent, shard.parent, shard.error) == (CLIENT_SPAN, accept.id, "")
    assert (accept.service, shard.service) == ("qinfer-gateway", "qinfer-worker")
    assert accept.attributes["qinfer.job_id"] == shard.attributes["qinfer.job_id"] == created.json()["id"]
    told = {name: shard.attributes[f"qinfer.{name}"] for name in ("model", "version", "attempt")}
    assert told == {"model": "add_sub", "version": 1, "attempt": 1}
    told = {name: shard.attributes[f"qinfer.{name}"] for name in ("shard", "rows", "failed_rows")}
    assert told == {"shard": 0, "rows": 5, "failed_rows": 0}


def set_trace(client: httpx.Client, **settings: Any) -> dict[str, Any]:
    reply = client.post("/v2/trace/setting", json=settings)
    assert reply.status_code == 200, reply.text
    shown: dict[str, Any] = reply.json()
    return shown


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the traces of a file, each with its timestamps by name."""
    wait_until(path.exists, 20, str(path))
    traces: dict[int, dict[str, Any]] = {}
    for part in json.loads(path.read_text()):
        trace = traces.setdefault(part["id"], {"timestamps": {}})
        stamps = {stamp["name"]: stamp["ns"] for stamp in part.get("timestamps", ())}
        trace.update({name: value for name, value in part.items() if name != "timestamps"})
        trace["timestamps"].update(stamps)
    return list(traces.values())


def test_tritons_traces(client: httpx.Client, stack: Stack, folder: Path) -> None:
    """Every second of seven requests, two a file, three at most; the settings tell how many are left."""
    file = folder / "trace.json"
    shown = set_trace(client, trace_level=["TIMESTAMPS"], trace_rate="2", trace_count="3", log_frequency="2")
    assert (shown["trace_file"], shown["trace_mode"], shown["trace_count"]) == ("trace.json", "triton", "3")

    for number in range(9):
        body = {**QUESTION, "id": f"mine-{number}"}
        assert client.post("/v2/models/add_sub/infer", json=body).status_code == 200

    first, second = read(Path(f"{file}.0")), read(Path(f"{file}.1"))
    assert [trace["request_id"] for trace in (*first, *second)] == ["mine-1", "mine-3", "mine-5"]
    for trace in (*first, *second):
        assert (trace["model_name"], trace["model_version"]) == ("add_sub", 1)
        assert list(trace["timestamps"]) == HTTP_ORDER
        assert list(trace["timestamps"].values()) == sorted(trace["timestamps"].values())
    assert client.get("/v2/trace/setting").json()["trace_count"] == "0"

    # A model's own settings, over gRPC; what is collected is written when they change.
    with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as rpc:
        own = {"trace_rate": "1", "trace_count": "-1", "log_frequency": "0"}
        rpc.update_trace_settings("slow", own)
        assert infer(client).status_code == 200
        inputs = [tritonclient.grpc.InferInput(name, [1, 4], "FP32") for name in ("a", "b")]
        for tensor in inputs:
            tensor.set_data_from_numpy(ROW)
        rpc.infer("slow", inputs)
        assert not file.exists()
        rpc.update_trace_settings("slow", dict.fromkeys(own))
    (trace,) = read(file)
    assert (trace["model_name"], next(iter(trace["timestamps"]))) == ("slow", "GRPC_WAITREAD_START")

    set_trace(client, trace_level=["OFF"])
    assert infer(client).status_code == 200
    assert sorted(path.name for path in folder.iterdir()) == ["trace.json", "trace.json.0", "trace.json.1"]
