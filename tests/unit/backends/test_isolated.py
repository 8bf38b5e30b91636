"""The mechanism of frameworks' backends, with a stand-in for treelite that its processes import."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.backends import registry
from qinfer.backends.isolated import FrameworkBackend, complete_config
from qinfer.backends.parameters import model_variables, use_model_variables
from qinfer.errors import InferenceFailed, ModelLoadFailed
from qinfer.models.config.config import identify, parse
from qinfer.models.spec import FRAMEWORKS
from tests.support.backends import CPU, GPU, run, spec, tensors

TREELITE = """
import os
from types import SimpleNamespace
import numpy as np

class TreeliteError(Exception): ...

class Model:
    num_feature, input_type, targets = 2, "float32", 1
    def get_header_accessor(self):
        return SimpleNamespace(get_field={"num_class": np.array([1]), "num_target": np.array([self.targets])}.get)
    @staticmethod
    def deserialize(path):
        model = Model()
        model.targets = int(open(path).read() or "1")
        return model

def predict(model, rows, nthread):
    if (rows == 666).any():
        os._exit(3)
    if (rows == 7).any():
        raise TreeliteError("[12:00] tree.cc:1: Check failed: a < b: seven is refused")
    return rows.sum(axis=1, keepdims=True) + 1000 * nthread

gtil = SimpleNamespace(predict=predict)
frontend = None
"""
PORTS = tensors(("input__0", "FP32", (2,))), tensors(("output__0", "FP32", (1,)))
THREADS = {"num_threads": "3"}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path) -> Iterator[Path]:
    """The packages that the processes of models find first."""
    directory = tmp_path / "packages"
    (directory / "treelite").mkdir(parents=True)
    (directory / "treelite" / "__init__.py").write_text(TREELITE)
    kept = dict(model_variables())
    use_model_variables({**os.environ, "PYTHONPATH": str(directory)})
    yield directory
    use_model_variables(kept)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / "m" / "1"
    directory.mkdir(parents=True)
    (directory / "checkpoint.tl").touch()
    return directory


@pytest.fixture
def backend(version: Path) -> Iterator[FrameworkBackend]:
    made = FrameworkBackend("forest")
    made.load(spec("forest", *PORTS, parameters=THREADS), version, CPU)
    yield made
    made.unload()


def test_the_process_gets_the_batch_and_each_request_its_rows(backend: FrameworkBackend) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)

    answers = run(backend, {"input__0": rows}, rows=(1, 2))

    assert answers.array(0).tolist() == [[3001.0]]
    assert answers.array(1).tolist() == [[3005.0], [3009.0]]


def test_an_error_of_the_framework_is_the_requests_error(backend: FrameworkBackend) -> None:
    with pytest.raises(InferenceFailed, match=r"treelite error: seven is refused$"):
        run(backend, {"input__0": np.full((1, 2), 7, np.float32)})


def test_a_dead_process_is_replaced(backend: FrameworkBackend) -> None:
    with pytest.raises(InferenceFailed, match=r"the process of model 'm' died \(exit code 3\)"):
        run(backend, {"input__0": np.full((1, 2), 666, np.float32)})

    assert run(backend, {"input__0": np.ones((1, 2), np.float32)}).array().tolist() == [[3002.0]]


def test_a_process_that_died_while_idle_costs_nothing(backend: FrameworkBackend) -> None:
    process = backend._instance.running
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)

    assert run(backend, {"input__0": np.ones((1, 2), np.float32)}).array().tolist() == [[3002.0]]


def test_large_batches_travel_in_shared_memory(backend: FrameworkBackend) -> None:
    rows = np.ones((50_000, 2), np.float32)

    places = backend.room([rows.nbytes])

    assert places is not None
    places[0][:] = rows.view(np.uint8).reshape(-1)
    placed = places[0].view(np.float32).reshape(rows.shape)
    assert run(backend, {"input__0": placed}, rows=(50_000,)).array().sum() == 50_000 * 3002.0


def refusal(version: Path, device: Any = CPU, **changes: Any) -> str:
    fields = {"inputs": PORTS[0], "outputs": PORTS[1], **changes}
    inputs, outputs = fields.pop("inputs"), fields.pop("outputs")
    with pytest.raises(ModelLoadFailed) as refused:
        FrameworkBackend("forest").load(spec("forest", inputs, outputs, **fields), version, device)
    return refused.value.message


def test_loads_that_are_refused(version: Path) -> None:
    assert "where backend 'forest' can't run; set the instance group's kind to KIND_CPU" in refusal(version, GPU)
    assert "has no file 'other.tl'" in refusal(version, filename="other.tl")
    assert "'num_threads' is 'few'; it must be a number" in refusal(version, parameters={"num_threads": "few"})
    assert "needs inputs that its configuration lacks: ['input__0']" in refusal(version, inputs=())
    wide = tensors(("input__0", "FP32", (9,)))
    assert "the model has shape [-1, 2], its configuration [-1, 9]" in refusal(version, inputs=wide)
    whole = tensors(("input__0", "INT32", (2,)))
    assert "the model has FP32, its configuration INT32" in refusal(version, inputs=whole)
    (version / "checkpoint.tl").write_text("2")
    assert "the forest has 2 targets; only forests with one are supported" in refusal(version)


def test_datatypes_that_the_adapter_converts_are_accepted(version: Path) -> None:
    ports = tensors(("input__0", "FP64", (2,))), tensors(("output__0", "FP64", (1,)))
    backend = FrameworkBackend("forest")
    backend.load(spec("forest", *ports, parameters=THREADS), version, CPU)

    answers = run(backend, {"input__0": np.ones((1, 2))})

    assert answers.outputs()[0].datatype == "FP64"
    backend.unload()


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_missing_package_is_an_error_with_the_extra(framework: str, packages: Path, tmp_path: Path) -> None:
    module = {"litert": "ai_edge_litert", "forest": "treelite"}.get(framework, framework)
    (packages / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}', name='{module}')")
    (packages / "treelite" / "__init__.py").unlink()
    (packages / "treelite").rmdir()
    file = {"tensorflow": "model.savedmodel", "litert": "model.tflite", "jax": "model.jax", "mlflow": "MLmodel"}
    version = tmp_path / "absent" / "1"
    version.mkdir(parents=True)
    (version / file.get(framework, "checkpoint.tl")).touch()
    config = identify(parse(f'backend: "{framework}"'), "absent", [path.name for path in version.iterdir()])

    with pytest.raises(
        ModelLoadFailed, match=rf"install what provides '{module}'.*pip install 'qinfer-ml\[{framework}\]'"
    ):
        complete_config(framework, config, version)


def test_a_configuration_is_completed_by_the_files_tensors(version: Path) -> None:
    config = identify(parse(""), "m", ["checkpoint.tl"])

    completed = registry.completer(config.backend)(config, version)

    assert (completed.backend, completed.max_batch_size) == ("forest", 4)
    assert [(i.name, list(i.dims)) for i in completed.input] == [("input__0", [2])]
    assert [(o.name, list(o.dims)) for o in completed.output] == [("output__0", [1])]


def test_tritons_name_of_the_backend_of_forests() -> None:
    config = identify(parse('backend: "fil"'), "m", ["xgboost.ubj"])

    assert (config.backend, config.default_model_filename) == ("forest", "xgboost.ubj")
