"""A column of different types in two files: each value stays what it is, or the job says which column it is about."""

from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import UnplannedJob
from qinfer.jobs.planning import make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import SourceBroken
from tests.support.jobs.bulk_data import ANY_FILE, model_of, tensor, write

MODEL = model_of([tensor("x", "FP64", 1)], [tensor("y", "FP64", 1)])


def runs(values: pa.Array) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), values)


def merged(folder: Path, one: pa.Array, other: pa.Array, **fields: Any) -> list[Any]:
    """Returns the values of the column `c`, which the job copies unless told otherwise, of two files."""
    for name, values in (("a", one), ("b", other)):
        write(folder / f"{name}.arrow", pa.table({"x": [1.0] * len(values), "c": values}))
    fields = {"passthrough": ("c",), **fields}
    spec = JobSpec(model="m", inputs=(f"file://{folder}/*",), output=Output("file:///out"), **fields)
    plan = make_plan(UnplannedJob("job-1", spec, MODEL, "hash", ANY_FILE), ShardPace(0.0, 30.0, 1000, 1000))
    found: list[Any] = []
    for shard in plan.shards:
        with closing(ShardReader(shard, ("c",), decode_schema(plan.schema), spec)) as reader:
            while (batch := reader.read(100)) is not None:
                found += batch.record["c"].to_pylist()
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array(["a", None], pa.string_view()), pa.array(["b", "c"])),
        (pa.array(["a", None]).dictionary_encode(), pa.array(["b", "c"], pa.string_view())),
        (pa.array([None, ["a"]], pa.list_view(pa.string_view())), pa.array([None, ["b"]], pa.list_(pa.string()))),
        (pa.array([None, [1]], pa.list_view(pa.int64())), pa.array([None, [2]], pa.list_(pa.int32()))),
        (runs(pa.array([1, None])), pa.array([2, 3], pa.int32())),
        (pa.array([2, 3], pa.int16()), runs(pa.array([1, None]))),
        (pa.array([Decimal("1.10"), None], pa.decimal128(5, 2)), pa.array([2**62, -1])),
        (pa.array([Decimal("1.10"), None], pa.decimal128(38, 30)), pa.array([2**63], pa.uint64())),
        (pa.array([Decimal("1.10"), None], pa.decimal32(5, 2)), pa.array([Decimal("1.1234")], pa.decimal256(50, 4))),
        (pa.array([2**53, None]), pa.array([1.5])),
    ],
    ids=lambda values: str(values.type),
)
def test_values_of_both_files_stay_what_they_are(tmp_path: Path, one: pa.Array, other: pa.Array) -> None:
    assert merged(tmp_path, one, other) == one.to_pylist() + other.to_pylist()
    assert merged(tmp_path, other, one) == other.to_pylist() + one.to_pylist()


@pytest.mark.parametrize("values", [[2**53 + 1], [[2**53 + 1]]])
def test_an_identifier_is_not_rounded_because_another_file_has_floats(tmp_path: Path, values: list[Any]) -> None:
    floats = pa.array([[0.5]] if isinstance(values[0], list) else [0.5])

    with pytest.raises(SourceBroken, match=r"column 'c' of '.*a\.arrow' is of type .*int64.*, which can't be made the"):
        merged(tmp_path, pa.array(values), floats)


def test_decimals_are_not_rounded_because_another_file_has_floats(tmp_path: Path) -> None:
    """An input of floats rounds them in any case."""
    decimals = pa.array([Decimal("12345678901234567890.12")], pa.decimal128(22, 2))

    with pytest.raises(InvalidRequest, match="column 'c' is double in"):
        merged(tmp_path, decimals, pa.array([0.5]))
    assert merged(tmp_path, decimals, pa.array([0.5]), passthrough=(), columns={"x": "c"}) == [
        1.2345678901234567e19,
        0.5,
    ]
