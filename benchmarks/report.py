"""Turns rows and verdicts into tables: rich for the terminal, Markdown for RESULTS.md."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console
from rich.table import Table

from benchmarks.bars import FASTAPI, FASTAPI_ORJSON, MOSEC, MOSEC_ORJSON, QINFER, TRITON, Outcome, Rows, Verdict
from benchmarks.models import MODELS
from benchmarks.results import BATCH, CLIENT, Row, Setting
from benchmarks.stateful import CASES

Cells = Sequence[str]
_STATEFUL = tuple(case.name for case in CASES)

_HEAD = (
    "Written by `benchmarks/run` from one run; how and what: [README](README.md). `triton` is NVIDIA's server on CPUs: "
    "its front end and scheduler, with the model in its Python backend, where ONNX Runtime runs it."
)

_COLUMNS = (
    *(
        "connections",
        "server",
        "req/s",
        "slowest … fastest",
        "x FastAPI",
        "x FastAPI orjson",
        "x mosec",
        "x mosec orjson",
        "x Triton",
        "p50 ms",
        "p99 ms",
    ),
    *("CPU µs per request", "of which", "client", "RSS MiB"),
)
_BATCH_COLUMNS = ("batch", "items/s", "slowest … fastest")


def print_tables(console: Console, rows: Rows, verdicts: Sequence[Verdict]) -> None:
    """Prints every table, then the bars."""
    for title, columns, lines in _tables(rows):
        table = Table(*columns, title=title, title_justify="left")
        for line in lines:
            table.add_row(*line, style="bold" if "qinfer" in line else None)
        console.print(table)
    colours = {Outcome.PASS: "green", Outcome.MISS: "red", Outcome.UNKNOWN: "dim"}
    for verdict in verdicts:
        console.print(f"[{colours[verdict.outcome]}]{verdict.outcome:<12}[/] {verdict.bar}   {verdict.figures}")


def markdown(rows: Rows, verdicts: Sequence[Verdict], facts: Mapping[str, str], settings: str) -> str:
    """Returns RESULTS.md."""
    parts = ["# Results", "", _HEAD, ""]
    parts += [*(f"- {name}: {value}" for name, value in facts.items()), f"- run: {settings}", "", "## Bars", ""]
    parts += _markdown_table(("", "bar", "figures"), [(v.outcome, v.bar, v.figures) for v in verdicts])
    for title, columns, lines in _tables(rows):
        parts += ["", f"## {title}", "", *_markdown_table(columns, lines)]
    return "\n".join([*parts, ""])


def _markdown_table(columns: Cells, lines: Sequence[Cells]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines)]


def _tables(rows: Rows) -> list[tuple[str, Cells, list[Cells]]]:
    """Returns (title, columns, lines) per model and encoding."""
    tables: list[tuple[str, Cells, list[Cells]]] = []
    ordered = sorted(rows.values(), key=_order)
    for (model, encoding), group in groupby(ordered, key=lambda row: (row.setting.model, row.setting.encoding)):
        if encoding == BATCH:
            tables.append((f"{model}, in process", _BATCH_COLUMNS, [_batch_line(row) for row in group]))
        else:
            tables.append((f"{model}, {encoding}", _COLUMNS, [_line(row, rows) for row in group]))
    return tables


def _order(row: Row) -> tuple[int, str, int, int, bool, str]:
    """Sorts models as they are listed, then encodings and connections, and puts qinfer before its peers."""
    setting = row.setting
    return (
        (*MODELS, *_STATEFUL).index(setting.model),
        setting.encoding,
        setting.connections * setting.streams,
        setting.streams,
        setting.server != QINFER,
        setting.server,
    )


def _batch_line(row: Row) -> Cells:
    return str(row.setting.connections), f"{row.rate:,.0f}", _spread(row)


def _line(row: Row, rows: Rows) -> Cells:
    roles = sorted(((used, role) for role, used in row.cpu_us.items() if role != CLIENT and used >= 0.5), reverse=True)
    return (
        concurrency(row.setting),
        row.setting.server,
        f"{row.rate:,.0f}" if row.valid else f"invalid: {row.errors} failed",
        _spread(row),
        _ratio(row, rows, FASTAPI),
        _ratio(row, rows, FASTAPI_ORJSON),
        _ratio(row, rows, MOSEC),
        _ratio(row, rows, MOSEC_ORJSON),
        _ratio(row, rows, TRITON),
        f"{row.p50_us / 1000:.2f}",
        f"{row.p99_us / 1000:.2f}",
        f"{row.server_cpu_us:.0f}",
        " + ".join(f"{role} {used:.0f}" for used, role in roles),
        f"{row.cpu_us.get(CLIENT, 0.0):.0f}",
        f"{sum(row.rss_bytes.values()) / 2**20:.0f}",
    )


def concurrency(setting: Setting) -> str:
    """Returns the connections, with the concurrent calls of each where there are several."""
    return str(setting.connections) if setting.streams == 1 else f"{setting.connections} x {setting.streams}"


def _spread(row: Row) -> str:
    return f"{row.slowest:,.0f} … {row.fastest:,.0f}"


def _ratio(row: Row, rows: Rows, server: str) -> str:
    other = rows.get(replace(row.setting, server=server))
    if other is None or not (row.valid and other.valid and other.rate):
        return "-"
    return f"{row.rate / other.rate:.2f}"
