"""Notes on a shard whose run was broken off: which rows are kept, and which may end workers. Pure.

    0 ──── kept pieces ────▶ done ──── next range ────▶ stop ·········▶ rows

A shard is scored from its first row to its last. A *piece* is a file of rows that were scored in a row; the pieces of a
shard follow one another. A shard whose worker died is a *suspect*: it runs in ranges, and before each a mark says who
begins it. A mark that is found by the next owner is a death: the range is cut. A row that was alone in its range at the
deaths of two workers fails, and the rows behind it are scored.
"""

import hashlib
from typing import NamedTuple

import msgspec

from qinfer.jobs.plan import Range, Shard, read_stored

FAN_OUT = 8
"""A range in which a worker died is cut into so many; after each that ends well the next one grows as much."""

WORKERS = 2
"""A row fails that was alone in the hands of so many workers that died."""

MOST_DEATHS = 5
"""A row also fails if one worker lost the shard so often while the row was alone."""

MOST_DEADLY_ROWS = 16
MOST_IDLE_DEATHS = 16
"""A shard with more rows that end workers, or in which more workers died before they began a range, is given up: it
would end workers without an end."""

CHECKPOINTS = "_resume"
"""The folder, in that of an output, of the pieces of shards that are not finished; each job has a folder there."""


class PieceFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a piece: its name in the output folder, and what tells that it is whole."""

    name: str
    sha256: str


class KeptPiece(msgspec.Struct, frozen=True, array_like=True):
    """Scored rows that follow one another, in files of the output's format.

    Attributes:
        rows: How many.
        errors: How many of them failed.
        good: Their file; without the failed rows where these have files of their own.
        failed: The file of failed rows; `None` = there is no such file.
        faults: Descriptions of inputs that can't be read.
    """

    rows: int
    errors: int
    good: PieceFile
    failed: PieceFile | None = None
    faults: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """Mark of a range that is executed: how many rows from the first that is not kept, and the worker."""

    rows: int
    worker: str


class RowSpan(NamedTuple):
    """The rows that are run next.

    Attributes:
        first: The first of them in the shard.
        stop: The row behind the last.
        is_deadly: It is one row, that fails without being executed.
    """

    first: int
    stop: int
    is_deadly: bool = False


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring; in the job's record as JSON.

    Attributes:
        bound: The hash of plan and shard, and that of the model by which the rows were scored.
        attempt: Raised by each change, so that no two of a shard are equal.
        pieces: The rows that are kept, in order.
        size: How many rows the next range has; 0 = all that are left.
        until: Behind this row ranges grow again.
        begun: The mark of the range that is executed.
        alone: The workers that died while the first row that is not kept was alone.
        deadly: How many rows failed because they end workers.
        idle: How many workers died since a range ended, while no range was begun.
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
        """How many rows are kept."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def errors(self) -> int:
        """How many of them failed."""
        return sum(piece.errors for piece in self.pieces)

    def _next(self, **changes: object) -> "Resumption":
        return msgspec.structs.replace(self, attempt=self.attempt + 1, **changes)

    def taken(self, rows: int, *, is_suspect: bool) -> "Resumption":
        """Returns what a new owner knows of a shard of so many rows."""
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
        """Whether the shard is to be given up."""
        return (
            (self.deadly >= MOST_DEADLY_ROWS and self._is_deadly)
            or len(self.alone) > MOST_DEATHS
            or self.idle > MOST_IDLE_DEATHS
        )

    @property
    def _is_deadly(self) -> bool:
        """Whether the first row that is not kept ends workers."""
        return len(set(self.alone)) >= WORKERS or len(self.alone) >= MOST_DEATHS

    def step(self, rows: int) -> RowSpan:
        """Returns what of a shard of so many rows is to be run next; there is something left."""
        first = self.done
        if self._is_deadly:
            return RowSpan(first, first + 1, is_deadly=True)
        return RowSpan(first, min(first + self.size, rows) if self.size else rows)

    def begins(self, step: RowSpan, worker: str) -> "Resumption":
        """Marks a step as begun by a worker."""
        return self._next(begun=Begun(step.stop - step.first, worker))

    def ended(self, step: RowSpan, piece: KeptPiece) -> "Resumption":
        """Keeps the rows of a step that ended."""
        size = self.size * FAN_OUT if step.stop >= self.until else self.size
        deadly = self.deadly + step.is_deadly
        return self._next(pieces=(*self.pieces, piece), begun=None, alone=(), size=size, deadly=deadly, idle=0)

    def broken_off(self, step: RowSpan, piece: KeptPiece | None, *, has_scored: bool) -> "Resumption":
        """Keeps the first rows of a step whose worker had to stop; less is begun next where others were scored only."""
        if piece is not None:
            return self._next(pieces=(*self.pieces, piece), begun=None, alone=(), idle=0)
        if has_scored:
            return self._next(begun=None, size=_cut(step.stop - step.first), until=max(self.until, step.stop))
        return self._next(begun=None) if self.begun is not None else self

    def forgotten(self) -> "Resumption":
        """Forgets what is kept, because it is gone or damaged."""
        return Resumption(bound=self.bound, attempt=self.attempt + 1)


def _cut(rows: int) -> int:
    return max(1, -(-rows // FAN_OUT))


def pieces_folder(job_id: str) -> str:
    """Returns the name, in an output folder, of the folder of a job's pieces; no other writer has one of that name."""
    return f"{CHECKPOINTS}/{hashlib.sha256(job_id.encode()).hexdigest()[:16]}"


def bound_to(head: bytes, shard: Shard, model_hash: str) -> str:
    """Returns what the pieces of a shard are bound to: the head of the plan, the shard, and the model."""
    digest = hashlib.sha256(head)
    digest.update(msgspec.msgpack.encode(shard))
    return f"{digest.hexdigest()[:32]} {model_hash}"


def encode_resumption(resumption: Resumption) -> bytes:
    """Returns it as JSON."""
    return msgspec.json.encode(resumption)


def decode_resumption(data: bytes) -> Resumption:
    """Reads it.

    Raises:
        CorruptEntry: It is something else.
    """
    return read_stored(_resumptions, data, "what is known of a shard")


_resumptions = msgspec.json.Decoder(Resumption)


def rows_of(shard: Shard, first: int, stop: int) -> Shard:
    """Returns some rows of a shard, as a shard."""
    if (first, stop) == (0, shard.rows):
        return shard
    ranges, passed = list[Range](), 0
    for part in shard.ranges:
        skipped, end = max(first - passed, 0), min(stop - passed, part.rows)
        passed += part.rows
        if skipped < end:
            row, in_group = part.first_row + skipped, part.first_in_group + skipped
            ranges.append(msgspec.structs.replace(part, first_row=row, first_in_group=in_group, rows=end - skipped))
    return msgspec.structs.replace(shard, rows=stop - first, ranges=tuple(ranges))
