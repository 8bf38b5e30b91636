"""The rows of a shard are read in batches of the asked size: any format and files, memory bounded, changes noticed."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.errors import StoreUnavailable
from qinfer.jobs.plan import Shard
from qinfer.jobs.shard_rows import ShardReader, SourceChanged
from qinfer.storage.open import store_for
from qinfer.storage.s3_objects import open_native
from qinfer.storage.store import Stat
from qinfer.tabular.batches import Segment
from qinfer.tabular.schemas import common_type, decode_schema, encode_schema
from qinfer.tabular.source import ReadLimits, SourceBroken, format_of, read_footer
from qinfer.tabular.spec import Range
from tests.support.jobs.bulk_data import job_of, shard_of, write
from tests.support.servers import object_stores

FORMATS = ("parquet", "arrow", "csv", "jsonl")
SCHEMA = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("t", pa.string())])


def table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {"n": list(numbers), "x": [number / 2 for number in numbers], "t": [f"t{n}" for n in numbers]}, SCHEMA
    )


def read(shard: Shard, rows: int, schema: pa.Schema, columns: tuple[str, ...] = ("n",), **more: Any) -> list[Any]:
    """Reads a shard to its end: the batches."""
    with closing(ShardReader(shard, columns, schema, **more)) as reader:
        found = []
        while (batch := reader.read(rows)) is not None:
            assert batch.record.schema.equals(reader.schema)
            assert sum(segment.rows for segment in batch.segments) == batch.record.num_rows
            found.append(batch)
        assert reader.read(rows) is None
        return found


def numbers(batches: list[Any]) -> list[int]:
    return [number for batch in batches for number in batch.record.column("n").to_pylist()]


@pytest.mark.parametrize("extension", FORMATS)
def test_rows_come_in_order_and_in_the_size_that_is_asked_for(tmp_path: Path, extension: str) -> None:
    urls = [write(tmp_path / f"{i}.{extension}", table(25, 25 * i), group=10) for i in range(3)]

    batches = read(shard_of(*urls), 20, SCHEMA, ("t", "n"))

    assert [batch.record.num_rows for batch in batches] == [20, 20, 20, 15]
    assert numbers(batches) == list(range(75))
    assert batches[0].record.schema.names == ["t", "n"]
    grouped = extension in ("parquet", "arrow")
    assert batches[1].segments == (
        (Segment(urls[0], 2, 20, 5), Segment(urls[1], 0, 0, 10), Segment(urls[1], 1, 10, 5))
        if grouped
        else (Segment(urls[0], -1, 20, 5), Segment(urls[1], -1, 0, 15))
    )


@pytest.mark.parametrize("extension", FORMATS)
def test_a_range_within_row_groups_is_read(tmp_path: Path, extension: str) -> None:
    url = write(tmp_path / f"a.{extension}", table(50), group=20)

    shard = shard_of(url, first=13, rows=20)
    batches = read(shard, 9, SCHEMA)

    assert numbers(batches) == list(range(13, 33))
    assert batches[0].segments[0].first_row == 13


def test_two_ranges_of_one_text_file_are_read(tmp_path: Path) -> None:
    url = write(tmp_path / "a.csv", table(50))
    (one,) = shard_of(url).ranges
    first, second = (Range(url, one.etag, -1, begin, 5, begin) for begin in (3, 20))

    batches = read(Shard(0, "part-00000.parquet", 10, (first, second)), 100, SCHEMA)

    assert numbers(batches) == [3, 4, 5, 6, 7, 20, 21, 22, 23, 24]


def test_a_shard_without_rows_has_no_batch(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", table(0))
    nothing = Shard(0, "part-00000.parquet", 0, (Range(url, "", -1, 0, 0, 0),))

    assert read(nothing, 10, SCHEMA) == []


def test_values_are_read_in_the_planned_types(tmp_path: Path) -> None:
    one = write(tmp_path / "1.parquet", pa.table({"n": pa.array([1, 2], pa.int16()), "t": ["a", "b"]}))
    two = write(tmp_path / "2.parquet", pa.table({"t": pa.array(["c"]).dictionary_encode(), "n": pa.array([2.5])}))
    schema = pa.schema([("n", pa.float64()), ("t", pa.dictionary(pa.int32(), pa.string()))])

    (batch,) = read(shard_of(one, two), 10, schema, ("n", "t"))

    assert batch.record.to_pydict() == {"n": [1.0, 2.0, 2.5], "t": ["a", "b", "c"]}
    assert batch.record.schema.field("t").type == pa.string()


@pytest.mark.parametrize("extension", FORMATS)
def test_columns_that_a_file_lacks_are_null(tmp_path: Path, extension: str) -> None:
    one = write(tmp_path / f"1.{extension}", pa.table({"n": [1]}))
    two = write(tmp_path / f"2.{extension}", pa.table({"t": ["a"], "n": [2]}))
    spec = job_of(merge_schema=True)

    batches = read(shard_of(one, two), 10, SCHEMA, ("t", "n"), spec=spec)

    rows = [row for batch in batches for row in batch.record.to_pylist()]
    assert rows == [{"t": None, "n": 1}, {"t": "a", "n": 2}]


@pytest.mark.parametrize("extension", ["parquet", "arrow"])
def test_a_file_that_lacks_all_of_some_columns_has_rows(tmp_path: Path, extension: str) -> None:
    one = write(tmp_path / f"1.{extension}", pa.table({"n": [1, 2]}))
    spec = job_of(merge_schema=True)

    (batch,) = read(shard_of(one), 10, SCHEMA, ("t",), spec=spec)

    assert batch.record.to_pydict() == {"t": [None, None]}


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ({"n": ["a"]}, r"column 'n' of '.*2\.parquet' is of type string, which can't be made the int64"),
        ({"n": [1.5]}, r"column 'n' of '.*2\.parquet' is of type double"),
        ({"m": [1]}, r"'.*2\.parquet' lacks the column 'n'"),
    ],
)
def test_another_type_in_the_middle_is_named(tmp_path: Path, column: dict[str, Any], text: str) -> None:
    one, two = write(tmp_path / "1.parquet", table(3)), write(tmp_path / "2.parquet", pa.table(column))

    with pytest.raises(SourceBroken, match=text):
        read(shard_of(one, two), 10, SCHEMA)


def test_a_text_that_is_no_number_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.tabular.text_streams.BLOCK_BYTES", 8)
    monkeypatch.setattr("qinfer.tabular.text_rows.BLOCK_BYTES", 8)
    path = tmp_path / "a.csv"
    path.write_text("n\n1\n2\n3\n4\n5\nx\n")

    with pytest.raises(SourceBroken, match=r"'file://.*a\.csv' can't be read.*'x'"):
        read(shard_of(f"file://{path}"), 10, SCHEMA)


@pytest.mark.parametrize("extension", FORMATS)
def test_a_file_that_was_replaced_or_removed_is_noticed(tmp_path: Path, extension: str) -> None:
    url = write(tmp_path / f"a.{extension}", table(5))
    shard = shard_of(url)
    write(tmp_path / f"a.{extension}", table(6))

    with pytest.raises(SourceChanged, match=f"'{url}' has changed"):
        read(shard, 10, SCHEMA)
    (tmp_path / f"a.{extension}").unlink()
    with pytest.raises(SourceChanged, match=f"'{url}' does not exist any more"):
        read(shard, 10, SCHEMA)


@pytest.mark.parametrize("way", ["replaced", "written again"])
def test_another_file_of_the_same_size_and_mtime_is_noticed(tmp_path: Path, way: str) -> None:
    path, other = tmp_path / "a.csv", tmp_path / "other"
    path.write_text("n\n1\n")
    os.utime(path, ns=(1, 1))
    shard = shard_of(f"file://{path}")
    if way == "replaced":
        other.write_text("n\n2\n")
        os.utime(other, ns=(1, 1))
        other.replace(path)
    else:
        path.write_text("n\n2\n")
        os.utime(path, ns=(1, 1))

    with pytest.raises(SourceChanged, match="has changed"):
        read(shard, 10, SCHEMA)


@pytest.mark.parametrize(("before", "is_still"), [("7-20", True), ("7-20-9", True), ("7-20-8", False), ("6-20", False)])
def test_files_of_earlier_plans_are_told_by_their_size_and_mtime(before: str, *, is_still: bool) -> None:
    assert Stat("file:///a", 20, "7-20-9").is_still(before) is is_still


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", table(100), group=10)
    with closing(ShardReader(shard_of(url), ("n",), SCHEMA)) as reader:
        assert reader.read(10) is not None
        os.utime(tmp_path / "a.parquet", ns=(1, 1))

        with pytest.raises(SourceChanged, match="has changed"):
            reader.read(1000)


@pytest.mark.parametrize(("extension", "damage"), [("parquet", "cut"), ("parquet", "zeros"), ("arrow", "cut")])
def test_a_damaged_file_is_named(tmp_path: Path, extension: str, damage: str) -> None:
    """The etag is that of the damaged file, so that only reading finds out."""
    path = tmp_path / f"a.{extension}"
    url = write(path, pa.table({"n": np.random.default_rng(0).integers(0, 2**60, 5000)}), group=5000)
    shard = shard_of(url)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] if damage == "cut" else content[:8] + bytes(middle) + content[8 + middle :])
    stat = store_for(url).stat(url)
    assert stat is not None
    same = tuple(Range(r.url, stat.etag, r.row_group, r.first_row, r.rows, r.first_in_group) for r in shard.ranges)

    with pytest.raises(SourceBroken, match=f"'{url}' can't be read; is it damaged"):
        read(Shard(0, "part-00000.parquet", shard.rows, same), 100, pa.schema([("n", pa.int64())]))


def damage(url: str, begin: float, end: float) -> None:
    """Overwrites a share of what is before a Parquet file's footer."""
    path = Path(url.removeprefix("file://"))
    content = bytearray(path.read_bytes())
    size = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    for number in range(int(size * begin) + 4, int(size * end)):
        content[number] ^= 0xFF
    path.write_bytes(content)


def faults_of(batches: list[Any]) -> list[tuple[int, int, str]]:
    """Returns the runs of rows that can't be read: the first row of the shard, how many, and why."""
    found, position = [], 0
    for batch in batches:
        found += [(position + fault.first, fault.rows, fault.message) for fault in batch.faults]
        position += batch.record.num_rows
    return found


SKIPS = job_of(bad_files="skip")


def test_rows_that_cannot_be_read_are_rows_all_the_same(tmp_path: Path) -> None:
    """Only those of the damaged row group: each planned row comes once, in its place."""
    urls = [write(tmp_path / f"{name}.parquet", table(300, 300 * index), group=100) for index, name in enumerate("abc")]
    damage(urls[1], 0.4, 0.6)
    shard = shard_of(*urls)

    batches = read(shard, 70, SCHEMA, ("n", "t"), spec=SKIPS)

    lost = set(range(400, 500))
    assert numbers(batches) == [None if number in lost else number for number in range(900)]
    faults = faults_of(batches)
    assert [number for first, rows, _ in faults for number in range(first, first + rows)] == sorted(lost)
    assert {message for _, _, message in faults} == {faults[0][2]}
    assert faults[0][2].startswith(f"rows 100 to 199: '{urls[1]}' can't be read; is it damaged?")
    with pytest.raises(
        SourceBroken, match=r"\(from row 100 on\); a new job can skip such files with 'bad_files': \"skip\""
    ):
        read(shard, 70, SCHEMA, ("n", "t"))


def test_a_text_file_is_lost_from_its_damaged_block_on(tmp_path: Path) -> None:
    """Nobody knows where the next row begins; the files behind it are read."""
    urls = [write(tmp_path / f"{name}.csv", table(9, 9 * index)) for index, name in enumerate("abc")]
    path = tmp_path / "b.csv"
    path.write_text("\n".join(line.replace("13", "word") for line in path.read_text().split("\n")))
    shard = shard_of(*urls)

    batches = read(shard, 5, SCHEMA, ("n", "x"), spec=SKIPS)

    assert [number for number in numbers(batches) if number is not None] == [*range(9), *range(18, 27)]
    assert [(first, rows) for first, rows, _ in faults_of(batches)] == [(9, 1), (10, 5), (15, 3)]
    assert sum(segment.rows for batch in batches for segment in batch.segments) == 27


def test_a_file_that_lacks_a_planned_column_is_lost_whole(tmp_path: Path) -> None:
    urls = [write(tmp_path / f"{name}.parquet", table(3, 3 * index), group=2) for index, name in enumerate("abc")]
    write(tmp_path / "b.parquet", table(3).drop_columns("t"), group=2)

    batches = read(shard_of(*urls), 100, SCHEMA, ("n", "t"), spec=SKIPS)

    assert numbers(batches) == [0, 1, 2, None, None, None, 6, 7, 8]
    assert [fault[:2] for fault in faults_of(batches)] == [(3, 2), (5, 1)]


def test_wide_rows_that_cannot_be_read_take_no_more_memory_than_others(tmp_path: Path) -> None:
    """A list of fixed size has room for its items even where it is null."""
    wide = pa.schema([("x", pa.list_(pa.float32(), 100_000))])
    url = write(tmp_path / "a.parquet", pa.table({"y": list(range(1000))}))

    with closing(
        ShardReader(shard_of(url), ("x",), wide, SKIPS, limits=ReadLimits.from_read_bytes(6 * 2**20))
    ) as reader:
        sizes = []
        while (batch := reader.read(1000)) is not None:
            sizes.append((batch.record.num_rows, batch.record.nbytes))

    assert sum(rows for rows, _ in sizes) == 1000
    assert max(size for _, size in sizes) <= 2**20


def test_files_that_are_fetched_ahead_keep_their_places(s3: object_stores.ObjectStore, tmp_path: Path) -> None:
    """A damaged one is opened again for its other row groups."""
    for index in range(12):
        write(tmp_path / f"{index:02d}.parquet", table(30, 30 * index), group=10)
    damage(f"file://{tmp_path}/04.parquet", 0.1, 0.2)
    folder = s3.upload(tmp_path, to="ahead")

    batches = read(shard_of(*(f"{folder}/{index:02d}.parquet" for index in range(12))), 50, SCHEMA, spec=SKIPS)

    assert numbers(batches) == [None if 120 <= number < 130 else number for number in range(360)]


def test_damaged_offsets_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    url = write(path, pa.table({"n": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64()))}))
    content = path.read_bytes()
    offsets = np.array([0, 2, 4], np.int32).tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, np.array([0, 2**30, 4], np.int32).tobytes()))

    with pytest.raises(SourceBroken, match=f"'{url}' can't be read"):
        read(shard_of(url), 10, pa.schema([("n", pa.list_(pa.int64()))]))


def test_a_range_that_is_not_there_is_named(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", table(5))
    (one,) = shard_of(url).ranges

    for broken in (Range(url, one.etag, 7, 0, 5, 0), Range(url, one.etag, 0, 0, 6, 0)):
        with pytest.raises(SourceBroken, match=url):
            read(Shard(0, "part-00000.parquet", 5, (broken,)), 10, SCHEMA)


class Far:
    """A store that is far: the files of a directory under another scheme, each opening counted."""

    sees_changes = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.opened: list[str] = []
        self.fails = False

    def stat(self, url: str) -> Stat | None:
        return Stat(url, self._path(url).stat().st_size, "etag")

    def open_known(self, known: Stat, *, sequential: bool = False) -> BinaryIO:
        self.opened.append(known.url)
        file = self._path(known.url).open("rb")
        return Failing(file) if self.fails else file  # type: ignore[return-value]  # enough of a file

    def _path(self, url: str) -> Path:
        return self._folder / url.rpartition("/")[2]


class Failing:
    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Failing":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, _: int = -1) -> bytes:
        raise StoreUnavailable("the store of 's3://b/0.parquet' can't be reached; try again")


def far_shard(folder: Path, extension: str, files: int) -> Shard:
    urls = [write(folder / f"{i}.{extension}", table(5, 5 * i)) for i in range(files)]
    ranges = tuple(
        Range(f"s3://b/{r.url.rpartition('/')[2]}", "etag", r.row_group, r.first_row, r.rows, r.first_in_group)
        for r in shard_of(*urls).ranges
    )
    return Shard(0, "part-00000.parquet", 5 * files, ranges)


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("small_bytes", [0, 2**20])
def test_files_that_are_far_are_read_in_order(
    tmp_path: Path, extension: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", small_bytes)
    shard = far_shard(tmp_path, extension, 20)
    far = Far(tmp_path)

    batches = read(shard, 30, SCHEMA, store=lambda _: far)

    assert numbers(batches) == list(range(100))
    assert len(batches) == 4
    assert len(far.opened) == 20


def test_what_was_fetched_ahead_is_bounded_and_closed(tmp_path: Path) -> None:
    shard = far_shard(tmp_path, "parquet", 30)
    far = Far(tmp_path)
    store: Any = lambda _: far  # noqa: E731
    reader = ShardReader(shard, ("n",), SCHEMA, store=store)

    assert reader.read(5) is not None
    reader.close()

    assert len(far.opened) <= 10


def test_a_store_that_fails_is_not_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", 0)
    shard = far_shard(tmp_path, "parquet", 1)
    far = Far(tmp_path)
    far.fails = True
    store: Any = lambda _: far  # noqa: E731

    with pytest.raises(StoreUnavailable, match="can't be reached"):
        read(shard, 10, SCHEMA, store=store)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[object_stores.ObjectStore]:
    with object_stores.s3("bulk-rows") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.mark.parametrize("extension", FORMATS)
def test_a_bucket_is_read(
    s3: object_stores.ObjectStore, tmp_path: Path, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", 1000)
    for number, rows in enumerate((10, 500)):
        write(tmp_path / f"{number}.{extension}", table(rows, 10 * number), group=200)
    folder = s3.upload(tmp_path, to=extension)
    urls = [f"{folder}/{number}.{extension}" for number in range(2)]
    shard = shard_of(*urls)

    assert numbers(read(shard, 300, SCHEMA)) == list(range(510))

    s3.put(f"{extension}/1.{extension}", b"other")
    with pytest.raises(SourceChanged, match=urls[1]):
        read(shard, 300, SCHEMA)


@pytest.mark.parametrize("way", ["native", "fsspec"])
def test_large_objects_are_read_by_arrows_own_client_where_it_can(
    s3: object_stores.ObjectStore, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", 0)
    opened: list[Any] = []

    def open_and_tell(store: Any, url: str) -> Any:
        opened.append(open_native(store, url))
        return opened[-1]

    monkeypatch.setattr("qinfer.jobs.shard_rows.open_native", open_and_tell)
    if way == "fsspec":
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3.environment["AWS_ENDPOINT_URL"]})
    write(tmp_path / "a b.arrow", table(500), group=100)
    url = f"{s3.upload(tmp_path, to='native')}/a b.arrow"

    assert numbers(read(shard_of(url), 300, SCHEMA)) == list(range(500))
    assert [file is None for file in opened] == [way == "fsspec"]


def test_a_bucket_that_goes_away_is_not_a_damaged_file(
    s3: object_stores.ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", 0)
    random = np.random.default_rng(0).standard_normal(100_000)
    write(tmp_path / "a.parquet", pa.table({"n": random}), group=10_000)
    shard = shard_of(f"{s3.upload(tmp_path, to='gone')}/a.parquet")
    with closing(ShardReader(shard, ("n",), pa.schema([("n", pa.float64())]))) as reader:
        assert reader.read(10) is not None
        s3.remove("gone/a.parquet")

        with pytest.raises(SourceChanged, match="does not exist any more"):
            reader.read(100_000)


def peak_bytes(shard: Shard, schema: pa.Schema) -> int:
    """Reads a shard, and returns the most memory that Arrow had meanwhile."""
    pool = pa.system_memory_pool()
    before, default = pool.bytes_allocated(), pa.default_memory_pool()
    most = 0
    pa.set_memory_pool(pool)
    try:
        with closing(ShardReader(shard, schema.names, schema)) as reader:
            while reader.read(1000) is not None:
                most = max(most, pool.bytes_allocated() - before)
    finally:
        pa.set_memory_pool(default)
    return most


def test_memory_does_not_depend_on_how_many_row_groups_there_are(tmp_path: Path) -> None:
    schema = pa.schema([(f"f{i}", pa.float32()) for i in range(8)])
    random = np.random.default_rng(0)
    columns = {name: random.standard_normal(400_000).astype(np.float32) for name in schema.names}
    large = write(tmp_path / "large.parquet", pa.table(columns), group=40_000)
    small = write(tmp_path / "small.parquet", pa.table(columns).slice(0, 40_000), group=40_000)

    one, ten = peak_bytes(shard_of(small), schema), peak_bytes(shard_of(large), schema)

    assert one * 0.8 <= ten <= one * 1.2


def test_memory_is_bounded_where_a_row_group_is_huge(tmp_path: Path) -> None:
    schema = pa.schema([(f"f{i}", pa.float32()) for i in range(8)])
    columns = {name: np.random.default_rng(0).standard_normal(2_000_000).astype(np.float32) for name in schema.names}
    url = write(tmp_path / "huge.parquet", pa.table(columns), group=2_000_000)
    assert pq.read_metadata(url.removeprefix("file://")).row_group(0).total_byte_size > 64_000_000

    assert peak_bytes(shard_of(url), schema) < 24_000_000


def test_memory_of_json_lines_does_not_depend_on_how_many_cores_there_are(tmp_path: Path) -> None:
    schema = pa.schema([(f"k{number}", pa.int64()) for number in range(500)])
    path, cores = tmp_path / "wide.jsonl", pa.cpu_count()
    path.write_text(json.dumps(dict.fromkeys(schema.names, 1)) + "\n" + "{}\n" * 50_000)
    shard = shard_of(f"file://{path}")
    pa.set_cpu_count(16)
    try:
        peak = peak_bytes(shard, schema)
    finally:
        pa.set_cpu_count(cores)

    assert peak < 40_000_000


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    group=st.integers(1, 12),
    size=st.integers(1, 50),
    data=st.data(),
)
def test_any_part_of_any_files_is_read_whole(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], group: int, size: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    urls, total = [], 0
    for number, rows in enumerate(groups):
        urls.append(write(folder / f"{number}.parquet", table(rows, total), group=group))
        total += rows
    first = data.draw(st.integers(0, total - 1))
    rows = data.draw(st.integers(1, total - first))

    batches = read(shard_of(*urls, first=first, rows=rows), size, SCHEMA)

    assert numbers(batches) == list(range(first, first + rows))
    assert all(batch.record.num_rows == size for batch in batches[:-1])
    bases = dict(zip(urls, np.cumsum([0, *groups]).tolist(), strict=False))
    places = [bases[s.url] + s.first_row + i for batch in batches for s in batch.segments for i in range(s.rows)]
    assert places == numbers(batches)


@pytest.mark.parametrize("extension", ["parquet", "arrow"])
def test_fixed_shape_tensors_stay_what_they_are(tmp_path: Path, extension: str) -> None:
    """Parquet files keep their type in the metadata that Arrow adds; a plan keeps it, too."""
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(2, 2, 3))
    url = write(tmp_path / f"x.{extension}", pa.table({"x": tensors}))
    stat = store_for(url).stat(url)
    assert stat is not None
    schema = decode_schema(encode_schema(read_footer(stat, format_of(url, "")).schema))

    (batch,) = read(shard_of(url), 10, schema, ("x",))

    assert batch.record.column("x").equals(tensors)
    assert batch.record.schema.field("x").type == pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=(0, 1))


@pytest.mark.parametrize("extension", ["parquet", "arrow"])
def test_lists_of_a_fixed_width_are_read_as_those_of_files_with_others(tmp_path: Path, extension: str) -> None:
    files = [pa.table({"x": pa.array([[1.0] * width] * 2, pa.list_(pa.float32(), width))}) for width in (3, 4)]
    urls = [write(tmp_path / f"{i}.{extension}", file) for i, file in enumerate(files)]
    common = common_type(files[0].schema.field("x").type, files[1].schema.field("x").type)

    batches = read(shard_of(*urls), 10, pa.schema([("x", common)]), ("x",))

    assert [len(row) for batch in batches for row in batch.record.column("x").to_pylist()] == [3, 3, 4, 4]
