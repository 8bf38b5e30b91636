"""Computes how many bytes rows of Arrow arrays take when decoded, without decoding them. Pure.

A value of a dictionary or run is stored once for many rows, so a file of kilobytes can become gigabytes. Sizes come
from indices, run ends and offsets (https://arrow.apache.org/docs/format/Columnar.html).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Positions = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Sizes = npt.NDArray[np.float64]
"""Bytes, as floats, since products may exceed any integer."""

_OFFSET_BYTES = 8
_CUT_ROWS = 2**18


class FileRows(NamedTuple):
    """Rows of a file; with a `fault` they are null."""

    record: pa.RecordBatch
    size_bytes: int
    is_too_large: bool = False
    fault: str = ""


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
    kind = array.type
    for is_of, sizes_of in _BY_ELEMENT:
        if is_of(kind):
            return _summed(sizes_of(array), positions)
    for is_of, before in _BY_POSITION:
        if is_of(kind):
            return before(array, positions)
    found: Sizes = positions.astype(np.float64) * _width(kind)
    return found


def _in_storage(array: pa.ExtensionArray, positions: Positions) -> Sizes:
    return bytes_before(array.storage, positions)


def _in_structs(array: pa.StructArray, positions: Positions) -> Sizes:
    fields = (bytes_before(array.field(number), positions) for number in range(array.type.num_fields))
    return sum(fields, positions.astype(np.float64))


def _in_fixed_lists(array: pa.FixedSizeListArray, positions: Positions) -> Sizes:
    size = array.type.list_size
    return bytes_before(array.values.slice(array.offset * size, len(array) * size), positions * size)


def _in_maps(array: pa.MapArray, positions: Positions) -> Sizes:
    offsets = _numpy(array.offsets)
    return _in_items(array.keys, offsets, positions) + _in_items(array.items, offsets, positions)


def _in_lists(array: pa.Array, positions: Positions) -> Sizes:
    return _in_items(array.values, _numpy(array.offsets), positions)


def _in_texts(array: pa.Array, positions: Positions) -> Sizes:
    offsets = _text_offsets(array)
    found: Sizes = offsets[positions].astype(np.float64) - offsets[0] + positions * float(_OFFSET_BYTES)
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


def _text_offsets(array: pa.Array) -> Positions:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    dtype: Any = np.int64 if _is_large_text(array.type) else np.int32
    offsets: Positions = np.frombuffer(buffer, dtype, count=array.offset + len(array) + 1)[array.offset :]
    return offsets


def _is_large_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind)) or _is_large_text(kind)


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_extension(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType)


def _width(kind: pa.DataType) -> float:
    return 1.0 if pa.types.is_null(kind) else max(1.0, kind.bit_width / 8)


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


_IsOf = Callable[[pa.DataType], bool]

_BY_ELEMENT: tuple[tuple[_IsOf, Callable[[Any], Sizes]], ...] = (
    (pa.types.is_dictionary, _dictionary_sizes),
    (pa.types.is_union, _union_sizes),
    (_is_list_view, _list_view_sizes),
    (_is_view, _view_sizes),
)
"""Elements are not contiguous or in order."""

_BY_POSITION: tuple[tuple[_IsOf, Callable[[Any, Positions], Sizes]], ...] = (
    (_is_text, _in_texts),
    (_is_list, _in_lists),
    (pa.types.is_struct, _in_structs),
    (pa.types.is_fixed_size_list, _in_fixed_lists),
    (pa.types.is_map, _in_maps),
    (pa.types.is_run_end_encoded, _in_runs),
    (_is_extension, _in_storage),
)
"""Offsets or run ends give the size before a position."""
