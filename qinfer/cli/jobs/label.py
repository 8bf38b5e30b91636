"""`qinfer label`: pre-annotations for labeling tools, from a bulk job's output."""

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import DEFAULT_URL, CommandFailed, UrlOption, gateway_client, print_json
from qinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from qinfer.cli.jobs.annotations import RowReport
    from qinfer.labeling.rules import LabelConfig

EXAMPLE = "Example: qinfer label s3://bucket/out --mapping sentiment.yaml --format label-studio --out tasks.json"


class FormatName(StrEnum):
    """The names of `qinfer.labeling.exports.FORMATS`, without importing it."""

    LABEL_STUDIO = "label-studio"
    ARGILLA = "argilla"
    PRODIGY = "prodigy"
    COCO = "coco"
    FIFTYONE = "fiftyone"


class Order(StrEnum):
    """Order of rows."""

    INPUT = "input"
    CONFIDENCE = "confidence"


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its output folder as a URL or path.")]
MappingOption = Annotated[
    Path, typer.Option("--mapping", "-m", metavar="FILE", help="Mapping from outputs to labels (YAML or TOML).")
]
FormatOption = Annotated[FormatName, typer.Option("--format", "-f", help="Output format.")]
OutOption = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Output file: a JSON array if it ends in .json, else JSON lines; - is stdout.",
    ),
]
OrderOption = Annotated[Order, typer.Option("--order", help="confidence: the least confident first.")]
LimitOption = Annotated[int, typer.Option("--limit", min=0, help="Maximum number of rows; 0: all.")]
FieldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME[=COLUMN]",
        help="A column to write as a field of the tasks; default: all plain columns.",
    ),
]
IdOption = Annotated[
    str,
    typer.Option(
        "--id", metavar="COLUMN", help="The column that identifies rows; default: the job's key, or a number."
    ),
]
LabelConfigOption = Annotated[
    Path | None,
    typer.Option("--label-config", metavar="FILE", help="The project's label config (XML), to check labels against."),
]
PartialOption = Annotated[
    bool, typer.Option("--partial", help="Accept a job that ended early, and write the rows that exist.")
]

JsonOption = Annotated[
    bool, typer.Option("--json", help="With --out FILE: print the numbers of written and omitted rows as JSON.")
]


def label(
    job: JobArgument,
    *,
    mapping: MappingOption,
    format_name: FormatOption = FormatName.LABEL_STUDIO,
    out: OutOption = "-",
    order: OrderOption = Order.INPUT,
    limit: LimitOption = 0,
    field: FieldOption = None,
    id_column: IdOption = "",
    label_config: LabelConfigOption = None,
    partial: PartialOption = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Write pre-annotations for a labeling tool from the output of a bulk job.

    Rows with errors and rows that the mapping does not fit are left out; their number is printed on stderr.

    Exit codes: 0 done, 1 no row could be written, 64 the mapping does not fit the job or the format, 69 the server
    can't be reached.
    """
    if as_json and out == "-":
        raise InvalidRequest("--json prints on stdout, where the rows go too; name a file by --out")
    try:
        from qinfer.cli.jobs.annotations import AnnotationFormat, chosen_fields, write_annotations
        from qinfer.cli.jobs.output_rows import JobRows
    except ImportError:
        raise CommandFailed("reading a job's output needs pyarrow: pip install 'qinfer-ml[bulk]'") from None
    from qinfer.labeling.exports import FORMATS
    from qinfer.labeling.mapping import load_mapping

    labels = load_mapping(mapping)
    kind = FORMATS[format_name]
    if found := [*kind.problems(labels)]:
        raise InvalidRequest(f"mapping '{labels.name}': " + "; ".join(found))
    config = _label_config(label_config)
    if config is not None:
        labels.check(label_config=config)
    rows = JobRows(_folder(job, url), partial=partial)
    if labels.model != rows.model or labels.version not in {0, rows.version}:
        raise InvalidRequest(
            f"mapping '{labels.name}' is for model '{labels.model}' version {labels.version or 'any'}; "
            f"the job was scored by '{rows.model}' version {rows.version}"
        )
    # Such layouts identify images by name.
    key = id_column or ("" if kind.layout == "labels" else rows.key)
    fields = chosen_fields(rows, labels, field or [])
    if Path(out).suffix == ".json":
        kind = kind.as_array()
    chosen = AnnotationFormat(labels, config, kind, fields, key)
    report = write_annotations(rows, chosen, out, by_confidence=order == Order.CONFIDENCE, limit=limit)
    _print_report(report, out, as_json=as_json)
    for each in labels.inputs.values() if report.written else ():
        _print_missing(each.field, fields, rows.schema.names)


def _print_report(report: "RowReport", out: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"out": out, "written": report.written, "failed": report.failed, "unfit": report.unfit})
    else:
        _print(f"{report.written:,} rows written")
    if left_out := report.left_out():
        _print(left_out)


def _print_missing(field: str, fields: Mapping[str, str], columns: Sequence[str]) -> None:
    if any(field == name or field.startswith(f"{name}.") for name in fields):
        return
    remedy = f"add --field {field}" if field in columns else f"submit with --passthrough {field}"
    _print(f"the tasks have no field '{field}', which the mapping names: {remedy}, or give --field {field}=COLUMN")


def _folder(job: str, url: str) -> str:
    if "://" in job or "/" in job or Path(job).is_dir():
        return job

    with gateway_client(url) as client:
        status = client.job(job).status()
    if not status.has_ended:
        raise CommandFailed(f"job '{job}' is {status.state}: wait for its end with `qinfer jobs wait {job}`")
    return status.output_url


def _label_config(path: Path | None) -> "LabelConfig | None":
    from qinfer.labeling.rules import parse_label_config

    if path is None:
        return None
    try:
        return parse_label_config(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--label-config {path} can't be read: {error}") from None


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
