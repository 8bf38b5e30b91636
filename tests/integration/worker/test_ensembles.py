"""Ensembles over HTTP and gRPC: a gateway, workers with real models, a real Redis."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb

from qinfer.errors import ModelLoadFailed
from qinfer.testing import eventually
from qinfer.traffic.endpoints import Endpoint, Role, Target
from qinfer.traffic.store import EndpointStore
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher
from qinfer_workers.inference.serving import Serving
from qinfer_workers.inference.worker import Worker
from tests.support import models, python_models
from tests.support.ensembles import EnsemblesServed, add, chain, ensemble, ensembles_served, scale

pytestmark = pytest.mark.timeout(60)

HASTY = 'parameters { key: "qinfer.default_timeout_s" value { string_value: "1" } }'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a repository of three models, a chain of them, two branches, and ensembles in an ensemble."""
    path = tmp_path / "repository"
    for name, factor in (("twice", 2.0), ("thrice", 3.0), ("tenth", 0.1)):
        scale(path, name, factor)
    add(path)
    chain(path, "line", "twice", "thrice", "tenth")
    branches = ("twice", {"x": "x"}, {"y": "l"}), ("thrice", {"x": "x"}, {"y": "r"})
    ensemble(path, "fork", *branches, ("add", {"a": "l", "b": "r"}, {"y": "y"}))
    chain(path, "nested", "fork", "line", "twice")
    return path


@pytest.fixture
async def scene(repository: Path) -> AsyncIterator[EnsemblesServed]:
    async with ensembles_served(repository) as one:
        yield one


async def test_ensembles_over_both_protocols(scene: EnsemblesServed) -> None:
    await scene.sync()
    await scene.worker()
    await scene.ready()

    assert await scene.infer("line") == pytest.approx([0.6, 1.2])
    assert await scene.call("fork") == [5.0, 10.0]
    assert await scene.infer("nested", rows=3) == pytest.approx([6.0, 12.0] * 3)


async def test_steps_in_other_workers(scene: EnsemblesServed) -> None:
    """The worker of an ensemble need not have the models of its steps."""
    await scene.sync()
    await scene.worker("w1", models=("line", "fork", "nested"))
    await scene.worker("w2", models=("t*", "add"))
    await scene.ready()

    answers = await asyncio.gather(*[scene.infer("nested") for _ in range(20)])

    assert answers == [pytest.approx([6.0, 12.0])] * 20


async def test_responses_name_no_sequence_where_there_is_none(scene: EnsemblesServed) -> None:
    """Triton's ensembles say so in parameters, over both protocols."""
    await scene.sync()
    await scene.worker()
    await scene.ready()

    reply = await scene.post("line")
    message = pb.ModelInferRequest(model_name="line", raw_input_contents=[np.zeros(2, "<f4").tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    answer = await scene.stub.ModelInfer(message)

    expected = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    assert reply.json()["parameters"] == expected
    told = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in answer.parameters.items()}
    assert told == expected


async def test_outputs_that_are_not_wanted_cost_nothing(scene: EnsemblesServed) -> None:
    """A step that no wanted output depends on is not run."""
    steps = ("twice", {"x": "x"}, {"y": "y"}), ("tenth", {"x": "x"}, {"y": "z"})
    second = 'output { name: "z" data_type: TYPE_FP32 dims: [ 2 ] }'
    ensemble(scene.repository, "two", *steps, more=second)
    await scene.sync()
    await scene.worker()
    await scene.ready()

    reply = await scene.post("two", outputs=[{"name": "y"}])

    assert [output["name"] for output in reply.json()["outputs"]] == ["y"]
    await eventually(lambda: counted(scene, "twice"), description="statistics of the step")
    assert not await counted(scene, "tenth")


async def counted(scene: EnsemblesServed, model: str) -> bool:
    return bool((await scene.statistics(model))["inference_stats"]["success"]["count"])


async def test_steps_that_reshape_and_variable_dimensions(scene: EnsemblesServed) -> None:
    """A step's model has its own view of a tensor; what is variable is as long as the request's."""
    matrix = [("x", "FP32", (2, 2))], [("y", "FP32", (2, 2))]
    models.write(scene.repository, "turn", [helper.make_node("Transpose", ["x"], ["y"], perm=[0, 2, 1])], *matrix)
    config = scene.repository / "turn" / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ 2, 2 ]", "dims: [ 4 ] reshape { shape: [ 2, 2 ] }"))
    scale(scene.repository, "any", 2.0, width=-1)
    steps = ("any", {"x": "x"}, {"y": "t"}), ("turn", {"x": "t"}, {"y": "u"}), ("any", {"x": "u"}, {"y": "y"})
    ensemble(scene.repository, "turned", *steps, width=4)
    ensemble(scene.repository, "long", ("any", {"x": "x"}, {"y": "t"}), ("any", {"x": "t"}, {"y": "y"}), width=-1)
    await scene.sync()
    await scene.worker()
    await scene.ready("turned", "long")

    replies = [
        await scene.client.post(f"/v2/models/{model}/infer", json=row([1, 2, 3, 4])) for model in ("turned", "long")
    ]
    longer = await scene.client.post("/v2/models/long/infer", json=row([1] * 7))

    assert [reply.json()["outputs"][0]["data"] for reply in replies] == [[4, 12, 8, 16], [4, 8, 12, 16]]
    assert longer.json()["outputs"][0]["shape"] == [1, 7]


def row(numbers: list[float]) -> dict[str, object]:
    return {"inputs": [{"name": "x", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}]}


def turn(repository: Path, name: str, *dims: int, max_batch_size: int = 8) -> str:
    """Writes a model that swaps the last two dimensions; returns its name."""
    order = [*range(len(dims) + (max_batch_size > 0))]
    order[-2:] = order[-1], order[-2]
    nodes, ports = [helper.make_node("Transpose", ["x"], ["y"], perm=order)], [(port, "FP32", dims) for port in "xy"]
    models.write(repository, name, nodes, ports[:1], ports[1:], max_batch_size=max_batch_size)
    return name


async def asked(scene: EnsemblesServed, model: str, *shape: int) -> list[object]:
    """Sends 0, 1, 2, … over both protocols; returns the shape and the elements of the one answer that both give."""
    numbers = np.arange(prod(shape), dtype="<f4")
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": numbers.tolist()}
    reply = await scene.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
    message = pb.ModelInferRequest(model_name=model, raw_input_contents=[numbers.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=shape)
    answer = InferResult(await scene.stub.ModelInfer(message)).as_numpy("y")

    (output,) = reply.json()["outputs"]
    assert (output["shape"], output["data"]) == ([*answer.shape], answer.flatten().tolist())
    return [output["shape"], output["data"]]


async def test_an_ensemble_reshapes_its_own_tensors(scene: EnsemblesServed) -> None:
    """Callers see `dims` and steps the other shape, of ensembles within one another, too, as in Triton."""
    path = scene.repository
    across: tuple[dict[str, str], dict[str, str]] = {"x": "x"}, {"y": "y"}
    ensemble(path, "batched", (turn(path, "turn", 2, 2), *across), width=4, reshape=(2, 2))
    one = turn(path, "turn_one", 2, 2, max_batch_size=0)
    ensemble(path, "single", (one, *across), width=4, reshape=(2, 2), max_batch_size=0)
    many = turn(path, "turn_many", -1, 2, 2)
    ensemble(path, "variable", (many, *across), width=(-1, 4), reshape=(-1, 2, 2))
    inner = ("single", {"x": "x"}, {"y": "s"}), ("batched", {"x": "s"}, {"y": "t"}), ("single", {"x": "t"}, {"y": "y"})
    ensemble(path, "outer", *inner, width=4)
    names = ("batched", "single", "variable", "outer")
    await scene.sync()
    await scene.worker()
    await scene.ready(*names)

    answers = [
        await asked(scene, name, *shape) for name, shape in zip(names, [(2, 4), (4,), (1, 2, 4), (1, 4)], strict=True)
    ]

    turned = [0, 2, 1, 3, 4, 6, 5, 7]
    assert answers == [[[2, 4], turned], [[4], turned[:4]], [[1, 2, 4], turned], [[1, 4], turned[:4]]]
    shown = (await scene.client.get("/v2/models/variable")).json()
    assert [tensor["shape"] for tensor in shown["inputs"] + shown["outputs"]] == [[-1, -1, 4]] * 2


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("before", 400, "in ensemble 'before', step of model 'turn': 'x' gets FP32[1, 6], but "),
        ("behind", 500, "in ensemble 'behind', 'y' gets FP32[1, 6], but "),
    ],
)
async def test_what_a_step_makes_may_not_fit_a_reshape(
    scene: EnsemblesServed, name: str, status: int, text: str
) -> None:
    """The request fails, as in Triton, and names the tensor: an input of an ensemble within, or an output."""
    path = scene.repository
    scale(path, "any", 1.0, width=-1)
    within = ensemble(path, "within", (turn(path, "turn", 2, 2), {"x": "x"}, {"y": "y"}), width=4, reshape=(2, 2))
    ensemble(path, "before", ("any", {"x": "x"}, {"y": "t"}), (within, {"x": "t"}, {"y": "y"}), width=4)
    ensemble(path, "behind", ("any", {"x": "x"}, {"y": "y"}), width=(2, 2), reshape=4)
    for config in (path / "before" / "config.pbtxt", path / "behind" / "config.pbtxt"):
        lines = config.read_text().splitlines()
        lines[1] = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }'
        config.write_text("\n".join(lines))
    await scene.sync()
    await scene.worker()
    await scene.ready("before", "behind")

    good = await scene.client.post(f"/v2/models/{name}/infer", json=row([1] * 4))
    bad = await scene.client.post(f"/v2/models/{name}/infer", json=row([1] * 6))

    assert good.status_code == 200, good.text
    assert (bad.status_code, text in bad.json()["error"]) == (status, True), bad.text


async def test_a_failure_names_the_step(scene: EnsemblesServed) -> None:
    """The code is the step's, the text tells where, and the ensemble counts a failure: OTHER, as Triton does."""
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    shape = helper.make_tensor("to", TensorProto.INT64, [2], [-1, 2])
    nodes.insert(0, helper.make_node("Constant", [], ["shape"], value=shape))
    models.write(scene.repository, "cut", nodes, [("x", "FP32", (-1,))], [("y", "FP32", (2,))])
    chain(scene.repository, "bad", "cut", "twice")
    text = (scene.repository / "bad" / "config.pbtxt").read_text().replace("dims: [ 2 ]", "dims: [ -1 ]", 1)
    (scene.repository / "bad" / "config.pbtxt").write_text(text)
    await scene.sync()
    await scene.worker()
    await scene.ready()
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 2.0, 3.0]}

    reply = await scene.client.post("/v2/models/bad/infer", json={"inputs": [tensor]})

    assert reply.status_code >= 400
    assert "in ensemble 'bad', step of model 'cut': " in reply.json()["error"]
    await eventually(lambda: failed(scene, "bad"), description="a failure of the ensemble")
    assert not await counted(scene, "twice")
    lines = (await scene.client.get("/metrics")).text.splitlines()
    failures = [line for line in lines if line.startswith("nv_inference_request_failure{") and 'model="bad"' in line]
    assert [line for line in failures if not line.endswith(" 0")] == [line for line in failures if "OTHER" in line]


async def failed(scene: EnsemblesServed, model: str) -> bool:
    return bool((await scene.statistics(model))["inference_stats"]["fail"]["count"])


async def test_another_worker_runs_what_a_dead_one_held(scene: EnsemblesServed) -> None:
    """Its steps had nobody to run them; now the ensemble is run again from its beginning."""
    answer = await left_by_a_dead_worker(scene)

    await scene.worker("w3")

    assert await answer == pytest.approx([0.6, 1.2])


async def test_what_a_dead_worker_held_begins_once_steps_may_be_submitted(
    scene: EnsemblesServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may reclaim a request before it has fetched any; it must know the models of the steps by then."""
    answer = await left_by_a_dead_worker(scene)
    fetch = Worker._fetch_loop

    async def fetch_no_ensemble(worker: Worker, serving: Serving) -> None:
        if isinstance(serving.batcher, EnsembleBatcher):
            await asyncio.Event().wait()
        await fetch(worker, serving)

    monkeypatch.setattr(Worker, "_fetch_loop", fetch_no_ensemble)
    await scene.worker("w3")

    assert await answer == pytest.approx([0.6, 1.2])


async def left_by_a_dead_worker(scene: EnsemblesServed) -> "asyncio.Task[list[float]]":
    """Asks an ensemble whose worker dies while its steps have no worker; returns the call."""
    await scene.sync()
    await scene.worker("w1", models=("line",))
    await scene.worker("w2", models=("t*", "add", "fork", "nested"))
    await scene.ready()
    await scene.stop("w2")
    answer = asyncio.create_task(scene.infer("line"))
    await eventually(lambda: held(scene, "w1"), description="an ensemble request in the first worker")
    await scene.kill("w1")
    return answer


def held(scene: EnsemblesServed, worker_id: str) -> bool:
    return any(batcher.executing for batcher in scene.workers[worker_id]._batchers())


async def test_a_request_that_is_left_stops_at_its_step(scene: EnsemblesServed) -> None:
    """Its caller went away: the step is taken out of its lane, and the worker has room again."""
    await scene.sync()
    await scene.worker("w1", models=("line",))
    await scene.worker("w2", models=("t*",))
    await scene.ready("line")
    await scene.stop("w2")
    answer = asyncio.create_task(scene.infer("line"))
    await eventually(lambda: held(scene, "w1"), description="an ensemble request in the worker")

    answer.cancel()

    await eventually(lambda: not held(scene, "w1"), description="no ensemble request in the worker")


async def test_requests_expire_while_a_step_waits(scene: EnsemblesServed) -> None:
    chain(scene.repository, "hasty", "twice", "thrice", more=HASTY)
    await scene.sync()
    await scene.worker("w1", models=("hasty",))
    await scene.worker("w2", models=("t*",))
    await scene.ready("hasty")
    await scene.stop("w2")

    reply = await scene.post("hasty")

    assert reply.status_code >= 400
    await eventually(lambda: not held(scene, "w1"), description="no ensemble request in the worker")


async def test_a_drain_ends_the_requests_of_ensembles(scene: EnsemblesServed) -> None:
    await scene.sync()
    await scene.worker("w1")
    await scene.ready()
    answers = [asyncio.create_task(scene.infer("nested")) for _ in range(50)]
    await eventually(lambda: held(scene, "w1"), description="ensemble requests in the worker")

    await scene.stop("w1")
    await scene.worker("w2")

    assert await asyncio.gather(*answers) == [pytest.approx([6.0, 12.0])] * 50


async def test_loading_an_ensemble_loads_what_it_uses(scene: EnsemblesServed) -> None:
    """And unloading it with its dependents unloads what nobody else uses."""
    await scene.worker()

    await scene.control.load("nested")
    assert await scene.infer("nested") == pytest.approx([6.0, 12.0])
    await scene.control.load("tenth")
    await scene.control.unload("nested", unload_dependents=True)

    wishes = {name: wish.load for name, wish in (await scene.gateway._store.desired()).items()}
    assert wishes == {"nested": False, "fork": False, "line": False, "twice": False, "thrice": False, "add": False} | {
        "tenth": True
    }


async def test_an_ensemble_is_not_ready_without_a_step(scene: EnsemblesServed) -> None:
    await scene.worker()
    await scene.control.load("line")

    await scene.control.unload("thrice")
    await scene.gateway.catalog.refresh()

    assert await scene.reason("line") == "ensemble 'line' depends on 'thrice' which has no loaded version"
    await scene.control.load("thrice")
    await scene.ready("line")
    assert await scene.infer("line") == pytest.approx([0.6, 1.2])


async def test_an_ensemble_that_does_not_fit_is_not_loaded(scene: EnsemblesServed) -> None:
    scale(scene.repository, "wide", 2.0, width=3)
    chain(scene.repository, "odd", "twice", "wide")
    await scene.worker()

    with pytest.raises(ModelLoadFailed, match="in ensemble odd, ensemble tensor t1: inconsistent shape"):
        await scene.control.load("odd")


async def test_models_that_are_not_there(scene: EnsemblesServed) -> None:
    chain(scene.repository, "lost", "twice", "nobody")
    await scene.worker()

    with pytest.raises(ModelLoadFailed, match="contains models that are not available or ambiguous: nobody"):
        await scene.control.load("lost")


async def test_steps_name_no_endpoints(scene: EnsemblesServed) -> None:
    chain(scene.repository, "indirect", "twice", "reader")
    await scene.worker()
    stable = Target(model="twice", version=1, role=Role.STABLE)
    await EndpointStore(scene.store).put(Endpoint(name="reader", targets=(stable,)), None)

    with pytest.raises(ModelLoadFailed, match="'reader' is an endpoint, and steps name models"):
        await scene.control.load("indirect")


async def test_a_reload_of_a_step_is_a_reload_of_its_ensembles(scene: EnsemblesServed) -> None:
    """Requests find the new version, and those under way the old one, which stays until they have ended."""
    await scene.sync()
    await scene.worker()
    await scene.ready()
    asking = [asyncio.create_task(ask(scene, "line", 40)) for _ in range(4)]

    scale(scene.repository, "thrice", 5.0, version=2)
    await scene.sync()
    await scene.ready()

    assert await scene.infer("line") == pytest.approx([1.0, 2.0])
    answers = [answer for one in asking for answer in await one]
    assert {round(answer[0], 3) for answer in answers} <= {0.6, 1.0}


async def ask(scene: EnsemblesServed, model: str, count: int) -> list[list[float]]:
    return [await scene.infer(model) for _ in range(count)]


async def test_a_version_that_a_step_names(scene: EnsemblesServed) -> None:
    scale(scene.repository, "thrice", 5.0, version=2)
    config = scene.repository / "thrice" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { all { } }")
    chain(scene.repository, "old", "thrice:1")
    chain(scene.repository, "new", "thrice")
    await scene.sync()
    await scene.worker()
    await scene.ready("old", "new")

    assert await scene.infer("old") == [3.0, 6.0]
    assert await scene.infer("new") == [5.0, 10.0]


async def test_statistics_of_ensembles_and_steps(scene: EnsemblesServed) -> None:
    """Each step counts on its model, ensembles within the ensemble count too."""
    await scene.sync()
    await scene.worker()
    await scene.ready()
    await scene.infer("nested", rows=3)

    await eventually(lambda: counted(scene, "fork"), description="statistics of the ensemble within")
    counts = {name: await scene.statistics(name) for name in ("nested", "fork", "line", "twice", "tenth")}

    assert {name: one["inference_count"] for name, one in counts.items()} == {
        "nested": 3, "fork": 3, "line": 3, "twice": 9, "tenth": 3,
    }  # fmt: skip
    whole = counts["nested"]["inference_stats"]
    assert whole["success"]["ns"] >= whole["compute_infer"]["ns"] > 0


async def test_a_repository_without_a_step_any_more(scene: EnsemblesServed) -> None:
    await scene.sync()
    await scene.worker()
    await scene.ready()

    shutil.rmtree(scene.repository / "add")
    await scene.sync()

    assert "depends on 'add' which has no loaded version" in await scene.reason("fork")


async def test_labels_of_a_step_are_those_of_the_ensemble(scene: EnsemblesServed) -> None:
    """Through ensembles within it, too."""
    config = scene.repository / "thrice" / "config.pbtxt"
    labelled = 'output { name: "y" label_filename: "labels.txt"'
    config.write_text(config.read_text().replace('output { name: "y"', labelled))
    (scene.repository / "thrice" / "labels.txt").write_text("small\nlarge\n")
    chain(scene.repository, "inner", "twice", "thrice")
    ensemble(scene.repository, "outer", ("inner", {"x": "x"}, {"y": "y"}))
    await scene.sync()
    await scene.worker()
    await scene.ready("outer")

    reply = await scene.post("outer", outputs=[{"name": "y", "parameters": {"classification": 1}}])

    assert reply.json()["outputs"][0]["data"] == ["12.000000:1:large"]


async def test_an_ensemble_is_asked_now_and_read_later(scene: EnsemblesServed) -> None:
    """As any model, by `/v1`: accepted while no worker has it."""
    await scene.sync()
    await scene.gateway.catalog.refresh()
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}
    accepted = await scene.client.post("/v1/models/nested/requests", json={"inputs": [tensor]})
    assert accepted.status_code == 202, accepted.text
    request_id = accepted.json()["id"]

    await scene.worker()

    async def is_there() -> bool:
        return (await scene.client.get(f"/v1/requests/{request_id}/result")).status_code == 200

    await eventually(is_there, description="the result")
    result = await scene.client.get(f"/v1/requests/{request_id}/result")
    assert result.json()["outputs"][0]["data"] == pytest.approx([6.0, 12.0])


async def test_steps_in_the_same_worker_do_not_pass_redis(
    scene: EnsemblesServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.sync()
    worker = await scene.worker()
    await scene.ready()
    monkeypatch.setattr(worker._queue, "submit", None)  # nobody can submit by the lanes

    for _ in range(10):
        assert await scene.infer("nested") == pytest.approx([6.0, 12.0])


async def test_what_waits_in_a_lane_goes_before_steps(scene: EnsemblesServed) -> None:
    """A step takes its turn: it goes into the lane while requests of others wait there."""
    scale(scene.repository, "slow", 2.0)
    chain(scene.repository, "through", "slow", "tenth")
    await scene.sync()
    worker = await scene.worker()
    await scene.ready()
    await worker._plain_batcher("slow", 1).pause_batching()  # type: ignore[union-attr]
    waiting = [asyncio.create_task(scene.infer("slow")) for _ in range(3)]
    await eventually(lambda: has(scene, "slow", 3), description="requests in the lane")
    answer = asyncio.create_task(scene.infer("through"))
    await eventually(lambda: has(scene, "slow", 4), description="the step in the lane, too")

    worker._plain_batcher("slow", 1).resume_batching()  # type: ignore[union-attr]

    assert await answer == pytest.approx([0.2, 0.4])
    assert await asyncio.gather(*waiting) == [[2.0, 4.0]] * 3


async def has(scene: EnsemblesServed, model: str, count: int) -> bool:
    return await scene.depth(model) == count


ASKING = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        inner = pb_utils.InferenceRequest(
            model_name="line", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(request))]
        )
        answer = inner.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        return reply(pb_utils.get_output_tensor_by_name(answer, "y").as_numpy())
"""


async def test_an_ensemble_within_a_model_within_an_ensemble(scene: EnsemblesServed) -> None:
    """A step may be a model in Python, and that may call an ensemble: both in one worker."""
    python_models.write_model(scene.repository, python_models.HEADER + ASKING, "asking", dims="2", max_batch_size=8)
    chain(scene.repository, "around", "twice", "asking")
    await scene.sync()
    await scene.worker()
    await scene.ready("around")

    answers = await asyncio.gather(*[scene.infer("around") for _ in range(8)])

    assert answers == [pytest.approx([1.2, 2.4])] * 8


async def test_every_request_ends_right_though_a_worker_dies(scene: EnsemblesServed) -> None:
    """It dies in the middle of steps, its own and those of others."""
    await scene.sync()
    await scene.worker("w1")
    await scene.worker("w2")
    await scene.ready()
    answers = [asyncio.create_task(scene.infer("nested")) for _ in range(100)]
    await eventually(lambda: bool(holders(scene)), description="ensemble requests in a worker")

    await scene.kill(holders(scene)[0])

    assert await asyncio.gather(*answers) == [pytest.approx([6.0, 12.0])] * 100


def holders(scene: EnsemblesServed) -> list[str]:
    return [worker_id for worker_id in scene.workers if held(scene, worker_id)]


async def test_a_queue_timeout_is_that_of_the_steps(scene: EnsemblesServed) -> None:
    """By the queue policy of the step's model, which has to allow it."""
    scale(scene.repository, "patient", 2.0)
    config = scene.repository / "patient" / "config.pbtxt"
    policy = "default_queue_policy { default_timeout_microseconds: 900000000 allow_timeout_override: true }"
    config.write_text(config.read_text().replace("dynamic_batching { }", f"dynamic_batching {{ {policy} }}"))
    chain(scene.repository, "through", "patient", "tenth")
    await scene.sync()
    worker = await scene.worker()
    await scene.ready()
    await worker._plain_batcher("patient", 1).pause_batching()  # type: ignore[union-attr]

    reply = await scene.post("through", parameters={"timeout": 100_000})

    assert reply.status_code >= 400
    assert "step of model 'patient'" in reply.json()["error"]
