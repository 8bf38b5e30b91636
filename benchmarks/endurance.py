"""Steady load on qinfer for minutes, with every process's memory sampled: does any of them grow?

The first fifth of the run is left out: allocators, caches and Redis's buffers fill up then. Through the rest a
straight line is fitted; what the line rises over that time is the growth.
"""

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import load, machine, page, processes, servers
from benchmarks.bodies import JSON, Body
from benchmarks.models import MODELS
from benchmarks.suite import WORK, interrupt, make_console, prepare, start

SAMPLE_EVERY_S = 10
FULL_MINUTES = 10
SETTLING_SHARE = 0.2
TOLERATED_SHARE = 0.02
TOLERATED_BYTES = 2 * 2**20
"""Below 2 % of a process, or 2 MiB, growth is the noise of page accounting; a leaked byte per request exceeds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one role's memory did after the settling time.

    Attributes:
        role: The role.
        first_bytes: Where the fitted line begins.
        last_bytes: Where it ends.
        minutes: The time between them.
    """

    role: str
    first_bytes: float
    last_bytes: float
    minutes: float

    @property
    def grown_bytes(self) -> float:
        """How much the line rises."""
        return self.last_bytes - self.first_bytes

    @property
    def per_minute_bytes(self) -> float:
        """How fast it rises."""
        return self.grown_bytes / self.minutes if self.minutes else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether the rise is within what is tolerated."""
        return self.grown_bytes <= max(TOLERATED_BYTES, TOLERATED_SHARE * self.first_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A finished run: what wrk counted, and (seconds since the start, role → resident bytes) samples."""

    loaded: load.LoadResult
    samples: list[tuple[float, dict[str, int]]]


def growths(samples: Sequence[tuple[float, dict[str, int]]]) -> list[Growth]:
    """Fits the growth of every role that lives through all samples (a rewrite's short-lived child does not)."""
    settled = samples[int(len(samples) * SETTLING_SHARE) :]
    if len(settled) < 3:
        return []
    times = [at for at, _ in settled]
    found = []
    for role in sorted(set.intersection(*(set(rss) for _, rss in settled))):
        slope, intercept = linear_regression(times, [rss[role] for _, rss in settled])
        first, last = intercept + slope * times[0], intercept + slope * times[-1]
        found.append(Growth(role=role, first_bytes=first, last_bytes=last, minutes=(times[-1] - times[0]) / 60))
    return found


def watch(server: servers.Server, body: Body, connections: int, minutes: float, console: Console) -> Watched:
    """Loads the server and samples its memory until wrk ends.

    Raises:
        LoadFailed: wrk ended with an error.
    """
    command = load.wrk_command(server.url, body, connections, minutes * 60)
    samples: list[tuple[float, dict[str, int]]] = []
    started_at = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as wrk:
        try:
            while True:
                try:
                    output, _ = wrk.communicate(timeout=SAMPLE_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    samples.append((time.monotonic() - started_at, server.usage().rss_bytes))
                    console.print(_one_line(*samples[-1]), highlight=False)
        finally:
            wrk.kill()
    return Watched(loaded=load.parse(output, 0.0), samples=samples)


def main(
    *,
    minutes: Annotated[float, typer.Option(min=0.5, help="How long.")] = FULL_MINUTES,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "tiny",
    connections: Annotated[int, typer.Option(min=1, help="Concurrent connections.")] = 64,
    server_name: Annotated[str, typer.Option("--server", help="What to load.")] = "qinfer",
) -> None:
    """Loads qinfer steadily and watches the memory of each process; exits with 1 when one grows.

    A run of 10 minutes or more of qinfer writes its section of RESULTS.md.
    """
    console = make_console()
    signal.signal(signal.SIGTERM, interrupt)
    kind = servers.KINDS[server_name]
    with processes.alone(WORK):
        watched, stored_bytes = _run(console, kind, model, connections, minutes)
    lines, passed = _judge(console, watched)
    setting = f"{minutes:g} minutes, {model} JSON, {connections} connections, {watched.loaded.rate:,.0f} req/s"
    console.print(setting)
    if minutes >= FULL_MINUTES and kind.name == "qinfer":
        stored = f"on disk at the end: {stored_bytes / 2**20:.0f} MiB"
        text = "\n".join([f"Made by `benchmarks/soak`: {setting}; {stored}.", "", *lines])
        page.write("soak", text, machine.describe())
    raise typer.Exit(0 if passed else 1)


def _run(
    console: Console, kind: servers.ServerKind, model: str, connections: int, minutes: float
) -> tuple[Watched, int]:
    """Starts the server, watches it under load, and returns also the bytes that it left on disk."""
    material = prepare(MODELS[model], WORK)
    with start(kind, material) as server:
        watched = watch(server, material.bodies[JSON], connections, minutes, console)
        stored_bytes = sum(path.stat().st_size for path in (WORK / "servers" / kind.name).rglob("*") if path.is_file())
    return watched, stored_bytes


def _judge(console: Console, watched: Watched) -> tuple[list[str], bool]:
    """Prints the table and returns it in Markdown, with the verdict."""
    found = growths(watched.samples)
    columns = ("process", "RSS MiB from", "to", "MiB per minute", "")
    rows = [
        (
            growth.role,
            f"{growth.first_bytes / 2**20:.1f}",
            f"{growth.last_bytes / 2**20:.1f}",
            f"{growth.per_minute_bytes / 2**20:+.3f}",
            "flat" if growth.is_flat else "grows",
        )
        for growth in found
    ]
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    passed = bool(found) and all(growth.is_flat for growth in found) and not watched.loaded.errors
    verdict = (
        f"{'PASS' if passed else 'MISS'}: no memory growth under load; failed requests: {watched.loaded.errors or 0}"
    )
    console.print(verdict)
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)] + ["", verdict], passed


def _one_line(at_s: float, rss_bytes: dict[str, int]) -> str:
    return f"{at_s:>6.0f} s  " + "  ".join(f"{role} {used / 2**20:.1f} MiB" for role, used in sorted(rss_bytes.items()))


if __name__ == "__main__":
    typer.run(main)
