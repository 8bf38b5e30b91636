"""Types that a job gives columns of text: their values are of these types, and a row with another one fails, named."""

import datetime
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import COLUMN_TYPES, JobSpec, Output, decode_spec
from qinfer.jobs.outputs import OutputColumns, ScoredRows
from qinfer.jobs.plan import JobPlan, UnplannedJob, decode_plan, encode_plan
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import ModelSpec
from qinfer.tabular.batches import RowErrors
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.schemas import decode_schema, select
from qinfer.tabular.spec import Csv
from qinfer.tabular.texts import TypedColumns, type_of, typed
from tests.support.jobs.bulk_data import ANY_FILE, job_of, model_of, tensor, write

DAY, NOON = datetime.date(2026, 1, 31), datetime.datetime.fromisoformat("2026-01-31T12:00:00.5")
NUMBER = model_of([tensor("x", "FP64", 1)], [tensor("y", "FP64", 1)])
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)

WHOLE = ("7", 7, "x")
FLOAT = ("1.10", 1.1, "1e400")
VALUES: dict[str, tuple[str, Any, str]] = {
    "string": ("1.10", "1.10", ""),
    "bool": ("true", True, "yes"),
    "date32": ("2026-01-31", DAY, "31.01.2026"),
    "float32": ("1.5", 1.5, "1e39"),
    "float64": FLOAT,
    **{f"int{bits}": ("-7", -7, "1.5") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": ("7", 7, "-7") for bits in (8, 16, 32, 64)},
    "timestamp[s]": ("2026-01-31 12:00:00", NOON.replace(microsecond=0), "2026-01-31 12:00:00.5"),
    **{f"timestamp[{unit}]": ("2026-01-31T12:00:00.5", NOON, "2026-01-31T12:00:00Z") for unit in ("ms", "us", "ns")},
    "timestamp[s, tz=UTC]": ("2026-01-31T13:00:00+01:00", NOON.replace(microsecond=0, tzinfo=datetime.UTC), "12:00"),
    **{
        f"timestamp[{unit}, tz=UTC]": ("2026-01-31T12:00:00.5Z", NOON.replace(tzinfo=datetime.UTC), "2026-01-31")
        for unit in ("ms", "us", "ns")
    },
    "decimal128(5, 2)": ("1.10", Decimal("1.10"), "1.234"),
}
"""Type → a cell of it, the cell's value, and a cell that is none; empty = there is no such cell."""


def planned(folder: Path, model: ModelSpec = NUMBER, *, pattern: str = "*", **fields: Any) -> JobPlan:
    spec = JobSpec(
        model="m", inputs=(f"file://{folder}/{pattern}",), output=Output(f"file://{folder}-out"), key="id", **fields
    )
    spec = examine(spec, model, ANY_FILE).spec
    return decode_plan(encode_plan(make_plan(UnplannedJob("job-1", spec, model, "hash", ANY_FILE), PACE)))


def output(folder: Path, model: ModelSpec = NUMBER, **fields: Any) -> pa.Table:
    """Returns the output of a job whose model answers `y = 2x`."""
    plan = planned(folder, model, **fields)
    stored, found = decode_schema(plan.schema), []
    for shard in plan.shards:
        outputs = OutputColumns(plan.spec, model, typed(stored), [one.url for one in shard.ranges])
        inputs = InputColumns(plan.spec, model, typed(stored))
        columns = tuple(dict.fromkeys((*inputs.columns, *outputs.copied)))
        values = TypedColumns(select(stored, columns), plan.spec.csv_form.decimal_point)
        with closing(ShardReader(shard, columns, stored, plan.spec)) as reader:
            while (batch := reader.read(1000)) is not None:
                errors = RowErrors(batch.record.num_rows)
                batch = values.parse_texts(batch, errors)
                decoded = inputs.decode(batch.record, errors)
                scored = [ScoredRows(piece.rows, {"y": np.asarray(piece.inputs["x"]) * 2}) for piece in decoded.pieces]
                found.append(outputs.encode(batch, scored, errors))
    return pa.Table.from_batches(found)


@pytest.mark.parametrize("name", [*COLUMN_TYPES, "decimal128(5, 2)"])
@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_a_copied_column_has_the_type_that_the_job_gives_it(tmp_path: Path, name: str, format_: str) -> None:
    """A cell that is none fails its row, with column, value and row."""
    cell, value, other = VALUES[name]
    cells = [cell, other or cell]
    if format_ == "csv":
        (tmp_path / "a.csv").write_text("id,x,c\n" + "".join(f'a,1,"{one}"\n' for one in cells) + "a,1,\n")
    else:
        lines = [f'{{"id": "a", "x": 1, "c": "{one}"}}\n' for one in cells]
        (tmp_path / "a.jsonl").write_text("".join(lines) + '{"id": "a", "x": 1}\n')

    found = output(tmp_path, passthrough=("c",), types={"c": name})

    assert found.schema.field("c").type == type_of(name)
    nothing = "" if (name, format_) == ("string", "csv") else None
    assert found["c"].to_pylist() == [value, value if not other else None, nothing]
    message = found["error_message"].to_pylist()[1]
    assert found["y"].to_pylist() == [2.0, None if other else 2.0, 2.0]
    expected = f"column 'c' has '{other}' in row 1 of 'file://{tmp_path}/a.{format_}', which is no {type_of(name)}"
    assert message == (expected if other else None)


def test_the_key_and_an_input_may_have_a_type(tmp_path: Path) -> None:
    """An input that is copied has one value for both; a later cell that is none fails no file."""
    (tmp_path / "a.csv").write_text("id;x\n1;1,50\n2;-\nx;3\n")

    found = output(
        tmp_path, types={"id": "int64", "x": "float64"}, passthrough=("x",), csv=Csv(delimiter=";", decimal_point=",")
    )

    assert found["id"].to_pylist() == [1, 2, None]
    assert found["x"].to_pylist() == [1.5, None, 3.0]
    assert found["y"].to_pylist() == [3.0, None, None]
    assert found["error_code"].to_pylist() == [None, "invalid_request", "invalid_request"]


def test_an_input_that_is_only_fed_fails_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x\na,1\nb,one\nc,\n")

    found = output(tmp_path, types={"x": "float64"})

    assert found["y"].to_pylist() == [2.0, None, None]
    assert "column 'x' has 'one' in row 1 of" in found["error_message"][1].as_py()
    assert "column 'x' is null" in found["error_message"][2].as_py()


def test_rows_are_numbered_within_their_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("id,x,c\n" + "a,1,1\n" * 3 + "a,1,no\n")

    messages = output(tmp_path, passthrough=("c",), types={"c": "int32"})["error_message"].to_pylist()

    place = "column 'c' has 'no' in row 3 of 'file://{}/{}.csv', which is no int32"
    assert messages == [None, None, None, place.format(tmp_path, "a"), None, None, None, place.format(tmp_path, "b")]


def test_a_declared_field_of_json_lines_may_be_numbers_in_one_file_and_texts_in_another(tmp_path: Path) -> None:
    """On any level; numbers are taken as they are written."""
    (tmp_path / "a.jsonl").write_text(
        '{"id": 1, "x": 1, "o": {"c": 1.10}}\n{"id": 2, "x": 1, "o": {"c": 12345678901234567.8}}\n'
    )
    (tmp_path / "b.jsonl").write_text('{"id": "3", "x": 1, "o": {"c": "2.20"}}\n{"id": "4", "x": 1, "o": null}\n')

    found = output(tmp_path, passthrough=("o.c",), types={"o.c": "decimal128(20, 2)", "id": "string"})

    assert found["o.c"].to_pylist() == [Decimal("1.10"), Decimal("12345678901234567.80"), Decimal("2.20"), None]
    assert found["id"].to_pylist() == ["1", "2", "3", "4"]


def test_all_columns_are_copied_in_their_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x,c,d\n1,1,1.10,1.10\n")

    found = output(tmp_path, passthrough=("*",), types={"c": "float64"})

    assert found.select(["id", "x", "c", "d"]).to_pylist() == [{"id": "1", "x": "1", "c": 1.1, "d": "1.10"}]


def test_a_partition_column_of_any_format_may_have_a_type(tmp_path: Path) -> None:
    for day in ("2026-01-31", "today"):
        (tmp_path / f"day={day}").mkdir()
        write(tmp_path / f"day={day}" / "a.parquet", pa.table({"id": [1], "x": [1.0]}))

    found = output(tmp_path, pattern="**", partitioning="hive", passthrough=("day",), types={"day": "date32"})

    assert found["day"].to_pylist() == [DAY, None]
    assert "column 'day' has 'today' in row 0" in found["error_message"][1].as_py()


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"n": "int64"}, "the inputs have no column 'n' of field 'types'"),
        ({"d": "int64"}, "names 'd', which the job neither copies nor feeds to an input"),
        ({"x": "date32"}, "column 'x' is of type date32.*, which does not fit input 'x' of FP64"),
    ],
)
def test_a_type_that_is_of_no_use_is_refused(tmp_path: Path, types: dict[str, str], message: str) -> None:
    (tmp_path / "a.csv").write_text("id,x,d\n1,1,1\n")

    with pytest.raises(InvalidRequest, match=message):
        planned(tmp_path, types=types)


@pytest.mark.parametrize(
    ("passthrough", "name", "message"),
    [
        (("o",), "o.c", "'o' is copied whole"),
        (("o",), "o", "names 'o', whose type is struct<c: int64> in the inputs"),
        (("l",), "l", r"names 'l', whose type is list<item: int64> in the inputs"),
    ],
)
def test_what_is_no_single_text_or_number_has_no_type(
    tmp_path: Path, passthrough: tuple[str, ...], name: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "x": 1, "o": {"c": 1}, "l": [1]}\n')

    with pytest.raises(InvalidRequest, match=message):
        planned(tmp_path, passthrough=passthrough, types={name: "int64"})


def test_files_that_say_their_types_keep_them(tmp_path: Path) -> None:
    """Where the type is the same, the job may say it."""
    write(tmp_path / "a.parquet", pa.table({"id": [1], "x": [1.0], "c": [1]}))
    assert output(tmp_path, passthrough=("c",), types={"c": "int64"})["c"].to_pylist() == [1]

    with pytest.raises(InvalidRequest, match="names 'c', whose type is int64 in the inputs; types are for columns of"):
        planned(tmp_path, passthrough=("c",), types={"c": "string"})


@pytest.mark.parametrize("name", ["int", "INT64", "time64[us]", "decimal128(39, 1)", "decimal128(2, 3)", "", "list<x>"])
def test_an_unknown_type_is_refused_with_all_that_there_are(name: str) -> None:
    body = (
        b'{"model": "m", "inputs": ["s3://a/b"], "output": {"url": "s3://a/c"}, "types": {"col": "%s"}}' % name.encode()
    )

    with pytest.raises(
        InvalidRequest, match=r"field 'types\.col' is '.*', which is no type of a column; there are str"
    ):
        decode_spec(body)


def test_jobs_without_types_read_as_before() -> None:
    """A process of the former release reads them."""
    assert "types" not in str(job_of(types={}).types)
