"""Adds what a bridge counts to the installation's metrics, in a thread: messages never wait for it, nor it for them.

Every second a report is written, and once more at the end. While Redis is away counts go on growing in the tallies, and
the first report that is stored has all of them.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from qinfer.bridge.metrics import RouteTally
from qinfer.bridge.reports import BridgeReports, ReportSequence
from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
"""Seconds between two reports."""

REPORT_TTL_S = 15.0
"""A bridge that has not reported for so many seconds is not counted as living."""

CLOSE_S = 5.0
"""The end waits so long for the last report; then Redis is away, and what it had is lost."""


class Reporter:
    """One per bridge.

    Args:
        process: The bridge's name.
        tallies: What its routes count.
        connect: Opens where reports are kept; called in the thread, within a loop.
        every_s: Seconds between two reports.
    """

    def __init__(
        self,
        process: str,
        tallies: Sequence[RouteTally],
        connect: Callable[[], BridgeReports],
        every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._sequence = ReportSequence(process, tallies)
        self._connect = connect
        self._every_s = every_s
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._outage = OutageLog(
            logger, "what the bridge counts is not stored", "what the bridge counts is stored again"
        )
        self._thread = threading.Thread(target=self._run, name="bridge-reporter", daemon=True)

    def start(self) -> None:
        """Begins to report."""
        self._thread.start()

    def close(self) -> None:
        """Has the last report written, and ends the thread; gives up on a Redis that does not answer. Blocks."""
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._report_on())

    async def _report_on(self) -> None:
        reports = self._connect()
        try:
            while not self._stop.is_set():
                await self._report(reports, REPORT_TTL_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._every_s):
                        await self._stop.wait()
            await self._report(reports, 0.0)
            if not self._sequence.is_complete:  # that report was the one before, once more
                await self._report(reports, 0.0)
        finally:
            with contextlib.suppress(QinferError, OSError):
                await reports.close()

    async def _report(self, reports: BridgeReports, ttl_s: float) -> None:
        try:
            await reports.put(self._sequence.next(), ttl_s)
        except QinferError as error:
            self._outage.failed(error.message)
            return
        except Exception:  # the loop boundary: metrics must not end a bridge
            logger.exception("what the bridge counts is not stored")
            return
        self._outage.over()
        self._sequence.stored()
