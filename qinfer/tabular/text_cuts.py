r"""Finds the ends of rows in CSV and JSON lines, and mends quotes of CSV. Pure.

A row of CSV may have line ends in quotes, as pyarrow interprets them: a quote at the beginning of a value opens it, a
doubled one within stands for one, and after the closing quote they are plain characters.

Spark and PostgreSQL write `\"` for a quote within quotes, and double the escape character. Such text is rewritten with
doubled quotes. A value with unbalanced quotes, such as `"a"b`, is ambiguous, so its row is not read.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.tabular.spec import Csv

CUT_BYTES = 16 * 2**20

_TAIL_BYTES = 64 * 2**10


def row_blocks(
    blocks: Iterable[bytes], format_: Literal["csv", "jsonl"], csv: Csv, block_bytes: int
) -> Iterator[bytes]:
    """Splits a text into blocks of whole rows."""
    quote = csv.quote.encode() if format_ == "csv" else b""
    rest = b""
    for block in blocks:
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


UNBALANCED = (
    "the quotes of a value do not balance, so that the row could be read as several texts; set 'csv.escape' where a "
    "character such as \\ is before quotes within values, or 'csv.quote'"
)

_BACKSLASH = "\\"
_SPARK = re.compile(r"/part-\d{5}-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}[-.]c\d{3}\.[^/]*\Z")
_PAIR = re.compile(rb"\\.")
_DOUBLED = re.compile(rb'[^,;\t|\r\n"]""|""[^,;\t|\r\n"]')


def unescaped(rows: bytes, csv: Csv) -> bytes:
    """Replaces escaped quotes by doubled quotes."""
    quote, escape = csv.quote.encode(), csv.escape.encode()
    if escape not in rows:
        return rows

    def plain(value: "re.Match[bytes]") -> bytes:
        text = value[0]
        return (
            _escapes(csv).sub(lambda pair: quote * 2 if pair[1] == quote else pair[1], text) if escape in text else text
        )

    return _quoted(csv).sub(plain, rows)


def guessed_escape(url: str, head: bytes, csv: Csv, *, is_whole: bool) -> str:
    """Guesses the escape character of a CSV file from its first rows.

    It is a backslash if rows balance only with it, or if they do and a file named like Spark's has no doubled quotes.
    """
    if csv.escape or csv.quote in ("", _BACKSLASH) or _BACKSLASH in (csv.delimiter, csv.decimal_point):
        return ""
    escaping = msgspec.structs.replace(csv, escape=_BACKSLASH)
    rows = _whole_rows(head, escaping, is_whole=is_whole)
    if not is_balanced(rows, escaping):
        return ""
    if _SPARK.search(url):
        return "" if _DOUBLED.search(_PAIR.sub(b"", rows)) else _BACKSLASH
    return "" if is_balanced(_whole_rows(head, csv, is_whole=is_whole), csv) else _BACKSLASH


def is_balanced(rows: bytes, csv: Csv) -> bool:
    """Returns whether all quotes balance."""
    return not csv.quote or not any(is_broken for _, is_broken in _rows_of(rows, csv))


def mended(rows: bytes, csv: Csv, columns: int) -> tuple[bytes, list[int]]:
    """Empties rows with unbalanced quotes; also returns their numbers."""
    if not csv.quote or _is_plainly_balanced(rows, csv):
        return rows, []
    empty = csv.delimiter.encode().join([csv.quote.encode() * 2] * columns) + b"\n"
    found = list(_rows_of(rows, csv))
    broken = [number for number, (_, is_broken) in enumerate(found) if is_broken]
    return (b"".join(empty if is_broken else row for row, is_broken in found), broken) if broken else (rows, [])


def _rows_of(text: bytes, csv: Csv) -> Iterator[tuple[bytes, bool]]:
    """Yields rows without blank lines; an unterminated row is one line."""
    row, strict = row_pattern(csv), _strict(csv)
    place = 0
    while place < len(text):
        match = row.match(text, place) or _LINE.match(text, place)
        assert match is not None
        found = match[0]
        place = match.end()
        if found.strip(b"\r\n"):
            yield found, strict.fullmatch(found) is None


_LINE = re.compile(rb"[\r\n]*[^\r\n]*(?:\r\n|\n|\r|\Z)")


def _is_plainly_balanced(rows: bytes, csv: Csv) -> bool:
    """Detects most balanced texts fast: each quote begins or ends a value, or is next to another."""
    data = np.frombuffer(rows, np.uint8)
    quotes = np.flatnonzero(data == ord(csv.quote))
    if len(quotes) % 2:
        return False
    ends = f"{csv.delimiter}{csv.quote}\r\n".encode()
    before, after = quotes[::2] - 1, quotes[1::2] + 1
    around = data[before[before >= 0]].tobytes() + data[after[after < len(data)]].tobytes()
    return not around.translate(None, ends)


def _whole_rows(head: bytes, csv: Csv, *, is_whole: bool) -> bytes:
    if is_whole:
        return head
    return next(row_blocks([head], "csv", csv, len(head) + 1), b"")


@lru_cache
def _strict(csv: Csv) -> "re.Pattern[bytes]":
    """Matches rows in which only a delimiter or the row's end follows a closing quote."""
    quote, delimiter, quoted = re.escape(csv.quote.encode()), re.escape(csv.delimiter.encode()), quoted_value(csv)
    value = rb"(?>%s|(?!%s)[^%s\r\n]*+)" % (quoted, quote, delimiter)
    return re.compile(rb"[\r\n]*+%s(?:%s%s)*+[\r\n]*" % (value, delimiter, value))


@lru_cache
def _quoted(csv: Csv) -> "re.Pattern[bytes]":
    return re.compile(rb"(?:^|(?<=[%s\r\n]))%s" % (re.escape(csv.delimiter.encode()), quoted_value(csv)))


@lru_cache
def _escapes(csv: Csv) -> "re.Pattern[bytes]":
    quote, escape = re.escape(csv.quote.encode()), re.escape(csv.escape.encode())
    return re.compile(rb"%s([%s%s])" % (escape, quote, escape))
