"""The manifest adds up, and `_SUCCESS` is of one manifest."""

from typing import Any

import msgspec
import pytest

from qinfer.errors import CorruptEntry
from qinfer.jobs.plan import (
    JobPlan,
    Manifest,
    Part,
    PartInfo,
    Shard,
    SourceFile,
    decode_manifest,
    decode_success,
    encode_manifest,
    encode_success,
    make_manifest,
)
from tests.support.jobs.bulk_data import HASH, JOB, job_of

SOURCES = (SourceFile("s3://b/in/a.parquet", "e1", 1000, 7), SourceFile("s3://b/in/b.parquet", "e2", 500, 3))


def plan_of(*rows: int) -> JobPlan:
    shards = tuple(Shard(index, f"part-{index:05d}.parquet", count, ()) for index, count in enumerate(rows))
    return JobPlan(
        job_id=JOB, spec=job_of(version=2), model_hash=HASH, schema="", sources=SOURCES, shards=shards, rows=sum(rows)
    )


def info(index: int, rows: int, errors: int, **more: Any) -> PartInfo:
    return PartInfo(
        f"file:///out/part-{index:05d}.parquet", rows, errors, 100 * rows, f"tag{index}", more.get("schema", "y: float")
    )


def manifest() -> Manifest:
    return make_manifest(plan_of(6, 4), [info(0, 6, 2), info(1, 4, 0)], 12.5)


def test_a_manifest_says_what_the_output_is() -> None:
    found = decode_manifest(encode_manifest(manifest()))

    assert found == Manifest(
        job=JOB,
        model="m",
        version=2,
        model_hash=HASH,
        output_format="parquet",
        rows=10,
        ok=8,
        errors=2,
        schema="y: float",
        parts=(
            Part("part-00000.parquet", 6, 4, 2, 600, "tag0"),
            Part("part-00001.parquet", 4, 4, 0, 400, "tag1"),
        ),
        sources=SOURCES,
        created_at=12.5,
    )
    assert sum(part.ok + part.errors for part in found.parts) == found.rows


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([info(0, 6, 0)], "2 shards, and 1 parts"),
        ([info(1, 4, 0), info(0, 6, 0)], "not theirs"),
        ([info(0, 6, 0), info(1, 3, 0)], "has 10 rows, and its parts have 9"),
        ([info(0, 6, 0), info(1, 4, 0, schema="y: double")], "the columns of"),
    ],
)
def test_parts_that_are_not_the_plans_make_no_manifest(parts: list[PartInfo], text: str) -> None:
    with pytest.raises(CorruptEntry, match=text):
        make_manifest(plan_of(6, 4), parts, 0.0)


@pytest.mark.parametrize("field", ["rows", "ok", "errors"])
def test_numbers_that_do_not_add_up_are_refused(field: str) -> None:
    wrong = msgspec.structs.replace(manifest(), **{field: 5})

    with pytest.raises(CorruptEntry, match="do not add up"):
        decode_manifest(encode_manifest(wrong))


def test_what_is_no_manifest_is_refused() -> None:
    for data in (b"", b"{}", b"\xff", b"[1]", encode_manifest(manifest())[:-10]):
        with pytest.raises(CorruptEntry, match=r"_manifest\.json can't be read"):
            decode_manifest(data)


def test_success_is_of_one_manifest() -> None:
    data = encode_manifest(manifest())
    success = encode_success(manifest(), data)

    found = decode_success(success, data)

    assert (found.job, found.rows, found.errors, found.parts) == (JOB, 10, 2, 2)
    with pytest.raises(CorruptEntry, match="another"):
        decode_success(success, data + b" ")
    with pytest.raises(CorruptEntry, match="can't be read"):
        decode_success(b"", data)
