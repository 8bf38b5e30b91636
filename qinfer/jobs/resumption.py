"""Notes on a shard whose run was interrupted: rows that are kept, and rows that may kill workers. Pure.

    0 ──── kept pieces ────▶ done ──── next range ────▶ stop ·········▶ rows

A *piece* is a file of consecutive scored rows. A shard whose worker died is a *suspect*: it runs in ranges, each of
which begins with a mark that names the worker. A mark that the next owner finds means that the worker died in that
range, which is cut then. A row that was alone in its range when two workers died fails.
"""

import hashlib
from typing import NamedTuple

import msgspec

from qinfer.jobs.plan import Shard, read_stored
from qinfer.tabular.spec import Range

FAN_OUT = 8
"""The number of ranges into which a range is cut in which a worker died; successful ranges grow by it."""

WORKERS = 2
"""A row alone in its range fails after this many different workers died."""

MOST_DEATHS = 5
"""The deaths of one worker after which a shard fails, too."""

MOST_DEADLY_ROWS = 16
MOST_IDLE_DEATHS = 16
"""The most deadly rows of a shard, and the most deaths outside of ranges; a shard with more is given up."""

CHECKPOINTS = "_resume"
"""The folder of pieces of unfinished shards."""


class PieceFile(msgspec.Struct, frozen=True, array_like=True):
    """Path in the output folder, and hash."""

    name: str
    sha256: str


class KeptPiece(msgspec.Struct, frozen=True, array_like=True):
    """Scored rows; `good` lacks failed rows that have a file of their own."""

    rows: int
    errors: int
    good: PieceFile
    failed: PieceFile | None = None
    faults: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """Mark of a running range."""

    rows: int
    worker: str


class RowSpan(NamedTuple):
    """The rows to run next; deadly rows fail without execution."""

    first: int
    stop: int
    is_deadly: bool = False


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """State of an interrupted shard, as JSON in the job's record.

    Attributes:
        bound: The hashes of plan and shard, and of the model.
        attempt: Incremented, so that no two states of a shard are equal.
        size: The rows of the next range; 0 = all.
        alone: The workers that died while the first row that is not kept was alone.
        idle: Deaths outside of ranges, since a range last ended.
    """

    bound: str
    attempt: int = 0
    pieces: tuple[KeptPiece, ...] = ()
    size: int = 0
    until: int = 0
    begun: Begun | None = None
    alone: tuple[str, ...] = ()
    deadly: int = 0
    idle: int = 0

    @property
    def done(self) -> int:
        """The number of kept rows."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def errors(self) -> int:
        """The number of kept rows that failed."""
        return sum(piece.errors for piece in self.pieces)

    def _next(self, **changes: object) -> "Resumption":
        return msgspec.structs.replace(self, attempt=self.attempt + 1, **changes)

    def taken(self, rows: int, *, is_suspect: bool) -> "Resumption":
        """Returns the state for a new owner."""
        if self.begun is None:
            if not is_suspect:
                return self
            cut = {} if self.size else {"size": _cut(rows - self.done), "until": rows}
            return self._next(idle=self.idle + 1, **cut)
        if self.begun.rows > 1:
            return self._next(begun=None, alone=(), size=_cut(self.begun.rows), until=self.done + self.begun.rows)
        return self._next(begun=None, alone=(*self.alone, self.begun.worker), size=1, until=max(self.until, self.done))

    @property
    def is_hopeless(self) -> bool:
        """Whether the shard has to be given up."""
        return (
            (self.deadly >= MOST_DEADLY_ROWS and self._is_deadly)
            or len(self.alone) > MOST_DEATHS
            or self.idle > MOST_IDLE_DEATHS
        )

    @property
    def _is_deadly(self) -> bool:
        return len(set(self.alone)) >= WORKERS or len(self.alone) >= MOST_DEATHS

    def step(self, rows: int) -> RowSpan:
        """Returns the next rows to run."""
        first = self.done
        if self._is_deadly:
            return RowSpan(first, first + 1, is_deadly=True)
        return RowSpan(first, min(first + self.size, rows) if self.size else rows)

    def begins(self, step: RowSpan, worker: str) -> "Resumption":
        """Marks a step as begun by a worker."""
        return self._next(begun=Begun(step.stop - step.first, worker))

    def with_piece(self, step: RowSpan, piece: KeptPiece) -> "Resumption":
        """Adds the piece of a finished step."""
        size = self.size * FAN_OUT if step.stop >= self.until else self.size
        deadly = self.deadly + step.is_deadly
        return self._next(pieces=(*self.pieces, piece), begun=None, alone=(), size=size, deadly=deadly, idle=0)

    def broken_off(self, step: RowSpan, piece: KeptPiece | None, *, has_scored: bool) -> "Resumption":
        """Adds the first rows of an interrupted step; lost rows make the next range smaller."""
        if piece is not None:
            return self._next(pieces=(*self.pieces, piece), begun=None, alone=(), idle=0)
        if has_scored:
            return self._next(begun=None, size=_cut(step.stop - step.first), until=max(self.until, step.stop))
        return self._next(begun=None) if self.begun is not None else self

    def encoded(self) -> bytes:
        """Returns this state as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> "Resumption":
        """Decodes a state."""
        return read_stored(cls, data, "the note on a shard")

    def forgotten(self) -> "Resumption":
        """Drops the kept rows."""
        return Resumption(bound=self.bound, attempt=self.attempt + 1)


def _cut(rows: int) -> int:
    return max(1, -(-rows // FAN_OUT))


def pieces_folder(job_id: str) -> str:
    """Returns the folder of a job's pieces."""
    return f"{CHECKPOINTS}/{hashlib.sha256(job_id.encode()).hexdigest()[:16]}"


def bound_to(head: bytes, shard: Shard, model_hash: str) -> str:
    """Returns the hashes of plan head and shard, and of the model."""
    digest = hashlib.sha256(head)
    digest.update(msgspec.msgpack.encode(shard))
    return f"{digest.hexdigest()[:32]} {model_hash}"


def rows_of(shard: Shard, first: int, stop: int) -> Shard:
    """Returns some rows of a shard as a shard."""
    if (first, stop) == (0, shard.rows):
        return shard
    ranges, passed = list[Range](), 0
    for part in shard.ranges:
        skipped, end = max(first - passed, 0), min(stop - passed, part.rows)
        passed += part.rows
        if skipped < end:
            ranges.append(part.part(skipped, end - skipped))
    return msgspec.structs.replace(shard, rows=stop - first, ranges=tuple(ranges))
