"""Fields of structs are columns by their paths, in every format that has structs; Parquet files are read no further."""

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns import check
from qinfer.jobs.outputs import OutputColumns
from qinfer.jobs.plan import UnplannedJob
from qinfer.jobs.planning import make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.schemas import Fields, decode_schema, pick, pruned, replaced, select
from qinfer.tabular.source import ReadLimits
from tests.support.jobs.bulk_data import ANY_FILE, HASH, JOB, job_of, model_of, shard_of, tensor, write

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""The type of the images of a Hugging Face data set."""
DEEP = pa.struct([("b", pa.struct([("c", pa.float64()), ("d", pa.list_(pa.int64()))])), ("x.y", pa.int8())])
SCHEMA = pa.schema([("id", pa.int64()), ("image", IMAGE), ("a", DEEP), ("a.b", pa.int16()), ("image.size", pa.int32())])
ROWS: list[dict[str, Any]] = [
    {"id": 1, "image": {"bytes": b"png", "path": "1.png"}, "a": {"b": {"c": 0.5, "d": [1, 2]}, "x.y": 3}},
    {"id": 2, "image": None, "a": {"b": None, "x.y": None}},
    {"id": 3, "image": {"bytes": None, "path": "3.png"}, "a": None},
]


def table(rows: list[dict[str, Any]] = ROWS, schema: pa.Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_pylist(rows, schema)


def read(url: str, schema: pa.Schema, *paths: str) -> list[pa.RecordBatch]:
    with closing(ShardReader(shard_of(url), paths, schema)) as reader:
        batches = []
        while (batch := reader.read(2)) is not None:
            assert batch.record.schema.equals(reader.schema)
            batches.append(batch.record)
        return batches


def test_a_path_leads_to_a_field_and_a_column_of_that_name_goes_before() -> None:
    fields = Fields(SCHEMA)

    assert fields.field("image.bytes") == pa.field("image.bytes", pa.binary())
    assert fields.field("a.b.c") == pa.field("a.b.c", pa.float64())
    assert fields.field("a.x.y") == pa.field("a.x.y", pa.int8())
    assert fields.field("a.b") == pa.field("a.b", pa.int16())
    assert fields.field("image") == SCHEMA.field("image")
    assert [fields.field(path) for path in ("", ".", "a.", "a..b", "image.", "id.x", "a.b.d.list", "b.c")] == [None] * 8
    assert list(fields.paths()) == [
        *SCHEMA.names, "image.bytes", "image.path", "a.b", "a.x.y", "a.b.c", "a.b.d",
    ]  # fmt: skip


def test_a_field_may_be_null_where_its_struct_may() -> None:
    inner = pa.struct([pa.field("x", pa.int8(), nullable=False)])
    schema = pa.schema([("a", inner), pa.field("b", inner, nullable=False)])

    assert [select(schema, [path]).field(0).nullable for path in ("a.x", "b.x")] == [True, False]


def test_names_that_repeat_mean_no_field() -> None:
    schema = pa.schema([("a", pa.struct([("x", pa.int8()), ("x", pa.int8())]))])

    assert (Fields(schema).field("a.x"), len(Fields(schema).places("a.x"))) == (None, 2)


def test_fields_that_can_not_be_taken_out_of_a_struct_have_no_path() -> None:
    """The process ends where pyarrow takes a union out of a struct with nulls; runs lose the struct's nulls."""
    runs = pc.run_end_encode(pa.array(["a", "a"]))
    union = pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])])
    whole = pa.StructArray.from_arrays([runs, union, runs], ["runs", "union", "text"])

    fields = Fields(pa.schema([("a", whole.type)]))

    assert [fields.field(f"a.{name}") for name in ("runs", "union", "text")] == [None, None, None]
    assert Fields(whole.type).field("runs") is not None


@pytest.mark.parametrize("path", ["." * 4_000_000, "a." * 2_000_000, "x" * 4_000_000])
def test_a_long_path_takes_no_time(path: str) -> None:
    nested: pa.DataType = pa.int8()
    for _ in range(50):
        nested = pa.struct([("a", nested)])

    assert Fields(pa.schema([("a", nested)])).places(path) == []


def test_fields_are_picked_with_the_nulls_of_their_structs() -> None:
    (record,) = table().to_batches()

    found = pick(record.slice(1), ["id", "image.path", "a.b.d", "a.b"])

    assert found.to_pylist() == [
        {"id": 2, "image.path": None, "a.b.d": None, "a.b": None},
        {"id": 3, "image.path": "3.png", "a.b.d": None, "a.b": None},
    ]


def test_a_schema_is_pruned_and_its_fields_replaced() -> None:
    assert pruned(SCHEMA, ["a.b.c", "image", "image.path"]) == pa.schema(
        [("image", IMAGE), ("a", pa.struct([("b", pa.struct([("c", pa.float64())]))]))]
    )
    changed = replaced(SCHEMA, "a.b.c", pa.field("a.b.c", pa.int8(), nullable=False))
    assert (select(changed, ["a.b.c"]).field(0).type, changed.names) == (pa.int8(), SCHEMA.names)
    assert select(changed, ["a.b.d", "image"]) == select(SCHEMA, ["a.b.d", "image"])


@pytest.mark.parametrize("extension", ["parquet", "arrow", "jsonl"])
def test_fields_are_read_from_every_format_that_has_structs(tmp_path: Path, extension: str) -> None:
    rows = [{**row, "image": row["image"] and {**row["image"], "bytes": "png"}} for row in ROWS]
    text = pa.struct([("bytes", pa.string()), ("path", pa.string())])
    schema = SCHEMA.set(1, pa.field("image", text))
    url = write(tmp_path / f"x.{extension}", table(rows, schema), group=2)

    found = pa.Table.from_batches(read(url, schema, "image.bytes", "a.b.c", "a.b.d", "id", "a.x.y"))

    assert found.to_pylist() == [
        {"image.bytes": "png", "a.b.c": 0.5, "a.b.d": [1, 2], "id": 1, "a.x.y": 3},
        {"image.bytes": None, "a.b.c": None, "a.b.d": None, "id": 2, "a.x.y": None},
        {"image.bytes": "png", "a.b.c": None, "a.b.d": None, "id": 3, "a.x.y": None},
    ]


@pytest.mark.parametrize("extension", ["parquet", "arrow", "jsonl"])
def test_a_field_and_its_whole_struct_are_read_together(tmp_path: Path, extension: str) -> None:
    schema = pa.schema([("a", pa.struct([("x", pa.int64()), ("y", pa.string())]))])
    url = write(tmp_path / f"x.{extension}", table([{"a": {"x": 1, "y": "z"}}], schema))

    (record,) = read(url, schema, "a.y", "a")

    assert record.to_pylist() == [{"a.y": "z", "a": {"x": 1, "y": "z"}}]


def test_long_values_of_a_dictionary_within_a_struct_are_read(tmp_path: Path) -> None:
    """Such a column is read as indices and a dictionary, so that its rows are cut apart before they are decoded."""
    rows = [{"id": n, "image": {"bytes": bytes([n % 3]) * 2**20, "path": ""}} for n in range(30)]
    url = write(tmp_path / "x.parquet", table(rows))

    with closing(
        ShardReader(shard_of(url), ["image.bytes"], SCHEMA, limits=ReadLimits.from_read_bytes(24 * 2**20))
    ) as reader:
        sizes, first = [], []
        while (batch := reader.read(30)) is not None:
            sizes.append(batch.record.num_rows)
            first += [value[0] for value in batch.record.column("image.bytes").to_pylist()]

    assert first == [n % 3 for n in range(30)]
    assert max(sizes) <= 4


def test_of_a_parquet_file_only_the_field_is_read(tmp_path: Path) -> None:
    """The field beside it is damaged, which whoever reads it sees."""
    path = tmp_path / "x.parquet"
    pq.write_table(table([{"id": n, "image": {"bytes": b"x", "path": str(n)}} for n in range(9)]), path)
    chunk = pq.read_metadata(path).row_group(0).column(2)
    assert chunk.path_in_schema == "image.path"
    data = bytearray(path.read_bytes())
    data[chunk.dictionary_page_offset : chunk.dictionary_page_offset + chunk.total_compressed_size] = bytes(
        chunk.total_compressed_size
    )
    path.write_bytes(data)

    assert pa.Table.from_batches(read(f"file://{path}", SCHEMA, "image.bytes")).num_rows == 9
    with pytest.raises(InvalidRequest):
        read(f"file://{path}", SCHEMA, "image.path")


def test_fields_feed_inputs_are_keys_and_are_copied() -> None:
    spec = job_of({"data": "image.bytes", "v": ("a.b.c", "a.x.y")}, key="image.path", passthrough=("a.b.d", "id"))
    model = model_of([tensor("data", "BYTES", 1), tensor("v", "FP32", 2)])

    check(spec, model, SCHEMA)

    inputs, outputs = InputColumns(spec, model, SCHEMA), OutputColumns(spec, model, SCHEMA)
    decoded = inputs.decode(table().to_batches()[0])
    assert inputs.columns == ("image.bytes", "a.b.c", "a.x.y")
    assert outputs.copied == ("a.b.d", "id", "image.path")
    assert outputs.schema.field("a.b.d").type == pa.list_(pa.int64())
    assert decoded.pieces[0].inputs["v"].tolist() == [[0.5, 3]]
    assert decoded.pieces[0].inputs["data"].tolist() == [[b"png"]]
    assert decoded.errors.count == 2


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("image", r"is of type struct<.*map one of its fields to it, such as 'image.bytes'"),
        ("image.byte", r"no column 'image.byte' of field 'columns.x'; did you mean 'image.bytes'"),
        ("nothing", r"there are id, image, a, a.b, image.size$"),
    ],
)
def test_a_wrong_path_is_refused_with_what_may_be_meant(column: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check(job_of({"x": column}), model_of([tensor("x", "BYTES", 1)]), SCHEMA)


def test_whole_columns_are_left_out_but_no_fields() -> None:
    spec = job_of({"x": "id"}, passthrough=("*",), exclude=("image.path",))

    with pytest.raises(InvalidRequest, match=r"no column 'image.path' of field 'exclude'"):
        check(spec, model_of([tensor("x", "INT64", 1)]), SCHEMA)


def planned(folder: Path, extension: str, *tables: pa.Table) -> pa.Schema:
    """Plans a job over files whose field `a.x` is input and key; returns its columns."""
    for number, one in enumerate(tables):
        write(folder / f"{number}.{extension}", one)
    spec = msgspec.structs.replace(job_of({"x": "a.x"}, key="a.x"), inputs=(f"file://{folder}/*",))
    job = UnplannedJob(JOB, spec, model_of([tensor("x", "FP64", 1)]), HASH, ANY_FILE)
    return decode_schema(make_plan(job, ShardPace(0, 30, 1000, 1000)).schema)


def structs(**fields: Any) -> pa.Table:
    return pa.table({"a": pa.StructArray.from_arrays(list(fields.values()), list(fields))})


def test_the_field_gets_a_type_that_holds_the_values_of_all_files(tmp_path: Path) -> None:
    """The structs may differ in all else."""
    small, large = structs(x=pa.array([1], pa.int8())), structs(y=pa.array(["z"]), x=pa.array([2], pa.int32()))

    schema = planned(tmp_path, "parquet", small, large)

    assert select(schema, ["a.x"]).field(0).type == pa.int32()


def test_a_file_without_the_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"1\.parquet': the inputs have no column 'a\.x'"):
        planned(tmp_path, "parquet", structs(x=pa.array([1])), structs(y=pa.array([1])))


def test_a_field_that_is_a_column_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'a\.x' is a column in one of .*, and a field of a struct in the other"):
        planned(tmp_path, "parquet", structs(x=pa.array([1])), pa.table({"a.x": [1]}))


def test_a_key_of_fractions_is_text_within_structs_too(tmp_path: Path) -> None:
    schema = planned(tmp_path, "jsonl", structs(x=pa.array([1.5])))

    assert select(schema, ["a.x"]).types == [pa.string()]
