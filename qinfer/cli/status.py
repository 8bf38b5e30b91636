"""`qinfer status`: what is loaded, what waits, who works."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import JsonOption, print_json

EXAMPLE = "Example: qinfer status --watch   or   qinfer status --redis redis://queue:6379/0"

RedisOption = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="QINFER_REDIS__URL",
        help="URL of the Redis; default: that of the `qinfer up` running in --data-dir.",
    ),
]
DataDirOption = Annotated[Path, typer.Option("--data-dir", help="The data directory of a running `qinfer up`.")]


def status(
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C; with --json one document per line.")
    ] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two refreshes.")] = 2.0,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show models, lanes and workers.

    Reads Redis and needs no gateway. Depth counts waiting and executing requests. Work is the seconds that one worker
    needs for them, with a ? where the model has never been executed and its speed is assumed.
    """
    import msgspec
    from rich.console import Console

    from qinfer.cli.overview import Overview, redis_settings, run_overview
    from qinfer.cli.tables import overview_tables

    def look() -> Overview:
        return run_overview(redis_settings(redis, data_dir))

    if watch:
        from qinfer.cli.watch import Watch

        redis_settings(redis, data_dir)  # what is wrong with the options ends it at once
        Watch(look, overview_tables, msgspec.to_builtins, interval).run(as_json=as_json)
    elif as_json:
        print_json(msgspec.to_builtins(look()))
    else:
        Console().print(overview_tables(look()))
