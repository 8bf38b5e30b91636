"""`qinfer submit` and `qinfer jobs`: bulk jobs, in which a model scores files."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    Commands,
    JsonOption,
    ModelArgument,
    Options,
    UrlOption,
    facts,
    gateway_client,
    option,
    print_json,
    show,
    state,
    table,
    with_options,
)
from qinfer.cli.jobs.waiting import BY_SIGNAL, MissingInputs, StopSignals, WaitInterrupted, finish, print_status
from qinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from qinfer.client import Client, JobEstimate, JobStatus
    from qinfer.client.job_flows import JobOptions

app = Commands(help="Manage bulk jobs: list, show, preview, wait, cancel, resume, delete, prune.", no_args_is_help=True)

SUBMIT_EXAMPLE = (
    "Example: qinfer submit digits 's3://bucket/in/*.parquet' s3://bucket/out --column image=pixels --key id --wait"
)

_MOST_PRUNED = 10_000
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_WIDE = 110
"""Width from which speeds and URLs are shown."""

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]

InputsArgument = Annotated[
    list[str],
    typer.Argument(metavar="INPUT", help="Files, folders or patterns: URLs, or paths that the workers can read too."),
]
OutputArgument = Annotated[str, typer.Argument(metavar="OUTPUT", help="The output folder; it must be empty.")]
_OF_CSV = {"delimiter", "quote", "escape", "decimal_point", "encoding", "header", "column_names"}
"""Parameters of `submit` that are fields of `csv`."""
_OTHERS = _OF_CSV | {"column", "shape", "null"}
"""Options that are read in another way."""
WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Wait until the job ends, and show progress.")]
WaitForInputsOption = Annotated[
    float,
    typer.Option(
        "--wait-for-inputs",
        min=0,
        help="Seconds to wait until each input exists and each pattern matches a file; then the job is submitted with "
        "the files that exist. 0: missing inputs are an error.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="With --id: resume the job if it has failed, has expired or was cancelled. If it is completed, the "
        "command ends at once, except with --overwrite.",
    ),
]
ValidateOption = Annotated[
    bool, typer.Option("--validate-only", help="Check the job and all its files, estimate it, and submit nothing.")
]
CancelOption = Annotated[
    bool, typer.Option("--cancel-on-exit", help="With --wait: cancel the job on SIGINT (Ctrl-C) and SIGTERM.")
]


_text, _texts = partial(option, str, ""), partial(option, list[str] | None, None)
_given, _number = partial(option, str | None, None), partial(option, int, 0, min=0)
_flag = partial(option, bool, False)

INPUT_OPTIONS: Options = {
    "input_format": _text("parquet, arrow, csv or jsonl; default: by file extension."),
    "input_compression": _text("gzip, zstd, bz2 or none, of CSV and JSON lines; default: by file extension."),
    "delimiter": _given("The character between the values of CSV; default: a comma."),
    "quote": _given("The character around values of CSV, '' for none; default: a double quote."),
    "escape": _given(
        "The character before quotes within values of CSV, such as \\ in files of Spark, or none; default: as the "
        "first file shows."
    ),
    "decimal_point": _given("The character before the fraction of a number in CSV; default: ."),
    "encoding": _given("The encoding of CSV, such as latin-1 or windows-1252; default: utf-8."),
    "header": option(
        bool, True, "The first row of CSV names the columns, or they are f0, f1, ….", "--header/--no-header"
    ),
    "column_names": _text("NAME,NAME,...: the columns of CSV that has no header."),
    "column": _texts(
        "TENSOR=COLUMN, or TENSOR=COLUMN,COLUMN,... with one element each. "
        "Default: the column named like the input tensor.",
        *("--column", "-c"),
    ),
    "shape": _texts(
        "TENSOR=3,4: the shape of one row, without the batch dimension, -1 where rows differ; default: the tensor's."
    ),
    "null": _texts(
        "TENSOR=VALUE: how to treat nulls in an input's columns: error (their rows fail, the default), nan, or the "
        "value that replaces them, as JSON or as text."
    ),
    "tensors": _texts("An output to compute and write; default: all.", "--output-tensor"),
    "key": _text("The column that identifies rows; default: file and row number are written."),
    "merge_schema": _flag("Columns may be missing in some files: they are null there.", "--merge-schema"),
    "types": _texts(
        "COLUMN=TYPE: the type of a column of CSV, a field of JSON lines, or a partition column, such as int64, "
        "float64, date32, timestamp[us]; a row with another value fails. Default: copied values are text as written.",
        "--type",
    ),
    "priority": option(str, "normal", "high, normal or low."),
}
"""The options of a job about its inputs, of `submit` and `compare`."""

SUBMIT_OPTIONS: Options = {
    "format": option(str, "parquet", "Output format: parquet, arrow, csv or jsonl.", "--format"),
    "output_columns": _texts("TENSOR=COLUMN: the column of an output; default: the tensor's name.", "--output-column"),
    "top_k": _texts("TENSOR=3: write the greatest elements of an output, with indices and labels."),
    "failed_rows": _text("inline (the default) in the parts, or separate in files of their own."),
    "passthrough": _texts("A column to copy to the output; '*' copies all."),
    "exclude": _texts("With --passthrough '*': a column to leave out."),
    "partitioning": _text("hive: folders such as country=de become columns; default: none do."),
    "partition_by": _texts("With --partitioning: a column whose folders the output has, too."),
    "bad_files": _text("Input files that can't be read: fail (the default) fails the job, skip leaves them out."),
    "compression": _text(
        "zstd, snappy, lz4, gzip, brotli or none; default: snappy; zstd for arrow, none for csv and jsonl."
    ),
    "compression_level": _number("Level of the compression; 0: its default."),
    "rows_per_part": _number("Maximum rows per output file; 0: the server decides."),
    "on_version_change": _text("wait or fail, when the job's model version can't be kept unchanged."),
    "error_threshold": option(
        float,
        0.0,
        "Failed rows that fail the job when exceeded: a number, a fraction below 1, or -1 for no limit.",
        min=-1,
    ),
    "max_parallel": _number("Maximum workers that score the job at a time; 0: all."),
    "deadline_s": option(float, 0.0, "Seconds until the job expires; 0: never.", "--deadline", min=0),
    "limit": _number("Number of first rows to score; 0: all."),
    "overwrite": _flag(
        "Remove the files of an ended job from the output folder, and no others. With --resume: if the job is "
        "completed, run it anew.",
        "--overwrite",
    ),
    "metadata": _texts("NAME=TEXT: metadata to keep with the job."),
    "webhook": _text("A URL to notify when the job ends."),
    "id": _text("Your own job id; repeating the command with it finds the same job.", "--id"),
    "version": _number("The model's version; 0 is the highest ready one."),
}
"""The other options of a job."""


@with_options(INPUT_OPTIONS, SUBMIT_OPTIONS)
def submit(
    model: ModelArgument,
    inputs: InputsArgument,
    output: OutputArgument,
    *,
    wait_for_inputs: WaitForInputsOption = 0.0,
    wait: WaitOption = False,
    resume: ResumeOption = False,
    cancel_on_exit: CancelOption = False,
    validate_only: ValidateOption = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Submit a bulk job: a model scores files on the workers that serve it.

    Inputs are Parquet, Arrow, CSV or JSON lines in any location that the server allows (QINFER_STORES__ALLOW).

    Exit codes: 0 submitted (with --wait: completed), 1 the job has failed, has expired or was cancelled, 64 wrong usage
    or a refused job, 66 an input does not exist (with --wait-for-inputs: not in time), 69 the server can't be reached
    or is overloaded (repeat the command with its --id), 130 or 143 stopped by SIGINT or SIGTERM: the job continues,
    except with --cancel-on-exit.
    """
    if resume and not given["id"]:
        raise InvalidRequest("--resume finds the job by its id; add the --id that it was submitted with")
    if cancel_on_exit and not wait:
        raise InvalidRequest("--cancel-on-exit is for --wait; add --wait, or cancel the job by `qinfer jobs cancel`")
    options = job_options(given)
    with gateway_client(url) as client, StopSignals(wanted=cancel_on_exit) as stop:
        if validate_only:
            estimate = client.validate_job(model, inputs, output, **options)
            show(estimate, _estimated(estimate), as_json=as_json)
            return
        try:
            waiting: Any = {"wait_for_inputs_s": wait_for_inputs, "on_missing": MissingInputs(stop)}
            job = client.submit_job(model, inputs, output, resume=resume, **waiting, **options)
        except WaitInterrupted as stopped:
            raise typer.Exit(BY_SIGNAL + stopped.signum) from None
        finish(job, url, wait=wait, as_json=as_json, stop=stop)


def _estimated(estimate: "JobEstimate") -> str:
    from qinfer.client.job_flows import duration

    seconds = estimate.estimated_s
    time = "the time is not known yet" if seconds is None else f"about {duration(seconds)} with"
    workers = f"{estimate.workers} worker" + "s" * (estimate.workers != 1)
    return (
        f"valid: {estimate.rows:,} rows of {estimate.files:,} files, {estimate.shards:,} shards; {time}"
        + (f" {workers}" if seconds is not None else f", there are {workers}")
        + "; nothing was submitted"
    )


def job_options(given: Mapping[str, Any]) -> "JobOptions":
    """Returns the options of a job; the server sets the missing options. An empty quote means no quotes in CSV."""
    read: dict[str, Any] = {
        "metadata": pairs("--metadata", given.get("metadata")),
        "output_columns": pairs("--output-column", given.get("output_columns")),
        "top_k": _numbers("--top-k", given.get("top_k")),
        "types": pairs("--type", given["types"]),
    }
    found = {name: read.get(name, value) for name, value in given.items() if name not in _OTHERS}
    names = given["column_names"].split(",") if given["column_names"] else None
    form = {name: given[name] for name in _OF_CSV} | {"column_names": names}
    found["csv"] = {name: value for name, value in form.items() if value not in (None, True)}
    found["columns"] = read_columns(given["column"], given["shape"], given["null"])
    return cast("JobOptions", {name: value for name, value in found.items() if value})


FILTER_OPTIONS: Options = {
    "state": _text("Only jobs in this state, such as running."),
    "model": _text("Only jobs of this model or endpoint."),
    "output": _text("Only jobs that write to this folder, or below it."),
    "metadata": _texts("NAME=TEXT: only jobs with that metadata."),
}


@app.command("list", epilog="Example: qinfer jobs list --state running --model digits")
@with_options(FILTER_OPTIONS)
def list_jobs(
    *,
    count: Annotated[int, typer.Option("--count", min=1, max=10_000, help="Maximum number to show.")] = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """List bulk jobs, newest first."""
    with gateway_client(url) as client:
        found = _listed(client, count, given)
    if as_json:
        print_json([dict(status.fields) for status in found])
    else:
        _print_list(found)


def _listed(client: "Client", count: int, given: dict[str, Any]) -> "list[JobStatus]":
    filters: Any = given | {"metadata": pairs("--metadata", given["metadata"])}
    return client.jobs(limit=count, **filters)


@app.command("show", epilog="Example: qinfer jobs show 01JX3M3TC8Z6Q5RYB7WS2K4D9F")
def show_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show one job: its state and its specification."""
    with gateway_client(url) as client:
        _show(client.job(job_id).status(), as_json=as_json)


@app.command("wait", epilog="Example: qinfer jobs wait 01JX3M3TC8Z6Q5RYB7WS2K4D9F")
def wait_for_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Wait until a job ends, and show progress.

    Exit codes: 0 completed, 1 failed, cancelled or expired, 64 no such job, 69 the server can't be reached, 130
    interrupted; the job continues.
    """
    with gateway_client(url) as client:
        finish(client.job(job_id), url, wait=True, as_json=as_json)


@app.command("cancel", epilog="Example: qinfer jobs cancel 01JX3M3TC8Z6Q5RYB7WS2K4D9F")
def cancel_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Cancel a job; its output so far is kept, and it can be resumed."""
    with gateway_client(url) as client:
        print_status(client.job(job_id).cancel(), as_json=as_json)


@app.command(
    "resume",
    epilog="Example: qinfer jobs resume 01JX3M3TC8Z6Q5RYB7WS2K4D9F --wait",
    short_help="Resume a job that ended early.",
)
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
    wait: WaitOption = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Resume a failed, expired or cancelled job; finished work is kept."""
    with gateway_client(url) as client:
        job = client.job(job_id)
        status = job.resume(error_threshold=error_threshold, max_parallel=max_parallel, deadline_s=deadline)
        if wait:
            finish(job, url, wait=True, as_json=as_json)
        else:
            print_status(status, as_json=as_json)


@app.command("delete", epilog="Example: qinfer jobs delete 01JX3M3TC8Z6Q5RYB7WS2K4D9F")
def delete_job(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Delete the record of an ended job; its output is kept."""
    with gateway_client(url) as client:
        client.job(job_id).delete()
    show({"deleted": job_id}, f"job {job_id} deleted; its output is kept", as_json=as_json)


@app.command("prune", epilog="Example: qinfer jobs prune --older-than 30d --model digits")
@with_options(FILTER_OPTIONS)
def prune_jobs(
    older_than: Annotated[
        str, typer.Option("--older-than", help="Only jobs that ended at least this long ago: 90m, 12h, 30d or 8w.")
    ],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Delete the records of ended jobs; their outputs are kept.

    Only the newest 10,000 jobs are considered. The server also deletes records by age (QINFER_BULK__RECORD_TTL_S).
    """
    from qinfer.errors import JobNotFound

    before = datetime.now(UTC) - _age(older_than)
    with gateway_client(url) as client:
        listed = _listed(client, _MOST_PRUNED, given)
        found = [one for one in listed if (ended := _instant(one, "ended_at")) and one.has_ended and ended < before]
        if found and not yes:
            _print_list(found)
            typer.confirm(f"Delete the records of these {len(found):,} jobs? Their outputs are kept.", abort=True)
        for status in found:
            with suppress(JobNotFound):
                client.job(status.id).delete()
    text = f"{len(found):,} records deleted; the outputs are kept" if found else "no job ended that long ago"
    show({"deleted": [status.id for status in found]}, text, as_json=as_json)


def _age(text: str) -> timedelta:
    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal() and len(number) <= 5):
        raise InvalidRequest(f"--older-than '{text}' can't be read; expected such as 90m, 12h, 30d or 8w")
    return timedelta(**{unit: int(number)})


def _instant(status: "JobStatus", name: str) -> datetime | None:
    text = status.fields.get(name)
    return datetime.fromisoformat(text) if text else None


def _took(status: "JobStatus") -> str:
    from qinfer.client.job_flows import duration

    started, ended = _instant(status, "started_at"), _instant(status, "ended_at")
    return duration(((ended or datetime.now(UTC)) - started).total_seconds()) if started else "-"


@app.command("logs", epilog="Example: qinfer jobs logs 01JX3M3TC8Z6Q5RYB7WS2K4D9F")
def job_logs(job_id: IdArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show the log of a job, oldest first."""
    with gateway_client(url) as client:
        lines = client.job(job_id).log()
    text = "\n".join(f"{line.at}  {line.text}" for line in lines)
    show([{"at": line.at, "text": line.text} for line in lines], text or "there is no line yet", as_json=as_json)


@app.command("preview", epilog="Example: qinfer jobs preview 01JX3M3TC8Z6Q5RYB7WS2K4D9F --of failed")
def preview_job(
    job_id: IdArgument,
    *,
    of: Annotated[
        str, typer.Option("--of", help="output (so far), input, or failed: rows with their errors.")
    ] = "output",
    rows: Annotated[int, typer.Option("--rows", min=1, max=100, help="Maximum number of rows.")] = 20,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show the first rows of a job's files, which the gateway reads."""
    from dataclasses import asdict

    from rich.console import Group
    from rich.text import Text

    with gateway_client(url) as client:
        found = client.job(job_id).preview(of, rows)
    left_out = f", {found.columns_left_out:,} columns left out" if found.columns_left_out else ""
    names = ", ".join(column.name.replace(", ", ",") for column in found.columns)
    shown = [["-" if value is None else value for value in row] for row in found.rows]
    text = Text(f"{found.file or 'there is no such row yet'}{left_out}")
    show(asdict(found), lambda: Group(text, table("", names, shown)) if shown else text, as_json=as_json)


def _show(status: "JobStatus", *, as_json: bool) -> None:
    import json

    from qinfer.client.job_flows import duration, rate

    fields = status.fields
    scored = f"{status.rows_scored:,} rows of shards that are not written yet"
    about = {
        "state": state(status.state),
        "error": status.error,
        "waits": fields.get("waiting"),
        "model": f"{status.model} version {status.version}",
        "rows": _counts(status.rows, status.rows_done, status.rows_failed),
        "scored": scored if status.rows_scored else "",
        "shards": _counts(status.shards, status.shards_done, status.shards_failed),
        "skipped files": _skipped(status) if status.skipped_files else "",
        "speed": f"{rate(status.rows_per_s)} rows/s" if status.rows_per_s else "",
        "time left": duration(status.eta_s) if status.eta_s is not None and not status.has_ended else "",
        **{f"{what} at": fields.get(f"{what}_at") for what in ("created", "started", "ended", "deadline")},
        "output": status.output_url,
        "specification": json.dumps(fields.get("spec", {}), ensure_ascii=False),
    }
    given = {name: value for name, value in about.items() if value}
    show(dict(fields), lambda: facts(f"Job {status.id}", given), as_json=as_json)


def _print_list(found: "list[JobStatus]") -> None:
    from rich.console import Console

    from qinfer.client.job_flows import rate

    if not found:
        print("there are no jobs")
        return
    console = Console()
    is_wide = console.width >= _WIDE
    rows: list[tuple[object, ...]] = []
    for status in found:
        speed = rate(status.rows_per_s) if status.rows_per_s else "-"
        created = _instant(status, "created_at")
        more = (speed, _took(status), f"{created:%Y-%m-%d %H:%M}" if created else "-", status.output_url)
        counts = (status.rows if status.shards else "-", f"{100 * status.progress:.0f}%", status.rows_failed)
        begin = (status.id, state(status.state), f"{status.model} {status.version}")
        rows.append((*begin, *counts, *(more if is_wide else ())))
    columns = "id!, state!, model, rows>, done>, failed>"
    console.print(table("", f"{columns}, rows/s>, duration>, created!, output" if is_wide else columns, rows))


def _skipped(status: "JobStatus") -> str:
    skipped = status.fields["skipped_files"]
    lines = [f"'{file['url']}' {file['reason']}" for file in skipped["first"]]
    if more := skipped["total"] - len(lines):
        lines.append(f"and {more:,} more; _plan.json and _manifest.json have all")
    return "\n".join([f"{skipped['total']:,}", *lines])


def _counts(total: int, done: int, failed: int) -> str:
    return f"{done:,} done, {failed:,} failed, of {total:,}" if total or done or failed else "not counted yet"


def read_columns(
    columns: Sequence[str] | None, shapes: Sequence[str] | None, nulls: Sequence[str] | None = None
) -> dict[str, object]:
    """Reads `--column`, `--shape` and `--null`."""
    named = {tensor: text.split(",") for tensor, text in pairs("--column", columns).items()}
    more: dict[str, dict[str, object]] = {}
    for tensor, text in pairs("--shape", shapes).items():
        more.setdefault(tensor, {})["shape"] = _sizes(tensor, text)
    for tensor, text in pairs("--null", nulls).items():
        more.setdefault(tensor, {})["null"] = _parse_value(text)
    found: dict[str, object] = {}
    for tensor in dict.fromkeys([*named, *more]):
        names = named.get(tensor, [tensor])
        if tensor in more:
            found[tensor] = {"columns": names, **more[tensor]}
        else:
            found[tensor] = names[0] if len(names) == 1 else names
    return found


def pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    """Reads `NAME=TEXT` options."""
    found: dict[str, str] = {}
    for value in values or ():
        name, separator, text = value.partition("=")
        if not (name and separator):
            raise InvalidRequest(f"{option} '{value}' can't be read; expected NAME=VALUE")
        if name in found:
            raise InvalidRequest(f"{option} names '{name}' twice")
        found[name] = text
    return found


def _numbers(option: str, values: Sequence[str] | None) -> dict[str, int]:
    found = pairs(option, values)
    for name, text in found.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise InvalidRequest(f"{option} '{name}={text}' can't be read; expected {name}=3 or another number")
    return {name: int(text) for name, text in found.items()}


def _sizes(tensor: str, text: str) -> list[int]:
    if not all(size == "-1" or (size.isascii() and size.isdecimal() and len(size) < 10) for size in text.split(",")):
        raise InvalidRequest(f"--shape '{tensor}={text}' can't be read; expected sizes such as {tensor}=3,4")
    return [int(size) for size in text.split(",")]


def _parse_value(text: str) -> object:
    """Reads JSON such as `0`, `true` or `"0"`, else text."""
    import msgspec

    try:
        value: object = msgspec.json.decode(text, type=str | bool | int | float)
    except msgspec.MsgspecError:
        return text
    return value
