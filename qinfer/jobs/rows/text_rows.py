"""CSV and JSON lines: their columns, their rows, and how many there are. Options are the same wherever they are read.

The first line of a CSV file names its columns; a value in quotes may hold line ends. Blank lines are no rows. Which
types columns get is decided in `text_types`.

A reader of pyarrow reads ahead in a thread of its own, for as long as it likes: a file that was given to one is never
used again, not even after the reader was closed.
"""

from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from qinfer.jobs.rows.text_types import TextTypes, csv_schema, joined, json_schema, loses

TextFormat = Literal["csv", "jsonl"]

BLOCK_BYTES = 4 * 2**20
"""A row may be as long as this."""

MAX_COLUMNS = 10_000
"""A CSV file may have so many, and JSON lines so many fields."""

NESTING_LIMIT = 100
"""What is nested as deep passes, and twice as deep is refused; between them it depends on where blocks are cut."""

_CELLS_BYTES = 8 * 2**20
"""Bytes that the cells of some JSON lines may take: each line has one of each column, whatever it says."""
_PLANNED_CELLS_BYTES = 512 * 2**20  # where columns are not known yet, and a colon may be one
_CELL_BYTES = 8

_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_STRUCTURE = bytes(c for c in range(256) if c not in b'[]{}"')
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")


class Contents(NamedTuple):
    """Schema and row count of a text file, as planning needs them.

    Attributes:
        schema: Its columns; an empty file has none.
        rows: Its rows.
    """

    schema: pa.Schema
    rows: int


def text_schema(file: BinaryIO, format_: TextFormat, types: TextTypes) -> pa.Schema:
    """Returns a file's columns, as its first block shows them; an empty file has none.

    Args:
        file: The file, at its beginning; it is read from, and no reader has it afterwards.
        format_: What it is.
        types: What the job needs of its columns.

    Raises:
        pyarrow.ArrowInvalid: It is not what it should be.
    """
    if format_ == "csv":
        return _csv_schema(file.read(2 * BLOCK_BYTES), types)  # a row that begins in the first block ends in the second
    return next((schema for schema, _ in _json_parts(file) if schema.names), pa.schema([]))


def read_through(file: BinaryIO, format_: TextFormat, types: TextTypes) -> Contents:
    """Reads a file to its end: how many rows it has, and its columns; JSON lines' are those of all lines.

    The values of CSV are not looked at beyond the first block.

    Args:
        file: The file, at its beginning; a reader has it afterwards.
        format_: What it is.
        types: What the job needs of its columns.

    Raises:
        pyarrow.ArrowInvalid: It is not what it should be.
    """
    if format_ == "csv":
        schema = text_schema(file, "csv", types)
        file.seek(0)
        only = pa.schema([(schema.names[0], pa.binary())]) if schema.names else None  # converts nothing else
        reader = open_text(file, "csv", only)
        return Contents(schema, sum(batch.num_rows for batch in reader) if reader is not None else 0)
    schema, rows = pa.schema([]), 0
    for found, count in _json_parts(file):
        schema, rows = joined(schema, found), rows + count
    return Contents(schema, rows)


def open_text(file: BinaryIO, format_: TextFormat, types: pa.Schema | None) -> pa.RecordBatchReader | None:
    """Reads a file's rows as they are asked for.

    Args:
        file: The file, at its beginning; the reader has it from here on.
        format_: What it is.
        types: The columns that are wanted, and their types; `None` = all columns of a CSV file, in types that the first
            block looks like.

    Returns:
        The reader; `None` = the file is empty.

    Raises:
        pyarrow.ArrowInvalid: It is not what it should be; reading raises it, too.
    """
    try:
        if format_ == "csv":
            _check_header(file)
            return pyarrow.csv.open_csv(
                file,
                read_options=pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=types, include_columns=types.names if types is not None else None
                ),
            )
        return pyarrow.json.open_json(
            _Objects(file, max_lines=_max_lines(len(types) if types is not None else 1)),
            read_options=pyarrow.json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=types, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid as error:
        if str(error).startswith(("Empty CSV", "Empty JSON")):
            return None
        raise


def _csv_schema(head: bytes, types: TextTypes) -> pa.Schema:
    reader = open_text(pa.BufferReader(head), "csv", None)
    if reader is None:
        return pa.schema([])
    schema = csv_schema(reader.schema, types)
    numbers = [
        name
        for name, kind in zip(schema.names, schema.types, strict=True)
        if types.wanted.get(name) is None and (pa.types.is_integer(kind) or pa.types.is_floating(kind))
    ]
    return _with_text(schema, head, numbers) if numbers else schema


def _with_text(schema: pa.Schema, head: bytes, numbers: list[str]) -> pa.Schema:
    """Returns the columns of a CSV file with text for those that numbers would lose something of."""
    reader = open_text(pa.BufferReader(head), "csv", pa.schema([(name, pa.string()) for name in numbers]))
    assert reader is not None
    first = next(iter(reader), None)
    for name, values in zip(numbers, first.columns if first is not None else (), strict=False):
        index = schema.names.index(name)
        if loses(values, schema.field(index).type):
            schema = schema.set(index, pa.field(name, pa.string()))
    return schema


def _json_parts(file: BinaryIO) -> Iterator[tuple[pa.Schema, int]]:
    """Reads a file of JSON lines by blocks: the fields of each, and how many rows it has."""
    for block in _lines(_Objects(file)):
        for part in _apart(block):
            table = pyarrow.json.read_json(
                pa.BufferReader(part), pyarrow.json.ReadOptions(use_threads=False, block_size=len(part))
            )
            if table.num_columns > MAX_COLUMNS:
                raise pa.ArrowInvalid(f"its lines have more than {MAX_COLUMNS} fields")
            yield json_schema(table.schema), table.num_rows


def _apart(block: bytes) -> Iterator[bytes]:
    """Cuts a block of whole lines into parts with few cells, whatever fields the lines have."""
    lines = block.count(b"\n") + block.count(b"\r")
    middle = max(block.rfind(b"\n", 0, len(block) // 2), block.rfind(b"\r", 0, len(block) // 2)) + 1
    if lines <= _max_lines(block.count(b":"), _PLANNED_CELLS_BYTES) or not middle:
        yield block
        return
    yield from _apart(block[:middle])
    yield from _apart(block[middle:])


def _max_lines(columns: int, cells_bytes: int = _CELLS_BYTES) -> int:
    """Returns how many lines may be decoded at a time that have so many columns."""
    return max(1, cells_bytes // _CELL_BYTES // max(1, columns))


def _lines(file: "_Objects") -> Iterator[bytes]:
    """Reads a file by blocks of whole lines.

    Raises:
        pyarrow.ArrowInvalid: A line is longer than may be.
    """
    rest = b""
    while block := file.read(BLOCK_BYTES):
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if not end and len(block) == BLOCK_BYTES:
            raise pa.ArrowInvalid(f"a line is longer than {BLOCK_BYTES} bytes")
        if end:
            yield rest + block[:end]
            rest = b""
        rest += block[end:]
    if rest:
        yield rest


def _check_header(file: BinaryIO) -> None:
    """Looks at the first line of a CSV file, which is at its beginning before and after.

    Raises:
        pyarrow.ArrowInvalid: It names too many columns: each takes kilobytes to be read.
    """
    block = file.read(BLOCK_BYTES)
    file.seek(0)
    header = b"".join(block.split(b'"')[::2]).translate(_LINE_ENDS).lstrip(b"\n").partition(b"\n")[0]
    if header.count(b",") >= MAX_COLUMNS:
        raise pa.ArrowInvalid(f"its first line names more than {MAX_COLUMNS} columns")


class _Objects:
    """A file of JSON lines without what pyarrow crashes at: a block of nothing but null, and deep nesting.

    Args:
        file: The file.
        max_lines: About so many lines are given out at a time; 0 = as many as there are.
    """

    closed = False

    def __init__(self, file: BinaryIO, *, max_lines: int = 0) -> None:
        self._file = file
        self._max_lines = max_lines
        self._rest = b""
        self._last = b"\n"
        self._nesting = Nesting()

    def read(self, size: int = -1) -> bytes:
        """Reads what is next.

        Raises:
            ValueError: A line begins with null, or is nested too deep.
        """
        data = self._some_lines(self._rest or self._file.read(size))
        self._nesting.check(data)
        begins = data.translate(_LINE_ENDS, b" \t")
        if b"\nn" in begins or (self._last + begins[:1]) == b"\nn":
            raise ValueError("a line is null; each must be an object")
        self._last = begins[-1:] or self._last
        return data

    def _some_lines(self, data: bytes) -> bytes:
        """Returns the first of some lines, and keeps the rest for later where they are too many."""
        self._rest = b""
        while self._max_lines and len(data) > 1 and data.count(b"\n") + data.count(b"\r") > self._max_lines:
            half = len(data) // 2
            data, self._rest = data[:half], data[half:] + self._rest
        return data

    def readable(self) -> bool:
        """Returns true: the file can be read."""
        return True

    def seekable(self) -> bool:
        """Returns false: the file is read from front to back."""
        return False

    def close(self) -> None:
        """Leaves the file to who opened it."""


class Nesting:
    """Follows the nesting of JSON lines through their blocks, wherever they are cut, before a parser recurses into it.

    A parser that recurses ends the process when nothing stops it: each level takes stack.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._begins = b""  # a quote within a string, and backslashes that may belong to what comes

    def check(self, block: bytes) -> None:
        """Takes the next block; what is no JSON may pass, for the parser stops there.

        Raises:
            ValueError: The text is nested too deep.
        """
        text = self._begins + block
        whole = text.rstrip(b"\\")
        rest = text[len(whole) :] if (len(text) - len(whole)) % 2 else b""
        if b"\\" in whole:  # without escapes each quote begins or ends a string
            whole = whole.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = whole.translate(_TO_SQUARE, _ALL_BUT_STRUCTURE).replace(b'""', b"")  # leaves all else in or out
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
