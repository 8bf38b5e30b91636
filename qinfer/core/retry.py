"""Retries: pauses that grow up to a bound, and a log that says when something breaks and when it works again."""

import logging
import math
import random
import time

REMIND_S = 60.0
"""Seconds after which an outage that goes on is logged again, where many rely on it."""

PATIENCE_S = 5.0
"""Seconds for which a process that is to end, and has nothing else left to do, waits for what is away."""

_MOST_REASONS = 32


def pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Returns the pause after so many failures in a row: none after 0, then `first_s`, doubled with each failure."""
    if failures <= 0:
        return 0.0
    doublings = min(failures - 1, 64)  # beyond, the power is larger than any bound
    return min(first_s * 2.0**doublings, longest_s)


class Backoff:
    """The pauses between attempts at one thing.

    Args:
        first_s: The first pause.
        longest_s: The longest.
        factor: How much longer each pause is than the one before.
        jitter: The share of each pause of which a random part is left out, so that many callers do not come at once.
    """

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
        """Begins with the first pause again: an attempt has succeeded."""
        self._next_s = self._first_s


class OutageLog:
    """Logs an outage of one thing: that it begins, each new reason of it, and that it is over.

    Args:
        logger: Where to.
        begins: The event of a failure; its `reason` is added.
        ends: The event of the end; empty = that of a failure, and `: over`.
        level: That of a failure.
        remind_s: A failure that goes on is logged again after so many seconds.
        quiet_s: An outage is over when nothing has failed for so many seconds; for what works at times during one.
        data: What is added to each line.

    Attributes:
        is_out: Whether it has failed and is not over.
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
        """Seconds since it began; 0 = it is over."""
        return time.monotonic() - self._began_s if self.is_out else 0.0

    def failed(self, reason: str, defect: BaseException | None = None) -> None:
        """Takes note of a failure; logged unless its reason was since the beginning, and a moment ago.

        Args:
            reason: What failed.
            defect: An exception whose traceback is to be logged.
        """
        self._failed_s = time.monotonic()
        if not self.is_out:
            self._began_s = self._failed_s
        self.is_out = True
        is_new = reason not in self._reasons and len(self._reasons) < _MOST_REASONS
        if is_new or self._failed_s - self._logged_s >= self._remind_s:
            self._reasons.add(reason)
            self._logged_s = self._failed_s
            self._logger.log(self._level, self._begins, extra={**self._data, "reason": reason}, exc_info=defect)

    def over(self) -> None:
        """Takes note that it works; cheap where it did before."""
        if self.is_out and time.monotonic() - self._failed_s >= self._quiet_s:
            self.is_out = False
            self._reasons.clear()
            self._logger.info(self._ends, extra=self._data)
