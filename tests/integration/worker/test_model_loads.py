"""Models that load, call and unload another model, in a real worker process on a real Redis."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from onnx import helper

from qinfer.core.messages import Response
from qinfer.tensors import to_numpy
from tests.support import models
from tests.support.python_models import execute, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

pytestmark = pytest.mark.timeout(120)

MANAGER = execute(
    """
name, what = "scale", int(x(requests[0]).flat[0])
if what == 1:
    pb_utils.load_model(name)
if what == 2:
    pb_utils.unload_model(name)
if what == 3:
    pb_utils.load_model(name, config="no json")
if what == 4:
    path = os.path.join(pb_utils.get_model_dir(), "..", "..", name, "1", "model.onnx")
    config = json.dumps({"backend": "onnxruntime", "max_batch_size": 8})
    pb_utils.load_model(name, config=config, files={"file:1/model.onnx": open(path, "rb").read()})
y = np.array([[-1]], "f4")
if pb_utils.is_model_ready(name):
    call = pb_utils.InferenceRequest(
        model_name=name, requested_output_names=["y"], inputs=[pb_utils.Tensor("x", np.array([[21]], "f4"))])
    response = call.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    y = response.output_tensors()[0].as_numpy()
return [reply(y) for request in requests]
"""
)
LOADS_WITH_IT = execute(
    "return [reply(x(r)) for r in requests]",
    before="""
def initialize(self, args):
    if not pb_utils.is_model_ready("scale"):
        pb_utils.load_model("scale")
""",
)
LOOK, LOAD, UNLOAD, WRONG, FILES = range(5)


def write_scale(repository: Path) -> None:
    """Writes a model that doubles."""
    nodes = [
        helper.make_node("Constant", [], ["factor"], value_float=2.0),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    models.write(repository, "scale", nodes, [("x", "FP32", (1,))], [("y", "FP32", (1,))])


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    """Serves `manager`; the repository has `scale`, too, which is not loaded."""
    write_model(tmp_path / "repository", MANAGER, "manager", dims="1", max_batch_size=1)
    async with worker_processes(tmp_path) as one:
        write_scale(tmp_path / "repository")
        yield one


async def told(pool: WorkerProcesses, what: int) -> float | str:
    """Returns what the manager answers: the answer of the model that it manages, or -1, or its failure."""
    (answer,) = await pool.answered(pool.submit(float(what), "manager"))
    return _value(answer)


def _value(answer: Response) -> float | str:
    return answer.failure.message if answer.failure is not None else float(to_numpy(answer.outputs[0]).item())


async def test_a_model_loads_calls_and_unloads_another(pool: WorkerProcesses, tmp_path: Path) -> None:
    """What it has loaded can be called at once, and what it has unloaded is not ready at once."""
    await pool.worker(QINFER_REPOSITORY__CONTROL_MODE="explicit", QINFER_REPOSITORY__OVERLAY=str(tmp_path / "overlay"))

    assert await told(pool, LOOK) == -1
    assert await told(pool, LOAD) == 42
    assert "failed to load 'scale', failed to poll from model repository" in str(await told(pool, WRONG))
    assert await told(pool, LOOK) == 42
    assert await told(pool, UNLOAD) == -1
    assert await told(pool, FILES) == 42
    assert list((tmp_path / "overlay" / "scale").iterdir())


async def test_models_are_loaded_in_explicit_mode_only(pool: WorkerProcesses) -> None:
    """By Triton's text; to look is allowed."""
    await pool.worker()

    for what in (LOAD, UNLOAD):
        assert "explicit model load / unload is not allowed if polling is enabled" in str(await told(pool, what))
    assert await told(pool, LOOK) == -1


async def test_a_model_loads_another_while_it_is_loaded(tmp_path: Path) -> None:
    """As in Triton's example; both are served then."""
    write_model(tmp_path / "repository", LOADS_WITH_IT, "front", dims="1")
    async with worker_processes(tmp_path) as pool:
        write_scale(tmp_path / "repository")
        pool._generations["scale"] = 0  # it is to be ready, too
        await pool.worker(QINFER_REPOSITORY__CONTROL_MODE="explicit")
        stored = await pool.store.model("scale")
        assert stored is not None
        pool._generations["scale"] = stored.generation

        answers = await pool.answered(pool.submit(3.0, "front"), pool.submit(3.0, "scale"))

    assert [_value(answer) for answer in answers] == [3.0, 6.0]
