"""The longest row of a column of lists is found by its repetition levels, however the file is written."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.tabular.rows.parquet_levels import RowLengths
from qinfer.tabular.rows.parquet_pages import data_pages, read_pages

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=60)


def longest(values: pa.Array, **options: object) -> int:
    """Returns what the pages of a file say."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": values}), sink, data_page_size=256, write_batch_size=16, **options)
    file = pa.BufferReader(sink.getvalue())
    metadata = pq.read_metadata(file)
    chunk, level = metadata.row_group(0).column(0), metadata.schema.column(0).max_repetition_level
    lengths = RowLengths(level)
    assert read_pages(lambda size, place: bytes(file.read_at(size, place)), chunk).values == chunk.num_values
    for page in data_pages(lambda size, place: bytes(file.read_at(size, place)), chunk):
        lengths.add(page, chunk.compression)
    return lengths.longest


@given(lengths=LENGTHS, version=st.sampled_from(["1.0", "2.0"]))
@settings(max_examples=40, deadline=None)
def test_the_longest_list_of_numbers(lengths: list[int], version: str) -> None:
    values = pa.array([list(range(length)) for length in lengths], pa.list_(pa.int64()))

    assert longest(values, data_page_version=version) == max(1, *lengths, 1)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=10))
@settings(max_examples=20, deadline=None)
def test_the_longest_list_of_lists(lengths: list[list[int]]) -> None:
    values = pa.array([[[0] * length for length in row] for row in lengths], pa.list_(pa.list_(pa.int8())))

    assert longest(values) == max(sum(max(length, 1) for length in row) for row in lengths)


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_longest_list_of_a_compressed_file(codec: str, version: str) -> None:
    values = pa.array([[1.0] * 5, [2.0] * 77, None, [], [3.0] * 6] * 20)

    assert longest(values, compression=codec, data_page_version=version) == 77
