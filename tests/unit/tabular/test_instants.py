"""Instants of Parquet's INT96, as Spark, Hive and Impala write them: as they are, or refused by name."""

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.tabular.schemas import pick
from qinfer.tabular.source import SourceBroken, find_files, read_footer
from tests.support.jobs.bulk_data import shard_of
from tests.unit.jobs.test_rows import read

STILL_VALID_US = 253402214400 * 10**6  # 9999-12-31
INSTANTS = [STILL_VALID_US, None, 1769860800123456, -62135596800 * 10**6]
US, NS = pa.timestamp("us"), pa.timestamp("ns")
FINE = [STILL_VALID_US + 1, None, 1704067200123456789, -1]


def int96(path: Path, table: pa.Table, **more: Any) -> str:
    pq.write_table(table, path, use_deprecated_int96_timestamps=True, **more)
    return f"file://{path}"


def table_of(values: list[Any], unit: pa.DataType) -> pa.Table:
    instants = pa.array(values, unit)
    keys = pa.array([[("a", value)] for value in values], pa.map_(pa.string(), unit))
    return pa.table(
        {
            "id": pa.array(range(len(values)), pa.int64()),
            "text": pa.array(["long" * 10] * len(values)),
            "t": instants,
            "list": pa.array([[value, value] for value in values], pa.list_(unit)),
            "lists": pa.array([None, [values], [], [None]], pa.list_(pa.list_(unit))),
            "s": pa.StructArray.from_arrays([instants, instants], ["a", "b"]),
            "map": keys,
        }
    )


def read_back(url: str, *columns: str) -> pa.Table:
    (file,) = find_files([url])
    schema = read_footer(file, "parquet").schema
    batches = read(shard_of(url), 3, schema, columns)
    return pa.Table.from_batches([batch.record for batch in batches])


@pytest.mark.parametrize("store_schema", [True, False])
@pytest.mark.parametrize("column", ["t", "list", "lists", "s", "s.a", "map"])
def test_instants_beyond_nanoseconds_are_read_as_microseconds(
    tmp_path: Path, column: str, *, store_schema: bool
) -> None:
    table = table_of(INSTANTS, US)
    url = int96(tmp_path / "a.parquet", table, store_schema=store_schema, row_group_size=3)

    found = read_back(url, "id", column, "text")

    wanted = pick(table.combine_chunks().to_batches()[0], ["id", column, "text"])
    assert found.to_pydict() == pa.Table.from_batches([wanted]).to_pydict()


@pytest.mark.parametrize("column", ["t", "list", "lists", "s", "s.b", "map"])
def test_nanoseconds_of_arrow_stay_nanoseconds(tmp_path: Path, column: str) -> None:
    table = table_of(FINE, NS)

    found = read_back(int96(tmp_path / "a.parquet", table), column)

    wanted = pick(table.combine_chunks().to_batches()[0], [column])
    assert found.combine_chunks().to_batches()[0].column(0).equals(wanted.column(0))


@pytest.mark.parametrize("column", ["t", "list", "lists", "s", "s.a", "map"])
def test_parts_of_a_microsecond_are_refused_by_name_rather_than_cut_off(tmp_path: Path, column: str) -> None:
    url = int96(tmp_path / "a.parquet", table_of(FINE, NS), store_schema=False)

    with pytest.raises(SourceBroken, match=rf"column '{column[0]}.*' has INT96 timestamps with parts of a microsecond"):
        read_back(url, column)


def test_what_says_nanoseconds_and_has_more_is_refused(tmp_path: Path) -> None:
    """A writer may keep the schema of other columns in the footer."""
    schema = pq.read_schema(int96(tmp_path / "ns.parquet", table_of(FINE, NS))[len("file://") :])
    table = pa.table({"t": pa.array(INSTANTS, US)})
    note = pa.schema([schema.field("t")]).serialize().to_pybytes()
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, table.schema, use_deprecated_int96_timestamps=True, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(note).decode()})

    with pytest.raises(SourceBroken, match="beyond the years 1678 to 2261"):
        read_back(f"file://{path}", "t")
