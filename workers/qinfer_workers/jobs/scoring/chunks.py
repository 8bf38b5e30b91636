"""Rows on their way through a shard's threads: read ─▶ scored ─▶ written, in order, a bounded number at a time.

    reader ──add──▶ │ chunk chunk chunk │ ──next_scored──▶ writer
                       │ take    ▲ done
                       ▼         │
                    instance threads, a slice each

One condition guards it all: it is entered once or twice for each batch, which takes far longer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from qinfer.backends.base import Array
from qinfer.errors import ErrorCode
from qinfer.jobs.columns.inputs import Decoded, Piece
from qinfer.jobs.columns.outputs import Scored
from qinfer.jobs.columns.row_errors import Indices
from qinfer.jobs.rows.shard_rows import RowBatch
from qinfer_workers.jobs.scoring.batch_size import BatchSize

DEPTH = 3
"""Chunks at once: one is read, one is scored and one is written."""

AHEAD_S = 0.05
"""The next shard is begun so long before the last row of one is scored: its first rows are read meanwhile."""

SHARED_AHEAD_S = 1.0
"""The same beside online requests, which reading gives way to."""

Outputs = Mapping[str, Array]
"""Output tensor → array, with the rows first; of decoupled models as `Scored.outputs` has them."""


class Slice(NamedTuple):
    """Rows that are executed as one batch.

    Attributes:
        chunk: Where they come from.
        piece: The number of the piece within the chunk.
        start: The first row within the piece.
        stop: The row after the last.
        is_apart: It is part of a batch that failed: it tells nothing about speed.
    """

    chunk: "Chunk"
    piece: int
    start: int
    stop: int
    is_apart: bool = False

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start

    def inputs(self) -> Mapping[str, Array]:
        """Returns the rows' tensors."""
        whole = self.chunk.pieces[self.piece].inputs
        # What nulls are filled with may be one element that looks like many; backends take arrays as they are.
        return {name: np.ascontiguousarray(array[self.start : self.stop]) for name, array in whole.items()}

    def halves(self) -> "tuple[Slice, Slice]":
        """Returns two slices that are this one."""
        return self.within(0, self.rows // 2), self.within(self.rows // 2, self.rows)

    def within(self, start: int, stop: int) -> "Slice":
        """Returns the part of this slice from a place in it to the one before another."""
        return self._replace(start=self.start + start, stop=self.start + stop, is_apart=True)


class Chunk:
    """Rows that were read together.

    Args:
        batch: Their columns, and where they are from.
        decoded: Their tensors, and which of them have none.
    """

    def __init__(self, batch: RowBatch, decoded: Decoded) -> None:
        self.batch = batch
        self.errors = decoded.errors
        self.pieces: tuple[Piece, ...] = decoded.pieces
        self.left = sum(piece.count for piece in decoded.pieces)
        """Rows that have neither outputs nor an error yet."""
        self._done: list[list[_Done]] = [[] for _ in decoded.pieces]

    def put(self, part: Slice, outputs: Outputs) -> None:
        """Takes the outputs of a slice."""
        self._done[part.piece].append(_Done(part.start, part.stop, outputs))
        self.left -= part.rows

    def fail(self, part: Slice, code: str, message: str) -> None:
        """Takes note that a slice has no outputs, and why."""
        self.errors.mark(self._numbers(part.piece, part.start, part.stop), code, message)
        self.left -= part.rows

    def leave(self) -> int:
        """Gives up the rows that are not executed yet; returns how many there are before the first of them."""
        if not self.left:
            return self.errors.rows
        settled = np.zeros(self.errors.rows, np.bool_) if self.errors.bad is None else self.errors.bad.copy()
        for piece, done in enumerate(self._done):
            for one in done:
                settled[self._numbers(piece, one.start, one.stop)] = True
        self.errors.mark(~settled, ErrorCode.CANCELLED, "")
        return int(np.argmin(settled))

    def scored(self) -> list[Scored]:
        """Returns the executed rows, grouped by the shape of their outputs."""
        return [one for piece, done in enumerate(self._done) for one in self._joined(piece, sorted(done, key=_start))]

    def _joined(self, piece: int, done: list["_Done"]) -> list[Scored]:
        alike: dict[tuple[tuple[int, ...], ...], list[_Done]] = {}
        for one in done:
            alike.setdefault(tuple(array.shape[1:] for array in one.outputs.values()), []).append(one)
        joined = []
        for group in alike.values():
            rows = self.pieces[piece].rows
            if sum(one.stop - one.start for one in group) < self.pieces[piece].count:
                rows = np.concatenate([self._numbers(piece, one.start, one.stop) for one in group])
            outputs = group[0].outputs
            if len(group) > 1:
                outputs = {name: np.concatenate([one.outputs[name] for one in group]) for name in outputs}
            joined.append(Scored(rows, outputs))
        return joined

    def _numbers(self, piece: int, start: int, stop: int) -> Indices:
        rows = self.pieces[piece].rows
        return np.arange(start, stop) if rows is None else rows[start:stop]


class _Done(NamedTuple):
    start: int
    stop: int
    outputs: Outputs


def _start(done: _Done) -> int:
    return done.start


class Chunks:
    """See the module docstring.

    Args:
        size: How many rows a batch should have.
        on_work: Called, in any thread, when there is something to take that nobody takes, and when all was taken.
        on_last_rows: Called once, in any thread, when what is left will soon be scored; not after `stop`.
    """

    def __init__(self, size: BatchSize, on_work: Callable[[], None], on_last_rows: Callable[[], None]) -> None:
        self._size = size
        self._on_work = on_work
        self._on_last_rows = on_last_rows
        self._began_s = 0.0
        self.rows_scored = 0
        self._is_told = False
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._to_cut: deque[Slice] = deque()
        """What no batch was made of yet: the rest of a piece, or a whole one."""
        self._again: deque[Slice] = deque()
        """Parts of batches that failed."""
        self._takers = 0
        self._reserved = 0
        self._has_ended = False
        self.is_stopped = False

    def reserve(self) -> bool:
        """Waits for room for another chunk; False = stop reading."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopped or len(self._chunks) + self._reserved < DEPTH)
            self._reserved += 1
            return not self.is_stopped

    def add(self, chunk: Chunk) -> None:
        """Takes what was read, into the room that was reserved."""
        with self._changed:
            self._reserved -= 1
            self._chunks.append(chunk)
            self._to_cut.extend(Slice(chunk, number, 0, piece.count) for number, piece in enumerate(chunk.pieces))
            if not chunk.left:
                self._changed.notify_all()
            is_needed = bool(self._to_cut) and not self._takers
        if is_needed:
            self._on_work()

    def end(self) -> None:
        """Takes note that everything was read."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._tell_of_last_rows()
        self._on_work()

    def stop(self) -> None:
        """Ends it all: whoever waits here waits no longer, and nothing is given out any more."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()
        self._on_work()

    def wait_stopped(self, longest_s: float) -> bool:
        """Waits for a `stop`, so long at most; returns whether there was one."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_stopped, longest_s)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to take."""
        with self._changed:
            return not self.is_stopped and bool(self._again or self._to_cut)

    @property
    def has_ended(self) -> bool:
        """Whether there will be nothing to take any more."""
        with self._changed:
            return self.is_stopped or (self._has_ended and not any(chunk.left for chunk in self._chunks))

    def share(self, *, is_shared: bool) -> None:
        """Takes note of whether there are online requests, beside which batches are smaller."""
        with self._changed:
            self._size.share(is_shared=is_shared)

    @property
    def is_shared(self) -> bool:
        """Whether there are online requests."""
        return self._size.is_shared

    def begin(self) -> None:
        """Registers a consumer."""
        with self._changed:
            self._takers += 1

    def leave(self) -> None:
        """Unregisters a consumer."""
        with self._changed:
            self._takers -= 1
            is_needed = bool(self._again or self._to_cut) and not self._takers
        if is_needed:
            self._on_work()

    def take(self) -> Slice | None:
        """Returns the rows of the next batch; `None` when there are none now."""
        with self._changed:
            if self.is_stopped:
                return None
            self._began_s = self._began_s or time.monotonic()
            if self._again:
                return self._again.popleft()
            if not self._to_cut:
                return None
            whole = self._to_cut.popleft()
            if whole.rows <= self._size.rows:
                return whole
            middle = whole.start + self._size.rows
            self._to_cut.appendleft(whole._replace(start=middle))
            return whole._replace(stop=middle)

    def done(self, part: Slice, outputs: Outputs, seconds: float) -> None:
        """Takes the outputs of a batch that ran."""
        with self._changed:
            if not part.is_apart:
                self._size.observe(part.rows, seconds)
            part.chunk.put(part, outputs)
            self.rows_scored += part.rows
            if not part.chunk.left:
                self._changed.notify_all()
        self._tell_of_last_rows()

    def cut(self, part: Slice) -> None:
        """Has the halves of a batch that failed run by themselves."""
        with self._changed:
            self._again.extendleft(reversed(part.halves()))

    def again(self, part: Slice) -> None:
        """Has a part of a batch run again, by itself."""
        with self._changed:
            self._again.append(part)

    def fail(self, part: Slice, code: str, message: str) -> None:
        """Takes note that rows have no outputs."""
        with self._changed:
            part.chunk.fail(part, code, message)
            self.rows_scored += part.rows
            if not part.chunk.left:
                self._changed.notify_all()

    def next_scored(self) -> Chunk | None:
        """Waits until the first chunk is scored, and returns it; `None` = there will be no more."""
        with self._changed:
            self._changed.wait_for(self._is_next_ready)
            return None if self.is_stopped or not self._chunks else self._chunks[0]

    def rest(self) -> Iterator[tuple[Chunk, int]]:
        """Returns, after a `stop`, the scored chunks that were not written, and how many of their first rows are."""
        while self._chunks:
            chunk = self._chunks.popleft()
            is_whole = not chunk.left
            if rows := chunk.leave():
                yield chunk, rows
            if not is_whole:
                return

    def written(self) -> None:
        """Forgets the first chunk: there is room for another."""
        with self._changed:
            self._chunks.popleft()
            self._changed.notify_all()

    def _tell_of_last_rows(self) -> None:
        """Tells, once, that the rows that are left will be scored in a moment, at the pace of those before."""
        with self._changed:
            if self._is_told or self.is_stopped or not self._has_ended:
                return
            left = sum(chunk.left for chunk in self._chunks)
            ahead_s = SHARED_AHEAD_S if self._size.is_shared else AHEAD_S
            self._is_told = left * (time.monotonic() - self._began_s) <= ahead_s * self.rows_scored
            if not self._is_told:
                return
        self._on_last_rows()

    def _is_next_ready(self) -> bool:
        return self.is_stopped or (not self._chunks[0].left if self._chunks else self._has_ended)
