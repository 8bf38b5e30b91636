"""Turns rows and verdicts into tables: rich for the terminal, Markdown for RESULTS.md and README."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich.console import Console
from rich.table import Table

from benchmarks import bars
from benchmarks.bars import FASTAPI, MOSEC_ORJSON, QINFER, TRITON, Outcome
from benchmarks.bodies import BINARY, GRPC, JSON
from benchmarks.models import MODELS, SCRIPT
from benchmarks.results import BATCH, CLIENT, Document, Row, Rows, Setting, summarise
from benchmarks.stateful import CASES

Cells = Sequence[str]

TRITON_NOTE = (
    "Triton here is its own server with the model in its Python backend; its C++ ONNX Runtime backend is not in the "
    "wheel and would be faster."
)
SERVERS = {QINFER: "qinfer", TRITON: "Triton", MOSEC_ORJSON: "mosec + orjson", FASTAPI: "FastAPI"}
"""The servers of the short table and of the picture, with their names."""
_BARS = (
    "The bars are the project's goals; most of them are multiples of another server's figure in the same turns. A "
    "missed bar is work to do, not a limit of the program."
)
_HEAD = (
    "Servers take turns of the same load; figures are medians of undisturbed turns. A ratio is the median of "
    f"neighbouring turns' ratios, with its 95 % interval in brackets. {TRITON_NOTE}"
)
_COLUMNS = (
    *("connections", "server", "req/s", "95 % interval", "qinfer is x times", "p50 ms", "p99 ms"),
    *("CPU µs per request", "of which", "client", "RSS MiB"),
)
_BATCH_COLUMNS = ("batch", "items/s", "95 % interval")


def _setting(model: str, encoding: str, connections: int, *, fresh: bool = False) -> Setting:
    return Setting(model=model, encoding=encoding, connections=connections, fresh=fresh, server=QINFER)


SHORT = {
    "`tiny`, HTTP JSON, 1 connection: p50": _setting("tiny", JSON, 1),
    **{f"`tiny`, HTTP JSON, {n:,} connections": _setting("tiny", JSON, n) for n in (64, 128, 256, 1000)},
    "`tiny`, HTTP JSON, 64, a new connection for each request": _setting("tiny", JSON, 64, fresh=True),
    "`tiny`, gRPC, 1 connection: p50": _setting("tiny", GRPC, 1),
    **{f"`tiny`, gRPC, {n} connections": _setting("tiny", GRPC, n) for n in (64, 128)},
    **{f"the same `model.py`, HTTP JSON, {n} connections": _setting(SCRIPT, JSON, n) for n in (64, 128)},
    "`mlp`, HTTP JSON, 128 connections": _setting("mlp", JSON, 128),
    "`mlp`, HTTP binary, 128 connections": _setting("mlp", BINARY, 128),
}
"""The rows of the short table with qinfer's setting: requests per second, of one connection the median latency."""


def short_table(rows: Rows) -> list[str]:
    """Returns the table that README and RESULTS.md open with; the fastest server of a line is bold."""
    measured = {replace(setting, server=QINFER) for setting in rows}
    lines = [_short_line(title, setting, rows) for title, setting in SHORT.items() if setting in measured]
    return _markdown_table(("requests per second, or p50", *SERVERS.values(), "qinfer / Triton (95 %)"), lines)


def _short_line(title: str, setting: Setting, rows: Rows) -> Cells:
    found = {name: rows.get(replace(setting, server=name)) for name in SERVERS}
    valid = {name: row for name, row in found.items() if row is not None and row.valid}
    is_latency = setting.connections == 1
    best = max(valid, key=lambda name: -valid[name].p50_us if is_latency else valid[name].rate, default="")

    def cell(name: str) -> str:
        if name not in valid:
            return "" if found[name] is None else "failed"
        text = f"{valid[name].p50_us / 1000:.2f} ms" if is_latency else f"{valid[name].rate:,.0f}"
        return f"**{text}**" if name == best else text

    both = QINFER in valid and TRITON in valid
    compared = "" if is_latency or not both else str(valid[QINFER].times(valid[TRITON]))
    return title, *map(cell, SERVERS), compared


def print_tables(console: Console, rows: Rows) -> None:
    """Prints every table, then the bars."""
    for title, columns, lines in _tables(rows):
        table = Table(*columns, title=title, title_justify="left")
        for line in lines:
            table.add_row(*line, style="bold" if "qinfer" in line else None)
        console.print(table)
    colours = {Outcome.PASS: "green", Outcome.MISS: "red", Outcome.UNKNOWN: "dim"}
    for verdict in bars.judge(rows):
        console.print(f"[{colours[verdict.outcome]}]{verdict.outcome:<12}[/] {verdict.bar}   {verdict.figures}")


def markdown(document: Document) -> str:
    """Returns the section of RESULTS.md: figures, bars, details, facts."""
    rows = summarise(document.samples)
    verdicts = [(one.outcome, one.bar, one.figures) for one in bars.judge(rows) if one.outcome is not Outcome.UNKNOWN]
    parts = [
        _HEAD,
        "",
        *short_table(rows),
        "",
        "### Bars",
        "",
        _BARS,
        "",
        *_markdown_table(("", "bar", "figures"), verdicts),
    ]
    for title, columns, lines in _tables(rows):
        parts += ["", f"### {title}", "", *_markdown_table(columns, lines)]
    facts = [f"- {name}: {value}" for name, value in document.machine.items()]
    return "\n".join([*parts, "", "### The machine", "", *facts, f"- run: {document.run}"])


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


def _order(row: Row) -> tuple[int, str, bool, int, int, bool, str]:
    """Sorts models as they are listed, then encodings and connections, and puts qinfer before its peers."""
    setting = row.setting
    return (
        (*MODELS, *(case.name for case in CASES)).index(setting.model),
        setting.encoding,
        setting.fresh,
        setting.connections * setting.streams,
        setting.streams,
        setting.server != QINFER,
        setting.server,
    )


def _batch_line(row: Row) -> Cells:
    return str(row.setting.connections), f"{row.rate:,.0f}", _spread(row)


def _line(row: Row, rows: Rows) -> Cells:
    roles = sorted(((used, role) for role, used in row.cpu_us.items() if role != CLIENT and used >= 0.5), reverse=True)
    ours = rows.get(replace(row.setting, server=QINFER))
    compared = ours is not None and ours is not row and ours.valid and row.valid
    return (
        row.setting.load,
        row.setting.server,
        f"{row.rate:,.0f}" if row.valid else f"invalid: {row.errors} failed",
        _spread(row),
        str(ours.times(row)) if ours is not None and compared else "",
        f"{row.p50_us / 1000:.2f}",
        f"{row.p99_us / 1000:.2f}",
        f"{row.server_cpu_us:.0f}",
        " + ".join(f"{role} {used:.0f}" for used, role in roles),
        f"{row.cpu_us.get(CLIENT, 0.0):.0f}",
        f"{sum(row.rss_bytes.values()) / 2**20:.0f}",
    )


def _spread(row: Row) -> str:
    low, high = row.spread
    return f"{low:,.0f} … {high:,.0f}"
