"""Batches of rows with their origins, decoded sizes, and the errors of their rows, without an object per row. Pure.

A value of a dictionary or run is stored once for many rows, so a file of kilobytes can become gigabytes. The sizes of
decoded rows come from indices, run ends and offsets (https://arrow.apache.org/docs/format/Columnar.html).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

BAD_FILE = "bad_file"
"""The `error_code` of rows in bad files that the job skips."""


class Segment(NamedTuple):
    """Rows from one row group; `first_row` counts within the file."""

    url: str
    row_group: int
    first_row: int
    rows: int


class Fault(NamedTuple):
    """Unreadable rows of a batch."""

    first: int
    rows: int
    message: str


class RowBatch(NamedTuple):
    """Rows and origins; `too_large` ones lack their largest columns, `faults` lack all."""

    record: pa.RecordBatch
    segments: tuple[Segment, ...]
    too_large: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()

    def origins(self, rows: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yields the number of each row in its file, and the file's URL."""
        ends = np.cumsum([segment.rows for segment in self.segments])
        for row, place in zip(rows, np.searchsorted(ends, rows, "right").tolist(), strict=True):
            segment = self.segments[place]
            yield segment.first_row + segment.rows + row - int(ends[place]), segment.url


class RowErrors:
    """Errors of rows; each row keeps its first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._reason: npt.NDArray[np.int32] | None = None  # numbers of reasons; 0 = no error
        self._reasons: list[tuple[str, str]] = []

    def mark(self, rows: Mask | Indices, code: str, message: str) -> None:
        """Marks rows, by mask or numbers, as failed."""
        if not rows.size or (rows.dtype == np.bool_ and not rows.any()):
            return
        if self._reason is None:
            self._reason = np.zeros(self.rows, dtype=np.int32)
        self._reasons.append((code, message))
        chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        self._reason[chosen[self._reason[chosen] == 0]] = len(self._reasons)

    @property
    def count(self) -> int:
        """The number of failed rows."""
        return 0 if self._reason is None else int(np.count_nonzero(self._reason))

    @property
    def bad(self) -> Mask | None:
        """The mask of failed rows, if any."""
        return None if self._reason is None else self._reason != 0

    def columns(self) -> tuple[pa.Array, pa.Array]:
        """Returns the columns `error_code` and `error_message`."""
        if self._reason is None:
            return pa.nulls(self.rows, pa.string()), pa.nulls(self.rows, pa.string())
        numbers = pa.array(self._reason - 1, mask=self._reason == 0)
        codes, messages = (pa.array(texts, pa.string()) for texts in zip(*self._reasons, strict=True))
        return codes.take(numbers), messages.take(numbers)


class FileRows(NamedTuple):
    """Rows of a file; with a `fault` they are null."""

    record: pa.RecordBatch
    size_bytes: int
    is_too_large: bool = False
    fault: str = ""


Positions = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Sizes = npt.NDArray[np.float64]
"""Bytes, as floats, since products may exceed any integer."""

_OFFSET_BYTES = 8
_CUT_ROWS = 2**18


def cut(record: pa.RecordBatch, max_bytes: int) -> Iterator[FileRows]:
    """Splits a valid batch into runs of rows within `max_bytes`; a row that is too large loses its largest columns."""
    for begin in range(0, record.num_rows, _CUT_ROWS):
        part = record.slice(begin, _CUT_ROWS)
        whole = sum(float(bytes_before(column, np.array([part.num_rows]))[0]) for column in part.columns)
        if whole <= max_bytes:
            yield FileRows(part, int(whole))
            continue
        edges = np.arange(part.num_rows + 1)
        before = sum((bytes_before(column, edges) for column in part.columns), np.zeros(len(edges)))
        start = 0
        while start < part.num_rows:
            stop = int(np.searchsorted(before, before[start] + max_bytes, "right")) - 1
            if stop > start:
                yield FileRows(part.slice(start, stop - start), int(before[stop] - before[start]))
            else:
                stop = start + 1
                yield _single(part.slice(start, 1), max_bytes)
            start = stop


def _single(row: pa.RecordBatch, max_bytes: int) -> FileRows:
    sizes = [bytes_before(column, np.arange(2))[1] for column in row]
    left, is_too_large = sum(sizes), False
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if left <= max_bytes:
            break
        left, is_too_large, field = left - sizes[number], True, row.schema.field(number)
        row = row.set_column(number, field.with_nullable(True), pa.nulls(1, field.type))
    return FileRows(row, int(left), is_too_large)


def bytes_before(array: pa.Array, positions: Positions) -> Sizes:
    """Returns the decoded bytes before each position."""
    for kinds, sizes_of in _BY_ELEMENT:
        if isinstance(array, kinds):
            return _summed(sizes_of(array), positions)
    for kinds, before in _BY_POSITION:
        if isinstance(array, kinds):
            return before(array, positions)
    width = 1.0 if pa.types.is_null(array.type) else max(1.0, array.type.bit_width / 8)
    found: Sizes = positions.astype(np.float64) * width
    return found


def _in_structs(array: pa.StructArray, positions: Positions) -> Sizes:
    fields = (bytes_before(array.field(number), positions) for number in range(array.type.num_fields))
    return sum(fields, positions.astype(np.float64))


def _in_fixed_lists(array: pa.FixedSizeListArray, positions: Positions) -> Sizes:
    size = array.type.list_size
    return bytes_before(array.values.slice(array.offset * size, len(array) * size), positions * size)


def _in_maps(array: pa.MapArray, positions: Positions) -> Sizes:
    offsets = _numpy(array.offsets)
    return _in_items(array.keys, offsets, positions) + _in_items(array.items, offsets, positions)


def _in_texts(array: pa.Array, positions: Positions) -> Sizes:
    found: Sizes = positions.astype(np.float64) * _OFFSET_BYTES
    if (buffer := array.buffers()[1]) is not None and len(array):
        dtype: Any = np.int64 if str(array.type).startswith("large") else np.int32
        offsets: Positions = np.frombuffer(buffer, dtype, count=array.offset + len(array) + 1)[array.offset :]
        found += offsets[positions].astype(np.float64) - offsets[0]
    return found


def _in_items(items: pa.Array, offsets: Positions, positions: Positions) -> Sizes:
    offsets = offsets.astype(np.int64, copy=False)
    own = items.slice(offsets[0], offsets[-1] - offsets[0])
    return bytes_before(own, offsets[positions] - offsets[0]) + positions * float(_OFFSET_BYTES)


def _in_runs(array: pa.RunEndEncodedArray, positions: Positions) -> Sizes:
    ends = _numpy(array.run_ends).astype(np.int64)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    sizes = _each(array.values)
    before = np.concatenate([[0.0], np.cumsum((ends - begins) * sizes)])
    places = np.concatenate([[0], positions]) + array.offset
    runs = np.minimum(np.searchsorted(ends, places, "right"), max(len(ends) - 1, 0))
    if not len(ends):
        return np.zeros(len(positions))
    whole: Sizes = before[runs] + (places - begins[runs]) * sizes[runs]
    found: Sizes = whole[1:] - whole[0]
    return found


def _dictionary_sizes(array: pa.DictionaryArray) -> Sizes:
    sizes = np.append(_each(array.dictionary), 0.0)
    indices = _numpy(array.indices.fill_null(0)).astype(np.int64)
    if len(sizes) == 1:
        return np.zeros(len(array))
    found: Sizes = sizes[indices]
    return found


def _list_view_sizes(array: pa.Array) -> Sizes:
    begins, lengths = _numpy(array.offsets).astype(np.int64), _numpy(array.sizes).astype(np.int64)
    items = array.values
    found: Sizes = bytes_before(items, begins + lengths) - bytes_before(items, begins) + float(_OFFSET_BYTES)
    return found


def _view_sizes(array: pa.Array) -> Sizes:
    if not len(array):
        return np.zeros(0)
    words = np.frombuffer(array.buffers()[1], np.int32)[::4]  # a view's first four bytes are its length
    lengths = words[array.offset : array.offset + len(array)]
    found: Sizes = np.where(_numpy(array.is_valid()), lengths, 0).astype(np.float64) + _OFFSET_BYTES
    return found


def _union_sizes(array: pa.UnionArray) -> Sizes:
    fields = [array.field(number) for number in range(array.type.num_fields)]
    if array.type.mode == "sparse":
        return sum((_each(field) for field in fields), np.ones(len(array)))
    types, offsets = _numpy(array.type_codes), _numpy(array.offsets)
    found = np.ones(len(array))
    for code, field in zip(array.type.type_codes, fields, strict=True):
        chosen = types == code
        found[chosen] += _each(field)[offsets[chosen]]
    return found


def _each(array: pa.Array) -> Sizes:
    sizes: Sizes = np.diff(bytes_before(array, np.arange(len(array) + 1)))
    return sizes


def _summed(sizes: npt.NDArray[Any], positions: Positions) -> Sizes:
    before: Sizes = np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
    return before[positions]


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


_BY_ELEMENT: tuple[tuple[Any, Callable[[Any], Sizes]], ...] = (
    (pa.DictionaryArray, _dictionary_sizes),
    (pa.UnionArray, _union_sizes),
    ((pa.ListViewArray, pa.LargeListViewArray), _list_view_sizes),
    ((pa.StringViewArray, pa.BinaryViewArray), _view_sizes),
)
"""Elements are not contiguous or in order."""

_BY_POSITION: tuple[tuple[Any, Callable[[Any, Positions], Sizes]], ...] = (
    ((pa.StringArray, pa.BinaryArray, pa.LargeStringArray, pa.LargeBinaryArray), _in_texts),
    (pa.MapArray, _in_maps),
    ((pa.ListArray, pa.LargeListArray), lambda array, places: _in_items(array.values, _numpy(array.offsets), places)),
    (pa.StructArray, _in_structs),
    (pa.FixedSizeListArray, _in_fixed_lists),
    (pa.RunEndEncodedArray, _in_runs),
    (pa.ExtensionArray, lambda array, places: bytes_before(array.storage, places)),
)
"""Offsets or run ends give the size before a position."""
