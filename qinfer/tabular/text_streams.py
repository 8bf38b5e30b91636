"""CSV and JSON lines as streams of UTF-8 text, from any compression and encoding.

Decoding can't begin in the middle. So planning decodes the text once, and keeps pieces of it for the shards
(docs/explanation/decisions/0017-decoded-text-is-kept.md).
"""

import codecs
import hashlib
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import pyarrow as pa

from qinfer.errors import StoreNotFound
from qinfer.storage.store import Store
from qinfer.tabular.spec import UTF_8, Csv, Cut, InputCompression, InputFormat
from qinfer.tabular.text_cuts import row_blocks, unescaped

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


class TextStream:
    """Text that can't seek: `head`, then `blocks`; `close` closes the file that they are read from."""

    closed = False

    def __init__(self, blocks: Iterator[bytes], close: Callable[[], None], head: bytes = b"") -> None:
        self._blocks = blocks
        self.close = close
        self._head = head
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
        rows = row_blocks(text.blocks(), "csv", form.csv, BLOCK_BYTES)
        text = TextStream((unescaped(some, form.csv) for some in rows), file.close)
    return text


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


def kept_text(
    store_for: Callable[[str], Store], folder: str, url: str, etag: str, begin: int
) -> Generator[bytes, None, None]:
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
