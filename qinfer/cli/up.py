"""`qinfer up`: its options. What it does is in `qinfer.cli.stack`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: qinfer up --model-repository ./models --workers 2"


class LogFormat(StrEnum):
    """How the programs log."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """The least severe level that the programs log."""

    debug = "DEBUG"
    info = "INFO"
    warning = "WARNING"
    error = "ERROR"


class Durability(StrEnum):
    """What an accepted request survives."""

    everysec = "everysec"
    always = "always"


DurabilityOption = Annotated[
    Durability,
    typer.Option(
        envvar="QINFER_REDIS__DURABILITY",
        help="What an accepted request survives: everysec may lose about a second at power loss, always nothing, "
        "and is slower.",
    ),
]


def up(
    *,
    model_repository: Annotated[
        Path,
        typer.Option("--model-repository", "-m", envvar="QINFER_REPOSITORY__PATH", help="Directory of the models."),
    ] = Path("models"),
    data_dir: Annotated[Path, typer.Option(help="Where the private Redis keeps the queue; one `up` at a time.")] = Path(
        ".qinfer"
    ),
    host: Annotated[
        str, typer.Option(envvar="QINFER_HTTP__HOST", help="Address to bind; 0.0.0.0 serves other machines.")
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(envvar="QINFER_HTTP__PORT", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = 8000,
    redis: Annotated[
        str,
        typer.Option(
            envvar="QINFER_REDIS__URL",
            help="Use this Redis instead of a private one. A URL with a password belongs in the variable.",
        ),
    ] = "",
    durability: DurabilityOption = Durability.everysec,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, max=256, help="Worker processes.")] = 1,
    log_format: Annotated[LogFormat, typer.Option(envvar="QINFER_LOG__FORMAT", help="Log format.")] = LogFormat.text,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="QINFER_LOG__LEVEL", case_sensitive=False, help="Least severe level logged.")
    ] = LogLevel.warning,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the models to load.")] = 120.0,
) -> None:
    """Run everything on this machine: a private Redis, the gateway, workers; all supervised.

    A crashed process is restarted. [bold]Ctrl-C[/bold] drains: what was accepted is answered first. A second Ctrl-C
    ends at once. What waits in the queue survives both, and kill -9.
    """
    from qinfer.cli.stack import StackOptions, run_stack

    run_stack(
        StackOptions(
            model_repository=model_repository,
            data_dir=data_dir,
            host=host,
            http_port=http_port,
            redis_url=redis,
            workers=workers,
            log_format=log_format.value,
            log_level=log_level.value,
            ready_timeout_s=ready_timeout,
            durability=durability.value,
        )
    )
