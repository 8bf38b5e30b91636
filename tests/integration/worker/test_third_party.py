"""The example of a third party's backend, in a real worker: found by its entry point, served like any other."""

import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

from examples.backend.linear_backend import FILE, LinearBackend
from qinfer.errors import ModelLoadFailed
from qinfer.tensors import to_numpy
from tests.support.backends import CPU, GPU, run, spec, tensors
from tests.support.worker_processes import worker_processes

PACKAGE = Path(__file__).parents[3] / "examples" / "backend"
ROOT = PACKAGE.parents[1]
CONFIG = """
backend: "linear" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
PORTS = tensors(("x", "FP32", (1,))), tensors(("y", "FP32", (2,)))


def install(directory: Path) -> str:
    """Installs the package as pip would, from its own pyproject.toml; returns the PYTHONPATH that finds it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    distribution = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (distribution / "entry_points.txt").write_text("\n".join(groups) + "\n")
    (directory / "linear_backend.py").write_bytes((PACKAGE / "linear_backend.py").read_bytes())
    return os.pathsep.join([str(directory), str(ROOT)])


def write(version: Path, bias: tuple[float, ...] = (0.0, 1.0)) -> Path:
    version.mkdir(parents=True, exist_ok=True)
    np.savez(version / FILE, weights=np.array([[2.0, -1.0]], np.float32), bias=np.array(bias, np.float32))
    return version


async def test_a_worker_serves_it(tmp_path: Path) -> None:
    """A model of that backend is loaded and answers, through Redis, in a worker that knows only its entry point."""
    write(tmp_path / "repository" / "lines" / "1")
    (tmp_path / "repository" / "lines" / "config.pbtxt").write_text(CONFIG)
    async with worker_processes(tmp_path) as pool:
        await pool.worker(PYTHONPATH=install(tmp_path / "site"))
        answers = await pool.answered(*(pool.submit(value, "lines") for value in (1.0, 2.0, 3.0)))
        results = [to_numpy(answer.outputs[0]).tolist() for answer in answers]
    assert results == [[[2.0, 0.0]], [[4.0, -1.0]], [[6.0, -2.0]]]


def test_its_batches(tmp_path: Path) -> None:
    """Each item gets its rows."""
    backend = LinearBackend()
    backend.load(spec("linear", *PORTS), write(tmp_path), CPU)
    answers = run(backend, {"x": np.array([[1.0], [2.0], [3.0]], np.float32)}, rows=(1, 2))
    np.testing.assert_array_equal(answers.arrays(1)["y"], [[4.0, -1.0], [6.0, -2.0]])
    backend.unload()


def test_what_it_refuses(tmp_path: Path) -> None:
    """A missing file, other shapes, a GPU: each is said."""
    backend = LinearBackend()
    with pytest.raises(ModelLoadFailed, match="can't be read: FileNotFoundError"):
        backend.load(spec("linear", *PORTS), tmp_path, CPU)
    with pytest.raises(ModelLoadFailed, match="the weights are"):
        backend.load(spec("linear", *PORTS), write(tmp_path, bias=(1.0, 2.0, 3.0)), CPU)
    with pytest.raises(ModelLoadFailed, match="set KIND_CPU"):
        backend.load(spec("linear", *PORTS), tmp_path, GPU)
