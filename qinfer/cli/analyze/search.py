"""Searches choose the point that is measured next: generators that yield what they want and are sent what was found.

    wanted = next(search)
    while True:
        wanted = search.send(measure(wanted))      # StopIteration has the `Outcome`

A search asks in the same order if it gets the same figures, so that a command that was killed goes on from its journal.

    brute     every point once
    quick     load first, then instances with threads and backend, batch, delay, then neighbours, best points first
    optuna    tree-structured Parzen estimators (`pip install optuna`)

Each ends with *finals*: the best candidates and the present configuration are measured again by turns, so that a slow
minute of the machine hits all of them. Pure.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from qinfer.cli.analyze.figures import Figures, Goal, Interval, RowTimes, learnt
from qinfer.cli.analyze.space import Candidate, Point, Space

FINALISTS, TURNS = 4, 2
LEAST_BUDGET = 24
BUDGET_PART = 0.08
"""The part of all points that a quick search measures, finals included."""
NEAR = 0.9
"""A level, or a candidate, that reaches this part of the best is looked at further."""
HOPELESS = 0.7
"""A load whose score, or a batch size whose learnt times, are less than this part of the best is left out."""


Beside = tuple[tuple[str, Candidate], ...]
"""The configurations of the other models of a mix, by name."""


class Wanted(NamedTuple):
    """A measurement to make: of a point of a model, beside the other models of a mix.

    Attributes:
        turn: 0 for the first measurement of the point, then 1, 2, …
        to_beat: A score; a measurement whose interval ends below may end early.
    """

    point: Point
    turn: int = 0
    to_beat: float = 0.0
    model: str = ""
    beside: Beside = ()

    @property
    def key(self) -> "Wanted":
        """The same measurement, without a score to beat."""
        return self._replace(to_beat=0.0)

    @property
    def candidates(self) -> dict[str, Candidate]:
        """The configurations of all models."""
        return {**dict(self.beside), self.model: self.point.candidate}


class Outcome(NamedTuple):
    """The result of a search.

    Attributes:
        today: The present configuration at its best load.
        gain: The winner's score as times the present one's, with its interval; 1 where the winner is the present one.
        measured: The number of measurements.
        ranked: The best point of each candidate, best first.
        leader: The best of the finals; the winner, too, if it is better than the present configuration beyond chance.
    """

    winner: Point
    today: Point
    gain: Interval
    measured: int
    ranked: Sequence[Point]
    figures: Mapping[Point, Figures]
    leader: Point


Search = Generator[Wanted, Figures, Outcome]
Result = TypeVar("Result")


class Measurements:
    """The figures by point, and what they say."""

    def __init__(self, space: Space, goal: Goal, budget: int) -> None:
        self.space, self.goal, self.budget = space, goal, budget
        self.figures: dict[Point, Figures] = {}
        self.turns: dict[Point, int] = {}
        self.measured = 0
        self._scores: dict[Point, Interval] = {}

    @property
    def left(self) -> int:
        """Measurements that are left before the finals."""
        return self.budget - (FINALISTS + 1) * TURNS - self.measured

    def score(self, point: Point) -> Interval:
        """Returns a measured point's score."""
        if point not in self._scores:
            self._scores[point] = self.goal.score(self.figures[point])
        return self._scores[point]

    def ranked(self) -> list[Point]:
        """Returns the best point of each candidate, best first."""
        best: dict[Candidate, Point] = {}
        for point in self.figures:
            known = best.get(point.candidate)
            if known is None or self.score(point).mean > self.score(known).mean:
                best[point.candidate] = point
        return sorted(best.values(), key=lambda point: -self.score(point).mean)

    @property
    def best(self) -> Point:
        """The best point."""
        return max(self.figures, key=lambda point: self.score(point).mean)

    def measure(self, point: Point, *, again: bool = False) -> Generator[Wanted, Figures, Interval]:
        """Measures a point, unless it was measured; returns its score."""
        if point not in self.figures or again:
            to_beat = self.score(self.best).low if self.figures and not again else 0.0
            found = yield Wanted(point, self.turns.get(point, -1) + 1, to_beat)
            self.turns[point] = self.turns.get(point, -1) + 1
            self.measured += 1
            self.figures[point] = self.figures[point].joined(found) if point in self.figures else found
            self._scores.pop(point, None)
        return self.score(point)

    def measure_all(self, points: Iterable[Point]) -> Generator[Wanted, Figures, None]:
        """Measures points while the budget lasts."""
        for point in points:
            if self.left > 0 or point in self.figures:
                yield from self.measure(point)


def brute(space: Space, goal: Goal) -> Search:
    """Measures each point once, and the best again."""
    board = Measurements(space, goal, budget_of(space, "brute"))
    points = [*_of(space.today, space.levels), *space.points()]
    yield from board.measure_all(points)
    return (yield from _finals(board))


def budget_of(space: Space, mode: str = "quick") -> int:
    """Returns how many measurements a search makes at most, finals included."""
    if mode == "brute":
        return space.size + len(space.levels) + (FINALISTS + 1) * TURNS
    return max(LEAST_BUDGET, int(space.size * BUDGET_PART))


def quick(space: Space, goal: Goal, budget: int = 0) -> Search:
    """Measures few points, those first that decide most; at most `budget`, where 0 = `budget_of`."""
    board = Measurements(space, goal, budget or budget_of(space))
    yield from board.measure_all(_of(space.today, reversed(space.levels)))
    level = _level(board, space.today)
    yield from board.measure_all(Point(one, level) for one in _shapes(board))
    for candidate in [point.candidate for point in _near(board)]:
        yield from _climb(board, Point(candidate, level))
    yield from _delays(board)
    explored: set[Point] = set()
    while board.left > 0 and (point := _unexplored(board, explored)) is not None:
        explored.add(point)
        yield from board.measure_all(_neighbours(board, point))
    return (yield from _finals(board))


def optuna(space: Space, goal: Goal, seed: int = 0) -> Search:
    """Asks optuna's sampler; the budget is that of `quick`.

    Raises:
        ImportError: optuna is not installed.
    """
    import optuna as library

    library.logging.set_verbosity(library.logging.WARNING)
    study = library.create_study(direction="maximize", sampler=library.samplers.TPESampler(seed=seed))
    board = Measurements(space, goal, budget_of(space))
    yield from board.measure_all(_of(space.today, space.levels))
    for _ in range(4 * board.budget):
        if board.left <= 0:
            break
        trial = study.ask()
        point = _suggested(trial, space)
        score = yield from board.measure(point)
        study.tell(trial, score.mean)
    return (yield from _finals(board))


def _suggested(trial: Any, space: Space) -> Point:
    names = (*Candidate._fields, "levels")
    *values, level = (trial.suggest_categorical(name, list(getattr(space, name))) for name in names)
    return Point(Candidate(*values), level)


def drive(search: Generator[Wanted, Figures, Result], measure: Callable[[Wanted], Figures]) -> Result:
    """Runs a search to its end."""
    try:
        wanted = next(search)
        while True:
            wanted = search.send(measure(wanted))
    except StopIteration as end:
        result: Result = end.value
        return result


def _of(candidate: Candidate, levels: Iterable[int]) -> list[Point]:
    return [Point(candidate, level) for level in levels]


def _level(board: Measurements, candidate: Candidate) -> int:
    """Returns the highest load that the candidate bears: larger batches need it."""
    known = [point for point in board.figures if point.candidate == candidate]
    best = max(board.score(point).mean for point in known)
    return max(point.level for point in known if board.score(point).mean >= HOPELESS * best)


def _shapes(board: Measurements) -> list[Candidate]:
    """Returns instances, threads and backends at the largest batch, without those that need too many cores.

    The delay is the middle one: batches that are not full make all of them look alike.
    """
    space = board.space
    batch, delay = space.max_batch[-1], space.delay_ms[len(space.delay_ms) // 2]
    shapes = [
        Candidate(instances, batch, delay, threads, backend, precision)
        for backend in space.backend
        for precision in space.precision
        for instances in space.instances
        for threads in space.threads
    ]
    fits = [one for one in shapes if one.instances * max(one.threads, 1) <= 2 * board.goal.cores]
    return sorted(fits or shapes, key=lambda one: abs(one.instances * max(one.threads, 1) - board.goal.cores))


def _near(board: Measurements) -> Sequence[Point]:
    ranked = board.ranked()
    best = board.score(ranked[0]).mean
    return [point for point in ranked[:FINALISTS] if board.score(point).mean >= NEAR * best]


def _climb(board: Measurements, start: Point) -> Generator[Wanted, Figures, None]:
    """Walks through the batch sizes, down and up, while it gets better; one step may be worse."""
    sizes = board.space.max_batch
    model = learnt(board.figures[start].batches) if start in board.figures else None
    index = sizes.index(start.candidate.max_batch) if start.candidate.max_batch in sizes else len(sizes) - 1
    for way in (range(index - 1, -1, -1), range(index + 1, len(sizes))):
        best, worse = (yield from board.measure(start)).mean if board.left > 0 else 0.0, 0
        for place in way:
            candidate = start.candidate._replace(max_batch=sizes[place])
            if board.left <= 0 or worse > 1:
                break
            if _is_hopeless(model, candidate, start.candidate):
                continue
            score = (yield from board.measure(Point(candidate, start.level))).mean
            best, worse = max(best, score), 0 if score > best else worse + 1


def _is_hopeless(model: RowTimes | None, candidate: Candidate, than: Candidate) -> bool:
    return model is not None and model.rows_per_s(candidate) < HOPELESS * model.rows_per_s(than)


def _delays(board: Measurements) -> Generator[Wanted, Figures, None]:
    for point in list(_near(board))[:2]:
        delays = [one for one in board.space.delay_ms if one != point.candidate.delay_ms]
        yield from board.measure_all(Point(point.candidate._replace(delay_ms=one), point.level) for one in delays)


def _unexplored(board: Measurements, explored: Collection[Point]) -> Point | None:
    """Returns the best point that was not explored, if it is near the best: two steps may be needed at once."""
    best = board.score(board.best).mean
    near = [point for point in board.figures if point not in explored and board.score(point).mean >= NEAR * best]
    return max(near, key=lambda point: board.score(point).mean, default=None)


def _neighbours(board: Measurements, point: Point) -> list[Point]:
    """Returns the points that differ by one step in one dimension: load first, then batch and the others."""
    found = [Point(point.candidate, level) for level in _beside(board.space.levels, point.level)]
    for name in ("max_batch", "delay_ms", "threads", "instances", "backend", "precision"):
        values = _beside(getattr(board.space, name), getattr(point.candidate, name))
        found += [Point(point.candidate._replace(**{name: value}), point.level) for value in values]
    return [one for one in found if one not in board.figures]


def _beside(values: Sequence[Any], value: Any) -> list[Any]:
    if value not in values:
        return list(values[:1])
    index = values.index(value)
    return [values[place] for place in (index - 1, index + 1) if 0 <= place < len(values)]


def _finals(board: Measurements) -> Generator[Wanted, Figures, Outcome]:
    """Measures the best by turns; the present configuration stays unless another is better beyond the interval."""
    today = max(
        (point for point in board.figures if point.candidate == board.space.today),
        key=lambda point: board.score(point).mean,
    )
    finalists = dict.fromkeys([today, *(point for point in board.ranked()[:FINALISTS] if board.score(point).mean)])
    for _ in range(TURNS):
        for point in finalists:
            yield from board.measure(point, again=True)
    winner = leader = max(finalists, key=lambda point: board.score(point).mean)
    gain = gain_of(board.score(winner), board.score(today))
    if winner.candidate == today.candidate or gain.low <= 1.0:
        winner, gain = today, Interval(1.0, 1.0, 1.0)
    return Outcome(winner, today, gain, board.measured, board.ranked(), board.figures, leader)


def gain_of(one: Interval, other: Interval) -> Interval:
    """Returns a score as times another one, with its interval."""
    if not other.mean:
        return Interval(float("inf"), float("inf"), float("inf")) if one.mean else Interval(1.0, 1.0, 1.0)
    part = ((one.half_width if one.mean else 0.0) ** 2 + other.half_width**2) ** 0.5
    ratio = one.mean / other.mean
    return Interval(max(ratio * (1 - part), 0.0), ratio, ratio * (1 + part))
