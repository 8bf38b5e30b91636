"""Terminal views of models, lanes and workers; `watch` repeats them."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from qinfer.cli.console import exit_code, fail, print_json, state, table
from qinfer.cli.overview import LaneRow, Overview, WorkerRow, WorkRow
from qinfer.errors import QinferError

_MOST = 3
"""The most tenants or holders of pins that a cell names; JSON has all."""
NO_WORKER = "no live worker: requests wait in their lanes"
NO_GATEWAY = "no live gateway: requests can't be sent"

_Work = Mapping[tuple[str, int], WorkRow]


def overview_tables(overview: Overview) -> RenderableType:
    """Returns the tables of `qinfer status`."""
    work = {(row.model, row.version): row for row in overview.work}
    parts: list[RenderableType] = [_models_with_work(overview, work)]
    parts += [Text(f"{m.name} {m.version or ''}".rstrip() + f": {m.reason}") for m in overview.models if m.reason]
    parts += _sequences(overview)
    held = [lane for lane in overview.lanes if lane.depth]
    none = f"Lanes: {len(overview.lanes)}, all empty" if overview.lanes else "Lanes: none"
    parts += [_lanes_table(held, work) if held else Text(none), Text()]
    if overview.workers:
        parts += [_workers_table(overview.workers), *_long(overview.workers)]
        rps = sum(worker.throughput_rps for worker in overview.workers)
        executing = sum(worker.executing for worker in overview.workers)
        parts.append(Text(f"all workers: {executing:,} executing, {rps:,.0f} requests/s"))
    else:
        parts.append(Text(NO_WORKER, style="yellow"))
    gateways = f"gateways: {', '.join(overview.gateways)}"
    parts.append(Text(gateways) if overview.gateways else Text(NO_GATEWAY, style="yellow"))
    if overview.bulk_workers:
        parts.append(Text(f"bulk workers: {', '.join(overview.bulk_workers)}"))
    parts += [
        Text(f"job {job.id} ({job.model} {job.version}, {job.state}) waits: {job.waiting}", style="red")
        for job in overview.waiting_jobs
    ]
    return Group(*parts)


def models_tables(overview: Overview) -> RenderableType:
    """Returns the tables of `qinfer models list`."""
    rows = [
        (
            m.name,
            str(m.version or "-"),
            state(m.state),
            m.reason,
            _some([f"{pin.reason} {pin.holder}" for pin in m.pins]),
        )
        for m in overview.models
    ]
    return Group(table("Models", "model, version>, state, reason, pinned by", rows), *_sequences(overview))


def queues_tables(lanes: Sequence[LaneRow], work: Sequence[WorkRow]) -> RenderableType:
    """Returns all lanes, and the work of each model version."""
    if not lanes:
        return Text("there are no lanes, because no model should be loaded")
    parts = [_lanes_table(lanes, {(row.model, row.version): row for row in work}, has_work=True)]
    shares = [
        (lane.model, str(lane.version), lane.name, _some(one.tenants), one.weight, f"{one.part:.0%}", one.depth)
        for lane in lanes
        for one in (lane.shares if len(lane.shares) > 1 else ())
    ]
    if shares:
        columns = "model, version>, lane, tenants, weight>, share>, depth>"
        parts.append(table("Shares of tenants", columns, shares))
    return Group(*parts)


def workers_tables(workers: Sequence[WorkerRow], bulk_workers: Sequence[str]) -> RenderableType:
    """Returns the workers and the bulk workers."""
    parts: list[RenderableType] = [Text(NO_WORKER, style="yellow")]
    if workers:
        failed = [(worker.id, one) for worker in workers for one in worker.models if one.reason]
        parts = [_workers_table(workers, is_whole=True), *_long(workers)]
        parts += [Text(f"{id_}: {one.model} {one.version} is {one.state.value}: {one.reason}") for id_, one in failed]
    return Group(*parts, Text(f"bulk workers: {', '.join(bulk_workers) or 'none'}"))


def duration(seconds: float) -> str:
    """Returns a rounded duration: `40 ms`, `12 s`, `3 min`, `5 h`, `2 d`."""
    if seconds < 1:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    for unit_s, name, below_s in ((1, "s", 120), (60, "min", 7200), (3600, "h", 172_800)):
        if seconds < below_s:
            return f"{seconds // unit_s:.0f} {name}"
    return f"{seconds // 86_400:.0f} d"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _age(lane_or_work: LaneRow | WorkRow, count: int) -> str:
    return duration(lane_or_work.oldest_age_s) if count else "-"


def _work(row: WorkRow | None) -> tuple[object, str]:
    """A ? marks an assumed speed."""
    if row is None or not row.rows:
        return "-", "-"
    return row.rows, duration(row.work_s) + ("" if row.rows_per_s else "?")


def _models_with_work(overview: Overview, work: _Work) -> RenderableType:
    rows = []
    for model in overview.models:
        row = work.get((model.name, model.version))
        counts = (row.workers, row.requests, _age(row, row.requests)) if row else ("-", "-", "-")
        rows.append((model.name, str(model.version or "-"), state(model.state), *counts, *_work(row)))
    return table("Models", "model, version>, state, workers>, depth>, oldest>, rows>, work>", rows)


def _sequences(overview: Overview) -> Iterator[RenderableType]:
    rows = [(of.model, of.open, of.waiting, of.handed_over, of.lost) for of in overview.sequences]
    if rows:
        yield table("Sequences", "model, open>, waiting>, handed over>, lost>", rows)


def _lanes_table(lanes: Sequence[LaneRow], work: _Work, *, has_work: bool = False) -> RenderableType:
    rows = []
    for key, group in groupby(lanes, key=lambda lane: (lane.model, lane.version)):
        row = work.get(key)
        of_version = (*_work(row), row.workers if row else "-") if has_work else ()
        for number, lane in enumerate(group):
            counts = (lane.depth, lane.in_flight, _age(lane, lane.depth))
            more = of_version if number == 0 else [""] * len(of_version)
            rows.append((lane.model, str(lane.version), lane.name, *counts, *more))
    columns = "model, version>, lane, depth>, in flight>, oldest>"
    return table("Lanes", f"{columns}, rows>, work>, workers>" if has_work else columns, rows)


def _workers_table(workers: Sequence[WorkerRow], *, is_whole: bool = False) -> RenderableType:
    has_host = is_whole and not all(worker.id.startswith(f"{worker.host}-") for worker in workers)
    rows = []
    for worker in workers:
        begin = (worker.id, *([worker.host] if has_host else []), state(worker.state), worker.device)
        numbers = (worker.executing, f"{worker.throughput_rps:,.0f}", duration(worker.up_s))
        clock = [f"{worker.clock_offset_s:+.2f} s"] if is_whole else []
        rows.append((*begin, ", ".join(worker.ready) or "-", *numbers, *clock))
    columns = f"id{', host' * has_host}, state, device, ready, executing>, requests/s>, up>{', clock>' * is_whole}"
    return table("Workers", columns, rows)


def _long(workers: Iterable[WorkerRow]) -> Iterator[Text]:
    for worker in workers:
        for one in worker.long:
            yield Text(f"{worker.id}: {one.text}", style="red" if one.is_late else "")


def watch(read: Callable[[], Overview], interval_s: float, *, as_json: bool) -> None:
    """Shows the overview until Ctrl-C, the regular end: in place on a terminal, else block after block."""
    logging.disable()
    console = Console()
    in_place = console.is_terminal and not as_json
    display = Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") if in_place else nullcontext()
    last, failing_since = None, ""
    with suppress(KeyboardInterrupt), display as live:
        while True:
            now, problem = time.strftime("%H:%M:%S"), ""
            try:
                last, failing_since = read(), ""
                if as_json:
                    print_json(last)
            except QinferError as error:
                problem, failing_since = f"{error.message}; retrying", failing_since or now
                if as_json:
                    fail(problem, error.code, exit_code(error), as_json=True)
            heading = Text.assemble((now, "bold"), (f"  every {interval_s:g} s; Ctrl-C ends it", "dim"))
            if problem:
                heading.append(f"\nsince {failing_since}: {problem}", "red").append(
                    "\nlast state:" if last else "", "dim"
                )
            block = Group(heading, *([overview_tables(last)] if last else []))
            if live is not None:
                live.update(block, refresh=True)
            elif not as_json:
                console.print(block)
            sys.stdout.flush()
            time.sleep(interval_s)
