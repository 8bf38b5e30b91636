"""Parts are written so that everybody reads them, and are known again when they are whole."""

import json
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.client.job_output import read_text, text_schema
from qinfer.errors import StoreNotFound
from qinfer.jobs.job import LEVELS, TEXT_FORMATS, Output
from qinfer.jobs.outputs import OutputColumns, ScoredRows
from qinfer.jobs.parts import PartBroken, PartWriter, part_metadata, validate_part
from qinfer.jobs.plan import RECORDS, PartInfo, Shard
from qinfer.jobs.shard_rows import ShardReader
from qinfer.storage.open import store_for
from qinfer.tabular.inputs import InputColumns
from tests.support.jobs import parquet_bytes as raw
from tests.support.jobs.bulk_data import HASH, JOB, job_of, model_of, shard_of, tensor, write

MODEL = model_of(
    [tensor("x", "FP32", 2)],
    [tensor("y", "FP32", 3), tensor("half", "FP16", 1), tensor("label", "BYTES", 1), tensor("words", "BYTES", 2)],
)
ROWS = 100
FORMATS = [
    (format_, compression)
    for format_, compressions in (
        ("parquet", ("zstd", "snappy", "lz4", "gzip", "brotli", "none")),
        ("arrow", ("zstd", "lz4", "none")),
        ("csv", ("none", "gzip", "zstd")),
        ("jsonl", ("none", "gzip", "zstd")),
    )
    for compression in compressions
]


def score(folder: Path, output: Output, size: int = 30, rows: int = ROWS) -> tuple[Shard, str]:
    """Scores a file with a model made of numpy; every tenth row is null. Returns the shard and its part's URL."""
    x = [None if row % 10 == 3 else float(row) for row in range(rows)]
    table = pa.table(
        {
            "a": pa.array(x, pa.float64()),
            "b": pa.array(range(rows), pa.int64()),
            "id": [f"row {n}" for n in range(rows)],
        }
    )
    shard = shard_of(write(folder / "in.parquet", table, group=40), extension=output.extension)
    spec = job_of({"x": ("a", "b")}, output, passthrough=("id", "b"))
    schema = table.schema
    inputs = InputColumns(spec, MODEL, schema)
    columns = OutputColumns(spec, MODEL, schema, [part.url for part in shard.ranges])
    path = folder / shard.part
    with (
        closing(ShardReader(shard, (*inputs.columns, *columns.copied), schema)) as reader,
        PartWriter(path, columns.schema, output, part_metadata(JOB, shard, HASH)) as writer,
    ):
        while (batch := reader.read(size)) is not None:
            decoded = inputs.decode(batch.record)
            scored = [ScoredRows(piece.rows, model(piece.inputs["x"])) for piece in decoded.pieces]
            writer.write(columns.encode(batch, scored, decoded.errors))
    url = f"file://{path}"
    writer.prepare(store_for(url), f"file://{folder}", shard.part)
    return shard, url


def model(x: Any) -> dict[str, Any]:
    labels = np.array([f"é{value:g}".encode() for value in x[:, 0]], dtype=object)
    return {
        "y": np.concatenate([x, x[:, :1] * 2], axis=1),
        "half": x[:, :1].astype(np.float16),
        "label": labels.reshape(-1, 1),
        "words": np.stack([labels, labels], axis=1),
    }


def check_rows(rows: list[dict[str, Any]], url: str) -> None:
    assert len(rows) == ROWS
    for number, row in enumerate(rows):
        assert row["id"] == f"row {number}"
        assert row["b"] == row["_row"] == number
        assert row["_row_group"] == number // 40
        assert row["_file"] == url
        if number % 10 == 3:
            assert row["y"] is row["half"] is row["label"] is row["words"] is None
            assert row["error_code"] == "invalid_request"
            assert row["error_message"] == "column 'a' is null; 'null' of its input can give it a value"
        else:
            assert list(row["y"]) == [number, number, 2 * number]
            assert row["half"] == number
            assert row["label"] == f"é{number}"
            assert list(row["words"]) == [f"é{number}"] * 2
            assert row["error_code"] is None
            assert row["error_message"] is None


def with_pyarrow(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    if path.suffix == ".arrow":
        return list(pa.ipc.open_file(path).read_all().to_pylist())
    (record,) = (path.parent / RECORDS / path.name).iterdir()
    schema = text_schema(json.loads(record.read_text())["schema"])
    return list(read_text(fsspec.filesystem("file"), str(path), schema).to_pylist())


def with_pandas(path: Path) -> list[dict[str, Any]]:
    import pandas

    frame = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_feather(path)
    return [
        {key: value if isinstance(value, np.ndarray) or not pandas.isna(value) else None for key, value in row.items()}
        for row in frame.to_dict("records")
    ]


def with_polars(path: Path) -> list[dict[str, Any]]:
    import polars

    frame = polars.read_parquet(path) if path.suffix == ".parquet" else polars.read_ipc(path)
    return list(frame.to_dicts())


def with_duckdb(path: Path) -> list[dict[str, Any]]:
    import duckdb

    if path.suffix == ".parquet":
        relation = duckdb.sql(f"select * from read_parquet('{path}')")
    else:
        table = pa.ipc.open_file(path).read_all()
        index = table.schema.get_field_index("half")  # duckdb knows no half floats but Parquet's
        table = table.set_column(index, "half", table.column("half").cast(pa.float32()))
        relation = duckdb.from_arrow(table)
    assert relation is not None
    names = relation.columns
    return [dict(zip(names, row, strict=True)) for row in relation.fetchall()]


@pytest.mark.parametrize(("format_", "compression"), FORMATS)
def test_a_part_is_read_back_with_every_compression(tmp_path: Path, format_: Any, compression: str) -> None:
    shard, url = score(tmp_path, Output(url="file:///out", format=format_, compression=compression))

    check_rows(with_pyarrow(tmp_path / shard.part), shard.ranges[0].url)
    info = validate_part(store_for(url), url, shard, JOB, HASH)

    stat = store_for(url).stat(url)
    assert stat is not None
    assert info == PartInfo(url, ROWS, 10, stat.size_bytes, stat.etag, info.schema)
    assert info.schema.startswith("y: fixed_size_list<element: float not null>[3]\nhalf: halffloat\nlabel: string\n")


@pytest.mark.parametrize(
    ("format_", "compression", "level"),
    [
        (format_, compression, level)
        for format_, compression in FORMATS
        if compression in LEVELS and not (compression == "zstd" and format_ in TEXT_FORMATS)
        for level in (1, LEVELS[compression])
    ],
)
def test_every_level_of_a_compression_is_known(tmp_path: Path, format_: Any, compression: str, level: int) -> None:
    output = Output(url="file:///out", format=format_, compression=compression, compression_level=level)

    shard, _ = score(tmp_path, output)

    check_rows(with_pyarrow(tmp_path / shard.part), shard.ranges[0].url)


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
@pytest.mark.parametrize("reader", [with_pandas, with_polars, with_duckdb])
def test_a_part_is_read_by_others(tmp_path: Path, format_: Any, reader: Callable[[Path], list[dict[str, Any]]]) -> None:
    shard, _ = score(tmp_path, Output(url="file:///out", format=format_))

    check_rows(reader(tmp_path / shard.part), shard.ranges[0].url)


def test_parts_in_a_folder_are_one_table(tmp_path: Path) -> None:
    import pandas
    import polars

    shard, url = score(tmp_path, Output(url="file:///out"))
    folder = tmp_path / "out"
    folder.mkdir()
    for number in range(2):
        (folder / f"part-0000{number}.parquet").write_bytes((tmp_path / shard.part).read_bytes())
    (folder / "_SUCCESS").write_text("{}")
    (folder / "_manifest.json").write_text("{}")

    assert pq.read_table(folder).num_rows == 2 * ROWS
    assert polars.scan_parquet(folder / "*.parquet").collect().height == 2 * ROWS
    assert pandas.read_parquet(folder).shape[0] == 2 * ROWS
    assert url.endswith("part-00000.parquet")


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_small_batches_do_not_make_small_groups(tmp_path: Path, format_: Any) -> None:
    shard, _ = score(tmp_path, Output(url="file:///out", format=format_), size=1)
    path = tmp_path / shard.part

    groups = (
        pq.read_metadata(path).num_row_groups if format_ == "parquet" else pa.ipc.open_file(path).num_record_batches
    )
    assert groups == 1
    check_rows(with_pyarrow(path), shard.ranges[0].url)


@pytest.mark.parametrize("rows", [10, 500])
def test_the_rows_of_a_group_are_in_memory_once(tmp_path: Path, rows: int) -> None:
    group_bytes, default = 32 * 2**20, pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)  # counts

    def write_group() -> None:
        schema = pa.schema([*((f"k{number}", pa.int64()) for number in range(200)), ("error_code", pa.string())])
        count = group_bytes // (200 * rows * 8) + 1
        metadata = part_metadata(JOB, Shard(0, "", count * rows, ()), HASH)
        numbers = pa.array(range(rows), pa.int64())
        record = pa.record_batch([*[numbers] * 200, pa.nulls(rows, pa.string())], schema=schema)
        with PartWriter(tmp_path / "part", schema, Output(url=""), metadata) as writer:
            for _ in range(count):
                writer.write(record.take(numbers))

    pa.set_memory_pool(pool)
    try:
        write_group()
    finally:
        pa.set_memory_pool(default)

    assert group_bytes < pool.max_memory() < 1.5 * group_bytes


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_large_parts_have_several_groups(tmp_path: Path, format_: Any) -> None:
    schema = pa.schema([("v", pa.list_(pa.float32(), 1024)), ("error_code", pa.string())])
    rows, batches = 2500, 10
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * 1024, np.float32)), 1024)
    record = pa.record_batch([values, pa.nulls(rows, pa.string())], schema=schema)
    shard = Shard(0, f"part-00000.{format_}", rows * batches, ())
    path = tmp_path / shard.part

    with PartWriter(path, schema, Output(url="", format=format_), part_metadata(JOB, shard, HASH)) as writer:
        for _ in range(batches):
            writer.write(record)

    groups = (
        pq.read_metadata(path).num_row_groups if format_ == "parquet" else pa.ipc.open_file(path).num_record_batches
    )
    assert 2 < groups <= 10
    assert validate_part(store_for("file:///"), f"file://{path}", shard, JOB, HASH).errors == 0


def test_encodings_are_those_that_are_quick(tmp_path: Path) -> None:
    shard, _ = score(tmp_path, Output(url="file:///out"))
    metadata = pq.read_metadata(tmp_path / shard.part).row_group(0)
    encodings = {
        metadata.column(i).path_in_schema: set(metadata.column(i).encodings) for i in range(metadata.num_columns)
    }

    assert "DELTA_BINARY_PACKED" in encodings["_row"]
    assert not any("DICTIONARY" in encoding for encoding in encodings["y.list.element"])
    assert any("DICTIONARY" in encoding for encoding in encodings["_file"])
    assert any("DICTIONARY" in encoding for encoding in encodings["words.list.element"])


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_a_part_without_rows_is_a_part(tmp_path: Path, format_: Any) -> None:
    write(tmp_path / "in.parquet", pa.table({"a": pa.array([], pa.float64())}))
    schema = pa.schema([("y", pa.float32()), ("error_code", pa.string())])
    shard = Shard(0, f"part-00000.{format_}", 0, ())
    path = tmp_path / shard.part

    with PartWriter(path, schema, Output(url="", format=format_), part_metadata(JOB, shard, HASH)):
        pass

    info = validate_part(store_for("file:///"), f"file://{path}", shard, JOB, HASH)
    assert (info.rows, info.errors) == (0, 0)
    assert with_pyarrow(path) == []


def test_a_part_with_too_few_rows_is_not_made(tmp_path: Path) -> None:
    schema = pa.schema([("error_code", pa.string())])
    shard = Shard(0, "part-00000.parquet", 5, ())
    path = tmp_path / shard.part

    with pytest.raises(ValueError, match="a part of 5 rows has 0"):
        PartWriter(path, schema, Output(url=""), part_metadata(JOB, shard, HASH)).close()
    assert not path.exists()


@pytest.mark.parametrize("format_", ["parquet", "arrow", "csv", "jsonl"])
def test_a_part_that_is_given_up_leaves_no_file(tmp_path: Path, format_: Any) -> None:
    schema = pa.schema([("error_code", pa.string())])
    shard = Shard(0, f"part-00000.{format_}", 5, ())
    path = tmp_path / shard.part

    with PartWriter(path, schema, Output(url="", format=format_), part_metadata(JOB, shard, HASH)) as writer:
        writer.write(pa.record_batch([pa.nulls(3, pa.string())], schema=schema))
        writer.abort()
    assert not path.exists()

    def give_up() -> None:
        with PartWriter(path, schema, Output(url="", format=format_), part_metadata(JOB, shard, HASH)) as writer:
            writer.write(pa.record_batch([pa.nulls(3, pa.string())], schema=schema))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        give_up()
    assert not path.exists()


@pytest.mark.parametrize("format_", ["parquet", "arrow", "csv", "jsonl"])
def test_a_part_of_something_else_is_refused(tmp_path: Path, format_: Any) -> None:
    shard, url = score(tmp_path, Output(url="file:///out", format=format_))
    store = store_for(url)
    (one, *rest) = shard.ranges
    replaced = tuple(msgspec.structs.replace(part, etag="other") for part in shard.ranges)

    for other, job, model_hash, text in (
        (shard, "job-2", HASH, "job 'job-1', the plan 'job-2'"),
        (shard, JOB, "other", "model_hash 'model-hash', the plan 'other'"),
        (msgspec.structs.replace(shard, index=1), JOB, HASH, "shard 0, the plan 1"),
        (msgspec.structs.replace(shard, rows=99), JOB, HASH, "rows 100, the plan 99"),
        (msgspec.structs.replace(shard, ranges=replaced), JOB, HASH, "etags"),
    ):
        with pytest.raises(PartBroken, match=text):
            validate_part(store, url, other, job, model_hash)
    assert one.etag not in ("", "other")
    assert len(rest) == 2


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_a_part_that_is_not_whole_is_refused(tmp_path: Path, format_: Any) -> None:
    shard, url = score(tmp_path, Output(url="file:///out", format=format_))
    path = tmp_path / shard.part
    whole = path.read_bytes()
    magic = {"parquet": b"PAR1", "arrow": b"ARROW1"}[format_]
    end = 4 + len(magic)
    footer = len(whole) - end - int.from_bytes(whole[-end : -len(magic)], "little")
    damaged = whole[:footer] + bytes(32) + whole[footer + 32 :]

    for content in (b"x", whole[:-1], whole[: len(whole) // 2], damaged, magic + magic):
        path.write_bytes(content)
        with pytest.raises(PartBroken, match=f"'{url}' is no whole part"):
            validate_part(store_for(url), url, shard, JOB, HASH)
    path.unlink()
    with pytest.raises(StoreNotFound, match="does not exist"):
        validate_part(store_for(url), url, shard, JOB, HASH)


def test_the_footer_of_a_part_that_was_replaced_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    chunk = raw.thrift({2: (raw.I64, 0)})
    group = raw.thrift({1: (raw.LIST, (raw.STRUCT, [chunk] * 1_000_000)), 2: (raw.I64, 0), 3: (raw.I64, 0)})
    path.write_bytes(raw.parquet(1, extra={4: (raw.LIST, (raw.STRUCT, [group]))}))
    url = f"file://{path}"

    with pytest.raises(PartBroken, match=r"is no whole part.*size limit"):
        validate_part(store_for(url), url, Shard(0, path.name, 1, ()), JOB, HASH)


def test_a_part_with_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    schema, shard = pa.schema([("error_code", pa.string()), ("cafe", pa.string())]), Shard(0, "part-00000.arrow", 0, ())
    path = tmp_path / shard.part
    with PartWriter(path, schema, Output(url="", format="arrow"), part_metadata(JOB, shard, HASH)):
        pass
    path.write_bytes(path.read_bytes().replace(b"cafe", b"caf\xe9"))

    with pytest.raises(PartBroken, match=r"is no whole part: .*utf-8"):
        validate_part(store_for(f"file://{path}"), f"file://{path}", shard, JOB, HASH)


def test_the_rows_of_a_part_are_not_read(tmp_path: Path) -> None:
    """A buffer says that it becomes a terabyte: nothing is allocated for it."""
    codes = [None, "a code that compresses well " * 100]
    schema, path = pa.schema([("error_code", pa.string())]), tmp_path / "part-00000.arrow"
    shard, url = Shard(0, path.name, 2, ()), f"file://{path}"
    with PartWriter(path, schema, Output(url="", format="arrow"), part_metadata(JOB, shard, HASH)) as writer:
        writer.write(pa.record_batch([pa.array(codes)], schema=schema))
    length = struct.pack("<q", len(codes[1] or ""))
    assert length in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(length, struct.pack("<q", 2**40)))

    assert validate_part(store_for(url), url, shard, JOB, HASH).errors == 1


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_the_error_of_a_part_does_not_repeat_all_that_it_says(tmp_path: Path, format_: Any) -> None:
    schema, shard = pa.schema([("error_code", pa.string())]), Shard(0, f"part-00000.{format_}", 0, ())
    url = f"file://{tmp_path / shard.part}"
    with PartWriter(
        tmp_path / shard.part, schema, Output(url="", format=format_), part_metadata("j" * 2**20, shard, HASH)
    ):
        pass

    with pytest.raises(PartBroken, match="the plan 'job-1'") as caught:
        validate_part(store_for(url), url, shard, JOB, HASH)
    assert len(caught.value.message) < 1000


def test_another_file_of_the_format_is_refused(tmp_path: Path) -> None:
    url = write(tmp_path / "part-00000.parquet", pa.table({"a": [1]}))

    with pytest.raises(PartBroken, match="it has no metadata of qinfer"):
        validate_part(store_for(url), url, Shard(0, "part-00000.parquet", 1, ()), JOB, HASH)


def test_a_part_says_what_it_is(tmp_path: Path) -> None:
    shard, _ = score(tmp_path, Output(url="file:///out"))

    said = json.loads(pq.read_metadata(tmp_path / shard.part).metadata[b"qinfer"])

    assert said == {
        "job": JOB,
        "shard": 0,
        "rows": ROWS,
        "etags": [shard.ranges[0].etag],
        "model_hash": HASH,
        "errors": 10,
    }
