"""The data sets of the bulk benchmark: Parquet files with fixed seeds, made once and kept under `benchmarks/.work`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 4
"""Files of a data set: both contestants with two processes can share them evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A table and the model that scores it.

    Attributes:
        name: Its name, in options and tables.
        model: The name of the model, see `benchmarks.models`.
        rows: Rows in all files together.
        group_rows: Rows of a row group.
        batch: Rows of a batch, the same for every contestant.
        columns: The columns that become the model's input, in order; one of lists, or several of numbers.
        table: Makes a row group of so many rows, from a generator.
    """

    name: str
    model: str
    rows: int
    group_rows: int
    batch: int
    columns: tuple[str, ...]
    table: Callable[[np.random.Generator, int], pa.Table]

    def write(self, root: Path, rows: int) -> list[Path]:
        """Writes the files unless they are there, and returns their paths in order."""
        directory = root / f"{self.name}-{rows}"
        paths = [directory / f"in-{number}.parquet" for number in range(FILES)]
        if (directory / "done").exists():
            return paths
        directory.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(11)
        for number, path in enumerate(paths):
            left = rows // FILES + (rows % FILES if number == 0 else 0)
            schema = self.table(generator, 0).schema
            with pq.ParquetWriter(path, schema, compression="snappy", use_dictionary=False) as writer:
                while left:
                    count = min(left, self.group_rows)
                    writer.write_table(self.table(generator, count), row_group_size=count)
                    left -= count
        (directory / "done").touch()
        return paths


def _scalars(generator: np.random.Generator, rows: int) -> pa.Table:
    return pa.table({f"f{i}": generator.uniform(-1, 1, rows).astype(np.float32) for i in range(16)})


def _lists(generator: np.random.Generator, rows: int) -> pa.Table:
    values = pa.array(generator.uniform(-1, 1, rows * 512).astype(np.float32))
    offsets = pa.array(np.arange(0, rows * 512 + 1, 512, dtype=np.int32))
    return pa.table({"x": pa.ListArray.from_arrays(offsets, values)})


DATA_SETS = {
    data.name: data
    for data in (
        DataSet(
            name="scalars",
            model="tiny",
            rows=5_000_000,
            group_rows=125_000,
            batch=8192,
            columns=tuple(f"f{i}" for i in range(16)),
            table=_scalars,
        ),
        DataSet(name="lists", model="mlp", rows=1_000_000, group_rows=25_000, batch=512, columns=("x",), table=_lists),
    )
}
