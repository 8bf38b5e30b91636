"""The page of an analysis: one HTML file without scripts and foreign addresses, with figures as SVG; pure.

Colours follow the reader's preference for dark or light, and the page can be printed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.cli.analyze.figures import Figures, Goal
from qinfer.cli.analyze.search import Outcome
from qinfer.cli.analyze.space import Point, config_text

WIDTH, HEIGHT, EDGE = 640, 300, 52
_STYLE = Path(__file__).with_name("report.css")


class Mark(NamedTuple):
    """A point of a figure: where, its class of colour, and its title."""

    x: float
    y: float
    colour: str
    title: str


class Facts(NamedTuple):
    """The contents of the page.

    Attributes:
        winner: The winner's configuration, in Triton's JSON.
        limit: The limit of the winner in words; empty where it is not known.
        is_mix: Whether the outcome's gain is that of several models together.
    """

    model: str
    machine: str
    goal: Goal
    outcome: Outcome
    winner: Mapping[str, Any]
    limit: str = ""
    is_mix: bool = False

    @property
    def is_same(self) -> bool:
        """Whether the present configuration stays."""
        return self.outcome.winner.candidate == self.outcome.today.candidate

    @property
    def verdict(self) -> str:
        """The gain in words."""
        if self.is_same:
            return "the present configuration stays"
        gain, together = self.outcome.gain, ", all models together" if self.is_mix else ""
        return f"{gain.mean:.2f} times the present one ({gain.low:.2f} to {gain.high:.2f} at 95 %){together}"

    @property
    def best(self) -> Figures:
        """The winner's figures."""
        return self.outcome.figures[self.outcome.winner]

    @property
    def config(self) -> str:
        """The winner's configuration as `config.pbtxt`."""
        return config_text(self.winner)


def page(facts: Facts) -> str:
    """Returns the page."""
    outcome, winner = facts.outcome, facts.best
    today = outcome.figures[outcome.today]
    agreement = "" if winner.accuracy is None else f" Its answers agree with today's by {winner.accuracy:.4f}."
    parts = [
        f"<h1>{escape(facts.model)}</h1>",
        f'<p class="dim">{escape(facts.machine)} · objective: {escape(_goal_text(facts.goal))} · '
        f"{outcome.measured} measurements of {len(outcome.figures)} points</p>",
        f'<p class="key">{facts.verdict}</p>',
        f"<p><b>{escape(outcome.winner.candidate.text())}</b> at {outcome.winner.level} concurrent requests: "
        f"{winner.throughput.mean:,.0f} requests/s, p50 {winner.p50_ms:.2f} ms, p99 {winner.p99_ms:.2f} ms. "
        f"{escape(facts.limit)}{agreement}</p>",
        f"<p>Today: {escape(outcome.today.candidate.text())} at {outcome.today.level}: "
        f"{today.throughput.mean:,.0f} requests/s, p99 {today.p99_ms:.2f} ms.</p>",
        "<h2>Throughput and latency</h2>",
        _scatter(facts),
        "<h2>Latency as the load grows</h2>",
        _curves(facts),
        "<h2>Configurations</h2>",
        _table(facts),
        "<h2>config.pbtxt</h2>",
        f"<pre>{escape(facts.config)}</pre>",
    ]
    title = f"qinfer analyze {escape(facts.model)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE.read_text()}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def pareto(points: Mapping[Point, Figures]) -> list[Point]:
    """Returns the points of which no other has both more throughput and a lower p99, by ascending p99."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (points[one].p99_ms, -points[one].throughput.mean)):
        if not front or points[point].throughput.mean > points[front[-1]].throughput.mean:
            front.append(point)
    return front


def limit_of(point: Point, found: Figures) -> str:
    """Returns in words what limits a point, as far as the executions' times tell."""
    if not found.batches or not found.mean_batch:
        return ""
    nearest = min(found.batches, key=lambda one: abs(one[0] - found.mean_batch))
    busy = found.throughput.mean / max(found.mean_batch, 1e-9) * nearest[1] / 1000 / point.candidate.instances
    if busy >= 0.85:
        return f"The model limits it: its instances execute {min(busy, 1.0):.0%} of the time."
    if found.mean_batch < 0.5 * point.candidate.max_batch and point.level < point.candidate.max_batch:
        return f"The load limits it: batches have {found.mean_batch:.1f} of {point.candidate.max_batch} rows."
    return f"The way to the model limits it: instances execute {busy:.0%} of the time."


COLUMNS = "instances, batch, delay, threads, backend, load, requests/s, ±, p50 ms, p99 ms, rows, MiB"
"""The columns of `rows`; rows are those of a mean batch, delays are milliseconds."""


def rows(facts: Facts) -> list[tuple[str, ...]]:
    """Returns a row for each candidate at its best load, best first."""
    found = list[tuple[str, ...]]()
    for point in facts.outcome.ranked:
        one, figures = point.candidate, facts.outcome.figures[point]
        width = figures.throughput.half_width
        row = (
            f"{one.instances}",
            f"{one.max_batch}",
            f"{one.delay_ms:g}",
            f"{one.threads or '-'}",
            one.backend if one.precision == "full" else f"{one.backend} mixed",
            f"{point.level}",
            f"{figures.throughput.mean:,.0f}",
            "" if math.isinf(width) else f"{width:.0%}",
            f"{figures.p50_ms:.3g}",
            f"{figures.p99_ms:.3g}",
            f"{figures.mean_batch:.1f}",
            f"{figures.memory_mb:,.0f}" + ("" if facts.goal.score(figures).mean else " (refused)"),
        )
        found.append(row)
    return found


def _goal_text(goal: Goal) -> str:
    limits = [f"p99 ≤ {goal.p99_ms:g} ms"] if goal.p99_ms < math.inf else []
    limits += [f"first response, p99 ≤ {goal.first_p99_ms:g} ms"] if goal.first_p99_ms < math.inf else []
    limits += [f"between responses, p99 ≤ {goal.between_p99_ms:g} ms"] if goal.between_p99_ms < math.inf else []
    limits += [f"memory ≤ {goal.memory_mb:g} MiB"] if goal.memory_mb < math.inf else []
    limits += [f"accuracy ≥ {goal.accuracy:g}"] if goal.accuracy else []
    return ", ".join([goal.objective, *limits])


def _table(facts: Facts) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS.split(", "))
    body = "".join(
        f'<tr class="{_colour(point, facts.outcome)}">{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>'
        for point, row in zip(facts.outcome.ranked, rows(facts), strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _scatter(facts: Facts) -> str:
    figures, outcome = facts.outcome.figures, facts.outcome
    marks = {point: _mark(point, found.p99_ms, found.throughput.mean, outcome) for point, found in figures.items()}
    front = [marks[point][:2] for point in pareto(figures)]
    text = "Each point is a configuration under a load; the line is the Pareto front."
    return _figure(list(marks.values()), [("dot", front)], "p99, ms", "requests/s", text)


def _curves(facts: Facts) -> str:
    figures, outcome = facts.outcome.figures, facts.outcome
    shown = sorted((point for point in figures if _colour(point, outcome) != "dot"), key=lambda point: point.level)
    marks = [_mark(point, point.level, figures[point].p99_ms, outcome) for point in shown]
    lines = [(colour, [mark[:2] for mark in marks if mark.colour == colour]) for colour in ("today", "best")]
    text = "Green: the winner. Orange: the present configuration."
    return _figure(marks, lines, "concurrent requests", "p99, ms", text)


def _mark(point: Point, x: float, y: float, outcome: Outcome) -> Mark:
    return Mark(x, y, _colour(point, outcome), f"{point.candidate.text()} at {point.level}")


def _colour(point: Point, outcome: Outcome) -> str:
    if point.candidate == outcome.winner.candidate:
        return "best"
    return "today" if point.candidate == outcome.today.candidate else "dot"


def _figure(
    marks: Sequence[Mark],
    lines: Iterable[tuple[str, Sequence[tuple[float, float]]]],
    x_name: str,
    y_name: str,
    text: str,
) -> str:
    right = max((mark.x for mark in marks), default=1.0) * 1.05 or 1.0
    top = max((mark.y for mark in marks), default=1.0) * 1.08 or 1.0

    def at(x: float, y: float) -> tuple[str, str]:
        return (
            f"{EDGE + x / right * (WIDTH - EDGE - 10):.1f}",
            f"{HEIGHT - EDGE + 12 - y / top * (HEIGHT - EDGE - 4):.1f}",
        )

    parts = []
    for step in ticks(top):
        x, y = at(0, step)
        parts.append(f'<line class="axis" x1="{x}" y1="{y}" x2="{WIDTH - 10}" y2="{y}"/>')
        parts.append(f'<text x="{EDGE - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{step:,g}</text>')
    for step in ticks(right):
        x, y = at(step, 0)
        parts.append(f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="middle">{step:,g}</text>')
    for colour, line in lines:
        path = " ".join(",".join(at(*one)) for one in line)
        parts.append(f'<polyline class="line" style="stroke:var(--{colour})" points="{path}"/>')
    for mark in marks:
        x, y = at(mark.x, mark.y)
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" style="fill:var(--{mark.colour})">'
            f"<title>{escape(mark.title)}</title></circle>"
        )
    parts.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text x="2" y="10">{escape(y_name)}</text>')
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(text)}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(text)}</figcaption></figure>"
    )


def ticks(most: float) -> list[float]:
    """Returns about five round values from 0 to `most`."""
    if most <= 0 or math.isinf(most):
        return [0.0]
    raw = most / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * times for times in (1, 2, 5, 10) if size * times >= raw)
    return [step * n for n in range(int(most / step) + 1)]
