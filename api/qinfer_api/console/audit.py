"""The lines of the audit log in Redis, so that the console shows those of all gateways.

`qinfer_api.auth` writes the audit log; this handler of its logger copies each line to a bounded stream.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from qinfer.errors import QinferError
from qinfer.observe.logs import AUDIT
from qinfer.queue import keys
from qinfer.queue.router import Router

MOST_LINES = 10_000
_MOST_WAITING = 1000
_MOST_TEXT = 500
_FIELDS = (
    *("tenant", "key", "act", "path", "peer", "outcome", "reason", "without_a_line"),
    *("action", "model", "operation", "found", "changed", "dry_run"),
)


class AuditLine(NamedTuple):
    """A line: its id in the stream, seconds since the epoch, the event, and its data."""

    id: str
    at_s: float
    event: str
    about: Mapping[str, str]


class AuditTrail(logging.Handler):
    """Copies a gateway's audit log to Redis; lines beyond a thousand that Redis has not taken are dropped."""

    def __init__(self, router: Router) -> None:
        super().__init__(logging.INFO)
        self._router = router
        self._waiting: deque[tuple[str, dict[str, str]]] = deque(maxlen=_MOST_WAITING)
        self._news = asyncio.Event()
        self._copying = asyncio.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a line, on the event loop."""
        about = {name: str(value)[:_MOST_TEXT] for name in _FIELDS if (value := getattr(record, name, "")) != ""}
        self._waiting.append((record.getMessage(), about))
        self._news.set()

    async def run(self) -> None:
        """Copies lines until cancelled."""
        logger = logging.getLogger(AUDIT)
        logger.addHandler(self)
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                try:
                    await self.copy_waiting()
                except QinferError:  # Redis is away, or full
                    await asyncio.sleep(1.0)
                    self._news.set()
        finally:
            logger.removeHandler(self)

    async def copy_waiting(self) -> None:
        """Appends the noted lines to the stream, each once."""
        key = keys.audit().encode()
        async with self._copying:
            while self._waiting:
                event, about = line = self._waiting.popleft()
                words = (b"event", event.encode(), b"about", msgspec.json.encode(about))
                try:
                    await self._router.call(keys.slot(key), b"XADD", key, b"MAXLEN", b"~", MOST_LINES, b"*", *words)
                except BaseException:
                    if len(self._waiting) < _MOST_WAITING:
                        self._waiting.appendleft(line)
                    raise

    async def lines(self, before: str = "", count: int = 100) -> list[AuditLine]:
        """Returns lines before an id, newest first."""
        key = keys.audit().encode()
        words = (b"XREVRANGE", key, f"({before}" if before else b"+", b"-", b"COUNT", count)
        return [_line_of(*each) for each in await self._router.call(keys.slot(key), *words)]


def _line_of(line_id: bytes, fields: list[bytes]) -> AuditLine:
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    about = msgspec.json.decode(found.get(b"about", b"{}"), type=dict[str, str])
    text = line_id.decode()
    return AuditLine(text, int(text.partition("-")[0]) / 1000, found.get(b"event", b"").decode(), about)
