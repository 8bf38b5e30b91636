"""`qinfer doctor`: checks of the installation, with remedies. The checks load only when it runs."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from qinfer.cli.console import DataDirOption, JsonOption, RedisOption, show
from qinfer.cli.models import RepositoryOption

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLE = "Example: qinfer doctor   or   qinfer doctor --redis redis://queue:6379/0 --model-repository ./models"


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One line of the report."""

    subject: str
    level: Severity
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(subject, Severity.OK, text)


def warning(subject: str, text: str, remedy: str = "") -> Finding:
    """Returns a finding about something that works badly."""
    return Finding(subject, Severity.WARNING, text, remedy)


def problem(subject: str, text: str, remedy: str = "") -> Finding:
    """Returns a finding about something that does not work."""
    return Finding(subject, Severity.PROBLEM, text, remedy)


def doctor(
    *,
    model_repository: RepositoryOption = None,
    runtimes: Annotated[
        bool, typer.Option("--runtimes/--no-runtimes", help="Also load each backend's runtime, which takes seconds.")
    ] = True,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Check Redis, workers, models, stores and this machine with the present environment variables.

    Each line is ok, a warning, or a problem with its remedy. Nothing is changed, and secrets are not shown.

    Exit codes: 0 no problem (there may be warnings), 1 a problem.
    """
    from rich.console import Console

    from qinfer.cli.checks.all import examine

    with Console(stderr=True).status("checking…"):
        findings = examine(redis, data_dir, model_repository or (), load=runtimes)
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Severity}
    report = {"counts": counts, "findings": [finding._asdict() for finding in findings]}
    show(report, lambda: _view(findings, counts), as_json=as_json)
    if counts["problem"]:
        raise typer.Exit(1)


def _view(findings: Sequence[Finding], counts: dict[str, int]) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colours = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        text = Text(finding.text).append(f"\n→ {finding.remedy}" if finding.remedy else "", "cyan")
        table.add_row(Text(finding.level, colours[finding.level]), Text(finding.subject), text)
    said = [f"{counts[kind] or 'no'} {kind}{'' if counts[kind] == 1 else 's'}" for kind in ("problem", "warning")]
    return Group(table, Text("\n" + ", ".join(said)))
