"""Measurements of a point, and their score by the objective; pure.

An interval is that of the mean of the windows' throughputs by Student's distribution, at 95 %.
"""

import math
from collections.abc import Sequence
from operator import gt
from statistics import fmean, median, stdev
from typing import Literal, NamedTuple

from qinfer.cli.analyze.space import Candidate

Objective = Literal["throughput", "p99", "goodput", "cost"]

_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile for 1, 2, … degrees of freedom."""


class Interval(NamedTuple):
    """A mean with its interval, each at least 0."""

    low: float
    mean: float
    high: float

    @property
    def half_width(self) -> float:
        """The half of the interval as a part of the mean."""
        return (self.high - self.low) / 2 / self.mean if self.mean else math.inf


def interval(values: Sequence[float]) -> Interval:
    """Returns the interval of the mean of at least one value; that of one value is unbounded."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(0.0, mean, math.inf)
    quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    half = quantile * stdev(values) / math.sqrt(len(values))
    return Interval(max(mean - half, 0.0), mean, mean + half)


class LoadWindow(NamedTuple):
    """A short time under load.

    Attributes:
        p99_ms: The latency of the slowest 1 %; of several models, that of the slowest.
        good_per_s: Answers per second within the deadline; all answers without a deadline.
        noise: The part of the machine's time that others took, between 0 and 1.
        cores: Cores that the server's processes used on average.
        first_ms: The p99 of the time to the first response of a stream.
        between_ms: The p99 of the time between two responses of a stream.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    good_per_s: float
    errors: int = 0
    noise: float = 0.0
    first_error: str = ""
    cores: float = 0.0
    first_ms: float = 0.0
    between_ms: float = 0.0


class Figures(NamedTuple):
    """A measurement of a point.

    Attributes:
        mean_batch: Rows of a mean batch.
        memory_mb: Resident memory of the server's processes, in MiB; shared memory counts in each.
        batches: Rows of a batch → milliseconds of an execution.
        accuracy: How far the answers agree with the present configuration's, from 0 to 1; `None` = not compared.
    """

    windows: tuple[LoadWindow, ...]
    mean_batch: float = 0.0
    memory_mb: float = 0.0
    batches: tuple[tuple[int, float], ...] = ()
    accuracy: float | None = None

    @property
    def throughput(self) -> Interval:
        """Answers per second."""
        return interval([one.requests_per_s for one in self.windows])

    @property
    def p50_ms(self) -> float:
        """The median of the windows' medians."""
        return median([one.p50_ms for one in self.windows])

    @property
    def p99_ms(self) -> float:
        """The median of the windows' p99."""
        return median([one.p99_ms for one in self.windows])

    @property
    def first_ms(self) -> float:
        """The median of the windows' p99 of first responses; 0 = no streams."""
        return median([one.first_ms for one in self.windows])

    @property
    def between_ms(self) -> float:
        """The median of the windows' p99 between responses; 0 = no streams."""
        return median([one.between_ms for one in self.windows])

    @property
    def errors(self) -> int:
        """Failed requests of all windows."""
        return sum(one.errors for one in self.windows)

    @property
    def first_error(self) -> str:
        """The text of the first error."""
        return next((one.first_error for one in self.windows if one.first_error), "")

    @classmethod
    def refused(cls, reason: str) -> "Figures":
        """Returns the measurement of a configuration that can't be loaded."""
        return cls((LoadWindow(0.0, 0.0, 0.0, 0.0, 1, 0.0, reason),))

    def joined(self, other: "Figures") -> "Figures":
        """Returns both measurements as one."""
        return other._replace(windows=(*self.windows, *other.windows))


class Goal(NamedTuple):
    """The objective and its constraints.

    Attributes:
        objective: `throughput`, `goodput`, `p99` (its reciprocal is the score) or `cost`.
        price_per_hour: The price of a core and hour, for `cost`: the score is requests for a unit of money.
        accuracy: The least agreement of answers with the present configuration's; 0 = they are not compared.
        deadline_ms: The latency below which an answer counts for goodput.
    """

    objective: Objective = "throughput"
    p99_ms: float = math.inf
    memory_mb: float = math.inf
    price_per_hour: float = 0.0
    cores: int = 1
    accuracy: float = 0.0
    first_p99_ms: float = math.inf
    between_p99_ms: float = math.inf
    deadline_ms: float = math.inf

    def score(self, found: Figures) -> Interval:
        """Returns the score, more is better; 0 where a constraint or a request failed, or none was answered."""
        limits = (self.p99_ms, self.first_p99_ms, self.between_p99_ms, self.memory_mb)
        is_over = any(map(gt, (found.p99_ms, found.first_ms, found.between_ms, found.memory_mb), limits))
        if found.errors or not found.throughput.mean or is_over:
            return Interval(0.0, 0.0, 0.0)
        if self.objective == "p99":
            slow = interval([one.p99_ms for one in found.windows])
            return Interval(1 / slow.high, 1 / slow.mean, 1 / slow.low if slow.low else math.inf)
        if self.objective == "cost":
            return interval([one.requests_per_s / self._price_per_s(one) for one in found.windows])
        is_goodput = self.objective == "goodput"
        return interval([one.good_per_s if is_goodput else one.requests_per_s for one in found.windows])

    def per_million(self, found: Figures) -> float:
        """Returns the price of a million requests, by the cores that they used; infinite if none was answered."""
        rate = found.throughput.mean
        return 1e6 * fmean([self._price_per_s(one) for one in found.windows]) / rate if rate else math.inf

    def _price_per_s(self, window: LoadWindow) -> float:
        return self.price_per_hour / 3600 * max(window.cores, 1e-6)


class RowTimes(NamedTuple):
    """The time of an execution of n rows: t(n) = fixed + each * n, in milliseconds."""

    fixed_ms: float
    each_ms: float

    def rows_per_s(self, candidate: Candidate) -> float:
        """Returns the most rows that a candidate's instances execute a second."""
        rows = max(candidate.max_batch, 1)
        return 1000 * candidate.instances * rows / max(self.fixed_ms + self.each_ms * rows, 1e-6)


def learnt(batches: Sequence[tuple[int, float]]) -> RowTimes | None:
    """Fits t(n) by least squares; `None` where fewer than two sizes were executed."""
    if len({rows for rows, _ in batches}) < 2:
        return None
    rows_mean, ms_mean = fmean([rows for rows, _ in batches]), fmean([ms for _, ms in batches])
    spread = sum((rows - rows_mean) ** 2 for rows, _ in batches)
    each = max(sum((rows - rows_mean) * (ms - ms_mean) for rows, ms in batches) / spread, 0.0)
    return RowTimes(max(ms_mean - each * rows_mean, 0.0), each)
