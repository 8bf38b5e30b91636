"""Text that other programs wrote, in bulk jobs through the whole server: each row once, also under kills."""

import gzip
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

ROWS = 40_000
PADDING = "é;" * 300
"""Text that makes the file have several cut points."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jobs"), 2) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    return server.scene()


def export(scene: Scene, name: str, first: int) -> pa.Table:
    """Writes rows in Latin-1 with semicolons and decimal commas and no header, by gzip; returns them."""
    ids = range(first, first + ROWS)
    lines = (f'{i};{i % 1000},5;{i % 100},25;"{PADDING}{os.urandom(200).hex()}\n"\n' for i in ids)
    scene.place.put(f"in/{name}", gzip.compress("".join(lines).encode("latin-1"), 1))
    x = pa.array([[i % 1000 + 0.5, i % 100 + 0.25] for i in ids], pa.list_(pa.float32()))
    return pa.table({"id": pa.array(ids, pa.int64()), "x": x})


@pytest.mark.parametrize("kill", [False, True])
def test_an_export_in_gzip(scene: Scene, *, kill: bool) -> None:
    one, other = export(scene, "export-1.csv.gz", 0), export(scene, "export-2.csv.gz", ROWS)
    form = {
        "delimiter": ";",
        "decimal_point": ",",
        "encoding": "latin-1",
        "header": False,
        "column_names": ["id", "width", "height", "note"],
    }
    job = scene.submit("export-*.csv.gz", csv=form, columns={"x": ["width", "height"]}, rows_per_part=4000)
    if kill:
        out = Path(scene.place.path("out"))
        wait_until(lambda: any(out.glob("part-*")), WITHIN_S, "a part")
        _kill_workers(scene)

    status = job.wait(timeout_s=WITHIN_S)

    table = scene.place.table("out")
    inputs = pa.concat_tables([one, other])
    assert status.state == "completed", status.error
    assert status.shards == 20
    assert table["id"].to_pylist() == [str(i) for i in range(2 * ROWS)]  # keys of CSV are text: missing=0 duplicates=0
    assert table["y"].to_pylist() == [[2 * value for value in x] for x in inputs["x"].to_pylist()]
    assert not (Path(scene.place.path("out")) / "_input").exists()


def test_kept_text_that_no_shard_begins_in_is_removed_too(scene: Scene) -> None:
    export(scene, "export.csv.gz", 0)
    form = {"delimiter": ";", "decimal_point": ",", "encoding": "latin-1", "header": False}

    status = scene.submit("*.gz", csv=form, columns={"x": ["f1", "f2"]}, key="f0", limit=100).wait(timeout_s=WITHIN_S)

    assert (status.state, status.rows_done) == ("completed", 100), status.error
    assert not (Path(scene.place.path("out")) / "_input").exists()


def _kill_workers(scene: Scene) -> None:
    children = psutil.Process(scene.stack.pid).children(recursive=True)
    workers = [child for child in children if "qinfer_workers.inference" in child.cmdline()]
    assert workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
