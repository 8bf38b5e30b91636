"""`qinfer doctor`: checks of the installation, with remedies."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import DataDirOption, JsonOption, RedisOption, print_json
from qinfer.cli.models import RepositoryOption

EXAMPLE = "Example: qinfer doctor   or   qinfer doctor --redis redis://queue:6379/0 --model-repository ./models"


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
    from qinfer.cli.checks.report import Severity, as_builtins, print_findings

    with Console(stderr=True).status("checking…"):
        findings = examine(redis, data_dir, model_repository or (), load=runtimes)
    if as_json:
        print_json(as_builtins(findings))
    else:
        print_findings(findings)
    if any(finding.level is Severity.PROBLEM for finding in findings):
        raise typer.Exit(1)
