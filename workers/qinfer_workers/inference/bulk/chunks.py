"""Rows on their way through a shard's threads: read ─▶ scored ─▶ written, in order, a bounded number at a time.

One condition guards everything: threads enter it once or twice per batch.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from qinfer.backends.base import Array
from qinfer.errors import ErrorCode
from qinfer.jobs.outputs import ScoredRows
from qinfer.tabular.batches import Indices, RowBatch
from qinfer.tabular.inputs import DecodedBatch, Piece
from qinfer_workers.inference.bulk.arbiter import BatchSize

DEPTH = 3
"""One chunk is read, one is scored, one is written."""

AHEAD_S = 0.05
"""The next shard begins this early, to read its first rows."""

SHARED_AHEAD_S = 1.0
"""Online requests slow down reading."""

Outputs = Mapping[str, Array]
"""Output → array, rows first; decoupled as in `ScoredRows.outputs`."""


class Slice(NamedTuple):
    """Rows executed as one batch; `is_apart` = part of a failed batch."""

    chunk: "Chunk"
    piece: int
    start: int
    stop: int
    is_apart: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def inputs(self) -> Mapping[str, Array]:
        """Returns the rows' tensors."""
        whole = self.chunk.pieces[self.piece].inputs
        # Backends expect contiguous arrays; filled nulls may be a broadcast view.
        return {name: np.ascontiguousarray(array[self.start : self.stop]) for name, array in whole.items()}

    def within(self, start: int, stop: int) -> "Slice":
        """Returns rows of this slice."""
        return self._replace(start=self.start + start, stop=self.start + stop, is_apart=True)


class Chunk:
    """Rows read together, and their tensors."""

    def __init__(self, batch: RowBatch, decoded: DecodedBatch) -> None:
        self.batch = batch
        self.errors = decoded.errors
        self.pieces: tuple[Piece, ...] = decoded.pieces
        self.left = sum(piece.count for piece in decoded.pieces)
        self._done: list[list[_Done]] = [[] for _ in decoded.pieces]

    def put(self, part: Slice, outputs: Outputs) -> None:
        """Stores the outputs of a slice."""
        self._done[part.piece].append(_Done(part.start, part.stop, outputs))
        self.left -= part.rows

    def fail(self, part: Slice, code: str, message: str) -> None:
        """Marks the rows of a slice as failed."""
        self.errors.mark(self._numbers(part.piece, part.start, part.stop), code, message)
        self.left -= part.rows

    def give_up_rows(self) -> int:
        """Gives up unexecuted rows; returns how many precede them."""
        if not self.left:
            return self.errors.rows
        settled = np.zeros(self.errors.rows, np.bool_) if self.errors.bad is None else self.errors.bad.copy()
        for piece, done in enumerate(self._done):
            for one in done:
                settled[self._numbers(piece, one.start, one.stop)] = True
        self.errors.mark(~settled, ErrorCode.CANCELLED, "")
        return int(np.argmin(settled))

    def scored(self) -> list[ScoredRows]:
        """Returns the executed rows, grouped by output shape."""
        return [
            one for piece, done in enumerate(self._done) for one in self._joined(piece, sorted(done, key=itemgetter(0)))
        ]

    def _joined(self, piece: int, done: list["_Done"]) -> list[ScoredRows]:
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
            joined.append(ScoredRows(rows, outputs))
        return joined

    def _numbers(self, piece: int, start: int, stop: int) -> Indices:
        rows = self.pieces[piece].rows
        return np.arange(start, stop) if rows is None else rows[start:stop]


class _Done(NamedTuple):
    start: int
    stop: int
    outputs: Outputs


class Chunks:
    """The chunks of a shard; callbacks come in any thread.

    `on_work` is called when work has no consumer, or all was read; `on_last_rows` once, near the end.
    """

    def __init__(self, size: BatchSize, on_work: Callable[[], None], on_last_rows: Callable[[], None]) -> None:
        self._size, self._on_work, self._on_last_rows = size, on_work, on_last_rows
        self._began_s = 0.0
        self.rows_scored = 0
        self._is_told = False
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._to_cut: deque[Slice] = deque()
        self._again: deque[Slice] = deque()
        self._takers = 0
        self._reserved = 0
        self._has_ended = False
        self.is_stopped = False

    def reserve(self) -> bool:
        """Waits for room for a chunk; returns false if the reader is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopped or len(self._chunks) + self._reserved < DEPTH)
            self._reserved += 1
            return not self.is_stopped

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk in the reserved room."""
        with self._changed:
            self._reserved -= 1
            self._chunks.append(chunk)
            self._to_cut.extend(Slice(chunk, number, 0, piece.count) for number, piece in enumerate(chunk.pieces))
            if not chunk.left:
                self._changed.notify_all()
            is_needed = bool(self._to_cut) and not self._takers
        if is_needed:
            self._on_work()

    def end_input(self) -> None:
        """Notes that all rows were read."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._tell_of_last_rows()
        self._on_work()

    def stop(self) -> None:
        """Stops the shard: every waiting thread goes on and ends."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()
        self._on_work()

    def wait_stopped(self, longest_s: float) -> bool:
        """Waits for `stop`; returns whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_stopped, longest_s)

    @property
    def has_work(self) -> bool:
        """Whether there are rows to take."""
        with self._changed:
            return not self.is_stopped and bool(self._again or self._to_cut)

    @property
    def has_ended(self) -> bool:
        """Whether no more rows will come."""
        with self._changed:
            return self.is_stopped or (self._has_ended and not any(chunk.left for chunk in self._chunks))

    def share(self, *, is_shared: bool) -> None:
        """Updates whether there are online requests."""
        with self._changed:
            self._size.share(is_shared=is_shared)

    @property
    def is_shared(self) -> bool:
        """Whether there are online requests."""
        return self._size.is_shared

    def add_consumer(self) -> None:
        """Registers a consumer."""
        with self._changed:
            self._takers += 1

    def remove_consumer(self) -> None:
        """Unregisters a consumer."""
        with self._changed:
            self._takers -= 1
            is_needed = bool(self._again or self._to_cut) and not self._takers
        if is_needed:
            self._on_work()

    def next_batch(self) -> Slice | None:
        """Returns the next batch, if there is one now."""
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
        """Stores a batch's outputs."""
        with self._changed:
            if not part.is_apart:
                self._size.observe(part.rows, seconds)
            part.chunk.put(part, outputs)
            self.rows_scored += part.rows
            if not part.chunk.left:
                self._changed.notify_all()
        self._tell_of_last_rows()

    def cut(self, part: Slice) -> None:
        """Queues a failed batch's halves."""
        with self._changed:
            self._again.extendleft((part.within(part.rows // 2, part.rows), part.within(0, part.rows // 2)))

    def again(self, part: Slice) -> None:
        """Queues a part of a batch."""
        with self._changed:
            self._again.append(part)

    def fail(self, part: Slice, code: str, message: str) -> None:
        """Marks rows as failed."""
        with self._changed:
            part.chunk.fail(part, code, message)
            self.rows_scored += part.rows
            if not part.chunk.left:
                self._changed.notify_all()

    def next_scored(self) -> Chunk | None:
        """Waits for the next scored chunk; `None` = the end."""
        with self._changed:
            self._changed.wait_for(self._is_next_ready)
            return None if self.is_stopped or not self._chunks else self._chunks[0]

    def rest(self) -> Iterator[tuple[Chunk, int]]:
        """Yields, after `stop`, unwritten chunks and how many first rows are scored."""
        while self._chunks:
            chunk = self._chunks.popleft()
            is_whole = not chunk.left
            if rows := chunk.give_up_rows():
                yield chunk, rows
            if not is_whole:
                return

    def written(self) -> None:
        """Drops the first chunk."""
        with self._changed:
            self._chunks.popleft()
            self._changed.notify_all()

    def _tell_of_last_rows(self) -> None:
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
