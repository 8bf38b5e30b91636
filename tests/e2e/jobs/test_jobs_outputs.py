"""Output of bulk jobs through the whole server: every format is exact, whichever worker is killed in the middle."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pytest
from onnx import helper

from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support import models
from tests.support.jobs.job_proof import compare, parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

TWO = "two"
"""A model of two outputs, of which one has labels."""
LABELS = ("even", "odd")
ROWS, PARTS = 20_000, 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("jobs")
    nodes = [helper.make_node("Add", ["x", "x"], ["sum"]), helper.make_node("Neg", ["x"], ["neg"])]
    outputs = [("sum", "FP32", (2,)), ("neg", "FP32", (2,))]
    models.write(folder / "models", TWO, nodes, [("x", "FP32", (2,))], outputs, max_batch_size=64)
    config = folder / "models" / TWO / "config.pbtxt"
    (config.parent / "labels.txt").write_text("\n".join(LABELS))
    config.write_text(config.read_text().replace('name: "sum"', 'name: "sum" label_filename: "labels.txt"'))
    with serving(folder) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    return server.scene()


def kill_worker(scene: Scene) -> None:
    """Kills the inference worker, as nobody can catch it; its supervisor starts another."""
    children = psutil.Process(scene.stack.pid).children(recursive=True)
    workers = [child.pid for child in children if "qinfer_workers.inference" in child.cmdline()]
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("format_", "compression", "reader"),
    [("csv", "gzip", "read_csv"), ("jsonl", "zstd", "read_json"), ("csv", "none", "read_csv")],
)
def test_text_is_exact_when_a_worker_is_killed(scene: Scene, format_: str, compression: str, reader: str) -> None:
    """An anti-join of keys finds nothing, as the client and another reader read them."""
    table = rows_of(0, ROWS, ROWS)
    scene.place.put("in/a.parquet", parquet(table))
    job = scene.submit(format=format_, compression=compression, rows_per_part=ROWS // PARTS)
    wait_until(lambda: job.status().shards_done > 1, WITHIN_S, "the first parts")
    kill_worker(scene)
    assert job.status().shards_done < PARTS

    status = job.wait(timeout_s=WITHIN_S)

    assert status.state == "completed", status.error
    verdict = compare(table, job.to_arrow())
    assert verdict.is_exact, verdict
    with duckdb.connect() as db:
        db.register("i", table)
        pattern = scene.place.path(f"out/part-*.{format_}*")
        db.execute(f"CREATE VIEW o AS SELECT * FROM {reader}(?)".replace("?", f"'{pattern}'"))
        found = db.execute("""
            SELECT (SELECT count(*) FROM i ANTI JOIN o USING (id)),
                   (SELECT count(*) FROM o ANTI JOIN i USING (id)),
                   (SELECT count(*) - count(DISTINCT id) FROM o)
        """).fetchone()
    assert found == (0, 0, 0), "missing, extra, duplicates"


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_each_row_is_good_or_failed_when_a_worker_is_killed(scene: Scene, format_: str) -> None:
    """An anti-join of keys with the parts and the files of failed rows together finds nothing."""
    table = rows_of(0, ROWS, ROWS)
    scene.place.put("in/a.parquet", parquet(table))
    job = scene.submit(format=format_, rows_per_part=ROWS // PARTS, failed_rows="separate")
    wait_until(lambda: job.status().shards_done > 1, WITHIN_S, "the first parts")
    kill_worker(scene)
    assert job.status().shards_done < PARTS

    status = job.wait(timeout_s=WITHIN_S)

    assert status.state == "completed", status.error
    assert status.rows_failed == table["x"].null_count > 0
    good = job.to_arrow()
    assert good.column_names == ["y", "id"]
    with duckdb.connect() as db:
        db.register("i", table)
        db.register("good", good)
        pattern = scene.place.path(f"out/_failed/part-*.{format_}")
        db.execute(f"CREATE VIEW failed AS SELECT * FROM read_{format_}('{pattern}')")
        db.execute("CREATE VIEW o AS SELECT id FROM good UNION ALL SELECT id FROM failed")
        found = db.execute("""
            SELECT (SELECT count(*) FROM i ANTI JOIN o USING (id)),
                   (SELECT count(*) FROM o ANTI JOIN i USING (id)),
                   (SELECT count(*) - count(DISTINCT id) FROM o),
                   (SELECT count(*) FROM good JOIN i USING (id) WHERE x IS NULL OR y[1] <> 2 * x[1]),
                   (SELECT count(*) FROM failed JOIN i USING (id) WHERE x IS NOT NULL OR error_code IS NULL)
        """).fetchone()
    assert found == (0, 0, 0, 0, 0), "missing, extra, duplicates, wrong, undeserved"


def test_the_greatest_elements_of_a_chosen_output(scene: Scene) -> None:
    """By the command: only the named output is there, as label, index and score."""
    ids = list(range(100))
    x = pa.array([[i % 2, (i + 1) % 2] for i in ids], pa.list_(pa.float32()))
    scene.place.put("in/a.parquet", parquet(pa.table({"id": ids, "x": x})))
    folder = Path(scene.place.path("in")).parent
    command = f"submit {TWO} {folder}/in/a.parquet {folder}/out --key id --output-tensor sum --top-k sum=1 "
    command += f"--output-column sum=class --format csv --wait --url http://{scene.stack.address}"

    subprocess.run([sys.executable, "-m", "qinfer.cli.main", *command.split()], check=True, timeout=WITHIN_S)

    rows = duckdb.sql(f"SELECT * FROM read_csv('{folder}/out/part-*.csv')")
    assert rows is not None
    assert rows.columns == ["class_label", "class_index", "class_score", "id", "error_code", "error_message"]
    assert [row[:4] for row in rows.fetchall()] == [(LABELS[(i + 1) % 2], (i + 1) % 2, 2.0, i) for i in ids]


def test_unknown_outputs_are_refused(scene: Scene) -> None:
    scene.place.put("in/a.parquet", parquet(rows_of(0, 10, 10)))

    text = scene.refusal(model=TWO, tensors=["sun"])

    assert text == "field 'output.tensors' names 'sun', which is no output of 'two'; did you mean 'sum'?"
