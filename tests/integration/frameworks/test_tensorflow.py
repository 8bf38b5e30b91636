"""SavedModels in a real gateway and worker: TensorFlow's own answers, its errors, and the death of its process."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as over_grpc
from tritonclient.utils import InferenceServerException

from qinfer.testing import wait_until
from tests.support.framework_models import build, needs, parameter, sample
from tests.support.framework_scene import asked, assert_as_in_process, framework_served, load
from tests.support.python_models import ECHO, write_model
from tests.support.served_models import ServedModels

pytestmark = [
    needs("tensorflow"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

ROUNDING = 1e-6
"""Relative; other batch sizes may add in another order."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedModels]:
    repository = build("tensorflow", tmp_path_factory.mktemp("tensorflow") / "models")
    write_model(repository, ECHO, "echo", dims="1")
    async with framework_served(repository) as one:
        yield one


def only_child(scene: ServedModels, model: str) -> int:
    """Returns the process id of a model's only instance."""
    (instance,) = scene.workers["w1"]._models._loaded[model, 1].instances
    return int(instance.backend._instance.running.pid)  # type: ignore[attr-defined]


async def test_a_saved_model_needs_no_configuration(scene: ServedModels) -> None:
    await load(scene, "default")

    config = await scene.http.get_model_config("default")

    assert (config["backend"], config["platform"]) == ("tensorflow", "tensorflow_savedmodel")
    assert config["max_batch_size"] == 4
    assert [(i["name"], i["data_type"], i["dims"]) for i in config["input"]] == [("x", "TYPE_FP32", [4])]
    assert [(o["name"], o["data_type"], o["dims"]) for o in config["output"]] == [
        ("scores", "TYPE_FP32", [3]),
        ("top", "TYPE_INT64", [1]),
    ]
    await assert_as_in_process(scene, "default", ROUNDING)


async def test_a_parameter_selects_the_signature_of_strings(scene: ServedModels) -> None:
    """BYTES pass unchanged, also bytes that are not UTF-8."""
    await load(scene, "shouting")

    await assert_as_in_process(scene, "shouting", ROUNDING)


async def test_fixed_shapes_and_scalars_have_no_batch_dimension(scene: ServedModels) -> None:
    await load(scene, "scaling")

    config = await scene.http.get_model_config("scaling")

    assert config["max_batch_size"] == 0
    await assert_as_in_process(scene, "scaling", ROUNDING)


async def test_an_error_of_the_graph_reaches_its_caller_only(scene: ServedModels) -> None:
    await load(scene, "scaling")
    inputs, outputs = sample(scene.repository, "scaling")

    with pytest.raises(InferenceServerException, match="k must be above -100"):
        await asked(scene.grpc, over_grpc, "scaling", {**inputs, "k": np.array([-200.0], np.float32)})

    answer = await asked(scene.grpc, over_grpc, "scaling", inputs)
    np.testing.assert_allclose(answer.as_numpy("scaled"), outputs["scaled"], rtol=ROUNDING)


async def test_xla_by_the_graph_level(scene: ServedModels) -> None:
    """Compiled code rounds differently: equal to a relative 1e-5."""
    await load(scene, "xla")

    await assert_as_in_process(scene, "xla", 1e-5)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (parameter("TF_SIGNATURE_DEF", "whisper"), "is 'whisper'; the SavedModel has scale, serving_default, shout"),
        (parameter("TF_NUM_INTRA_THREADS", "many"), "'TF_NUM_INTRA_THREADS' is 'many'; it must be a number >= 0"),
        (
            'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 5 ] } '
            'output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] }',
            r"the model has shape \[-1, 4\], its configuration \[-1, 5\]",
        ),
    ],
)
async def test_the_errors_of_a_load_name_value_and_remedy(scene: ServedModels, config: str, told: str) -> None:
    wrong = scene.repository / "wrong"
    wrong.mkdir(exist_ok=True)
    if not (wrong / "1").exists():
        (wrong / "1").symlink_to(scene.repository / "default" / "1")
    (wrong / "config.pbtxt").write_text(f'backend: "tensorflow" {config}')

    with pytest.raises(InferenceServerException, match=told):
        await load(scene, "wrong")


async def test_a_killed_process_costs_its_own_requests_only(scene: ServedModels) -> None:
    """Others are served meanwhile; the model answers again when its process was started again."""
    await load(scene, "default")
    await load(scene, "echo")
    inputs, outputs = sample(scene.repository, "default")
    before = only_child(scene, "default")

    os.kill(before, signal.SIGKILL)
    echoed = await scene.infer("echo", x=np.ones((1, 1), np.float32))
    answer = await asked(scene.grpc, over_grpc, "default", inputs)

    assert echoed.as_numpy("y").tolist() == [[1.0]]
    np.testing.assert_allclose(answer.as_numpy("scores"), outputs["scores"], rtol=ROUNDING)
    assert only_child(scene, "default") != before


async def test_an_unload_ends_the_process(scene: ServedModels) -> None:
    await load(scene, "default")
    pid = only_child(scene, "default")

    await scene.grpc.unload_model("default")

    await asyncio.to_thread(wait_until, lambda: not Path(f"/proc/{pid}").exists(), 30.0)
    assert "tensorflow" not in sys.modules
