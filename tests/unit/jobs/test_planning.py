"""Plans of real files: what their columns have in common, and what is said when they have not."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.errors import CorruptEntry, InvalidRequest, StoreUnavailable
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import (
    JobPlan,
    SkippedFiles,
    UnplannedJob,
    decode_plan,
    decode_plan_head,
    encode_plan,
    encode_plan_head,
)
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shards import ShardPace
from qinfer.storage.local import LocalStore
from qinfer.storage.store import Stat
from qinfer.tabular.schemas import common_type, decode_schema
from qinfer.tabular.spec import NO_GROUPS, Csv, Range
from qinfer.testing import stub_spec
from tests.support.jobs.bulk_data import ANY_FILE
from tests.support.jobs.bulk_data import write as write_rows

MODEL = stub_spec(dims=(1,))
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)


def write(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(dict(columns)), path, **options)


def planned(folder: Path, pattern: str = "*.parquet", pace: ShardPace = PACE, **fields: Any) -> JobPlan:
    rows_per_part = fields.pop("rows_per_part", 0)
    output = Output("file:///out", rows_per_part=rows_per_part)
    spec = JobSpec(model="stub", inputs=(f"file://{folder}/{pattern}",), output=output, version=3, **fields)
    return make_plan(UnplannedJob("job-1", spec, MODEL, "hash", ANY_FILE), pace)


def test_a_plan_has_all_that_shards_are_made_by(tmp_path: Path) -> None:
    """Files with etags, rows along row groups, columns, and the model."""
    write(tmp_path / "a.parquet", {"x": [1.0] * 5}, row_group_size=2)
    write(tmp_path / "b.parquet", {"x": [1.0] * 3})
    plan = planned(tmp_path, rows_per_part=4)
    urls = [f"file://{tmp_path}/{name}.parquet" for name in "ab"]
    assert [(s.url, s.rows, s.size_bytes > 0, bool(s.etag)) for s in plan.sources] == [
        (urls[0], 5, True, True),
        (urls[1], 3, True, True),
    ]
    (a, a_size), (b, b_size) = ((source.etag, source.size_bytes) for source in plan.sources)
    assert [shard.ranges for shard in plan.shards] == [
        (Range(urls[0], a, 0, 0, 2, 0, 0, a_size), Range(urls[0], a, 1, 2, 2, 0, 0, a_size)),
        (Range(urls[0], a, 2, 4, 1, 0, 0, a_size), Range(urls[1], b, 0, 0, 3, 0, 0, b_size)),
    ]
    assert [shard.part for shard in plan.shards] == ["part-00000.parquet", "part-00001.parquet"]
    assert (plan.rows, plan.job_id, plan.model_hash) == (8, "job-1", "hash")
    assert decode_schema(plan.schema) == pa.schema([("x", pa.float64())])


def test_only_the_files_that_a_busy_store_refuses_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.parquet", {"x": [1.0] * 5})
    tries: Counter[str] = Counter()
    pauses: list[float] = []
    read = LocalStore.open_known

    def busy(store: LocalStore, file: Stat, *, sequential: bool = False) -> BinaryIO:
        name = file.url[-len("b.parquet") :]
        tries[name] += 1
        if name == "b.parquet" and tries[name] <= 3:
            raise StoreUnavailable("SlowDown")
        return read(store, file, sequential=sequential)

    monkeypatch.setattr(LocalStore, "open_known", busy)
    monkeypatch.setattr("qinfer.storage.store.time.sleep", pauses.append)

    plan = planned(tmp_path)

    assert plan.rows == 15
    assert tries == {"a.parquet": 1, "b.parquet": 4, "c.parquet": 1}
    assert len(pauses) == 3
    assert pauses == sorted(pauses)


@pytest.mark.parametrize("name", ["parquet", "csv"])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 8, 100])
def test_a_limit_plans_the_first_rows(tmp_path: Path, name: str, limit: int) -> None:
    """No file beyond them is read, and none of their rows is left out or there twice."""
    for file in "ab":
        if name == "parquet":
            write(tmp_path / f"{file}.parquet", {"x": [1.0] * 5}, row_group_size=2)
        else:
            (tmp_path / f"{file}.csv").write_text("x\n" + "1\n" * 5)
    (tmp_path / f"c.{name}").write_bytes(b"PAR1 torn" if limit <= 10 else b"")
    if limit > 10:
        (tmp_path / f"c.{name}").unlink()

    plan = planned(tmp_path, f"*.{name}", rows_per_part=3, limit=limit)

    ranges = [part for shard in plan.shards for part in shard.ranges]
    rows = [(part.url[-len(f"a.{name}")], part.first_row + row) for part in ranges for row in range(part.rows)]
    assert rows == [(file, row) for file in "ab" for row in range(5)][:limit]
    assert plan.rows == len(rows) == sum(shard.rows for shard in plan.shards)


def test_a_worker_reads_the_head_of_a_plan(tmp_path: Path) -> None:
    """Without its shards, of which there may be many."""
    write(tmp_path / "a.parquet", {"x": [1.0]})
    plan = planned(tmp_path)
    head = decode_plan_head(encode_plan_head(plan))
    assert (head.model_hash, head.schema) == ("hash", plan.schema)
    for data in (b"", b"{}", b"[1]", encode_plan_head(plan)[:-1]):
        with pytest.raises(CorruptEntry, match="plan can't be read"):
            decode_plan_head(data)


def test_inputs_without_a_row_are_one_part_with_columns(tmp_path: Path) -> None:
    """Of the first file that has columns."""
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").write_text("x\n")
    plan = planned(tmp_path, "*.csv")
    assert (plan.rows, len(plan.shards), plan.shards[0].rows) == (0, 1, 0)
    (only,) = plan.shards[0].ranges
    assert only == Range(f"file://{tmp_path}/b.csv", plan.sources[1].etag, NO_GROUPS, 0, 0, 0, size_bytes=2)
    assert decode_schema(plan.schema).names == ["x"]


def test_files_without_rows_among_others_change_nothing(tmp_path: Path) -> None:
    """Whatever the types of their columns seem to be."""
    (tmp_path / "a.csv").write_text("x,id\n")
    (tmp_path / "b.csv").write_text("x,id\n1.5,a\n")
    (tmp_path / "c.csv").write_text("id,x\n")
    plan = planned(tmp_path, "*.csv", passthrough=("id",))
    assert plan.rows == 1
    assert decode_schema(plan.schema) == pa.schema([("x", pa.float64()), ("id", pa.string())])


def test_types_of_several_files_become_one(tmp_path: Path) -> None:
    """Wide enough for all, and in the order of the first file."""
    (tmp_path / "a.csv").write_text("x,id,note,other\n1,7,,yes\n")
    (tmp_path / "b.csv").write_text("note,x,id\nhello,2.5,8\n")
    plan = planned(tmp_path, "*.csv", passthrough=("id", "note"))
    assert decode_schema(plan.schema) == pa.schema(
        [("x", pa.float64()), ("id", pa.string()), ("note", pa.string()), ("other", pa.string())]
    )


def test_a_file_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    """With the column, for an input and for a copied one."""
    write(tmp_path / "a.parquet", {"x": [1.0], "id": [1]})
    write(tmp_path / "b.parquet", {"id": [1]})
    with pytest.raises(InvalidRequest, match=r"'file://.*/b.parquet': the inputs have no column 'x'"):
        planned(tmp_path)
    write(tmp_path / "b.parquet", {"x": [1.0]})
    assert planned(tmp_path).rows == 2
    with pytest.raises(InvalidRequest, match=r"'.*/a.parquet' has the column 'id', and '.*/b.parquet' lacks it"):
        planned(tmp_path, passthrough=("*",))


def test_a_dtype_that_does_not_fit_in_the_middle_is_named(tmp_path: Path) -> None:
    """The file, the column and both types."""
    write(tmp_path / "a.parquet", {"x": [1.0], "id": [1]})
    write(tmp_path / "b.parquet", {"x": ["one"], "id": [1]})
    write(tmp_path / "c.parquet", {"x": [1.0], "id": [1]})
    with pytest.raises(
        InvalidRequest, match=r"'file://.*/b.parquet': column 'x' is of type string, which does not fit"
    ):
        planned(tmp_path)


def test_copied_columns_without_a_common_type_are_named_with_both_files(tmp_path: Path) -> None:
    """And what to do about them."""
    write(tmp_path / "a.parquet", {"x": [1.0], "id": [1]})
    write(tmp_path / "b.parquet", {"x": [1.0], "id": ["one"]})
    said = r"column 'id' is string in '.*/b.parquet' and int64 in '.*/a.parquet'; .* or leave it out of 'passthrough'"
    with pytest.raises(InvalidRequest, match=said):
        planned(tmp_path, passthrough=("id",))


def test_lists_and_scalars_do_not_mix(tmp_path: Path) -> None:
    """A shard reads both files with one type."""
    write(tmp_path / "a.parquet", {"x": [[1.0]]})
    write(tmp_path / "b.parquet", {"x": [1.0]})
    with pytest.raises(InvalidRequest, match=r"column 'x' is double in '.*/b.parquet' and list<.*> in '.*/a.parquet'"):
        planned(tmp_path)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder of 40 files, of which the 18th, 26th and 32nd are cut off."""
    for number in range(40):
        write(tmp_path / f"{number:02d}.parquet", {"x": [1.0]})
    for number in (31, 17, 25):
        content = (tmp_path / f"{number}.parquet").read_bytes()
        (tmp_path / f"{number}.parquet").write_bytes(content[:-5])
    return tmp_path


def test_all_files_that_cannot_be_read_are_named(damaged: Path) -> None:
    """In the order of the inputs, with what to do: one run tells all."""
    with pytest.raises(InvalidRequest) as caught:
        planned(damaged)
    text = caught.value.message.replace(f"file://{damaged}/", "")
    assert text.startswith(
        "3 of 40 input files can't be read; repair or remove them, or skip such files by 'bad_files': \"skip\" "
        "'17.parquet' can't be read as parquet; is it damaged or cut off?"
    )
    assert text.index("'17.parquet'") < text.index("'25.parquet'") < text.index("'31.parquet'")


def test_not_more_files_are_named_than_a_job_s_error_can_hold(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02d}.parquet").write_bytes(b"no Parquet at all")
    write(tmp_path / "60.parquet", {"x": [1.0]})
    with pytest.raises(InvalidRequest, match="at least 20 of 61 input files can't be read") as caught:
        planned(tmp_path)
    assert len(caught.value.message) < 2000
    assert caught.value.message.count(".parquet") == 20


def test_files_that_cannot_be_read_are_skipped_and_listed(damaged: Path) -> None:
    """With their reasons, in the plan and its head; their rows are in no shard."""
    plan = planned(damaged, bad_files="skip")
    assert (plan.rows, len(plan.sources)) == (37, 37)
    assert [file.url[-10:] for file in plan.skipped] == ["17.parquet", "25.parquet", "31.parquet"]
    assert plan.skipped[0].reason.startswith("can't be read as parquet; is it damaged or cut off?")
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan_head(encode_plan_head(plan)).skipped == SkippedFiles(3, plan.skipped)


def test_a_plan_of_a_release_that_skipped_no_files_is_read(damaged: Path) -> None:
    plan = planned(damaged, bad_files="skip")
    former = msgspec.json.decode(encode_plan(plan))
    del former["skipped"], former["spec"]["bad_files"]
    assert decode_plan(msgspec.json.encode(former)).skipped == ()
    assert decode_plan_head(b'{"model_hash":"","schema":""}').skipped == SkippedFiles()


def test_a_job_of_nothing_but_broken_files_fails_in_any_case(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.parquet").write_bytes(b"no Parquet at all")
    with pytest.raises(InvalidRequest, match="2 of 2 input files can't be read; are they of another format"):
        planned(tmp_path, bad_files="skip")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_the_server_may_not_read_is_a_bad_one(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.parquet", {"x": [1.0]})
    (tmp_path / "b.parquet").chmod(0)
    with pytest.raises(InvalidRequest, match=r"/b.parquet' may not be read by this server; change its permissions"):
        planned(tmp_path)
    assert planned(tmp_path, bad_files="skip").rows == 1


def test_files_that_do_not_fit_the_model_are_not_skipped(tmp_path: Path) -> None:
    """They are what the job is wrong about."""
    write(tmp_path / "a.parquet", {"x": [1.0]})
    write(tmp_path / "b.parquet", {"y": [1.0]})
    with pytest.raises(InvalidRequest, match=r"/b.parquet': the inputs have no column 'x'"):
        planned(tmp_path, bad_files="skip")


@pytest.mark.parametrize("extension", ["parquet", "arrow", "csv", "jsonl"])
def test_files_of_no_bytes_have_no_rows(tmp_path: Path, extension: str) -> None:
    """In any format, wherever they are among others."""
    for number in range(40):
        (tmp_path / f"{number:02d}.{extension}").touch()
    source = write_rows(tmp_path / f"30.{extension}", pa.table({"x": [1.5, 2.5]}))
    plan = planned(tmp_path, f"*.{extension}")
    assert (plan.rows, len(plan.sources), plan.skipped) == (2, 40, ())
    assert [r.url for shard in plan.shards for r in shard.ranges] == [source]


def test_files_without_rows_need_not_fit(tmp_path: Path) -> None:
    """A frame without rows is written with columns of no type, or none."""
    write(tmp_path / "a.parquet", {"x": pa.array([], pa.null()), "y": pa.array([], pa.string())})
    write(tmp_path / "b.parquet", {"x": [1.0]})
    write(tmp_path / "c.parquet", {"z": pa.array([], pa.string())})
    plan = planned(tmp_path)
    assert plan.rows == 1
    assert decode_schema(plan.schema).names == ["x"]


def test_one_huge_row_group_is_cut(tmp_path: Path) -> None:
    """By rows, as the pace asks for."""
    table = pa.table({"x": pa.nulls(3_000_000, pa.float32())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3_000_000)
    plan = planned(tmp_path, pace=ShardPace(20_000.0, 30.0, 1, 5_000_000))
    assert [(s.rows, s.ranges[0].first_in_group) for s in plan.shards] == [
        (n, i * n) for i, n in enumerate([600_000] * 5)
    ]


def test_a_thousand_tiny_files_are_a_few_shards(tmp_path: Path) -> None:
    """In order, with every row."""
    write(tmp_path / "0000.parquet", {"x": [1.0, 2.0]})
    content = (tmp_path / "0000.parquet").read_bytes()
    for number in range(1, 1000):
        (tmp_path / f"{number:04d}.parquet").write_bytes(content)
    plan = planned(tmp_path)
    assert [shard.rows for shard in plan.shards] == [256, 512, 512, 360, 256, 104]
    assert [r.url for shard in plan.shards for r in shard.ranges] == [source.url for source in plan.sources]


def test_nulls_and_nested_columns_are_planned(tmp_path: Path) -> None:
    """They are the rows' matter, or copied as they are."""
    nested = pa.array([{"a": [1, 2]}, None], pa.struct([("a", pa.list_(pa.int8()))]))
    write(tmp_path / "a.parquet", {"x": pa.array([None, 1.0], pa.float32()), "nested": nested})
    write(tmp_path / "b.parquet", {"x": pa.array([None, None], pa.float32()), "nested": nested})
    plan = planned(tmp_path, passthrough=("nested",))
    assert decode_schema(plan.schema).field("nested").type == nested.type


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.list_(pa.float32()), pa.list_(pa.float32(), 4), pa.list_(pa.float32())),
        (pa.string(), pa.int64(), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.timestamp("ms", "UTC"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us", "UTC")),
        (pa.timestamp("ns", "Asia/Tokyo"), pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("ns", "Asia/Tokyo")),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8())])),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())]), None),
        (pa.list_(pa.struct([("a", pa.int8())])), pa.list_(pa.struct([("b", pa.int8())])), None),
    ],
)
def test_two_types_have_a_common_one_or_not(one: pa.DataType, other: pa.DataType, common: pa.DataType | None) -> None:
    """Numbers get wider and lists longer; structures stay what they are."""
    assert common_type(one, other) == common
    assert common_type(other, one) == common


def test_a_plan_with_broken_columns_is_none() -> None:
    """Text that is no schema, and no base64 even."""
    for text in ("", "!!", "AAAA"):
        with pytest.raises(CorruptEntry, match="columns of the job's inputs"):
            decode_schema(text)


# --- files with other columns ---


def merged(folder: Path, pattern: str = "*.parquet", **fields: Any) -> pa.Schema:
    return decode_schema(planned(folder, pattern, merge_schema=True, **fields).schema)


def test_columns_that_some_files_lack_are_merged(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1.0], "id": [1]})
    write(tmp_path / "b.parquet", {"x": [1.0], "id": [2], "new": ["n"]})
    write(tmp_path / "c.parquet", {"new": ["n"], "x": pa.array([1.0], pa.float32())})

    assert merged(tmp_path, passthrough=("*",)) == pa.schema(
        [("x", pa.float64()), ("id", pa.int64()), ("new", pa.string())]
    )
    with pytest.raises(
        InvalidRequest, match=r"b\.parquet' has the column 'new', and .*a\.parquet' lacks it; .*merge_schema"
    ):
        planned(tmp_path, passthrough=("*",))


def test_columns_that_can_not_be_merged_are_named_with_both_files(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1.0]})
    write(tmp_path / "b.parquet", {"x": [1.0], "new": ["n"]})
    write(tmp_path / "c.parquet", {"x": [1.0], "new": [1]})

    with pytest.raises(InvalidRequest, match=r"'new' is int64 in '.*c\.parquet' and string in '.*b\.parquet'"):
        merged(tmp_path, passthrough=("new",))


def test_an_input_column_that_no_file_has_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"id": [1]})

    with pytest.raises(InvalidRequest, match=r"made of column 'x', which the inputs lack|no column 'x'"):
        merged(tmp_path, key="id")


def test_a_file_with_none_of_the_columns_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1.0]})
    write(tmp_path / "b.parquet", {"other": [1.0]})

    with pytest.raises(InvalidRequest, match=r"b\.parquet' has none of the columns that the job reads"):
        merged(tmp_path)


@pytest.mark.parametrize(("one", "other"), ["ab", "ba"])
def test_timestamps_of_int96_are_instants_beside_those_with_a_zone(tmp_path: Path, one: str, other: str) -> None:
    at = pa.array([0], pa.timestamp("us"))
    write(tmp_path / f"{one}.parquet", {"x": [1.0], "t": at}, use_deprecated_int96_timestamps=True, store_schema=False)
    write(tmp_path / f"{other}.parquet", {"x": [1.0], "t": at.cast(pa.timestamp("us", "UTC"))})

    plan = planned(tmp_path, passthrough=("t",))
    assert decode_schema(plan.schema).field("t").type == pa.timestamp("us", "UTC")


def test_local_times_are_no_instants(tmp_path: Path) -> None:
    at = pa.array([0], pa.timestamp("us"))
    write(tmp_path / "a.parquet", {"x": [1.0], "t": at})
    write(tmp_path / "b.parquet", {"x": [1.0], "t": at.cast(pa.timestamp("us", "UTC"))})

    with pytest.raises(InvalidRequest, match=r"'t' is timestamp\[us, tz=UTC\] in '.*b.parquet' and timestamp\[us\] in"):
        planned(tmp_path, passthrough=("t",))


def test_a_key_that_files_have_in_different_types_is_called_the_key(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1.0], "id": [1]})
    write(tmp_path / "b.parquet", {"x": [1.0], "id": ["a"]})

    with pytest.raises(InvalidRequest, match=r"column 'id' is string in .*; convert .*, or name another 'key'$"):
        planned(tmp_path, key="id")


@pytest.mark.parametrize(
    ("text", "csv", "said"),
    [
        ("x;id\n1.5;2\n", Csv(), r"its first line has ';': set 'csv.delimiter' \(--delimiter\) to that$"),
        ("x\tid\n1.5\t2\n", Csv(), r"its first line has a tab: set 'csv.delimiter'"),
        ("x;id\n1,5;2\n", Csv(), r"has ';': set .* to that; numbers have a decimal comma: set 'csv.decimal_point'"),
        ("x;id\n1,5;2\n", Csv(delimiter=";"), r"numbers have a decimal comma: set 'csv.decimal_point'"),
        ("y,id\n1.5,2\n", Csv(), r"which the inputs lack; .*|no column 'x'.*"),
    ],
)
def test_the_form_of_csv_is_hinted_at(tmp_path: Path, text: str, csv: Csv, said: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    output = Output(f"file://{tmp_path}/out")
    spec = JobSpec(model="stub", inputs=(f"file://{tmp_path}/a.csv",), output=output, csv=csv)

    with pytest.raises(InvalidRequest, match=said):
        examine(spec, MODEL, ANY_FILE)
