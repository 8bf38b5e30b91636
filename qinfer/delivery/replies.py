"""Reads one process's reply stream: creates it, keeps it alive, delivers, trims, survives every reconnect.

The stream lives a minute longer than its reader. A reader that finds it gone, because it was away for longer or
somebody flushed, makes a new one.
"""

import asyncio
import logging
from collections.abc import Callable

from qinfer.delivery import keys, scripts
from qinfer.delivery.base import reply_address
from qinfer.delivery.connection import pack
from qinfer.delivery.router import BlockingLink, Router
from qinfer.errors import QinferError

logger = logging.getLogger(__name__)

BLOCK_S = 0.5

REPLY_TTL_MS = 60_000
"""How long a reply stream outlives its reader."""

_START = b"0"
_KEEP_EVERY_S = 10.0
_PAUSE_S = 0.1
_READ_COUNT = 100  # blobs are up to 1 MiB each
_TRIM_COUNT = 1000
_TRIM_EVERY_S = 0.1


class ReplyReader:
    """The loop behind `Delivery.listen`.

    Args:
        router: The way to Redis.
        owner: Whose replies.
        deliver: Called with each blob.
        monotonic_s: The clock.
    """

    def __init__(
        self, router: Router, owner: str, deliver: Callable[[bytes], None], monotonic_s: Callable[[], float]
    ) -> None:
        self._key = keys.reply(reply_address(owner)).encode()
        self._link: BlockingLink = router.blocking(keys.slot(self._key), "qinfer-replies", BLOCK_S)
        self._deliver = deliver
        self._monotonic_s = monotonic_s
        self._last = _START
        self._untrimmed = 0
        self._trimmed_at = 0.0
        self._kept_at = 0.0
        self._is_idle = True
        self._is_broken = False

    async def run(self, ready: Callable[[], None] | None) -> None:
        """Reads until cancelled; see `Delivery.listen`."""
        while True:
            try:
                await self._keep_alive()
                if ready is not None:
                    ready()
                    ready = None
                await self._read()
                self._is_broken = False
            except QinferError as error:
                if not self._is_broken:
                    logger.warning("reply stream interrupted", extra={"reason": error.message})
                self._is_broken = True
                self._last, self._untrimmed, self._is_idle = _START, 0, True
                await asyncio.sleep(_PAUSE_S)  # `call` waits for a connection, but a refusal comes at once

    async def close(self) -> None:
        """Closes the connection; the stream stays for its time to live."""
        await self._link.close()

    async def _keep_alive(self) -> None:
        """Puts off the stream's end; makes a new one where it is gone, which an idle reader notices at once."""
        now_s = self._monotonic_s()
        if self._is_idle or now_s - self._kept_at >= _KEEP_EVERY_S:
            self._kept_at = now_s
            if await scripts.run(self._link.call, scripts.KEEP, [self._key], REPLY_TTL_MS):
                self._last, self._untrimmed = _START, 0

    async def _read(self) -> None:
        command = (b"XREAD", b"COUNT", _READ_COUNT, b"BLOCK", int(BLOCK_S * 1000), b"STREAMS", self._key, self._last)
        reply = await self._link.call(*command)
        self._is_idle = reply is None
        if reply is not None:
            entries = reply[0][1]
            for _, (field, blob) in entries:
                if field == b"r":
                    self._hand_over(blob)
            self._last = entries[-1][0]
            self._untrimmed += len(entries)
        now_s = self._monotonic_s()
        if self._untrimmed and (self._untrimmed >= _TRIM_COUNT or now_s - self._trimmed_at >= _TRIM_EVERY_S):
            self._trimmed_at = now_s
            self._untrimmed = 0
            self._trim()

    def _hand_over(self, blob: bytes) -> None:
        try:
            self._deliver(blob)
        except Exception:  # the loop boundary: one bad blob must not cost the others' callers their answers
            logger.exception("a reply could not be delivered")

    def _trim(self) -> None:
        """Drops what was read; leaves in one write with the next read."""
        milliseconds, _, sequence = self._last.partition(b"-")
        first_kept = b"%b-%d" % (milliseconds, int(sequence) + 1)
        self._link.send(pack((b"XTRIM", self._key, b"MINID", first_kept)), lambda _: None)
