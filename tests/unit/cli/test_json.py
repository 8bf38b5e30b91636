"""Every command that prints data has `--json`, and what completes names never fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qinfer.cli.console import model_names
from qinfer.cli.main import app

RUNS_ON = {"up", "bridge"}
"""Programs: they run until they are stopped, and log."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_that_prints_data_has_json() -> None:
    """So that scripts never read tables."""
    found = dict(commands(typer.main.get_command(app)))

    without = {name for name, one in found.items() if not any("--json" in option.opts for option in one.params)}

    assert without == RUNS_ON
    assert {"status", "queues", "workers", "doctor", "models load", "healthcheck worker"} <= found.keys()


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
