"""The description of a message's body: its content type, its encoding, where its JSON ends. Pure."""

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import shown
from qinfer.tensors import Bytes

Kind = Literal["", "kserve", "json", "row", "jsonl", "arrow-stream", "arrow-file", "raw", "text"]
"""The kind of a body; empty = the message does not say, `json` = a KServe request, or a row, by its members."""

JSON_LENGTH_HEADER = "inference-header-content-length"

_KINDS: Mapping[str, Kind] = {
    "": "",
    "application/data": "",  # what kombu says of bytes
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
_PLAIN = frozenset((None, "", "identity", "binary", *_UTF_8))
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # deflate is the zlib container, as in HTTP
_MAX_TYPE_CHARACTERS = 256


class Content(NamedTuple):
    """A content type.

    Attributes:
        kind: What the body is.
        json_length: The text of its parameter `inference-header-content-length`; `None` = it has none.
        problem: Why no body of this type can be read; empty = it can.
    """

    kind: Kind
    json_length: str | None = None
    problem: str = ""


@lru_cache(maxsize=256)
def parse_content_type(text: str) -> Content:
    """Reads a content type; unknown ones are `raw`, or `text`."""
    name = text.partition(";")[0].strip().lower()[:_MAX_TYPE_CHARACTERS]
    kind = _KINDS.get(name)
    if kind is None:
        kind = "kserve" if name.startswith("application/vnd.kserve") else "text" if name[:5] == "text/" else "raw"
    length = _JSON_LENGTH.search(text)
    charset = _CHARSET.search(text)
    problem = ""
    if charset and kind not in ("raw", "arrow-stream", "arrow-file") and charset[1].lower() not in _UTF_8:
        problem = f"the character set of the content type is '{shown(charset[1])}'; send the text as UTF-8"
    return Content(kind, length[1] if length else None, problem)


def json_length(content: Content, headers: Mapping[str, object] | None, body_bytes: int) -> int | None:
    """Returns where the JSON of a body ends and its binary tensors begin; `None` when the message does not say.

    Args:
        content: Its content type.
        headers: Its headers, names in any case.
        body_bytes: The size of the body.

    Raises:
        InvalidRequest: It is no integer, or not within the body.
    """
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


def unpacked(body: Bytes | str, content_encoding: str | None, max_bytes: int) -> Bytes:
    """Returns a body without its encoding.

    Args:
        body: As it came; a text is made UTF-8.
        content_encoding: As the message says, which may be a character set.
        max_bytes: The largest body.

    Raises:
        InvalidRequest: It is empty, too large, damaged, or its encoding is not known.
    """
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the body is a text that UTF-8 can't hold; send bytes") from None
    if content_encoding not in _PLAIN:
        body = _decoded(body, content_encoding, max_bytes)
    if not len(body):
        raise InvalidRequest("the message has no body")
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


def _decoded(body: Bytes, content_encoding: str | None, max_bytes: int) -> Bytes:
    name = str(content_encoding).strip().lower().replace("_", "-")
    if name in _PLAIN:
        return body
    if name not in _WINDOW_BITS:
        raise InvalidRequest(
            f"the content encoding '{shown(name)}' is not known; send the body as it is, or in gzip or deflate"
        )
    decompressor = zlib.decompressobj(wbits=_WINDOW_BITS[name])
    try:
        plain = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {name}: {error}") from None
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if not decompressor.eof:
        raise InvalidRequest(f"the {name} body is cut off; send all of it")
    if decompressor.unused_data:
        raise InvalidRequest(f"the {name} body goes on behind its end; compress it as one")
    return plain


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {max_bytes} bytes; send less in a message, or raise 'max_bytes' of the route's 'body'"
    )
