"""`qinfer submit`: a bulk job, a model's answers to the rows of files."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.complete import model_names
from qinfer.cli.console import DEFAULT_URL, JsonOption, UrlOption
from qinfer.cli.jobs.jobs import finish
from qinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from qinfer.client.job_flows import JobOptions

EXAMPLE = (
    "Example: qinfer submit digits 's3://bucket/in/*.parquet' s3://bucket/out --column image=pixels --key id --wait"
)

ModelArgument = Annotated[str, typer.Argument(help="The model's name.", autocompletion=model_names)]
InputsArgument = Annotated[
    list[str],
    typer.Argument(metavar="INPUT...", help="Files or patterns: URLs, or paths that the workers can read too."),
]
OutputArgument = Annotated[str, typer.Argument(help="The output folder; it must be empty.")]
FormatOption = Annotated[str, typer.Option("--format", help="Output format: parquet or arrow.")]
InputFormatOption = Annotated[
    str, typer.Option("--input-format", help="parquet, arrow, csv or jsonl; default: by file extension.")
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        "-c",
        help="TENSOR=COLUMN, or TENSOR=COLUMN,COLUMN,... with one element each. "
        "Default: the column named like the input tensor.",
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="TENSOR=3,4: the shape of one row, without the batch dimension; default: the tensor's."
    ),
]
OutputColumnOption = Annotated[
    list[str] | None,
    typer.Option("--output-column", help="TENSOR=COLUMN: the column of an output; default: the tensor's name."),
]
KeyOption = Annotated[
    str, typer.Option("--key", help="The column that identifies rows; default: file and row number are written.")
]
PassthroughOption = Annotated[
    list[str] | None, typer.Option("--passthrough", help="A column to copy to the output; '*' copies all.")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", help="With --passthrough '*': a column to leave out.")
]
CompressionOption = Annotated[
    str,
    typer.Option("--compression", help="zstd, snappy, lz4, gzip, brotli or none; default: snappy, or zstd for arrow."),
]
RowsPerPartOption = Annotated[
    int, typer.Option("--rows-per-part", min=0, help="Maximum rows per output file; 0: the server decides.")
]
PriorityOption = Annotated[str, typer.Option("--priority", help="high, normal or low.")]
ErrorThresholdOption = Annotated[
    float,
    typer.Option(
        "--error-threshold",
        min=-1,
        help="Failed rows that fail the job when exceeded: a number, a fraction below 1, or -1 for no limit.",
    ),
]
MaxParallelOption = Annotated[
    int, typer.Option("--max-parallel", min=0, help="Maximum workers that score the job at a time; 0: all.")
]
DeadlineOption = Annotated[float, typer.Option("--deadline", min=0, help="Seconds until the job expires; 0: never.")]
MetadataOption = Annotated[
    list[str] | None, typer.Option("--metadata", help="NAME=TEXT: metadata to keep with the job.")
]
WebhookOption = Annotated[str, typer.Option("--webhook", help="A URL to notify when the job ends.")]
IdOption = Annotated[
    str, typer.Option("--id", help="Your own job id; repeating the command with it finds the same job.")
]
VersionOption = Annotated[
    int, typer.Option("--version", min=0, help="The model's version; 0 is the highest ready one.")
]
WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Wait until the job ends, and show progress.")]


def submit(
    model: ModelArgument,
    inputs: InputsArgument,
    output: OutputArgument,
    *,
    output_format: FormatOption = "parquet",
    input_format: InputFormatOption = "",
    column: ColumnOption = None,
    shape: ShapeOption = None,
    output_column: OutputColumnOption = None,
    key: KeyOption = "",
    passthrough: PassthroughOption = None,
    exclude: ExcludeOption = None,
    compression: CompressionOption = "",
    rows_per_part: RowsPerPartOption = 0,
    priority: PriorityOption = "normal",
    error_threshold: ErrorThresholdOption = 0.0,
    max_parallel: MaxParallelOption = 0,
    deadline: DeadlineOption = 0.0,
    metadata: MetadataOption = None,
    webhook: WebhookOption = "",
    job_id: IdOption = "",
    version: VersionOption = 0,
    wait: WaitOption = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Submit a bulk job: a model scores files on the workers that serve it.

    Inputs are Parquet, Arrow, CSV or JSON lines in any location that the server allows (QINFER_STORES__ALLOW).

    Exit codes: 0 submitted (with --wait: completed), 1 failed, cancelled or expired, 2 refused, 130 interrupted while
    waiting; the job goes on.
    """
    from qinfer.cli.client import GatewayClient

    options: JobOptions = {
        "id": job_id,
        "version": version,
        "format": output_format,
        "input_format": input_format,
        "columns": read_columns(column or [], shape or []),
        "output_columns": pairs("--output-column", output_column or []),
        "key": key,
        "passthrough": passthrough or [],
        "exclude": exclude or [],
        "compression": compression,
        "rows_per_part": rows_per_part,
        "priority": priority,
        "error_threshold": error_threshold,
        "max_parallel": max_parallel,
        "deadline_s": deadline,
        "metadata": pairs("--metadata", metadata or []),
        "webhook": webhook,
    }
    with GatewayClient(url) as client:
        finish(client.submit_job(model, inputs, output, **options), url, wait=wait, as_json=as_json)


def read_columns(columns: Sequence[str], shapes: Sequence[str]) -> dict[str, object]:
    """Reads `--column` and `--shape`; returns them as jobs have them.

    Raises:
        InvalidRequest: One can't be read.
    """
    named = {tensor: text.split(",") for tensor, text in pairs("--column", columns).items()}
    shaped = {tensor: _sizes(tensor, text) for tensor, text in pairs("--shape", shapes).items()}
    found: dict[str, object] = {}
    for tensor in [*named, *(tensor for tensor in shaped if tensor not in named)]:
        names = named.get(tensor, [tensor])
        if tensor in shaped:
            found[tensor] = {"columns": names, "shape": shaped[tensor]}
        else:
            found[tensor] = names[0] if len(names) == 1 else names
    return found


def pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    """Reads `NAME=TEXT` options.

    Raises:
        InvalidRequest: One is not of that form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not (name and separator):
            raise InvalidRequest(f"{option} '{value}' can't be read; expected NAME=VALUE")
        if name in found:
            raise InvalidRequest(f"{option} names '{name}' twice")
        found[name] = text
    return found


def _sizes(tensor: str, text: str) -> list[int]:
    if not all(size.isascii() and size.isdecimal() and len(size) < 10 for size in text.split(",")):
        raise InvalidRequest(f"--shape '{tensor}={text}' can't be read; expected sizes such as {tensor}=3,4")
    return [int(size) for size in text.split(",")]
