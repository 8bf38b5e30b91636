"""The spans of ensembles, from a gateway's request to the batches of the steps' models."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qinfer.observe.tracing import ERROR, MODEL, Tracer
from qinfer.testing import eventually
from qinfer_workers.inference.tracing import Spans
from tests.support import python_models
from tests.support.ensembles import ROW, EnsemblesServed, chain, ensembles_served, scale

pytestmark = pytest.mark.timeout(60)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": ROW}]}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EnsemblesServed]:
    """Yields `outer`: `inner`, which is `twice` and `thrice`, then `twice`; and `bad`, whose second step fails."""
    repository = tmp_path / "repository"
    scale(repository, "twice", 2.0)
    scale(repository, "thrice", 3.0)
    chain(repository, "inner", "twice", "thrice")
    chain(repository, "outer", "inner", "twice")
    python_models.write_model(repository, python_models.execute("raise ValueError('boom')"), "raises", dims="2")
    chain(repository, "bad", "twice", "raises")
    async with ensembles_served(repository) as one:
        yield one


class Recorded:
    """The spans of a worker."""

    def __init__(self) -> None:
        self._made = InMemorySpanExporter()
        self.tracer = Tracer([SimpleSpanProcessor(self._made)])

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._made.get_finished_spans()

    def tree(self, parent: int) -> dict[str, object]:
        """Returns what is beneath a span: `name model` → the same of that, those of the same name as one."""
        found: dict[str, object] = {}
        for span in self.spans:
            if span.parent is not None and span.parent.span_id == parent and span.context is not None:
                found[f"{span.name} {(span.attributes or {})[MODEL]!s}"] = self.tree(span.context.span_id)
        return found


async def served(scene: EnsemblesServed) -> Recorded:
    """Starts a worker that records spans."""
    recorded = Recorded()
    await scene.sync()
    worker = await scene.worker()
    worker.spans = Spans(recorded.tracer, worker._queue.clock)
    await scene.ready()
    return recorded


def batch(model: str) -> dict[str, object]:
    return {f"queue {model}": {}, f"batch {model}": {f"execute {model}": {}}}


async def test_ensembles_and_their_steps_have_spans(scene: EnsemblesServed) -> None:
    """Each step beneath its ensemble, each ensemble beneath the one that it is a step of; batches beneath steps."""
    recorded = await served(scene)

    reply = await scene.client.post("/v2/models/outer/infer", json=BODY, headers={"traceparent": TRACEPARENT})

    assert reply.status_code == 200, reply.text
    await eventually(lambda: any(span.name == "publish" for span in recorded.spans), description="the last span")
    inner = {"step twice": batch("twice"), "step thrice": batch("thrice")}
    assert recorded.tree(0x00F067AA0BA902B7) == {
        "queue outer": {},
        "ensemble outer": {"ensemble inner": inner, "step twice": batch("twice"), "publish outer": {}},
    }


async def test_the_span_of_a_step_that_fails_says_why(scene: EnsemblesServed) -> None:
    recorded = await served(scene)

    reply = await scene.client.post("/v2/models/bad/infer", json=BODY, headers={"traceparent": TRACEPARENT})

    assert reply.status_code == 500, reply.text
    await eventually(lambda: any(span.name == "publish" for span in recorded.spans), description="the last span")
    failed = {
        (span.name, (span.attributes or {})[MODEL]): (span.attributes or {})[ERROR]
        for span in recorded.spans
        if span.name in ("step", "ensemble") and ERROR in (span.attributes or {})
    }
    assert failed == {("step", "raises"): "inference_failed", ("ensemble", "bad"): "inference_failed"}


async def test_requests_that_nobody_records_make_no_spans(scene: EnsemblesServed) -> None:
    recorded = await served(scene)

    await scene.infer("outer")

    assert recorded.spans == ()
