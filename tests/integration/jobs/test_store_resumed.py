"""A shard in S3 whose run is broken off: its pieces are kept in the bucket, and it goes on behind them."""

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.core.store_urls import UrlGrant
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import Shard
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.jobs.resumption import CHECKPOINTS, Resumption
from qinfer.storage.open import store_for
from tests.support.jobs.shard_runs import shards_of, write_rows
from tests.support.servers.s3_server import S3Server
from tests.unit.workers.inference.bulk.test_shard_resumed import Stopping, stopped_at
from tests.unit.workers.inference.bulk.test_shard_run import Ground

ROWS = 1000
FAILED = {3, 5, 500, 700, 999}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.make_bucket(f"resumed-{random.randrange(10**12)}")


def output_of(bucket: str) -> list[dict[str, object]]:
    """Returns the rows of the one part, and makes sure that nothing else is in the output."""
    [part] = store_for(bucket).scan(f"{bucket}/out")
    with store_for(bucket).open(part.url) as content:
        table = pq.read_table(content)
    assert isinstance(table, pa.Table)
    rows: list[dict[str, object]] = table.to_pylist()
    return rows


@pytest.mark.parametrize("small_bytes", [0, 4 * 2**20], ids=["large", "small"])
async def test_a_shard_in_s3_that_is_stopped_and_whose_workers_die_has_each_row_once(
    bucket: str, tmp_path: Path, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stops keep what is scored, a death has the rest scored in ranges; the part is that of an undisturbed run."""
    monkeypatch.setattr("qinfer.jobs.shard_rows._SMALL_BYTES", small_bytes)
    local = write_rows(tmp_path / "in.parquet", ROWS, group=150, nulls=[3, 700])
    url, store = f"{bucket}/in.parquet", store_for(bucket)
    store.write(store_for(local).read(local, 2**20), url)
    grant = UrlGrant((bucket,), (bucket,))
    spec = JobSpec(model="stub", version=1, inputs=(url,), output=Output(f"{bucket}/out"), error_threshold=-1)
    shards = shards_of(url)
    whole = Shard(0, "part-00000.parquet", ROWS, tuple(shard.ranges[0] for shard in shards))
    ground = Ground(tmp_path, Stopping())
    ground.model.bad = {5.0, 500.0, 999.0}

    for at in (300.0, 610.0):
        await stopped_at(ground, whole, spec, at, grant=grant)
    kept = [piece.url for piece in store.scan(f"{bucket}/out")]
    done = Resumption.decoded(ground.noted[-1]).done
    outcome = await ground.run(whole, spec, grant=grant, is_again=True, is_suspect=True).run()

    assert 300 <= done < ROWS
    assert kept
    assert all(piece.startswith(f"{bucket}/out/{CHECKPOINTS}/") for piece in kept)
    assert outcome == ShardOutcome(0, ROWS, len(FAILED))
    assert isinstance(ground.model, Stopping)
    assert sorted(ground.model.seen) == [float(row) for row in range(ROWS) if row not in FAILED]
    rows = output_of(bucket)
    assert [row["_row"] for row in rows] == list(range(ROWS))
    assert [row["y"] for row in rows] == [None if row in FAILED else [float(row)] * 2 for row in range(ROWS)]
    assert not ground.left()
