"""Hive tables through the whole server: their folders are columns, and the output has the same folders.

Each row is in the folder of its partition exactly once, whatever is killed meanwhile.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pyarrow.dataset
import pytest

from qinfer.jobs.plan import decode_manifest
from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support.jobs.job_proof import compare, parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

COUNTRIES, DAYS = ("de", "f%20r", "__HIVE_DEFAULT_PARTITION__"), ("2026-11-01", "2026-11-02")
ROWS = 20_000
"""Rows of each file."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jobs")) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    return server.scene()


def write_table(scene: Scene) -> pa.Table:
    """Writes a file for each country and day; returns the rows of all, as the server sorts them."""
    tables: list[pa.Table] = []
    total = len(COUNTRIES) * len(DAYS) * ROWS
    for country in sorted(COUNTRIES):
        for day in DAYS:
            table = rows_of(len(tables) * ROWS, ROWS, total)
            scene.place.put(f"in/country={country}/day={day}/part-0.parquet", parquet(table))
            values = [None if country.startswith("__") else country.replace("%20", " ")] * ROWS
            tables.append(table.append_column("country", pa.array(values, pa.string())))
    return pa.concat_tables(tables)


def kill_worker(scene: Scene) -> None:
    for child in psutil.Process(scene.stack.pid).children(recursive=True):
        if "qinfer_workers.inference" in child.cmdline():
            os.kill(child.pid, signal.SIGKILL)


def test_a_hive_table_becomes_another_one_whatever_is_killed(scene: Scene) -> None:
    """With the docs' options; pyarrow and duckdb find the partitions of the output."""
    inputs = write_table(scene)

    job = scene.submit("", partitioning="hive", partition_by=["country"], passthrough=["day"], rows_per_part=5000)
    wait_until(lambda: job.status().rows_done > 0, WITHIN_S, "the first part")
    kill_worker(scene)
    status = job.wait(timeout_s=WITHIN_S)

    assert (status.state, status.rows) == ("completed", inputs.num_rows), status.error
    out = Path(scene.place.path("out"))
    read = pyarrow.dataset.dataset(out, format="parquet", partitioning="hive").to_table()
    verdict = compare(inputs, read)
    assert (verdict.missing, verdict.duplicates, verdict.extra, verdict.wrong) == (0, 0, 0, 0), verdict.line
    with duckdb.connect() as db:
        db.register("i", inputs)
        db.register("o", job.to_arrow())
        (wrong,) = db.execute("""
            SELECT count(*) FROM i LEFT JOIN o USING (id) WHERE o.country IS DISTINCT FROM i.country
        """).fetchall()[0]
        folders = db.execute(f"""
            SELECT DISTINCT country FROM read_parquet('{out}/**/*.parquet', hive_partitioning = true)
        """).fetchall()
    assert wrong == 0
    assert len(folders) == len(COUNTRIES)
    parts = [part.name for part in decode_manifest(scene.place.read("out/_manifest.json")).parts]
    assert parts == sorted(parts, key=lambda name: name.rpartition("/")[2])
    assert sorted({name.rpartition("/")[0] for name in parts}) == sorted(f"country={country}" for country in COUNTRIES)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.parquet")) == sorted(parts)


def test_parts_in_folders_are_made_again(scene: Scene) -> None:
    """A resumed job looks for each where it belongs."""
    table = rows_of(0, 40, 40, nulls=False)
    for number in range(2):
        scene.place.put(f"in/n={number}/a.parquet", parquet(table.slice(number * 20, 20)))
    scene.place.put("in/n=2/a.parquet", parquet(rows_of(0, 1, 97)))  # whose value is null

    job = scene.submit("", partitioning="hive", partition_by=["n"], error_threshold=0, rows_per_part=20)
    assert job.wait(timeout_s=WITHIN_S).state == "failed"
    (Path(scene.place.path("out")) / "n=1/part-00001.parquet").unlink(missing_ok=True)
    job.resume(error_threshold=-1)
    status = job.wait(timeout_s=WITHIN_S)

    assert (status.state, status.rows, status.rows_failed) == ("completed", 41, 1), status.error
    assert job.to_arrow(columns=["n", "id"]).slice(0, 40)["n"].to_pylist() == [0] * 20 + [1] * 20
