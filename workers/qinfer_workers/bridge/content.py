"""A message's content type, compression and encoding. Pure."""

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from qinfer.errors import InvalidRequest
from qinfer.tabular.spec import shown
from qinfer.tensors import Bytes

Kind = Literal["", "kserve", "json", "row", "jsonl", "arrow-stream", "arrow-file", "raw", "text"]

JSON_LENGTH_HEADER = "inference-header-content-length"
COMPRESSION_HEADER = "compression"

_KINDS: Mapping[str, Kind] = {
    "": "",
    "application/data": "",  # kombu's type of bytes
    "application/json": "json",
    "text/json": "json",
    "application/x-ndjson": "jsonl",
    "application/ndjson": "jsonl",
    "application/jsonl": "jsonl",
    "application/jsonlines": "jsonl",
    "application/x-jsonlines": "jsonl",
    "application/json-lines": "jsonl",
    "application/vnd.apache.arrow.stream": "arrow-stream",
    "application/vnd.apache.arrow.file": "arrow-file",
}
_JSON_LENGTH = re.compile(r";\s*" + JSON_LENGTH_HEADER + r'\s*=\s*"?([^";\s]*)', re.IGNORECASE)
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^";\s]*)', re.IGNORECASE)
_UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")
_PICKLE = "application/x-python-serialize"
_PLAIN = frozenset((None, "", "identity", "binary", *_UTF_8))
_COMPRESSIONS: Mapping[str, str] = {
    "gzip": "zlib", "x-gzip": "zlib", "application/x-gzip": "zlib", "application/gzip": "zlib",
    "zlib": "zlib", "application/zlib": "zlib", "deflate": "zlib",
    "bzip2": "bz2", "bzip": "bz2", "bz2": "bz2", "application/x-bz2": "bz2", "application/x-bzip2": "bz2",
    "lzma": "lzma", "xz": "lzma", "application/x-lzma": "lzma", "application/x-xz": "lzma",
    "zstd": "zstd", "zstandard": "zstd", "application/zstd": "zstd",
    "brotli": "brotli", "br": "brotli", "application/x-brotli": "brotli",
}  # fmt: skip
"""Names of kombu (kombu/compression.py) and HTTP → codec."""
_XZ_MEMORY_BYTES = 128 * 2**20  # for the dictionary; the highest preset takes 65 MiB
_DECOMPRESSORS: Mapping[str, Callable[[], Any]] = {
    "zlib": lambda: zlib.decompressobj(wbits=47),  # kombu's gzip is zlib's container; the first bytes tell
    "bz2": bz2.BZ2Decompressor,
    "lzma": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES),
}
_MAX_TYPE_CHARACTERS = 256


class Content(NamedTuple):
    """A content type; `problem` = why its bodies can't be read."""

    kind: Kind
    json_length: str | None = None
    problem: str = ""


@lru_cache(maxsize=256)
def parse_content_type(text: str) -> Content:
    """Reads a content type; unknown = `raw` or `text`."""
    name = text.partition(";")[0].strip().lower()[:_MAX_TYPE_CHARACTERS]
    kind = _KINDS.get(name)
    if kind is None:
        kind = "kserve" if name.startswith("application/vnd.kserve") else "text" if name[:5] == "text/" else "raw"
    length = _JSON_LENGTH.search(text)
    charset = _CHARSET.search(text)
    problem = ""
    if name == _PICKLE:
        problem = "the content type is Python's pickle, which is never read; publish with serializer='json'"
    elif charset and kind not in ("raw", "arrow-stream", "arrow-file") and charset[1].lower() not in _UTF_8:
        problem = f"the character set of the content type is '{shown(charset[1])}'; send the text as UTF-8"
    return Content(kind, length[1] if length else None, problem)


def json_length(content: Content, headers: Mapping[str, object] | None, body_bytes: int) -> int | None:
    """Returns where JSON ends and binary tensors begin; `None` = unknown."""
    value: object = content.json_length
    for name, given in (headers or {}).items():
        if isinstance(name, str) and name.lower() == JSON_LENGTH_HEADER:
            value = given.decode("latin-1") if isinstance(given, bytes) else given
    if value is None:
        return None
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidRequest(
            f"header '{JSON_LENGTH_HEADER}' is '{shown(text)}'; it counts the bytes of the JSON before the tensors"
        )
    if int(text) > body_bytes:
        raise InvalidRequest(f"header '{JSON_LENGTH_HEADER}' is {text}, and the body has {body_bytes} bytes")
    return int(text)


def unpacked(body: Bytes | str, content_encoding: str | None, max_bytes: int, compression: object = None) -> Bytes:
    """Returns a body without compression and both encodings."""
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the body is a text that UTF-8 can't hold; send bytes") from None
    if compression:
        body = _decompressed(body, COMPRESSION_HEADER, compression, max_bytes)
    if content_encoding not in _PLAIN:
        body = _decompressed(body, "content encoding", content_encoding, max_bytes)
    if not len(body):
        raise InvalidRequest("the message has no body")
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


def _decompressed(body: Bytes, field: str, value: object, max_bytes: int) -> Bytes:
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    name = text.strip().lower().replace("_", "-")
    if name in _PLAIN:
        return body
    codec = _COMPRESSIONS.get(name)
    if codec is None:
        raise InvalidRequest(
            f"the {field} '{shown(name)}' is not known; send the body as it is, or in gzip, deflate, bzip2, xz, zstd "
            "or brotli"
        )
    try:
        plain, rest = _begin_of(body, codec, max_bytes + 1)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, MemoryError) as error:
        raise InvalidRequest(f"the body is not {name}, or damaged: {error}") from None
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if rest is None:
        raise InvalidRequest(f"the {name} body is cut off; send all of it")
    if rest:
        raise InvalidRequest(f"the {name} body has data behind its end; compress it as one stream")
    return plain


def _begin_of(body: Bytes, codec: str, max_bytes: int) -> tuple[bytes, bytes | None]:
    """Returns the first decompressed bytes, and the data behind the end (`None` = no end)."""
    if codec in _DECOMPRESSORS:
        decompressor = _DECOMPRESSORS[codec]()
        plain = decompressor.decompress(body, max_bytes)
        return plain, decompressor.unused_data if decompressor.eof else None
    try:
        import pyarrow as pa
    except ImportError:
        raise InvalidRequest(
            f"the bridge reads {codec} only with pyarrow; its operator installs it with pip install 'qinfer-ml[bulk]'"
        ) from None
    with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
        return stream.read(max_bytes), b""


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {max_bytes} bytes; send less in a message, or raise 'max_bytes' of the route's 'body'"
    )
