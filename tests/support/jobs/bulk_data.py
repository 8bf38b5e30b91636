"""Jobs, models and shards for tests of bulk scoring."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from qinfer.core.store_urls import UrlGrant
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import InputFile, Shard, SourceFile
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.storage.open import store_for
from qinfer.tabular.source import format_of, read_footer
from qinfer.tabular.spec import Columns, Range

JOB = "job-1"
HASH = "model-hash"
ANY_FILE = UrlGrant(("file:///",), ("file:///",))


def tensor(name: str, datatype: str, *dims: int, **more: Any) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, dims=dims, **more)


def model_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec] = (), **parameters: str) -> ModelSpec:
    return ModelSpec(
        name="m",
        backend="stub",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        max_batch_size=1024,
        parameters={key.replace("__", "."): value for key, value in parameters.items()},
    )


def job_of(
    columns: Mapping[str, str | tuple[str, ...] | Columns] | None = None, output: Output | None = None, **more: Any
) -> JobSpec:
    output = output or Output(url="file:///out")
    return JobSpec(model="m", inputs=("file:///in",), output=output, columns=dict(columns or {}), **more)


def file_of(url: str) -> InputFile:
    """Reads what planning needs of a file."""
    stat = store_for(url).stat(url)
    assert stat is not None
    footer = read_footer(stat, format_of(url, ""))
    return InputFile(SourceFile(url, stat.etag, stat.size_bytes, footer.rows), footer.groups, footer.cuts)


def shard_of(*urls: str, first: int = 0, rows: int | None = None, extension: str = "parquet") -> Shard:
    """Makes a shard of whole files, or of `rows` rows from the `first` on."""
    ranges: list[Range] = []
    end = None if rows is None else first + rows
    position = 0
    for url in urls:
        source, groups, _ = file_of(url)
        in_file = 0
        for number, count in enumerate(groups) if groups is not None else [(-1, source.rows)]:
            begin = max(first - position, 0)
            stop = count if end is None else min(end - position, count)
            if stop > begin:
                ranges.append(Range(url, source.etag, number, in_file + begin, stop - begin, begin))
            position, in_file = position + count, in_file + count
    return Shard(0, f"part-00000.{extension}", sum(part.rows for part in ranges), tuple(ranges))


def write(path: Path, table: pa.Table, group: int = 1000) -> str:
    """Writes a table in the format of the path's extension; returns its URL."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=group)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        import json

        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return f"file://{path}"
