"""Triton's traces of what a traced request asks for: calls by models, and steps of ensembles."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from qinfer.core.messages import CallTraces
from qinfer.testing import eventually
from tests.support.ensembles import ROW, EnsemblesServed, chain, ensembles_served, scale
from tests.support.python_models import DECOUPLED, HEADER, execute, write_model

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

ACTIVITIES = [
    "REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
    "INFER_RESPONSE_COMPLETE", "REQUEST_END",
]  # fmt: skip
CALLER = """call = pb_utils.InferenceRequest(
    model_name="{target}", requested_output_names=["y"], request_id="inner", trace=requests[0].trace(),
    inputs=[pb_utils.Tensor("x", x(requests[0]))])
{answer}
return [reply(answer.output_tensors()[0].as_numpy())]"""
ONE = "answer = call.exec()"
LAST = "answer = [one for one in call.exec(decoupled=True) if one.output_tensors()][-1]"
STREAM = (
    HEADER
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(2):
                sender.send(reply(x(request)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)


def caller(repository: Path, name: str, target: str, answer: str = ONE) -> None:
    write_model(repository, execute(CALLER.format(target=target, answer=answer)), name, max_batch_size=8, dims=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnsemblesServed]:
    """A worker with models that call one another, and a gateway that writes traces beside the repository."""
    path = tmp_path_factory.mktemp("served")
    repository = path / "repository"
    for name, factor in (("twice", 2.0), ("tenth", 0.1)):
        scale(repository, name, factor)
    chain(repository, "line", "twice", "tenth")
    write_model(repository, STREAM, "stream", max_batch_size=8, dims=2, more=DECOUPLED)
    for name, target in (("middle", "twice"), ("front", "middle"), ("late", "line"), ("lost", "nothing")):
        caller(repository, name, target)
    caller(repository, "listener", "stream", LAST)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("QINFER_TRACE__FILE", str(path / "trace.json"))
        async with ensembles_served(repository) as one:
            await one.sync()
            await one.worker()
            await one.ready()
            yield one


@pytest.fixture
def scene(served: EnsemblesServed) -> EnsemblesServed:
    """The scene without the traces of earlier tests."""
    for file in written(served):
        file.unlink()
    return served


def written(scene: EnsemblesServed) -> list[Path]:
    return list(scene.repository.parent.glob("trace.json*"))


async def traces(scene: EnsemblesServed, model: str, *levels: str, stored: bool = False) -> list[dict[str, Any]]:
    """Returns what is written of one request: its trace, with those that were made for it as `calls`."""
    settings = {"trace_level": levels or ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
    await scene.client.post("/v2/trace/setting", json=settings)
    if stored:
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": ROW}
        await scene.client.post(f"/v1/models/{model}/requests", json={"id": "outer", "inputs": [tensor]})
    else:
        await scene.post(model, id="outer")
    await eventually(lambda: bool(written(scene)), description="the trace file")
    return read(*written(scene))


def read(file: Path) -> list[dict[str, Any]]:
    """Returns what the one file tells; see `traces`."""
    whole: dict[int, dict[str, Any]] = {}
    for part in json.loads(file.read_text()):
        one = whole.setdefault(part["id"], {"tensors": [], "calls": []})
        if "tensor" in part:
            one["tensors"].append(part)
        else:
            one |= part
    for one in whole.values():
        if "parent_id" in one:
            whole[one["parent_id"]]["calls"].append(one)
    return [one for one in whole.values() if "parent_id" not in one]


def shown(trace: dict[str, Any]) -> tuple[str, int, list[Any]]:
    return trace["model_name"], trace["model_version"], [shown(call) for call in trace["calls"]]


def times(trace: dict[str, Any]) -> list[int]:
    return [stamp["ns"] for stamp in trace["timestamps"]]


@pytest.mark.parametrize("stored", [False, True])
async def test_a_call_has_a_trace_of_its_own(scene: EnsemblesServed, *, stored: bool) -> None:
    """And so have the calls that are made for it, each with the id of the one that it is made for."""
    (outer,) = await traces(scene, "front", stored=stored)

    assert shown(outer) == ("front", 1, [("middle", 1, [("twice", 1, [])])])
    (middle,) = outer["calls"]
    assert (outer["request_id"], middle["request_id"]) == ("outer", "inner")
    assert [stamp["name"] for stamp in middle["timestamps"]] == ACTIVITIES
    assert times(middle) == sorted(times(middle))
    assert times(outer)[0] < times(middle)[0] < times(middle)[-1] < times(outer)[-1]


@pytest.mark.parametrize("stored", [False, True])
async def test_calls_have_tensors_if_their_request_has(scene: EnsemblesServed, *, stored: bool) -> None:
    (outer,) = await traces(scene, "middle", "TENSORS", stored=stored)

    (call,) = outer["calls"]
    assert "timestamps" not in call
    found = [(part["activity"], part["tensor"]["name"], part["tensor"]["data"]) for part in call["tensors"]]
    assert found == [
        ("TENSOR_QUEUE_INPUT", "x", ",".join(map(str, ROW))),
        ("TENSOR_BACKEND_OUTPUT", "y", ",".join(str(2 * value) for value in ROW)),
    ]


@pytest.mark.parametrize(
    ("model", "stored", "expected"),
    [
        ("line", False, [("twice", 1, []), ("tenth", 1, [])]),
        ("line", True, [("twice", 1, []), ("tenth", 1, [])]),
        ("late", False, [("line", 1, [("twice", 1, []), ("tenth", 1, [])])]),
        ("listener", False, [("stream", 1, [])]),
    ],
)
async def test_steps_and_streams_have_traces(
    scene: EnsemblesServed, model: str, *, stored: bool, expected: list[Any]
) -> None:
    """Steps of an ensemble, also of one that a model calls, and a call of a decoupled model."""
    (outer,) = await traces(scene, model, stored=stored)

    assert shown(outer) == (model, 1, expected)


async def test_a_call_that_is_refused_has_no_trace(scene: EnsemblesServed) -> None:
    """It never came into the queue."""
    (outer,) = await traces(scene, "lost")

    assert outer["calls"] == []


async def test_what_can_not_be_traced_is_answered(scene: EnsemblesServed, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("it can't be noted")

    monkeypatch.setattr(CallTraces, "add", boom)

    (outer,) = await traces(scene, "middle")

    assert outer["calls"] == []
    assert outer["timestamps"]
    assert await scene.infer("middle") == [2 * value for value in ROW]
    await eventually(lambda: len(written(scene)) == 2, description="its trace, which no later test may find")
