"""Footers beyond the default limit: refused by the name of the setting, and read where the setting allows it."""

import asyncio
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from qinfer.core.settings import BulkSettings, Settings, StoreSettings
from qinfer.errors import InvalidRequest
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import UnplannedJob, decode_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import ReadLimits, SourceBroken
from tests.support.jobs.bulk_data import ANY_FILE, model_of, tensor, write

MODEL = model_of([tensor("x", "FP64", 1)], [tensor("y", "FP64", 1)])
LARGE = 64 * 2**20


def large_file(path: Path) -> JobSpec:
    """Writes a file whose footer has more than 16 MiB; returns a job of it."""
    table = pa.table({"x": [1.0], "id": [7]}).replace_schema_metadata({"note": "n" * 17 * 2**20})
    url = write(path, table)
    return JobSpec(model="m", inputs=(url,), output=Output(f"file://{path.parent}/out"), key="id")


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_a_large_footer_is_read_where_the_setting_allows_it(tmp_path: Path, format_: str) -> None:
    """In each process that reads it: when a job is taken, planned, and scored."""
    spec = large_file(tmp_path / f"a.{format_}")

    async def planned(footer_bytes: int) -> bytes:
        bulk = BulkSettings(max_footer_bytes=footer_bytes)
        pool = ExaminerPool(Settings(stores=StoreSettings(allow=("file:///",)), bulk=bulk), {})
        running = asyncio.create_task(pool.run())
        await asyncio.sleep(0)
        try:
            await pool.check(spec, MODEL, ANY_FILE)
            pace = ShardPace(0.0, 30.0, 1000, 1000)
            return await pool.plan(UnplannedJob("job-1", spec, MODEL, "hash", ANY_FILE), pace, 1)
        finally:
            running.cancel()
            await asyncio.wait([running])

    with pytest.raises(InvalidRequest, match=r"may have 16777216; .* raise QINFER_BULK__MAX_FOOTER_BYTES"):
        asyncio.run(planned(16 * 2**20))
    plan = decode_plan(asyncio.run(planned(LARGE)))
    schema = decode_schema(plan.schema)
    with closing(
        ShardReader(plan.shards[0], ("x", "id"), schema, spec, limits=ReadLimits.from_read_bytes(2**26, LARGE))
    ) as reader:
        batch = reader.read(10)
        assert batch is not None
        assert batch.record.to_pylist() == [{"x": 1.0, "id": 7}]
    with closing(ShardReader(plan.shards[0], ("x", "id"), schema, spec)) as reader, pytest.raises(SourceBroken):
        reader.read(10)


def test_the_setting_is_bounded() -> None:
    for size in (0, 2**40):
        with pytest.raises(ValueError, match="max_footer_bytes"):
            BulkSettings(max_footer_bytes=size)
