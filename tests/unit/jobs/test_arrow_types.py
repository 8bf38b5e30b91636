"""Every type of Arrow in every use and every format: converted, or refused when the job is created."""

from contextlib import closing, suppress
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any, get_args

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.client.job_output import read_text, text_schema
from qinfer.errors import InvalidRequest
from qinfer.jobs.columns import check
from qinfer.jobs.job import JobSpec, Output, OutputFormat
from qinfer.jobs.outputs import OutputColumns, ScoredRows
from qinfer.jobs.parts import PartColumns, PartMetadata, PartWriter, _as_text
from qinfer.jobs.shard_rows import ShardReader
from qinfer.tabular.batches import RowErrors
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.source import find_files, format_of, read_footer
from tests.support.jobs.bulk_data import job_of, model_of, shard_of, tensor, write

TEXTS, BYTES = ["a", 'b"é', None], [b"a", b"\xff", None]
UUIDS = pa.array([b"0123456789abcdef", b"fedcba9876543210", None], pa.binary(16))
RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", None]))
LISTS = [[1], None, [2, 3]]
WORDS = [["a"], None, ["b"]]
NUMBERS = [1, None, 2]
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def extension(kind: pa.DataType, storage: pa.Array) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, storage)


ARRAYS: dict[str, pa.Array] = {
    **{str(kind): pa.array(TEXTS, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{str(kind): pa.array(BYTES, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "fixed_size_binary": UUIDS,
    **{str(kind): pa.array(NUMBERS, kind) for kind in (pa.int8(), pa.int64(), pa.uint64(), pa.float64())},
    "halffloat": pa.array([np.float16(1.5), None, np.float16(2)], pa.float16()),
    "bool": pa.array([True, None, False]),
    **{
        str(kind): pa.array([Decimal("1.10"), None, Decimal(2)], kind)
        for kind in (pa.decimal32(5, 2), pa.decimal64(5, 2), pa.decimal128(5, 2), pa.decimal256(50, 2))
    },
    **{
        str(kind): pa.array(NUMBERS, kind)
        for kind in (
            *(pa.time32("s"), pa.time64("ns"), pa.date32(), pa.timestamp("s"), pa.timestamp("us", "Europe/Berlin")),
            *(pa.duration("ms"), pa.timestamp("ns")),
        )
    },
    "date64": pa.array([86_400_000, None, 0], pa.date64()),
    "interval": pa.array([(1, 2, 3), None, None], pa.month_day_nano_interval()),
    "null": pa.nulls(3),
    **{
        str(kind): pa.array(LISTS, kind)
        for kind in (
            *(pa.list_(pa.int64()), pa.large_list(pa.int64())),
            pa.list_view(pa.int64()),
            pa.large_list_view(pa.int64()),
        )
    },
    "list<string_view>": pa.array(WORDS, pa.list_(pa.string_view())),
    "fixed_size_list<string_view>": pa.array(WORDS, pa.list_(pa.string_view(), 1)),
    **{
        f"{kind}": pa.array([["a"], None, ["b", None]], kind)
        for kind in (pa.list_view(pa.string_view()), pa.large_list_view(pa.binary_view()))
    },
    "struct<list_view<string_view>>": pa.array(
        [{"l": None}, None, {"l": ["a"]}], pa.struct([("l", pa.list_view(pa.string_view()))])
    ),
    "list<list_view<string_view>>": pa.array([[None, ["a"]], None, []], pa.list_(pa.list_view(pa.string_view()))),
    "fixed_size_list<list_view<string_view>>": pa.array(
        [[None, ["a"]], None, [["b"], []]], pa.list_(pa.list_view(pa.string_view()), 2)
    ),
    "map<list_view<string_view>>": pa.array(
        [[("a", None), ("b", ["c"])], None, []], pa.map_(pa.string_view(), pa.list_view(pa.string_view()))
    ),
    "map<list_view>": pa.array([[("a", None), ("b", [1])], None, []], pa.map_(pa.string(), pa.list_view(pa.int8()))),
    **{
        f"runs<{values.type}>": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), values)
        for values in (
            pa.array(["a", None], pa.string_view()),
            pa.array([b"a", None], pa.binary_view()),
            pa.array(["a", None]).dictionary_encode(),
            pa.array([["a"], None], pa.list_(pa.string_view())),
            pa.array([["a"], None], pa.list_view(pa.string_view())),
            pa.array([{"a": "b"}, None], pa.struct([("a", pa.string_view())])),
            pa.array([1, None], pa.timestamp("us")),
            pa.array([Decimal("1.10"), None], pa.decimal256(50, 2)),
        )
    },
    "dictionary<decimal>": pa.array([Decimal("1.10"), None, Decimal(2)], pa.decimal128(5, 2)).dictionary_encode(),
    "dictionary<timestamp>": pa.array([1, None, 2], pa.timestamp("us", "UTC")).dictionary_encode(),
    "list<list_view>": pa.array([[[1]], None, []], pa.list_(pa.list_view(pa.int64()))),
    "list<dictionary>": pa.array(WORDS, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "list<uuid>": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), extension(pa.uuid(), UUIDS)),
    "struct<string_view>": pa.array([{"a": "x"}, None, {"a": None}], pa.struct([("a", pa.string_view())])),
    "struct<binary_view>": pa.array([{"a": b"x"}, None, {"a": None}], pa.struct([("a", pa.binary_view())])),
    "struct<>": pa.array([{}, None, {}], pa.struct([])),
    "struct<runs>": pa.StructArray.from_arrays([RUNS], ["a"]),
    "map<string_view>": pa.array([[("a", 1)], None, []], pa.map_(pa.string_view(), pa.int64())),
    "list<struct>": pa.array(
        [[{"role": "user", "content": "a"}], None, []],
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    ),
    "list<map>": pa.array([[[("a", 1)]], None, []], pa.list_(pa.map_(pa.string(), pa.int64()))),
    "list<duration>": pa.array(LISTS, pa.list_(pa.duration("s"))),
    "list<decimal>": pa.array([[Decimal("1.10")], None, []], pa.list_(pa.decimal128(5, 2))),
    "list<binary_view>": pa.array([[b"\xff"], None, []], pa.list_(pa.binary_view())),
    "list<bool8>": pa.ListArray.from_arrays(
        pa.array([0, 1, None, 2], pa.int32()), extension(pa.bool8(), pa.array([1, 0], pa.int8()))
    ),
    "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "runs": RUNS,
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "dictionary<string_view>": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None], pa.int8()), pa.array(["a", "b"], pa.string_view())
    ),
    "uuid": extension(pa.uuid(), UUIDS),
    "json": extension(pa.json_(pa.string()), pa.array(['{"a": 1}', "2", None])),
    "bool8": extension(pa.bool8(), pa.array([1, 0, None], pa.int8())),
    "opaque": extension(pa.opaque(pa.int32(), "t", "v"), pa.array(NUMBERS, pa.int32())),
    "tensor": extension(
        pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    ),
    "sparse_union": pa.UnionArray.from_sparse(pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(TEXTS)]),
    "dense_union": pa.UnionArray.from_dense(
        pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([1, 2]), pa.array(["a"])]
    ),
}
REFUSED = {
    "parquet": {"struct<>", "struct<runs>", "interval", "sparse_union", "dense_union"},
    "arrow": {"struct<runs>"},
    "csv": {"struct<runs>", "interval", "sparse_union", "dense_union"},
    "jsonl": {"struct<runs>", "interval", "sparse_union", "dense_union"},
}
"""Output format → the types that it does not have; all others are written as they are, or converted."""
MODEL = model_of([tensor("x", "INT64", 1)], [tensor("y", "INT64", 1)])


@pytest.mark.parametrize("source", ["parquet", "arrow"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_type_is_copied_or_refused(tmp_path: Path, name: str, source: str) -> None:
    table = pa.table({"x": [1, 2, 3], "c": ARRAYS[name]})
    with suppress(pa.ArrowException):
        write(tmp_path / f"a.{source}", table)
    if not (tmp_path / f"a.{source}").exists() or not (tmp_path / f"a.{source}").stat().st_size:
        pytest.skip("no file has such a column")
    url = f"file://{tmp_path}/a.{source}"
    try:
        (file,) = find_files([url])
        schema = read_footer(file, format_of(url, "")).schema
    except InvalidRequest:
        pytest.skip("no file has such a column")
    for output_format, is_split in product(get_args(OutputFormat), (False, True)):
        output = Output(f"file://{tmp_path}/out", output_format, failed_rows="separate" if is_split else "inline")
        spec = job_of(output=output, passthrough=("c",)) if is_split else job_of(output=output, key="c")
        if name in REFUSED[output_format]:
            with pytest.raises(InvalidRequest, match="the copied column 'c' is of type"):
                check(spec, MODEL, schema)
        else:
            found = copied(tmp_path / output_format / str(is_split), url, schema, spec)
            wanted = table["c"].to_pylist()[: 1 if is_split else 3]
            if output_format in ("csv", "jsonl"):
                found, wanted = [[value is None for value in values] for values in (found, wanted)]
            assert found == wanted, (output_format, is_split)


def copied(folder: Path, url: str, schema: pa.Schema, spec: JobSpec) -> list[Any]:
    """Writes a part of a file of three rows; returns its column `c`. The last row fails if failed rows are separate."""
    folder.mkdir(parents=True)
    check(spec, MODEL, schema)
    output, is_split = spec.output, spec.output.is_split
    columns = OutputColumns(spec, MODEL, schema, [url])
    split = PartColumns(columns.good, columns.failed) if is_split else None
    path = folder / f"part-00000.{output.format}"
    with (
        closing(ShardReader(shard_of(url), ("x", "c"), schema)) as reader,
        PartWriter(path, columns.schema, output, PartMetadata("job", 0, 3, ("e",), "hash"), split) as writer,
    ):
        while (batch := reader.read(2)) is not None:
            rows = batch.record.num_rows
            errors = RowErrors(rows)
            if is_split:
                errors.mark(np.array([rows - 1]), "failed", "as it should")
            writer.write(columns.encode(batch, [ScoredRows(None, {"y": np.arange(rows).reshape(-1, 1)})], errors))

    if output.format in ("csv", "jsonl"):
        there = pa.schema([columns.schema.field(name) for name in (columns.good if is_split else columns.schema.names)])
        return list(read_text(fsspec.filesystem("file"), str(path), text_schema(_as_text(there)))["c"].to_pylist())
    found = pq.read_table(path) if output.format == "parquet" else pa.ipc.open_file(path).read_all()
    return list(found["c"].to_pylist())


@pytest.mark.parametrize("name", ARRAYS)
def test_a_type_feeds_an_input_or_is_refused(tmp_path: Path, name: str) -> None:
    url = write(tmp_path / "a.arrow", pa.table({"x": ARRAYS[name]}))
    (file,) = find_files([url])
    schema = read_footer(file, "arrow").schema
    for datatype, dims in product(("INT64", "FP32", "BOOL", "BYTES"), ((1,), (-1,))):
        try:
            inputs = InputColumns(job_of(), model_of([tensor("x", datatype, *dims)]), schema)
        except InvalidRequest:
            continue

        with closing(ShardReader(shard_of(url), ("x",), schema)) as reader:
            batch = reader.read(3)
            assert batch is not None
            found = inputs.decode(batch.record)

        assert sum(piece.count for piece in found.pieces) + found.errors.count == 3, (datatype, dims)
