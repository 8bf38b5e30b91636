"""Parts as CSV and JSON lines."""

import gzip
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from qinfer.jobs.job import Output
from qinfer.tabular.texts import csv_column, json_objects

_GZIP_LEVEL = 1
_SLICE_BYTES = 8 * 2**20
"""Arrow's texts are limited to 2 GiB."""


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
            kind: type[_Rows] = _CsvRows if output.format == "csv" else _JsonRows
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


class _Rows(Protocol):
    def __init__(self, sink: IO[bytes], schema: pa.Schema) -> None: ...

    def write(self, record: pa.RecordBatch) -> None: ...

    def prepare_append(self) -> int:
        """Returns how many bytes to skip before another file's first row."""

    def close(self) -> None: ...


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
