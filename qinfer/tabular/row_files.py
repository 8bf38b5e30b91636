"""One open input file of a shard: its rows as Arrow batches, in bounded memory.

Rows are split before dictionaries, run lengths and other types are decoded, so that decoded rows are bounded, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from qinfer.tabular.decoded_sizes import FileRows, cut
from qinfer.tabular.footers import open_arrow
from qinfer.tabular.parquet_rows import ParquetGroups
from qinfer.tabular.schemas import Fields, as_read, cast, common_field, pick, pruned, select
from qinfer.tabular.source import FileFormat, ReadLimits, SourceBroken
from qinfer.tabular.spec import Csv, Range
from qinfer.tabular.text_rows import FAULT, text_batches
from qinfer.tabular.text_streams import TextFormat, TextStream


class WantedColumns(NamedTuple):
    """Columns and struct fields to read, in order.

    `columns` are named by path, in the type to return; `nested` are the files' columns that contain them.
    """

    columns: pa.Schema
    nested: pa.Schema
    may_lack: bool = False
    groups: tuple[int, ...] = ()

    @classmethod
    def from_paths(cls, schema: pa.Schema, paths: Iterable[str]) -> "WantedColumns":
        """Selects fields of a schema."""
        chosen = tuple(dict.fromkeys(paths))
        columns = [field.with_type(as_read(field.type)) for field in select(schema, chosen)]
        return cls(pa.schema([(field.name, field.type) for field in columns]), pruned(schema, chosen))


def open_rows(
    content: Any, format_: FileFormat, wanted: WantedColumns, url: str, *, far: bool, limits: ReadLimits
) -> "GroupRows":
    """Opens a Parquet or Arrow file; the rows close it."""
    if format_ == "parquet":
        names = wanted.columns.names
        groups = ParquetGroups(content, names, url, far=far, limits=limits, wanted=wanted.groups)
        return GroupRows(groups, wanted, url, limits)
    return GroupRows(_ArrowBatches(content, wanted.columns.names, url, limits), wanted, url, limits)


class _ArrowBatches:
    def __init__(self, content: Any, names: Sequence[str], url: str, limits: ReadLimits) -> None:
        self._content, self._url = content, url
        self.schema: pa.Schema = open_arrow(content, limits.footer_bytes).schema
        fields = [self.schema.get_field_index(name) for name in pruned(self.schema, names).names]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        self._reader = pa.ipc.open_file(content, options=options)

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        if not 0 <= wanted.row_group < self._reader.num_record_batches:
            raise SourceBroken(f"'{self._url}' has no record batch {wanted.row_group}")
        try:
            whole = self._reader.get_batch(wanted.row_group)
        except MemoryError:
            raise SourceBroken(
                f"record batch {wanted.row_group} of '{self._url}', with its dictionaries, takes more memory than a "
                "worker may use to read it; write record batches of fewer rows, or raise QINFER_BULK__MAX_READ_BYTES"
            ) from None
        whole.validate(full=True)  # damaged offsets could point anywhere
        yield whole

    def close(self) -> None:
        self._content.close()


class TextRows:
    """CSV or JSON lines from the first range's cut point."""

    def __init__(
        self, content: TextStream, format_: TextFormat, wanted: WantedColumns, url: str, limits: ReadLimits, csv: Csv
    ) -> None:
        self._content, self._wanted, self._url, self._limits = content, wanted, url, limits
        self._opened = partial(text_batches, content, format_, wanted.nested, csv)
        self._read: Iterator[pa.RecordBatch]
        self._row = -1  # the first unread row

    def batches(self, wanted: Range) -> Iterator[FileRows]:
        """Reads the next range."""
        if self._row < 0:
            self._row = wanted.first_row - wanted.first_in_group
            self._read = self._opened(self._row)
        skip = wanted.first_row - self._row
        for record in _within(self._read, skip, wanted.rows, self._url, self._put_back):
            fault = (record.schema.metadata or {}).get(FAULT, b"").decode()
            for rows in cut(pick(record, self._wanted.columns.names), self._limits.rows_bytes):
                yield rows._replace(fault=fault)
        self._row = wanted.first_row + wanted.rows

    def _put_back(self, rest: pa.RecordBatch) -> None:
        self._read = chain([rest], self._read)

    def close(self) -> None:
        """Closes the text."""
        self._content.close()


class GroupRows:
    """Rows of the groups of a Parquet file, or the record batches of an Arrow file."""

    def __init__(
        self, groups: ParquetGroups | _ArrowBatches, wanted: WantedColumns, url: str, limits: ReadLimits
    ) -> None:
        self._groups, self._wanted, self._url, self._rows_bytes = groups, wanted.columns, url, limits.rows_bytes
        self._here = []
        fields = Fields(groups.schema)
        for field in self._wanted:
            one = fields.field(field.name)
            if one is None and wanted.may_lack and not fields.places(field.name):
                continue
            if one is None:
                count = len(fields.places(field.name))
                state = f"has {count} columns" if count else "lacks the column"
                raise SourceBroken(f"'{url}' {state} '{field.name}', which the job reads")
            found = one.with_type(as_read(one.type))
            common = common_field(found, field)
            if found.type != field.type and (common is None or common.type != field.type):
                raise SourceBroken(self._type_mismatch(field, one.type))
            self._here.append(field.name)

    def batches(self, wanted: Range) -> Iterator[FileRows]:
        """Reads a range."""
        for record in _within(self._groups.batches(wanted), wanted.first_in_group, wanted.rows, self._url):
            for rows in cut(pick(record, self._here), self._rows_bytes):
                yield rows._replace(record=self._cast_columns(rows.record))

    def close(self) -> None:
        """Closes the file."""
        self._groups.close()

    def _cast_columns(self, record: pa.RecordBatch) -> pa.RecordBatch:
        here = dict(zip(self._here, record.columns, strict=True))
        columns = []
        for field in self._wanted:
            column = here.get(field.name)
            if column is None:
                columns.append(pa.nulls(record.num_rows, field.type))
                continue
            try:
                columns.append(column if column.type == field.type else cast(column, field.type))
            except pa.ArrowException:
                raise SourceBroken(self._type_mismatch(field, column.type)) from None
        return pa.RecordBatch.from_arrays(columns, schema=self._wanted)

    def _type_mismatch(self, field: pa.Field, found: pa.DataType) -> str:
        return (
            f"column '{field.name}' of '{self._url}' is of type {found}, which can't be made the {field.type} that it "
            "was planned to be"
        )


RowFile = GroupRows | TextRows
"""An open input file.

`batches` reads a range. It raises `SourceBroken` if the range is not in the file or values do not fit,
`pyarrow.ArrowException` and `OSError` if the file is damaged or can't be read.
"""


def _within(
    read: Iterator[pa.RecordBatch],
    skip: int,
    rows: int,
    url: str,
    put_back: Callable[[pa.RecordBatch], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    left = rows
    while left:
        record = next(read, None)
        if record is None:
            raise SourceBroken(f"'{url}' has {left} rows less than it had when the job was planned")
        if skip >= record.num_rows:
            skip -= record.num_rows
            continue
        if put_back is not None and skip + left < record.num_rows:
            put_back(record.slice(skip + left))
        if skip or left < record.num_rows:
            record = record.slice(skip, left)
        skip = 0
        left -= record.num_rows
        yield record
