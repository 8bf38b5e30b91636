"""Parts as CSV and JSON lines: everybody reads them, and their commit records tell what they are."""

import gzip
import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from qinfer.client.job_output import read_text, text_schema
from qinfer.jobs.job import Output, OutputFormat
from qinfer.jobs.parts import PartBroken, PartWriter, part_metadata, validate_part
from qinfer.jobs.plan import RECORDS, PartInfo, Shard
from qinfer.storage.open import store_for
from qinfer.tabular.texts import json_texts
from tests.support.jobs.bulk_data import HASH, JOB

INSTANT = datetime(2026, 1, 31, 12, 0, 0, 5, UTC)
ROWS = pa.table(
    {
        "id": pa.array(["007", 'say "hi",\n', "", "é"]),
        "y": pa.array([1.5, 0.1, float("nan"), None], pa.float32()),
        "n": pa.array([2**63 - 1, -1, 0, None], pa.int64()),
        "p": pa.array([[0.1, 1.0], [0.25, 2.0], None, [0.5, 3.0]], pa.list_(pa.float32(), 2)),
        "error_code": pa.array([None, None, "bad", None], pa.string()),
        "error_message": pa.array([None, None, "no\tgood", None], pa.string()),
    }
)
FORMATS: list[OutputFormat] = ["csv", "jsonl"]
every_format = pytest.mark.parametrize("format_", FORMATS)
every_compression = pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])


def part(folder: Path, output: Output, table: pa.Table = ROWS, *, record: bool = True) -> tuple[Shard, str]:
    """Writes a table as a part, and its commit record; returns its shard and URL."""
    shard = Shard(0, f"part-00000.{output.extension}", table.num_rows, ())
    path = folder / shard.part
    with PartWriter(path, table.schema, output, part_metadata(JOB, shard, HASH)) as writer:
        for batch in table.to_batches():
            writer.write(batch)
    url = f"file://{path}"
    if record:
        writer.prepare(store_for(url), f"file://{folder}", shard.part)
    return shard, url


def check(shard: Shard, url: str) -> PartInfo:
    return validate_part(store_for(url), url, shard, JOB, HASH)


def records_of(folder: Path, shard: Shard) -> list[Path]:
    return sorted((folder / RECORDS / shard.part).iterdir())


@every_format
@every_compression
def test_rows_are_read_back_in_their_types(tmp_path: Path, format_: OutputFormat, compression: str) -> None:
    """NaN is null in JSON, which has none; lists come without their size."""
    shard, url = part(tmp_path, Output("", format_, compression))
    info = check(shard, url)

    schema = text_schema(info.schema)
    found = read_text(fsspec.filesystem("file"), url.removeprefix("file://"), schema)

    assert (info.rows, info.errors) == (4, 1)
    assert schema.field("p").type == pa.list_(pa.float32())
    assert schema.field("y").type == pa.float32()
    expected = ROWS.cast(schema)
    if format_ == "jsonl":
        expected = expected.set_column(1, "y", pa.array([1.5, 0.1, None, None], pa.float32()))
    for name in expected.column_names:
        assert str(found[name].to_pylist()) == str(expected[name].to_pylist()), name


@every_format
def test_others_read_them(tmp_path: Path, format_: OutputFormat) -> None:
    """The header of CSV, keys of JSON, text that looks like a number, quotes, line ends, and empty text."""
    import duckdb
    import pandas
    import polars

    shard, _ = part(tmp_path, Output("", format_, "gzip"))
    path = tmp_path / shard.part
    is_csv = format_ == "csv"

    pandas_rows = (
        pandas.read_csv(path, dtype={"id": str}) if is_csv else pandas.read_json(path, lines=True, dtype=False)
    )
    plain = gzip.decompress(path.read_bytes())
    polars_rows = (
        polars.read_csv(plain, schema_overrides={"id": polars.String}) if is_csv else polars.read_ndjson(plain)
    )
    # By default duckdb takes quoted empty text for null.
    options = "types={'id': 'VARCHAR'}, allow_quoted_nulls=false" if is_csv else "columns={id: 'VARCHAR', n: 'BIGINT'}"
    duckdb_rows = duckdb.sql(f"SELECT id, n FROM read_{'csv' if is_csv else 'json'}('{path}', {options})")

    assert pandas_rows["id"].fillna("").tolist() == ROWS["id"].to_pylist()
    assert polars_rows["id"].to_list() == ROWS["id"].to_pylist()
    assert polars_rows["n"].to_list() == ROWS["n"].to_pylist()
    assert duckdb_rows is not None
    assert duckdb_rows.fetchall() == list(zip(ROWS["id"].to_pylist(), ROWS["n"].to_pylist(), strict=True))


VALUES: list[tuple[pa.Array, Any]] = [
    (pa.array([b"\xff\x00", b""]), ["/wA=", ""]),
    (pa.array([b"ab"], pa.binary(2)), ["YWI="]),
    (pa.array([[[1], []], None], pa.list_(pa.list_(pa.int8()))), [[[1], []], None]),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))[1:], [None, [3, 4]]),
    (pa.array([{"a": 1, 'b"': ["x"]}, None]), [{"a": 1, 'b"': ["x"]}, None]),
    (pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())), [[{"key": "k", "value": 1}], None]),
    (pa.array(["u", None, "u"]).dictionary_encode(), ["u", None, "u"]),
    (pa.array([True, False, None]), [True, False, None]),
    (pa.array([0.5, float("inf"), None], pa.float16()), [0.5, None, None]),
    (pa.array([1e-7, 1e300, -0.0]), [1e-7, 1e300, -0.0]),
    (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
    (pa.array([Decimal("1.20")]), ["1.20"]),
    (pa.array([INSTANT.replace(tzinfo=None)], pa.timestamp("us")), ["2026-01-31 12:00:00.000005"]),
    (pa.array([INSTANT], pa.timestamp("ns", "UTC")), ["2026-01-31 12:00:00.000005000Z"]),
    (pa.array([date(2026, 1, 31)]), ["2026-01-31"]),
    (pa.array([time(12, 1)]), ["12:01:00.000000"]),
    (pa.array([timedelta(seconds=1)], pa.duration("ms")), [1000]),
    (pa.array(['\x00\x1f\\"\u2028'], pa.large_string()), ['\x00\x1f\\"\u2028']),
    (pa.array([b"\xffok"]).view(pa.string()), ["\ufffdok"]),
    (pa.nulls(2), [None, None]),
]


@pytest.mark.parametrize(("values", "expected"), VALUES, ids=[str(values.type) for values, _ in VALUES])
def test_values_of_every_type_are_json(values: pa.Array, expected: list[object]) -> None:
    found = [None if text is None else json.loads(text) for text in json_texts(values).to_pylist()]

    assert found == expected


@every_format
@every_compression
def test_the_same_rows_are_the_same_bytes(tmp_path: Path, format_: OutputFormat, compression: str) -> None:
    """So that the records of two attempts are one."""
    contents = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shard, url = part(tmp_path / name, Output("", format_, compression))
        contents.add(Path(url.removeprefix("file://")).read_bytes())

    assert len(contents) == 1
    assert len(records_of(tmp_path / "a", shard)) == 1


@every_format
def test_a_part_without_rows_is_a_part(tmp_path: Path, format_: OutputFormat) -> None:
    shard, url = part(tmp_path, Output("", format_), ROWS.slice(0, 0))

    info = check(shard, url)

    assert (info.rows, info.errors) == (0, 0)
    assert read_text(fsspec.filesystem("file"), url.removeprefix("file://"), text_schema(info.schema)).num_rows == 0


@every_format
def test_large_rows_become_text_a_piece_at_a_time(tmp_path: Path, format_: OutputFormat) -> None:
    """Their order stays."""
    count = 300
    columns = {
        "id": pa.array(range(count)),
        "p": pa.array([[float(row)] * 30_000 for row in range(count)], pa.list_(pa.float32())),
        "error_code": pa.nulls(count, pa.string()),
        "error_message": pa.nulls(count, pa.string()),
    }
    _, url = part(tmp_path, Output("", format_), pa.table(columns))

    lines = Path(url.removeprefix("file://")).read_text().splitlines()[-count:]

    keys = [int(line.split(",")[0]) if format_ == "csv" else json.loads(line)["id"] for line in lines]
    assert keys == list(range(count))


# --- commit records ---


@every_format
def test_a_part_without_its_record_is_refused(tmp_path: Path, format_: OutputFormat) -> None:
    """Also one that has another's: of a file of another size."""
    shard, url = part(tmp_path, Output("", format_), record=False)
    path = tmp_path / shard.part

    with pytest.raises(PartBroken, match="no commit record of its size and content"):
        check(shard, url)
    path.unlink()
    part(tmp_path, Output("", format_))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PartBroken, match="no commit record of its size and content"):
        check(shard, url)


def dead_attempt(folder: Path, output: Output) -> None:
    """Leaves the record of an attempt that ended before its part was there: of as many bytes, but another error."""
    table = ROWS.set_column(4, "error_code", pa.array([None, None, "odd", None], pa.string()))
    shard, _ = part(folder, output, table)
    (folder / shard.part).unlink()


@every_format
def test_records_of_attempts_that_died_do_not_count(tmp_path: Path, format_: OutputFormat) -> None:
    """Where several are of the part's size, its bytes tell which is its own."""
    output = Output("", format_)
    dead_attempt(tmp_path, output)
    shard, url = part(tmp_path, output)
    records = records_of(tmp_path, shard)

    assert len({json.loads(record.read_text())["part"]["size_bytes"] for record in records}) == 1
    assert len(records) == 2
    assert check(shard, url).errors == 1
    for record in records:
        said = json.loads(record.read_text())
        record.write_text(json.dumps(said | {"part": said["part"] | {"sha256": said["part"]["sha256"][::-1]}}))
    with pytest.raises(PartBroken, match="no commit record of its size and content"):
        check(shard, url)


@every_format
def test_a_damaged_record_is_refused(tmp_path: Path, format_: OutputFormat) -> None:
    shard, url = part(tmp_path, Output("", format_))
    (record,) = records_of(tmp_path, shard)

    for content in (b"", b"{}", b"\xff", record.read_bytes()[:-1]):
        record.write_bytes(content)
        with pytest.raises(PartBroken, match="is no whole part"):
            check(shard, url)


def test_a_flood_of_records_is_refused(tmp_path: Path) -> None:
    """Nobody reads them all."""
    shard, url = part(tmp_path, Output("", "csv"))
    (record,) = records_of(tmp_path, shard)
    for number in range(64):
        (record.parent / f"{number}.json").write_bytes(record.read_bytes())

    with pytest.raises(PartBroken, match="65 commit records; at most 64"):
        check(shard, url)
