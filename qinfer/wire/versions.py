"""Wire versions: records as one versioned value, and the refusal of data from a newer qinfer.

    record      a byte with its wire version, then msgpack: an array whose fields are only ever appended
    document    JSON for people to read too, an object with its version in `wire`

Readers skip unknown fields and give missing fields their defaults, so a version rises only if an older reader would
misread the data.
"""

from typing import Generic, TypeVar

import msgspec

from qinfer.errors import CorruptEntry

T = TypeVar("T")

DOCUMENT_VERSION = 1
"""Written by this qinfer, and the newest readable one."""

_HEAD = b'{"wire":%d,' % DOCUMENT_VERSION


class NewerVersion(CorruptEntry):
    """Data of a newer qinfer, for a process of that version."""

    def __init__(self, what: str, found: int, readable: int) -> None:
        super().__init__(
            f"{what} of wire version {found} was written by a newer qinfer; this program reads version {readable}: "
            "upgrade this program first"
        )


class Record(Generic[T]):
    """Encodes structs with `array_like=True`; `what` names them in errors."""

    def __init__(self, kind: type[T], what: str, version: int = 1) -> None:
        self._what = what
        self._version = version
        self._prefix = bytes([version])
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def encode(self, value: T) -> bytes:
        """Encodes a value."""
        return self._prefix + self._encode(value)

    def decode(self, raw: bytes) -> T:
        """Decodes a value, or raises `NewerVersion` or `CorruptEntry`."""
        if raw[:1] > self._prefix:
            raise NewerVersion(self._what, raw[0], self._version)
        try:
            return self._decode(memoryview(raw)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptEntry(f"{self._what} can't be decoded: {error}") from None


class _Wire(msgspec.Struct):
    wire: int = DOCUMENT_VERSION


def encode_document(value: msgspec.Struct) -> bytes:
    """Encodes a struct with fields as a document."""
    return _HEAD + msgspec.json.encode(value)[1:]


def decode_document(raw: bytes, kind: type[T]) -> T:
    """Decodes a document, or raises `NewerVersion` or `msgspec.DecodeError`."""
    try:
        if not raw.startswith(_HEAD) and (found := msgspec.json.decode(raw, type=_Wire).wire) > DOCUMENT_VERSION:
            raise NewerVersion(f"the {kind.__name__}", found, DOCUMENT_VERSION)
        return msgspec.json.decode(raw, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:  # not UTF-8, or nested too deep
        raise msgspec.DecodeError(str(error)) from None
