"""Previews of a job's rows, from real files of all formats, also damaged and large ones."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Forbidden, InvalidRequest
from qinfer.jobs.examiner import PreviewJob, PreviewOf
from qinfer.jobs.job import FailedRows, JobSpec, Output, OutputFormat
from qinfer.jobs.preview import MOST_CHARACTERS, MOST_COLUMNS, preview
from qinfer.tabular.footers import FOOTER_BYTES
from qinfer.tabular.spec import Csv
from qinfer.wire.bodies import JobPreview

PART = pa.table({
    "label": pa.array([3, None, 7], pa.int64()),
    "error_code": [None, "bad_input", None],
    "error_message": [None, "<b>no</b> number", None],
    "_row": [0, 1, 2],
})  # fmt: skip


def shown(
    folder: Path,
    of: PreviewOf = "input",
    inputs: tuple[str, ...] = ("in/*",),
    *,
    rows: int = 20,
    csv: Csv | None = None,
    format: OutputFormat = "parquet",
    failed_rows: FailedRows = "inline",
    shards: tuple[int, ...] = (0, 1),
) -> JobPreview:
    """Previews a job whose files are in a folder."""
    lake = f"file://{folder}"
    output = Output(f"{lake}/out", format, failed_rows=failed_rows)
    spec = JobSpec(model="m", inputs=tuple(f"{lake}/{one}" for one in inputs), output=output, csv=csv or Csv())
    return preview(PreviewJob(of, rows, spec, UrlGrant((lake,), (lake,)), shards), FOOTER_BYTES)


def write(path: Path, data: bytes | str | pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, pa.Table):
        pq.write_table(data, path)
    else:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_values_of_every_kind_are_texts(tmp_path: Path) -> None:
    table = pa.table({
        "id": [1, 2],
        "pixels": pa.array([[0.5, 1.0], None], pa.list_(pa.float32())),
        "half": pa.array([0.5, None], pa.float16()),
        "kind": pa.array(["a", "b"]).dictionary_encode(),
        "raw": [b"\xff", b"a"],
        "nested": [{"x": 1}, {"x": None}],
    })  # fmt: skip
    write(tmp_path / "in" / "a.parquet", table)

    found = shown(tmp_path)

    assert found.file == f"file://{tmp_path}/in/a.parquet"
    assert [column.type for column in found.columns][:2] == ["int64", "list<element: float>"]
    assert found.rows == (("1", "[0.5,1]", "0.5", "a", "/w==", '{"x":1}'), ("2", None, None, "b", "YQ==", '{"x":null}'))


@pytest.mark.parametrize(
    ("name", "data", "csv"),
    [
        ("a.csv", "id;x\n01;1,5\n02;2\n", Csv(delimiter=";")),
        ("a.jsonl.gz", gzip.compress(b'{"id": "01", "x": "1,5"}\n{"id": "02", "x": "2"}\n'), Csv()),
    ],
)
def test_text_is_shown_as_written(tmp_path: Path, name: str, data: bytes | str, csv: Csv) -> None:
    """Without a need to know the number of rows, so that a large file is not read to its end."""
    write(tmp_path / "in" / name, data)

    found = shown(tmp_path, csv=csv)

    assert [column.name for column in found.columns] == ["id", "x"]
    assert found.rows == (("01", "1,5"), ("02", "2"))


def test_arrow_files_are_read_batch_by_batch(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pa.OSFile(str(tmp_path / "in" / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, PART.schema) as file:
        for batch in PART.to_batches(max_chunksize=1):
            file.write_batch(batch)

    assert [row[0] for row in shown(tmp_path, rows=2).rows] == ["3", None]


def test_rows_columns_and_values_are_bounded(tmp_path: Path) -> None:
    columns = {f"c{number}": ["x" * 1000] * 200 for number in range(MOST_COLUMNS + 5)}
    write(tmp_path / "in" / "a.parquet", pa.table(columns))
    write(tmp_path / "in" / "b.parquet", pa.table({"image": [b"a" * (5 * 2**20)], "id": [1]}))

    found, large = shown(tmp_path, rows=7), shown(tmp_path, inputs=("in/b.parquet",))

    assert (len(found.rows), len(found.columns), found.columns_left_out) == (7, MOST_COLUMNS, 5)
    assert found.rows[0][0] == "x" * MOST_CHARACTERS + "…"
    assert large.rows == ((None, "1"),)


def test_a_damaged_file_is_passed_over_unless_it_is_alone(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.parquet", b"PAR1 torn")
    write(tmp_path / "in" / "b.parquet", b"")
    write(tmp_path / "in" / "c.parquet", PART)

    assert shown(tmp_path).file.endswith("/in/c.parquet")
    with pytest.raises(InvalidRequest, match=r"a\.parquet' can't be read as parquet"):
        shown(tmp_path, inputs=("in/a.parquet",))


def test_output_is_read_from_finished_parts_only(tmp_path: Path) -> None:
    write(tmp_path / "out" / "part-00000.parquet", PART.slice(0, 0))
    write(tmp_path / "out" / "part-00001.parquet", PART)
    write(tmp_path / "out" / "part-00002.parquet", b"torn, and of another job")
    write(tmp_path / "out" / "_plan.json", "{}")

    found = shown(tmp_path, "output")

    assert found.file.endswith("/out/part-00001.parquet")
    assert found.rows[1] == (None, "bad_input", "<b>no</b> number", "1")
    assert shown(tmp_path / "none", "output") == JobPreview(of="output")


def test_failed_rows_of_several_parts_come_with_their_errors_first(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "out" / f"part-0000{number}.parquet", PART)

    found = shown(tmp_path, "failed")

    assert [column.name for column in found.columns] == ["error_code", "error_message", "label", "_row"]
    assert found.rows == (("bad_input", "<b>no</b> number", None, "1"),) * 2


def test_failed_rows_in_files_of_their_own(tmp_path: Path) -> None:
    """Attempts may have left several files of a part, of which one is shown."""
    row = json.dumps({"error_code": "bad_input", "error_message": "no number", "id": 5})
    for digest in ("0123456789abcdef", "fedcba9876543210"):
        write(tmp_path / "out" / "_failed" / f"part-00000-{digest}.jsonl", f"{row}\n")

    found = shown(tmp_path, "failed", format="jsonl", failed_rows="separate")

    assert found.rows == (("bad_input", "no number", "5"),)


def test_a_file_beyond_the_tenants_stores_is_not_opened(tmp_path: Path) -> None:
    write(tmp_path / "secret.parquet", PART)
    (tmp_path / "lake" / "in").mkdir(parents=True)
    (tmp_path / "lake" / "in" / "a.parquet").symlink_to(tmp_path / "secret.parquet")

    with pytest.raises(Forbidden):
        shown(tmp_path / "lake")
