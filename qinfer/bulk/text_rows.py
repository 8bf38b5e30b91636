"""CSV and JSON lines: their columns, their rows, and how many there are. Options are the same wherever they are read.

The first line of a CSV file names its columns; a value in quotes may hold line ends. What is in the first block of a
file decides the types of its columns. Blank lines are no rows.
"""

from collections.abc import Sequence
from typing import BinaryIO, Literal

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from qinfer.bulk.json_nesting import Nesting

TextFormat = Literal["csv", "jsonl"]

BLOCK_BYTES = 4 * 2**20
"""A row may be as long as this."""

MAX_COLUMNS = 10_000
"""A CSV file may have so many."""

_LINE_ENDS = bytes.maketrans(b"\r", b"\n")


def text_schema(file: BinaryIO, format_: TextFormat) -> pa.Schema:
    """Returns a file's columns; an empty file has none.

    Raises:
        pyarrow.ArrowInvalid: It is not what it should be.
    """
    reader = open_text(file, format_)
    return reader.schema if reader is not None else pa.schema([])


def count_rows(file: BinaryIO, format_: TextFormat) -> int:
    """Reads a file to its end, and returns how many rows it has; their values are not looked at.

    Raises:
        pyarrow.ArrowInvalid: It is not what it should be.
    """
    if format_ == "csv":
        reader = open_text(file, "csv", types=_first_column(file))
    else:
        reader = open_text(file, "jsonl", columns=())
    return sum(batch.num_rows for batch in reader) if reader is not None else 0


def open_text(
    file: BinaryIO, format_: TextFormat, *, types: pa.Schema | None = None, columns: Sequence[str] | None = None
) -> pa.RecordBatchReader | None:
    """Reads a file's rows as they are asked for.

    Args:
        file: The file, at its beginning.
        format_: What it is.
        types: The types of columns where they are known; the others' follow from the first block.
        columns: The columns that are wanted; `None` = those of `types`, or all without.

    Returns:
        The reader; `None` = the file is empty.

    Raises:
        pyarrow.ArrowInvalid: It is not what it should be; reading raises it, too.
    """
    wanted = list(columns) if columns is not None else list(types.names) if types is not None else None
    try:
        if format_ == "csv":
            _check_header(file)
            return pyarrow.csv.open_csv(
                file,
                read_options=pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES),
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(column_types=types, include_columns=wanted),
            )
        known = types if types is not None else pa.schema([]) if wanted == [] else None
        return pyarrow.json.open_json(
            _Objects(file),
            read_options=pyarrow.json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=known, unexpected_field_behavior="ignore" if known is not None else "infer"
            ),
        )
    except pa.ArrowInvalid as error:
        if str(error).startswith(("Empty CSV", "Empty JSON")):
            return None
        raise


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
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._last = b"\n"
        self._nesting = Nesting()

    def read(self, size: int = -1) -> bytes:
        """Reads what is next.

        Raises:
            ValueError: A line begins with null, or is nested too deep.
        """
        data = self._file.read(size)
        self._nesting.check(data)
        begins = data.translate(_LINE_ENDS, b" \t")
        if b"\nn" in begins or (self._last + begins[:1]) == b"\nn":
            raise ValueError("a line is null; each must be an object")
        self._last = begins[-1:] or self._last
        return data

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is not."""
        return False

    def close(self) -> None:
        """Leaves the file to who opened it."""


def _first_column(file: BinaryIO) -> pa.Schema | None:
    """Returns the first column as bytes, so that counting converts nothing else; the file is at its beginning again."""
    names = text_schema(file, "csv").names
    file.seek(0)
    return pa.schema([(names[0], pa.binary())]) if names else None
