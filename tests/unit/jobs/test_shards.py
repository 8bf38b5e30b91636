"""The limits of plans: files and ranges of one shard, and shards of one job."""

import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.plan import InputFile, Source
from qinfer.jobs.shards import MAX_SHARD_FILES, MAX_SHARD_RANGES, MAX_SHARDS, Sizes, plan_shards


def files(count: int, groups: tuple[int, ...]) -> list[InputFile]:
    return [InputFile(Source(f"file:///{number:05d}", "e", 1, sum(groups)), groups) for number in range(count)]


def test_ten_thousand_tiny_files_are_a_few_shards() -> None:
    """Put together, but no shard opens more than so many files."""
    shards = plan_shards(files(10_000, (7,)), Sizes(10**6, 10**6), "parquet")
    assert [len(shard.ranges) for shard in shards] == [MAX_SHARD_FILES] * 39 + [16]
    assert sum(shard.rows for shard in shards) == 70_000


def test_a_shard_has_a_limited_number_of_ranges() -> None:
    """Its ticket is an entry of a stream."""
    shards = plan_shards(files(1, (3,) * 2000), Sizes(10**6, 10**6), "parquet")
    assert [len(shard.ranges) for shard in shards] == [MAX_SHARD_RANGES, 2000 - MAX_SHARD_RANGES]


def test_one_huge_row_group_is_cut_evenly() -> None:
    """Into as few pieces as its size asks for."""
    shards = plan_shards(files(1, (10_000_001,)), Sizes(3_000_000, 5_000_000), "parquet")
    assert [shard.rows for shard in shards] == [2_500_000, 2_500_000, 2_500_000, 2_500_001]
    assert [shard.ranges[0].first_in_group for shard in shards] == [0, 2_500_000, 5_000_000, 7_500_000]


def test_more_parts_than_a_job_may_have_are_refused_with_what_is_possible() -> None:
    """And what the message says is possible, is."""
    many = files(1, (50_000,) * 10)
    with pytest.raises(InvalidRequest, match=r"'output.rows_per_part' is 3, .* more than 100000 parts; 10 or more"):
        plan_shards(many, Sizes(3, 3), "parquet")
    assert len(plan_shards(many, Sizes(10, 10), "parquet")) <= MAX_SHARDS
