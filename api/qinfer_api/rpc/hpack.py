"""HPACK (RFC 7541): a complete decoder, and a stateless encoder, whose blocks are sent many times."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

MAX_TABLE_BYTES = 4096
"""The default SETTINGS_HEADER_TABLE_SIZE."""

EMPTY_TABLE = b"\x20"
"""Sets the table of replies to 0 bytes."""

Field = tuple[bytes, bytes]

_ENTRY_BYTES = 32  # section 4.1
_MAX_INTEGER_BYTES = 5
_MAX_RESIZES = 2  # before a block's first field (section 4.2)


class HpackError(Exception):
    """An undecodable header block; its connection can't continue."""

    code = 9
    """HTTP/2's COMPRESSION_ERROR."""


class Decoder:
    """Decodes a connection's header blocks in order; equal blocks of one `generation` have equal fields."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._entries: list[Field] = []  # the newest last
        self._bytes = 0
        self._max_bytes = MAX_TABLE_BYTES
        self.generation = 0

    def decode(self, block: bytes) -> tuple[list[Field] | None, list[Field]]:
        """Returns all fields of a block, and those sent as literals.

        The first is `None` above `max_list_bytes`, counted as in section 4.1.
        """
        fields: list[Field] = []
        literals: list[Field] = []
        entries = self._entries
        position, end, resized = 0, len(block), 0
        try:
            while position < end:
                byte = block[position]
                position += 1
                if byte >= 0x80:
                    index = byte & 0x7F
                    if index == 0x7F:
                        index, position = _long_integer(block, position, 0x7F)
                    fields.append(_STATIC[index] if index < _FIRST_OWN else entries[_FIRST_OWN - 1 - index])
                elif byte & 0xE0 == 0x20:
                    resized += 1
                    if fields or resized > _MAX_RESIZES:
                        raise HpackError("the size of the table changes after a field, or too often")
                    wanted, position = _integer(block, position, byte, 0x1F)
                    self._resize(wanted)
                else:
                    mask = 0x3F if byte >= 0x40 else 0x0F
                    index = byte & mask
                    if index == mask:
                        index, position = _long_integer(block, position, mask)
                    if index:
                        name = (_STATIC[index] if index < _FIRST_OWN else entries[_FIRST_OWN - 1 - index])[0]
                    else:
                        name, position = _read_string(block, position, _unpack_name)
                    value, position = _read_string(block, position, _unpack)
                    found = name, value
                    fields.append(found)
                    literals.append(found)
                    if byte >= 0x40:
                        self._add(found)
        except (IndexError, KeyError):
            raise HpackError("the block is cut off, or names an entry that the table does not have") from None
        is_small = len(fields) * MAX_TABLE_BYTES + 2 * end <= self._max_list_bytes
        return (fields if is_small or _size(fields) <= self._max_list_bytes else None), literals

    def _add(self, field: Field) -> None:
        self.generation += 1
        self._entries.append(field)
        self._bytes += len(field[0]) + len(field[1]) + _ENTRY_BYTES
        self._evict()

    def _resize(self, wanted: int) -> None:
        if wanted > MAX_TABLE_BYTES:
            raise HpackError(f"a table of {wanted} bytes, more than {MAX_TABLE_BYTES}")
        self.generation += 1
        self._max_bytes = wanted
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            name, value = self._entries.pop(0)
            self._bytes -= len(name) + len(value) + _ENTRY_BYTES


def _size(fields: list[Field]) -> int:
    return sum([len(name) + len(value) + _ENTRY_BYTES for name, value in fields])


def _integer(block: bytes, position: int, byte: int, mask: int) -> tuple[int, int]:
    value = byte & mask
    return (value, position) if value < mask else _long_integer(block, position, mask)


def _long_integer(block: bytes, position: int, value: int) -> tuple[int, int]:
    if block[position] < 0x80:
        return value + block[position], position + 1
    for shift in range(0, 7 * _MAX_INTEGER_BYTES, 7):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise HpackError("an integer is too large")


def _read_string(block: bytes, position: int, unpack: Callable[[bytes], bytes]) -> tuple[bytes, int]:
    byte = block[position]
    length, position = byte & 0x7F, position + 1
    if length == 0x7F:
        length, position = _long_integer(block, position, 0x7F)
    end = position + length
    if end > len(block):
        raise HpackError("a string is cut off")
    text = block[position:end]
    return (unpack(text) if byte >= 0x80 else text), end


def field(name: bytes, value: bytes) -> bytes:
    """Encodes a literal without indexing (section 6.2.2)."""
    return b"".join((named(name), length(len(value)), value))


def named(name: bytes) -> bytes:
    """Encodes a field up to its value's length."""
    return b"".join((b"\x00", length(len(name)), name))


def status(code: int) -> bytes:
    """Encodes the pseudo-header `:status`."""
    number = _STATUSES.get(code)
    return bytes((0x80 | number,)) if number else b"\x08\x03%d" % code


@lru_cache(maxsize=256)
def length(size: int) -> bytes:
    """Encodes a string's length, without Huffman code."""
    if size < 0x7F:
        return bytes((size,))
    size -= 0x7F
    encoded = bytearray(b"\x7f")
    while size >= 0x80:
        encoded.append(0x80 | size & 0x7F)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


# -- the static table (appendix A) -------------------------------------------------------------------------------------

_NAMES = """
    :authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https :status=200 :status=204
    :status=206 :status=304 :status=400 :status=404 :status=500 accept-charset accept-encoding=gzip,_deflate
    accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control
    content-disposition content-encoding content-language content-length content-location content-range content-type
    cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since
    last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh
    retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""


def _static() -> dict[int, Field]:
    pairs = (text.partition("=") for text in _NAMES.split())
    fields = ((name.encode(), value.replace("_", " ").encode()) for name, _, value in pairs)
    return dict(enumerate(fields, 1))


_STATIC = _static()
_FIRST_OWN = len(_STATIC) + 1

_STATUSES = {int(value): index for index, (name, value) in _STATIC.items() if name == b":status"}

# -- Huffman codes (section 5.2, appendix B) ---------------------------------------------------------------------------

# Bits of each byte's code, then of the end of string. Canonical codes count up by length, then by byte.
_CODE_LENGTHS = """
    13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28 28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28 6 10 10 12 13 6 8
    11 10 10 8 11 8 6 6 6 5 5 5 6 6 6 6 6 6 6 7 8 15 6 12 10 13 6 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 8 7 8 13
    19 13 14 6 15 5 6 5 6 5 6 6 6 5 7 7 6 6 6 5 6 7 6 5 5 6 7 7 7 7 7 15 11 14 13 28 20 22 20 20 22 22 22 23 22 23 23
    23 23 23 24 23 24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24 22 21 20 22 22 23 23 21 23 22 22 24 21 22 23 23 21
    21 22 21 23 22 23 23 20 22 22 22 23 22 22 23 26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25 19 21 26 27 27 26 27
    24 21 21 26 26 28 27 27 27 20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27 27 27 27 27 28 27 27 27
    27 27 26 30
"""
_END = 256

_Step = tuple[bytes, "_Node"]
_Node = list["_Step | None"]


class _Huffman:
    """Decodes byte by byte; computes steps when first needed."""

    def __init__(self) -> None:
        self._branches: list[list[int]] = [[0, 0]]  # by node and bit: a node, or ~symbol
        lengths = [int(length) for length in _CODE_LENGTHS.split()]
        code = previous = 0
        for symbol in sorted(range(len(lengths)), key=lambda each: (lengths[each], each)):
            code <<= lengths[symbol] - previous
            previous = lengths[symbol]
            self._place(symbol, code, previous)
            code += 1
        self._nodes: list[_Node] = [[None] * 256 for _ in self._branches]
        self._numbers = {id(node): number for number, node in enumerate(self._nodes)}
        number, self._ends = 0, {id(self._nodes[0])}
        for _ in range(7):  # fewer than 8 ones pad
            number = self._branches[number][1]
            self._ends.add(id(self._nodes[number]))

    def _place(self, symbol: int, code: int, length: int) -> None:
        number = 0
        for shift in range(length - 1, 0, -1):
            bit = code >> shift & 1
            if not self._branches[number][bit]:
                self._branches.append([0, 0])
                self._branches[number][bit] = len(self._branches) - 1
            number = self._branches[number][bit]
        self._branches[number][code & 1] = ~symbol

    def decode(self, text: bytes) -> bytes:
        node: Any = self._nodes[0]
        pieces: list[bytes] = []
        append = pieces.append
        try:
            for byte in text:
                piece, node = node[byte]
                append(piece)
        except TypeError:  # not computed yet
            self._walk(text)
            return self.decode(text)
        if id(node) not in self._ends:
            raise HpackError("a string ends within a code")
        return b"".join(pieces)

    def _walk(self, text: bytes) -> None:
        node = self._nodes[0]
        for byte in text:
            node = (node[byte] or self._step(node, byte))[1]

    def _step(self, node: _Node, byte: int) -> _Step:
        number, found = self._numbers[id(node)], bytearray()
        for shift in range(7, -1, -1):
            number = self._branches[number][byte >> shift & 1]
            if number < 0:
                if ~number == _END:
                    raise HpackError("a string has the code of its end")
                found.append(~number)
                number = 0
        step = node[byte] = bytes(found), self._nodes[number]
        return step


_unpack = _Huffman().decode
_unpack_remembered = lru_cache(maxsize=1024)(_unpack)
_REMEMBERED_BYTES = 64


def _unpack_name(text: bytes) -> bytes:
    return _unpack_remembered(text) if len(text) <= _REMEMBERED_BYTES else _unpack(text)
