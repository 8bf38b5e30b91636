"""Ensembles with decoupled steps over HTTP and gRPC: a gateway, workers with real models, a real Redis."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb

from qinfer.backends import registry
from qinfer.backends.base import BackendFactory, Batch, Context
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.tensors import from_numpy
from qinfer.testing import eventually
from tests.support.ensembles import EnsemblesServed, add, chain, ensemble, ensembles_served, scale
from tests.support.streaming_backend import DECOUPLED, ENDLESS, RESUMES, StreamingBackend

pytestmark = pytest.mark.timeout(60)

WIDTH = 5000
"""Elements of a row of `Pouring`: 20,000 bytes."""
RESUMING = RESUMES.removeprefix(DECOUPLED)


class Pouring(StreamingBackend):
    """Sends rows as fast as its window lets it, each full of its own number."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        if not ctx.is_decoupled:
            super().execute(batch, ctx)
            return
        for item in range(len(batch.requests)):
            threading.Thread(target=self._pour, args=(ctx, item, batch.requests[item].inputs[0]), daemon=True).start()

    def _pour(self, ctx: Context, item: int, count: Any) -> None:
        try:
            for index in range(int(np.frombuffer(count.data, "<f4")[0])):
                ctx.respond(item, (from_numpy("y", np.full((1, WIDTH), index, "<f4")),), final=False)
                self.sent += 1
            ctx.respond(item, ())
        except QinferError as error:
            self.errors.append(error)


class Streams:
    """Ensembles with decoupled steps, whose instances the tests lead.

    Attributes:
        scene: Gateway and workers.
        backend: What executes the decoupled models of workers that start from now on.
    """

    def __init__(self, scene: EnsemblesServed) -> None:
        self.scene = scene
        self.backend: type[StreamingBackend] = StreamingBackend
        self._made: list[StreamingBackend] = []
        scene.factory = self._factory

    def _factory(self, name: str) -> BackendFactory:
        return self._make if name == "stub" else registry.factory(name)

    def _make(self) -> StreamingBackend:
        self._made.append(self.backend())
        return self._made[-1]

    def source(self, name: str = "source") -> StreamingBackend:
        """Returns the instance of a decoupled model that was loaded last."""
        return [one for one in self._made if one.model == name][-1]

    async def start(self, *names: str, **options: Any) -> None:
        """Starts a worker with all models, and waits until some are ready."""
        await self.scene.sync()
        await self.scene.worker(**options)
        await self.scene.ready(*names)

    async def events(self, model: str, *x: float) -> AsyncGenerator[Any, None]:
        """Asks for responses over HTTP, and gives them as they come."""
        async with self.scene.client.stream("POST", f"/v2/models/{model}/generate_stream", json={"x": x}) as reply:
            async for line in reply.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

    async def values(self, model: str, *x: float) -> list[float]:
        return [event["y"][0] async for event in self.events(model, *x)]

    async def call(self, *models: str, x: tuple[float, ...]) -> Any:
        """Asks for responses over gRPC; returns the call."""
        call = self.scene.stub.ModelStreamInfer()
        for model in models:
            request = pb.ModelInferRequest(model_name=model, id=model)
            request.inputs.add(name="x", datatype="FP32", shape=[1, len(x)])
            request.raw_input_contents.append(np.array([x], "<f4").tobytes())
            request.parameters["triton_enable_empty_final_response"].bool_param = True
            await call.write(request)
        return call

    async def is_idle(self) -> bool:
        depths = [await self.scene.depth(name) for name in ("line", "source")]
        return self.scene.gateway.dispatcher.in_flight == 0 and depths == [0, 0]


def source(repository: Path, name: str = "source", *, width: int = 2, more: str = DECOUPLED) -> str:
    """Writes a decoupled model; its responses are numbered."""
    (repository / name / "1").mkdir(parents=True)
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_FP32 '
    text = f'name: "{name}" backend: "stub" max_batch_size: 8 {tensors} dims: [ {width} ] }} {more}'
    (repository / name / "config.pbtxt").write_text(text)
    return name


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a repository with an ensemble `line`: once, source, then twice and thrice side by side, and their sum."""
    path = tmp_path / "repository"
    for name, factor in (("once", 1.0), ("twice", 2.0), ("thrice", 3.0)):
        scale(path, name, factor)
    add(path)
    source(path)
    branches = ("twice", {"x": "n"}, {"y": "l"}), ("thrice", {"x": "n"}, {"y": "r"})
    steps = ("once", {"x": "x"}, {"y": "asked"}), ("source", {"x": "asked"}, {"y": "n"}), *branches
    ensemble(path, "line", *steps, ("add", {"a": "l", "b": "r"}, {"y": "y"}))
    return path


@pytest.fixture
async def streams(repository: Path) -> AsyncIterator[Streams]:
    async with ensembles_served(repository) as scene:
        yield Streams(scene)


async def test_responses_over_http(streams: Streams) -> None:
    """Each response of the decoupled step is one of the ensemble, in order, for many callers at once."""
    await streams.start()
    streams.source().let(1000)

    values = await asyncio.gather(*[streams.values("line", count, 0) for count in range(20)])

    assert values == [[5.0 * index for index in range(count)] for count in range(20)]
    await eventually(streams.is_idle, description="nothing is left")


async def test_responses_over_grpc(streams: Streams) -> None:
    """As they come, and the final one tells that there are no more."""
    await streams.start()
    call = await streams.call("line", x=(3, 0))
    replies = []
    for _ in range(4):
        streams.source().let(1)
        replies.append((await call.read()).infer_response)
    call.cancel()

    assert [InferResult(reply).as_numpy("y").tolist() for reply in replies[:3]] == [[[5.0 * i] * 2] for i in range(3)]
    finals = [reply.parameters["triton_final_response"].bool_param for reply in replies]
    assert (finals, len(replies[3].outputs)) == ([False, False, False, True], 0)


async def test_each_response_is_reshaped(streams: Streams) -> None:
    path = streams.scene.repository
    scale(path, "box", 2.0, width=(2, 1))
    inner = ensemble(path, "boxed", ("box", {"x": "x"}, {"y": "y"}), reshape=(2, 1))
    steps = ("source", {"x": "x"}, {"y": "n"}), (inner, {"x": "n"}, {"y": "y"})
    ensemble(path, "boxes", *steps, width=(1, 2, 1), reshape=2)
    await streams.start("boxes")
    streams.source().let(10)

    call = streams.scene.stub.ModelStreamInfer()
    request = pb.ModelInferRequest(model_name="boxes", raw_input_contents=[np.array([3, 0], "<f4").tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1, 2, 1])
    await call.write(request)
    answers = [InferResult((await call.read()).infer_response).as_numpy("y") for _ in range(3)]
    call.cancel()

    assert [answer.tolist() for answer in answers] == [[[[[2.0 * i]] * 2]] for i in range(3)]


async def test_an_ensemble_is_decoupled_for_its_callers(streams: Streams) -> None:
    """Though its configuration does not say so: routes of one response refuse it, and its metadata tell why."""
    await streams.start()

    reply = await streams.scene.post("line")
    config = (await streams.scene.client.get("/v2/models/line/config")).json()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await streams.scene.call("line")

    assert (reply.status_code, "decoupled transaction policy" in reply.text) == (501, True)
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_ensembles_within_one_another(streams: Streams) -> None:
    """And a decoupled step behind another: each response of the first is a request of the second."""
    source(streams.scene.repository, "second")
    chain(streams.scene.repository, "outer", "once", "line", "second", "twice")
    await streams.start()
    streams.source().let(5)
    streams.source("second").let(100)

    values = await streams.values("outer", 3, 0)

    assert values == [2.0 * index for n in (0, 5, 10) for index in range(n)]


async def test_no_responses(streams: Streams) -> None:
    await streams.start()
    streams.source().let(1)

    assert await streams.values("line", 0, 0) == []
    await eventually(streams.is_idle, description="nothing is left")


async def test_a_reader_that_does_not_read_holds_the_source(streams: Streams) -> None:
    """Through the steps behind it, so that nothing piles up; when it reads on it gets the rest, in order."""
    repository = streams.scene.repository
    source(repository, "wide", width=WIDTH)
    scale(repository, "double", 2.0, width=WIDTH)
    chain(repository, "broad", "wide", "double")
    config = repository / "broad" / "config.pbtxt"
    config.write_text(f"dims: [ {WIDTH} ]".join(config.read_text().rsplit("dims: [ 2 ]", 1)))
    streams.backend = Pouring
    await streams.start("broad")
    call = await streams.call("broad", x=(5000, 0))
    sent = await stuck(streams.source("wide"))

    others = [event["y"][0] async for event in streams.events("broad", 3, 0)]
    values = [InferResult((await call.read()).infer_response).as_numpy("y")[0, 0] for _ in range(sent + 50)]
    call.cancel()

    assert sent * WIDTH * 4 < 30_000_000  # what sockets and the client hold, besides two windows
    assert others == [0.0, 2.0, 4.0]
    assert values == [2.0 * index for index in range(sent + 50)]


async def stuck(model: StreamingBackend) -> int:
    """Waits until a model has sent nothing for a while; returns how many responses it has sent."""
    sent, still = 0, 0
    while still < 20:
        await asyncio.sleep(0.02)  # nothing tells that nothing happens
        still = still + 1 if sent == model.sent and sent else 0
        sent = model.sent
    return sent


async def test_who_leaves_is_noticed_by_the_source(streams: Streams) -> None:
    await streams.start()
    streams.source().let(1)
    events = streams.events("line", ENDLESS, 0)
    await anext(events)

    await events.aclose()

    def is_told() -> bool:
        streams.source().let(1)
        return bool(streams.source().errors)

    await eventually(is_told, description="the model is told")
    assert streams.source().errors[0].code == "cancelled"
    await eventually(streams.is_idle, description="nothing is left")


async def test_a_stream_whose_worker_dies_says_how_far_it_came(streams: Streams) -> None:
    """It may be sent again; nobody executes the rest."""
    await streams.start()
    streams.source().let(2)
    events = streams.events("line", 5, 0)
    got = [(await anext(events))["y"][0] for _ in range(2)]

    await streams.scene.kill("w1")
    await streams.scene.worker("w2")
    rest = [event async for event in events]

    assert got == [0.0, 5.0]
    assert [event["error"] for event in rest] == [
        "the worker that executed the request ended after 2 responses; send the request again"
    ]
    await eventually(streams.is_idle, description="nothing is left")


async def test_a_stream_whose_worker_dies_before_its_first_response(streams: Streams) -> None:
    """Nobody has seen anything of it: it is executed again."""
    await streams.start()
    answer = asyncio.create_task(streams.values("line", 3, 0))
    await eventually(lambda: streams.source().started.acquire(blocking=False), description="the step executes")

    await streams.scene.kill("w1")
    before = streams.source()
    await streams.scene.worker("w2")
    await eventually(lambda: streams.source() is not before, description="the next worker has the model")
    streams.source().let(10)

    assert await answer == [0.0, 5.0, 10.0]


async def test_a_stream_that_resumes_is_unbroken(streams: Streams) -> None:
    """Whoever goes on begins anew, and what the caller has is skipped."""
    repository = streams.scene.repository
    config = repository / "line" / "config.pbtxt"
    config.write_text(config.read_text() + RESUMING)
    await streams.start()
    streams.source().let(2)
    events = streams.events("line", 5, 0)
    got = [(await anext(events))["y"][0] for _ in range(2)]

    await streams.scene.kill("w1")
    before = streams.source()
    await streams.scene.worker("w2")
    await eventually(lambda: streams.source() is not before, description="the next worker has the model")
    streams.source().let(6)
    got += [event["y"][0] async for event in events]

    assert got == [0.0, 5.0, 10.0, 15.0, 20.0]
    await eventually(streams.is_idle, description="nothing is left")


@pytest.mark.parametrize("resumes", [True, False])
async def test_the_worker_of_the_source_dies(streams: Streams, resumes: bool) -> None:  # noqa: FBT001
    """The ensemble goes on where the step does, and ends by a failure that may be tried again where that is broken."""
    if resumes:
        config = streams.scene.repository / "source" / "config.pbtxt"
        config.write_text(config.read_text() + RESUMING)
    await streams.scene.sync()
    await streams.scene.worker("w1", models=("line", "once", "t*", "add"))
    await streams.scene.worker("w2", models=("source",))
    await streams.scene.ready()
    streams.source().let(2)
    events = streams.events("line", 4, 0)
    got = [(await anext(events))["y"][0] for _ in range(2)]

    await streams.scene.kill("w2")
    before = streams.source()
    await streams.scene.worker("w3", models=("source",))
    await eventually(lambda: streams.source() is not before, description="the next worker has the model")
    streams.source().let(6)
    rest = [event async for event in events]

    assert got == [0.0, 5.0]
    if resumes:
        assert [event["y"][0] for event in rest] == [10.0, 15.0]
    else:
        assert [event["error"] for event in rest] == [
            "the worker that executed the request ended after 2 responses; send the request again"
        ]


async def test_the_worker_that_waits_for_a_step_may_run_it(streams: Streams) -> None:
    """The step was a dead worker's: it is run again, alone, though what waits for it is here and has not ended."""
    await streams.scene.sync()
    await streams.scene.worker("w1", models=("source",))
    await streams.scene.ready("source")
    first = streams.source()
    batcher = (await streams.scene.worker("w2"))._plain_batcher
    await streams.scene.ready()
    await batcher("source", 1).pause_batching()  # type: ignore[union-attr]
    answer = asyncio.create_task(streams.values("line", 3, 0))
    await eventually(lambda: first.started.acquire(blocking=False), description="the step executes")

    await streams.scene.kill("w1")
    batcher("source", 1).resume_batching()  # type: ignore[union-attr]
    streams.source().let(10)

    assert await answer == [0.0, 5.0, 10.0]


async def test_a_failure_after_responses(streams: Streams) -> None:
    """It names the step, and is counted."""
    await streams.start()
    streams.source().raises = True

    events = [event async for event in streams.events("line", 3, 0)]

    assert [event.get("y") for event in events] == [[0.0, 0.0], None]
    assert "in ensemble 'line', step of model 'source': the model is broken" in events[1]["error"]

    async def is_counted() -> bool:
        return bool((await streams.scene.statistics("line"))["inference_stats"]["fail"]["count"])

    await eventually(is_counted, description="a failure of the ensemble")


async def test_statistics_of_a_stream(streams: Streams) -> None:
    """One request of the ensemble and of the source, and one for each response of the steps behind."""
    await streams.start()
    streams.source().let(5)
    await streams.values("line", 4, 0)

    async def counts() -> dict[str, int]:
        names = ("line", "once", "source", "twice", "add")
        return {name: (await streams.scene.statistics(name))["inference_stats"]["success"]["count"] for name in names}

    async def are_counted() -> bool:
        return await counts() == {"line": 1, "once": 1, "source": 1, "twice": 4, "add": 4}

    await eventually(are_counted, description="statistics")


async def test_a_stored_request(streams: Streams) -> None:
    """Its responses are stored while they come, and its result is all of them."""
    await streams.start()
    streams.source().let(4)
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [3.0, 0.0]}

    reply = await streams.scene.client.post("/v1/models/line/requests", json={"inputs": [tensor]})
    assert reply.status_code == 202, reply.text
    at = f"/v1/requests/{reply.json()['id']}"
    await eventually(lambda: has_ended(streams, at), description="the request has ended")
    result = (await streams.scene.client.get(f"{at}/result")).json()

    assert [response["outputs"][0]["data"] for response in result["responses"] if response.get("outputs")] == [
        [0.0, 0.0],
        [5.0, 5.0],
        [10.0, 10.0],
    ]


async def has_ended(streams: Streams, at: str) -> bool:
    return bool((await streams.scene.client.get(at)).json()["state"] == "succeeded")


async def test_steps_that_do_not_belong_together(streams: Streams) -> None:
    """A step that reads what comes once and what comes often."""
    steps = ("source", {"x": "x"}, {"y": "n"}), ("add", {"a": "x", "b": "n"}, {"y": "y"})
    ensemble(streams.scene.repository, "odd", *steps)
    await streams.scene.worker()

    text = "in ensemble odd, step of model 'add' receives inputs originated from different decoupled models"
    with pytest.raises(ModelLoadFailed, match=text):
        await streams.scene.control.load("odd")


async def test_a_drain_ends_streams(streams: Streams) -> None:
    await streams.start()
    streams.source().let(1)
    events = streams.events("line", 3, 0)
    got = [(await anext(events))["y"][0]]

    stopping = asyncio.create_task(streams.scene.stop("w1"))
    streams.source().let(3)
    got += [event["y"][0] async for event in events]
    await stopping

    assert got == [0.0, 5.0, 10.0]
