"""The watch of an app's files: it reads the app again after a save, and keeps the models of a broken one."""

import os
import queue
from pathlib import Path

import pytest

from qinfer.functions.app import watch_apps
from qinfer.functions.repository import write_repository

APP = "import qinfer\n@qinfer.model\ndef f({argument}: str) -> str: ...\n"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP.format(argument="x"))
    write_repository([str(path)], tmp_path / "functions", os.environ)
    return path


def test_a_save_writes_the_repository_again(app: Path, tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()
    config = tmp_path / "functions/f/config.pbtxt"

    with watch_apps([f"{app}:f"], tmp_path / "functions", os.environ, said.put):
        app.write_text(APP.format(argument="other"))
        first = said.get(timeout=30)
        after = config.read_text()
        app.write_text("raise ValueError('half a file')\n")
        second = said.get(timeout=30)

    assert first == "an app was saved: its models are loaded again"
    assert '"other"' in after
    assert second.startswith("an app was saved and can't be read; the models before it go on:\n")
    assert "ValueError: half a file" in second
    assert config.read_text() == after


def test_a_file_beside_the_app_belongs_to_it(app: Path, tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()
    model = tmp_path / "functions/f/1/model.py"
    before = model.read_text()

    with watch_apps([str(app)], tmp_path / "functions", os.environ, said.put):
        (tmp_path / "helper.py").write_text("x = 1\n")
        said.get(timeout=30)

    assert model.read_text() != before


def test_a_save_between_the_start_and_the_watch_is_not_missed(app: Path, tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()
    began_ns = app.stat().st_mtime_ns
    os.utime(app, ns=(began_ns + 1, began_ns + 1))

    with watch_apps([str(app)], tmp_path / "functions", os.environ, said.put, since_ns=began_ns):
        assert said.get(timeout=30) == "an app was saved: its models are loaded again"
