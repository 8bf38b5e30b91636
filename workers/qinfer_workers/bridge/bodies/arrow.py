"""Arrow bodies, a stream or a file → one record batch, whatever they claim to hold.

Nothing is trusted: sizes are looked at before anything is unpacked, and offsets before anything follows them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns.casts import is_text
from qinfer.jobs.columns.views import without_views
from qinfer.tensors import Bytes
from qinfer_workers.bridge.bodies.arrow_sizes import check_unpacked

ArrowForm = Literal["arrow-stream", "arrow-file"]

BROKEN = (
    pa.ArrowException, OSError, EOFError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError,
    MemoryError,
)  # fmt: skip
"""What pyarrow raises for data that it can't read."""

_MAX_REASON = 200


class ArrowLimits(NamedTuple):
    """What is read at most.

    Attributes:
        rows: So many rows.
        size_bytes: So many bytes, when dictionaries and compression are undone.
    """

    rows: int
    size_bytes: int

    def too_many_rows(self) -> str:
        """Says that there are too many rows."""
        return f"the message has more rows than the {self.rows} that the model takes in one request; send several"

    def too_large(self) -> str:
        """Says that the unpacked values are too large."""
        return f"the rows take more than {self.size_bytes} bytes when they are unpacked; send fewer in one message"


def explained(error: BaseException) -> str:
    """Returns what a parser says, as much of it as fits a message."""
    text = " ".join(str(error).split())
    return (text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "…") or type(error).__name__


def read_schema(body: Bytes, form: ArrowForm) -> pa.Schema:
    """Returns the columns of a body.

    Raises:
        InvalidRequest: It is no Arrow data of that form.
    """
    try:
        return _open(body, form).schema
    except BROKEN as error:
        raise _broken(form, error) from None


def read_batch(body: Bytes, form: ArrowForm, columns: Sequence[str], limits: ArrowLimits) -> pa.RecordBatch:
    """Reads columns of a body.

    Args:
        body: The body.
        form: Whether it is a stream or a file.
        columns: The columns that are wanted; each is there once.
        limits: What is read at most.

    Raises:
        InvalidRequest: It is damaged, or larger than the limits.
    """
    try:
        check_unpacked(body, limits.size_bytes, is_file=form == "arrow-file")
        schema = _open(body, form).schema
        fields = [schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        reader = _open(body, form, options)
        found = list(_batches(reader, limits))
        if not found:
            raise InvalidRequest("the message has no rows")
        if len(found) > 1:
            whole = pa.Table.from_batches(found).unify_dictionaries().combine_chunks()
            found = whole.to_batches()
        return without_views(found[0])
    except BROKEN as error:
        raise _broken(form, error) from None


def _open(body: Bytes, form: ArrowForm, options: Any = None) -> Any:
    buffer = pa.py_buffer(body)
    if form == "arrow-stream":
        return pa.ipc.open_stream(buffer, options=options)
    return pa.ipc.open_file(buffer, options=options)


def _batches(reader: Any, limits: ArrowLimits) -> Iterator[pa.RecordBatch]:
    """Reads the batches that have rows."""
    rows, size_bytes = 0, 0
    is_file = hasattr(reader, "num_record_batches")
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
    for batch in batches:
        rows += batch.num_rows
        if rows > limits.rows:
            raise InvalidRequest(limits.too_many_rows())
        batch.validate(full=True)  # or damaged offsets would lead anywhere in memory
        for column in batch.columns:
            size_bytes += _size(column, limits)
        if size_bytes > limits.size_bytes:
            raise InvalidRequest(limits.too_large())
        if batch.num_rows:
            yield batch


def _size(array: pa.Array, limits: ArrowLimits) -> int:
    """Returns about how many bytes an array's values take, without making them."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _size(array.storage, limits)
    if pa.types.is_run_end_encoded(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        raise InvalidRequest(f"a column is of type {kind}; write its values as they are, or as plain lists")
    if isinstance(array, pa.DictionaryArray):
        if pa.types.is_nested(kind.value_type) or pa.types.is_dictionary(kind.value_type):
            raise InvalidRequest(f"a column is of type {kind}; write its values as they are")
        each = _lengths(array.dictionary)
        return int(each[array.indices.drop_null().to_numpy()].sum())
    if pa.types.is_fixed_size_list(kind) and len(array) * kind.list_size > limits.size_bytes:
        raise InvalidRequest(limits.too_large())
    if any((pa.types.is_list(kind), pa.types.is_large_list(kind), pa.types.is_fixed_size_list(kind))):
        return _size(array.flatten(), limits)
    return int(_lengths(array).sum()) if is_text(kind) else len(array) * 8


def _lengths(array: pa.Array) -> Any:
    """Returns about how many bytes each value of a flat array takes."""
    kind = array.type
    if len(array) and (pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)):
        views = np.frombuffer(array.buffers()[1], np.int32)[::4][array.offset : array.offset + len(array)]
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), views, 0).astype(np.int64)
    if len(array) and is_text(kind):
        return pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.full(len(array), 8, np.int64)


def _broken(form: ArrowForm, error: BaseException) -> InvalidRequest:
    what = "stream" if form == "arrow-stream" else "file"
    return InvalidRequest(f"the body is no Arrow {what}, or a damaged one: {explained(error)}")
