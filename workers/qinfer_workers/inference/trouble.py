"""What fails again and again, in two lines of the log: one when it begins, one when it is over."""

import logging


class Trouble:
    """One kind of failure.

    Args:
        logger: Where to log.
        begins: What is logged, with the reason, when it begins.
        ends: What is logged when it is over.
        level: How bad the beginning is.
    """

    def __init__(self, logger: logging.Logger, begins: str, ends: str, level: int = logging.WARNING) -> None:
        self._logger = logger
        self._begins = begins
        self._ends = ends
        self._level = level
        self._reasons: set[str] = set()

    def happened(self, reason: str) -> None:
        """Takes note of a failure; logged unless it failed before for the same reason, and has not been over since."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            self._logger.log(self._level, self._begins, extra={"reason": reason})

    def over(self) -> None:
        """Takes note that it works; cheap where it did before."""
        if self._reasons:
            self._reasons.clear()
            self._logger.info(self._ends)
