"""LiteRT, forests, JAX and MLflow in a real gateway and worker: the frameworks' own answers, and their errors."""

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as over_grpc
from tritonclient.utils import InferenceServerException

from tests.support.framework_models import build, needs, parameter, sample
from tests.support.framework_scene import asked, assert_as_in_process, framework_served, load
from tests.support.served_models import ServedModels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Served = Callable[[str], AbstractAsyncContextManager[ServedModels]]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def repository(framework: str) -> Path:
        if framework not in built:
            built[framework] = build(framework, tmp_path_factory.mktemp(framework) / "models")
        return built[framework]

    return repository


@pytest.fixture
async def scene(request: pytest.FixtureRequest, repositories: Callable[[str], Path]) -> AsyncIterator[ServedModels]:
    async with framework_served(repositories(request.param)) as one:
        yield one


def of(framework: str) -> pytest.MarkDecorator:
    """Serves the models of a framework to a test, where its packages are installed."""
    one = pytest.param(framework, marks=needs(framework), id=framework)
    return pytest.mark.parametrize("scene", [one], indirect=True)


def wrong(scene: ServedModels, model: str, config: str) -> str:
    """Adds a model with the files of another one and this configuration."""
    directory = scene.repository / "wrong"
    directory.mkdir(exist_ok=True)
    version = directory / "1"
    version.unlink(missing_ok=True)
    version.symlink_to(scene.repository / model / "1")
    (directory / "config.pbtxt").write_text(config)
    return "wrong"


async def ports(scene: ServedModels, model: str) -> tuple[int, list[Any], list[Any]]:
    """Returns the batch size, and (data type, dims) of the inputs and outputs in the completed configuration."""
    config = await scene.http.get_model_config(model)
    described = [[(io["data_type"], io["dims"]) for io in config[kind]] for kind in ("input", "output")]
    return config["max_batch_size"], described[0], described[1]


@of("litert")
async def test_litert_answers_as_its_interpreter(scene: ServedModels) -> None:
    """Signatures, tensors without one, and quantised tensors: equal to 1e-6; resized rows, too."""
    for model in ("signed", "second", "fixed", "resized", "int8"):
        await load(scene, model)
        await assert_as_in_process(scene, model, rtol=1e-5, atol=1e-6)

    assert await ports(scene, "signed") == (4, [("TYPE_FP32", [4])], [("TYPE_FP32", [3]), ("TYPE_INT64", [1])])
    assert await ports(scene, "fixed") == (0, [("TYPE_FP32", [1, 4])], [("TYPE_FP32", [1, 3])])
    assert await ports(scene, "int8") == (4, [("TYPE_INT8", [4])], [("TYPE_INT8", [3])])


@of("litert")
async def test_litert_converts_quantised_tensors_that_are_configured_as_real(scene: ServedModels) -> None:
    await load(scene, "real")

    await assert_as_in_process(scene, "real", rtol=1e-6)


@of("litert")
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (parameter("delegate", "libedgetpu.so.9"), "delegate 'libedgetpu.so.9' can't be used: .*remove the parameter"),
        (parameter("signature", "triple"), "parameter 'signature' is 'triple'; the model has double, serving_default"),
        (parameter("use_xnnpack", "perhaps"), "'use_xnnpack' is 'perhaps'; it must be one of true"),
        ("instance_group { kind: KIND_GPU gpus: [ 0 ] }", "no GPUs|where backend 'litert' can't run|GPU"),
    ],
)
async def test_litert_refuses(scene: ServedModels, config: str, told: str) -> None:
    with pytest.raises(InferenceServerException, match=told):
        await load(scene, wrong(scene, "signed", f'backend: "litert" {config}'))


@of("forest")
async def test_forests_answer_as_their_libraries(scene: ServedModels) -> None:
    """Equal to a relative 1e-5, with missing values and categories."""
    for model in ("binary", "chosen", "strict", "multi", "best", "price", "light", "coded", "forest", "extra", "mean"):
        await load(scene, model)
        await scene_in_batches(scene, model)

    assert await ports(scene, "binary") == (4, [("TYPE_FP32", [6])], [("TYPE_FP32", [1])])
    assert await ports(scene, "multi") == (4, [("TYPE_FP32", [6])], [("TYPE_FP32", [3])])


async def scene_in_batches(scene: ServedModels, model: str) -> None:
    """Checks a forest's answers to its sample, four rows at a time."""
    inputs, outputs = sample(scene.repository, model)
    rows, expected = inputs["input__0"], outputs["output__0"]
    found = [
        (await asked(scene.grpc, over_grpc, model, {"input__0": rows[at : at + 4]})).as_numpy("output__0")
        for at in range(0, len(rows), 4)
    ]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-7, err_msg=model)


@of("forest")
async def test_a_forest_configured_for_triton_needs_no_change(scene: ServedModels) -> None:
    config = (
        'backend: "fil" max_batch_size: 64 input { name: "input__0" data_type: TYPE_FP32 dims: [ 6 ] } '
        'output { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] } instance_group { kind: KIND_AUTO } '
        f"{parameter('model_type', 'xgboost_ubj')}{parameter('output_class', 'true')}"
        f"{parameter('storage_type', 'AUTO')}{parameter('threshold', '0.8')}"
    )
    inputs, outputs = sample(scene.repository, "strict")

    await load(scene, wrong(scene, "strict", config))
    answer = await asked(scene.grpc, over_grpc, "wrong", inputs)

    np.testing.assert_array_equal(answer.as_numpy("output__0"), outputs["output__0"])


@of("forest")
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            parameter("model_type", "xgboost"),
            "'model_type' is 'xgboost'; it must be one of .*save the model of XGBoost",
        ),
        (parameter("threshold", "high"), "parameter 'threshold' is 'high'; it must be a number"),
        (parameter("model_type", "lightgbm"), "treelite can't load the forest"),
    ],
)
async def test_forests_refuse(scene: ServedModels, config: str, told: str) -> None:
    with pytest.raises(InferenceServerException, match=told):
        await load(scene, wrong(scene, "binary", f'backend: "forest" {config}'))


@of("jax")
async def test_jax_answers_as_the_exported_function(scene: ServedModels) -> None:
    """XLA may fuse otherwise: equal to a relative 1e-5."""
    for model in ("classify", "pair"):
        await load(scene, model)
        await assert_as_in_process(scene, model, rtol=1e-5)

    assert await ports(scene, "classify") == (4, [("TYPE_FP32", [4])], [("TYPE_FP32", [3]), ("TYPE_FP32", [1])])
    assert await ports(scene, "pair") == (0, [("TYPE_FP32", [2])] * 2, [("TYPE_FP32", [2])] * 2)


_BATCHES = """
import sys

import numpy as np

from qinfer.backends.frameworks.jax import load
from qinfer.backends.python_host.messages import LoadFramework

program = load(LoadFramework("jax", "classify", sys.argv[1], {}, 1, max_batch_size=6))
for rows in range(1, 7):
    x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    found = program.execute({"x": x}, ["sum"])["sum"]
    np.testing.assert_array_equal(found, x.sum(axis=-1, keepdims=True))
print(program._run._cache_size())
"""


@needs("jax")
def test_jax_compiles_powers_of_two_and_the_largest_batch(repositories: Callable[[str], Path]) -> None:
    """Batches of 1, 2, 4 and 6 rows; in a process of its own, as JAX is configured once."""
    path = repositories("jax") / "classify" / "1" / "model.jax"
    done = subprocess.run([sys.executable, "-c", _BATCHES, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


@of("jax")
async def test_jax_refuses_another_file(scene: ServedModels) -> None:
    version = scene.repository / "text" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.jax").write_text("not a program")

    with pytest.raises(InferenceServerException, match="jax can't load the program"):
        await load(scene, "text")


@of("mlflow")
async def test_mlflow_answers_as_its_pyfunc(scene: ServedModels) -> None:
    """Columns are inputs of one element for each row."""
    await load(scene, "mixer")

    await assert_as_in_process(scene, "mixer", rtol=0)
    inputs = [("TYPE_FP64", [1]), ("TYPE_INT64", [1]), ("TYPE_STRING", [1])]
    assert await ports(scene, "mixer") == (4, inputs, [("TYPE_FP64", [1])])


@of("mlflow")
async def test_mlflow_reports_the_error_of_the_models_code(scene: ServedModels) -> None:
    await load(scene, "mixer")
    inputs, _ = sample(scene.repository, "mixer")
    words = np.array([[b"\xff"], [b"a"]], object)

    with pytest.raises(InferenceServerException, match="column 'word' holds bytes that are not UTF-8"):
        await asked(scene.grpc, over_grpc, "mixer", {**inputs, "word": words})
