"""Timestamps of Parquet's deprecated type INT96, which Spark, Hive and Impala write: read exactly, or refused.

pyarrow reads INT96 as 64-bit nanoseconds, which silently wrap after 2262. Here such a column has microseconds, unless
its file was written from Arrow nanoseconds (`ARROW:schema`). Each batch is read in both units, which reveals values
that one of them can't represent.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.errors import CorruptEntry
from qinfer.tabular.columns.schemas import INT96_INSTANT, decode_schema

INT96 = "INT96"
ARROW_SCHEMA = b"ARROW:schema"
"""Key of the footer's metadata."""

_NS_IN_US = 1000
_MOST_US = (2**63 - 1) // _NS_IN_US


def arrow_schema(content: Any, metadata: pq.FileMetaData) -> pa.Schema:
    """Returns a file's columns, with INT96 in the unit that fits."""
    schema = metadata.schema.to_arrow_schema()
    if not any(metadata.schema.column(leaf).physical_type == INT96 for leaf in range(metadata.num_columns)):
        return schema
    coarse = pq.ParquetFile(content, metadata=metadata, coerce_int96_timestamp_unit="us").schema_arrow
    written = _written(metadata)
    for number, field in enumerate(coarse):
        if field.type != schema.field(number).type and not _has_nanoseconds(written, field.name):
            is_plain = pa.types.is_timestamp(field.type)
            schema = schema.set(number, field.with_metadata({INT96_INSTANT: b"1"}) if is_plain else field)
    return schema


def exact(fine: pa.RecordBatch, coarse: pa.RecordBatch, schema: pa.Schema) -> tuple[dict[str, pa.Array], str]:
    """Chooses INT96 columns from rows in nanoseconds (`fine`) and microseconds (`coarse`).

    Returns a message if a value has no exact form.
    """
    columns = {}
    for name in fine.schema.names:
        is_fine = _has_nanoseconds(schema, name)
        columns[name] = (fine if is_fine else coarse).column(name)
        for ns, us in zip(_instants(fine.column(name)), _instants(coarse.column(name)), strict=True):
            if is_fine and len(us) and np.abs(us).max() > _MOST_US:
                return {}, f"column '{name}' has INT96 timestamps beyond the years 1678 to 2261, and its type says ns"
            if not is_fine and (us * _NS_IN_US != ns).any():  # both overflow alike
                return {}, (
                    f"column '{name}' has INT96 timestamps with parts of a microsecond; write the column as "
                    "timestamps of nanoseconds that are INT64"
                )
    return columns, ""


def _written(metadata: pq.FileMetaData) -> pa.Schema:
    text = (metadata.metadata or {}).get(ARROW_SCHEMA, b"")
    with suppress(CorruptEntry, UnicodeDecodeError):
        return decode_schema(text.decode())
    return pa.schema([])


def _has_nanoseconds(schema: pa.Schema, name: str) -> bool:
    number = schema.get_field_index(name)
    return number >= 0 and "timestamp[ns" in str(schema.field(number).type)


def _instants(array: pa.Array) -> Iterator[npt.NDArray[np.int64]]:
    if pa.types.is_timestamp(array.type):
        yield array.drop_null().cast(pa.int64()).to_numpy()
    elif pa.types.is_map(array.type):
        yield from _instants(array.keys)
        yield from _instants(array.items)
    elif pa.types.is_struct(array.type):
        for inner in array.flatten():
            yield from _instants(inner)
    elif pa.types.is_nested(array.type):
        yield from _instants(array.flatten())
