"""Arrow schemas that no writer writes: columns that all have one name, which is stored once."""

import io
import struct
from base64 import b64encode

import pyarrow as pa

from qinfer.tabular.footers import field_of, unsigned

_MESSAGE_HEADER = 2
_FOOTER_SCHEMA, _SCHEMA_FIELDS, _FIELD_NAME = 1, 1, 0
_TAIL_BYTES = 10


def file_of_one_name(name: str, columns: int) -> bytes:
    """Returns an Arrow file without rows."""
    sink = io.BytesIO()
    pa.ipc.new_file(sink, _schema(name, columns)).close()
    data = sink.getvalue()
    begin = len(data) - _TAIL_BYTES - int(struct.unpack("<i6s", data[-_TAIL_BYTES:])[0])
    footer = bytearray(data[begin:-_TAIL_BYTES])
    _share(footer, _at(footer, unsigned(footer, 0), _FOOTER_SCHEMA))
    return bytes(data[:begin] + footer + data[-_TAIL_BYTES:])


def stream_of_one_name(name: str, columns: int) -> bytes:
    """Returns the first message of an Arrow stream."""
    data = _schema(name, columns).serialize().to_pybytes()
    message = bytearray(data[8:])
    _share(message, _at(message, unsigned(message, 0), _MESSAGE_HEADER))
    return bytes(data[:8] + message)


def text_of_one_name(name: str, columns: int) -> bytes:
    """Returns what a Parquet footer has as `ARROW:schema`."""
    return b64encode(stream_of_one_name(name, columns))


def _schema(name: str, columns: int) -> pa.Schema:
    # The first name is last in a flatbuffer, so that all fields can refer to it.
    return pa.schema([(name if not number else "x", pa.binary()) for number in range(columns)])


def _share(buffer: bytearray, schema: int) -> None:
    vector = _at(buffer, schema, _SCHEMA_FIELDS)
    places = range(vector + 4, vector + 4 + 4 * unsigned(buffer, vector), 4)
    names = [field_of(buffer, place + unsigned(buffer, place), _FIELD_NAME) for place in places]
    first = names[0] + unsigned(buffer, names[0])
    for name in names:
        buffer[name : name + 4] = struct.pack("<I", first - name)


def _at(buffer: bytearray, table: int, number: int) -> int:
    field = field_of(buffer, table, number)
    return field + unsigned(buffer, field)
