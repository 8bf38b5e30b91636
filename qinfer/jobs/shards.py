"""Cuts input files into shards, by the speed of a model version. Pure and deterministic.

The order of the inputs is kept. Small row groups share a shard, and huge row groups are cut; each row is in exactly one
shard.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from qinfer.errors import InvalidRequest
from qinfer.jobs.plan import InputFile, Shard
from qinfer.observe.stats import JOB_ROWS_SCORED, JOB_SCORING_NS, batches
from qinfer.tabular.spec import NO_GROUPS, Cut, Range

if TYPE_CHECKING:  # as in `examiner_pool`
    from qinfer.core.settings import BulkSettings

MAX_SHARDS = 100_000
MAX_SHARD_FILES = 256
"""The most files of a shard, because opening a file takes tens of milliseconds."""
MAX_SHARD_RANGES = 1024
"""The most ranges of a shard, because its ticket has to fit into a stream's entry."""

FolderOf = Callable[[str], str]

_BEGINNING = Cut(0, 0)
_first_row = attrgetter("first_row")
_SHARDS_A_WORKER = 4  # of a small job: its workers end at about the same time
_LEAST_S = 0.25
_WHOLE_OF_TARGET = 2
_WHOLE_OF_DEFAULT = 5  # reading twice may cost more than an uneven shard
_FIRST_ROWS = 256
_GROWTH = 8
_MOST_GROWTHS = 20
_LAST_SHARDS_A_WORKER = 16
_MOST_WORKERS = 1000
_ENOUGH_NS = 3 * 10**9
"""The time after which the speed of jobs counts."""

_ENOUGH = 3
"""A batch size counts after this many executions, since first ones are slow."""


class ShardPace(NamedTuple):
    """The speed of one worker (0 = unknown), and bounds on shards."""

    rows_per_s: float
    shard_s: float
    default_rows: int
    max_rows: int
    workers: int = 1


class ShardSizes(NamedTuple):
    """The number of rows of shards.

    While the speed is unknown, the first shards are small, so that every worker soon has one. The last shards are
    small, so that the workers end at about the same time.

    Attributes:
        rows: Small row groups are joined up to this size.
        whole: Row groups up to this size are not cut, since reading from within one means reading the rows before.
        first: Rows of the first shards; 0 = like the other shards.
        least: Rows of the last shards; 0 = like the other shards.
    """

    rows: int
    whole: int
    first: int = 0
    least: int = 0
    workers: int = 1

    def next_rows(self, index: int, left: int) -> int:
        """Returns the most rows of the shard at `index`, with `left` rows remaining."""
        rows = self.rows
        if self.least:
            rows = min(rows, max(left // (2 * self.workers), self.least))
        if self.first:
            rows = min(rows, self.first * _GROWTH ** min(index // self.workers, _MOST_GROWTHS))
        return rows


def shard_sizes(rows_per_part: int, rows: int, pace: ShardPace) -> ShardSizes:
    """Returns the sizes of a job's shards; `rows_per_part` 0 = the server decides."""
    if rows_per_part:
        return ShardSizes(rows_per_part, rows_per_part)
    workers, possible = min(max(1, pace.workers), _MOST_WORKERS), _least_rows_a_shard(rows)
    if pace.rows_per_s > 0:
        fair = -(-rows // (workers * _SHARDS_A_WORKER))
        target = min(int(pace.rows_per_s * pace.shard_s), max(fair, int(pace.rows_per_s * _LEAST_S)), pace.max_rows)
        target = max(1, target, possible)
        return ShardSizes(target, max(target, min(_WHOLE_OF_TARGET * target, pace.max_rows)))
    target = max(1, min(pace.default_rows, pace.max_rows), possible)
    whole = max(target, min(_WHOLE_OF_DEFAULT * target, pace.max_rows, rows // (2 * workers)))
    least = max(_FIRST_ROWS, possible, -(-rows // (workers * _LAST_SHARDS_A_WORKER)))
    # A row may take seconds: every worker gets a shard.
    first = max(1, min(_FIRST_ROWS, rows // workers))
    return ShardSizes(target, whole, max(first, possible), least, workers)


def plan_shards(
    files: Sequence[InputFile],
    sizes: ShardSizes,
    extension: str,
    *,
    example: int = 0,
    limit: int = 0,
    folder_of: FolderOf = lambda _: "",
) -> tuple[Shard, ...]:
    """Cuts at least one file into shards; raises `InvalidRequest` beyond `MAX_SHARDS`.

    `example` is a file with columns, for the part of a job without rows. Output folders (`folder_of`, ending in `/`)
    share no shard.
    """
    shards: list[Shard] = []
    wanted = list(_first_rows(files, limit)) if limit else files
    for ranges in _Packing(sizes, sum(file.source.rows for file in wanted), folder_of).run(wanted):
        index = len(shards)
        if index == MAX_SHARDS:
            raise InvalidRequest(_too_many(files, sizes))
        rows = sum(part.rows for part in ranges)
        name = folder_of(ranges[0].url) + part_name(index, extension)
        shards.append(Shard(index, name, rows, tuple(ranges)))
    if not shards:  # a part without rows shows the columns
        file = files[example].source
        nothing = Range(file.url, file.etag, NO_GROUPS, 0, 0, 0, size_bytes=file.size_bytes)
        shards.append(Shard(0, folder_of(file.url) + part_name(0, extension), 0, (nothing,)))
    return tuple(shards)


def part_name(index: int, extension: str) -> str:
    """Returns the name of a shard's part in its folder."""
    return f"part-{index:05d}.{extension}"


def _first_rows(files: Iterable[InputFile], limit: int) -> Iterator[InputFile]:
    for source, groups, cuts in files:
        rows = min(source.rows, limit)
        # Rows within the limit before each group, and at the end.
        left = [max(rows - end, 0) for end in accumulate(groups or (), initial=0)]
        kept = tuple(begin - end for begin, end in pairwise(left) if begin)
        yield InputFile(msgspec.structs.replace(source, rows=rows), None if groups is None else kept, cuts)
        limit -= rows
        if limit <= 0:
            return


class _Packing:
    """Walks the row groups in order."""

    def __init__(self, sizes: ShardSizes, left: int, folder_of: FolderOf) -> None:
        self._sizes = sizes
        self._folder_of = folder_of
        self._folder = ""
        self._left = left  # in no earlier shard
        self._index = 0
        self._target = sizes.next_rows(0, left)
        self._shard: list[Range] = []
        self._rows = self._files = 0

    def run(self, files: Iterable[InputFile]) -> Iterator[list[Range]]:
        for source, groups, cuts in files:
            first_row, folder = 0, self._folder_of(source.url)
            if self._shard and folder != self._folder:
                yield self._close()
            self._folder = folder
            for number, rows in enumerate(groups) if groups is not None else [(NO_GROUPS, source.rows)]:
                begin = 0
                while begin < rows:
                    piece = self._piece(rows, begin)
                    other = not self._shard or self._shard[-1].url != source.url
                    if self._shard and self._is_full(piece, is_other=other):
                        yield self._close()
                        continue
                    cut = cuts[bisect_right(cuts, begin, key=_first_row) - 1] if cuts else _BEGINNING
                    place = (first_row + begin, piece, begin - cut.first_row, cut.begin, source.size_bytes)
                    self._shard.append(Range(source.url, source.etag, number, *place))
                    self._rows, self._files, begin = self._rows + piece, self._files + other, begin + piece
                first_row += rows
        if self._shard:
            yield self._close()

    def _piece(self, rows: int, begin: int) -> int:
        """Returns the size of the next piece: all rows, or one of about equal pieces."""
        target, sizes = self._target, self._sizes
        if not begin and rows <= (sizes.whole if target == sizes.rows else target):
            return rows
        return (rows - begin) // -(-(rows - begin) // target)

    def _is_full(self, piece: int, *, is_other: bool) -> bool:
        full = self._rows + piece > self._target or len(self._shard) == MAX_SHARD_RANGES
        return full or (is_other and self._files == MAX_SHARD_FILES)

    def _close(self) -> list[Range]:
        shard, self._shard = self._shard, []
        self._left -= self._rows
        self._rows = self._files = 0
        self._index += 1
        self._target = self._sizes.next_rows(self._index, self._left)
        return shard


def _least_rows_a_shard(rows: int) -> int:
    """Returns a size for which `MAX_SHARDS` suffice: two neighbours together exceed it."""
    return -(-2 * rows // MAX_SHARDS)


def _too_many(files: Iterable[InputFile], sizes: ShardSizes) -> str:
    least = _least_rows_a_shard(sum(file.source.rows for file in files))
    if sizes.rows >= least:
        return f"the inputs are more than {MAX_SHARDS} shards; merge their small row groups, or make several jobs"
    return (
        f"field 'output.rows_per_part' is {sizes.rows}, which is more than {MAX_SHARDS} parts; "
        f"{least} or more are possible with these inputs"
    )


def pace_of(settings: "BulkSettings", stats: Mapping[str, int], workers: int) -> ShardPace:
    """Returns a version's speed, and the bounds of its shards."""
    most = settings.max_rows_per_shard
    return ShardPace(rows_per_s(stats), settings.shard_s, settings.default_rows_per_shard, most, workers)


def rows_per_s(stats: Mapping[str, int]) -> float:
    """Returns the rows of a job that a worker scores per second; 0 = unknown.

    The statistics of jobs, which include reading and writing, count after some seconds; before, the fastest batch size.
    """
    if stats.get(JOB_SCORING_NS, 0) >= _ENOUGH_NS:
        return stats.get(JOB_ROWS_SCORED, 0) / stats[JOB_SCORING_NS] * 1e9
    best = 0.0
    for batch in batches(stats):
        spent_ns = batch.input_ns + batch.infer_ns + batch.output_ns
        if batch.executions >= _ENOUGH and spent_ns > 0:
            best = max(best, batch.rows * batch.executions / spent_ns * 1e9)
    return best
