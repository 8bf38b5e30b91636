"""How long a batch takes: t(rows) = a + b·rows, learned online from what ran. Pure arithmetic, no clock."""

_DECAY = 0.98
"""Weight that an observation keeps for each later one: about the last 50 count."""

_WINDOW = 32
"""Observations over which the floor is the minimum; two windows are looked at, so that it is never of one run."""

_FRESH_S = 5.0
"""Older knowledge expires no request: were the floor wrong and all deadlines below it, nothing would correct it."""


class LatencyModel:
    """Exponentially weighted least squares over (rows, seconds), and the fastest recent execution."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows2 = self._rows_seconds = 0.0
        self._base_s = 0.0
        self._per_row_s = 0.0
        self._floors = (float("inf"), float("inf"))
        self._floor_s = 0.0
        self._in_window = 0
        self._observed_at_s = float("-inf")

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    def observe(self, rows: int, seconds: float, now_s: float) -> None:
        """Learns from one execution.

        Args:
            rows: Rows of the batch.
            seconds: How long it took.
            now_s: When it ended, on the clock that `floor_s` is asked with.
        """
        self._weight = self._weight * _DECAY + 1.0
        self._rows = self._rows * _DECAY + rows
        self._seconds = self._seconds * _DECAY + seconds
        self._rows2 = self._rows2 * _DECAY + rows * rows
        self._rows_seconds = self._rows_seconds * _DECAY + rows * seconds
        self._fit()
        current, previous = self._floors
        if self._in_window == _WINDOW:
            current, previous, self._in_window = seconds, current, 0
        current = min(current, seconds)
        self._floors = (current, previous)
        self._floor_s = 0.0 if previous == float("inf") else min(current, previous)
        self._in_window += 1
        self._observed_at_s = now_s

    def estimate_s(self, rows: int) -> float:
        """Returns the expected duration of a batch of `rows` rows; 0 when nothing is known."""
        return self._base_s + self._per_row_s * rows

    def floor_s(self, now_s: float) -> float:
        """Returns the shortest of the last 32 to 64 executions; 0 before there were so many, or when they are old."""
        return 0.0 if now_s - self._observed_at_s > _FRESH_S else self._floor_s

    def _fit(self) -> None:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows2 / self._weight - mean_rows * mean_rows
        if variance < 1e-6:
            # Only one size was seen: assume that a larger batch takes proportionally longer, never less than this.
            self._base_s, self._per_row_s = 0.0, mean_s / mean_rows
            return
        covariance = self._rows_seconds / self._weight - mean_rows * mean_s
        self._per_row_s = min(max(covariance / variance, 0.0), mean_s / mean_rows)
        self._base_s = mean_s - self._per_row_s * mean_rows
