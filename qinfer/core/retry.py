"""Retries: growing pauses, a log of outages, and the budget of a client's repetitions."""

import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from qinfer.errors import InvalidRequest, QinferError

REMIND_S = 60.0
"""Seconds between the log lines of an outage that affects many requests."""

PATIENCE_S = 5.0
"""An ending, idle process waits this long for a service that is away."""

_MOST_REASONS = 32


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Returns 0, then `first_s`, doubled with each failure in a row."""
    if failures <= 0:
        return 0.0
    doublings = min(failures - 1, 64)  # more doublings exceed any bound
    return min(first_s * 2.0**doublings, longest_s)


class Backoff:
    """Growing pauses; `jitter` is the share that is randomly left out."""

    def __init__(
        self, first_s: float = 0.2, longest_s: float = 10.0, *, factor: float = 2.0, jitter: float = 0.0
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._factor = factor
        self._jitter = jitter
        self._next_s = first_s

    def next_s(self) -> float:
        """Returns the next pause."""
        pause_s, self._next_s = self._next_s, min(self._factor * self._next_s, self._longest_s)
        return pause_s * random.uniform(1.0 - self._jitter, 1.0) if self._jitter else pause_s  # noqa: S311  no secret

    def reset(self) -> None:
        """Begins again, after a success."""
        self._next_s = self._first_s


class OutageLog:
    """Logs an outage: its start (`begins`, with a `reason`), each new reason, and its end (`ends`).

    `remind_s` is between log lines of a lasting failure; after `quiet_s` without one the outage ends. `data` is in each
    line.
    """

    def __init__(
        self,
        logger: logging.Logger,
        begins: str,
        ends: str = "",
        *,
        level: int = logging.WARNING,
        remind_s: float = math.inf,
        quiet_s: float = 0.0,
        **data: object,
    ) -> None:
        self._logger = logger
        self._begins = begins
        self._ends = ends or f"{begins}: over"
        self._level = level
        self._remind_s = remind_s
        self._quiet_s = quiet_s
        self._data = data
        self.is_out = False
        self._reasons: set[str] = set()
        self._logged_s = self._began_s = self._failed_s = 0.0

    @property
    def lasts_s(self) -> float:
        """Seconds since the outage began; 0 = it is over."""
        return time.monotonic() - self._began_s if self.is_out else 0.0

    def failed(self, reason: str, defect: BaseException | None = None) -> None:
        """Logs a new reason, or a known one after `remind_s`."""
        self._failed_s = time.monotonic()
        if not self.is_out:
            self._began_s = self._failed_s
        self.is_out = True
        is_new = reason not in self._reasons and len(self._reasons) < _MOST_REASONS
        if is_new or self._failed_s - self._logged_s >= self._remind_s:
            self._reasons.add(reason)
            self._logged_s = self._failed_s
            self._logger.log(self._level, self._begins, extra={**self._data, "reason": reason}, exc_info=defect)

    @contextmanager
    def noted(self, kind: type[QinferError] = QinferError) -> Iterator[None]:
        """Ends a block's error of this kind, and logs it; a whole block is a success. `is_out` says which it was."""
        try:
            yield
        except kind as error:
            self.failed(error.message)
        else:
            self.over()

    def over(self) -> None:
        """Records a success; cheap without an outage."""
        if self.is_out and time.monotonic() - self._failed_s >= self._quiet_s:
            self.is_out = False
            self._reasons.clear()
            self._logger.info(self._ends, extra=self._data)


RETRY_SHARE = 0.2
"""Five calls pay for one repetition, beside the reserve."""
RESERVE_PER_S = 10.0
"""Repetitions a second that need no calls."""
WINDOW_S = 10.0
"""Seconds in which the reserve fills, and the calls' tokens decay to a third."""


class RetryBudget:
    """The budget of a client's repetitions, so that many clients do not keep a failing server down; thread-safe.

    It is a token bucket with two parts, after Finagle's `RetryBudget`
    (https://finagle.github.io/blog/2016/02/08/retry-budgets): each call adds a `share` of a token (`None` = unlimited),
    which decays within seconds, and a reserve fills with time, for clients with few calls.
    """

    def __init__(self, share: float | None = RETRY_SHARE) -> None:
        if share is not None and (not isinstance(share, int | float) or not 0 <= share < math.inf):
            raise InvalidRequest(f"retry_share is {share!r}; make it a number from 0 on, such as 0.2, or None")
        self._share = share
        self._added = 0.0
        self._reserve = RESERVE_PER_S * WINDOW_S
        self._at_s = -math.inf
        self._lock = Lock()

    def add(self, now_s: float) -> None:
        """Counts a call."""
        if self._share is not None:
            with self._lock:
                self._pass_time(now_s)
                self._added += self._share

    def take(self, now_s: float, longest_s: float) -> float | None:
        """Takes a token for a repetition; returns the seconds until then, or `None` beyond `longest_s`."""
        if self._share is None:
            return 0.0
        with self._lock:
            self._pass_time(now_s)
            if self._added >= 1.0:
                self._added -= 1.0
                return 0.0
            wait_s = max(0.0, (1.0 - self._reserve) / RESERVE_PER_S)
            if wait_s > longest_s:
                return None
            # Tokens below 0 are promised to waiting repetitions.
            self._reserve -= 1.0
            return wait_s

    def _pass_time(self, now_s: float) -> None:
        passed_s = min(max(0.0, now_s - self._at_s), 1e9)
        self._at_s = max(self._at_s, now_s)
        self._added *= math.exp(-passed_s / WINDOW_S)
        self._reserve = min(self._reserve + RESERVE_PER_S * passed_s, RESERVE_PER_S * WINDOW_S)
