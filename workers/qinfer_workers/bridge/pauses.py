"""How long to wait before the next attempt: longer each time, up to a bound; and what to log of attempts that fail."""

import logging
import time

FIRST_S = 0.2
LONGEST_S = 10.0
REMIND_S = 60.0


class Pauses:
    """The pauses between attempts at one thing.

    Args:
        first_s: The first pause; each one after it is twice as long.
        longest_s: The longest.
    """

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Returns the next pause."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """It worked: the next pause is the first again."""
        self._next_s = self._first_s


class Complaint:
    """Logs that something does not work: at once, when the reason changes, and once a minute; and that it works again.

    Args:
        logger: Where to.
        event: The text of the lines.
        data: What is added to each.
    """

    def __init__(self, logger: logging.Logger, event: str, **data: object) -> None:
        self._logger = logger
        self._event = event
        self._data = data
        self._reason = ""
        self._said_s = 0.0

    def say(self, reason: str) -> None:
        """Logs it, unless that was done a moment ago."""
        now_s = time.monotonic()
        if reason != self._reason or now_s - self._said_s >= REMIND_S:
            self._reason, self._said_s = reason, now_s
            self._logger.warning(self._event, extra={**self._data, "reason": reason})

    def over(self) -> None:
        """Logs that it works again, if it did not."""
        if self._reason:
            self._reason = ""
            self._logger.info("%s: over", self._event, extra=self._data)
