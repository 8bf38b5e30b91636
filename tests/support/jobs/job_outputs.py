"""Writes what a completed bulk job leaves: parts, plan and manifest, without running one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from qinfer.jobs.job import FailedRows, JobSpec, Output, OutputFormat
from qinfer.jobs.parts import TextFile
from qinfer.jobs.plan import JobPlan, Manifest, Part, encode_manifest, encode_plan


def write_job_output(
    folder: Path,
    tables: list[pa.Table],
    *,
    model: str = "m",
    version: int = 1,
    key: str = "",
    columns: dict[str, str] | None = None,
    output_format: OutputFormat = "parquet",
    partial: bool = False,
    failed_rows: FailedRows = "inline",
) -> str:
    """Writes the output of a job whose parts are these tables; error columns are added where they lack them.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = tables if failed_rows == "separate" else [_with_errors(table) for table in tables]
    parts = tuple(_write(folder, f"part-{i:05}.{output_format}", table) for i, table in enumerate(whole))
    output = Output(url=f"file://{folder}", format=output_format, columns=columns or {})
    spec = JobSpec(model=model, version=version, inputs=("file:///in.parquet",), output=output, key=key)
    plan = JobPlan(job_id="j1", spec=spec, model_hash="h", schema="", sources=(), shards=(), rows=0)
    (folder / "_plan.json").write_bytes(encode_plan(plan))
    manifest = Manifest(
        job="j1",
        model=model,
        version=version,
        model_hash="h",
        output_format=output_format,
        rows=sum(part.rows for part in parts),
        ok=sum(part.ok for part in parts),
        errors=sum(part.errors for part in parts),
        schema="\n".join(f"{field.name}: {field.type}" for field in whole[0].schema) if whole else "",
        parts=parts,
        sources=(),
        created_at=0.0,
        failed_rows=failed_rows,
    )
    (folder / ("_manifest.partial.json" if partial else "_manifest.json")).write_bytes(encode_manifest(manifest))
    return str(folder)


def _with_errors(table: pa.Table) -> pa.Table:
    for name in ("error_code", "error_message"):
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
    return table


def _write(folder: Path, name: str, table: pa.Table) -> Part:
    path = folder / name
    if name.endswith(".arrow"):
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    elif name.endswith((".csv", ".jsonl")):
        file = TextFile(path, table.schema, Output(url="", format=name.rpartition(".")[2]))  # type: ignore[arg-type]
        file.write(table.to_batches())
        file.close()
    else:
        pq.write_table(table, path, row_group_size=2)
    has_errors = "error_code" in table.column_names
    errors = table.num_rows - table.column("error_code").null_count if has_errors else 0
    return Part(name, table.num_rows, table.num_rows - errors, errors, path.stat().st_size, "e")
