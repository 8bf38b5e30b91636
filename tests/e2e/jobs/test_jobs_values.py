"""Values as they come, in bulk jobs through the whole server: nulls and NaN, images within structs, lists of any width.

Each input row is in the output once, by anti-joins of the keys, with its answer or with what is wrong with it.
"""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import psutil
import pyarrow as pa
import pytest
from onnx import TensorProto, helper

from qinfer.testing import wait_until
from tests.e2e.conftest import clean_environment
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support import models
from tests.support.jobs.job_proof import parquet

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

ROWS = 20_000
TEXTS, WIDTHS, THREE = "texts", "widths", "three"
"""Models: texts as they are; twice the numbers of a list; three features, -1 in place of each that is not a number."""
FEATURES = ["age", "income", "score"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("jobs")
    default = helper.make_node("Constant", [], ["d"], value=helper.make_tensor("d", TensorProto.FLOAT, [1], [-1.0]))
    nodes = [helper.make_node("IsNaN", ["x"], ["n"]), default, helper.make_node("Where", ["n", "d", "x"], ["y"])]
    models.write(folder / "models", THREE, nodes, [("x", "FP32", (3,))], [("y", "FP32", (3,))], max_batch_size=256)
    twice = [helper.make_node("Add", ["x", "x"], ["y"])]
    models.write(folder / "models", WIDTHS, twice, [("x", "FP32", (-1,))], [("y", "FP32", (-1,))], max_batch_size=64)
    same = [helper.make_node("Identity", ["x"], ["y"])]
    models.write(folder / "models", TEXTS, same, [("x", "BYTES", (1,))], [("y", "BYTES", (1,))], max_batch_size=64)
    with serving(folder) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    return server.scene()


def submit(scene: Scene, model: str, *options: str) -> pa.Table:
    """Submits a job by the command line and waits; returns its output."""
    inputs, output = f"{scene.place.url}/in/*.parquet", f"{scene.place.url}/out"
    command = [sys.executable, "-m", "qinfer.cli.main", "submit", model, inputs, output, *options, "--wait"]
    arguments = ["--key", "id", "--url", f"http://{scene.stack.address}"]
    done = subprocess.run([*command, *arguments], env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return scene.place.table("out")


def line(inputs: pa.Table, output: pa.Table) -> str:
    """Returns what anti-joins of the keys show."""
    keys, found = inputs.select(["id"]), output.select(["id"])
    missing, extra = keys.join(found, "id", join_type="left anti"), found.join(keys, "id", join_type="left anti")
    duplicates = len(found) - len(found["id"].unique())
    assert output["id"].to_pylist() == inputs["id"].to_pylist()
    return f"missing={len(missing)} extra={len(extra)} duplicates={duplicates}"


def features() -> pa.Table:
    """Returns rows of which some have nulls and some have NaN; whole numbers, decimals and floats."""
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 1000, (3, ROWS)).astype(np.float64)
    numbers[2][rng.random(ROWS) < 0.05] = np.nan
    nulls = rng.random((3, ROWS)) < 0.1
    income = pa.array(numbers[1], mask=nulls[1]).cast(pa.decimal128(12, 2))
    columns = [pa.array(numbers[0], mask=nulls[0]).cast(pa.int64()), income, pa.array(numbers[2], mask=nulls[2])]
    return pa.table([pa.array(rng.permutation(ROWS)), *columns], names=["id", *FEATURES])


def check_features(table: pa.Table, output: pa.Table) -> None:
    """Checks that each row has its answer, once, with -1 in place of nulls and NaN."""
    assert line(table, output) == "missing=0 extra=0 duplicates=0"
    assert output["error_code"].null_count == ROWS
    given = np.stack([table[name].cast(pa.float64()).to_numpy() for name in FEATURES], axis=1)
    np.testing.assert_array_equal(np.array(output["y"].to_pylist()), np.where(np.isnan(given), -1, given))


def test_null_features_are_scored_as_nan(scene: Scene) -> None:
    """With the command of the documentation; the model sees NaN where a value is null, or NaN already."""
    table = features()
    scene.place.put("in/a.parquet", parquet(table.slice(0, 7000), [3000, 4000]))
    scene.place.put("in/b.parquet", parquet(table.slice(7000)))

    output = submit(scene, THREE, "--column", "x=age,income,score", "--null", "x=nan")

    check_features(table, output)


def test_null_features_are_scored_once_whatever_is_killed(scene: Scene) -> None:
    table = features()
    scene.place.put("in/a.parquet", parquet(table))
    columns = {"x": {"columns": FEATURES, "null": "nan"}}

    job = scene.submit(model=THREE, columns=columns, rows_per_part=500, error_threshold=0)
    wait_until(lambda: job.status().shards_done > 1, WITHIN_S, "the first parts")
    for child in psutil.Process(scene.stack.pid).children(recursive=True):
        if "qinfer_workers.inference" in child.cmdline():
            child.kill()
    assert job.status().shards_done < ROWS // 500

    assert job.wait(timeout_s=WITHIN_S).state == "completed"
    check_features(table, scene.place.table("out"))


def test_null_features_fail_their_rows_with_reasons(scene: Scene) -> None:
    """By default; the error names the first column without a value."""
    table = features()
    scene.place.put("in/a.parquet", parquet(table))

    output = submit(scene, THREE, "--column", "x=age,income,score", "--error-threshold", "-1")

    assert line(table, output) == "missing=0 extra=0 duplicates=0"
    first = [next((name for name in FEATURES if row[name] is None), None) for row in table.to_pylist()]
    remedy = "'null' of its input can give it a value"
    expected = [name and f"column '{name}' is null; {remedy}" for name in first]
    assert output["error_message"].to_pylist() == expected
    assert [y is None for y in output["y"].to_pylist()] == [name is not None for name in first]


def test_identifiers_are_not_rounded(scene: Scene) -> None:
    ids = [2**53, 2**53 + 1, 7]
    table = pa.table({"id": [1, 2, 3], "hash": pa.array(ids, pa.uint64())})
    scene.place.put("in/a.parquet", parquet(table))

    output = submit(scene, WIDTHS, "--column", "x=hash", "--error-threshold", "-1")

    assert output["y"].to_pylist() == [[2.0**54], None, [14]]
    assert "has the value 9007199254740993, which FP32 can't hold" in output["error_message"][1].as_py()


def test_images_of_a_hugging_face_data_set(scene: Scene) -> None:
    """Their bytes are a field of a struct, and so may keys and copied columns be."""
    images = [None if n % 7 == 0 else {"bytes": str(n).encode(), "path": f"{n}.png"} for n in range(500)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"id": range(500), "image": pa.array(images, kind)})
    scene.place.put("in/a.parquet", parquet(table, [200, 300]))

    options = ("--column", "x=image.bytes", "--passthrough", "image.path", "--error-threshold", "-1")
    output = submit(scene, TEXTS, *options)

    assert line(table, output) == "missing=0 extra=0 duplicates=0"
    assert output["y"].to_pylist() == [image and str(n) for n, image in enumerate(images)]
    assert output["image.path"].to_pylist() == [image and image["path"] for image in images]
    assert set(output["error_message"].to_pylist()) == {
        None, "column 'image.bytes' is null; 'null' of its input can give it a value",
    }  # fmt: skip


def test_lists_of_several_widths(scene: Scene) -> None:
    """Rows of one width are executed together; the output keeps the order of the input."""
    rng = np.random.default_rng(2)
    lists = [rng.integers(0, 100, width).astype(np.float32).tolist() for width in rng.integers(1, 20, 5000)]
    table = pa.table({"id": rng.permutation(5000), "x": pa.array(lists, pa.list_(pa.float32()))})
    scene.place.put("in/a.parquet", parquet(table))

    output = submit(scene, WIDTHS)

    assert line(table, output) == "missing=0 extra=0 duplicates=0"
    assert output["y"].to_pylist() == [[2 * value for value in row] for row in lists]


def test_files_of_different_fixed_widths(scene: Scene) -> None:
    for width in (2, 3):
        lists = pa.array([[1.0] * width], pa.list_(pa.float32(), width))
        scene.place.put(f"in/{width}.parquet", parquet(pa.table({"id": [width], "x": lists})))

    assert submit(scene, WIDTHS)["y"].to_pylist() == [[2, 2], [2, 2, 2]]


def test_fixed_shape_tensors_need_no_shape(scene: Scene) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6, dtype=np.float32).reshape(2, 1, 3))
    scene.place.put("in/a.parquet", parquet(pa.table({"id": [1, 2], "x": tensors})))

    output = submit(scene, THREE, "--passthrough", "x")

    assert output["y"].to_pylist() == [[0, 1, 2], [3, 4, 5]]
    assert output["x"].type == tensors.type
