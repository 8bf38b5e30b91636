"""`qinfer example`: what it writes can be served, and answers right; its alerts are those that are tested."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import yaml
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.core.settings import RepositorySettings
from qinfer.models.repository.open import open_repositories
from scripts.generate_example import FOLDER
from tests.support.deploy.deployments import DEPLOY
from tests.unit.deploy.test_prometheus import promtool


def test_the_example_is_a_model_repository_with_inputs(tmp_path: Path) -> None:
    """Below the folder, which is made; a second time it is written anew."""
    folder = tmp_path / "new"

    shown = [CliRunner().invoke(app, ["example", "digits", str(folder), "--json"]) for _ in range(2)]
    text = CliRunner().invoke(app, ["example", "digits", str(folder)])
    (model,) = open_repositories(RepositorySettings(path=str(folder / "models"))).scan()
    request = json.loads((folder / "digit.json").read_text())

    assert [one.exit_code for one in shown] == [0, 0]
    assert all(Path(path).exists() for path in json.loads(shown[0].stdout)["written"])
    assert f"qinfer up --model-repository {folder}/models" in text.stdout
    assert (model.model, model.error, model.versions) == ("digits", "", (1,))
    assert request["inputs"][0]["shape"] == [1, 64]


def test_its_answers_are_right() -> None:
    """The packaged model knows the packaged images, which it was not trained on."""
    rows = [json.loads(line) for line in (FOLDER / "digits.jsonl").read_text().splitlines()]
    session = onnxruntime.InferenceSession(FOLDER / "model.onnx")

    images = np.array([row["pixels"] for row in rows], np.float32)
    (labels,) = session.run(["label"], {"image": images})

    assert np.mean(labels[:, 0] == [row["digit"] for row in rows]) >= 0.95


def test_the_monitoring_of_one_machine_is_that_of_the_deployments(tmp_path: Path) -> None:
    """The same rules and dashboards; Prometheus scrapes as elsewhere, but for the addresses."""
    ended = CliRunner().invoke(app, ["example", "monitoring", str(tmp_path)])
    written, shipped = tmp_path / "monitoring", DEPLOY / "prometheus"
    jobs, theirs = (
        {job["job_name"]: job for job in yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]}
        for folder in (written, shipped)
    )

    assert (ended.exit_code, "prometheus --config.file=" in ended.stdout) == (0, True)
    for kind, source in (("rules", shipped / "rules"), ("dashboards", DEPLOY / "grafana" / "dashboards")):
        assert {path.name: path.read_bytes() for path in (written / kind).iterdir()} == {
            path.name: path.read_bytes() for path in source.iterdir()
        }
    assert {name: job["params"] for name, job in jobs.items()} == {name: theirs[name]["params"] for name in jobs}
    assert jobs["qinfer-cluster"]["relabel_configs"] == theirs["qinfer-cluster"]["relabel_configs"]
    assert all(job["static_configs"] == [{"targets": ["127.0.0.1:8002"]}] for job in jobs.values())
    promtool("check", "config", written / "prometheus.yml")


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    ended = CliRunner().invoke(app, ["example", "digits", str(tmp_path / "file")])

    assert (ended.exit_code, "can't be written" in ended.stderr) == (1, True)


def test_another_name_is_wrong_usage() -> None:
    ended = CliRunner().invoke(app, ["example", "nope"])

    assert ended.exit_code == 64
    assert "Invalid value for 'NAME': 'nope' is not one of 'digits', 'monitoring'" in ended.stderr
