"""How responses of an ensemble leave a worker: those that end in one turn of the event loop, together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, OutgoingRequest, Response
from qinfer.core.settings_sections import MetricsSettings
from qinfer.models.ensemble_graph import PlanStep, ResolvedModel, plan_ensemble
from qinfer.models.spec import EnsembleStep
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import from_numpy
from qinfer.testing import FakeClock, stub_spec
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher, NestedCounts, NoInstances, RunParts
from tests.support.timers import settle_loop

INPUT = from_numpy("x", np.zeros((1, 2), "<f4"))
OUTPUT = from_numpy("y", np.zeros((1, 2), "<f4"))


class Scene:
    """An ensemble of one step, the sinks of the steps of its requests, and what has left."""

    def __init__(self) -> None:
        made = plan_ensemble(
            replace(stub_spec("e"), steps=(EnsembleStep("m", 0, {"x": "x"}, {"y": "y"}),)),
            lambda _: ResolvedModel(stub_spec("m"), 1),
        )
        self.bug: Exception | None = None
        self.failures: list[str] = []
        self.cancelled = 0
        model = LoadedModel(spec=made.spec, version=1, generation=1, executor=NoInstances())
        parts = RunParts(ServerClock(FakeClock(1.0), 0.0), self, self, NestedCounts(MetricsSettings()), self._follow)
        self.sinks: list[ResponseSink] = []
        self.left: list[list[str]] = []
        self.is_taken = False
        self.batcher = EnsembleBatcher(model, made, parts, self)

    async def _follow(self) -> None:
        """Waits for nothing."""

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> "Scene":
        del step, request, timeout_s
        if self.bug is not None:
            raise self.bug
        self.sinks.append(sink)
        return self

    async def look_again(self) -> None:
        """Every model is ready."""

    def cancel(self) -> None:
        self.cancelled += 1

    def took(self, nbytes: int) -> None:
        raise AssertionError("no step is decoupled", nbytes)

    def publish_responses(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        assert [item.request.id for item in items] == [response.request_id for response in responses]
        self.left.append([response.request_id for response in responses])
        self.failures += [response.failure.message for response in responses if response.failure is not None]

    def give_back(self, items: Sequence[WorkItem]) -> None:
        raise AssertionError("nothing is given back", items)

    def delay(self, items: Sequence[WorkItem]) -> None:
        raise AssertionError("nothing is delayed", items)

    def send(self, request_id: str) -> WorkItem:
        """Has the ensemble begin a request."""
        request = InferRequest(model="e", id=request_id, reply_to="reply:g", inputs=(INPUT,))
        lease = Lease(Entry(Lane("e", 1), "1-0"), "", b"")
        item = WorkItem(rows=1, key=None, enqueued_s=0.0, deadline_s=9.0, lease=lease, request=request)
        self.batcher.add_items([item])
        return item

    def end(self, number: int) -> None:
        """Answers the step of a request."""
        self.sinks[number].deliver(Response(request_id="s", outputs=(OUTPUT,)))


async def test_what_ends_in_one_turn_leaves_together() -> None:
    scene = Scene()
    for request_id in "abc":
        scene.send(request_id)
    await settle_loop()

    scene.end(2)
    scene.end(0)
    await settle_loop()
    scene.end(1)
    await settle_loop()

    assert scene.left == [["c", "a"], ["b"]]


async def test_whoever_waits_until_it_is_idle_finds_all_responses_gone() -> None:
    scene = Scene()
    scene.send("a")
    await settle_loop()
    scene.end(0)

    await scene.batcher.pause_batching()

    assert scene.left == [["a"]]


async def test_a_bug_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    """A request that only waits for its deadline would hold its place."""
    scene = Scene()
    scene.bug = ValueError("a bug")
    scene.send("a")

    await scene.batcher.pause_batching()

    assert scene.failures == ["the ensemble failed; the worker's log says why"]
    assert "a bug" in caplog.text


async def test_a_lost_request_is_not_answered() -> None:
    scene = Scene()
    items = [scene.send(request_id) for request_id in "ab"]
    await settle_loop()

    scene.end(0)
    for item in items:
        scene.batcher.lost(item)
    await scene.batcher.pause_batching()
    await settle_loop()

    assert (scene.left, scene.cancelled) == ([], 2)
