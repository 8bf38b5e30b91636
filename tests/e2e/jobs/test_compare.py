"""`qinfer compare` through the whole server: a version of the digits model that was trained badly is caught."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from examples import digits
from qinfer.cli.main import app
from tests.e2e.conftest import running

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

GOOD, WORSE, SAME = 3, 4, 5
"""Versions: the stable one, one that has hardly learnt, and a copy of the stable one."""


class Scene(NamedTuple):
    """A server with three versions of the digits model, and images in two files."""

    address: str
    folder: Path
    images: npt.NDArray[np.float32]
    answers: dict[int, list[npt.NDArray[Any]]]

    def compare(self, stable: int, canary: int, *more: str) -> tuple[int, dict[str, Any]]:
        targets = [f"{digits.NAME}:{version}" for version in (stable, canary)]
        files = [str(self.folder / "in" / name) for name in ("a.parquet", "b.parquet")]
        options = ["--column", "image=pixels", "--key", "id", "--url", f"http://{self.address}", "--json"]
        result = CliRunner().invoke(app, ["compare", *targets, *files, *options, *more])
        assert result.stdout, result.stderr
        return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("compare")
    repository = folder / "models"
    data = digits.build(repository, version=GOOD)
    digits.build(repository, version=WORSE, iterations=8)
    shutil.copytree(repository / digits.NAME / str(GOOD), repository / digits.NAME / str(SAME))
    (repository / digits.NAME / "config.pbtxt").write_text(digits.CONFIG + "version_policy: { all { } }\n")
    (folder / "in").mkdir()
    for name, rows in (("a.parquet", slice(0, 300)), ("b.parquet", slice(300, len(data.images)))):
        ids = list(range(len(data.images)))[rows]
        images = pa.array(list(data.images[rows]), pa.list_(pa.float32()))
        pq.write_table(pa.table({"id": ids, "pixels": images}), folder / "in" / name, row_group_size=100)
    answers = {}
    for version in (GOOD, WORSE):
        session = onnxruntime.InferenceSession(str(repository / digits.NAME / str(version) / "model.onnx"))
        answers[version] = session.run(None, {"image": data.images})
    with running(repository, folder, 2, ["--allow-store", str(folder)]) as stack:
        yield Scene(stack.address, folder, data.images, answers)


def test_a_version_trained_worse_on_purpose_is_caught(scene: Scene) -> None:
    """Agreement, distances and the most different row are those of the models in this process."""
    code, found = scene.compare(GOOD, WORSE, "--sample", "0")

    labels, probabilities = zip(scene.answers[GOOD], scene.answers[WORSE], strict=True)
    disagree = labels[0][:, 0] != labels[1][:, 0]
    distances = np.abs(probabilities[0] - probabilities[1]).max(axis=1)
    assert code == 1
    assert (found["stable"], found["canary"]) == ("digits:3", "digits:4")
    assert found["rows"] == len(scene.images)
    assert found["differing"] == np.count_nonzero(disagree) > 50
    outputs = {one["output"]: one for one in found["outputs"]}
    assert outputs["label"]["agreeing"] == outputs["probabilities"]["agreeing"] == np.count_nonzero(~disagree)
    assert outputs["probabilities"]["largest"] == pytest.approx(distances.max(), abs=1e-5)
    assert outputs["probabilities"]["mean"] == pytest.approx(distances.mean(), abs=1e-5)
    shown = [int(sample["row"]) for sample in found["samples"] if sample["output"] == "probabilities"]
    assert all(disagree[row] for row in shown)


def test_a_version_that_is_as_good_agrees(scene: Scene) -> None:
    code, found = scene.compare(GOOD, SAME, "--sample", "350")

    assert code == 0
    assert (found["rows"], found["differing"]) == (350, 0)


def test_a_comparison_can_be_repeated(scene: Scene) -> None:
    """It replaces the outputs of the one before."""
    assert scene.compare(GOOD, WORSE, "--sample", "100")[1]["rows"] == 100

    code, found = scene.compare(GOOD, WORSE, "--sample", "200", "--allow", "0.5")

    assert (code, found["rows"]) == (0, 200)


def test_the_version_that_does_not_exist_is_named(scene: Scene) -> None:
    code, found = scene.compare(GOOD, 77)

    assert code == 64
    assert "77" in found["error"]["message"]
