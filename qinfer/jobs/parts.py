"""Parts of an output: written to a local file, and validated after the commit.

A part identifies itself by metadata under the key `qinfer`. Parquet keeps it in the file metadata, Arrow in its footer
and the failed rows in its last batch. Text has no place for metadata, and a part may have its failed rows in a file of
their own in `_failed`. Such parts need a *commit record*: `_commits/<part>/<hash>.json` in the output folder. Record
and failed rows are written before the part, under names derived from their content, so every part has its own record
even if the writer dies in between. Records without a part mean nothing.

Files in the output folder are untrusted: validation reads footers, headers and records, within limits, and no rows.

Encodings favour the speed of writing: floats, which hardly repeat, have no dictionary.
"""

import gzip
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq

from qinfer.errors import QinferError, StoreError, StoreNotFound
from qinfer.jobs.columns import ERROR_COLUMNS, PLACE_COLUMNS
from qinfer.jobs.job import TEXT_FORMATS, Output
from qinfer.jobs.plan import FAILED, RECORDS, ExpectedParts, PartInfo, Shard
from qinfer.storage.store import Stat, Store
from qinfer.tabular.footers import batch_metadata, batch_rows, open_arrow, read_metadata
from qinfer.tabular.texts import csv_column, json_objects

METADATA_KEY = b"qinfer"
_ZSTD_LEVEL = _GZIP_LEVEL = 1
_SLICE_BYTES = 8 * 2**20
"""Arrow's texts are limited to 2 GiB."""
_GROUP_ROWS = 2**18
_PARQUET_GROUP_BYTES = 32 * 2**20
_ARROW_BATCH_BYTES = 8 * 2**20
_SMALL_ROWS = 4096
_SMALL_BYTES = 4 * 2**20
# Rows that pyarrow encodes at once; its default of 1024 is slower.
_ENCODED_ROWS = 65_536
_COUNTED = PLACE_COLUMNS[1:]  # row numbers grow by one, or stay
_REASON_CHARACTERS = 200
_RECORD_BYTES = 2 * 2**20
# The most commit records of a part: each attempt may leave one.
_MOST_RECORDS = 64
_HASHED_BYTES = 2**20
_HASH_CHARACTERS = 16
_FAILED_DIGEST = rf"-[0-9a-f]{{{_HASH_CHARACTERS}}}(?=\.[^/]*$)"


class PartBroken(StoreError):
    """The file at a part's URL is not the part."""


class PartMetadata(msgspec.Struct, frozen=True):
    """Metadata in a part's file; `errors` -1 = stored elsewhere."""

    job: str
    shard: int
    rows: int
    etags: tuple[str, ...]
    model_hash: str
    errors: int = -1


class _FileDigest(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """`schema` is that before the conversion to text."""

    metadata: PartMetadata
    schema: str
    part: _FileDigest
    failed: _FileDigest | None = None


_records = msgspec.json.Decoder(_Record)


def part_metadata(job_id: str, shard: Shard, model_hash: str) -> PartMetadata:
    """Returns the expected metadata of a shard's part."""
    etags = dict.fromkeys((part.url, part.etag) for part in shard.ranges)
    return PartMetadata(job_id, shard.index, shard.rows, tuple(etag for _, etag in etags), model_hash)


class PartColumns(NamedTuple):
    """Column names of a part, and of its file of failed rows."""

    good: Sequence[str]
    failed: Sequence[str]


class PartWriter:
    """Writes one part to a new local file; deletes it if left by an exception.

    With `split`, failed rows go to `<path>.failed`.
    """

    def __init__(
        self, path: Path, schema: pa.Schema, output: Output, metadata: PartMetadata, split: PartColumns | None = None
    ) -> None:
        self.rows = 0
        self.errors = 0
        self._output, self._schema, self._metadata, self._split = output, schema, metadata, split
        self._good = self._file(path, split.good if split else schema.names)
        self._failed: _BufferedFile | None = None
        self._has_ended = False

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        (self.close if kind is None else self.abort)()

    def write(self, record: pa.RecordBatch) -> None:
        """Buffers rows, and writes them in groups."""
        if not record.num_rows:
            return
        codes = record.column(ERROR_COLUMNS[0])
        self.rows += record.num_rows
        self.errors += record.num_rows - codes.null_count
        if self._split and codes.null_count < record.num_rows:
            self._failed_file().write(record.filter(codes.is_valid()))
            record = record.filter(codes.is_null())
        self._good.write(record)

    def close(self) -> None:
        """Ends the file; `ValueError` if it lacks planned rows."""
        if not self._has_ended and self.rows != self._metadata.rows:
            self.abort()
            raise ValueError(f"a part of {self._metadata.rows} rows has {self.rows}")
        self.close_files()

    def close_files(self) -> None:
        """Ends the file as a piece, with any number of rows."""
        if not self._has_ended:
            self._has_ended = True
            for file in self._files:
                file.close(self.errors)

    @property
    def paths(self) -> Sequence[Path]:
        """The part, then its file of failed rows."""
        return [file.path for file in self._files]

    def add(self, paths: Sequence[Path], rows: int, errors: int) -> None:
        """Appends an ended piece."""
        self.rows += rows
        self.errors += errors
        if rows > errors or not self._split:
            self._good.add(paths[0])
        if len(paths) > 1:
            self._failed_file().add(paths[1])

    def prepare(self, store: Store, folder: str, name: str) -> None:
        """Stores the failed rows and the record of the commit, which must exist before the part."""
        if not self._split and self._output.format not in TEXT_FORMATS:
            return
        part, failed = self._good.written(), None
        if self._failed is not None:
            failed = self._failed.written()
            store.commit_if_absent(self._failed.path, f"{folder}/{_failed_name(name, failed)}")
        record = _Record(
            metadata=msgspec.structs.replace(self._metadata, errors=self.errors),
            schema=_as_text(self._good.schema),
            part=part,
            failed=failed,
        )
        data = msgspec.json.encode(record)
        store.put_if_absent(data, f"{folder}/{RECORDS}/{name}/{hashlib.sha256(data).hexdigest()}.json")

    def abort(self) -> None:
        """Ends and deletes the file."""
        files, self._has_ended = [] if self._has_ended else self._files, True
        for file in files:
            with suppress(Exception):  # no longer needed
                file.close(self.errors)
        self.delete()

    def delete(self) -> None:
        """Deletes the local files."""
        for file in self._files:
            file.path.unlink(missing_ok=True)

    @property
    def _files(self) -> "list[_BufferedFile]":
        return [self._good, *([self._failed] if self._failed is not None else [])]

    def _failed_file(self) -> "_BufferedFile":
        if self._failed is None:
            assert self._split is not None
            path = self._good.path
            self._failed = self._file(path.with_name(f"{path.name}.failed"), self._split.failed)
        return self._failed

    def _file(self, path: Path, names: Sequence[str]) -> "_BufferedFile":
        schema = pa.schema([self._schema.field(name) for name in names])
        return _BufferedFile(path, schema, _KINDS[self._output.format](path, schema, self._output, self._metadata))


class _BufferedFile:
    """Joins small records, which are expensive, as they arrive; a join at the flush would hold a group twice."""

    def __init__(self, path: Path, schema: pa.Schema, file: "_ParquetFile | _ArrowFile | TextFile") -> None:
        self.path, self.schema, self._file = path, schema, file
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._small: list[pa.RecordBatch] = []
        self._small_rows = self._small_bytes = 0

    def write(self, record: pa.RecordBatch) -> None:
        if not record.num_rows:
            return
        if record.num_columns > len(self.schema):
            record = record.select(self.schema.names)
        size_bytes = record.nbytes
        self._small.append(record)
        self._small_rows += record.num_rows
        self._small_bytes += size_bytes
        if self._small_rows >= _SMALL_ROWS or self._small_bytes >= _SMALL_BYTES:
            self._join()
        self._rows += record.num_rows
        self._bytes += size_bytes
        if self._bytes >= self._file.group_bytes or self._rows >= _GROUP_ROWS:
            self._flush()

    def add(self, path: Path) -> None:
        if isinstance(self._file, TextFile):
            self._flush()
            self._file.add(path)
            return
        for record in self._file.records(path):
            self.write(pa.RecordBatch.from_arrays(list(map(_typed, record.columns, self.schema)), schema=self.schema))

    def close(self, errors: int) -> None:
        self._flush()
        self._file.close(errors)

    def written(self) -> "_FileDigest":
        with self.path.open("rb") as file:
            return _FileDigest(self.path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

    def _join(self) -> None:
        if self._small:
            self._waiting.append(self._small[0] if len(self._small) == 1 else pa.concat_batches(self._small))
        self._small = []
        self._small_rows = self._small_bytes = 0

    def _flush(self) -> None:
        self._join()
        if self._waiting:
            self._file.write(self._waiting)
        self._waiting = []
        self._rows = self._bytes = 0


class _ParquetFile:
    group_bytes = _PARQUET_GROUP_BYTES

    def __init__(self, path: Path, schema: pa.Schema, output: Output, metadata: PartMetadata) -> None:
        texts = [leaf for field in schema for leaf in _leaves(field) if _is_text(leaf.type)]
        counted = {name: "DELTA_BINARY_PACKED" for name in _COUNTED if name in schema.names}
        known = [field.name for field in schema if pa.types.is_integer(field.type) or field.name in ERROR_COLUMNS]
        self._metadata = metadata
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression=output.compression,
            compression_level=_level(output),
            use_dictionary=[leaf.name for leaf in texts],
            column_encoding=counted or None,
            write_statistics=known,
            write_batch_size=_ENCODED_ROWS,
        )

    @staticmethod
    def records(path: Path) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(use_threads=False)

    def write(self, records: Sequence[pa.RecordBatch]) -> None:
        self._writer.write_table(pa.Table.from_batches(records), row_group_size=_GROUP_ROWS)

    def close(self, errors: int) -> None:
        whole = msgspec.structs.replace(self._metadata, errors=errors)
        self._writer.add_key_value_metadata({METADATA_KEY: msgspec.json.encode(whole)})
        self._writer.close()


class _ArrowFile:
    group_bytes = _ARROW_BATCH_BYTES

    def __init__(self, path: Path, schema: pa.Schema, output: Output, metadata: PartMetadata) -> None:
        codec = None if output.compression == "none" else pa.Codec(output.compression, _level(output))
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        footer = {METADATA_KEY: msgspec.json.encode(metadata)}
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, schema, options=options, metadata=footer)
        self._last: pa.RecordBatch | None = None

    @staticmethod
    def records(path: Path) -> Iterator[pa.RecordBatch]:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
            yield from map(file.get_batch, range(file.num_record_batches))

    def write(self, records: Sequence[pa.RecordBatch]) -> None:
        if self._last is not None:
            self._writer.write_batch(self._last)
        self._last = records[0] if len(records) == 1 else pa.concat_batches(records)

    def close(self, errors: int) -> None:
        if self._last is not None:
            self._writer.write_batch(self._last, custom_metadata={METADATA_KEY: str(errors).encode()})
        self._writer.close()
        self._sink.close()


class TextFile:
    """A new file of rows as JSON lines, or as CSV with a header."""

    group_bytes = _SLICE_BYTES

    def __init__(self, path: Path, schema: pa.Schema, output: Output, _: object = None) -> None:
        with ExitStack() as opened:
            sink: Any = opened.enter_context(path.open("wb"))
            if output.compression == "gzip":
                # Without the time, equal rows give equal bytes.
                level = output.compression_level or _GZIP_LEVEL
                sink = opened.enter_context(gzip.GzipFile("", "wb", level, sink, mtime=0))
            elif output.compression == "zstd":
                sink = opened.enter_context(pa.CompressedOutputStream(sink, "zstd"))
            kind: type[_CsvRows | _JsonRows] = _CsvRows if output.format == "csv" else _JsonRows
            self._rows, self._sink = kind(sink, schema), sink
            self._compression = output.compression
            self._opened = opened.pop_all()

    def write(self, records: Sequence[pa.RecordBatch]) -> None:
        """Writes rows."""
        for record in records:
            size = max(1, record.num_rows * _SLICE_BYTES // max(record.nbytes, 1))
            for first in range(0, record.num_rows, size):
                self._rows.write(record.slice(first, size))

    def add(self, path: Path) -> None:
        """Appends the rows of another file of this kind."""
        codec = None if self._compression == "none" else self._compression
        with pa.input_stream(str(path), compression=codec) as text:
            text.read(self._rows.prepare_append())
            while data := text.read(_SLICE_BYTES):
                self._sink.write(data)

    def close(self, _: int = 0) -> None:
        """Ends the file."""
        with self._opened:
            self._rows.close()


class _CsvRows:
    def __init__(self, sink: IO[bytes], schema: pa.Schema) -> None:
        nothing = [csv_column(pa.nulls(0, field.type)) for field in schema]
        self._schema = pa.schema([(name, column.type) for name, column in zip(schema.names, nothing, strict=True)])
        self._fields = list(schema)
        self._writer = pa.csv.CSVWriter(sink, self._schema)

    def write(self, record: pa.RecordBatch) -> None:
        columns = [csv_column(*pair) for pair in zip(record.columns, self._fields, strict=True)]
        self._writer.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def prepare_append(self) -> int:
        header = pa.BufferOutputStream()
        pa.csv.CSVWriter(header, self._schema).close()
        return int(header.getvalue().size)

    def close(self) -> None:
        self._writer.close()


class _JsonRows:
    def __init__(self, sink: IO[bytes], schema: pa.Schema) -> None:
        self._sink = sink
        self._fields = list(schema)
        self._is_empty = True

    def write(self, record: pa.RecordBatch) -> None:
        lines = pc.binary_join_element_wise(json_objects(self._fields, record.columns), "\n", "")
        self._sink.write("".join(lines.to_pylist()).encode())
        self._is_empty = False

    def prepare_append(self) -> int:
        self._is_empty = False
        return 0

    def close(self) -> None:
        # Stores accept no empty files.
        if self._is_empty:
            self._sink.write(b"\n")


_KINDS: Mapping[str, type[_ParquetFile | _ArrowFile | TextFile]] = {
    "parquet": _ParquetFile,
    "arrow": _ArrowFile,
    "csv": TextFile,
    "jsonl": TextFile,
}


def _typed(column: pa.Array, field: pa.Field) -> pa.Array:
    """Casts a column back, since Parquet changes some types."""
    if pa.types.is_dictionary(field.type) and not pa.types.is_dictionary(column.type):
        column = column.cast(field.type.value_type).dictionary_encode()  # Arrow casts strings to dictionaries only
    return column if column.type == field.type else column.cast(field.type)


def _level(output: Output) -> int | None:
    return output.compression_level or (_ZSTD_LEVEL if output.compression == "zstd" else None)


def _leaves(field: pa.Field, path: str = "") -> list[pa.Field]:
    name = f"{path}{field.name}"
    kind = field.type
    if pa.types.is_struct(kind):
        return [leaf for inner in kind for leaf in _leaves(inner, f"{name}.")]
    if pa.types.is_nested(kind) and not pa.types.is_map(kind) and hasattr(kind, "value_type"):
        return _leaves(pa.field("element", kind.value_type), f"{name}.list.")
    return [pa.field(name, kind)]


def _is_text(kind: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return pa.types.is_dictionary(kind) or any(check(kind) for check in checks)


def validate_part(
    store: Store, url: str, shard: Shard, job_id: str, model_hash: str, *, is_split: bool = False
) -> PartInfo:
    """Checks that a shard's part is whole and fits the plan."""
    stat = store.stat(url)
    if stat is None:
        raise StoreNotFound(f"'{url}' does not exist")
    try:
        failed = ""
        if url.endswith((".parquet", ".arrow")) and not is_split:
            with store.open_known(stat) as content:
                found, rows, text = _parquet_footer(content) if url.endswith(".parquet") else _arrow_footer(content)
        else:
            folder = url.removesuffix(f"/{shard.part}")
            record = _record_of(store, stat, f"{folder}/{RECORDS}/{shard.part}")
            found, rows, text = record.metadata, record.metadata.rows, record.schema
            failed = _failed_of(store, folder, shard.part, record)
    except QinferError:
        raise
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise PartBroken(f"'{url}' is no whole part: {reason}") from None
    expected = msgspec.structs.replace(part_metadata(job_id, shard, model_hash), errors=found.errors)
    for name in PartMetadata.__struct_fields__:
        here, planned = getattr(found, name), getattr(expected, name)
        if here != planned:
            said = repr(here)[:_REASON_CHARACTERS]
            raise PartBroken(f"'{url}' says {name} {said}, the plan {planned!r}: it is the part of something else")
    if rows != shard.rows or not 0 <= found.errors <= rows:
        raise PartBroken(f"'{url}' has {rows} rows, {found.errors} of them failed; the plan says {shard.rows} rows")
    # Parts of a job share one text.
    return PartInfo(url, rows, found.errors, stat.size_bytes, stat.etag, sys.intern(text), failed)


def part_of(store: Store, parts: ExpectedParts, shard: Shard) -> PartInfo | str:
    """Returns a shard's part, or a message if it is broken or missing."""
    try:
        return validate_part(store, parts.url_of(shard), shard, parts.job_id, parts.model_hash, is_split=parts.is_split)
    except (PartBroken, StoreNotFound) as error:
        return error.message


def set_aside(store: Store, parts: ExpectedParts, shard: Shard) -> None:
    """Frees the name of a broken part, unless another process has replaced it."""
    url = parts.url_of(shard)
    found = store.stat(url)
    if found is not None and isinstance(part_of(store, parts, shard), str):
        store.set_aside(url, found.etag)


def _record_of(store: Store, stat: Stat, folder: str) -> _Record:
    """Returns the part's record; if attempts left several of its size, the hash of the part decides."""
    # Sorted: all readers choose the same.
    names = sorted(child.name for child in store.children(folder) if not child.is_folder)
    if len(names) > _MOST_RECORDS:
        raise ValueError(f"it has {len(names)} commit records; at most {_MOST_RECORDS}")
    records = (_records.decode(store.read(f"{folder}/{name}", _RECORD_BYTES)) for name in names)
    fitting = [record for record in records if record.part.size_bytes == stat.size_bytes]
    if len(fitting) > 1:
        digest = hashlib.sha256()
        with store.open_known(stat, sequential=True) as content:
            while data := content.read(_HASHED_BYTES):
                digest.update(data)
        fitting = [record for record in fitting if record.part.sha256 == digest.hexdigest()]
    if not fitting:
        raise ValueError("it has no commit record of its size and content")
    return fitting[0]


def _failed_name(name: str, failed: _FileDigest) -> str:
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{FAILED}/{folder}{slash}{stem}-{failed.sha256[:_HASH_CHARACTERS]}.{extension}"


def part_of_failed(name: str) -> str:
    """Returns the part to which a file of failed rows belongs."""
    return re.sub(_FAILED_DIGEST, "", name)


def _failed_of(store: Store, folder: str, name: str, record: _Record) -> str:
    if record.failed is None:
        return ""
    failed = _failed_name(name, record.failed)
    stat = store.stat(f"{folder}/{failed}")
    if stat is None or stat.size_bytes != record.failed.size_bytes:
        raise ValueError("the file of its failed rows is gone, or not whole")
    return failed


def _as_text(schema: pa.Schema) -> str:
    return "\n".join(f"{field.name}: {field.type}" for field in schema)


def _parquet_footer(content: Any) -> tuple[PartMetadata, int, str]:
    metadata = read_metadata(content)
    found = _decoded((metadata.metadata or {}).get(METADATA_KEY))
    return found, metadata.num_rows, _as_text(metadata.schema.to_arrow_schema())


def _arrow_footer(content: Any) -> tuple[PartMetadata, int, str]:
    reader = open_arrow(content)
    found = _decoded((reader.metadata or {}).get(METADATA_KEY))
    rows = batch_rows(content)
    errors = batch_metadata(content, len(rows) - 1).get(METADATA_KEY, b"-1") if rows else b"0"
    return msgspec.structs.replace(found, errors=int(errors)), sum(rows), _as_text(reader.schema)


def _decoded(data: bytes | None) -> PartMetadata:
    if data is None:
        raise ValueError("it has no metadata of qinfer")
    return msgspec.json.decode(data, type=PartMetadata)
