"""Continues interrupted runs of a shard, as `qinfer.jobs.resumption` decides; for the event loop.

Notes are fenced: the queue accepts them only from the shard's owner who has read the latest note. So an owner that lost
its lease can't record its work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from qinfer.errors import CorruptEntry
from qinfer.jobs.plan import Shard
from qinfer.jobs.resumption import (
    MOST_DEADLY_ROWS,
    KeptPiece,
    Resumption,
    RowSpan,
    decode_resumption,
    encode_resumption,
    rows_of,
)
from qinfer.queue.entries import Lease
from qinfer_workers.inference.bulk.context import Abandoned, GivenUp
from qinfer_workers.inference.executor import in_thread

logger = logging.getLogger(__name__)

Note = Callable[[bytes, bytes, str], Awaitable[bool]]
"""Replaces the note on a shard and logs a line; returns false if the shard has another owner."""


class Resuming:
    """The notes of one run."""

    def __init__(self, lease: Lease, shard: Shard, bound: str, noted: bytes) -> None:
        self.note: Note
        self.rows = shard.rows
        self.is_again = lease.suspect or lease.deliveries > 1 or bool(noted)
        self._is_suspect = lease.suspect
        self._worker = lease.consumer
        self._shard = shard
        self._noted = noted
        self._step: RowSpan | None = RowSpan(0, shard.rows)
        self._work: asyncio.Future[None] | None = None
        known = _decode_noted(noted, bound)
        self.known = known.taken(shard.rows, is_suspect=lease.suspect) if shard.rows else known

    @property
    def is_whole(self) -> bool:
        """Whether no earlier run left anything."""
        return not self.known.pieces and not self.known.size

    @property
    def faults(self) -> tuple[str, ...]:
        """Unreadable inputs among the kept rows."""
        return tuple(fault for piece in self.known.pieces for fault in piece.faults)

    async def next_step(self) -> RowSpan | None:
        """Begins the next rows; `None` = all are kept."""
        known, self._step = self.known, None
        if known.is_hopeless:
            raise GivenUp(
                f"the shard was given up: {len(known.alone)} workers died or hung over {self._place()}, "
                f"{known.idle} more outside its rows, after {known.deadly} rows that kill workers "
                f"(at most {MOST_DEADLY_ROWS}); `qinfer jobs resume` tries it again"
            )
        if known.done == self.rows:
            return None
        self._step = step = known.step(self.rows)
        if self._is_suspect:
            await self._finish(self._put(known.begins(step, self._worker)))
        return step

    async def finish_step(self, take: Callable[[], KeptPiece | None]) -> None:
        """Keeps the step's scored rows."""
        await self._finish(self._store_step(take))

    async def broken_off(self, take: Callable[[], KeptPiece | None], scored: int) -> None:
        """Keeps a step's scored rows before the shard is released."""
        if self._work is not None and not self._work.done():
            await self._work
        if self._step is not None:
            piece = await in_thread("bulk-keep", take)
            has_scored = 0 < scored < self._step.stop - self._step.first
            known = self.known.broken_off(self._step, piece, has_scored=has_scored)
            if known is not self.known:
                await self._put(known)
            logger.info("shard interrupted", extra={"rows_kept": known.done, "rows": self.rows})

    async def let_go(self) -> None:
        """Removes the mark of a step without a death."""
        if self._step is not None and self.known.begun is not None:
            await self._put(self.known.broken_off(self._step, None, has_scored=False))

    async def discard_kept(self) -> None:
        """Drops the kept rows."""
        await self._put(self.known.forgotten())

    async def _store_step(self, take: Callable[[], KeptPiece | None]) -> None:
        assert self._step is not None
        step, piece = self._step, await in_thread("bulk-keep", take)
        if piece is None:
            raise Abandoned
        line = ""
        if step.is_deadly:
            line = f"{self._place()} failed: it killed {' and '.join(self.known.alone)} while it was executed alone"
        await self._put(self.known.with_piece(step, piece), line)
        self._step = None

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Continues when its caller is cancelled; `broken_off` waits for it."""
        self._work = asyncio.ensure_future(work)
        await asyncio.shield(self._work)

    async def _put(self, known: Resumption, line: str = "") -> None:
        now = encode_resumption(known)
        if not await self.note(self._noted, now, line):
            raise Abandoned
        self._noted, self.known = now, known

    def _place(self) -> str:
        done = min(self.known.done, self.rows - 1)
        (found,) = rows_of(self._shard, done, done + 1).ranges
        return f"row {found.first_row} of '{found.url}'"


def _decode_noted(noted: bytes, bound: str) -> Resumption:
    try:
        known = decode_resumption(noted) if noted else Resumption(bound=bound)
    except CorruptEntry as error:
        logger.warning("the note on a shard is damaged", extra={"reason": error.message})
        known = Resumption(bound="")
    return known if known.bound == bound else Resumption(bound=bound, attempt=known.attempt + 1)
