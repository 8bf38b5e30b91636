"""Wire versions: the refusal of data that a newer qinfer wrote, and records as one versioned value.

    record      a byte with its wire version, then msgpack: an array whose fields are only ever appended
    document    JSON for people to read too, an object with its version in `wire`

Readers skip fields that they do not know, and give those that are missing their defaults, so that a version rises only
where an older reader would misread what is written.
"""

from typing import Generic, TypeVar

import msgspec

from qinfer.errors import CorruptEntry

T = TypeVar("T")

DOCUMENT_VERSION = 1
"""The wire version of documents that is written, and the newest that is read."""

_HEAD = b'{"wire":%d,' % DOCUMENT_VERSION


class NewerVersion(CorruptEntry):
    """Something that a newer qinfer wrote; a process of that version can read it.

    Args:
        what: What was read, such as `a frame`.
        found: Its wire version.
        readable: The newest one that this program reads.
    """

    def __init__(self, what: str, found: int, readable: int) -> None:
        super().__init__(
            f"{what} of wire version {found} was written by a newer qinfer; this program reads version {readable}: "
            "upgrade this program first"
        )


class Record(Generic[T]):
    """The encoding of values of one type as bytes.

    Args:
        kind: The type: a struct with `array_like=True`.
        what: What a value is called in errors, such as `the record of a request`.
        version: The wire version that is written, and the newest that is read.
    """

    def __init__(self, kind: type[T], what: str, version: int = 1) -> None:
        self._what = what
        self._version = version
        self._prefix = bytes([version])
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def encode(self, value: T) -> bytes:
        """Returns a value as bytes."""
        return self._prefix + self._encode(value)

    def decode(self, raw: bytes) -> T:
        """Reads what `encode` returned.

        Raises:
            NewerVersion: A newer qinfer wrote it.
            CorruptEntry: It is damaged.
        """
        if raw[:1] > self._prefix:
            raise NewerVersion(self._what, raw[0], self._version)
        try:
            return self._decode(memoryview(raw)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptEntry(f"{self._what} can't be decoded: {error}") from None


class _Wire(msgspec.Struct):
    wire: int = DOCUMENT_VERSION


def encode_document(value: msgspec.Struct) -> bytes:
    """Returns a struct, which must have fields, as a document."""
    return _HEAD + msgspec.json.encode(value)[1:]


def decode_document(raw: bytes, kind: type[T]) -> T:
    """Reads a document; one without a version is of the first.

    Raises:
        NewerVersion: A newer qinfer wrote it.
        msgspec.DecodeError: It is damaged.
    """
    try:
        if not raw.startswith(_HEAD) and (found := msgspec.json.decode(raw, type=_Wire).wire) > DOCUMENT_VERSION:
            raise NewerVersion(f"the {kind.__name__}", found, DOCUMENT_VERSION)
        return msgspec.json.decode(raw, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec's own, of text that is no UTF-8 or nested too deep
        raise msgspec.DecodeError(str(error)) from None
