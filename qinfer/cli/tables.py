"""Terminal views: models, lanes and workers as tables, refreshed by `OverviewWatch`."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from qinfer.cli.console import exit_code, fail, print_json
from qinfer.cli.overview import LaneRow, ModelRow, Overview, SequencesRow, WorkerRow, WorkRow
from qinfer.errors import QinferError
from qinfer.models.sync import SyncedModel

_MAX_HOLDERS = 3
"""The most holders that a table names; JSON has all holders."""
_NAMED = 3
"""The most tenants that a table names; JSON has all tenants."""
NO_WORKER = "no live worker: requests wait in their lanes"
NO_GATEWAY = "no live gateway: requests can't be sent"

_COLOURS = {
    "READY": "green", "UNAVAILABLE": "red", "ready": "green", "trouble": "red", "loading": "yellow",
    "draining": "yellow",
}  # fmt: skip


def overview_tables(overview: Overview) -> RenderableType:
    """Returns the tables of `qinfer status`."""
    work = {(row.model, row.version): row for row in overview.work}
    parts: list[RenderableType] = [_models_with_work(overview.models, work)]
    parts += [Text(f"{row.name} {row.version or ''}".rstrip() + f": {row.reason}") for row in reasons(overview.models)]
    parts += [sequences_table(overview.sequences)] if overview.sequences else []
    held = [lane for lane in overview.lanes if lane.depth]
    if held:
        parts.append(_lanes_table(held, work))
    else:
        parts.append(Text(f"Lanes: {len(overview.lanes)}, all empty" if overview.lanes else "Lanes: none"))
    parts.append(Text())
    if overview.workers:
        parts.append(_workers_table(overview.workers))
        parts += _long(overview.workers)
        rps = sum(worker.throughput_rps for worker in overview.workers)
        executing = sum(worker.executing for worker in overview.workers)
        parts.append(Text(f"all workers: {executing:,} executing, {rps:,.0f} requests/s"))
    else:
        parts.append(Text(NO_WORKER, style="yellow"))
    if overview.gateways:
        parts.append(Text(f"gateways: {', '.join(overview.gateways)}"))
    else:
        parts.append(Text(NO_GATEWAY, style="yellow"))
    if overview.bulk_workers:
        parts.append(Text(f"bulk workers: {', '.join(overview.bulk_workers)}"))
    parts += [
        Text(f"job {job.id} ({job.model} {job.version}, {job.state}) waits: {job.waiting}", style="red")
        for job in overview.waiting_jobs
    ]
    return Group(*parts)


def models_tables(overview: Overview) -> RenderableType:
    """Returns the tables of `qinfer models list`."""
    more = [sequences_table(overview.sequences)] if overview.sequences else []
    return Group(models_table(overview.models), *more)


def models_table(models: Iterable[ModelRow]) -> Table:
    """Returns the models with states, reasons and pins."""
    table = Table("model", "version", "state", "reason", "pinned by", title="Models", title_justify="left")
    for model in models:
        version = str(model.version) if model.version else "-"
        holders = Text("\n".join(f"{pin.reason} {pin.holder}" for pin in model.pins[:_MAX_HOLDERS]))
        if len(model.pins) > _MAX_HOLDERS:
            holders.append(f"\nand {len(model.pins) - _MAX_HOLDERS} more")
        table.add_row(Text(model.name), version, _state(model.state), Text(model.reason), holders)
    return table


def sequences_table(sequences: Iterable[SequencesRow]) -> Table:
    """Returns the sequences of each stateful model."""
    numbers = [_number(name) for name in ("open", "waiting", "handed over", "lost")]
    table = _table("Sequences", _name_column("model"), *numbers)
    for of in sequences:
        counts = (of.open, of.waiting, of.handed_over, of.lost)
        table.add_row(Text(of.model), *(f"{count:,}" for count in counts))
    return table


def index_table(entries: Iterable[Mapping[str, str]]) -> Table:
    """Returns the models of a gateway's index."""
    table = Table("model", "version", "state", "reason", title="Index", title_justify="left")
    for entry in entries:
        state = entry.get("state", "")
        reason = entry.get("reason", "") if state else "never loaded"
        table.add_row(entry["name"], entry.get("version") or "-", _state(state or "-"), Text(reason))
    return table


def synced_table(synced: Iterable[SyncedModel]) -> Table:
    """Returns the results of a sync."""
    table = Table("model", "versions", "generation", "result", title="Synced", title_justify="left")
    for model in synced:
        what = "removed" if model.removed else "written" if model.changed else "unchanged"
        versions = ", ".join(map(str, model.versions)) or "-"
        table.add_row(model.model, versions, str(model.generation), Text(model.error or what))
    return table


def queues_tables(lanes: Sequence[LaneRow], work: Sequence[WorkRow]) -> RenderableType:
    """Returns all lanes, and the work of each model version."""
    if not lanes:
        return Text("there are no lanes, because no model should be loaded")
    parts: list[RenderableType] = [_lanes_table(lanes, {(row.model, row.version): row for row in work}, has_work=True)]
    if any(len(lane.shares) > 1 for lane in lanes):
        parts.append(_shares_table(lanes))
    return Group(*parts)


def workers_tables(workers: Sequence[WorkerRow], bulk_workers: Sequence[str]) -> RenderableType:
    """Returns the workers and the bulk workers."""
    parts: list[RenderableType] = []
    if workers:
        parts.append(_workers_table(workers, is_whole=True))
        parts += _long(workers)
        parts += [
            Text(f"{worker.id}: {one.model} {one.version} is {one.state.value}: {one.reason}")
            for worker in workers
            for one in worker.models
            if one.reason
        ]
    else:
        parts.append(Text(NO_WORKER, style="yellow"))
    parts.append(Text(f"bulk workers: {', '.join(bulk_workers) or 'none'}"))
    return Group(*parts)


def reasons(models: Iterable[ModelRow]) -> list[ModelRow]:
    """Returns the reasons of models that are not READY."""
    return [model for model in models if model.reason]


def duration(seconds: float) -> str:
    """Returns a rounded duration: `40 ms`, `12 s`, `3 min`, `5 h`, `2 d`."""
    if seconds < 1:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    for unit_s, name, below_s in ((1, "s", 120), (60, "min", 7200), (3600, "h", 172_800)):
        if seconds < below_s:
            return f"{seconds // unit_s:.0f} {name}"
    return f"{seconds // 86_400:.0f} d"


def _table(title: str, *columns: Column | str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=SIMPLE, pad_edge=False, padding=0)


def _number(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


def _name_column(name: str) -> Column:
    return Column(name, overflow="fold")


def _state(state: str) -> Text:
    return Text(str(state), style=_COLOURS.get(state, "yellow"))


def _age(lane_or_work: LaneRow | WorkRow, count: int) -> str:
    return duration(lane_or_work.oldest_age_s) if count else "-"


def _work(row: WorkRow | None) -> tuple[str, str]:
    """A ? marks an assumed speed."""
    if row is None or not row.rows:
        return "-", "-"
    return f"{row.rows:,}", duration(row.work_s) if row.rows_per_s else f"{duration(row.work_s)}?"


def _models_with_work(models: Iterable[ModelRow], work: dict[tuple[str, int], WorkRow]) -> Table:
    numbers = [_number(name) for name in ("workers", "depth", "oldest", "rows", "work")]
    table = _table("Models", _name_column("model"), _number("version"), "state", *numbers)
    for model in models:
        row = work.get((model.name, model.version))
        counts = (str(row.workers), f"{row.requests:,}", _age(row, row.requests)) if row else ("-", "-", "-")
        version = str(model.version) if model.version else "-"
        table.add_row(Text(model.name), version, _state(model.state), *counts, *_work(row))
    return table


def _lanes_table(lanes: Sequence[LaneRow], work: dict[tuple[str, int], WorkRow], *, has_work: bool = False) -> Table:
    more = [_number("rows"), _number("work"), _number("workers")] if has_work else []
    numbers = [_number(name) for name in ("depth", "in flight", "oldest")]
    table = _table("Lanes", _name_column("model"), _number("version"), "lane", *numbers, *more)
    for key, group in groupby(lanes, key=lambda lane: (lane.model, lane.version)):
        row = work.get(key)
        of_version = [*_work(row), str(row.workers) if row else "-"] if has_work else []
        for number, lane in enumerate(group):
            begin = (Text(lane.model), str(lane.version), lane.name)
            counts = (f"{lane.depth:,}", f"{lane.in_flight:,}", _age(lane, lane.depth))
            table.add_row(*begin, *counts, *(of_version if number == 0 else [""] * len(of_version)))
    return table


def _shares_table(lanes: Iterable[LaneRow]) -> Table:
    names = (_name_column("model"), _number("version"), "lane", _name_column("tenants"))
    table = _table("Shares of tenants", *names, *map(_number, ("weight", "share", "depth")))
    for lane in lanes:
        for share in lane.shares if len(lane.shares) > 1 else ():
            named, more = share.tenants[:_NAMED], len(share.tenants) - _NAMED
            tenants = ", ".join(named) + (f" and {more} more" if more > 0 else "")
            begin = (Text(lane.model), str(lane.version), lane.name, Text(tenants))
            table.add_row(*begin, str(share.weight), f"{share.part:.0%}", f"{share.depth:,}")
    return table


def _workers_table(workers: Iterable[WorkerRow], *, is_whole: bool = False) -> Table:
    workers = list(workers)
    has_host = is_whole and not all(worker.id.startswith(f"{worker.host}-") for worker in workers)
    host, clock = [_name_column("host")] if has_host else [], [_number("clock")] if is_whole else []
    numbers = [_number(name) for name in ("executing", "requests/s", "up")]
    table = _table("Workers", _name_column("id"), *host, "state", "device", _name_column("ready"), *numbers, *clock)
    for worker in workers:
        table.add_row(
            Text(worker.id),
            *([Text(worker.host)] if has_host else []),
            _state(worker.state),
            worker.device,
            Text(", ".join(worker.ready) or "-"),
            f"{worker.executing:,}",
            f"{worker.throughput_rps:,.0f}",
            duration(worker.up_s),
            *([f"{worker.clock_offset_s:+.2f} s"] if is_whole else []),
        )
    return table


def _long(workers: Iterable[WorkerRow]) -> Iterator[Text]:
    for worker in workers:
        for one in worker.long:
            yield Text(f"{worker.id}: {one.text}", style="red" if one.is_late else "")


class OverviewWatch:
    """Shows the overview until Ctrl-C: in place on a terminal, else block after block."""

    def __init__(self, read: Callable[[], Overview], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._last: Overview | None = None
        self._failing_since = ""
        self._problem = ""

    def run(self, *, as_json: bool = False) -> None:
        """Refreshes until Ctrl-C, the regular end."""
        console = Console()
        with suppress(KeyboardInterrupt), _without_logs():
            if as_json:
                self._repeat(self._print_document)
            elif not console.is_terminal:
                self._repeat(lambda: console.print(self.block()))
            else:
                with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
                    self._repeat(lambda: live.update(self.block(), refresh=True))

    def block(self) -> RenderableType:
        """Returns the view, or the last one with an error."""
        now = time.strftime("%H:%M:%S")
        try:
            self._last, self._problem, self._failing_since = self._read(), "", ""
        except QinferError as error:
            self._problem, self._failing_since = error.message, self._failing_since or now
        every = f"every {self._interval_s:g} s; Ctrl-C ends it"
        parts: list[RenderableType] = [Text.assemble((now, "bold"), (f"  {every}", "dim"))]
        if self._problem:
            parts.append(Text(f"since {self._failing_since}: {self._problem}; retrying", style="red"))
        if self._last is not None:
            parts += [Text("last state:", style="dim")] if self._problem else []
            parts.append(overview_tables(self._last))
        return Group(*parts)

    def _print_document(self) -> None:
        try:
            print_json(self._read())
        except QinferError as error:
            fail(f"{error.message}; retrying", error.code, exit_code(error), as_json=True)

    def _repeat(self, show: Callable[[], None]) -> None:
        while True:
            show()
            sys.stdout.flush()
            time.sleep(self._interval_s)


@contextmanager
def _without_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
