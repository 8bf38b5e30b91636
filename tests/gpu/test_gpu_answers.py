"""Models on a GPU, through the whole server and Redis, give the answers that they give on the CPU.

digits          onnxruntime, CUDA        embed_onnx     onnxruntime, CUDA
digits_torch    TorchScript              embed_torch    TorchScript, embed_export torch.export
digits_plan     tensorrt, engine built from the ONNX file; digits_graphs the same with CUDA graphs
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import tritonclient.http as triton

from examples import digits
from tests.e2e.conftest import running
from tests.gpu.conftest import require, usable
from tests.support import real_models

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

Array = npt.NDArray[Any]

KIND = "KIND_GPU"
RUNTIME_OF = {
    "digits": "onnxruntime",
    "digits_torch": "pytorch",
    "digits_plan": "tensorrt",
    "digits_graphs": "tensorrt",
    "embed_onnx": "onnxruntime",
    "embed_torch": "pytorch",
    "embed_export": "pytorch",
}
_AT_ONCE = 16


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model for which this machine has a runtime on its GPU."""
    runtimes = usable()
    if not runtimes:
        pytest.skip("no runtime that is installed can use a GPU of this machine")
    path = tmp_path_factory.mktemp("gpu")
    made = real_models.build_digits(path, kind=KIND)
    real_models.build_embedders(path, kind=KIND)
    for name, more in (("digits_plan", ""), ("digits_graphs", "optimization { cuda { graphs: true } }\n")):
        version = path / name / "1"
        version.mkdir(parents=True)
        shutil.copy(made.model_path, version / "model.onnx")
        config = (path / digits.NAME / "config.pbtxt").read_text().replace('"digits"', f'"{name}"')
        config = config.replace('"onnxruntime"', '"tensorrt"') + 'default_model_filename: "model.onnx"\n' + more
        (path / name / "config.pbtxt").write_text(config)
    (path / "cpu").mkdir()
    for name, runtime in RUNTIME_OF.items():
        file = path / name / "1" / "model.onnx"
        if file.exists():
            shutil.copy(file, path / "cpu" / f"{name}.onnx")
        if runtime not in runtimes:
            shutil.rmtree(path / name)
    shutil.move(path / "cpu", path.parent / f"{path.name}-cpu")
    return path


@pytest.fixture(scope="module")
def client(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    with (
        running(repository, tmp_path_factory.mktemp("up")) as stack,
        triton.InferenceServerClient(stack.address, concurrency=_AT_ONCE, network_timeout=120) as client,
    ):
        yield client


def on_cpu(repository: Path, model: str, inputs: dict[str, Array]) -> dict[str, Array]:
    """Computes the answers here, with onnxruntime on the CPU."""
    path = repository.parent / f"{repository.name}-cpu" / f"{model}.onnx"
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def infer(client: triton.InferenceServerClient, model: str, inputs: dict[str, Array]) -> list[triton.InferResult]:
    """Sends all rows in one request, then each as a request of its own, all at once; returns the answers."""

    def tensors(rows: slice) -> list[triton.InferInput]:
        given = []
        for name, array in inputs.items():
            part = array[rows]
            datatype = "FP32" if array.dtype.kind == "f" else "INT64"
            given.append(triton.InferInput(name, list(part.shape), datatype))
            given[-1].set_data_from_numpy(part)
        return given

    rows = len(next(iter(inputs.values())))
    whole = client.infer(model, tensors(slice(None)))
    pending = [client.async_infer(model, tensors(slice(row, row + 1))) for row in range(rows)]
    return [whole, *(one.get_result() for one in pending)]


@pytest.mark.parametrize("model", [name for name in RUNTIME_OF if name.startswith("digits")])
def test_digits(model: str, request: pytest.FixtureRequest) -> None:
    """Every runtime reads the digits that the CPU reads, whatever batches they meet in, at the third time too."""
    require(RUNTIME_OF[model])
    repository: Path = request.getfixturevalue("repository")
    client: triton.InferenceServerClient = request.getfixturevalue("client")
    images = np.random.default_rng(0).integers(0, 17, (32, 64)).astype(np.float32)
    expected = on_cpu(repository, "digits_plan", {"image": images})
    for _ in range(3):  # a CUDA graph is recorded after the second
        whole, *each = infer(client, model, {"image": images})
        np.testing.assert_allclose(whole.as_numpy("probabilities"), expected["probabilities"], atol=5e-3)
        alone = np.concatenate([result.as_numpy("probabilities") for result in each])
        np.testing.assert_allclose(alone, expected["probabilities"], atol=5e-3)
        sure = expected["probabilities"].max(1) > 0.6
        np.testing.assert_array_equal(whole.as_numpy("label")[sure], expected["label"][sure])


@pytest.mark.parametrize("model", [name for name in RUNTIME_OF if name.startswith("embed")])
def test_embeddings(model: str, request: pytest.FixtureRequest) -> None:
    """Every runtime gives the CPU's vectors, up to what TF32 rounds."""
    require(RUNTIME_OF[model])
    repository: Path = request.getfixturevalue("repository")
    client: triton.InferenceServerClient = request.getfixturevalue("client")
    ids = np.random.default_rng(0).integers(1000, 20000, (8, 24))
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    expected = on_cpu(repository, "embed_onnx", inputs)["embedding"]
    whole, *each = infer(client, model, inputs)
    np.testing.assert_allclose(whole.as_numpy("embedding"), expected, atol=5e-3)
    np.testing.assert_allclose(np.concatenate([r.as_numpy("embedding") for r in each]), expected, atol=5e-3)
