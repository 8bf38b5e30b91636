"""The sizes of shards, and the limits of plans: files and ranges of one shard, and shards of one job."""

import heapq
from collections.abc import Sequence

import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.plan import InputFile, Shard, SourceFile
from qinfer.jobs.shards import (
    MAX_SHARD_FILES,
    MAX_SHARD_RANGES,
    MAX_SHARDS,
    ShardPace,
    ShardSizes,
    plan_shards,
    shard_sizes,
)

UNKNOWN = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=250_000, max_rows=5_000_000)
"""What the settings say of a model that nobody has asked yet."""

SHARD_S, SKIPPED_ROW_S = 0.02, 60e-9
"""The cost of a shard whatever its rows are, and of a row of its row group that it has to read and does not score."""


def files(count: int, groups: tuple[int, ...]) -> list[InputFile]:
    return [InputFile(SourceFile(f"file:///{number:05d}", "e", 1, sum(groups)), groups) for number in range(count)]


def test_ten_thousand_tiny_files_are_a_few_shards() -> None:
    """Put together, but no shard opens more than so many files."""
    shards = plan_shards(files(10_000, (7,)), ShardSizes(10**6, 10**6), "parquet")
    assert [len(shard.ranges) for shard in shards] == [MAX_SHARD_FILES] * 39 + [16]
    assert sum(shard.rows for shard in shards) == 70_000


def test_a_shard_has_a_limited_number_of_ranges() -> None:
    """Its ticket is an entry of a stream."""
    shards = plan_shards(files(1, (3,) * 2000), ShardSizes(10**6, 10**6), "parquet")
    assert [len(shard.ranges) for shard in shards] == [MAX_SHARD_RANGES, 2000 - MAX_SHARD_RANGES]


def test_one_huge_row_group_is_cut_evenly() -> None:
    """Into as few pieces as its size asks for."""
    shards = plan_shards(files(1, (10_000_001,)), ShardSizes(3_000_000, 5_000_000), "parquet")
    assert [shard.rows for shard in shards] == [2_500_000, 2_500_000, 2_500_000, 2_500_001]
    assert [shard.ranges[0].first_in_group for shard in shards] == [0, 2_500_000, 5_000_000, 7_500_000]


def test_more_parts_than_a_job_may_have_are_refused_with_what_is_possible() -> None:
    """And what the message says is possible, is."""
    many = files(1, (50_000,) * 10)
    with pytest.raises(InvalidRequest, match=r"'output.rows_per_part' is 3, .* more than 100000 parts; 10 or more"):
        plan_shards(many, ShardSizes(3, 3), "parquet")
    assert len(plan_shards(many, ShardSizes(10, 10), "parquet")) <= MAX_SHARDS


# --- a model that nobody has asked yet ---


def unknown(workers: int, *groups: int) -> tuple[Shard, ...]:
    """Returns the shards of one file."""
    return plan_shards(files(1, groups), shard_sizes(0, sum(groups), UNKNOWN._replace(workers=workers)), "parquet")


def job_s(shards: Sequence[Shard], workers: int, row_s: float) -> float:
    """Returns how long workers take that have the next shard whenever they are free."""
    free_at = [0.0] * workers
    for shard in shards:
        skipped = sum(part.first_in_group for part in shard.ranges)
        took_s = SHARD_S + shard.rows * row_s + skipped * SKIPPED_ROW_S
        heapq.heapreplace(free_at, free_at[0] + took_s)
    return max(free_at)


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("groups", [(20_000,), (100_000,), (1_000_000,), (500_000,) * 2, (1_000_000,) * 5])
def test_workers_of_a_slow_model_end_at_about_the_same_time(groups: tuple[int, ...], workers: int) -> None:
    """At a millisecond a row, whatever the row groups are."""
    ideal_s = sum(groups) * 1e-3 / workers
    assert job_s(unknown(workers, *groups), workers, 1e-3) <= 1.15 * ideal_s


@pytest.mark.parametrize("workers", [2, 8])
def test_a_fast_model_is_not_kept_from_its_work_by_small_shards(workers: int) -> None:
    """At a microsecond a row shards of equal size would do."""
    groups = (125_000,) * 40
    equal = plan_shards(files(1, groups), ShardSizes(250_000, 250_000), "parquet")
    assert job_s(unknown(workers, *groups), workers, 1e-6) <= 1.5 * job_s(equal, workers, 1e-6)


@pytest.mark.parametrize("row_s", [1e-6, 1e-3, 1e-2])
def test_all_workers_have_a_shard_at_once_and_end_one_soon(row_s: float) -> None:
    """However long a row takes: the job has a speed then."""
    first = unknown(4, 1_000_000)[:4]
    assert all(shard.rows * row_s < 3.0 for shard in first)


def test_shards_of_a_model_that_nobody_has_asked_grow_and_shrink() -> None:
    """They stay at most as large as the settings say, and there are few small ones."""
    rows = [shard.rows for shard in unknown(2, *(50_000,) * 100)]

    assert rows[:4] == [255, 255, 1979, 1979]
    assert max(rows) == 250_000
    assert 150_000 <= rows[-2] < 250_000
    assert len(rows) < 32


@pytest.mark.parametrize(
    ("workers", "rows", "shards"), [(8, 200, [25] * 8), (4, 9, [1, 2, 2, 2, 2]), (8, 3, [1] * 3), (1, 200, [200])]
)
def test_a_job_of_a_few_rows_has_a_shard_for_each_worker(workers: int, rows: int, shards: list[int]) -> None:
    assert [shard.rows for shard in unknown(workers, rows)] == shards


def test_a_job_of_a_few_rows_of_a_fast_model_is_one_shard() -> None:
    sizes = shard_sizes(0, 200, UNKNOWN._replace(rows_per_s=1e5, workers=8))
    assert [shard.rows for shard in plan_shards(files(1, (200,)), sizes, "parquet")] == [200]
