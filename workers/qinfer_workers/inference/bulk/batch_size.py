"""Finds the size of bulk batches: the fewest rows at nearly the best speed, within a time limit. Pure.

The search begins with one row and grows while larger batches make a row cheaper, since they delay online requests. Now
and then a neighbouring size is tried, since speeds may change.

If a single row exceeds the limit, batches may take twice as long while there are no online requests; otherwise a model
that scores many rows as fast as one would score single rows.
"""

_TRIALS = 3
_MOST_TRIALS = 32
_ENOUGH_S = 0.03
"""The least total time of a size's batches before the size is judged."""
_HOPELESS = 4
_SINGLE_ROWS = 2
_QUICK = 4
_SLOW = 2
_GAIN = 0.97
"""Per row, a better size costs at most this share of the cost of a smaller size."""
_SHARED_GAIN = 0.85
_SHARED_TIME = 0.25
_MISSES = 2
_EVERY = 64
_RECENT = 8


class BatchSize:
    """Chooses batch sizes; for one thread at a time."""

    def __init__(self, most: int, limit_s: float) -> None:
        self.rows = 1
        self.is_settled = most <= 1
        self.is_shared = False
        self._most = max(most, 1)
        self._limit_s = limit_s
        self._home = 1
        self._seconds: list[float] = []
        self._row_s: dict[int, float] = {}
        self._misses = 0
        self._count = 0
        self._goes_up = True

    def share(self, *, is_shared: bool) -> None:
        """Updates whether there are online requests."""
        if is_shared != self.is_shared:
            self.is_shared = is_shared
            if self.is_settled:
                self._seconds.clear()
                self._choose_best()

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a batch, unless the end of the rows shortened it."""
        if rows != self.rows:
            return
        self._seconds.append(seconds)
        if self.is_settled and self.rows == self._home:
            self._stay()
        elif self._is_enough():
            self._try_next(_usual(self._seconds))

    def _is_enough(self) -> bool:
        count, whole_s = len(self._seconds), sum(self._seconds)
        is_hopeless = self.rows > 1 and self._seconds[-1] > _HOPELESS * self._longest_s()
        if is_hopeless or (count >= _TRIALS and whole_s >= _ENOUGH_S):
            return True
        return count >= _MOST_TRIALS

    def _try_next(self, seconds: float) -> None:
        self._seconds.clear()
        is_better = not self._row_s or seconds / self.rows <= _GAIN * min(self._row_s.values())
        self._misses = 0 if is_better else self._misses + 1
        self._note(seconds)
        is_over = seconds > self._longest_s() or (self._misses > 0 and seconds > self._limit_s)
        if self.is_settled or is_over or self._misses == _MISSES or self.rows == self._most:
            self._choose_best()
        else:
            factor = _QUICK if seconds * _QUICK * _SLOW < self._longest_s() else _SLOW
            self.rows = min(self.rows * factor, self._most)

    def _longest_s(self) -> float:
        return self._limit_s if self.is_shared else max(self._limit_s, _SINGLE_ROWS * self._row_s.get(1, 0.0))

    def _note(self, seconds: float) -> None:
        if seconds <= self._longest_s() or self.rows == 1:
            self._row_s[self.rows] = seconds / self.rows
        else:
            self._row_s.pop(self.rows, None)

    def _choose_best(self) -> None:
        self.is_settled = True
        known = self._row_s
        if self.is_shared:
            limit_s = self._limit_s * _SHARED_TIME
            known = {rows: row_s for rows, row_s in known.items() if rows * row_s <= limit_s}
        enough_s = min(known.values(), default=0.0) / (_SHARED_GAIN if self.is_shared else _GAIN)
        self._home = self.rows = min((rows for rows, row_s in known.items() if row_s <= enough_s), default=1)

    def _stay(self) -> None:
        self._count += 1
        if len(self._seconds) < _RECENT:
            return
        self._note(_usual(self._seconds))
        self._seconds.clear()
        if self._home not in self._row_s:  # a slower device, or larger rows
            self._row_s = {rows: row_s for rows, row_s in self._row_s.items() if rows < self._home}
            self._row_s.setdefault(max(self._home // _SLOW, 1), 0.0)
            self._home = self.rows = max(self._home // _SLOW, 1)
        elif self._count >= _EVERY:
            self._count = 0
            self._goes_up = not self._goes_up
            wanted = self._home * _SLOW if self._goes_up else self._home // _SLOW
            self.rows = max(1, min(wanted, self._most))


def _usual(seconds: list[float]) -> float:
    """Returns the mean without the slowest, which may be the first of its size."""
    if len(seconds) < _TRIALS:
        return min(seconds)
    return (sum(seconds) - max(seconds)) / (len(seconds) - 1)
