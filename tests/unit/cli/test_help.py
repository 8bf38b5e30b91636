"""Help, and errors that name their remedy, as they are on a terminal of 80 columns."""

import re
from pathlib import Path
from typing import Any, Self

import pytest
import typer
from typer.testing import CliRunner

from qinfer.cli import client
from qinfer.cli.main import app
from qinfer.core.settings import load_settings
from qinfer.errors import ControlDisabled, SettingsError

GROUP: Any = typer.main.get_command(app)
COMMANDS = [
    *([name] for name, command in GROUP.commands.items() if not hasattr(command, "commands")),
    *([name, sub] for name, command in GROUP.commands.items() for sub in getattr(command, "commands", {})),
]


@pytest.fixture(autouse=True)
def _narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_options_are_shown_whole(command: list[str]) -> None:
    """An option whose name is cut can't be typed."""
    target = GROUP
    for name in command:
        target = target.commands[name]
    options = [option for parameter in target.params for option in parameter.opts if option.startswith("--")]

    shown = CliRunner().invoke(app, [*command, "--help"]).stdout

    assert [option for option in options if not re.search(rf"{option}\b", shown)] == []


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("infer", "[OPTIONS] MODEL"),
        ("submit", "[OPTIONS] MODEL INPUT... OUTPUT"),
        ("dlq list", "[OPTIONS] [MODEL]"),
        ("dlq replay", "[OPTIONS] MODEL [ID...]"),
        ("status", "[OPTIONS]"),
    ],
)
def test_usage_lines_are_like_those_of_other_tools(command: str, usage: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).stdout

    assert re.search(rf"Usage: \S+ {command} {re.escape(usage)}\n", shown), shown


@pytest.mark.parametrize("command", [[], ["models"], ["keys"], ["dlq"]], ids=" ".join)
def test_lists_of_commands_are_not_cut(command: list[str]) -> None:
    """Each summary fits its line."""
    shown = CliRunner().invoke(app, [*command, "--help"]).stdout

    assert "Commands:" in shown
    assert "..." not in shown.partition("Commands:")[2]


class Polling:
    """A gateway in a control mode in which nothing is loaded on request."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def load(self, *_: object, **__: object) -> None:
        raise ControlDisabled("no loads")

    unload = load


@pytest.mark.parametrize("command", ["load", "unload"])
def test_a_load_in_the_wrong_mode_is_told_what_to_do(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's text does not say it."""
    monkeypatch.setattr(client, "GatewayClient", Polling)

    result = CliRunner().invoke(app, ["models", command, "digits"])

    assert result.exit_code == 1
    assert "no loads; start the server with" in result.stderr
    assert "--model-control-mode explicit" in result.stderr


def test_models_to_load_need_the_explicit_mode() -> None:
    """As with Triton: ignoring them would load all."""
    result = CliRunner().invoke(app, ["up", "--load-model", "digits"])

    assert result.exit_code == 64
    assert "--model-control-mode explicit" in result.stderr


def test_a_list_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable, and not its value, which may be secret."""
    monkeypatch.setenv("QINFER_HTTP__RESTRICTED", "model-repository:x=geheim")
    with pytest.raises(SettingsError, match="QINFER_HTTP__RESTRICTED: a list is written as JSON") as caught:
        load_settings()

    assert "geheim" not in caught.value.message


def test_a_tenant_that_can_not_be_is_named(tmp_path: Path) -> None:
    """With the rule."""
    result = CliRunner().invoke(app, ["keys", "new", "--tenant", "a b", "--file", str(tmp_path / "keys.json")])

    assert result.exit_code == 64
    assert "1 to 64 letters, digits and ._~-" in " ".join(result.stderr.split())
    assert "got 'a b'" in " ".join(result.stderr.split())


def test_a_configuration_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Somebody gave the model in its place."""
    (tmp_path / "model.onnx").write_bytes(b"\x08\xff\xfe")

    result = CliRunner().invoke(app, ["models", "load", "digits", "--config", str(tmp_path / "model.onnx")])

    assert result.exit_code == 1
    assert "model.onnx is not text; --config takes a model configuration in JSON" in result.stderr
