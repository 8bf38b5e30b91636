"""The page of an analysis: one HTML file without scripts and foreign addresses, with figures as SVG; pure.

Colours follow the reader's preference for dark or light, and the page can be printed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from qinfer.cli.analyze.figures import Figures, Goal
from qinfer.cli.analyze.search import Outcome
from qinfer.cli.analyze.space import Candidate, Point

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
        model: The model's name.
        machine: The machine in words.
        goal: The objective.
        outcome: The search's result.
        figures: All figures by point.
        config: The winner's configuration as `config.pbtxt`.
        is_alone: Whether all requests are for the model.
    """

    model: str
    machine: str
    goal: Goal
    outcome: Outcome
    figures: Mapping[Point, Figures]
    config: str
    is_alone: bool = True

    @property
    def limit(self) -> str:
        """The limit of the winner in words; empty where it is not known."""
        return limit_of(self.outcome.winner, self.figures[self.outcome.winner]) if self.is_alone else ""


def page(facts: Facts) -> str:
    """Returns the page."""
    outcome, figures = facts.outcome, facts.figures
    winner, today = figures[outcome.winner], figures[outcome.today]
    is_same = outcome.winner.candidate == outcome.today.candidate
    verdict = "the present configuration stays" if is_same else f"{outcome.gain.mean:.2f} times the present one"
    between = "" if is_same else f" ({outcome.gain.low:.2f} to {outcome.gain.high:.2f} at 95 %)"
    parts = [
        f"<h1>{escape(facts.model)}</h1>",
        f'<p class="dim">{escape(facts.machine)} · objective: {escape(_goal_text(facts.goal))} · '
        f"{outcome.measured} measurements of {len(figures)} points</p>",
        f'<p class="key">{verdict}</p>',
        f"<p><b>{escape(outcome.winner.candidate.text())}</b> at {outcome.winner.level} concurrent requests: "
        f"{winner.throughput.mean:,.0f} requests/s, p50 {winner.p50_ms:.2f} ms, p99 {winner.p99_ms:.2f} ms{between}. "
        f"{escape(facts.limit)}{_agreement_text(winner)}</p>",
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


def best_points(facts: Facts) -> list[Point]:
    """Returns the best point of each candidate, best first."""
    best: dict[Candidate, Point] = {}
    for point in facts.figures:
        known = best.get(point.candidate)
        if known is None or _mean(facts, point) > _mean(facts, known):
            best[point.candidate] = point
    return sorted(best.values(), key=lambda point: -_mean(facts, point))


def rows(facts: Facts) -> list[tuple[str, ...]]:
    """Returns a row for each of `best_points`."""
    return [_row(point, facts.figures[point], facts) for point in best_points(facts)]


COLUMNS = "instances, batch, delay, threads, backend, load, requests/s, ±, p50 ms, p99 ms, rows, MiB"
"""`rows` are those of a mean batch; delays are milliseconds."""


def _row(point: Point, found: Figures, facts: Facts) -> tuple[str, ...]:
    width, one = found.throughput.half_width, point.candidate
    return (
        f"{one.instances}",
        f"{one.max_batch}",
        f"{one.delay_ms:g}",
        f"{one.threads or '-'}",
        one.backend if one.precision == "full" else f"{one.backend} mixed",
        f"{point.level}",
        f"{found.throughput.mean:,.0f}",
        "" if math.isinf(width) else f"{width:.0%}",
        f"{found.p50_ms:.3g}",
        f"{found.p99_ms:.3g}",
        f"{found.mean_batch:.1f}",
        f"{found.memory_mb:,.0f}" + ("" if facts.goal.score(found).mean else " (refused)"),
    )


def _mean(facts: Facts, point: Point) -> float:
    return facts.goal.score(facts.figures[point]).mean


def _goal_text(goal: Goal) -> str:
    limits = [f"p99 ≤ {goal.p99_ms:g} ms"] if goal.p99_ms < math.inf else []
    limits += [f"first response, p99 ≤ {goal.first_ms:g} ms"] if goal.first_ms < math.inf else []
    limits += [f"between responses, p99 ≤ {goal.between_ms:g} ms"] if goal.between_ms < math.inf else []
    limits += [f"memory ≤ {goal.memory_mb:g} MiB"] if goal.memory_mb < math.inf else []
    limits += [f"accuracy ≥ {goal.accuracy:g}"] if goal.accuracy else []
    return ", ".join([goal.objective, *limits])


def _agreement_text(found: Figures) -> str:
    return "" if found.accuracy is None else f" Its answers agree with today's by {found.accuracy:.4f}."


def _table(facts: Facts) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS.split(", "))
    body = "".join(
        f'<tr class="{_colour(point, facts.outcome)}">{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>'
        for point, row in zip(best_points(facts), rows(facts), strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _scatter(facts: Facts) -> str:
    figures = facts.figures
    front = pareto(figures)
    marks = [
        Mark(
            figures[point].p99_ms,
            figures[point].throughput.mean,
            _colour(point, facts.outcome),
            f"{point.candidate.text()} at {point.level}",
        )
        for point in figures
    ]
    line = [(figures[point].p99_ms, figures[point].throughput.mean) for point in front]
    return _figure(
        marks,
        [("dot", line)],
        "p99, ms",
        "requests/s",
        "Each point is a configuration under a load; the line is the Pareto front.",
    )


def _curves(facts: Facts) -> str:
    lines, marks = [], []
    for colour, candidate in (("today", facts.outcome.today.candidate), ("best", facts.outcome.winner.candidate)):
        known = sorted((p for p in facts.figures if p.candidate == candidate), key=lambda p: p.level)
        lines.append((colour, [(float(p.level), facts.figures[p].p99_ms) for p in known]))
        marks += [
            Mark(float(p.level), facts.figures[p].p99_ms, colour, f"{p.candidate.text()} at {p.level}") for p in known
        ]
    return _figure(
        marks, lines, "concurrent requests", "p99, ms", "Green: the winner. Orange: the present configuration."
    )


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
