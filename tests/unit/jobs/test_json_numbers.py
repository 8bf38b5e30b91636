"""Numbers of JSON lines that are copied stay as they are written, in any place, from planning to the output."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.jobs.job import JobSpec, Output, OutputFormat
from qinfer.jobs.outputs import OutputColumns, ScoredRows
from qinfer.jobs.parts import PartMetadata, PartWriter
from qinfer.jobs.plan import UnplannedJob
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.batches import RowErrors
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.texts import quoted
from tests.support.jobs.bulk_data import ANY_FILE, model_of, tensor

MODEL = model_of([tensor("x", "FP64", -1)], [tensor("y", "INT64", 1)])
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)
AS_WRITTEN = ["1.10", "1e3", "12345678901234567890", "-0", "1E-7", "1225717802.1679841607", "0.00001", f"1{'0' * 17}.5"]
ANY_NUMBER = r"\A-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?\Z"
PLAIN = ["1.5", "-7", "0", "1234567890123456789", "0.1", "1.0"]


def scored(folder: Path, output_format: OutputFormat, **fields: Any) -> tuple[Path, pa.Schema, list[Any]]:
    """Copies all files of a folder; returns the part, the output's columns, and what the model was given."""
    spec = JobSpec(
        model="m", inputs=(f"file://{folder}/*",), output=Output(f"file://{folder}-out", output_format), **fields
    )
    examine(spec, MODEL, ANY_FILE)
    plan = make_plan(UnplannedJob("job-1", spec, MODEL, "hash", ANY_FILE), PACE)
    (shard,) = plan.shards
    schema = decode_schema(plan.schema)
    inputs = InputColumns(spec, MODEL, schema)
    columns = OutputColumns(spec, MODEL, schema, [part.url for part in shard.ranges])
    path, given_ = folder.with_name(f"{folder.name}-part"), list[Any]()
    names = tuple(dict.fromkeys((*inputs.columns, *columns.copied)))
    path.unlink(missing_ok=True)
    with (
        closing(ShardReader(shard, names, schema, spec)) as reader,
        PartWriter(path, columns.schema, spec.output, PartMetadata("job", 0, plan.rows, ("e",), "hash")) as writer,
    ):
        while (batch := reader.read(7)) is not None:
            found = inputs.decode(batch.record, RowErrors(batch.record.num_rows))
            given_ += [row for piece in found.pieces for row in piece.inputs["x"].tolist()]
            y = np.zeros((batch.record.num_rows, 1), np.int64)
            writer.write(columns.encode(batch, [ScoredRows(None, {"y": y})], RowErrors(batch.record.num_rows)))
    return path, columns.schema, given_


def lines(folder: Path, *names: str, **fields: Any) -> list[str]:
    """Returns some fields of an output of JSON lines, as they are written."""
    path, _, _ = scored(folder, "jsonl", **fields)
    rows = [json.loads(line, parse_float=Written, parse_int=Written) for line in path.read_text().splitlines()]
    return [json.dumps({name: row[name] for name in names}, default=str) for row in rows]


class Written(str):
    __slots__ = ()


def copied(folder: Path, *texts: str) -> None:
    """Checks that lines are copied as they are, whatever pyarrow makes of their numbers."""
    (folder / "a.jsonl").write_text("".join(f'{{"x": [1], "v": {text}}}\n' for text in texts))
    found = lines(folder, "v", passthrough=("*",))
    wanted = [json.loads(f'{{"v": {text}}}', parse_float=Written, parse_int=Written) for text in texts]
    assert found == [json.dumps(row) for row in wanted]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.tabular.text_streams.BLOCK_BYTES", 512)
    monkeypatch.setattr("qinfer.tabular.text_rows.BLOCK_BYTES", 512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize("form", ["{}", "[{}, 7]", "[[{}], []]"])
@pytest.mark.parametrize("number", AS_WRITTEN + PLAIN)
def test_a_number_is_copied_as_it_is_written(folder: Path, number: str, form: str) -> None:
    copied(folder, form.replace("{}", number), form.replace("{}", "3"), form.replace("{}", "2.5"), "null")


@pytest.mark.parametrize("number", AS_WRITTEN + PLAIN)
def test_a_number_within_objects_is_copied_as_it_is_written(folder: Path, number: str) -> None:
    copied(folder, f'{{"a": {number}, "b": [{{"c": {number}, "d": "1.10"}}], "e": 1}}', '{"a": 1, "b": null, "e": 2}')


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.from_regex(ANY_NUMBER), min_size=1, max_size=9))
def test_copying_numbers_is_the_identity(folder: Path, numbers: list[str]) -> None:
    copied(folder, *numbers)


@pytest.mark.parametrize("whole", ["7", "999999999999999", "1000000000000000", "9007199254740993"])
def test_whole_numbers_among_others_are_copied_as_they_are_written(folder: Path, whole: str) -> None:
    """Wherever blocks are cut."""
    copied(folder, *[whole] * 30, *["2.5"] * 30)


def test_plain_numbers_stay_numbers(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"x": [1], "i": 7, "f": 1.5, "b": true, "n": {"m": [1]}}\n' * 3)

    _, schema, _ = scored(folder, "parquet", passthrough=("*",))

    assert schema.field("i").type == pa.int64()
    assert schema.field("f").type == pa.float64()
    assert schema.field("n").type == pa.struct([("m", pa.list_(pa.int64()))])


def test_an_input_that_is_copied_too_gets_the_numbers(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"x": [1.10, 2]}\n{"x": [1e3, 3.50]}\n')

    path, schema, given_ = scored(folder, "csv", passthrough=("x",))

    assert given_ == [[1.1, 2.0], [1000.0, 3.5]]
    assert schema.field("x").type == pa.list_(pa.string())
    assert '"[1.10,2]"' in path.read_text()
    assert '"[1e3,3.50]"' in path.read_text()


@pytest.mark.parametrize("first", ["1", "1.5", "1.10", "null"])
@pytest.mark.parametrize("second", ["1", "1.5", "1.10"])
@pytest.mark.parametrize("passthrough", [("*",), ("v",), ("v.a",)])
def test_files_may_differ_in_how_numbers_are_written(
    folder: Path, first: str, second: str, passthrough: tuple[str, ...]
) -> None:
    for number, text in enumerate((first, second)):
        (folder / f"{number}.jsonl").write_text(f'{{"x": [1], "v": {{"a": {text}}}}}\n')
    if passthrough == ("v",) and {first, second} & {"1", "null"} and first != second:
        pytest.skip("structures of named columns have to be the same")

    name = "v.a" if passthrough == ("v.a",) else "v"
    found = lines(folder, name, passthrough=passthrough)

    texts = [text if text == "null" else f'"{text}"' for text in (first, second)]
    assert found == [f'{{"{name}": {text}}}' if name == "v.a" else f'{{"v": {{"a": {text}}}}}' for text in texts]


def test_numbers_are_quoted_outside_strings_only() -> None:
    line = rb'{"a 1": [-1.5e+3,2, true, false,null], "b\\": "\"3", "c":{"d":0}}' + b"\n"

    wanted = rb'{"a 1": ["-1.5e+3","2", true, false,null], "b\\": "\"3", "c":{"d":"0"}}' + b"\n"

    assert quoted(line) == wanted
