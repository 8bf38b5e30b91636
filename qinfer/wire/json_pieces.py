"""Decodes large JSON with tensors piece by piece, so that only one piece's elements are objects at a time.

Long arrays are cut out; the small rest is parsed normally, with a `LongArray` in place of each. A piece ends before a
comma outside of strings, and is completed by the open brackets there, with a neutral element at the cut, so that a lone
comma is an error as in any text.
"""

import re
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import DATATYPES, Bytes, pack_bytes
from qinfer.wire.json_scan import (
    LARGE_BYTES,
    WINDOW_BYTES,
    Scan,
    TextSpan,
    check_depth,
    check_size,
    load,
    long_arrays,
    windows,
)
from qinfer.wire.kserve_types import ELEMENTS, UNPARSABLE

LONG_BYTES = 4096
"""Longer arrays are decoded in pieces."""

GIANT_BYTES = 2**20
"""Longer strings are decoded in pieces: one character may make all others four bytes wide."""

REST_DIVISOR = 4
"""Divides the limit for parsed text without long arrays."""

STRUCT_CODES = {d.name: d.typecode for d in DATATYPES.values() if d.name not in ("FP16", "BF16", "BYTES")}
"""FP16 and BF16 travel as binary only."""

Flatten = Callable[[list[Any], str], list[Any]]
"""Flattens nested data, and checks its elements' types."""

_DECODERS = {name: msgspec.json.Decoder(list[kind]) for name, kind in ELEMENTS.items()}  # type: ignore[valid-type]
_NEUTRAL = {"BYTES": b'""', "BOOL": b"false"}
_UNPARSABLE = "failed to parse the request JSON buffer"
_LENGTH = struct.Struct("<I")
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_NO_SKELETON = bytes(set(range(256)) - set(b"[],"))
_WITHOUT_BRACKETS = bytes.maketrans(b"[]", b"  ")
_UNEVEN = re.compile(rb"[^\[,]\[|\][^\],]|\[\]|\[,|,\]")  # no array of values has these
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(")?', re.DOTALL)  # no group if unquoted
_WHOLE = re.compile(  # keeps surrogate pairs together
    rb"(?:[^\\\x80-\xff]++|[\xc0-\xff][\x80-\xbf]++(?=[^\x80-\xbf])"
    rb"|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u(?![dD][89abAB])....|\\[^u])*+",
    re.DOTALL,
)


class JsonBounds(NamedTuple):
    """Limits of a request's JSON; `nbytes` is for tensors. `check` may refuse an input before its data is decoded."""

    depth: int = 100
    nbytes: int = 64 * 2**20
    check: Callable[[str, str, Sequence[int]], None] | None = None


class _ArrayPiece(NamedTuple):
    """A piece of an array as JSON of its own.

    Attributes:
        is_first: Whether it is the first piece; the other pieces begin with a neutral element.
        is_last: Whether it is the last piece; the other pieces end with a neutral element.
    """

    text: bytes
    shift: int
    is_first: bool
    is_last: bool
    giants: Mapping[str, TextSpan]


class LongArray:
    """An array cut out of a text, or a giant string, as one element of `size` bytes.

    Attributes:
        most: The possible number of elements, including nested elements.
        least: The same, if nested arrays are empty.
    """

    def __init__(self, text: Bytes, span: TextSpan, *, is_text: bool = False) -> None:
        self._view, self._span = memoryview(text), span
        self.is_text, self.size = is_text, span.end - span.begin
        is_empty = (
            not (span.commas or span.arrays or is_text) and not self._slice_bytes(span.begin + 1, span.end - 1).strip()
        )
        self.top, self.most = (0, 0) if is_empty else (span.top + 1, span.commas + 1)
        self.least = max(self.most - span.arrays, 0)
        self.is_read = False

    @property
    def skeleton(self) -> bytes:
        """The brackets and commas of an array of numbers."""
        return bytes(self._slice_bytes(self._span.begin, self._span.end)).translate(None, _NO_SKELETON)

    def tensor_bytes(self, name: str, datatype: str, count: int, most: int, flatten: Flatten) -> bytearray:
        """Decodes `count` elements of at most `most` bytes."""
        if not self.least <= count <= self.most:
            raise _miscounted(name, self.most, count)
        check_nbytes(name, count * (DATATYPES[datatype].itemsize or _LENGTH.size), most)
        out, found = bytearray(), 0
        for piece in self._pieces(_NEUTRAL.get(datatype, b"0")):
            elements = self._elements(piece, datatype, flatten)
            found += len(elements)
            if found > count:
                raise _miscounted(name, found, count)
            if datatype != "BYTES":
                out += _packed(name, datatype, elements)
            elif piece.giants:
                self._add_strings(elements, piece.giants, out)
            else:
                out += pack_bytes([element.encode() for element in elements])
            check_nbytes(name, len(out), most)
        if found != count:
            raise _miscounted(name, found, count)
        self.is_read = True
        return out

    def _add_strings(self, elements: list[str], giants: Mapping[str, TextSpan], out: bytearray) -> None:
        for element in elements:
            if element in giants:
                self._add_giant(giants[element], out)
            else:
                out += pack_bytes((element.encode(),))

    def _add_giant(self, span: TextSpan, out: bytearray) -> None:
        at, end, begin = span.begin + 1, span.end - 1, len(out)
        out += bytes(_LENGTH.size)
        while at < end:
            piece = self._slice_bytes(at, min(at + WINDOW_BYTES, end))
            if at + len(piece) < end and (whole := _WHOLE.match(piece)) is not None:
                piece = piece[: whole.end()] or piece
            try:
                out += msgspec.json.decode(b'"%b"' % piece, type=str).encode()
            except UNPARSABLE as error:
                raise _shifted(f"{_UNPARSABLE}: {error}", at - 1) from None
            at += len(piece)
        _LENGTH.pack_into(out, begin, len(out) - begin - _LENGTH.size)

    def check(self, max_depth: int) -> None:
        """Parses the array unless it was read already; raises `InvalidRequest`."""
        if self.is_read:
            return
        for piece in self._pieces(b"0"):
            _load(piece, max_depth)
            for span in piece.giants.values():
                self._add_giant(span, bytearray())

    def _elements(self, piece: _ArrayPiece, datatype: str, flatten: Flatten) -> list[Any]:
        try:
            text = piece.text if not self._span.arrays else _flattened(piece.text)
            elements = _DECODERS[datatype].decode(text)
        except UNPARSABLE:
            elements = flatten(_load(piece, 0), datatype)
        return elements[0 if piece.is_first else 1 : None if piece.is_last else -1]

    def _pieces(self, neutral: bytes) -> Iterator[_ArrayPiece]:
        if self.is_text:
            name = secrets.token_hex()
            yield _ArrayPiece(b'["%b"]' % name.encode(), 0, True, True, {name: self._span})
            return
        cut, depth, opened = self._span.begin, 0, b""
        for at, new_depth in self._cuts():
            text, giants = _without_giants(self._view, cut, at)
            text = b"%b%b,%b%b" % (opened, text, neutral, b"]" * new_depth)
            yield _ArrayPiece(text, cut - len(opened), not depth, False, giants)
            cut, depth, opened = at, new_depth, b"[" * new_depth + neutral
        text, giants = _without_giants(self._view, cut, self._span.end)
        yield _ArrayPiece(opened + text, cut - len(opened), not depth, True, giants)

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Yields each window's last comma, and its depth."""
        scan, depth = Scan(), 0
        for begin, window in windows(self._view, self._span.begin, self._span.end):
            at, levels, commas = scan.levels(window, depth)
            if len(commas):
                yield begin + int(at[commas[-1]]), int(levels[commas[-1]])
            if len(levels):
                depth = int(levels[-1])

    def _slice_bytes(self, begin: int, end: int) -> bytes:
        return bytes(self._view[begin:end])


class Document:
    """A JSON text, parsed except for its long arrays.

    Attributes:
        giants: The sizes of giant strings outside of `data`.
    """

    def __init__(self, text: Bytes, bounds: JsonBounds) -> None:
        self._depth = bounds.depth
        self._cut: dict[str, LongArray] = {}
        self._shifts: list[tuple[int, int]] = []
        self.giants: dict[str, int] = {}
        if len(text) <= LARGE_BYTES:
            self.rest = bytes(text)
            check_depth(self.rest, bounds.depth)
        else:
            self.rest = self._without(text, long_arrays(text, LONG_BYTES, bounds.depth))
            if len(self.rest) > LARGE_BYTES:
                check_size(self.rest, bounds.depth, len(self.rest) + bounds.nbytes // REST_DIVISOR)
        try:
            value = [load(self.rest, bounds.depth)]
        except InvalidRequest as error:
            raise self._moved(error) from None
        self._restore(value)
        self.value = value[0]

    def check(self) -> None:
        """Parses the unread arrays for their mistakes."""
        for array in self._cut.values():
            array.check(self._depth)

    def _without(self, text: Bytes, arrays: list[TextSpan]) -> bytes:
        view, kept, size = memoryview(text), 0, 0
        parts: list[Bytes] = []
        for span in (*arrays, TextSpan(len(text), len(text), 0, 0, 0)):
            part, giants = _without_giants(view, kept, span.begin)
            self._cut |= {name: LongArray(text, giant, is_text=True) for name, giant in giants.items()}
            name = secrets.token_hex()
            if span.begin < len(text):
                self._cut[name] = LongArray(text, span)
                part += b'"%b"' % name.encode()
            parts.append(part)
            size, kept = size + len(part), span.end
            self._shifts.append((size, kept - size))
        return b"".join(parts)

    def _restore(self, value: Any) -> None:
        """Puts the cut values in place of their placeholders, which a client can't guess."""
        nodes: list[Any] = [value] if self._cut else []
        while nodes:
            node = nodes.pop()
            for key, inner in list(node.items() if isinstance(node, dict) else enumerate(node)):
                if isinstance(key, str) and key in self._cut:
                    raise InvalidRequest(f"a member of the JSON has a name of more than {GIANT_BYTES} bytes")
                if isinstance(inner, str):
                    cut = node[key] = self._cut.get(inner, inner)
                    if isinstance(cut, LongArray) and cut.is_text and isinstance(key, str) and key != "data":
                        self.giants[key] = cut.size
                elif isinstance(inner, dict | list):
                    nodes.append(inner)

    def _moved(self, error: InvalidRequest) -> InvalidRequest:
        found = _AT_BYTE.search(error.message)
        place = 0 if found is None else int(found[1])
        return _shifted(error.message, next((by for at, by in reversed(self._shifts) if at <= place), 0))


def _without_giants(view: memoryview, begin: int, end: int) -> tuple[bytes, Mapping[str, TextSpan]]:
    if end - begin <= GIANT_BYTES:
        return bytes(view[begin:end]), {}
    parts, giants, kept = list[Bytes](), dict[str, TextSpan](), begin
    for match in _STRING.finditer(view, begin, end):
        if match.lastindex and match.end() - match.start() > GIANT_BYTES:
            name = secrets.token_hex()
            giants[name] = TextSpan(match.start(), match.end(), 0, 0, 0)
            parts += (view[kept : match.start()], b'"%b"' % name.encode())
            kept = match.end()
    parts.append(view[kept:end])
    return b"".join(parts), giants


def _flattened(text: bytes) -> bytes:
    """Returns an array without its inner brackets; raises `DecodeError` unless it has only numbers."""
    tight = text.translate(None, b" \t\r\n")
    if b'"' in tight or _UNEVEN.search(tight) is not None:
        raise msgspec.DecodeError
    return b"[%b]" % text.translate(_WITHOUT_BRACKETS)


def _load(piece: _ArrayPiece, max_depth: int) -> Any:
    try:
        return load(piece.text, max_depth)
    except InvalidRequest as error:
        raise _shifted(error.message, piece.shift) from None


def _shifted(message: str, by: int) -> InvalidRequest:
    return InvalidRequest(_AT_BYTE.sub(lambda at: f"(byte {int(at[1]) + by})", message))


def _packed(name: str, datatype: str, elements: list[Any]) -> bytes:
    try:
        return struct.pack(f"<{len(elements)}{STRUCT_CODES[datatype]}", *elements)
    except (struct.error, OverflowError):
        raise InvalidRequest(
            f"Unable to parse 'data': input '{name}' has a value outside the range of {datatype}"
        ) from None


def _miscounted(name: str, found: int, count: int) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' has {found} elements in its data, and its shape takes {count}")


def check_nbytes(name: str, nbytes: int, most: int) -> None:
    """Raises `PayloadTooLarge` if a tensor is too large."""
    if nbytes > most:
        raise PayloadTooLarge(
            f"input '{name}' takes {nbytes} bytes as a tensor, and {most} are left of the limit for a request's inputs "
            "(QINFER_HTTP__MAX_INPUT_BYTES)"
        )
