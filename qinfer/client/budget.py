"""The budget of a client's repetitions: a share of its calls, so that many clients do not keep a failing server down.

It is a token bucket with two parts, after Finagle's `RetryBudget`
(https://finagle.github.io/blog/2016/02/08/retry-budgets): each call adds a share of a token, which decays within
seconds, and a reserve fills with time, for clients with few calls.
"""

import math
from threading import Lock

from qinfer.errors import InvalidRequest

RETRY_SHARE = 0.2
"""Five calls pay for one repetition, beside the reserve."""
RESERVE_PER_S = 10.0
"""Repetitions a second that need no calls."""
WINDOW_S = 10.0
"""Seconds in which the reserve fills, and the calls' tokens decay to a third."""


class RetryBudget:
    """The budget that all calls of a client share; thread-safe. A call adds `share` tokens; `None` = unlimited."""

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
