"""Failed rows in files of their own: each row is in the part or there, once, whatever an attempt left behind."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.errors import StoreUnavailable
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.parts import PartBroken, validate_part
from qinfer.jobs.plan import FAILED, JobPlan, Shard
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.storage.local import LocalStore
from qinfer.storage.store import CommitOutcome
from qinfer_workers.inference.bulk.shard_loop import Abandoned
from qinfer_workers.jobs.documents import write_manifest
from tests.unit.workers.inference.bulk.test_shard_run import Ground, Model, one_shard


def ids_of(files: Iterable[Path]) -> list[int]:
    """Returns the keys of rows in files of any format, in order."""
    found: list[int] = []
    for path in sorted(files):
        if path.suffix == ".parquet":
            found += pq.read_table(path).column("id").to_pylist()
        elif path.suffix == ".arrow":
            found += pa.ipc.open_file(path).read_all().column("id").to_pylist()
        else:
            rows = duckdb.sql(f"SELECT id FROM read_{'csv' if path.suffix == '.csv' else 'json'}('{path}')")
            found += [row[0] for row in rows.fetchall()] if rows is not None else []
    return found


def splitting(folder: Path, format_: Any, rows: int = 1000, **options: Any) -> tuple[Shard, JobSpec]:
    """Returns a shard of a job whose failed rows have files of their own."""
    whole, spec = one_shard(folder, rows, **options)
    output = Output(spec.output.url, format_, failed_rows="separate")
    shard = msgspec.structs.replace(whole, part=f"part-00000.{output.extension}")
    return shard, msgspec.structs.replace(spec, output=output, key="id")


class NoParts(LocalStore):
    """Fails where a part would be committed, and not where its failed rows are."""

    def commit_if_absent(self, local: Path, url: str) -> CommitOutcome:
        if f"/{FAILED}/" in url:
            return super().commit_if_absent(local, url)
        raise StoreUnavailable(f"'{local}' does not reach '{url}'")


@pytest.mark.parametrize("format_", ["parquet", "arrow", "csv", "jsonl"])
async def test_failed_rows_have_a_file_of_their_own(tmp_path: Path, format_: Any) -> None:
    """Each row is in the part or there, once, and says there where it is from."""
    ground, (shard, spec) = Ground(tmp_path, Model()), splitting(tmp_path, format_, nulls=[3, 998])
    ground.model.bad = {500.0}

    outcome = await ground.run(shard, spec).run()
    again = await ground.run(shard, spec, is_again=True).run()

    (failed,) = (ground.output / FAILED).iterdir()
    assert outcome == again == ShardOutcome(0, 1000, 3)
    assert ids_of([failed]) == [3, 500, 998]
    assert ids_of([ground.output / shard.part]) == [row for row in range(1000) if row not in {3, 500, 998}]
    assert failed.name.startswith("part-00000-")
    assert not ground.left()
    if format_ == "parquet":
        assert pq.read_schema(ground.output / shard.part).names == ["y", "id"]
        names = ["id", "_file", "_row_group", "_row", "error_code", "error_message"]
        assert pq.read_schema(failed).names == names
        assert pq.read_table(failed).column("_row").to_pylist() == [3, 500, 998]


@pytest.mark.parametrize("format_", ["parquet", "arrow", "csv", "jsonl"])
async def test_every_row_may_fail_or_none(tmp_path: Path, format_: Any) -> None:
    for name, nulls in (("all", range(5)), ("none", ())):
        folder = tmp_path / name
        folder.mkdir()
        ground, (shard, spec) = Ground(folder, Model()), splitting(folder, format_, 5, nulls=list(nulls))

        outcome = await ground.run(shard, spec).run()
        again = await ground.run(shard, spec, is_again=True).run()

        failed = list((ground.output / FAILED).iterdir()) if nulls else []
        assert outcome == again == ShardOutcome(0, 5, len(nulls))
        assert (ground.output / FAILED).exists() == bool(nulls)
        assert ids_of(failed) == list(nulls)


@pytest.mark.parametrize("format_", ["parquet", "csv"])
async def test_failed_rows_are_those_of_the_attempt_whose_part_is_there(tmp_path: Path, format_: Any) -> None:
    """An attempt that failed other rows ends before its part is there: its failed rows do not count, and are moved."""
    ground, (shard, spec) = Ground(tmp_path, Model()), splitting(tmp_path, format_, 100)
    ground.model.bad = {5.0, 6.0}
    first = ground.run(shard, spec, store_for=lambda _: NoParts())
    first.on_delay = lambda _: first.stop()
    with pytest.raises(Abandoned):
        await first.run()
    ground.model.bad = {7.0}

    outcome = await ground.run(shard, spec, is_again=True).run()

    store, url = LocalStore(), f"{spec.output.url}/{shard.part}"
    info = validate_part(store, url, shard, "job1", "h", is_split=True)
    assert outcome == ShardOutcome(0, 100, 1)
    assert info.errors == 1
    assert ids_of([ground.output / info.failed]) == [7]
    assert len(list((ground.output / FAILED).iterdir())) == 2
    plan = JobPlan(job_id="job1", spec=spec, model_hash="h", schema="", sources=(), shards=(shard,), rows=100)
    manifest = write_manifest(lambda _: store, plan, [info], 1.0)
    assert [path.name for path in (ground.output / FAILED).glob("part-*")] == [info.failed.removeprefix("_failed/")]
    assert (manifest.parts[0].failed, manifest.ok, manifest.errors) == (info.failed, 99, 1)


async def test_failed_rows_of_a_partition_are_in_its_folder(tmp_path: Path) -> None:
    """Below `_failed`, so that a pattern of parts does not find them."""
    ground, (shard, spec) = Ground(tmp_path, Model()), splitting(tmp_path, "csv", 100, nulls=[4])
    shard = msgspec.structs.replace(shard, part="day=1/part-00000.csv")

    outcome = await ground.run(shard, spec).run()

    info = validate_part(LocalStore(), f"{spec.output.url}/{shard.part}", shard, "job1", "h", is_split=True)
    assert outcome == ShardOutcome(0, 100, 1)
    assert info.failed.startswith("_failed/day=1/part-00000-")
    assert ids_of([ground.output / info.failed]) == [4]
    assert [path.name for path in (ground.output / "day=1").iterdir()] == ["part-00000.csv"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
async def test_a_part_whose_failed_rows_are_gone_is_made_again(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    ground, (shard, spec) = Ground(tmp_path, Model()), splitting(tmp_path, "parquet", 100, nulls=[4])
    await ground.run(shard, spec).run()
    (failed,) = (ground.output / FAILED).iterdir()
    damage(failed)

    with pytest.raises(PartBroken, match="the file of its failed rows is gone, or not whole"):
        validate_part(LocalStore(), f"{spec.output.url}/{shard.part}", shard, "job1", "h", is_split=True)
