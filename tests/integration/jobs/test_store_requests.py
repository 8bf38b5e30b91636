"""How often a job asks an object store: no more than a fifth beyond a loop that reads the same files, and bounded."""

import io
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs  # type: ignore[import-untyped]  # it has no types

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import StoreChanged
from qinfer.jobs.columns import ERROR_COLUMNS
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.parts import PartWriter, part_metadata, part_of
from qinfer.jobs.plan import ExpectedParts, JobPlan, PartInfo, Shard, UnplannedJob
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader, SourceChanged
from qinfer.jobs.shards import ShardPace
from qinfer.storage.open import store_for
from qinfer.storage.store import CommitOutcome
from qinfer.tabular.schemas import decode_schema
from qinfer.testing import stub_spec
from tests.support.jobs.job_proof import parquet, rows_of
from tests.support.servers.s3_server import S3Server

FILES = 40
ROWS = 40
MODEL = stub_spec(name="twice", dims=(2,))
COLUMNS = ("id", "x", "name")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty bucket."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server.make_bucket(f"requests-{len(request.node.name)}-{random.randrange(10**9)}")
    server.reset()


@pytest.fixture
def filled(server: S3Server, bucket: str) -> str:
    """A bucket with `in/`, whose Parquet files have 1,600 rows together."""
    store = store_for(bucket)
    for number in range(FILES):
        store.write(parquet(rows_of(number * ROWS, ROWS, FILES * ROWS)), f"{bucket}/in/{number:03d}.parquet")
    server.requests.clear()
    return bucket


def job(bucket: str, pattern: str = "*.parquet") -> JobSpec:
    return JobSpec(model="twice", inputs=(f"{bucket}/in/{pattern}",), output=Output(f"{bucket}/out"), key="id")


def planned(bucket: str, spec: JobSpec) -> JobPlan:
    """Checks and plans a job, as gateway and bulk worker do."""
    allow = (bucket,)
    grant = UrlGrant(allow, allow)
    spec = examine(spec, MODEL, grant).spec
    pace = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=500, max_rows=10_000)
    return make_plan(UnplannedJob("job-1", spec, MODEL, "hash", grant), pace)


def rows_read(plan: JobPlan, shard: Shard) -> int:
    reader = ShardReader(shard, COLUMNS, decode_schema(plan.schema), plan.spec)
    found = 0
    while batch := reader.read(1000):
        found += batch.record.num_rows
    reader.close()
    return found


def inputs_asked(server: S3Server) -> Counter[str]:
    """Returns how often each kind of request came for the inputs, listings included."""
    return Counter(method for method, path in server.requests if "/out" not in path)


def loop_over(server: S3Server, urls: Sequence[str] = (), folder: str = "") -> Counter[str]:
    """Returns how often a loop asks that reads the columns of some files, or of those of a folder, by s3fs."""
    environment = server.environment
    files = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=server.endpoint,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    server.requests.clear()
    for name in files.ls(folder, detail=False) if folder else urls:
        with files.open(name) as content:
            pq.read_table(content, columns=list(COLUMNS))
    asked = inputs_asked(server)
    server.requests.clear()
    return asked


def asked_by(server: S3Server, bucket: str, spec: JobSpec) -> tuple[Counter[str], int]:
    """Returns how often a job asks for its inputs, and how many rows it reads."""
    server.requests.clear()
    server.lists.clear()
    plan = planned(bucket, spec)
    rows = sum(rows_read(plan, shard) for shard in plan.shards)
    return inputs_asked(server), rows


def test_a_job_asks_for_its_inputs_no_more_than_a_fifth_beyond_a_loop(server: S3Server, filled: str) -> None:
    loop = loop_over(server, folder=f"{filled}/in")

    asked, rows = asked_by(server, filled, job(filled))

    assert rows == FILES * ROWS
    assert loop == {"HEAD": FILES, "GET": FILES + 1}
    assert asked["HEAD"] == 0
    assert asked.total() <= 1.2 * loop.total(), asked
    assert lists(server, "in") <= 2  # when it is created, and when it is planned
    assert lists(server) <= 5, server.lists


def test_inputs_that_are_named_one_by_one_are_asked_for_as_seldom(server: S3Server, filled: str) -> None:
    urls = [f"{filled}/in/{number:03d}.parquet" for number in range(FILES)]
    loop = loop_over(server, urls)

    asked, rows = asked_by(server, filled, msgspec.structs.replace(job(filled), inputs=tuple(reversed(urls))))

    assert rows == FILES * ROWS
    assert loop == {"HEAD": FILES, "GET": FILES}
    assert asked.total() <= 1.2 * loop.total(), asked


@pytest.mark.parametrize(("files", "groups"), [(10, 1), (10, 12)])
def test_large_files_are_asked_for_as_seldom(server: S3Server, bucket: str, files: int, groups: int) -> None:
    """However many row groups, columns and pages they have."""
    rows = 220_000
    random = np.random.default_rng(1)
    table = pa.table(
        {
            "id": np.arange(rows),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(random.random(2 * rows, np.float32)), 2),
            "name": pa.array([f"{number:x}" for number in random.integers(2**60, size=rows)]),
            "unread": random.random(rows),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=rows // groups)
    for number in range(files):
        store_for(bucket).write(sink.getvalue(), f"{bucket}/large/{number}.parquet")
    assert sink.tell() > 5 * 2**20
    loop = loop_over(server, folder=f"{bucket}/large")

    spec = msgspec.structs.replace(job(bucket), inputs=(f"{bucket}/large/*",))
    spec = msgspec.structs.replace(spec, output=msgspec.structs.replace(spec.output, rows_per_part=10**7))
    asked, found = asked_by(server, bucket, spec)

    assert found == files * rows
    assert asked.total() <= 1.2 * loop.total(), (asked, loop)


def lists(server: S3Server, folder: str = "") -> int:
    """Returns how many listings there were, of one folder where that is given."""
    return sum(prefix == f"{folder}/" for prefix in server.lists) if folder else len(server.lists)


def test_a_part_costs_four_requests(server: S3Server, filled: str, tmp_path: Path) -> None:
    """It is looked for, put, and looked at and read when the job is finished."""
    plan = planned(filled, job(filled))
    parts = ExpectedParts("job-1", "hash", f"{filled}/out", plan.shards, UrlGrant((filled,), (filled,)))
    store = store_for(filled)
    server.requests.clear()

    for shard in plan.shards:
        assert isinstance(part_of(store, parts, shard), str)
        path = tmp_path / shard.part
        numbers = pa.array(range(shard.rows), pa.int64())
        record = pa.record_batch([numbers, *[pa.nulls(shard.rows, pa.string())] * 2], ["id", *ERROR_COLUMNS])
        with PartWriter(path, record.schema, plan.spec.output, part_metadata("job-1", shard, "hash")) as writer:
            writer.write(record)
        assert store.commit_if_absent(path, f"{filled}/out/{shard.part}") is CommitOutcome.CREATED
    found = [part_of(store, parts, shard) for shard in plan.shards]

    assert all(isinstance(part, PartInfo) for part in found)
    asked = Counter(method for method, path in server.requests if "/out" in path)
    shards = len(plan.shards)
    assert asked == {"HEAD": 2 * shards, "PUT": shards, "GET": shards}


@pytest.mark.long
def test_a_store_that_refuses_three_of_ten_requests_is_asked_little_more(server: S3Server, filled: str) -> None:
    """The plan is made at its first try, and no file is read more often than its own refusals ask for."""
    server.busy = random.Random(18)

    plan = planned(filled, job(filled))
    rows = sum(rows_read(plan, shard) for shard in plan.shards)

    assert rows == FILES * ROWS
    assert len(server.requests) <= 2 * (2 * FILES + 20)


@pytest.mark.parametrize("rows", [ROWS, 400_000], ids=["small", "large"])
def test_a_file_that_was_replaced_since_it_was_planned_is_seen(server: S3Server, bucket: str, rows: int) -> None:
    """Also one of the same size, and one that is too large to be read at once."""
    url = f"{bucket}/one/a.parquet"
    table = rows_of(0, rows, rows, nulls=False)
    store_for(url).write(parquet(table), url)
    plan = planned(bucket, JobSpec(model="twice", inputs=(url,), output=Output(f"{bucket}/out"), key="id"))

    store_for(url).write(parquet(table.slice(0, rows - 1)), url)

    with pytest.raises(SourceChanged, match="has changed since the job was planned"):
        sum(rows_read(plan, shard) for shard in plan.shards)


def test_an_object_is_read_only_as_it_was_listed(server: S3Server, bucket: str) -> None:
    """The answer is compared, too: not each server heeds the condition."""
    url = f"{bucket}/text"
    store = store_for(url)
    store.write(b"0123456789", url)
    known = store.stat(url)
    assert known is not None
    with store.open_known(known) as file, store.open_known(known, sequential=True) as ahead:
        assert (file.seek(-4, io.SEEK_END), file.read(3), file.read(), file.read()) == (6, b"678", b"9", b"")
        assert ahead.read(4) + ahead.read() == b"0123456789"
        store.write(b"9876543210", url)
        file.seek(0)
        with pytest.raises(StoreChanged):
            file.read(1)
        server.ignores_match = True
        with pytest.raises(StoreChanged):
            file.read(1)
