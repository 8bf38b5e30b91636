"""`qinfer healthcheck`: health checks for this host or container, without curl."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import Commands, DataDirOption, JsonOption, RedisOption, print_json

app = Commands(help="Health check for this host or container. Exit code 0: healthy, 1: not.", no_args_is_help=True)

GATEWAY_EXAMPLE = "Example: qinfer healthcheck gateway   or   qinfer healthcheck gateway --ready"

_READY = "Also check that Redis is reachable."

TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="Timeout in seconds.")]
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
    from qinfer.cli.checks.health import gateway_health

    _print("gateway", gateway_health(url, ready=ready, timeout_s=timeout), as_json=as_json)


_PROGRAMS = {
    "worker": """Check that a worker on this host sends heartbeats.

    While Redis is unreachable a worker counts as alive, because a restart would not help; with --ready it counts as not
    ready.
    """,
    "bulk": """Check that a bulk worker on this host is alive.

    While Redis is unreachable a bulk worker counts as alive, because a restart would not help; with --ready it does
    not.
    """,
    "bridge": """Check that a bridge on this host is alive. The brokers of its queues are not contacted.

    While Redis is unreachable a bridge counts as alive, because a restart would not help; with --ready it does not.
    """,
}
"""Programs with a liveness in Redis, and the help texts of their commands."""


def _add_command(program: str, text: str) -> None:
    is_worker = program == "worker"
    about_ready = "Check that its models are loaded and do not hang, instead of liveness." if is_worker else _READY
    example = f"Example: qinfer healthcheck {program}"

    @app.command(program, help=text, epilog=f"{example}   or   {example[9:]} --ready" if is_worker else example)
    def check(
        *,
        ready: Annotated[bool, typer.Option("--ready", help=about_ready)] = False,
        redis: RedisOption = "",
        data_dir: DataDirOption = Path(".qinfer"),
        timeout: TimeoutOption = 3.0,
        as_json: JsonOption = False,
    ) -> None:
        from qinfer.cli.checks.health import program_health

        _print(program, program_health(program, redis, data_dir, ready=ready, timeout_s=timeout), as_json=as_json)


for _program, _text in _PROGRAMS.items():
    _add_command(_program, _text)


def _print(program: str, health: tuple[bool, str], *, as_json: bool) -> None:
    is_healthy, text = health
    if as_json:
        print_json({"program": program, "healthy": is_healthy, "detail": text})
    else:
        typer.echo(f"{program}: {text}", err=not is_healthy)
    if not is_healthy:
        raise typer.Exit(1)
