"""Finds the ends of rows in CSV and JSON lines. Pure.

A row of CSV may have line ends in quotes, as pyarrow interprets them: a quote at the beginning of a value opens it, a
doubled one within stands for one, and after the closing quote they are plain characters.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa

from qinfer.tabular.spec import Csv

CUT_BYTES = 16 * 2**20

_TAIL_BYTES = 64 * 2**10


class Readable(Protocol):
    """Bytes that are read in order."""

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` bytes."""
        ...


class ReadableFile(Readable, Protocol):
    """A file of bytes, or a view of one."""

    def close(self) -> None:
        """Closes the file."""
        ...


def row_blocks(text: Readable, format_: Literal["csv", "jsonl"], csv: Csv, block_bytes: int) -> Iterator[bytes]:
    """Splits a text into blocks of whole rows."""
    quote = csv.quote.encode() if format_ == "csv" else b""
    rest = b""
    while block := text.read(block_bytes):
        rows = rest + block
        if not (quote and quote in rows):
            end = _last_end(rows)
        else:
            end = _end_of(_rows(csv).match(rows)) if csv.escape else _quoted_end(rows, csv)
        if not end and len(rows) > block_bytes:
            raise pa.ArrowInvalid(f"a line is longer than {block_bytes} bytes, or a quote in it does not end")
        if end:
            yield rows[:end]
        rest = rows[end:]
    if rest:
        yield rest


def first_row(text: bytes, csv: Csv) -> bytes:
    """Returns a CSV file's first row, with blank lines before it."""
    return text[: _end_of(row_pattern(csv).match(text))]


def _last_end(text: bytes) -> int:
    """Returns the end of the last line; a final carriage return may be half of a line end."""
    return max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1


def _quoted_end(text: bytes, csv: Csv) -> int:
    data = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(data == ord(csv.quote))
    opening = quotes[::2]
    before = data[opening[1 if opening[0] == 0 else 0 :] - 1]
    if before.tobytes().translate(None, f"{csv.delimiter}{csv.quote}\r\n".encode()):
        return _end_of(_rows(csv).match(text))  # quotes within values are plain
    for begin in (max(0, len(text) - _TAIL_BYTES), 0):  # from the end, which suffices for short rows
        tail = data[begin : len(text) - text.endswith(b"\r")]
        ends = np.flatnonzero((tail == ord("\n")) | (tail == ord("\r"))) + begin
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
        if len(ends):
            return int(ends[-1]) + 1
    return 0


def _end_of(match: "re.Match[bytes] | None") -> int:
    return match.end() if match else 0


@lru_cache
def _rows(csv: Csv) -> "re.Pattern[bytes]":
    return re.compile(rb"(?:%s(?:\r\n|\n|\r(?!\Z)))*+" % _values(csv))


@lru_cache
def row_pattern(csv: Csv) -> "re.Pattern[bytes]":
    """Returns the grammar of a row after blank lines."""
    return re.compile(rb"[\r\n]*+%s(?:\r\n|\n|\r|\Z)" % _values(csv))


def quoted_value(csv: Csv) -> bytes:
    """Returns the grammar of a quoted value."""
    quote, escape = re.escape(csv.quote.encode()), re.escape(csv.escape.encode())
    if escape:
        return rb"(?s:%(q)s(?:[^%(q)s%(e)s]|%(e)s.|%(q)s%(q)s)*+%(q)s)" % {b"q": quote, b"e": escape}
    return rb"%(q)s[^%(q)s]*+(?:%(q)s%(q)s[^%(q)s]*+)*+%(q)s" % {b"q": quote}


def _values(csv: Csv) -> bytes:
    end = re.escape(csv.delimiter.encode()) + rb"\r\n"
    if not csv.quote:
        return rb"[^\r\n]*+"
    value = rb"(?>(?:%s|(?!%s))[^%s]*+)" % (quoted_value(csv), re.escape(csv.quote.encode()), end)
    return rb"%s(?:%s%s)*+" % (value, re.escape(csv.delimiter.encode()), value)
