"""Parts of an output: written to a local file, later checked where they were committed to.

A part says in its metadata, key `qinfer`, which shard of which job it is, of which inputs and model, and how many rows
failed: a Parquet file in its own metadata, an Arrow file in its footer and, as far as failed rows go, with its last
batch. Whoever may write to the output folder can put another file there, so a check reads footers and headers only,
within their limits, and no rows.

Encodings are chosen for the speed of writing: floats have no dictionary, since hardly any value is there twice, and
row numbers are stored as differences.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from qinfer.errors import QinferError, StoreError, StoreNotFound
from qinfer.jobs.check import ERROR_COLUMNS, PLACE_COLUMNS
from qinfer.jobs.job import Output
from qinfer.jobs.plan import ExpectedParts, PartInfo, Shard
from qinfer.jobs.rows.arrow_footer import batch_metadata, batch_rows, open_arrow
from qinfer.jobs.rows.parquet_pages import read_metadata
from qinfer.storage.store import Store

METADATA_KEY = b"qinfer"

_ZSTD_LEVEL = 1
_GROUP_ROWS = 2**18
_PARQUET_GROUP_BYTES = 32 * 2**20
_ARROW_BATCH_BYTES = 8 * 2**20
_SMALL_ROWS = 4096
_ENCODED_ROWS = 65_536  # at a time: some percent faster than 1024, which is usual
_COUNTED = PLACE_COLUMNS[1:]  # row group and row: they grow by one, or stay
_REASON_CHARACTERS = 200


class PartBroken(StoreError):
    """The file at a part's URL is not the planned part."""


class PartMetadata(msgspec.Struct, frozen=True):
    """Metadata that a part's file contains.

    Attributes:
        job: The job's id.
        shard: The shard's index.
        rows: Its rows.
        etags: Those of the files that its rows are from, in order.
        model_hash: What the model's files were.
        errors: How many rows failed; -1 where it is said elsewhere.
    """

    job: str
    shard: int
    rows: int
    etags: tuple[str, ...]
    model_hash: str
    errors: int = -1


def part_metadata(job_id: str, shard: Shard, model_hash: str) -> PartMetadata:
    """Returns what the part of a shard says of itself, failed rows aside."""
    etags = dict.fromkeys((part.url, part.etag) for part in shard.ranges)
    return PartMetadata(job_id, shard.index, shard.rows, tuple(etag for _, etag in etags), model_hash)


class PartWriter:
    """Writes one part to a local file; left by an exception, it deletes the file.

    Args:
        path: The file; its folder is there, and nothing of its name.
        schema: The columns (`OutputColumns.schema`).
        output: Format and compression.
        metadata: What the part says of itself.

    Attributes:
        rows: Rows written so far.
        errors: Those that have an `error_code`.
    """

    def __init__(self, path: Path, schema: pa.Schema, output: Output, metadata: PartMetadata) -> None:
        self.rows = 0
        self.errors = 0
        self._path = path
        self._metadata = metadata
        kind = _ParquetFile if output.format == "parquet" else _ArrowFile
        self._file = kind(path, schema, output, metadata)
        self._has_ended = False
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, record: pa.RecordBatch) -> None:
        """Writes rows; they reach the file when there are enough of them.

        Raises:
            OSError: The file can't be written.
        """
        if not record.num_rows:
            return
        self.rows += record.num_rows
        self.errors += record.num_rows - record.column(ERROR_COLUMNS[0]).null_count
        self._waiting.append(record)
        self._waiting_rows += record.num_rows
        self._waiting_bytes += record.nbytes
        if self._waiting_bytes >= self._file.group_bytes or self._waiting_rows >= _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Ends the file; does nothing where it was deleted, or has ended.

        Raises:
            ValueError: It has not as many rows as its metadata says.
            OSError: It can't be written.
        """
        if self._has_ended:
            return
        if self.rows != self._metadata.rows:
            self.abort()
            raise ValueError(f"a part of {self._metadata.rows} rows has {self.rows}")
        self._flush()
        self._has_ended = True
        self._file.close(self.errors)

    def abort(self) -> None:
        """Deletes the file."""
        self._has_ended = True
        self._waiting.clear()
        with suppress(Exception):  # the file is of no use in any case
            self._file.close(self.errors)
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._waiting:
            self._file.write(self._waiting)
        self._waiting = []
        self._waiting_rows = self._waiting_bytes = 0


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

    def write(self, records: Sequence[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(records)
        if table.num_rows < _SMALL_ROWS * len(records):
            table = table.combine_chunks()
        self._writer.write_table(table, row_group_size=_GROUP_ROWS)

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

    def write(self, records: Sequence[pa.RecordBatch]) -> None:
        if self._last is not None:
            self._writer.write_batch(self._last)
        self._last = records[0] if len(records) == 1 else pa.concat_batches(records)

    def close(self, errors: int) -> None:
        if self._last is not None:
            self._writer.write_batch(self._last, custom_metadata={METADATA_KEY: str(errors).encode()})
        self._writer.close()
        self._sink.close()


def _level(output: Output) -> int | None:
    """Returns the compression level that a job asks for; `None` = the codec's default."""
    return output.compression_level or (_ZSTD_LEVEL if output.compression == "zstd" else None)


def _leaves(field: pa.Field, path: str = "") -> list[pa.Field]:
    """Returns the leaf columns of a field, named as Parquet's paths are."""
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


def validate_part(store: Store, url: str, shard: Shard, job_id: str, model_hash: str) -> PartInfo:
    """Checks that the part of a shard is whole: its footer can be read and says what the plan does.

    Args:
        store: Where it is kept.
        url: Its URL.
        shard: Its shard.
        job_id: Its job.
        model_hash: What the model's files were when the job was planned.

    Raises:
        PartBroken: It is cut off, damaged, or something else; the message says what.
        StoreNotFound: It is not there.
        StoreError: The store fails.
    """
    stat = store.stat(url)
    if stat is None:
        raise StoreNotFound(f"'{url}' does not exist")
    try:
        with store.open(url) as content:
            found, rows, schema = _parquet_footer(content) if url.endswith(".parquet") else _arrow_footer(content)
        # The same text for all parts of a job is kept once.
        text = sys.intern("\n".join(f"{field.name}: {field.type}" for field in schema))
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
    return PartInfo(url, rows, found.errors, stat.size_bytes, stat.etag, text)


def part_of(store: Store, parts: ExpectedParts, shard: Shard) -> PartInfo | str:
    """Reads the footer of a shard's part.

    Returns:
        The part, or what is wrong with it.

    Raises:
        StoreError: The store does not tell.
    """
    try:
        return validate_part(store, parts.url_of(shard), shard, parts.job_id, parts.model_hash)
    except (PartBroken, StoreNotFound) as error:
        return error.message


def set_aside(store: Store, parts: ExpectedParts, shard: Shard) -> None:
    """Makes the name of a broken part free, so that it can be made again; one that is gone stays so.

    A part that another process has made again meanwhile stays where it is.

    Raises:
        StoreError: The store fails.
    """
    url = parts.url_of(shard)
    found = store.stat(url)
    if found is not None and isinstance(part_of(store, parts, shard), str):
        store.set_aside(url, found.etag)


def _parquet_footer(content: Any) -> tuple[PartMetadata, int, pa.Schema]:
    metadata = read_metadata(content)
    found = _decoded((metadata.metadata or {}).get(METADATA_KEY))
    return found, metadata.num_rows, metadata.schema.to_arrow_schema()


def _arrow_footer(content: Any) -> tuple[PartMetadata, int, pa.Schema]:
    reader = open_arrow(content)
    found = _decoded((reader.metadata or {}).get(METADATA_KEY))
    rows = batch_rows(content)
    errors = batch_metadata(content, len(rows) - 1).get(METADATA_KEY, b"-1") if rows else b"0"
    return msgspec.structs.replace(found, errors=int(errors)), sum(rows), reader.schema


def _decoded(data: bytes | None) -> PartMetadata:
    if data is None:
        raise ValueError("it has no metadata of qinfer")
    return msgspec.json.decode(data, type=PartMetadata)
