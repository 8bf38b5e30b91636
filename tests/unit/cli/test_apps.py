"""`qinfer new`, `qinfer models check` and `qinfer build`: from an empty folder to a repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.core.settings import variable_names

APP = """
from typing import Annotated
import numpy as np
import qinfer
from helper import louder

@qinfer.model(timeout_s=7)
def shout(text: list[str]) -> list[str]:
    return [louder(each) for each in text]

@qinfer.model(idle_s=30)
def count(number: int, state: qinfer.State) -> int:
    state["count"] = state.get("count", 0) + 1
    return state["count"]
"""
HELPER = "def louder(text: str) -> str:\n    return text.upper()\n"
COMPLETES = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [3]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_max_batch_size(4)
        return config
    def execute(self, requests): ...
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


@pytest.fixture
def written() -> None:
    write("app/app.py", APP)
    write("app/helper.py", HELPER)


def test_a_new_app_passes_its_test_and_can_be_checked(tmp_path: Path) -> None:
    status, said, _ = run("new", "greet")
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "greet",
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert status == 0
    assert "qinfer dev app.py" in said
    assert "1 passed" in tested.stdout, tested.stdout
    assert "# greet, version 1\n" in run("models", "check", "greet/app.py")[1]


@pytest.mark.parametrize("name", ["a-b", "1a", "class", "a/b", ""])
def test_a_name_that_is_no_function_is_refused(name: str) -> None:
    status, _, said = run("new", name)

    assert status == 64
    assert "it becomes the name of a function: letters, digits and '_'" in " ".join(said.split())


def test_a_folder_that_is_there_is_kept() -> None:
    write("greet/notes.txt", "mine")

    status, _, said = run("new", "greet")

    assert (status, os.listdir("greet")) == (1, ["notes.txt"])
    assert "greet is there already; give another name, or remove it" in said


@pytest.mark.usefixtures("written")
def test_an_app_is_checked_without_a_server() -> None:
    status, said, _ = run("models", "check", "app/app.py")

    assert status == 0
    assert 'key: "qinfer.default_timeout_s"' in said
    assert "max_sequence_idle_microseconds: 30000000" in said
    assert not list(Path().rglob(".qinfer"))


def test_a_mistake_in_hints_is_shown_with_its_line_and_the_remedy() -> None:
    write("app.py", "import qinfer\n@qinfer.model\ndef f(x) -> str: ...\n")

    status, _, said = run("models", "check", "app.py")

    assert status == 1
    assert "app.py:3: f: 'x' has no type; write x: list[str], or another type" in said


@pytest.mark.parametrize("command", [("models", "check", "app.py"), ("build", "app.py", "models")])
def test_an_app_sees_the_variables_that_its_models_see(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("app.py", 'import os, qinfer\nos.environ["ACME_X"]\n@qinfer.model\ndef f(x: str) -> str: ...\n')
    monkeypatch.setenv("ACME_X", "x")

    refused = run(*command)
    monkeypatch.setenv("QINFER_WORKER__MODEL_ENV", '["ACME_*"]')

    assert refused[0] == 1
    assert "KeyError: 'ACME_X' is not in the environment of the model" in refused[2]
    assert "name it in QINFER_WORKER__MODEL_ENV" in refused[2]
    assert run(*command)[0] == 0


def test_a_repository_is_checked_and_its_errors_have_lines() -> None:
    write("models/good/1/model.py", COMPLETES)
    write("models/bad/config.pbtxt", 'backend: "python"\nmax_batchsize: 4\n')
    write("models/bad/1/model.py", "")
    write("models/pipeline/config.pbtxt", ENSEMBLE)
    Path("models/pipeline/1").mkdir()

    status, said, wrong = run("models", "check", "models")

    assert status == 1
    assert said.startswith("# good, version 1\n")
    assert 'name: "x"' in said
    assert "max_batch_size: 4" in said
    assert "model 'bad': config.pbtxt, line 2, column 1" in wrong
    assert "max_batch_size" in wrong
    assert "model 'pipeline': it uses model 'absent', which is not in this repository" in wrong


ENSEMBLE = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "absent" model_version: -1
  input_map { key: "a" value: "x" } output_map { key: "b" value: "y" } } }
"""


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_place_without_models_is_an_error(place: str) -> None:
    Path("empty").mkdir()

    status, _, said = run("models", "check", place)

    assert status != 0
    assert "a model repository looks like this" in said


@pytest.mark.usefixtures("written")
def test_a_built_repository_needs_no_app() -> None:
    status, said, _ = run("build", "app/app.py", "models")
    write("app/app.py", "raise ValueError('gone')")

    assert (status, said) == (0, "built shout, count in models\nserve it:  qinfer up --model-repository models\n")
    checked, found, _ = run("models", "check", "models")
    assert checked == 0
    assert "# shout, version 1\n" in found
    assert sorted(path.name for path in Path("models/shout/1/app").iterdir()) == ["app.py", "helper.py"]


@pytest.mark.usefixtures("written")
def test_a_build_replaces_an_earlier_build_but_no_other_model() -> None:
    run("build", "app/app.py", "models")
    write("app/more.py", "")
    Path("app/helper.py").write_text(HELPER.replace("upper", "title"))

    assert run("build", "app/app.py:shout", "models")[0] == 0
    assert "title" in Path("models/shout/1/app/helper.py").read_text()
    write("models/count/1/model.py", "mine")
    status, _, said = run("build", "app/app.py", "models")
    assert status == 1
    assert "count is there, and no model that was built; remove it, or rename 'count'" in said


def test_a_package_is_built_with_its_modules() -> None:
    write("pack/__init__.py", "import qinfer\nfrom pack.words import shout\nshout = qinfer.model(shout)\n")
    write("pack/inner/__init__.py", "")
    write("pack/words.py", "def shout(text: str) -> str:\n    return text.upper()\n")

    assert run("build", "pack", "models")[0] == 0
    assert {str(path.relative_to("models/shout/1/app")) for path in Path("models/shout/1/app").rglob("*.py")} == {
        "pack/__init__.py",
        "pack/inner/__init__.py",
        "pack/words.py",
    }


def test_a_model_that_triton_cannot_run_is_not_built() -> None:
    write(
        "app.py",
        "import numpy as np, qinfer\nfrom typing import Annotated\n@qinfer.model\n"
        'def f(x: Annotated[np.ndarray, "BF16", 2]) -> Annotated[np.ndarray, "FP32", 2]: ...\n',
    )

    status, _, said = run("build", "app.py", "models")

    assert (status, Path("models").exists()) == (1, False)
    assert "model 'f' can't be built: 'x' is BF16" in said
