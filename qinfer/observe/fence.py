"""Keeps what only watches from doing harm: an error of a tracer or an observer is logged, and goes no further."""

import logging
import time
from types import TracebackType

EVERY_S = 60.0
"""Seconds between two lines of the log about the same fence."""


class Fence:
    """A context in which what watches may raise: the error is logged, and the code after the `with` goes on.

    What is no `Exception`, such as a cancellation, passes. One serves a module.

    Args:
        logger: Where the errors are told: the first one, and then one each `EVERY_S` at most, with how many there were.
        event: What the line is called.
    """

    __slots__ = ("_event", "_logger", "_next_s", "_untold")

    def __init__(self, logger: logging.Logger, event: str) -> None:
        self._logger = logger
        self._event = event
        self._next_s = 0.0
        self._untold = 0

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Takes note of an error, and says that it was handled."""
        if not isinstance(error, Exception):
            return False
        self._untold += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._logger.warning(self._event, exc_info=error, extra={"errors": self._untold})
            self._untold = 0
        return True
