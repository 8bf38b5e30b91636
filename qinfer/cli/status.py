"""`qinfer status`: what is loaded, what waits, who works."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import JsonOption, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from qinfer.cli.overview import Overview

EXAMPLE = "Example: qinfer status   or   qinfer status --redis redis://queue:6379/0"

RedisOption = Annotated[
    str,
    typer.Option(
        "--redis", envvar="QINFER_REDIS__URL", help="The Redis to ask; default: that of a running `up` in --data-dir."
    ),
]
DataDirOption = Annotated[Path, typer.Option("--data-dir", help="The data directory of a running `qinfer up`.")]


def status(
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show models with their state, lanes with their depth, and workers.

    It asks Redis and needs no gateway. Depth counts what waits and what is being executed.
    """
    import msgspec

    from qinfer.cli.overview import redis_settings, run_overview

    overview = run_overview(redis_settings(redis, data_dir))
    if as_json:
        print_json(msgspec.to_builtins(overview))
    else:
        print_overview(overview)


def print_overview(overview: "Overview") -> None:
    """Prints an overview as tables."""
    from rich.console import Console
    from rich.table import Table

    lanes = Table("model", "version", "lane", "depth", title="Lanes", title_justify="left")
    for lane in overview.lanes:
        lanes.add_row(lane.model, str(lane.version), lane.name, f"{lane.depth:,}")
    workers = Table("id", "device", "ready", "executing", "requests/s", "up", title="Workers", title_justify="left")
    for worker in overview.workers:
        workers.add_row(
            worker.id,
            worker.device,
            ", ".join(worker.ready),
            str(worker.executing),
            f"{worker.throughput_rps:,.0f}",
            _duration(worker.up_s),
        )
    console = Console()
    console.print(models_table(overview))
    console.print(lanes)
    console.print(workers if overview.workers else "[yellow]no live worker[/]: requests wait in their lanes")


def models_table(overview: "Overview") -> "Table":
    """Returns the models with their state, and why they are not READY."""
    from rich.table import Table
    from rich.text import Text

    table = Table("model", "version", "state", "reason", title="Models", title_justify="left")
    for model in overview.models:
        style = {"READY": "green", "UNAVAILABLE": "red"}.get(model.state, "yellow")
        version = str(model.version) if model.version else "-"
        table.add_row(model.name, version, Text(model.state, style=style), Text(model.reason))
    return table


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
