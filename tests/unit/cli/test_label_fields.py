"""`qinfer label`: any value that a column may hold, and any place that a file may be written to."""

import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from qinfer.jobs.job import OutputFormat
from tests.support.jobs.job_outputs import write_job_output
from tests.unit.cli.test_label import MAPPING, lines, run, table


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    path = tmp_path / "mood.yaml"
    path.write_text(MAPPING)
    return path


def test_a_field_that_nobody_copied(tmp_path: Path, mapping: Path) -> None:
    """People would see tasks without it; of an empty job nothing is missing."""
    folder = write_job_output(tmp_path / "out", [table().drop_columns(["text"])])
    empty = write_job_output(tmp_path / "empty", [])

    assert "no field 'text', which the mapping names: submit with --passthrough text" in run(folder, "-m", mapping)[2]
    assert run(empty, "-m", mapping, "--order", "confidence") == (0, "", "0 rows written")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1700000000123456789] * 5, pa.timestamp("ns")), "2023-11-14T22:13:20.123456"),
        (pa.array([1700000000123456789] * 5, pa.timestamp("ns", "Asia/Tokyo")), "2023-11-15T07:13:20.123456+09:00"),
        (pa.array([1_500_000_001] * 5, pa.duration("ns")), "PT1.5S"),
        (pa.array([1_500_000_001] * 5, pa.time64("ns")), "00:00:01.500000"),
        (pa.array([None] * 5, pa.timestamp("ns")), None),
        (pa.array([b"a\xff"] * 5).view(pa.string()), "a\ufffd"),
    ],
)
@pytest.mark.parametrize("output_format", ["parquet", "arrow"])
def test_values_of_fields(
    tmp_path: Path, mapping: Path, column: pa.Array, expected: str | None, output_format: OutputFormat
) -> None:
    """Nanoseconds, as pandas writes them, and what is no UTF-8: nothing of that stops a row."""
    folder = write_job_output(tmp_path / "out", [table(extra=column)], output_format=output_format)

    code, out, _ = run(folder, "-m", mapping)

    assert (code, [task["data"].get("extra") for task in lines(out)]) == (0, [expected] * 5)


def test_values_within_others(tmp_path: Path, mapping: Path) -> None:
    """Columns that are asked for may hold anything."""
    instant = pa.array([1700000000123456789] * 5, pa.timestamp("ns"))
    rows = table(extra=pa.StructArray.from_arrays([instant], ["at"]))
    folder = write_job_output(tmp_path / "out", [rows])

    code, out, _ = run(folder, "-m", mapping, "--field", "extra")

    assert (code, lines(out)[0]["data"]) == (0, {"extra": {"at": "2023-11-14 22:13:20.123456789"}})


@pytest.mark.parametrize(
    ("more", "expected"),
    [([], ["a0", "a1"]), (["--id", "path"], ["x/a0", "x/a1"]), (["--id", "number"], ["7", "8"])],
)
def test_images_of_fiftyone(tmp_path: Path, mapping: Path, more: list[str], expected: list[str]) -> None:
    """Named by their files, whatever key the job has, or by the column that is asked for."""
    columns = {"image": ["x/a0.png", "x/a1.png"], "path": ["x/a0", "x/a1"], "number": [7, 8]}
    folder = write_job_output(tmp_path / "out", [table(0, 2, **columns)], key="id")

    code, out, _ = run(folder, "-m", mapping, "-f", "fiftyone", *more)

    assert (code, [*json.loads(out)["labels"]]) == (0, expected)


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path, mapping: Path) -> None:
    """Neither are devices: as root, /dev/null would become a file."""
    folder = write_job_output(tmp_path / "out", [table()])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(folder, "-m", mapping, "--out", pipe)[0] == 0
        assert len(lines(os.read(reader, 2**16).decode())) == 5
        assert pipe.is_fifo()
    finally:
        os.close(reader)


def test_a_link_stays_one(tmp_path: Path, mapping: Path) -> None:
    """What it points at is replaced."""
    folder = write_job_output(tmp_path / "out", [table()])
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)

    assert run(folder, "-m", mapping, "--out", link)[0] == 0
    assert link.is_symlink()
    assert len(json.loads(target.read_text())) == 5


@pytest.mark.parametrize("order", ["input", "confidence"])
def test_a_full_disk(tmp_path: Path, mapping: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the file, or of where rows are sorted, is told."""
    folder = write_job_output(tmp_path / "out", [table()])

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115
    code, _, err = run(folder, "-m", mapping, "--order", order, "--out", "/dev/full")

    assert code == 1
    said = "/dev/full can't be written" if order == "input" else "rows can't be sorted in"
    assert said in err
    assert "No space left on device" in err
