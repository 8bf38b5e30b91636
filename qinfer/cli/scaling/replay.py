"""`qinfer autoscale --replay`: simulates the policy on recorded traffic."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from qinfer.cli.console import print_json
from qinfer.cli.scaling.scaler import policy_of
from qinfer.core.settings import AutoscaleSettings
from qinfer.errors import SettingsError
from qinfer.scaling.record import Traffic, decode, traffic_of
from qinfer.scaling.simulation import SimulationOutcome, WorkerProfile, as_recorded, simulate

_FIGURES: Mapping[str, tuple[str, str, Callable[[SimulationOutcome, float], float]]] = {
    "worker_s": ("worker-seconds", "{:,.0f}", lambda of, _: of.worker_s),
    "idle_s": ("of them without work", "{:,.0f}", lambda of, _: round(max(of.worker_s - of.ideal_s, 0.0), 3)),
    "excess": ("worker-seconds per second of work", "{:.2f}", lambda of, _: round(of.excess, 4)),
    "late_rows": ("late rows", "{:,}", lambda of, late_s: of.late_rows(late_s)),
    "late_share": ("of all", "{:.2%}", lambda of, late_s: round(of.late(late_s), 6)),
    "wait_p50_s": ("p50 of waits, s", "{:.0f}", lambda of, _: of.wait_s(0.5)),
    "wait_p99_s": ("p99 of waits, s", "{:.0f}", lambda of, _: of.wait_s(0.99)),
    "wait_max_s": ("longest wait, s", "{:.0f}", lambda of, _: of.wait_s(1.0)),
    "most_workers": ("most workers", "{}", lambda of, _: of.most),
    "changes": ("changes", "{}", lambda of, _: of.changes),
    "turns": ("of them reversals", "{}", lambda of, _: of.turns),
    "left_rows": ("rows left at the end", "{:,}", lambda of, _: of.left),
}
"""Measure → label, format, value for an outcome and a late wait."""


def run_replay(path: Path, options: Mapping[str, float], late_s: float | None, *, as_json: bool = False) -> None:
    """Prints a policy's outcome on recorded traffic.

    A wait is late after `late_s`; `None` = the target plus a start-up.
    """
    if late_s is not None and not math.isfinite(late_s):
        raise SettingsError(f"--late-s must be a number of seconds, got {late_s}")
    policy = policy_of(AutoscaleSettings().model_copy(update=dict(options)))
    try:
        with path.open("rb") as file:
            traffic = traffic_of(decode(file))
    except OSError as error:
        raise SettingsError(f"{path} can't be read: {error.strerror}; --record writes such a file") from None
    profile = WorkerProfile.from_traffic(traffic)
    bound_s = policy.target_s + profile.load_s if late_s is None else late_s
    outcomes = {
        "recorded": figures(as_recorded(traffic), bound_s),
        "replayed": figures(simulate(policy, traffic.arrivals, profile), bound_s),
    }
    about = {
        "seconds": len(traffic.arrivals),
        "rows": sum(traffic.arrivals),
        "work_s": round(sum(traffic.arrivals) / traffic.rows_per_s, 3),
        "rows_per_s": round(traffic.rows_per_s, 3),
        "load_s": round(traffic.load_s, 3),
        "late_s": round(bound_s, 3),
    }
    if as_json:
        print_json(about | outcomes)
    else:
        _print_table(traffic, bound_s, outcomes)


def figures(outcome: SimulationOutcome, late_s: float) -> dict[str, float]:
    """Returns the figures of an outcome."""
    return {name: figure(outcome, late_s) for name, (_, _, figure) in _FIGURES.items()}


def _print_table(traffic: Traffic, late_s: float, outcomes: Mapping[str, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = sum(traffic.arrivals)
    title = f"{rows:,} rows in {len(traffic.arrivals):,} s, {rows / traffic.rows_per_s:,.0f} s of work"
    table = Table("", "recorded", "these options", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, (words, form, _) in _FIGURES.items():
        table.add_row(words, *(form.format(figure[name]) for figure in outcomes.values()))
    console = Console()
    console.print(table)
    console.print(
        f"A worker served {traffic.rows_per_s:,.1f} rows/s and took {traffic.load_s:.1f} s to start. "
        f"A wait of more than {late_s:.1f} s is late."
    )
