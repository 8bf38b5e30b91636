"""CSV and JSON lines as streams of UTF-8 text, from any compression and encoding.

Decoding can't begin in the middle. So planning decodes the text once, and keeps pieces of it for the shards
(docs/explanation/decisions/0017-decoded-text-is-kept.md).
"""

import codecs
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple

import pyarrow as pa

from qinfer.errors import StoreNotFound
from qinfer.storage.store import Store
from qinfer.tabular.spec import UTF_8, Csv, Cut, InputCompression, InputFormat
from qinfer.tabular.text_cuts import ReadableFile, UnescapedText

TextFormat = Literal["csv", "jsonl"]

BLOCK_BYTES = 4 * 2**20

MAX_DECODED_BYTES = 64 * 2**30

BOM = codecs.BOM_UTF8

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


class ForwardOnly:
    """Methods of files that can't seek."""

    closed = False

    def readable(self) -> bool:
        """Returns true."""
        return True

    def seekable(self) -> bool:
        """Returns false."""
        return False


class TextStream(ForwardOnly):
    """Text that can't seek: `head`, then `file`, which it closes."""

    def __init__(self, file: ReadableFile, head: bytes = b"") -> None:
        self._file = file
        self._head = head

    def peek(self, size: int) -> bytes:
        """Returns up to `size` next bytes, which the next read returns again."""
        while len(self._head) < size and (more := self._file.read(size - len(self._head))):
            self._head += more
        return self._head[:size]

    def read(self, size: int) -> bytes:
        """Reads up to `size` bytes."""
        data = self.peek(size)
        self._head = self._head[size:]
        return data

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def open_stream(file: BinaryIO | Any, url: str, format_: TextFormat, form: InputForm) -> TextStream:
    """Returns a file's decoded text; it closes the file."""
    raw = TextStream(file)
    compression = form.compression_of(url)
    encoding = form.csv.encoding if format_ == "csv" else UTF_8

    def utf_8(text: ReadableFile) -> TextStream:
        recoded = text if encoding == UTF_8 else _RecodedStream(text, encoding)
        is_escaped = format_ == "csv" and form.csv.escape
        return TextStream(UnescapedText(recoded, form.csv, BLOCK_BYTES) if is_escaped else recoded)

    if compression == "none":
        return utf_8(raw) if form.is_decoded(url, format_) else raw
    if (head := raw.peek(16)) and not re.match(_MAGIC[compression], head):
        raise NotText(f"it is not {compression}, as its extension or 'input_compression' says; set the latter")
    unpacked = (
        _Gzip(raw) if compression == "gzip" else pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
    )
    plain = _BoundedStream(unpacked, raw)
    return utf_8(plain)


def check_text(stream: TextStream, format_: TextFormat) -> None:
    """Raises `NotText` if a text begins like another kind of file."""
    head = stream.peek(64)
    _check_kind(head)
    if format_ == "jsonl" and _ARRAY.match(head):
        raise NotText(
            "it is a JSON array; JSON lines have one object a line: make them by jq -c '.[]' array.json > lines.jsonl"
        )


def _check_kind(head: bytes) -> None:
    for magic, what in _OTHERS.items():
        if re.match(magic, head):
            raise NotText(f"it {what}")


class _BoundedStream:
    def __init__(self, file: ReadableFile, raw: TextStream) -> None:
        self._file, self._raw = file, raw
        self._bytes = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._bytes += len(data)
        if self._bytes > MAX_DECODED_BYTES:
            raise NotText(f"it has more than {MAX_DECODED_BYTES} bytes when it is decompressed; split it")
        return data

    def close(self) -> None:
        self._file.close()
        self._raw.close()


class _Gzip:
    """Like the command: members follow one another, and zeros after the last are padding."""

    def __init__(self, raw: TextStream) -> None:
        self._raw = raw
        self._member: Any = None
        self._data = b""

    def read(self, size: int) -> bytes:
        while self._member is not None or self._begin_member():
            self._data = self._data or self._raw.read(_READ_BYTES)
            if not self._data:
                raise ValueError("Truncated compressed stream")
            try:
                found: bytes = self._member.decompress(self._data, size)
            except zlib.error as error:
                raise ValueError(f"it is no gzip: {error}") from None
            self._data = self._member.unconsumed_tail or self._member.unused_data
            self._member = None if self._member.eof else self._member
            if found:
                return found
        return b""

    def _begin_member(self) -> bool:
        while not (data := self._data.lstrip(b"\0")):
            self._data = self._raw.read(_READ_BYTES)
            if not self._data:
                return False
        self._data = data
        self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        return True

    def close(self) -> None:
        self._data = b""


class _RecodedStream:
    def __init__(self, file: ReadableFile, encoding: str) -> None:
        self._file = file
        self._encoding = encoding
        self._decode = codecs.getincrementaldecoder(encoding)()
        self._rest = b""
        self._is_over = False

    def read(self, size: int) -> bytes:
        while not (self._rest or self._is_over):
            data = self._file.read(size)
            self._is_over = not data
            try:
                self._rest = self._decode.decode(data, final=self._is_over).encode()
            except UnicodeError as error:
                raise NotText(f"it is no {self._encoding} text: {error}; set 'csv.encoding' to what it is") from None
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def close(self) -> None:
        self._file.close()


def _piece_url(folder: str, url: str, etag: str, begin: int) -> str:
    return f"{folder}/{hashlib.sha256(f'{url} {etag}'.encode()).hexdigest()[:24]}-{begin:015d}.zst"


class PieceKeeper:
    """Stores compressed pieces of a text, from its first cut point on."""

    def __init__(self, store_for: Callable[[str], Store], folder: str, url: str, etag: str) -> None:
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


class KeptText:
    """A file's text from the piece at `begin`."""

    def __init__(self, store_for: Callable[[str], Store], folder: str, url: str, etag: str, begin: int) -> None:
        self._store_for = store_for
        self._text = (folder, url, etag)
        self._next = begin
        self._piece: Any = None

    def read(self, size: int) -> bytes:
        """Reads up to `size` bytes."""
        while self._piece is not None or self._open_piece():
            data: bytes = self._piece.read(size)
            self._next += len(data)
            if data:
                return data
            self._piece = None
        return b""

    def close(self) -> None:
        """Drops the open piece."""
        self._piece = None

    def _open_piece(self) -> bool:
        try:
            piece = _piece_url(*self._text, self._next)
            data = self._store_for(piece).read(piece, _MOST_PIECE_BYTES)
        except StoreNotFound:  # the caller counts the rows
            return False
        self._piece = pa.CompressedInputStream(pa.BufferReader(data), "zstd")
        return True
