"""Data sets for whole jobs, and what their outputs prove: read as users read them, and compared with the inputs.

Rows are numbered by `id`, in an order that is not that of the numbers; `x` is two numbers that follow from the id, or
null, and the model answers `y = 2x`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from onnx import helper

from qinfer.jobs.plan import decode_manifest, decode_success
from qinfer.storage.open import url_to_fs
from tests.support import models

MODEL = "twice"
NULL_EVERY = 97
"""Rows whose id is a multiple of this have no `x`."""

_STEP = 7919  # coprime to the numbers of rows below: ids are a permutation


def write_model(repository: Path) -> str:
    """Writes the model `y = x + x` of two numbers, ONNX; returns its name."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    models.write(repository, MODEL, nodes, [("x", "FP32", (2,))], [("y", "FP32", (2,))], max_batch_size=64)
    return MODEL


def rows_of(first: int, count: int, total: int, *, nulls: bool = True) -> pa.Table:
    """Returns some rows of a data set of `total` rows."""
    ids = [number * _STEP % total for number in range(first, first + count)]
    x = [None if nulls and i % NULL_EVERY == 0 else [float(i), i / 2] for i in ids]
    names = [None if i % 5 == 0 else f"row {i}" for i in ids]
    columns = [pa.array(ids, pa.int64()), pa.array(x, pa.list_(pa.float32())), pa.array(names, pa.string())]
    return pa.table(columns, names=["id", "x", "name"])


def parquet(table: pa.Table, groups: Sequence[int] = ()) -> bytes:
    """Returns a Parquet file with row groups of these sizes; 0 is one without rows."""
    sink = BytesIO()
    with pq.ParquetWriter(sink, table.schema) as writer:
        first = 0
        for count in groups or [table.num_rows]:
            writer.write_table(table.slice(first, count), row_group_size=max(count, 1))
            first += count
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class Place:
    """Where inputs and outputs are.

    Attributes:
        url: A folder, such as `s3://bucket` or `file:///data`.
        options: What fsspec needs to find it.
    """

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> Any:
        return url_to_fs(self.url, self.options)[0]

    def path(self, name: str) -> str:
        """Returns the path of something below, as the file system wants it."""
        return f"{url_to_fs(self.url, self.options)[1].rstrip('/')}/{name}"

    def put(self, name: str, content: bytes) -> None:
        self.files.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(self.path(name), content)

    def read(self, name: str) -> bytes:
        return bytes(self.files.cat_file(self.path(name)))

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, sorted."""
        return sorted(path.rpartition("/")[2] for path in self.files.ls(self.path(folder), detail=False, refresh=True))

    def parts(self, folder: str) -> list[str]:
        return [name for name in self.names(folder) if name.startswith("part-")]

    def marks(self, folder: str) -> dict[str, object]:
        """Returns what tells whether a part was made again, by name."""
        found = {name: self.files.info(self.path(f"{folder}/{name}"), refresh=True) for name in self.parts(folder)}
        words = ("ETag", "LastModified", "etag", "ino", "mtime")
        return {name: [info[word] for word in words if word in info] for name, info in found.items()}

    def table(self, folder: str) -> pa.Table:
        """Returns the rows of all parts in order."""
        tables = [_read(self.read(f"{folder}/{name}"), name) for name in self.parts(folder)]
        return pa.concat_tables(tables).unify_dictionaries()


class Verdict(NamedTuple):
    """What the comparison of an output with its input has shown.

    Attributes:
        rows: Rows of the input.
        ok: Rows of the output that have an answer.
        errors: Rows of the output that have an error instead.
        missing: Rows of the input that are not in the output.
        extra: Rows of the output that are not in the input.
        duplicates: Rows of the output that are there another time.
        wrong: Rows with another answer than theirs, or with an error that they do not deserve.
    """

    rows: int
    ok: int
    errors: int
    missing: int = 0
    extra: int = 0
    duplicates: int = 0
    wrong: int = 0

    @property
    def line(self) -> str:
        words = " ".join(f"{name}={getattr(self, name)}" for name in ("rows", "ok", "errors", "missing", "duplicates"))
        return words.replace("errors=", "error=")

    @property
    def is_exact(self) -> bool:
        """Whether each row is there once, with its answer or an error."""
        return self == Verdict(self.rows, self.ok, self.errors) and self.ok + self.errors == self.rows


def add(one: Verdict, other: Verdict) -> Verdict:
    """Returns what two comparisons show together."""
    return Verdict(*(a + b for a, b in zip(one, other, strict=True)))


def compare(inputs: pa.Table, output: pa.Table) -> Verdict:
    """Compares rows by their ids, both ways, by duckdb."""
    with duckdb.connect() as db:
        db.register("i", inputs)
        db.register("o", output)
        found = db.execute("""
            SELECT (SELECT count(*) FROM i),
                   (SELECT count(*) FROM o WHERE error_code IS NULL),
                   (SELECT count(*) FROM o WHERE error_code IS NOT NULL),
                   (SELECT count(*) FROM i ANTI JOIN o USING (id)),
                   (SELECT count(*) FROM o ANTI JOIN i USING (id)),
                   (SELECT count(*) - count(DISTINCT id) FROM o),
                   (SELECT count(*) FROM i JOIN o USING (id)
                    WHERE (i.x IS NULL) <> (o.error_code IS NOT NULL) OR (o.error_code IS NULL) = (o.y IS NULL)
                       OR o.y[1] <> 2 * i.x[1] OR o.y[2] <> 2 * i.x[2])
        """).fetchone()
    assert found is not None
    return Verdict(*found)


def check_documents(place: Place, folder: str, verdict: Verdict) -> None:
    """Checks that manifest, `_SUCCESS` and parts say the same."""
    data = place.read(f"{folder}/_manifest.json")
    manifest, success = decode_manifest(data), decode_success(place.read(f"{folder}/_SUCCESS"), data)
    assert (manifest.rows, manifest.ok, manifest.errors) == verdict[:3]
    assert (success.rows, success.errors, success.parts) == (verdict.rows, verdict.errors, len(manifest.parts))
    assert [part.name for part in manifest.parts] == place.parts(folder)
    for part in manifest.parts:
        content = place.read(f"{folder}/{part.name}")
        codes = _read(content, part.name)["error_code"]
        assert (part.size_bytes, part.rows, part.ok) == (len(content), len(codes), codes.null_count)


def _read(content: bytes, name: str) -> pa.Table:
    if name.endswith(".arrow"):
        return pa.ipc.open_file(pa.BufferReader(content)).read_all()
    return pq.read_table(pa.BufferReader(content))
