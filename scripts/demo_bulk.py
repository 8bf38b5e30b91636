"""The bulk part of the demo: the same images as a Parquet file, scored as a job by the same worker, and read back."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from rich.console import Console

COPIES = 900
"""The 100 images so many times over: 90,000 rows, each with an id of its own."""


class BulkDemoFailed(Exception):
    """The output is not what it should be; the message says why."""


def write_input(images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], path: Path) -> int:
    """Writes the images, what they show and an id to a Parquet file; returns its rows."""
    count = len(images)
    pixels = pa.array(np.tile(images.reshape(-1), COPIES))
    table = pa.table(
        {
            "id": pa.array(np.arange(count * COPIES)),
            "pixels": pa.FixedSizeListArray.from_arrays(pixels, 64),
            "shows": pa.array(np.tile(labels, COPIES)),
        }
    )
    pq.write_table(table, path, row_group_size=10_000)
    return count * COPIES


def score(
    url: str, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], directory: Path, console: Console
) -> None:
    """Runs the command that a user would type, checks its output and prints the accuracy.

    Raises:
        BulkDemoFailed: The job did not complete, or a row is missing, there twice, or wrong.
    """
    source, out = directory / "digits.parquet", directory / "scored"
    shutil.rmtree(out, ignore_errors=True)
    rows = write_input(images, labels, source)
    command = ["qinfer", "submit", "digits", str(source), str(out), "--column", "image=pixels", "--key", "id"]
    command += ["--passthrough", "shows", "--rows-per-part", "20000", "--url", url, "--wait"]
    console.print(f"\nThe same as a job over a file of {rows:,} rows:\n")
    here = Path.cwd()
    shown = [str(Path(word).relative_to(here)) if Path(word).is_relative_to(here) else word for word in command]
    console.print(f"    {shlex.join(shown)}", soft_wrap=True, markup=False)
    program = str(Path(sys.executable).with_name(command[0]))
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False, timeout=300)
    for line in (done.stderr + done.stdout).strip().splitlines():
        console.print(f"    {line}", soft_wrap=True, markup=False)
    if done.returncode:
        raise BulkDemoFailed(f"the job did not complete: {(done.stderr or done.stdout).strip()}")
    accuracy = check(out, rows)
    console.print(f"\naccuracy {accuracy:.4f}; every row once, in the order of the input; no row failed")


def check(out: Path, rows: int) -> float:
    """Reads the output folder as a user would; returns the accuracy."""
    table = pyarrow.dataset.dataset(out, format="parquet").to_table()
    if table["id"].to_pylist() != list(range(rows)):
        raise BulkDemoFailed(f"{table.num_rows} rows were written, and not each of {rows} once in its order")
    if table["error_code"].null_count != rows:
        raise BulkDemoFailed(f"{rows - table['error_code'].null_count} rows failed")
    labels = table["label"].combine_chunks()
    values = labels.flatten() if pa.types.is_fixed_size_list(labels.type) else labels
    return float(np.mean(values.to_numpy() == table["shows"].to_numpy()))
