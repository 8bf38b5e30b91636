"""Inputs as they come, in bulk jobs through the whole server: each has its output, or an error that names its fault.

Nothing hangs, and nothing is answered by 500.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from onnx import helper

from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support import models
from tests.support.jobs.job_proof import NULL_EVERY, parquet, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

GRID = "grid"
"""A model whose rows have two dimensions."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("jobs")
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    models.write(folder / "models", GRID, nodes, [("x", "FP32", (2, 2))], [("y", "FP32", (2, 2))])
    with serving(folder) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    return server.scene()


def test_an_empty_file(scene: Scene) -> None:
    """A file without bytes has no rows, in any format; where no other file has any, its columns are unknown."""
    scene.place.put("in/a.parquet", b"")
    assert "are empty; without a row their columns are unknown" in scene.refusal()

    table = rows_of(0, 10, 10)
    scene.place.put("in/b.parquet", parquet(table))
    scene.check(scene.done(), table)


def test_empty_files_of_formats_without_footers(scene: Scene) -> None:
    """They have no rows."""
    scene.place.put("in/a.jsonl", b"")
    assert "are empty; without a row their columns are unknown" in scene.refusal("*.jsonl")

    scene.place.put("in/b.jsonl", b'{"id": 1, "x": [1, 2]}\n{"id": 2, "x": [3, 4]}\n')
    status = scene.done("*.jsonl")

    assert (status.state, status.rows) == ("completed", 2)
    assert scene.place.table("out")["y"].to_pylist() == [[2, 4], [6, 8]]


def test_no_rows(scene: Scene) -> None:
    """The output is complete, and has the columns; every reader of a folder finds them."""
    nothing = rows_of(0, 0, 1)
    scene.place.put("in/a.parquet", parquet(nothing))
    scene.place.put("in/b.parquet", parquet(nothing, [0, 0]))

    scene.check(scene.done(passthrough=["name"]), nothing)

    found = pyarrow.dataset.dataset(scene.place.path("out"), format="parquet").to_table()
    assert (found.num_rows, found.column_names) == (0, ["y", "name", "id", "error_code", "error_message"])


def test_one_huge_row_group(scene: Scene) -> None:
    """It is cut by rows, and its rows stay in order."""
    table = rows_of(0, 100_000, 100_000)
    scene.place.put("in/a.parquet", parquet(table))

    status = scene.done(rows_per_part=9999)

    scene.check(status, table)
    assert status.shards == 11


@pytest.mark.parametrize("files", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_many_tiny_files(scene: Scene, files: int) -> None:
    """They are put together: a few parts, each row in its place."""
    table = rows_of(0, files * 3, files * 3)
    folder = Path(scene.place.path("in"))
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"{number:05d}.parquet").write_bytes(parquet(table.slice(number * 3, 3)))

    status = scene.done()

    scene.check(status, table)
    assert status.shards <= -(-files // 256) + 8


def test_nulls(scene: Scene) -> None:
    """A row without a value, or with one that has a null in it, has an error; the others have their outputs."""
    table = pa.table({"id": [1, 2, 3, 4], "x": pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.float32()))})
    scene.place.put("in/a.parquet", parquet(table))

    status = scene.done()

    assert (status.state, status.rows_done, status.rows_failed) == ("completed", 2, 2)
    output = scene.place.table("out")
    assert output["y"].to_pylist() == [[2, 4], None, None, [10, 12]]
    assert output["error_code"].to_pylist() == [None, "invalid_request", "invalid_request", None]
    assert output["error_message"].to_pylist() == [
        None,
        "column 'x' is null; 'null' of its input can give it a value",
        "column 'x' has a null in its list; 'null' of its input can give it a value",
        None,
    ]


def test_nulls_that_are_too_many(scene: Scene) -> None:
    """More rows with errors than the job allows fail it, and it says how many and why."""
    scene.place.put("in/a.parquet", parquet(rows_of(0, NULL_EVERY * 3, NULL_EVERY * 3)))

    text = scene.failure(error_threshold=1, rows_per_part=NULL_EVERY * 3)

    assert text.startswith("3 rows failed; the job allows 1 (error_threshold)")
    assert "'a.parquet': column 'x' is null" in text


def test_nested_values(scene: Scene) -> None:
    """Lists of lists are rows of two dimensions, and refused where rows have one; a struct always is."""
    nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float32())))
    scene.place.put("in/a.parquet", parquet(pa.table({"id": [1, 2], "x": nested})))
    struct = pa.array([{"a": 1.0, "b": 2.0}], pa.struct([("a", pa.float32()), ("b", pa.float32())]))
    scene.place.put("in/b.parquet", parquet(pa.table({"id": [1], "x": struct})))

    assert "column 'x' is of type list<element: list<element: float>>; " in scene.refusal("a.parquet")
    assert "struct" in scene.refusal("b.parquet")
    status = scene.done("a.parquet", model=GRID)

    assert status.state == "completed", status.error
    assert scene.place.table("out")["y"].to_pylist() == [[[2, 4], [6, 8]], [[10, 12], [14, 16]]]


def test_a_wrong_type_in_the_middle(scene: Scene) -> None:
    """The job fails before a row is scored, with file and column."""
    for name in "ac":
        scene.place.put(f"in/{name}.parquet", parquet(rows_of(0, 50, 50)))
    texts = pa.table({"id": [1], "x": [["one", "two"]], "name": ["b"]})
    scene.place.put("in/b.parquet", parquet(texts))

    text = scene.failure()

    assert text.startswith("'b.parquet': ")
    assert "'x'" in text
    assert "string" in text
    assert not scene.place.files.exists(scene.place.path("out/part-00000.parquet"))


def test_a_file_that_is_replaced_meanwhile(scene: Scene) -> None:
    """The job fails, and says which; nothing of the new content is in the output. A new job scores what is there."""
    first, second = rows_of(0, 50, 100, nulls=False), rows_of(50, 50, 100, nulls=False)
    scene.place.put("in/a.parquet", parquet(first))
    scene.place.put("in/b.parquet", parquet(second))
    path = Path(scene.place.path("in/b.parquet"))
    kept = path.rename(path.with_name("kept"))
    with scene.without_workers():
        kept.rename(path)
        job = scene.submit(rows_per_part=50)
        wait_until(lambda: job.status().state == "running", WITHIN_S, "a plan")
        path.rename(kept)
        scene.place.put("in/b.parquet", parquet(first))

    status = job.wait(timeout_s=WITHIN_S)

    assert status.state == "failed"
    assert "'b.parquet' has changed since the job was planned" in scene.short(status.error)
    assert scene.place.parts("out") == ["part-00000.parquet"]
    kept.rename(path)  # whether it was written to meanwhile, no file system tells
    job.resume()
    assert "make a new job" in job.wait(timeout_s=WITHIN_S).error
    again = scene.submit(rows_per_part=50, overwrite=True)
    scene.check(again.wait(timeout_s=WITHIN_S), first, second)


def test_a_file_that_is_cut_off(scene: Scene) -> None:
    """The job is refused, or fails where it is not the first, with the file's name."""
    whole = parquet(rows_of(0, 1000, 1000))
    scene.place.put("in/b.parquet", whole[: len(whole) // 2])
    text = "'b.parquet' can't be read as parquet; is it damaged or cut off?"
    assert scene.refusal().startswith(text)

    scene.place.put("in/a.parquet", whole)
    assert scene.failure().startswith(text)


def test_a_file_whose_pages_are_damaged(scene: Scene) -> None:
    """Its footer is fine, so that only the worker can tell; the shard's error has the file's name."""
    whole = bytearray(parquet(rows_of(0, 1000, 1000)))
    footer_bytes = int.from_bytes(whole[-8:-4], "little") + 8
    middle = (len(whole) - footer_bytes) // 2
    whole[4 : middle * 2] = b"\xff" * (middle * 2 - 4)
    scene.place.put("in/a.parquet", bytes(whole))
    assert pq.read_metadata(scene.place.path("in/a.parquet")).num_rows == 1000

    text = scene.failure()

    assert "'a.parquet' can't be read; is it damaged?" in text
