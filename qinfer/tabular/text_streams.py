r"""CSV and JSON lines as streams of UTF-8 text, from any compression and encoding, and the ends of their rows.

Decoding can't begin in the middle. So planning decodes the text once, and keeps pieces of it for the shards
(docs/explanation/decisions/0017-decoded-text-is-kept.md).

A row of CSV may have line ends in quotes, as pyarrow interprets them: a quote at the beginning of a value opens it, a
doubled one within stands for one, and after the closing quote they are plain characters.

Spark and PostgreSQL write `\"` for a quote within quotes, and double the escape character. Such text is rewritten with
doubled quotes. A value with unbalanced quotes, such as `"a"b`, is ambiguous, so its row is not read.
"""

import codecs
import hashlib
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.errors import StoreNotFound
from qinfer.storage.store import StoreFor
from qinfer.tabular.spec import UTF_8, Csv, Cut, InputCompression, InputFormat

TextFormat = Literal["csv", "jsonl"]

BLOCK_BYTES = 4 * 2**20

MAX_DECODED_BYTES = 64 * 2**30

KEPT_FOLDER = "_input"
"""Folder of kept pieces."""

COMPRESSED_EXTENSIONS: Mapping[str, InputCompression] = {
    "gz": "gzip", "gzip": "gzip", "zst": "zstd", "zstd": "zstd", "bz2": "bz2",
}  # fmt: skip

_READ_BYTES = 256 * 1024
_MOST_PIECE_BYTES = 2**30  # more than any piece that planning writes
_MAGIC: Mapping[str, bytes] = {
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "bz2": rb"BZh[1-9]",
}
_OTHERS: Mapping[bytes, str] = {
    **{magic: f"is {name}; set 'input_compression' to {name}" for name, magic in _MAGIC.items()},
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff": "is UTF-16 or UTF-32 text; convert it to UTF-8, as by iconv -f UTF-16 -t UTF-8",
    rb"PK\x03\x04": "is a zip archive, or a file of Excel; unpack it, or export it as CSV",
    rb"PAR1[\x00-\x1f]": "is Parquet; set 'input_format' to parquet",
    rb"ARROW1\x00\x00": "is an Arrow file; set 'input_format' to arrow",
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a[^\n]*\x00": "is an image; leave it out of 'inputs'",
    rb"%PDF-": "is a PDF document; leave it out of 'inputs'",
    rb"SQLite format 3\x00": "is a database of SQLite; export its table as CSV",
}
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")


class NotText(ValueError):
    """A file is of another kind, or too large; the message calls it `it`."""


class InputForm(NamedTuple):
    """Form of input files; empty = by extension."""

    format: InputFormat = ""
    compression: InputCompression = ""
    csv: Csv = Csv()
    kept_url: str = ""

    def compression_of(self, url: str) -> str:
        """Returns the compression of a file, or `none`."""
        return self.compression or COMPRESSED_EXTENSIONS.get(url.rpartition(".")[2].lower(), "none")

    def is_decoded(self, url: str, format_: TextFormat) -> bool:
        """Returns whether a file is not plain UTF-8 with doubled quotes."""
        is_other = format_ == "csv" and (self.csv.encoding != UTF_8 or bool(self.csv.escape))
        return self.compression_of(url) != "none" or is_other


PLAIN = InputForm()


class TextStream:
    """Text that can't seek: `head`, then `blocks`; `close` closes the file that they are read from."""

    closed = False

    def __init__(self, blocks: Iterator[bytes], close: Callable[[], None], head: bytes = b"") -> None:
        self._blocks, self.close, self._head = blocks, close, head
        self._at = 0

    @classmethod
    def of_file(cls, file: BinaryIO | Any, head: bytes = b"") -> Self:
        """Returns the text of a file, which it closes."""
        return cls(iter(partial(file.read, BLOCK_BYTES), b""), file.close, head)

    def peek(self, size: int) -> bytes:
        """Returns up to `size` next bytes, which the next read returns again."""
        while len(self._head) - self._at < size and (more := next(self._blocks, b"")):
            self._head, self._at = self._head[self._at :] + more, 0
        return self._head[self._at : self._at + size]

    def read(self, size: int) -> bytes:
        """Reads up to `size` bytes."""
        data = self.peek(size)
        self._at += len(data)
        return data

    def blocks(self) -> Iterator[bytes]:
        """Yields the text in blocks of one size."""
        return iter(partial(self.read, BLOCK_BYTES), b"")

    def readable(self) -> bool:
        """Returns true."""
        return True

    def seekable(self) -> bool:
        """Returns false."""
        return False


def open_stream(file: BinaryIO | Any, url: str, format_: TextFormat, form: InputForm) -> TextStream:
    """Returns a file's decoded text; it closes the file."""
    text = raw = TextStream.of_file(file)
    if (compression := form.compression_of(url)) != "none":
        if (head := raw.peek(16)) and not re.match(_MAGIC[compression], head):
            raise NotText(f"it is not {compression}, as its extension or 'input_compression' says; set the latter")
        text = TextStream(_bounded(_unpacked(raw, compression)), file.close)
    if format_ == "csv" and form.csv.encoding != UTF_8:
        text = TextStream(_recoded(text.blocks(), form.csv.encoding), file.close)
    if format_ == "csv" and form.csv.escape:
        rows = row_blocks(text.blocks(), form.csv)
        text = TextStream((unescaped(some, form.csv) for some in rows), file.close)
    return text


def check_text(stream: TextStream, format_: TextFormat) -> None:
    """Raises `NotText` if a text begins like another kind of file."""
    head = stream.peek(64)
    for magic, what in _OTHERS.items():
        if re.match(magic, head):
            raise NotText(f"it {what}")
    if format_ == "jsonl" and _ARRAY.match(head):
        raise NotText(
            "it is a JSON array; JSON lines have one object a line: make them by jq -c '.[]' array.json > lines.jsonl"
        )


def _bounded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    size_bytes = 0
    for block in blocks:
        size_bytes += len(block)
        if size_bytes > MAX_DECODED_BYTES:
            raise NotText(f"it has more than {MAX_DECODED_BYTES} bytes when it is decompressed; split it")
        yield block


def _unpacked(raw: TextStream, compression: str) -> Iterator[bytes]:
    if compression == "gzip":
        return _gunzipped(raw)
    stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
    return iter(partial(stream.read, BLOCK_BYTES), b"")


def _gunzipped(raw: TextStream) -> Iterator[bytes]:
    """Is like the command: members follow one another, and zeros after the last are padding."""
    data = b""
    while data := data.lstrip(b"\0") or raw.read(_READ_BYTES):
        if not (data := data.lstrip(b"\0")):
            continue
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while not member.eof:
            if not (data := data or raw.read(_READ_BYTES)):
                raise ValueError("Truncated compressed stream")
            try:
                found = member.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                raise ValueError(f"it is no gzip: {error}") from None
            data = member.unconsumed_tail or member.unused_data
            if found:
                yield found


def _recoded(blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in chain(blocks, [b""]):
        try:
            text = decoder.decode(block, final=not block).encode()
        except UnicodeError as error:
            raise NotText(f"it is no {encoding} text: {error}; set 'csv.encoding' to what it is") from None
        if text:
            yield text


def _piece_url(folder: str, url: str, etag: str, begin: int) -> str:
    return f"{folder}/{hashlib.sha256(f'{url} {etag}'.encode()).hexdigest()[:24]}-{begin:015d}.zst"


class PieceKeeper:
    """Stores compressed pieces of a text, from its first cut point on."""

    def __init__(self, store_for: StoreFor, folder: str, url: str, etag: str) -> None:
        self._store_for = store_for
        self._text = (folder, url, etag)
        self._url = ""
        self._sink = pa.BufferOutputStream()
        self._piece: Any = None

    def add(self, rows: bytes, cut: Cut | None) -> None:
        """Adds the next block; a cut point begins a new piece."""
        if cut is not None:
            self.finish()
            self._url, self._sink = _piece_url(*self._text, cut.begin), pa.BufferOutputStream()
            self._piece = pa.CompressedOutputStream(self._sink, "zstd")
        if self._piece is not None:
            self._piece.write(rows)

    def finish(self) -> None:
        """Stores the open piece, unless it exists."""
        if self._piece is not None:
            self._piece.close()
            self._piece = None
            self._store_for(self._url).put_if_absent(self._sink.getvalue().to_pybytes(), self._url)


def kept_text(store_for: StoreFor, folder: str, url: str, etag: str, begin: int) -> Generator[bytes, None, None]:
    """Yields a file's text from the piece at `begin`, until a piece is missing: the caller counts the rows."""
    while True:
        piece = _piece_url(folder, url, etag, begin)
        try:
            data = store_for(piece).read(piece, _MOST_PIECE_BYTES)
        except StoreNotFound:
            return
        stream = pa.CompressedInputStream(pa.BufferReader(data), "zstd")
        while block := stream.read(BLOCK_BYTES):
            begin += len(block)
            yield block


_TAIL_BYTES = 64 * 2**10


def row_blocks(blocks: Iterable[bytes], csv: Csv | None = None, most: int = 0) -> Iterator[bytes]:
    """Splits CSV, or JSON lines without a form, into blocks of whole rows within `most` bytes (0 = `BLOCK_BYTES`)."""
    quote, most = csv.quote.encode() if csv else b"", most or BLOCK_BYTES
    rest = b""
    for block in blocks:
        rows = rest + block
        if not (csv and quote and quote in rows):
            end = _last_end(rows)
        else:
            end = _end_of(_rows(csv).match(rows)) if csv.escape else _quoted_end(rows, csv)
        if not end and len(rows) > most:
            raise pa.ArrowInvalid(f"a line is longer than {most} bytes, or a quote in it does not end")
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
    return next(row_blocks([head], csv, len(head) + 1), b"")


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
