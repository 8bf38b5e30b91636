"""Bodies of rows, as JSON lines or Arrow → a request's tensors, by the rules of bulk jobs.

A row that can't be converted refuses its message. Arrow bodies are not trusted: sizes are checked before decompression,
offsets before use. pyarrow allocates the size given before each compressed buffer, so these are added up first, in the
flatbuffer `Message` that is a message's metadata and that pyarrow has checked.
"""

import io
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tabular.footers import check_schema_message, field_of, unsigned
from qinfer.tabular.inputs import DecodedBatch, InputColumns
from qinfer.tabular.schemas import pruned, without_views
from qinfer.tabular.spec import shown
from qinfer.tabular.tensor_columns import is_text
from qinfer.tensors import Bytes, Tensor, from_numpy
from qinfer.wire.json_scan import LARGE_BYTES, check_depth, check_size
from qinfer_workers.bridge.config import BodyOptions

_BUFFER = struct.Struct("<qq")  # offset in the body, length
_LENGTH = struct.Struct("<q")

_MAX_MESSAGES = 1024
_MESSAGE_HEADER = 2
_DICTIONARY_DATA = 1
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3
_FILE_BEGIN, _FILE_END = b"ARROW1\0\0", struct.Struct("<i6s")  # size of the footer, mark


def check_unpacked(stream: Bytes, max_bytes: int) -> None:
    """Checks that a stream decompresses to at most `max_bytes`; raises pyarrow's error for damaged data."""
    total = 0
    try:
        for number, message in enumerate(pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))):
            if number > _MAX_MESSAGES:
                raise InvalidRequest(f"the body has more than {_MAX_MESSAGES} record batches; write them as one")
            total += _unpacked_bytes(message)
            if total > max_bytes:
                raise InvalidRequest(f"the body becomes more than {max_bytes} bytes when it is unpacked; send less")
    except struct.error as error:
        raise ValueError(f"a record batch's header is damaged: {error}") from None


def _unpacked_bytes(message: "pa.Message") -> int:
    if message.type not in ("record batch", "dictionary"):
        return 0
    data = message.metadata.to_pybytes()
    table = _table(data, unsigned(data, 0), _MESSAGE_HEADER)
    if message.type == "dictionary":
        table = _table(data, table, _DICTIONARY_DATA)
    field = field_of(data, table, _BATCH_BUFFERS)
    if not field or not field_of(data, table, _BATCH_COMPRESSION):
        return 0
    vector = field + unsigned(data, field)
    content = memoryview(message.body)
    total = 0
    for index in range(unsigned(data, vector)):
        offset, length = _BUFFER.unpack_from(data, vector + 4 + _BUFFER.size * index)
        if length >= _LENGTH.size:
            if not 0 <= offset <= len(content) - _LENGTH.size:
                raise ValueError("a buffer is outside its message")
            total += max(0, _LENGTH.unpack_from(content, offset)[0])
    return total


def _table(buffer: bytes, table: int, number: int) -> int:
    field = field_of(buffer, table, number)
    if not field:
        raise ValueError("a record batch has no header")
    return field + unsigned(buffer, field)


ArrowForm = Literal["arrow-stream", "arrow-file"]

BROKEN = (
    pa.ArrowException, OSError, EOFError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError,
    MemoryError,
)  # fmt: skip

_MAX_REASON = 200


class ArrowLimits(NamedTuple):
    """The limits of one body after its decompression and the decoding of its dictionaries."""

    rows: int
    size_bytes: int

    def too_many_rows(self) -> str:
        """Returns the error text."""
        return f"the message has more rows than the {self.rows} that the model takes in one request; send several"

    def too_large(self) -> str:
        """Returns the error text."""
        return f"the rows take more than {self.size_bytes} bytes when they are unpacked; send fewer in one message"


def explained(error: BaseException) -> str:
    """Returns the shortened text of a parser's error."""
    text = " ".join(str(error).split())
    return (text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "…") or type(error).__name__


def read_schema(body: Bytes, form: ArrowForm) -> pa.Schema:
    """Returns the columns of a body."""
    try:
        stream = _stream_of(body, form)
        check_schema_message(stream)
        return pa.ipc.open_stream(pa.py_buffer(stream)).schema
    except BROKEN as error:
        raise _broken(form, error) from None


def read_batch(body: Bytes, form: ArrowForm, columns: Sequence[str], limits: ArrowLimits) -> pa.RecordBatch:
    """Reads columns of a body."""
    try:
        stream = _stream_of(body, form)
        check_unpacked(stream, limits.size_bytes)
        schema = pa.ipc.open_stream(pa.py_buffer(stream)).schema
        fields = [schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        found = list(_batches(pa.ipc.open_stream(pa.py_buffer(stream), options=options), limits))
        if not found:
            raise InvalidRequest("the message has no rows")
        if len(found) > 1:
            whole = pa.Table.from_batches(found).unify_dictionaries().combine_chunks()
            found = whole.to_batches()
        return without_views(found[0])
    except BROKEN as error:
        raise _broken(form, error) from None


def _stream_of(body: Bytes, form: ArrowForm) -> Bytes:
    """Returns the stream in a file: between its mark and its footer, which readers in order do not need."""
    if form == "arrow-stream":
        return body
    view = memoryview(body)
    if view[: len(_FILE_BEGIN)] == _FILE_BEGIN and len(view) >= len(_FILE_BEGIN) + _FILE_END.size:
        size, mark = _FILE_END.unpack(view[-_FILE_END.size :])
        end = len(view) - _FILE_END.size - size
        if mark == _FILE_BEGIN[: len(mark)] and len(_FILE_BEGIN) <= end <= len(view):
            return view[len(_FILE_BEGIN) : end]  # some writers leave out the mark at the stream's end
    raise ValueError("it does not end as Arrow's file format does")


def _batches(batches: Iterable[pa.RecordBatch], limits: ArrowLimits) -> Iterator[pa.RecordBatch]:
    rows, size_bytes = 0, 0
    for batch in batches:
        rows += batch.num_rows
        if rows > limits.rows:
            raise InvalidRequest(limits.too_many_rows())
        batch.validate(full=True)  # damaged offsets would read any memory
        for column in batch.columns:
            size_bytes += _size(column, limits)
        if size_bytes > limits.size_bytes:
            raise InvalidRequest(limits.too_large())
        if batch.num_rows:
            yield batch


def _size(array: pa.Array, limits: ArrowLimits) -> int:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _size(array.storage, limits)
    if pa.types.is_run_end_encoded(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        raise InvalidRequest(f"a column is of type {kind}; write plain values, or plain lists")
    if isinstance(array, pa.DictionaryArray):
        if pa.types.is_nested(kind.value_type) or pa.types.is_dictionary(kind.value_type):
            raise InvalidRequest(f"a column is of type {kind}; write plain values")
        each = _lengths(array.dictionary)
        return int(each[array.indices.drop_null().to_numpy()].sum())
    if pa.types.is_fixed_size_list(kind) and len(array) * kind.list_size > limits.size_bytes:
        raise InvalidRequest(limits.too_large())
    if any((pa.types.is_list(kind), pa.types.is_large_list(kind), pa.types.is_fixed_size_list(kind))):
        return _size(array.flatten(), limits)
    return int(_lengths(array).sum()) if is_text(kind) else len(array) * 8


def _lengths(array: pa.Array) -> Any:
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


_MAX_KNOWN_SCHEMAS = 64
_ELEMENTS_A_VALUE = 4  # numbers in the memory of another JSON value
_SHOWN = 20
_ABSENT = object()


class RowInputs:
    """Makes a model's inputs of rows."""

    def __init__(self, options: BodyOptions, spec: ModelSpec) -> None:
        self._spec = spec
        self._job = options.job(spec.name)
        self._max_depth = options.max_json_depth
        self._limits = ArrowLimits(spec.max_batch_size or 1, options.max_bytes)
        self._known: dict[pa.Schema, InputColumns] = {}
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self._check_columns()

    def decode(self, body: Bytes, form: str) -> tuple[Tensor, ...]:
        """Makes the tensors of a body."""
        try:
            if form in ("row", "jsonl"):
                record = self._of_json([self._row(bytes(body))] if form == "row" else list(self._rows(bytes(body))))
            else:
                record = self._of_arrow(body, form)
            decoded = self._inputs(record.schema).decode(record)
        except BROKEN as error:
            raise InvalidRequest(f"the rows can't be read: {explained(error)}") from None
        return self._tensors(decoded)

    def _check_columns(self) -> None:
        known = {tensor.name: tensor for tensor in self._spec.inputs}
        for name in self._job.columns:
            given = self._job.columns_of(name)
            kind = pa.null() if len(given.columns) > 1 or not given.shape else pa.list_(pa.null())
            inputs = (known[name],) if name in known else self._spec.inputs
            if name not in known or len(given.columns) > 1 or given.shape:
                job = msgspec.structs.replace(self._job, columns={name: given})
                schema = pa.schema([(column, kind) for column in dict.fromkeys(given.columns)])
                InputColumns(job, replace(self._spec, inputs=inputs), schema)

    def _inputs(self, schema: pa.Schema) -> InputColumns:
        found = self._known.get(schema)
        if found is None:
            if len(self._known) >= _MAX_KNOWN_SCHEMAS:
                self._known.clear()
            found = self._known[schema] = InputColumns(self._job, self._spec, schema)
        return found

    def _of_arrow(self, body: Bytes, form: str) -> pa.RecordBatch:
        kind: ArrowForm = "arrow-file" if form == "arrow-file" else "arrow-stream"
        schema = read_schema(body, kind)
        columns = self._inputs(schema).columns
        if not columns:
            raise InvalidRequest(self._none_of_them(schema.names))
        return read_batch(body, kind, pruned(schema, columns).names, self._limits)

    def _of_json(self, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        if not rows:
            raise InvalidRequest("the message has no rows")
        columns: dict[str, pa.Array] = {}
        for tensor in self._spec.inputs:
            names = self._job.columns_of(tensor.name).columns
            is_named = tensor.name in self._job.columns or any(names[0] in row for row in rows)
            if tensor.optional and not is_named:
                continue
            columns.update({name: _array(name, rows, tensor) for name in names if name not in columns})
        if not columns:
            raise InvalidRequest(self._none_of_them(rows[0]))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _row(self, body: bytes) -> Mapping[str, Any]:
        try:
            self._check_row(body)
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"expected a JSON object, which is one row: {explained(error)}; send several as application/x-ndjson, "
                "or set 'format' of the route's 'body'"
            ) from None

    def _rows(self, body: bytes) -> Iterator[Mapping[str, Any]]:
        count = 0
        for line in io.BytesIO(body):
            if not line or line.isspace():
                continue
            count += 1
            if count > self._limits.rows:
                raise InvalidRequest(self._limits.too_many_rows())
            try:
                self._check_row(line)
                yield self._decoder.decode(line)
            except InvalidRequest as error:
                raise InvalidRequest(f"row {count}: {error.message}") from None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidRequest(f"row {count} is no JSON object: {explained(error)}") from None

    def _check_row(self, row: bytes) -> None:
        if len(row) > LARGE_BYTES:
            check_size(row, self._max_depth, _ELEMENTS_A_VALUE * self._limits.size_bytes, "max_bytes of the route")
        else:
            check_depth(row, self._max_depth)

    def _none_of_them(self, names: Sequence[str] | Mapping[str, Any]) -> str:
        inputs = ", ".join(tensor.name for tensor in self._spec.inputs) or "none"
        return f"the rows have {listed(names)}, and no column for an input of '{self._spec.name}', which has {inputs}"

    def _tensors(self, decoded: DecodedBatch) -> tuple[Tensor, ...]:
        errors, pieces = decoded.errors, decoded.pieces
        if (bad := errors.bad) is not None:
            row = int(np.flatnonzero(bad)[0])
            more = f" (and {errors.count - 1} more rows can't be used)" if errors.count > 1 else ""
            raise InvalidRequest(f"row {row + 1}: {errors.columns()[1][row].as_py()}{more}")
        if len(pieces) > 1:
            row = next(int(piece.rows[0]) for piece in pieces if piece.rows is not None and piece.rows[0])
            raise InvalidRequest(
                f"row {row + 1} has another shape than row 1; send rows of different shapes in messages of their own"
            )
        (piece,) = pieces
        datatypes = {tensor.name: tensor.datatype for tensor in self._spec.inputs}
        is_batched = self._spec.max_batch_size > 0
        return tuple(
            from_numpy(name, array if is_batched else array[0], datatypes[name]) for name, array in piece.inputs.items()
        )


def _array(name: str, rows: Sequence[Mapping[str, Any]], tensor: TensorSpec) -> pa.Array:
    values = [row.get(name, _ABSENT) for row in rows]
    if _ABSENT in values:
        row = values.index(_ABSENT)
        raise InvalidRequest(
            f"row {row + 1} lacks '{shown(name)}', which input '{tensor.name}' is made of; it has {listed(rows[row])}"
        )
    try:
        return pa.array(values)
    except BROKEN as error:
        # The shortest run of rows that can't be one column ends with the wrong row.
        row = bisect_left(range(len(values)), True, key=lambda end: not _is_column(values[: end + 1]))
        raise InvalidRequest(
            f"row {row + 1}: '{shown(name)}' does not fit the rows before, or is mixed in itself: {explained(error)}"
        ) from None


def _is_column(values: Sequence[Any]) -> bool:
    try:
        pa.array(values)
    except BROKEN:
        return False
    return True


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Returns the first names, shortened."""
    first = [shown(name) for name in names][:_SHOWN]
    return ", ".join(first) + (", …" if len(names) > _SHOWN else "") if first else "none"
