"""Computes how many bytes rows of Arrow arrays take when decoded, without decoding them. Pure.

A value of a dictionary or run is stored once for many rows, so a file of kilobytes can become gigabytes. Sizes come
from indices, run ends and lengths (https://arrow.apache.org/docs/format/Columnar.html).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.tabular.casts import is_text

Sizes = npt.NDArray[Any] | float
"""Bytes of each element, or the width of all, as floats, since sums may exceed any integer."""

_OFFSET_BYTES = 8
_CUT_ROWS = 2**18
_SHARED = re.compile("dictionary|run_end_encoded|view|union|extension|(?<!not )null")
"""Types whose elements may share their bytes, or have no bytes."""


class FileRows(NamedTuple):
    """Rows of a file; with a `fault` they are null."""

    record: pa.RecordBatch
    size_bytes: int
    is_too_large: bool = False
    fault: str = ""


def cut(record: pa.RecordBatch, max_bytes: int) -> Iterator[FileRows]:
    """Splits a valid batch into runs of rows within `max_bytes`; a row that is too large loses its largest columns."""
    is_shared = any(_SHARED.search(str(kind)) for kind in record.schema.types)
    for begin in range(0, record.num_rows, _CUT_ROWS):
        part = record.slice(begin, _CUT_ROWS)
        if not is_shared and part.nbytes <= max_bytes:
            yield FileRows(part, part.nbytes)
            continue
        before = _before(sum(map(sizes_of, part.columns), 0.0), part.num_rows)
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
    sizes = [decoded_bytes(column) for column in row]
    left, is_too_large = sum(sizes), False
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if left <= max_bytes:
            break
        left, is_too_large, field = left - sizes[number], True, row.schema.field(number)
        row = row.set_column(number, field.with_nullable(True), pa.nulls(1, field.type))
    return FileRows(row, int(left), is_too_large)


def decoded_bytes(array: pa.Array) -> float:
    """Returns the decoded bytes of a valid array."""
    return float(_before(sizes_of(array), len(array))[-1])


def sizes_of(array: pa.Array) -> Sizes:
    """Returns the decoded bytes of a valid array's elements."""
    kind = array.type
    for is_of, sizes in _KINDS:
        if is_of(kind):
            return sizes(array)
    return 1.0 if pa.types.is_null(kind) else max(1.0, kind.bit_width / 8)


def _of_dictionary(array: pa.DictionaryArray) -> Sizes:
    return _each(array.dictionary)[_numpy(array.indices.fill_null(0)).astype(np.int64)]


def _of_runs(array: pa.RunEndEncodedArray) -> Sizes:
    rows = np.arange(array.offset, array.offset + len(array))
    return _each(array.values)[np.searchsorted(_numpy(array.run_ends), rows, "right")]


def _of_struct(array: pa.StructArray) -> Sizes:
    return sum((sizes_of(array.field(number)) for number in range(array.type.num_fields)), 1.0)


def _of_views(array: pa.Array) -> Sizes:
    words = np.frombuffer(array.buffers()[1] or b"", np.int32)[::4]  # a view's first four bytes are its length
    lengths = words[array.offset : array.offset + len(array)]
    return np.where(_numpy(array.is_valid()), lengths, 0).astype(np.float64) + _OFFSET_BYTES


def _of_texts(array: pa.Array) -> Sizes:
    return _numpy(pc.binary_length(array).fill_null(0)).astype(np.float64) + _OFFSET_BYTES


def _of_fixed_lists(array: pa.FixedSizeListArray) -> Sizes:
    size = array.type.list_size
    each = sizes_of(array.values.slice(array.offset * size, len(array) * size))
    found: Sizes = each * size if isinstance(each, float) else each.reshape(len(array), size).sum(axis=1)
    return found


def _of_lists(array: Any) -> Sizes:
    begins, kind = _numpy(array.offsets).astype(np.int64), array.type
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    lengths = _numpy(array.sizes).astype(np.int64) if is_view else np.diff(begins)
    begins = begins[: len(array)]
    first, last = (int(begins.min()), int((begins + lengths).max())) if len(array) else (0, 0)
    columns = (array.keys, array.items) if pa.types.is_map(kind) else (array.values,)
    each = sum((sizes_of(items.slice(first, last - first)) for items in columns), 0.0)
    if isinstance(each, float):
        return lengths * each + _OFFSET_BYTES
    before = _before(each, last - first)
    found: Sizes = before[begins + lengths - first] - before[begins - first] + _OFFSET_BYTES
    return found


def _of_union(array: pa.UnionArray) -> Sizes:
    fields = [array.field(number) for number in range(array.type.num_fields)]
    if array.type.mode == "sparse":
        return sum(map(sizes_of, fields), 1.0)
    types, offsets, found = _numpy(array.type_codes), _numpy(array.offsets), np.ones(len(array))
    for code, field in zip(array.type.type_codes, fields, strict=True):
        chosen = types == code
        found[chosen] += _each(field)[offsets[chosen]]
    return found


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], Sizes]], ...] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), lambda array: sizes_of(array.storage)),
    (pa.types.is_dictionary, _of_dictionary),
    (pa.types.is_run_end_encoded, _of_runs),
    (pa.types.is_union, _of_union),
    (pa.types.is_struct, _of_struct),
    (pa.types.is_fixed_size_list, _of_fixed_lists),
    (pa.types.is_nested, _of_lists),
    (lambda kind: pa.types.is_string_view(kind) or pa.types.is_binary_view(kind), _of_views),
    (lambda kind: is_text(kind) and not pa.types.is_fixed_size_binary(kind), _of_texts),
)


def _each(array: pa.Array) -> npt.NDArray[Any]:
    """Returns the sizes of all elements, and 0 behind them, for indices without a value."""
    return np.append(np.broadcast_to(sizes_of(array), len(array)), 0.0)


def _before(sizes: Sizes, count: int) -> npt.NDArray[Any]:
    return np.concatenate([[0.0], np.cumsum(np.broadcast_to(sizes, count))])


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found
