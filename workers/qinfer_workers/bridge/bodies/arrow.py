"""Arrow bodies, a stream or a file → one record batch, whatever they claim to hold.

Nothing is trusted: sizes are checked before anything is unpacked, and offsets before anything follows them. pyarrow
believes the size that stands before each compressed buffer, and allocates it, so these sizes are added up first. The
layout is that of Arrow's IPC format: messages whose metadata is a flatbuffer `Message`, which pyarrow has checked.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns.casts import is_text
from qinfer.jobs.columns.views import without_views
from qinfer.tensors import Bytes

_TAIL = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")  # offset, length of the message's metadata, length of its body
_BUFFER = struct.Struct("<qq")  # offset in the message's body, length
_LENGTH = struct.Struct("<q")

_MAX_MESSAGES = 1024
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_DICTIONARY_DATA = 1
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3


def check_unpacked(body: Bytes, max_bytes: int, *, is_file: bool) -> None:
    """Makes sure that unpacking takes no more memory than it may.

    Args:
        body: A file or a stream whose schema could be read.
        max_bytes: What all compressed buffers may become together.
        is_file: Whether it is a file.

    Raises:
        InvalidRequest: They become larger, or there are too many of them.
        pyarrow.ArrowException, OSError, ValueError: The data is damaged.
    """
    total = 0
    try:
        for number, message in enumerate(_of_file(body) if is_file else _of_stream(body)):
            if number > _MAX_MESSAGES:
                raise InvalidRequest(f"the body has more than {_MAX_MESSAGES} record batches; write them as one")
            total += _unpacked_bytes(message)
            if total > max_bytes:
                raise InvalidRequest(f"the body becomes more than {max_bytes} bytes when it is unpacked; send less")
    except struct.error as error:
        raise ValueError(f"a record batch's header is damaged: {error}") from None


def _of_stream(body: Bytes) -> Iterator["pa.Message"]:
    """Reads the messages of a stream, of which the first is the schema."""
    return iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))


def _of_file(body: Bytes) -> Iterator["pa.Message"]:
    """Reads the messages that a file's footer points to."""
    view = memoryview(body)
    size, _ = _TAIL.unpack(view[-_TAIL.size :])
    footer = bytes(view[len(view) - _TAIL.size - size : len(view) - _TAIL.size])
    for number in (_FOOTER_DICTIONARIES, _FOOTER_BATCHES):
        field = _field(footer, _unsigned(footer, 0), number)
        if not field:
            continue
        vector = field + _unsigned(footer, field)
        for index in range(_unsigned(footer, vector)):
            offset, length, size = _BLOCK.unpack_from(footer, vector + 4 + _BLOCK.size * index)
            if not 0 <= offset <= offset + length + size <= len(view):
                raise ValueError("its footer points outside")
            yield pa.ipc.read_message(pa.py_buffer(view[offset : offset + length + size]))


def _unpacked_bytes(message: "pa.Message") -> int:
    """Returns what the compressed buffers of a message become; 0 when none is compressed."""
    if message.type not in ("record batch", "dictionary"):
        return 0
    data = message.metadata.to_pybytes()
    table = _table(data, _unsigned(data, 0), _MESSAGE_HEADER)
    if message.type == "dictionary":
        table = _table(data, table, _DICTIONARY_DATA)
    field = _field(data, table, _BATCH_BUFFERS)
    if not field or not _field(data, table, _BATCH_COMPRESSION):
        return 0
    vector = field + _unsigned(data, field)
    content = memoryview(message.body)
    total = 0
    for index in range(_unsigned(data, vector)):
        offset, length = _BUFFER.unpack_from(data, vector + 4 + _BUFFER.size * index)
        if length >= _LENGTH.size:
            if not 0 <= offset <= len(content) - _LENGTH.size:
                raise ValueError("a buffer is outside its message")
            total += max(0, _LENGTH.unpack_from(content, offset)[0])
    return total


def _table(buffer: bytes, table: int, number: int) -> int:
    field = _field(buffer, table, number)
    if not field:
        raise ValueError("a record batch has no header")
    return field + _unsigned(buffer, field)


def _field(buffer: bytes, table: int, number: int) -> int:
    """Returns where a table's field is; 0 = it has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise ValueError("a flatbuffer points outside")
    size = struct.unpack_from("<H", buffer, vtable)[0]
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def _unsigned(buffer: bytes, position: int) -> int:
    value: int = struct.unpack_from("<I", buffer, position)[0]
    return value


ArrowForm = Literal["arrow-stream", "arrow-file"]

BROKEN = (
    pa.ArrowException, OSError, EOFError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError,
    MemoryError,
)  # fmt: skip
"""The exceptions that pyarrow raises for data that it can't read."""

_MAX_REASON = 200


class ArrowLimits(NamedTuple):
    """The limits of one body.

    Attributes:
        rows: So many rows.
        size_bytes: So many bytes, when dictionaries and compression are undone.
    """

    rows: int
    size_bytes: int

    def too_many_rows(self) -> str:
        """Returns the error of too many rows."""
        return f"the message has more rows than the {self.rows} that the model takes in one request; send several"

    def too_large(self) -> str:
        """Returns the error of unpacked values that are too large."""
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
        limits: The limits.

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
