"""`qinfer healthcheck`: health checks for this host or container, without curl.

They run every few seconds, and import little. Liveness never depends on Redis: restarts do not bring it back.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from qinfer.cli.console import Commands, DataDirOption, JsonOption, RedisOption, print_json

if TYPE_CHECKING:
    from qinfer.models.state import WorkerRecord

app = Commands(help="Health check for this host or container. Exit code 0: healthy, 1: not.", no_args_is_help=True)

GATEWAY_EXAMPLE = "Example: qinfer healthcheck gateway   or   qinfer healthcheck gateway --ready"

_READY = "Also check that Redis is reachable."

TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="Timeout in seconds.")]
UrlOption = Annotated[
    str, typer.Option("--url", help="URL of the gateway; default: this machine's, on QINFER_HTTP__PORT.")
]


class Health(NamedTuple):
    """Healthy or not, and the reason."""

    is_healthy: bool
    text: str


@app.command("gateway", epilog=GATEWAY_EXAMPLE)
def gateway(
    *,
    ready: Annotated[bool, typer.Option("--ready", help="Check readiness instead of liveness.")] = False,
    url: UrlOption = "",
    timeout: TimeoutOption = 3.0,
    as_json: JsonOption = False,
) -> None:
    """Check the gateway of this machine: GET /v2/health/live, or with --ready GET /v2/health/ready."""
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
        _print(program, _program_health(program, redis, data_dir, ready=ready, timeout_s=timeout), as_json=as_json)


for _program, _text in _PROGRAMS.items():
    _add_command(_program, _text)


def _print(program: str, health: Health, *, as_json: bool) -> None:
    is_healthy, text = health
    if as_json:
        print_json({"program": program, "healthy": is_healthy, "detail": text})
    else:
        typer.echo(f"{program}: {text}", err=not is_healthy)
    if not is_healthy:
        raise typer.Exit(1)


def gateway_health(url: str, *, ready: bool, timeout_s: float) -> Health:
    """Checks a gateway over HTTP; an empty `url` means the gateway of this machine."""
    import http.client
    import ssl
    from urllib.parse import urlsplit

    from qinfer.cli.local.machine import local_url
    from qinfer.core.settings import load_settings
    from qinfer.errors import QinferError

    try:
        settings = load_settings().http
    except QinferError as error:
        return Health(False, error.message)
    parts = urlsplit(url or local_url(settings.host, settings.port, tls=bool(settings.tls_certfile)))
    path = f"{parts.path.rstrip('/')}/v2/health/{'ready' if ready else 'live'}"
    place = f"{parts.hostname}:{parts.port or ''}".rstrip(":")
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    if parts.scheme == "https":
        # A local gateway's certificate has its public name.
        context = ssl.create_default_context() if url else ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        return Health(False, f"no gateway answers at {place}: {reason}")
    finally:
        connection.close()
    if status in (401, 403) and not ready:
        return Health(True, f"it answers at {place}, and requires authentication for its health ({status})")
    return Health(status == http.client.OK, f"{place}{path} answers {status}")


def _program_health(program: str, redis: str, data_dir: Path, *, ready: bool, timeout_s: float) -> Health:
    import asyncio

    from qinfer.cli.overview import redis_settings
    from qinfer.core.settings import load_settings
    from qinfer.errors import BrokerUnavailable, QinferError
    from qinfer.models.store import ControlStore
    from qinfer.queue.clients import admin_client

    host = socket.gethostname()

    async def ask() -> Health:
        store = ControlStore(admin_client(redis_settings(redis, data_dir)))
        try:
            async with asyncio.timeout(timeout_s):
                if program == "worker":
                    strict = load_settings().repository.strict_readiness
                    return judge(await store.workers(), host, ready=ready, strict=strict)
                names = await store.live_processes(program)
        finally:
            await store.close()
        if here := [name for name in names if name.partition("@")[2] == host]:
            return Health(True, f"{', '.join(here)} is alive")
        what = "bulk worker" if program == "bulk" else program
        return Health(False, f"no {what} on host {host} reports its liveness; {len(names)} on other hosts do")

    try:
        return asyncio.run(ask())
    except (BrokerUnavailable, TimeoutError):
        return Health(not ready, "Redis can't be reached, so the state is unknown")
    except QinferError as error:
        return Health(False, error.message)


def judge(workers: "Sequence[WorkerRecord]", host: str, *, ready: bool, strict: bool) -> Health:
    """Judges a host's worker by heartbeats; pure. `ready` requires loaded models, `strict` also those that failed."""
    here = [worker for worker in workers if worker.host == host]
    if not here:
        return Health(False, f"no worker on host {host} sends heartbeats; {len(workers)} on other hosts do")
    if not ready:
        return Health(True, f"{', '.join(worker.id for worker in here)} is alive")
    lacking = {worker.id: worker.lacks(strict=strict) for worker in here}
    if well := [name for name, problem in lacking.items() if not problem]:
        return Health(True, f"{', '.join(well)} is ready")
    return Health(False, "; ".join(f"{name}: {problem}" for name, problem in lacking.items()))
