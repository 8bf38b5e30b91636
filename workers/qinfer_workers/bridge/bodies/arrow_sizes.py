"""How large the compressed buffers of Arrow data say they become, before anything is unpacked.

pyarrow believes the size that stands before each compressed buffer, and allocates it. The layout is that of Arrow's IPC
format: messages whose metadata is a flatbuffer `Message`, of which pyarrow has checked the structure.
"""

import struct
from collections.abc import Iterator

import pyarrow as pa

from qinfer.errors import InvalidRequest
from qinfer.tensors import Bytes

_TAIL = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")  # offset, length of the message's metadata, length of its body
_BUFFER = struct.Struct("<qq")  # offset in the message's body, length
_LENGTH = struct.Struct("<q")

_MAX_MESSAGES = 1024
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_DICTIONARY_DATA = 1
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3


def check_unpacked(body: Bytes, max_bytes: int, *, is_file: bool) -> None:
    """Makes sure that unpacking takes no more memory than it may.

    Args:
        body: A file or a stream whose schema could be read.
        max_bytes: What all compressed buffers may become together.
        is_file: Whether it is a file.

    Raises:
        InvalidRequest: They become larger, or there are too many of them.
        pyarrow.ArrowException, OSError, ValueError: The data is damaged.
    """
    total = 0
    try:
        for number, message in enumerate(_of_file(body) if is_file else _of_stream(body)):
            if number > _MAX_MESSAGES:
                raise InvalidRequest(f"the body has more than {_MAX_MESSAGES} record batches; write them as one")
            total += _unpacked_bytes(message)
            if total > max_bytes:
                raise InvalidRequest(f"the body becomes more than {max_bytes} bytes when it is unpacked; send less")
    except struct.error as error:
        raise ValueError(f"a record batch's header is damaged: {error}") from None


def _of_stream(body: Bytes) -> Iterator["pa.Message"]:
    """Reads the messages of a stream, of which the first is the schema."""
    return iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))


def _of_file(body: Bytes) -> Iterator["pa.Message"]:
    """Reads the messages that a file's footer points to."""
    view = memoryview(body)
    size, _ = _TAIL.unpack(view[-_TAIL.size :])
    footer = bytes(view[len(view) - _TAIL.size - size : len(view) - _TAIL.size])
    for number in (_FOOTER_DICTIONARIES, _FOOTER_BATCHES):
        field = _field(footer, _unsigned(footer, 0), number)
        if not field:
            continue
        vector = field + _unsigned(footer, field)
        for index in range(_unsigned(footer, vector)):
            offset, length, size = _BLOCK.unpack_from(footer, vector + 4 + _BLOCK.size * index)
            if not 0 <= offset <= offset + length + size <= len(view):
                raise ValueError("its footer points outside")
            yield pa.ipc.read_message(pa.py_buffer(view[offset : offset + length + size]))


def _unpacked_bytes(message: "pa.Message") -> int:
    """Returns what the compressed buffers of a message become; 0 when none is compressed."""
    if message.type not in ("record batch", "dictionary"):
        return 0
    data = message.metadata.to_pybytes()
    table = _table(data, _unsigned(data, 0), _MESSAGE_HEADER)
    if message.type == "dictionary":
        table = _table(data, table, _DICTIONARY_DATA)
    field = _field(data, table, _BATCH_BUFFERS)
    if not field or not _field(data, table, _BATCH_COMPRESSION):
        return 0
    vector = field + _unsigned(data, field)
    content = memoryview(message.body)
    total = 0
    for index in range(_unsigned(data, vector)):
        offset, length = _BUFFER.unpack_from(data, vector + 4 + _BUFFER.size * index)
        if length >= _LENGTH.size:
            if not 0 <= offset <= len(content) - _LENGTH.size:
                raise ValueError("a buffer is outside its message")
            total += max(0, _LENGTH.unpack_from(content, offset)[0])
    return total


def _table(buffer: bytes, table: int, number: int) -> int:
    field = _field(buffer, table, number)
    if not field:
        raise ValueError("a record batch has no header")
    return field + _unsigned(buffer, field)


def _field(buffer: bytes, table: int, number: int) -> int:
    """Returns where a table's field is; 0 = it has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise ValueError("a flatbuffer points outside")
    size = struct.unpack_from("<H", buffer, vtable)[0]
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def _unsigned(buffer: bytes, position: int) -> int:
    value: int = struct.unpack_from("<I", buffer, position)[0]
    return value
