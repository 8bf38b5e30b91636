"""Every command that prints data has `--json`, and what completes names never fails."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qinfer.cli import overview
from qinfer.cli.console import model_names, print_json
from qinfer.cli.main import app
from qinfer.errors import BrokerUnavailable

RUNS_ON = {"autoscale", "bridge", "dev", "up"}
"""Programs: they run until they are stopped, and log."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        if not is_group or command.invoke_without_command:
            yield " ".join((*path, name)), command
        if is_group:
            yield from commands(command, (*path, name))


def test_every_command_that_prints_data_has_json() -> None:
    """So that scripts never read tables."""
    found = dict(commands(typer.main.get_command(app)))

    without = {name for name, one in found.items() if not any("--json" in option.opts for option in one.params)}

    assert without == RUNS_ON
    assert {"status", "queues", "workers", "workers drain", "doctor", "healthcheck worker"} <= found.keys()


@pytest.mark.parametrize(
    ("words", "status", "code", "said"),
    [
        (["infer", "--json"], 64, "usage", "Missing argument 'MODEL'"),
        (["infer", "m", "--json", "--inpt", "x"], 64, "usage", "No such option"),
        (["nothing", "--json"], 64, "usage", "No such command 'nothing'"),
        (["infer", "m", "--json", "--url", "gateway"], 64, "invalid_request", "is not a gateway's URL"),
        (["infer", "m", "--json", "--url", "http://127.0.0.1:1"], 69, "unreachable", "no server answers"),
        (["models", "list", "--json", "--redis", "redis://127.0.0.1:1/0"], 69, "broker_unavailable", "can't connect"),
        (["dlq", "list", "--json", "--after", "1-0"], 64, "usage", "it needs a MODEL"),
        (["models", "load", "m", "--json", "--file", "x"], 1, "internal", "write VERSION/NAME=FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_json_too(words: list[str], status: int, code: str, said: str) -> None:
    """On stdout one document, on stderr the text."""
    shown = CliRunner().invoke(app, words)

    error = json.loads(shown.stdout)["error"]
    assert (shown.exit_code, error["exit_code"], error["code"]) == (status, status, code)
    assert said in error["message"]
    assert said in " ".join(shown.stderr.split())


def test_a_missing_package_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only the client is installed."""
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "qinfer.cli.overview", raising=False)
    monkeypatch.delitem(sys.modules, "qinfer.queue.clients", raising=False)

    shown = CliRunner().invoke(app, ["status", "--json"])

    assert json.loads(shown.stdout)["error"]["code"] == "not_installed"
    assert (shown.exit_code, "pip install 'qinfer-ml[server]'" in shown.stderr) == (1, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--install-completion` would install."""
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: (shell, shell))

    shown = CliRunner().invoke(app, ["--show-completion"], env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": ""})

    assert shown.exit_code == 0, shown.output
    assert "_QINFER_COMPLETE" in shown.stdout or "_ROOT_COMPLETE" in shown.stdout or "complete" in shown.stdout


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "no url", ""])
def test_names_are_completed_silently_or_not_at_all(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line that is being typed is no place for errors."""
    monkeypatch.delenv("QINFER_REDIS__URL", raising=False)
    context = typer.Context(typer.main.get_command(app))
    context.params = {"redis": url, "data_dir": tmp_path}

    assert model_names(context, "d") == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("words", [("--log-format", "json"), ("--log-format=json",), ()])
def test_a_wrong_option_of_up_is_a_line_of_its_log(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is JSON, as a log collector reads it; else it is text."""
    for number, variable in enumerate(("json", "text")):
        monkeypatch.setenv("QINFER_LOG__FORMAT", variable)
        ended = CliRunner().invoke(app, ["up", *words, "--nonsense"])

        assert ended.exit_code == 64
        if words or number == 0:
            assert "No such option: --nonsense" in json.loads(ended.stderr)["error"]
        else:
            assert ended.stderr.startswith("Usage: ")


def test_a_redis_that_refuses_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the line can do more than try again."""

    def refuse(*_: object) -> None:
        raise BrokerUnavailable("the queue can't write to its disk; try again")

    monkeypatch.setattr(overview, "run_overview", refuse)
    shown = CliRunner().invoke(app, ["queues", "--redis", "redis://127.0.0.1:1/0"])

    assert shown.exit_code == 69
    assert "can't write to its disk; `qinfer doctor` finds problems of Redis" in " ".join(shown.stderr.split())


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"y": [math.nan, math.inf, 1.5]})

    assert capsys.readouterr().out == '{"y": [null, null, 1.5]}\n'
