"""The gateway and the Redis of a command: one rule for all commands."""

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qinfer.cli.console import DEFAULT_URL, UrlOption
from qinfer.cli.local.machine import RunFile, remove_run, write_run
from qinfer.cli.overview import redis_settings
from qinfer.core.settings import unknown_variables
from qinfer.errors import SettingsError

RUNNING = RunFile(os.getpid(), "http://127.0.0.1:9123", "redis://127.0.0.1:6400/0")
app = typer.Typer()


@app.command()
def ask(url: UrlOption = DEFAULT_URL) -> None:
    typer.echo(url)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the current directory, two below that of a running `qinfer up`."""
    monkeypatch.delenv("QINFER_URL", raising=False)
    (tmp_path / ".qinfer").mkdir()
    write_run(tmp_path / ".qinfer", RUNNING)
    directory = tmp_path / "models" / "gen"
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)
    return tmp_path


def asked(*words: str, env: dict[str, str] | None = None) -> str:
    return CliRunner().invoke(app, words, env=env).output.strip()


def test_the_gateway_is_that_of_the_option_the_variable_or_the_nearest_server(home: Path) -> None:
    variable = {"QINFER_URL": "http://variable:1"}

    assert asked("--url", "http://option:1", env=variable) == "http://option:1"
    assert asked(env=variable) == "http://variable:1"
    assert asked() == RUNNING.url


@pytest.mark.parametrize("pid", [None, 2**22 + 1], ids=["no file", "a server that has ended"])
def test_without_a_server_nearby_it_is_the_usual_port(home: Path, pid: int | None) -> None:
    if pid is None:
        remove_run(home / ".qinfer")
    else:
        write_run(home / ".qinfer", RunFile(pid, RUNNING.url, RUNNING.redis_url))

    assert asked() == "http://127.0.0.1:8000"


def test_the_redis_is_that_of_the_nearest_server(home: Path) -> None:
    assert redis_settings("", Path(".qinfer")).url.get_secret_value() == RUNNING.redis_url


def test_a_command_that_reads_redis_says_so_where_the_variable_names_another_server(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not show another server than the one that the other commands call."""
    monkeypatch.setenv("QINFER_URL", "http://elsewhere:8000")

    with pytest.raises(SettingsError, match="this command reads Redis"):
        redis_settings("", Path(".qinfer"))
    assert redis_settings("redis://r:1/0", Path(".qinfer")).url.get_secret_value() == "redis://r:1/0"


def test_the_variable_of_commands_is_no_unknown_setting() -> None:
    assert unknown_variables(["QINFER_URL"]) == []
