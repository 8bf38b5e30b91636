"""`qinfer workers`: the live workers, the end of a worker's log, and the drain of one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    Commands,
    DataDirOption,
    JsonOption,
    RedisOption,
    UrlOption,
    gateway_client,
    show,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

app = Commands()

LIST_EXAMPLE = "Example: qinfer workers   or   qinfer workers --json"
LOG_EXAMPLE = "Example: qinfer workers log gpu1-4711-0a1b2c3d"
DRAIN_EXAMPLE = "Example: qinfer workers drain gpu1-4711-0a1b2c3d"

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id, as `qinfer workers` shows it.")]


@app.callback(invoke_without_command=True, epilog=LIST_EXAMPLE)
def list_live_workers(
    ctx: typer.Context,
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show the live workers and bulk workers; read the end of a worker's log, drain one.

    State is ready, loading, draining, or trouble if a model could not be loaded. Clock is Redis' time minus the
    worker's time. The rows below show executions that have lasted for more than a second, with their start.
    """
    if ctx.invoked_subcommand is not None:
        return
    from qinfer.cli.overview import redis_settings, run_overview
    from qinfer.cli.tables import workers_tables

    overview = run_overview(redis_settings(redis, data_dir))
    found = {"workers": overview.workers, "bulk_workers": overview.bulk_workers}
    show(found, lambda: workers_tables(overview.workers, overview.bulk_workers), as_json=as_json)


@app.command("log", epilog=LOG_EXAMPLE, short_help="Show the last warnings and errors of a worker.")
def show_worker_log(worker: WorkerArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show the last warnings and errors of a worker with their tracebacks, the newest last.

    They are kept for an hour after its end. Requires the scope admin.
    """
    with gateway_client(url) as client:
        lines = client.worker_log(worker)
    show(lines, lambda: _lines(lines), as_json=as_json)


@app.command("drain", epilog=DRAIN_EXAMPLE, short_help="Let a worker finish its work, and end.")
def drain_one_worker(worker: WorkerArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Drain a worker as SIGTERM does: it takes no more work, finishes what executes, and ends.

    Its waiting requests go to other workers. A supervisor, such as `qinfer up` or Kubernetes, starts another worker in
    its place; to run fewer, scale down instead. Requires the scope admin.
    """
    with gateway_client(url) as client:
        client.drain_worker(worker)
    show({"draining": worker}, f"{worker} drains, and ends", as_json=as_json)


def _lines(lines: Sequence[Mapping[str, Any]]) -> "RenderableType":
    from rich.text import Text

    return Text("\n".join(_text(line) for line in reversed(lines)) or "no warnings and no errors")


def _text(line: Mapping[str, Any]) -> str:
    about = "".join(f" {name}={value}" for name, value in line["about"].items())
    trace = f"\n{line['exception']}" if line["exception"] else ""
    return f"{line['at']} {line['level']:<7} {line['event']}{about}{trace}"
