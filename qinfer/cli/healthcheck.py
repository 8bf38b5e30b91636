"""`qinfer healthcheck`: is the program of this container well? For health checks of containers, without curl."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import JsonOption, print_json
from qinfer.cli.status import DataDirOption, RedisOption

app = typer.Typer(help="Health check for this host or container. Exit code 0: healthy, 1: not.", no_args_is_help=True)

GATEWAY_EXAMPLE = "Example: qinfer healthcheck gateway   or   qinfer healthcheck gateway --ready"
WORKER_EXAMPLE = "Example: qinfer healthcheck worker   or   qinfer healthcheck worker --ready"
BULK_EXAMPLE = "Example: qinfer healthcheck bulk"
BEAT_EXAMPLE = "Example: qinfer healthcheck beat"
BRIDGE_EXAMPLE = "Example: qinfer healthcheck bridge"

TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="Timeout in seconds.")]
ReadyOption = Annotated[bool, typer.Option("--ready", help="Also check that Redis is reachable.")]
UrlOption = Annotated[
    str, typer.Option("--url", help="URL of the gateway; default: this machine's, on QINFER_HTTP__PORT.")
]


@app.command("gateway", epilog=GATEWAY_EXAMPLE)
def gateway(
    *,
    ready: Annotated[bool, typer.Option("--ready", help="Check readiness instead of liveness.")] = False,
    url: UrlOption = "",
    timeout: TimeoutOption = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Check the gateway of this machine: GET /v2/health/live, or with --ready GET /v2/health/ready."""
    from qinfer.cli.health import gateway_health

    _tell("gateway", gateway_health(url, ready=ready, timeout_s=timeout), as_json=as_json)


@app.command("worker", epilog=WORKER_EXAMPLE)
def worker(
    *,
    ready: Annotated[
        bool, typer.Option("--ready", help="Check that its models are loaded, instead of liveness.")
    ] = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    timeout: TimeoutOption = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Check that a worker on this host sends heartbeats.

    While Redis is unreachable a worker counts as alive, because a restart would not help; with --ready it counts as not
    ready.
    """
    from qinfer.cli.health import RedisPlace, worker_health

    _tell("worker", worker_health(RedisPlace(redis, data_dir), ready=ready, timeout_s=timeout), as_json=as_json)


@app.command("bulk", epilog=BULK_EXAMPLE)
def bulk(
    *,
    ready: ReadyOption = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    timeout: TimeoutOption = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Check that a bulk worker on this host is alive.

    While Redis is unreachable a bulk worker counts as alive, because a restart would not help; with --ready it does
    not.
    """
    _show_liveness("bulk", redis, data_dir, ready=ready, timeout_s=timeout, as_json=as_json)


@app.command("beat", epilog=BEAT_EXAMPLE)
def beat(
    *,
    ready: ReadyOption = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    timeout: TimeoutOption = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Check that Celery's beat is alive on this host, in its own program or within a bulk worker.

    While Redis is unreachable it counts as alive, because a restart would not help; with --ready it does not.
    """
    _show_liveness("beat", redis, data_dir, ready=ready, timeout_s=timeout, as_json=as_json)


@app.command("bridge", epilog=BRIDGE_EXAMPLE)
def bridge(
    *,
    ready: ReadyOption = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    timeout: TimeoutOption = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Check that a bridge on this host is alive. The brokers of its queues are not contacted.

    While Redis is unreachable a bridge counts as alive, because a restart would not help; with --ready it does not.
    """
    _show_liveness("bridge", redis, data_dir, ready=ready, timeout_s=timeout, as_json=as_json)


def _show_liveness(program: str, redis: str, data_dir: Path, *, ready: bool, timeout_s: float, as_json: bool) -> None:
    """Returns whether a program that reports liveness does so on this host."""
    from qinfer.cli.health import RedisPlace, process_health

    health = process_health(program, RedisPlace(redis, data_dir), ready=ready, timeout_s=timeout_s)
    _tell(program, health, as_json=as_json)


def _tell(program: str, health: "tuple[bool, str]", *, as_json: bool) -> None:
    """Prints what was found; exits with 1 where it is not well."""
    is_well, text = health
    if as_json:
        print_json({"program": program, "healthy": is_well, "detail": text})
    else:
        typer.echo(f"{program}: {text}", err=not is_well)
    if not is_well:
        raise typer.Exit(1)
