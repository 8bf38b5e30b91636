"""How many rows a bulk batch has: the fewest that are about as fast a row as any, within a time. Pure arithmetic.

It begins with one row and grows while more rows make a row cheaper. Larger batches than that would only make online
requests wait longer, which wait for the one that runs; while there are some, batches are smaller, and bulk a bit
slower. Later it tries a neighbouring size now and then, for the first look may have been while the machine was busy,
and other rows may cost more.

Where a single row takes longer than the limit, an online request waits that long anyway: while there are none, up to
twice as long is allowed then, or a model that scores many rows as fast as one would score one at a time.
"""

_TRIALS = 3
_MOST_TRIALS = 32
_ENOUGH_S = 0.03
"""A size is known after a few batches that took so long together: on a busy machine one says little."""
_HOPELESS = 4
_SINGLE_ROWS = 2
_QUICK = 4
_SLOW = 2
_GAIN = 0.97
"""A size is better than a smaller one if a row costs at most so much of what it costs there."""
_SHARED_GAIN = 0.85
"""The same beside online requests."""
_SHARED_TIME = 0.25
"""Beside online requests a batch takes so much of the limit."""
_MISSES = 2
"""So many sizes in a row that are no better end the search: one may be a chance."""
_EVERY = 64
"""After so many batches a neighbouring size is tried."""
_RECENT = 8


class BatchSize:
    """See the module docstring; used by one thread at a time.

    Args:
        most: The model's own limit.
        limit_s: The longest that a batch should take.

    Attributes:
        rows: How many rows the next batch should have.
        is_settled: Whether the search is over.
        is_shared: Whether there are online requests; to be kept current.
    """

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
        """Takes note of whether there are online requests."""
        if is_shared != self.is_shared:
            self.is_shared = is_shared
            if self.is_settled:
                self._seconds.clear()
                self._settle()

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a batch, unless the end of the rows cut it short.

        Args:
            rows: Its rows.
            seconds: How long it took.
        """
        if rows != self.rows:
            return
        self._seconds.append(seconds)
        if self.is_settled and self.rows == self._home:
            self._stay()
        elif self._is_enough():
            self._try_next(_usual(self._seconds))

    def _is_enough(self) -> bool:
        """Tells whether enough is known of the size that is tried."""
        count, whole_s = len(self._seconds), sum(self._seconds)
        is_hopeless = self.rows > 1 and self._seconds[-1] > _HOPELESS * self._longest_s()
        if is_hopeless or (count >= _TRIALS and whole_s >= _ENOUGH_S):
            return True
        return count >= _MOST_TRIALS

    def _try_next(self, seconds: float) -> None:
        """Takes note of a size that was tried, and goes on to the next, or ends the search."""
        self._seconds.clear()
        is_better = not self._row_s or seconds / self.rows <= _GAIN * min(self._row_s.values())
        self._misses = 0 if is_better else self._misses + 1
        self._note(seconds)
        is_over = seconds > self._longest_s() or (self._misses > 0 and seconds > self._limit_s)
        if self.is_settled or is_over or self._misses == _MISSES or self.rows == self._most:
            self._settle()
        else:
            factor = _QUICK if seconds * _QUICK * _SLOW < self._longest_s() else _SLOW
            self.rows = min(self.rows * factor, self._most)

    def _longest_s(self) -> float:
        """Returns how long a batch may take, but for the quarter that it gets beside online requests."""
        return self._limit_s if self.is_shared else max(self._limit_s, _SINGLE_ROWS * self._row_s.get(1, 0.0))

    def _note(self, seconds: float) -> None:
        if seconds <= self._longest_s() or self.rows == 1:
            self._row_s[self.rows] = seconds / self.rows
        else:
            self._row_s.pop(self.rows, None)

    def _settle(self) -> None:
        """Goes to the best size known."""
        self.is_settled = True
        known = self._row_s
        if self.is_shared:
            limit_s = self._limit_s * _SHARED_TIME
            known = {rows: row_s for rows, row_s in known.items() if rows * row_s <= limit_s}
        enough_s = min(known.values(), default=0.0) / (_SHARED_GAIN if self.is_shared else _GAIN)
        self._home = self.rows = min((rows for rows, row_s in known.items() if row_s <= enough_s), default=1)

    def _stay(self) -> None:
        """Stays with a size; after a while tries the next larger or smaller one, in turn."""
        self._count += 1
        if len(self._seconds) < _RECENT:
            return
        self._note(_usual(self._seconds))
        self._seconds.clear()
        if self._home not in self._row_s:  # it has come to take too long: a slower device, or larger rows
            self._row_s = {rows: row_s for rows, row_s in self._row_s.items() if rows < self._home}
            self._row_s.setdefault(max(self._home // _SLOW, 1), 0.0)  # to be tried
            self._home = self.rows = max(self._home // _SLOW, 1)
        elif self._count >= _EVERY:
            self._count = 0
            self._goes_up = not self._goes_up
            wanted = self._home * _SLOW if self._goes_up else self._home // _SLOW
            self.rows = max(1, min(wanted, self._most))


def _usual(seconds: list[float]) -> float:
    """Returns the mean without the slowest, which may have been the first of its size."""
    if len(seconds) < _TRIALS:
        return min(seconds)
    return (sum(seconds) - max(seconds)) / (len(seconds) - 1)
