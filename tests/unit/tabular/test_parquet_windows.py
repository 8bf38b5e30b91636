"""Column chunks of Parquet that are fetched before they are decoded: in few reads, and without much beside them."""

import io
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.tabular.row_files import ByteRange, ParquetGroups, Windows, windows_of
from qinfer.tabular.source import ReadLimits
from qinfer.tabular.spec import Range
from tests.support.jobs.bulk_data import write

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("spans", "windows"),
    [
        ([], []),
        ([(0, 10), (10, 20), (15, 30)], [(0, 30)]),
        ([(0, MIB), (MIB + 200 * KIB, 2 * MIB)], [(0, 2 * MIB)]),
        ([(0, 10), (300 * KIB, 301 * KIB)], [(0, 10), (300 * KIB, 301 * KIB)]),
        ([(0, 5 * MIB), (9 * MIB, 10 * MIB)], [(0, 10 * MIB)]),
        ([(0, 5 * MIB), (10 * MIB, 11 * MIB)], [(0, 5 * MIB), (10 * MIB, 11 * MIB)]),
        ([(0, 40 * MIB), (40 * MIB, 50 * MIB)], [(0, 40 * MIB), (40 * MIB, 50 * MIB)]),
        ([(0, 60 * MIB)], [(0, 60 * MIB)]),
    ],
)
def test_what_is_near_is_fetched_together(spans: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    """A gap takes less long than another read, or it is no larger than what is wanted before it."""
    assert windows_of(ByteRange(*span) for span in reversed(spans)) == windows


class Far(io.BytesIO):
    """A file whose reads are counted, by where they begin."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.asked: Counter[int] = Counter()
        self._lock = threading.Lock()

    def read(self, size: int | None = -1, /) -> bytes:
        self.asked[self.tell()] += 1
        return super().read(size)

    def read_at(self, size: int, place: int) -> bytes:
        with self._lock:
            self.asked[place] += 1
        return self.getvalue()[place : place + size]


def test_row_groups_are_read_in_one_window_and_those_of_others_are_not(tmp_path: Path) -> None:
    """The footer and the wanted groups: two reads, whatever pages there are; instants of INT96 are read twice."""
    rows = 50_000
    at = pa.array(np.arange(rows), pa.timestamp("us"))
    table = pa.table({"x": np.random.default_rng(0).random(rows), "t": [f"t{i % 100}" for i in range(rows)], "at": at})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=5000, data_page_size=4 * KIB, use_deprecated_int96_timestamps=True)
    file = Far(path.read_bytes())
    groups = ParquetGroups(
        file, ("x", "t", "at"), "s3://a", far=True, limits=ReadLimits.from_read_bytes(2**26), wanted=(3, 4)
    )
    columns = groups._metadata.row_group(3)

    found = [record for group in (3, 4) for record in groups.batches(Range("s3://a", "", group, 5000 * group, 5000, 0))]
    groups.close()

    assert pa.Table.from_batches(found).equals(table.slice(15_000, 10_000).cast(found[0].schema))
    assert file.asked.total() == 2
    assert min(file.asked) == columns.column(0).dictionary_page_offset
    assert file.closed


def test_what_is_in_no_window_is_read_from_the_file() -> None:
    file = Far(bytes(range(200)))
    windows = Windows(file, file.read_at, {0: [ByteRange(100, 120)]})
    windows.prepare(0)

    windows.seek(110)
    assert windows.read(5) == bytes(range(110, 115))
    assert windows.read(10) == bytes(range(115, 125))  # goes beyond
    windows.seek(-2, io.SEEK_END)
    assert (windows.read(10), windows.tell()) == (b"\xc6\xc7", 200)
    windows.close()
    assert file.closed


def test_the_end_is_found_without_moving_the_file() -> None:
    """Other threads fetch by its position."""
    file = Far(bytes(200))
    windows = Windows(file, file.read_at, {})
    file.seek(5)

    assert windows.seek(-2, io.SEEK_END) == 198
    assert file.tell() == 5


def test_a_fetch_that_fails_is_an_error_of_who_reads(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", pa.table({"x": [1.0]}))
    file = Far(Path(url.removeprefix("file://")).read_bytes())
    groups = ParquetGroups(file, ("x",), url, far=True, limits=ReadLimits.from_read_bytes(2**26))

    def fail(size: int, place: int) -> bytes:
        raise OSError("away")

    file.read_at = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="away"):
        list(groups.batches(Range(url, "", 0, 0, 1, 0)))
    groups.close()
