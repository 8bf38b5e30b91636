"""Hive partitions of inputs are columns of every format, and an output can have the same folders."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InvalidRequest
from qinfer.jobs.job import JobSpec, Output, check_spec
from qinfer.jobs.plan import JobPlan, UnplannedJob
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import TensorSpec
from qinfer.storage.hive import partition_values
from qinfer.storage.open import store_for
from qinfer.storage.store import CommitOutcome
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import ReadLimits
from qinfer.testing import stub_spec
from tests.support.jobs.bulk_data import ANY_FILE, model_of, tensor, write
from tests.support.servers import object_stores

MODEL = stub_spec(dims=(1,))
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)


def table_of(folder: Path, extension: str, *partitions: str, rows: int = 3) -> None:
    """Writes a file of some rows in each of some folders; `x` counts on."""
    for number, partition in enumerate(partitions):
        path = folder / "table" / partition / f"part-0.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, pa.table({"x": [float(number * rows + row) for row in range(rows)]}))


def spec_of(folder: Path, **fields: Any) -> JobSpec:
    output = Output(f"file://{folder}/out", partition_by=fields.pop("partition_by", ()))
    inputs = fields.pop("inputs", (f"file://{folder}/table",))
    spec = JobSpec(model="stub", inputs=inputs, output=output, **{"partitioning": "hive", **fields})
    check_spec(spec)
    return spec


def planned(folder: Path, inputs: tuple[TensorSpec, ...] = MODEL.inputs, **fields: Any) -> JobPlan:
    spec, model = spec_of(folder, **fields), model_of(inputs, MODEL.outputs)
    examine(spec, model, ANY_FILE)
    return make_plan(UnplannedJob("job-1", spec, model, "hash", ANY_FILE), PACE)


def rows_of(plan: JobPlan, *columns: str, read_bytes: int = 2**26) -> list[tuple[Any, ...]]:
    """Reads all shards of a plan, as workers do."""
    found: list[tuple[Any, ...]] = []
    schema = decode_schema(plan.schema)
    for shard in plan.shards:
        with closing(
            ShardReader(shard, columns, schema, plan.spec, limits=ReadLimits.from_read_bytes(read_bytes))
        ) as reader:
            while (batch := reader.read(1000)) is not None:
                assert batch.record.schema.equals(reader.schema)
                assert sum(segment.rows for segment in batch.segments) == batch.record.num_rows
                found += zip(*(batch.record.column(name).to_pylist() for name in columns), strict=True)
    return found


@pytest.mark.parametrize("extension", ["parquet", "arrow", "csv", "jsonl"])
def test_folders_are_columns_of_every_format(tmp_path: Path, extension: str) -> None:
    """In any place among the others; a folder is an input, and its files are sorted."""
    table_of(tmp_path, extension, "country=de/day=2026-11-01", "country=fr/day=2026-11-02")

    plan = planned(tmp_path, passthrough=("country", "day"))

    assert decode_schema(plan.schema) == pa.schema(
        [("x", pa.float64()), ("country", pa.string()), ("day", pa.string())]
    )
    expected = [("de", float(x), "2026-11-01") for x in range(3)] + [
        ("fr", float(x), "2026-11-02") for x in range(3, 6)
    ]
    assert rows_of(plan, "country", "x", "day") == expected


def test_values_are_decoded(tmp_path: Path) -> None:
    """Percent signs, and the name for null; whole numbers are numbers where all are."""
    table_of(tmp_path, "parquet", "a%20b=x%2Fy/n=07", "a%20b=__HIVE_DEFAULT_PARTITION__/n=-12", rows=1)

    plan = planned(tmp_path)

    assert decode_schema(plan.schema).types == [pa.float64(), pa.string(), pa.int64()]
    assert rows_of(plan, "a b", "n", "x") == [(None, -12, 1.0), ("x/y", 7, 0.0)]


@pytest.mark.parametrize("other", ["8.5", "x", "1" * 19])
def test_one_value_that_is_no_whole_number_makes_all_text(tmp_path: Path, other: str) -> None:
    table_of(tmp_path, "parquet", "n=07", f"n={other}", rows=1)
    assert sorted(value for value, _ in rows_of(planned(tmp_path), "n", "x")) == sorted(["07", other])


def test_numbers_stay_text_where_the_job_needs_text(tmp_path: Path) -> None:
    """A key, what is copied, or an input of BYTES: `007` stays `007`, as in CSV."""
    table_of(tmp_path, "parquet", "shop=007", rows=1)
    assert rows_of(planned(tmp_path, passthrough=("*",)), "shop", "x") == [("007", 0.0)]
    assert rows_of(planned(tmp_path, key="shop"), "shop", "x") == [("007", 0.0)]
    text = (*MODEL.inputs, tensor("shop", "BYTES", 1))
    assert rows_of(planned(tmp_path, inputs=text), "shop", "x") == [("007", 0.0)]


def test_folders_feed_inputs_of_numbers(tmp_path: Path) -> None:
    table_of(tmp_path, "parquet", "hour=07", rows=1)
    numbers = (*MODEL.inputs, tensor("hour", "INT64", 1))
    assert rows_of(planned(tmp_path, inputs=numbers), "hour", "x") == [(7, 0.0)]


def test_without_partitioning_folders_are_no_columns(tmp_path: Path) -> None:
    table_of(tmp_path, "parquet", "country=de")
    assert decode_schema(planned(tmp_path, partitioning="", passthrough=("*",)).schema).names == ["x"]


@pytest.mark.parametrize(
    ("partitions", "fields", "said"),
    [
        (["x=1"], {}, "has the column 'x', and its folder has one of that name; leave out 'partitioning'"),
        (["a=1", "b=1"], {}, r"a=1/part-0.parquet' is in a folder 'a=…', and '.*b=1/part-0.parquet' is in none; move"),
        (["a=1", "a=1/b=1"], {}, r"'.*b=1/part-0.parquet' is in a folder 'b=…', and '.*a=1/part-0.parquet' is in none"),
        (["a=1/a=2"], {}, "is in two folders named 'a'; rename one"),
        (["a=%FF"], {}, "is not UTF-8 after percent-decoding"),
        (
            ["a=1"],
            {"partition_by": ("x",)},
            "'x', but no folder of the inputs has that name; there are a: an output",
        ),
        (["a=1"], {"partition_by": ("a",), "key": "a"}, "'a', which 'key' copies into the parts; leave it out of one"),
        (["a=1"], {"partition_by": ("a",), "passthrough": ("a",)}, "'a', which 'passthrough' copies into the parts"),
        (["a=1"], {"partition_by": ("a",), "partitioning": ""}, 'is for jobs with "partitioning": "hive"; add that'),
        (["a=1"], {"partition_by": ("a", "a")}, "field 'output.partition_by' names 'a' twice"),
        (["a=1"], {"columns": {"x": "a"}}, "the job reads only names of folders; name a column of the files"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    tmp_path: Path, partitions: list[str], fields: dict[str, Any], said: str
) -> None:
    table_of(tmp_path, "parquet", *partitions)
    with pytest.raises(InvalidRequest, match=said):
        planned(tmp_path, **fields)


def test_an_output_in_folders_has_parts_of_one_partition_each(tmp_path: Path) -> None:
    """Shards end where the folder's values change, in the order of the rows; names are spelled as in the inputs."""
    table_of(tmp_path, "parquet", "c=d%20e/day=1", "c=d%20e/day=2", "c=fr/day=1", "c=fr/day=2")

    one = planned(tmp_path, partition_by=("c",), passthrough=("*",))
    two = planned(tmp_path, partition_by=("day", "c"))

    assert [shard.part for shard in one.shards] == ["c=d%20e/part-00000.parquet", "c=fr/part-00001.parquet"]
    assert [shard.rows for shard in one.shards] == [6, 6]
    assert [shard.part.rpartition("/")[0] for shard in two.shards] == [
        "day=1/c=d%20e",
        "day=2/c=d%20e",
        "day=1/c=fr",
        "day=2/c=fr",
    ]
    for plan in (one, two):
        assert all(len({partition_values(r.url)["c"] for r in shard.ranges}) == 1 for shard in plan.shards)
        assert sum(shard.rows for shard in plan.shards) == plan.rows == 12


def test_an_output_without_rows_has_a_folder_too(tmp_path: Path) -> None:
    table_of(tmp_path, "parquet", "c=de", rows=0)
    plan = planned(tmp_path, partition_by=("c",))
    assert [(shard.part, shard.rows) for shard in plan.shards] == [("c=de/part-00000.parquet", 0)]


@pytest.mark.parametrize("small_bytes", [0, 2**22])
def test_tables_in_a_bucket_are_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    """Percent signs of their names are as they were, whichever client reads them."""
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", small_bytes)
    table_of(tmp_path, "parquet", "c=d%20e", "c=fr")
    with object_stores.s3("partitions") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        table = bucket.upload(tmp_path / "table", to="table")
        spec = spec_of(tmp_path, inputs=(table,), partition_by=("c",))
        grant = UrlGrant((*ANY_FILE.read, table), ANY_FILE.write)
        plan = make_plan(UnplannedJob("job-1", spec, model_of(MODEL.inputs), "hash", grant), PACE)
        assert rows_of(plan, "c", "x") == [("d e", float(x)) for x in range(3)] + [
            ("fr", float(x)) for x in range(3, 6)
        ]

        (tmp_path / "part").write_bytes(b"some")
        for shard in plan.shards:
            url = f"{table}/out/{shard.part}"
            store = store_for(url)
            assert store.commit_if_absent(tmp_path / "part", url) is CommitOutcome.CREATED
            assert store.commit_if_absent(tmp_path / "part", url) is CommitOutcome.EXISTS
            assert [found.url for found in store.scan(url.rpartition("/")[0])] == [url]


def test_long_values_take_no_more_memory_than_rows_may(tmp_path: Path) -> None:
    """Each row has the whole value."""
    table_of(tmp_path, "parquet", "/".join(f"{name}={'v' * 200}" for name in "abcde"), rows=5000)
    plan = planned(tmp_path)
    shard, schema = max(plan.shards, key=lambda shard: shard.rows), decode_schema(plan.schema)
    with closing(
        ShardReader(shard, ("x", *"abcde"), schema, plan.spec, limits=ReadLimits.from_read_bytes(6 * 2**20))
    ) as reader:
        sizes = []
        while (batch := reader.read(5000)) is not None:
            sizes.append((batch.record.num_rows, batch.record.nbytes))
    assert sum(rows for rows, _ in sizes) == shard.rows
    assert max(size for _, size in sizes) <= 2 * 2**20


def test_rows_that_cannot_be_read_are_in_their_partition(tmp_path: Path) -> None:
    """What the folder says is known all the same."""
    table_of(tmp_path, "parquet", "c=de", "c=fr")
    path = tmp_path / "table/c=fr/part-0.parquet"
    content = path.read_bytes()
    end = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    path.write_bytes(content[:4] + b"\xff" * (end - 4) + content[end:])
    plan = planned(tmp_path, bad_files="skip")
    assert rows_of(plan, "c", "x") == [("de", 0.0), ("de", 1.0), ("de", 2.0), *[("fr", None)] * 3]
