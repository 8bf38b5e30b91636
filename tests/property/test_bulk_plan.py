"""Plans: each row is in exactly one shard, in the order of the inputs, whatever the files and row groups are."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.errors import CorruptEntry
from qinfer.jobs import shards as planning
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import (
    InputFile,
    JobPlan,
    Shard,
    ShardTicket,
    SourceFile,
    decode_plan,
    decode_ticket,
    encode_plan,
    encode_ticket,
)
from qinfer.jobs.shards import ShardPace, ShardSizes, part_name, plan_shards, shard_sizes
from qinfer.tabular.spec import NO_GROUPS, Range

grouped = st.lists(st.one_of(st.integers(0, 30), st.integers(0, 400)), max_size=6).map(tuple)
without_groups = st.integers(0, 500)
sizes = st.tuples(st.integers(1, 80), st.integers(1, 4)).map(lambda two: ShardSizes(two[0], two[0] * two[1]))


@st.composite
def file_lists(draw: st.DrawFn) -> list[InputFile]:
    files = []
    for number in range(draw(st.integers(1, 5))):
        groups = draw(st.one_of(grouped, st.none()))
        rows = sum(groups) if groups is not None else draw(without_groups)
        files.append(InputFile(SourceFile(f"s3://lake/{number}", f"etag-{number}", 100 * rows, rows), groups))
    return files


def rows_of(files: list[InputFile]) -> list[tuple[str, int, int, int]]:
    """Lists every row as file, row group, row within the file and row within the group."""
    rows = []
    for source, groups, _ in files:
        row = 0
        for number, count in enumerate(groups) if groups is not None else [(NO_GROUPS, source.rows)]:
            for inside in range(count):
                rows.append((source.url, number, row, inside))
                row += 1
    return rows


def rows_in(ranges: tuple[Range, ...]) -> list[tuple[str, int, int, int]]:
    return [(r.url, r.row_group, r.first_row + i, r.first_in_group + i) for r in ranges for i in range(r.rows)]


@settings(deadline=None)
@given(file_lists(), sizes)
def test_each_row_is_in_one_shard_in_order(files: list[InputFile], size: ShardSizes) -> None:
    """Not one missing, twice or out of place; shards and parts are numbered without a gap."""
    shards = plan_shards(files, size, "parquet")
    assert [row for shard in shards for row in rows_in(shard.ranges)] == rows_of(files)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert [shard.part for shard in shards] == [part_name(i, "parquet") for i in range(len(shards))]
    etags = {file.source.url: file.source.etag for file in files}
    for shard in shards:
        assert shard.rows == sum(piece.rows for piece in shard.ranges)
        assert all(etags[piece.url] == piece.etag for piece in shard.ranges)


@settings(deadline=None)
@given(file_lists(), sizes)
def test_shards_are_neither_too_large_nor_too_small(files: list[InputFile], size: ShardSizes) -> None:
    """None is larger than a whole row group may be, no two neighbours would fit in one, and none is empty."""
    shards = plan_shards(files, size, "parquet")
    assert all(shard.rows <= size.whole for shard in shards)
    assert all(len(shard.ranges) == 1 or shard.rows <= size.rows for shard in shards)
    assert all(one.rows + other.ranges[0].rows > size.rows for one, other in pairwise(shards))
    if any(file.source.rows for file in files):
        assert all(piece.rows for shard in shards for piece in shard.ranges)
    else:
        assert [(shard.rows, len(shard.ranges), shard.ranges[0].url) for shard in shards] == [(0, 1, "s3://lake/0")]


@settings(deadline=None)
@given(file_lists(), sizes)
def test_row_groups_are_cut_only_when_they_are_huge(files: list[InputFile], size: ShardSizes) -> None:
    """Who starts within a row group reads what is before it again."""
    by_url = {file.source.url: file for file in files}
    for piece in (piece for shard in plan_shards(files, size, "parquet") for piece in shard.ranges if piece.rows):
        source, groups, _ = by_url[piece.url]
        whole = source.rows if groups is None else groups[piece.row_group]
        assert piece.rows == whole or whole > size.whole


@settings(deadline=None)
@given(file_lists(), sizes)
def test_a_plan_survives_its_json_and_a_ticket_its_lane(files: list[InputFile], size: ShardSizes) -> None:
    """Equal plans are equal bytes: who plans a second time writes the same."""
    shards = plan_shards(files, size, "arrow")
    plan = JobPlan(
        job_id="job",
        spec=JobSpec(model="m", inputs=("s3://lake/*",), output=Output("s3://lake/out"), columns={"x": ("a", "b")}),
        model_hash="hash",
        schema="a: double",
        sources=tuple(file.source for file in files),
        shards=shards,
        rows=sum(file.source.rows for file in files),
    )
    assert decode_plan(encode_plan(plan)) == plan
    assert encode_plan(decode_plan(encode_plan(plan))) == encode_plan(plan)
    ticket = ShardTicket("job", shards[-1])
    assert decode_ticket(encode_ticket(ticket)) == ticket


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_other_bytes_are_no_ticket_and_no_plan(data: bytes) -> None:
    """They are named as what they are, and nothing else is raised."""
    with pytest.raises(CorruptEntry, match="ticket can't be read"):
        decode_ticket(data)
    with pytest.raises(CorruptEntry, match="plan can't be read"):
        decode_plan(data)


def test_a_plan_that_names_a_file_it_lacks_is_none() -> None:
    """Such as one that was cut and mended."""
    shard = Shard(0, "part-00000.parquet", 1, (Range("u", "e", 0, 0, 1, 0),))
    plan = JobPlan(
        job_id="j",
        spec=JobSpec(model="m", inputs=("u",), output=Output("o")),
        model_hash="",
        schema="",
        sources=(SourceFile("u", "e", 1, 1),),
        shards=(shard,),
        rows=1,
    )
    data = encode_plan(plan).replace(b'[["u","e",1,1]]', b"[]")
    with pytest.raises(CorruptEntry, match="plan can't be read"):
        decode_plan(data)


@settings(deadline=None)
@given(
    st.integers(0, 10**11),
    st.floats(0, 1e7),
    st.integers(1, 500),
    st.integers(1, 10**6),
    st.integers(10**6, 10**7),
)
def test_the_server_chooses_sizes_that_are_possible(
    rows: int, rows_per_s: float, workers: int, default: int, most: int
) -> None:
    """At most so many rows, as long as the number of shards allows it."""
    size = shard_sizes(0, rows, ShardPace(rows_per_s, 30.0, default, most, workers))
    assert 1 <= size.rows <= size.whole
    assert size.whole <= max(most, size.rows)
    assert size.rows <= most or rows > planning.MAX_SHARDS * most / 2
    assert 2 * rows / size.rows <= planning.MAX_SHARDS


def test_a_user_who_says_how_many_rows_gets_at_most_those() -> None:
    """Whatever is known of the model's speed."""
    assert shard_sizes(700, 10**6, ShardPace(1e6, 30.0, 10, 10**7)) == ShardSizes(700, 700)


def test_the_workers_of_a_small_job_all_have_shards() -> None:
    """Several each, so that they end at about the same time; not so small that each is done in no time."""
    pace = ShardPace(100_000.0, 30.0, 250_000, 5_000_000, workers=2)
    assert shard_sizes(0, 4_000_000, pace).rows == 500_000
    assert shard_sizes(0, 10_000, pace).rows == 25_000
    assert shard_sizes(0, 10**9, pace).rows == 3_000_000
