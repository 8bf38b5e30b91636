"""Cutting input files into shards. Pure and deterministic.

Files and row groups stay in the order of the inputs, small ones are put together into one shard, and a huge row group
is cut by row ranges; each row is in exactly one shard.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from qinfer.errors import InvalidRequest
from qinfer.jobs.plan import NO_GROUPS, InputFile, Range, Shard

MAX_SHARDS = 100_000
MAX_FILES = 1_000_000
MAX_SHARD_FILES = 256
"""Files of one shard: a store takes tens of milliseconds to open each, and another worker can have the next ones."""
MAX_SHARD_RANGES = 1024
"""Ranges of one shard: its ticket is one entry of a stream."""


class Pace(NamedTuple):
    """Speed and bounds from which the size of a shard is computed where the user gives none.

    Attributes:
        rows_per_s: What one worker does with the model; 0 = not known yet.
        shard_s: How long a shard should take.
        default_rows: Rows of a shard while the speed is not known.
        max_rows: Most rows of a shard.
        workers: Workers that have the model.
    """

    rows_per_s: float
    shard_s: float
    default_rows: int
    max_rows: int
    workers: int = 1


class Sizes(NamedTuple):
    """How many rows shards have.

    Attributes:
        rows: Row groups are put together up to this.
        whole: A row group of up to so many rows is a shard of its own rather than cut: who begins within a row group
            has to read what is before.
    """

    rows: int
    whole: int


_SHARDS_A_WORKER = 4  # of a small job, so that its workers end at about the same time
_LEAST_ROWS = 10_000
_LEAST_S = 1.0
_WHOLE_OF_TARGET = 2
_WHOLE_OF_DEFAULT = 5  # the model may be fast, and then reading twice costs more than an uneven shard


def shard_sizes(rows_per_part: int, rows: int, pace: Pace) -> Sizes:
    """Decides how many rows the shards of a job have.

    Args:
        rows_per_part: What the user asks for; 0 = nothing.
        rows: The rows of the job.
        pace: What is known of the model.
    """
    if rows_per_part:
        return Sizes(rows_per_part, rows_per_part)
    known = pace.rows_per_s > 0
    target = int(pace.rows_per_s * pace.shard_s) if known else pace.default_rows
    least = int(pace.rows_per_s * _LEAST_S) if known else _LEAST_ROWS
    fair = -(-rows // (max(1, pace.workers) * _SHARDS_A_WORKER))
    target = max(1, min(target, max(fair, least), pace.max_rows))
    target = max(target, _least_rows_a_shard(rows))
    factor = _WHOLE_OF_TARGET if known else _WHOLE_OF_DEFAULT
    return Sizes(target, max(target, min(factor * target, pace.max_rows)))


def plan_shards(files: Sequence[InputFile], sizes: Sizes, extension: str, *, example: int = 0) -> tuple[Shard, ...]:
    """Cuts files into shards.

    Args:
        files: The files in order; at least one.
        sizes: How many rows the shards have.
        extension: That of the parts, such as `parquet`.
        example: The number of a file that has columns: the one part of a job without rows gets them.

    Raises:
        InvalidRequest: There would be more than `MAX_SHARDS`.
    """
    shards: list[Shard] = []
    for ranges in _packed(_pieces(files, sizes), sizes.rows):
        index = len(shards)
        if index == MAX_SHARDS:
            raise InvalidRequest(_too_many(files, sizes))
        rows = sum(part.rows for part in ranges)
        shards.append(Shard(index, part_name(index, extension), rows, tuple(ranges)))
    if not shards:  # one part without rows: readers find the columns
        file = files[example].source
        nothing = Range(file.url, file.etag, NO_GROUPS, 0, 0, 0)
        shards.append(Shard(0, part_name(0, extension), 0, (nothing,)))
    return tuple(shards)


def part_name(index: int, extension: str) -> str:
    """Returns the name of a shard's part in the output folder."""
    return f"part-{index:05d}.{extension}"


def _pieces(files: Iterable[InputFile], sizes: Sizes) -> Iterator[Range]:
    """Walks the row groups in order, the large ones in pieces of about the same size."""
    for source, groups in files:
        first_row = 0
        for number, rows in enumerate(groups) if groups is not None else [(NO_GROUPS, source.rows)]:
            count = 1 if rows <= sizes.whole else -(-rows // sizes.rows)
            for piece in range(count):
                begin, end = rows * piece // count, rows * (piece + 1) // count
                if end > begin:
                    yield Range(source.url, source.etag, number, first_row + begin, end - begin, begin)
            first_row += rows


def _packed(pieces: Iterable[Range], rows_per_shard: int) -> Iterator[list[Range]]:
    """Puts pieces together as long as they fit."""
    shard: list[Range] = []
    rows = files = 0
    for piece in pieces:
        other = not shard or shard[-1].url != piece.url
        full = rows + piece.rows > rows_per_shard or len(shard) == MAX_SHARD_RANGES
        if shard and (full or (other and files == MAX_SHARD_FILES)):
            yield shard
            shard, rows, files, other = [], 0, 0, True
        shard.append(piece)
        rows, files = rows + piece.rows, files + other
    if shard:
        yield shard


def _least_rows_a_shard(rows: int) -> int:
    """Returns how many rows shards need to have for `MAX_SHARDS` to suffice: two neighbours are one too large."""
    return -(-2 * rows // MAX_SHARDS)


def _too_many(files: Iterable[InputFile], sizes: Sizes) -> str:
    least = _least_rows_a_shard(sum(file.source.rows for file in files))
    if sizes.rows >= least:
        return f"the inputs are more than {MAX_SHARDS} shards; merge their small row groups, or make several jobs"
    return (
        f"field 'output.rows_per_part' is {sizes.rows}, which is more than {MAX_SHARDS} parts; "
        f"{least} or more are possible with these inputs"
    )
