"""CSV and JSON lines: columns, rows, row counts and cut points.

Quoted values of CSV may contain line ends; blank lines are no rows. `texts` decides the types, `text_streams`
decodes the text.
"""

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from qinfer.tabular import text_streams, texts
from qinfer.tabular.spec import Csv, Cut, shown
from qinfer.tabular.text_streams import BLOCK_BYTES, NotText, TextFormat, TextStream

MAX_COLUMNS = 10_000
CUT_BYTES = 16 * 2**20
_BOM = codecs.BOM_UTF8

NESTING_LIMIT = 100
"""Guaranteed; twice the depth is refused. Between, it depends on the cuts of blocks."""

_CELLS_BYTES = 8 * 2**20
"""Decoded at a time; each line has a cell in each column."""
_PLANNED_CELLS_BYTES = 512 * 2**20  # each colon may begin a column
_COPIES = 4  # of cells with their texts
_CELL_BYTES = 8

_CHANGED_KIND = re.compile(r"Column\(/(.*)\) changed from (\w+) to (\w+) in row (\d+)", re.DOTALL)
_KINDS = {
    "number": "a number", "string": "a text", "boolean": "true or false", "array": "a list", "object": "an object",
}  # fmt: skip
_SAME_KIND = "write it the same way in all rows"

_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_STRUCTURE = bytes(c for c in range(256) if c not in b'[]{}"')
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")


class Contents(NamedTuple):
    """Columns, rows and cut points."""

    schema: pa.Schema
    rows: int
    cuts: tuple[Cut, ...]


OnBlock = Callable[[bytes, Cut | None], None]
"""Receives blocks of whole rows, with the cut point before."""


def text_schema(text: TextStream, format_: TextFormat, types: texts.TextTypes) -> pa.Schema:
    """Returns columns from the first block; CSV is only peeked at."""
    if format_ == "csv":
        return _csv_schema(text.peek(2 * BLOCK_BYTES), types)  # a row that begins in the first block ends in the second
    lines = _Json(text, types)
    for block in lines.blocks():
        lines.add(block)
        if lines.schema.names:
            break
    lines.finish()
    return lines.schema


def read_through(text: TextStream, format_: TextFormat, types: texts.TextTypes, on_block: OnBlock) -> Contents:
    """Counts the rows of a text and merges its columns.

    CSV columns are known from the first block. A JSON field with values of several kinds raises `NotText`.
    """
    counting = _Csv(text, types) if format_ == "csv" else _Json(text, types)
    cuts, begin, uncut = [Cut(0, 0)], 0, 0
    for block in counting.blocks():
        cut = Cut(counting.rows, begin) if uncut >= CUT_BYTES and counting.rows > 0 else None
        if cut is not None:
            cuts.append(cut)
            uncut = 0
        on_block(block, cut)
        counting.add(block)
        begin, uncut = begin + len(block), uncut + len(block)
    counting.finish()
    return Contents(counting.schema, counting.rows, tuple(cuts))


class _Csv:
    def __init__(self, text: TextStream, types: texts.TextTypes) -> None:
        self.schema = _csv_schema(text.peek(2 * BLOCK_BYTES), types)
        self.rows = 0
        self._text, self._csv = text, types.form.csv
        self._lines = 0
        self._names = [str(number) for number in range(len(self.schema))]

    def blocks(self) -> Iterator[bytes]:
        return text_streams.row_blocks(self._text.blocks(), self._csv)

    def finish(self) -> None:
        """Does nothing: the columns are known from the beginning."""

    def add(self, block: bytes) -> None:
        if not self._names:
            return
        whole = text_streams.mended(block, self._csv, len(self._names))[0]
        try:
            self._lines += read_block(whole, self._names, pa.schema([("0", pa.binary())]), self._csv).num_rows
        except pa.ArrowInvalid as error:
            raise located(error, self._csv, self._lines) from None
        self.rows = max(0, self._lines - self._csv.header)


class _Json:
    def __init__(self, text: TextStream, types: texts.TextTypes) -> None:
        self.schema = pa.schema([])
        self.rows = 0
        self._text, self._types = text, types
        self._changed: set[texts.Path] = set()
        self._large: set[texts.Path] = set()

    def blocks(self) -> Iterator[bytes]:
        return text_streams.row_blocks(_objects(self._text))

    def add(self, block: bytes) -> None:
        cells_bytes = _PLANNED_CELLS_BYTES // (_COPIES if self._types.copied else 1)
        for part in _apart(block, cells_bytes):
            try:
                found, rows = self._read_fields(part)
            except pa.ArrowInvalid as error:
                raise _located_kind(error, self.rows) from None
            try:
                self.schema = texts.joined(self.schema, found)
            except pa.ArrowInvalid as error:
                raise NotText(f"from row {self.rows + 1} on, {error}; {_SAME_KIND}") from None
            self.rows += rows

    def finish(self) -> None:
        self.schema = texts.numbers_as_texts(self.schema, self._types)
        found = {path: kind for field in self.schema for path, kind in texts.numbers(field).items()}
        floats = {path for path, kind in found.items() if pa.types.is_floating(kind)}
        paths = self._changed | (floats & self._large) | {path for path in floats if _dotted(path) == self._types.key}
        paths = {path for path in paths if self._types.is_copied(_dotted(path))}
        self.schema = texts.json_declared(pa.schema([texts.marked(field, paths) for field in self.schema]), self._types)

    def _read_fields(self, part: bytes) -> tuple[pa.Schema, int]:
        table = read_lines(part, None)
        if table.num_columns > MAX_COLUMNS:
            raise NotText(f"its lines have more than {MAX_COLUMNS} fields")
        schema = texts.json_schema(table.schema)
        if self._types.copied and any(texts.numbers(field) for field in texts.numbers_as_texts(schema, self._types)):
            self._changed |= texts.changed(table, read_lines(texts.quoted(part), texts.texts_of(schema)))
            self._large |= texts.large(table)
        return schema, table.num_rows


def text_batches(
    text: TextStream, format_: TextFormat, types: pa.Schema, csv: Csv, first_row: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a text that begins with `first_row`, below its header.

    Rows of CSV with unbalanced quotes are null, in separate batches; some numbers of JSON lines stay as written.
    """
    if format_ == "csv":
        yield from _csv_batches(text, types, csv, first_row + csv.header)
        return
    for block in text_streams.row_blocks(_objects(text, _max_lines(len(types)))):
        yield from texts.read(read_lines, block, types).combine_chunks().to_batches()


def _csv_batches(text: TextStream, types: pa.Schema, csv: Csv, lines: int) -> Iterator[pa.RecordBatch]:
    """Reads rows behind `lines` lines, without blank lines."""
    names = csv_names(text.peek(BLOCK_BYTES), csv)
    if csv.header:
        text.read(len(text_streams.first_row(text.peek(BLOCK_BYTES), csv)))
    if text.peek(len(_BOM)) == _BOM:
        text.read(len(_BOM))
    for block in text_streams.row_blocks(text.blocks(), csv):
        whole, broken = text_streams.mended(block, csv, len(names))
        try:
            table = read_block(whole, names, types, csv)
        except pa.ArrowInvalid as error:
            raise located(error, csv, lines) from None
        lines += table.num_rows
        place = 0
        for first, rows in _runs(broken):
            yield from table.slice(place, first - place).combine_chunks().to_batches()
            nothing = [pa.nulls(rows, field.type) for field in types]
            yield pa.RecordBatch.from_arrays(nothing, schema=types.with_metadata({FAULT: text_streams.UNBALANCED}))
            place = first + rows
        yield from table.slice(place).combine_chunks().to_batches()


FAULT = b"fault"
"""Metadata of a batch of null rows: the reason."""


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], len(found)


def csv_names(head: bytes, csv: Csv) -> list[str]:
    """Returns a CSV file's column names from its beginning."""
    _check_header(head, csv)
    if csv.column_names:
        return list(csv.column_names)
    row = text_streams.first_row(head, csv).removeprefix(_BOM).strip(b"\r\n")
    if not row:
        return []
    if not text_streams.is_balanced(row, csv):
        raise NotText(f"its first row can't be read: {text_streams.UNBALANCED}")
    options = pyarrow.csv.ReadOptions(use_threads=False, autogenerate_column_names=not csv.header)
    try:
        rows = pa.BufferReader(row + b"\n" + row)  # a file without a second row counts as empty
        return list(pyarrow.csv.read_csv(rows, options, _parse_options(csv)).schema.names)
    except UnicodeDecodeError:
        raise NotText(f"its first row is no UTF-8 text; {_SET_ENCODING}") from None


def read_block(block: bytes, names: Sequence[str], types: pa.Schema | None, csv: Csv) -> pa.Table:
    """Reads CSV rows; without `types`, guesses them."""
    try:
        return pyarrow.csv.read_csv(
            pa.BufferReader(block),
            # Without threads, errors name the row.
            pyarrow.csv.ReadOptions(use_threads=False, block_size=2**31 - 1, column_names=list(names)),
            _parse_options(csv),
            pyarrow.csv.ConvertOptions(
                column_types=types,
                include_columns=types.names if types is not None else None,
                include_missing_columns=types is not None,  # planning has checked which file lacks one
                decimal_point=csv.decimal_point,
            ),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):
            return (types or pa.schema([(name, pa.null()) for name in names])).empty_table()
        raise


def header_of(text: TextStream, format_: TextFormat, csv: Csv) -> bytes:
    """Returns the bytes to put before rows from within a text."""
    return text_streams.first_row(text.peek(BLOCK_BYTES), csv) if format_ == "csv" and csv.header else b""


_SET_ENCODING = "set 'csv.encoding', such as to latin-1"
_CSV_ERROR = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:CSV parse error: )?Row #(?P<row>\d+): (?P<what>.*)", re.DOTALL
)


def located(error: pa.ArrowInvalid, csv: Csv, lines: int) -> pa.ArrowInvalid:
    """Adds the row's place in the file to a reader's CSV error."""
    found = _CSV_ERROR.fullmatch(str(error))
    if found is None:
        return error
    line = lines + int(found["row"])
    value = f"value {int(found['column']) + 1} of " if found["column"] else ""
    place = f"{value}row {line - csv.header}, in line {line} or, where values hold line ends, later"
    remedy = f"; {_SET_ENCODING}" if "invalid UTF8" in found["what"] else ""
    return pa.ArrowInvalid(f"{place}: {found['what']}{remedy}")


def _parse_options(csv: Csv) -> pyarrow.csv.ParseOptions:
    return pyarrow.csv.ParseOptions(
        delimiter=csv.delimiter, quote_char=csv.quote or False, newlines_in_values=bool(csv.quote)
    )


def _csv_schema(head: bytes, types: texts.TextTypes) -> pa.Schema:
    csv = types.form.csv
    names = csv_names(head[:BLOCK_BYTES], csv)
    if not names:
        return pa.schema([])
    head = head[len(text_streams.first_row(head, csv)) if csv.header else 0 :].removeprefix(_BOM)
    rows = text_streams.row_blocks([head[:BLOCK_BYTES], head[BLOCK_BYTES:]], csv)
    block = text_streams.mended(next(rows, b""), csv, len(names))[0]
    try:
        return texts.csv_schema(read_block(block, names, None, csv).schema, types)
    except pa.ArrowInvalid as error:
        raise located(error, csv, int(csv.header)) from None


def read_lines(part: bytes, schema: pa.Schema | None) -> pa.Table:
    """Reads whole JSON lines; without a schema, all fields."""
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=max(1, len(part)))
    if schema is None:
        return pyarrow.json.read_json(pa.BufferReader(part), options)
    try:
        parse = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        return pyarrow.json.read_json(pa.BufferReader(part), options, parse).select(schema.names)
    except pa.ArrowInvalid as error:
        if "Empty JSON" in str(error):
            return schema.empty_table()
        raise


def _located_kind(error: Exception, rows: int) -> Exception:
    """Returns the error of a field of several kinds with its row in the file; any other as it is."""
    found = _CHANGED_KIND.search(str(error))
    if found is None:
        return error
    path, first, other, row = found.groups()
    name = shown(path.replace("/[]", "").replace("/", "."))
    kinds = f"{_KINDS.get(first, first)} at first and {_KINDS.get(other, other)} in row {rows + int(row) + 1}"
    return NotText(f"field '{name}' is {kinds}; {_SAME_KIND}")


def _dotted(path: texts.Path) -> str:
    return ".".join(name for name in path if name)


def _apart(block: bytes, cells_bytes: int) -> Iterator[bytes]:
    lines = block.count(b"\n") + block.count(b"\r")
    middle = max(block.rfind(b"\n", 0, len(block) // 2), block.rfind(b"\r", 0, len(block) // 2)) + 1
    if lines <= _max_lines(block.count(b":"), cells_bytes) or not middle:
        yield block
        return
    yield from _apart(block[:middle], cells_bytes)
    yield from _apart(block[middle:], cells_bytes)


def _max_lines(columns: int, cells_bytes: int = _CELLS_BYTES) -> int:
    return max(1, cells_bytes // _CELL_BYTES // max(1, columns))


def _check_header(head: bytes, csv: Csv) -> None:
    """Refuses a header of too many columns, each of which takes kilobytes."""
    parts = head.split(csv.quote.encode())[::2] if csv.quote else [head]
    row = b"".join(parts).translate(_LINE_ENDS).lstrip(b"\n").partition(b"\n")[0]
    if row.count(csv.delimiter.encode()) >= MAX_COLUMNS:
        raise pa.ArrowInvalid(f"its first line names more than {MAX_COLUMNS} columns")


def _objects(text: TextStream, max_lines: int = 0) -> Iterator[bytes]:
    """Yields about `max_lines` (0 = all) at a time; refuses nulls and deep nesting, which crash pyarrow."""
    nesting, last = Nesting(), b"\n"
    for block in text.blocks():
        for data in _some_lines(block, max_lines):
            nesting.check(data)
            begins = data.translate(_LINE_ENDS, b" \t")
            if b"\nn" in begins or (last + begins[:1]) == b"\nn":
                raise ValueError("a line is null; each must be an object")
            last = begins[-1:] or last
            yield data


def _some_lines(data: bytes, most: int) -> Iterator[bytes]:
    if most and len(data) > 1 and data.count(b"\n") + data.count(b"\r") > most:
        yield from _some_lines(data[: len(data) // 2], most)
        yield from _some_lines(data[len(data) // 2 :], most)
    else:
        yield data


class Nesting:
    """Refuses deep nesting, which overflows a recursive parser's stack."""

    def __init__(self) -> None:
        self._depth = 0
        self._begins = b""  # an open string's quote, and backslashes that may belong to the next block

    def check(self, block: bytes) -> None:
        """Checks the next block; the parser finds other faults."""
        text = self._begins + block
        whole = text.rstrip(b"\\")
        rest = text[len(whole) :] if (len(text) - len(whole)) % 2 else b""
        if b"\\" in whole:  # without escapes each quote begins or ends a string
            whole = whole.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = whole.translate(_TO_SQUARE, _ALL_BUT_STRUCTURE).replace(b'""', b"")  # pairs cancel out
        parts = structure.split(b'"')
        self._begins = (b"" if len(parts) % 2 else b'"') + rest
        self._follow(b"".join(parts[::2]))

    def _follow(self, brackets: bytes) -> None:
        for _ in range(NESTING_LIMIT):  # each pass removes the innermost level
            left = brackets.replace(b"[]", b"")
            if len(left) == len(brackets):
                break
            brackets = left
        closed = brackets.count(b"]")
        self._depth = max(self._depth - closed, 0) + len(brackets) - closed
        if self._depth > NESTING_LIMIT or b"[]" in brackets:
            raise ValueError(f"a line is nested deeper than {NESTING_LIMIT} levels")
