"""`qinfer jobs`: bulk jobs that were submitted."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import DEFAULT_URL, JsonOption, UrlOption, print_json

if TYPE_CHECKING:
    from qinfer.client import Job, JobStatus

app = typer.Typer(help="Manage bulk jobs: list, show, wait, cancel, resume, delete.", no_args_is_help=True)

LIST_EXAMPLE = "Example: qinfer jobs list --state running"
SHOW_EXAMPLE = "Example: qinfer jobs show 01JX3M3TC8Z6Q5RYB7WS2K4D9F"
WAIT_EXAMPLE = "Example: qinfer jobs wait 01JX3M3TC8Z6Q5RYB7WS2K4D9F"
CANCEL_EXAMPLE = "Example: qinfer jobs cancel 01JX3M3TC8Z6Q5RYB7WS2K4D9F"
RESUME_EXAMPLE = "Example: qinfer jobs resume 01JX3M3TC8Z6Q5RYB7WS2K4D9F --wait"
DELETE_EXAMPLE = "Example: qinfer jobs delete 01JX3M3TC8Z6Q5RYB7WS2K4D9F"
LOGS_EXAMPLE = "Example: qinfer jobs logs 01JX3M3TC8Z6Q5RYB7WS2K4D9F"

INTERRUPTED = 130

_WIDE = 110  # columns of a terminal that has place for speeds and URLs
_MODEL_WIDTH = 16

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
_COLOURS = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow", "cancelling": "yellow"}


@app.command("list", epilog=LIST_EXAMPLE)
def list_jobs(
    *,
    state: Annotated[str, typer.Option("--state", help="Show only jobs in this state, such as running.")] = "",
    count: Annotated[int, typer.Option("--count", min=1, max=10_000, help="Maximum number to show.")] = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """List bulk jobs, newest first."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        found = client.jobs(state=state, limit=count)
    if as_json:
        print_json([dict(status.fields) for status in found])
    else:
        _print_list(found)


@app.command("show", epilog=SHOW_EXAMPLE)
def show_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show one job: its state and its specification."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        _show(client.job(job_id).status(), as_json=as_json)


@app.command("wait", epilog=WAIT_EXAMPLE)
def wait_for_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Wait until a job ends, and show progress.

    Exit codes: 0 completed; 1 failed, cancelled or expired; 130 interrupted, and the job goes on.
    """
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        finish(client.job(job_id), url, wait=True, as_json=as_json)


@app.command("cancel", epilog=CANCEL_EXAMPLE)
def cancel_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Cancel a job; its output so far is kept, and it can be resumed."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        _tell(client.job(job_id).cancel(), as_json=as_json)


@app.command("resume", epilog=RESUME_EXAMPLE, short_help="Have a job go on that ended early.")
def resume_job(
    job_id: IdArgument,
    *,
    error_threshold: Annotated[
        float | None, typer.Option("--error-threshold", min=-1, help="As in submit, from now on; -1 for no limit.")
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option("--max-parallel", min=0, help="As in submit, from now on; 0: all workers.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Seconds from now until the job expires; 0: never.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until the job ends, and show progress.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Resume a failed, expired or cancelled job; finished work is kept."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        job = client.job(job_id)
        status = job.resume(error_threshold=error_threshold, max_parallel=max_parallel, deadline_s=deadline)
        if wait:
            finish(job, url, wait=True, as_json=as_json)
        else:
            _tell(status, as_json=as_json)


@app.command("delete", epilog=DELETE_EXAMPLE)
def delete_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Delete the record of an ended job; its output is kept."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        client.job(job_id).delete()
    if as_json:
        print_json({"deleted": job_id})
    else:
        print(f"job {job_id} deleted; its output stays")


@app.command("logs", epilog=LOGS_EXAMPLE)
def job_logs(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show the log of a job, oldest first."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        lines = client.job(job_id).log()
    if as_json:
        print_json([{"at": line.at, "text": line.text} for line in lines])
    else:
        for line in lines:
            print(f"{line.at}  {line.text}")


def finish(job: "Job", url: str, *, wait: bool, as_json: bool) -> None:
    """Says where a job is, or waits for its end and says that.

    Raises:
        typer.Exit: It has not completed (1), or the wait was interrupted (130).
    """
    if not wait:
        _tell(job.status(), as_json=as_json)
        if not as_json:
            print(f"follow it: {_command('wait', job.id, url)}")
        return
    try:
        status = job.wait(progress=True)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"job {job.id} goes on; look at it: {_command('show', job.id, url)}\n"
            f"or stop it: {_command('cancel', job.id, url)}\n"
        )
        raise typer.Exit(INTERRUPTED) from None
    _tell(status, as_json=as_json)
    if status.state != "completed":
        raise typer.Exit(1)


def _command(what: str, job_id: str, url: str) -> str:
    return f"qinfer jobs {what} {job_id}" + (f" --url {url}" if url != DEFAULT_URL else "")


def _tell(status: "JobStatus", *, as_json: bool) -> None:
    """Prints where a job is, in one line or as JSON."""
    if as_json:
        print_json(dict(status.fields))
        return
    from qinfer.client.job_progress import progress_line

    line = f"job {progress_line(status)}"
    if status.state == "completed":
        line += f"; output: {status.output_url}"
    print(f"{line}: {status.error}" if status.error else line)


def _show(status: "JobStatus", *, as_json: bool) -> None:
    if as_json:
        print_json(dict(status.fields))
        return
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qinfer.client.job_progress import duration

    fields = status.fields
    about = Table("field", "value", show_header=False, title=f"Job {status.id}", title_justify="left")
    about.add_row("state", Text(status.state, style=_COLOURS.get(status.state, "")))
    if status.error:
        about.add_row("error", Text(status.error, style="red"))
    about.add_row("model", Text(f"{status.model} version {status.version}"))
    about.add_row("rows", _counts(status.rows, status.rows_done, status.rows_failed))
    about.add_row("shards", _counts(status.shards, status.shards_done, status.shards_failed))
    if status.rows_per_s:
        about.add_row("speed", f"{status.rows_per_s:,.0f} rows/s")
    if status.eta_s is not None and not status.has_ended:
        about.add_row("time left", duration(status.eta_s))
    for name in ("created_at", "started_at", "ended_at", "deadline_at"):
        if fields.get(name):
            about.add_row(name.replace("_", " "), str(fields[name]))
    about.add_row("output", Text(status.output_url))
    about.add_row("asked for", Text(json.dumps(fields.get("spec", {}), ensure_ascii=False)))
    Console().print(about)


def _print_list(found: "list[JobStatus]") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    if not found:
        print("there are no jobs")
        return
    console = Console()
    is_wide = console.width >= _WIDE
    numbers = ("rows", "done", "failed", *(("rows/s",) if is_wide else ()))
    table = Table(
        Column("id", no_wrap=True),
        Column("state", no_wrap=True),
        Column("model", overflow="fold", min_width=_MODEL_WIDTH),
        *(Column(name, justify="right", no_wrap=True) for name in numbers),
        *([Column("output", overflow="fold")] if is_wide else []),
        box=SIMPLE,
        pad_edge=False,
        padding=0,
    )
    for status in found:
        speed = f"{status.rows_per_s:,.0f}" if status.rows_per_s else "-"
        table.add_row(
            Text(status.id),
            Text(status.state, style=_COLOURS.get(status.state, "")),
            Text(f"{status.model} {status.version}"),
            f"{status.rows:,}" if status.shards else "-",
            f"{100 * status.progress:.0f}%",
            f"{status.rows_failed:,}",
            *((speed, Text(status.output_url)) if is_wide else ()),
        )
    console.print(table)


def _counts(total: int, done: int, failed: int) -> str:
    return f"{done:,} done, {failed:,} failed, of {total:,}" if total or done or failed else "not counted yet"
