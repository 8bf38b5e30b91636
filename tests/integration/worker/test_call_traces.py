"""Triton's traces of what a traced request asks for: calls by models, and steps of ensembles."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.messages import CalledTensor, CallRecord, CallTraces
from qinfer.testing import eventually
from tests.support.ensembles import ROW, EnsemblesServed, chain, ensembles_served, scale
from tests.support.python_models import DECOUPLED, HEADER, execute, write_model

pytestmark = pytest.mark.timeout(60)

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


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnsemblesServed]:
    """A worker with models that call one another, and a gateway that writes traces to `tmp_path`."""
    monkeypatch.setenv("QINFER_TRACE__FILE", str(tmp_path / "trace.json"))
    repository = tmp_path / "repository"
    for name, factor in (("twice", 2.0), ("tenth", 0.1)):
        scale(repository, name, factor)
    chain(repository, "line", "twice", "tenth")
    write_model(repository, STREAM, "stream", max_batch_size=8, dims=2, more=DECOUPLED)
    for name, target in (("middle", "twice"), ("front", "middle"), ("late", "line"), ("lost", "nothing")):
        caller(repository, name, target)
    caller(repository, "listener", "stream", LAST)
    async with ensembles_served(repository) as one:
        await one.sync()
        await one.worker()
        await one.ready()
        yield one


async def traces(
    scene: EnsemblesServed, path: Path, model: str, *levels: str, stored: bool = False
) -> list[dict[str, Any]]:
    """Returns what is written of one request: its trace, with those that were made for it as `calls`."""
    settings = {"trace_level": levels or ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
    await scene.client.post("/v2/trace/setting", json=settings)
    if stored:
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": ROW}
        await scene.client.post(f"/v1/models/{model}/requests", json={"id": "outer", "inputs": [tensor]})
    else:
        await scene.post(model, id="outer")
    await eventually(lambda: bool(list(path.glob("trace.json*"))), description="the trace file")
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns what the one file tells; see `traces`."""
    (file,) = path.glob("trace.json*")
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
async def test_a_call_has_a_trace_of_its_own(scene: EnsemblesServed, tmp_path: Path, *, stored: bool) -> None:
    """And so have the calls that are made for it, each with the id of the one that it is made for."""
    (outer,) = await traces(scene, tmp_path, "front", stored=stored)

    assert shown(outer) == ("front", 1, [("middle", 1, [("twice", 1, [])])])
    (middle,) = outer["calls"]
    assert (outer["request_id"], middle["request_id"]) == ("outer", "inner")
    assert [stamp["name"] for stamp in middle["timestamps"]] == ACTIVITIES
    assert times(middle) == sorted(times(middle))
    assert times(outer)[0] < times(middle)[0] < times(middle)[-1] < times(outer)[-1]


@pytest.mark.parametrize("stored", [False, True])
async def test_calls_have_tensors_if_their_request_has(scene: EnsemblesServed, tmp_path: Path, *, stored: bool) -> None:
    (outer,) = await traces(scene, tmp_path, "middle", "TENSORS", stored=stored)

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
    scene: EnsemblesServed, tmp_path: Path, model: str, *, stored: bool, expected: list[Any]
) -> None:
    """Steps of an ensemble, also of one that a model calls, and a call of a decoupled model."""
    (outer,) = await traces(scene, tmp_path, model, stored=stored)

    assert shown(outer) == (model, 1, expected)


def test_what_all_calls_take_is_bounded() -> None:
    """Also where a call makes calls."""
    traces = CallTraces(has_tensors=True)
    tensor = CalledTensor(is_output=False, name="x", datatype="UINT8", shape=(1,), data=bytes(400_000))
    inner = CallRecord("inner", 1, "", 1.0, 2.0, tensors=(tensor,))

    for name in ("first", "second", "third"):
        traces.add(CallRecord(name, 1, "", 1.0, 2.0, calls=(inner,)))
    for _ in range(100):
        traces.add(CallRecord("small", 1, "", 1.0, 2.0))

    assert [call.model for call in traces.ended[:3]] == ["first", "second", "small"]
    assert sum(call.weight for call in traces.ended) <= 2**20


async def test_a_call_that_is_refused_has_no_trace(scene: EnsemblesServed, tmp_path: Path) -> None:
    """It never came into the queue."""
    (outer,) = await traces(scene, tmp_path, "lost")

    assert outer["calls"] == []


async def test_what_can_not_be_traced_is_answered(
    scene: EnsemblesServed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("it can't be noted")

    monkeypatch.setattr(CallTraces, "add", boom)

    (outer,) = await traces(scene, tmp_path, "middle")

    assert outer["calls"] == []
    assert outer["timestamps"]
    assert await scene.infer("middle") == [2 * value for value in ROW]
