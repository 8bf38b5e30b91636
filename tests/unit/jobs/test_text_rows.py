"""CSV and JSON lines from planning to a worker's rows: no value changes, no field is lost, wherever in a file it is."""

import csv
import io
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns import text_types
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import JobPlan, UnplannedJob
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import ModelSpec
from qinfer.storage.store import Stat
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.row_files import TextRows, WantedColumns
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import FileFormat, ReadLimits, read_footer
from qinfer.tabular.spec import Csv, Range
from qinfer.tabular.text_rows import read_lines
from qinfer.tabular.text_streams import TextFormat, TextStream
from qinfer.tabular.texts import read
from tests.support.jobs.bulk_data import ANY_FILE, job_of, model_of, tensor

PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)
BLOCK = 128
NUMBER, WHOLE, TEXT = (model_of([tensor("x", datatype, 1)]) for datatype in ("FP64", "INT64", "BYTES"))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.tabular.text_streams.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("qinfer.tabular.text_rows.BLOCK_BYTES", BLOCK)


def planned(folder: Path, model: ModelSpec, **fields: Any) -> JobPlan:
    """Takes and plans a job of all files of a folder."""
    spec = JobSpec(model="m", inputs=(f"file://{folder}/*",), output=Output(f"file://{folder}-out"), **fields)
    examine(spec, model, ANY_FILE)
    return make_plan(UnplannedJob("job-1", spec, model, "hash", ANY_FILE), PACE)


def rows(folder: Path, model: ModelSpec, **fields: Any) -> list[dict[str, Any]]:
    """Returns what workers read of all files of a folder."""
    plan = planned(folder, model, **fields)
    schema = decode_schema(plan.schema)
    found: list[dict[str, Any]] = []
    for shard in plan.shards:
        with closing(ShardReader(shard, schema.names, schema)) as reader:
            while (batch := reader.read(1000)) is not None:
                found += batch.record.to_pylist()
    assert len(found) == plan.rows
    return found


class Watched(io.FileIO):
    """A file that tells whether it was moved after a reader's own thread had read of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._opened_by = threading.get_ident()
        self._has_reader = False
        self.was_moved = False

    def read(self, size: int | None = -1, /) -> bytes:
        self._has_reader |= threading.get_ident() != self._opened_by
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self.was_moved |= self._has_reader
        return super().seek(offset, whence)


class OneFile:
    """A store of one file."""

    def __init__(self, file: Watched) -> None:
        self._file = file

    def open_known(self, _: Stat, *, sequential: bool = False) -> Watched:
        del sequential
        return self._file


LINES = {"csv": ["n,t", *(f"{i},t{i}" for i in range(200))], "jsonl": [f'{{"n": {i}}}' for i in range(200)]}


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_a_reader_that_reads_ahead_has_a_file_for_itself_in_planning(
    tmp_path: Path, format_: FileFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what it read would be missing, or there twice, to the next reader."""
    path = tmp_path / "x"
    path.write_text("\n".join(LINES[format_]))
    file = Watched(path)
    monkeypatch.setattr("qinfer.tabular.source.store_for", lambda _: OneFile(file))

    assert read_footer(Stat("file:///x", 1, ""), format_).rows == 200

    assert not file.was_moved


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
def test_a_reader_that_reads_ahead_has_a_file_for_itself_in_a_worker(tmp_path: Path, format_: TextFormat) -> None:
    """As in planning."""
    path = tmp_path / "x"
    path.write_text("\n".join(LINES[format_]))
    file = Watched(path)

    wanted = WantedColumns.from_paths(pa.schema([("n", pa.int64())]), ["n"])
    opened = TextRows(TextStream.of_file(file), format_, wanted, "file:///x", ReadLimits.from_read_bytes(2**26), Csv())
    found = pa.Table.from_batches([rows.record for rows in opened.batches(Range("file:///x", "", -1, 120, 30, 120))])
    opened.close()

    assert found["n"].to_pylist() == list(range(120, 150))
    assert not file.was_moved


@pytest.mark.parametrize(
    "keys", [["12345678901234567890", "12345678901234567891"], ["7", "007"], ["2020-01-01", ""], ["1"] * BLOCK + ["a"]]
)
def test_keys_of_csv_stay_what_they_are(tmp_path: Path, keys: list[str]) -> None:
    """Also numbers that are the same once they are rounded, and zeros in front."""
    (tmp_path / "a.csv").write_text("id,x\n" + "".join(f"{key},1\n" for key in keys))

    assert [row["id"] for row in rows(tmp_path, WHOLE, key="id")] == keys


def decoded(folder: Path, model: ModelSpec, **fields: Any) -> tuple[list[Any], list[int]]:
    """Returns what the model is given as `x` of all files of a folder, and which rows are errors."""
    plan = planned(folder, model, **fields)
    schema = decode_schema(plan.schema)
    spec = job_of(**fields)
    inputs = InputColumns(spec, model, schema)
    with closing(ShardReader(plan.shards[0], schema.names, schema, spec)) as reader:
        batch = reader.read(1000)
        assert batch is not None
        found = inputs.decode(batch.record)
    bad = [] if found.errors.bad is None else np.flatnonzero(found.errors.bad).tolist()
    return [value for piece in found.pieces for value in piece.inputs["x"].ravel().tolist()], bad


@pytest.mark.parametrize("fields", [{"key": "x"}, {"passthrough": ("x",)}, {"passthrough": ("*",)}])
def test_an_input_of_numbers_that_is_copied_too_stays_as_it_is_written(tmp_path: Path, fields: dict[str, Any]) -> None:
    """The model gets the numbers; a row without one is an error."""
    texts = ["1.10", "1e3", " 7", "007", "NA", "", "one", "1225717802.1679841607"]
    (tmp_path / "a.csv").write_text("x,t\n" + "".join(f'"{text}",a\n' for text in ["2", *texts[:3]]))
    assert decoded(tmp_path, NUMBER, **fields) == ([2.0, 1.1, 1000.0, 7.0], [])
    assert [row["x"] for row in rows(tmp_path, NUMBER, **fields)] == ["2", *texts[:3]]
    (tmp_path / "a.csv").write_text("x,t\n" + "2,a\n" * BLOCK + "".join(f'"{text}",a\n' for text in texts))
    assert [row["x"] for row in rows(tmp_path, NUMBER, **fields)][BLOCK:] == texts
    values, bad = decoded(tmp_path, NUMBER, **fields)
    assert values[BLOCK:] == [1.1, 1000.0, 7.0, 7.0, 1225717802.1679841607]
    assert bad == [BLOCK + 4, BLOCK + 5, BLOCK + 6]


def test_decimal_commas_of_an_input_that_is_copied_too_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x;t\n1,50;a\n2;b\n")

    fields = {"passthrough": ("*",), "csv": Csv(delimiter=";", decimal_point=",")}

    assert decoded(tmp_path, NUMBER, **fields) == ([1.5, 2.0], [])


def test_keys_of_json_lines_stay_as_they_are_written(tmp_path: Path) -> None:
    """Wherever they are in the file, and in quotes."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "x": 1}\n' * BLOCK + '{"id": 12345678901234567890, "x": 1}\n{"id": 1.50, "x": 1}\n')
    assert [row["id"] for row in rows(tmp_path, WHOLE, key="id")][BLOCK - 1 :] == ["1", "12345678901234567890", "1.50"]
    path.write_text('{"id": "12345678901234567890", "x": 1}\n{"id": "007", "x": 1}\n')
    assert [row["id"] for row in rows(tmp_path, WHOLE, key="id")] == ["12345678901234567890", "007"]


@pytest.mark.parametrize("texts", [["007", "1e5"], ["2020-01-01"], ["true"], ["1"] * BLOCK + ["abc"], [""]])
def test_what_looks_like_another_type_is_text_for_bytes(tmp_path: Path, texts: list[str]) -> None:
    """In any file, in any order."""
    for number, all_ in enumerate((texts, ["abc"], ["7"])):
        (tmp_path / f"{number}.csv").write_text("id,x\n" + "".join(f"1,{text}\n" for text in all_))

    assert [row["x"] for row in rows(tmp_path, TEXT)] == [*texts, "abc", "7"]


def test_bytes_that_are_no_text_are_kept(tmp_path: Path) -> None:
    """Where the first block tells."""
    (tmp_path / "a.csv").write_bytes(b"id,x\n1,\xff\xfe\n")

    assert rows(tmp_path, TEXT) == [{"id": "1", "x": b"\xff\xfe"}]


def test_an_input_of_floats_may_begin_with_whole_numbers_or_nothing(tmp_path: Path) -> None:
    """And have fractions after the first block."""
    (tmp_path / "a.csv").write_text("id,x\n" + "1,2\n" * BLOCK + "1,2.5\n")
    (tmp_path / "b.csv").write_text("id,x\n" + "1,\n" * BLOCK + "1,2.5\n")

    found = [row["x"] for row in rows(tmp_path, NUMBER)]

    assert found == [2.0] * BLOCK + [2.5] + [None] * BLOCK + [2.5]


@pytest.mark.parametrize(("datatype", "text", "value"), [("INT32", "7", 7), ("UINT64", str(2**64 - 1), 2**64 - 1)])
def test_an_input_of_whole_numbers_may_begin_with_nothing(tmp_path: Path, datatype: str, text: str, value: int) -> None:
    """Such rows are errors, each for itself."""
    (tmp_path / "a.csv").write_text("id,x\n" + "1,\n" * BLOCK + f"1,{text}\n")

    assert rows(tmp_path, model_of([tensor("x", datatype, 1)]))[-1]["x"] == value


def test_a_text_for_a_number_is_still_refused_with_its_column(tmp_path: Path) -> None:
    """Before the job is taken."""
    (tmp_path / "a.csv").write_text("id,x\n1,one\n")
    with pytest.raises(InvalidRequest, match=r"column 'x' is of type string, which does not fit input 'x' of FP64"):
        planned(tmp_path, NUMBER)


def test_a_copied_column_may_be_empty_at_first(tmp_path: Path) -> None:
    """It is text, as every copied column of CSV."""
    (tmp_path / "a.csv").write_text("x,note,n\n" + "1,,\n" * BLOCK + "1,hello,\n")
    assert rows(tmp_path, WHOLE, passthrough=("note",))[-1]["note"] == "hello"
    (tmp_path / "b.csv").write_text("x,note,n\n1,you,5\n")
    found = rows(tmp_path, WHOLE, passthrough=("note", "n"))
    assert [found[0]["n"], found[-1]["n"], found[-1]["note"]] == ["", "5", "you"]


@pytest.mark.parametrize("value", ["007", "-01", "0x1F", "12345678901234567890", "00.5"])
def test_copied_numbers_that_would_change_are_text(tmp_path: Path, value: str) -> None:
    """Whatever else the column has."""
    (tmp_path / "a.csv").write_text(f"x,n\n1,2\n2,{value}\n")

    assert [row["n"] for row in rows(tmp_path, WHOLE, passthrough=("n",))] == ["2", value]


COPIED = ["1225717802.1679841607", "1.10", "+49 30 123", "1e3", "2020-01-01", "true", "NA", "", " 7 ", "0", "\u0661"]


@pytest.mark.parametrize("repeats", [1, BLOCK])
@pytest.mark.parametrize("value", COPIED)
def test_a_column_of_csv_that_is_only_copied_is_not_read(tmp_path: Path, value: str, repeats: int) -> None:
    (tmp_path / "a.csv").write_text(f'x,n\n1,"{value}"\n' + "2,3\n" * repeats)

    assert [row["n"] for row in rows(tmp_path, WHOLE, passthrough=("n",))] == [value, *["3"] * repeats]
    assert [row["n"] for row in rows(tmp_path, WHOLE, key="n")] == [value, *["3"] * repeats]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9), min_size=1))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_copying_a_column_of_csv_is_the_identity(tmp_path: Path, values: list[str]) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["x", "n"], *([1, value] for value in values)])

    assert [row["n"] for row in rows(tmp_path, WHOLE, passthrough=("*",))] == values


def test_copied_columns_that_csv_files_differ_in_are_text(tmp_path: Path) -> None:
    """As one file alone would have it."""
    (tmp_path / "a.csv").write_text("x,n\n1,5\n")
    (tmp_path / "b.csv").write_text("x,n\n2,five\n")
    (tmp_path / "c.csv").write_text("x,n\n2,2020-01-01\n")

    assert [row["n"] for row in rows(tmp_path, WHOLE, passthrough=("n",))] == ["5", "five", "2020-01-01"]


@pytest.mark.parametrize("lines", [1, BLOCK])
def test_fields_of_json_lines_that_come_late_are_there(tmp_path: Path, lines: int) -> None:
    """At the top and within others, copied, or an optional input."""
    late = '{"x": 2.5, "o": 3, "in": {"a": 1, "b": [{"c": null}]}, "w": "new"}\n{"in": {"b": [{"c": true}]}}\n'
    (tmp_path / "a.jsonl").write_text('{"x": 1, "in": {"a": null}}\n' * lines + late)
    model = model_of([tensor("x", "FP64", 1), tensor("o", "INT64", 1, optional=True)])

    found = rows(tmp_path, model, passthrough=("*",))

    assert found[0] == {"x": 1.0, "in": {"a": None, "b": None}, "o": None, "w": None}
    assert found[lines:] == [
        {"x": 2.5, "in": {"a": 1, "b": [{"c": None}]}, "o": 3, "w": "new"},
        {"x": None, "in": {"a": None, "b": [{"c": True}]}, "o": None, "w": None},
    ]


@pytest.mark.parametrize("lines", [1, BLOCK])
def test_a_text_of_json_lines_is_a_text(tmp_path: Path, lines: int) -> None:
    """Also where it looks like a date, and later ones do not."""
    (tmp_path / "a.jsonl").write_text('{"x": "2020-01-01", "l": ["2020-01-01"]}\n' * lines + '{"x": "", "l": ["-"]}\n')

    found = rows(tmp_path, TEXT)

    assert found == [{"x": "2020-01-01", "l": ["2020-01-01"]}] * lines + [{"x": "", "l": ["-"]}]


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ('{"x": 1, "o": 1}', '{"x": 1, "o": {}}', "field 'o' is a number at first and an object in row 3"),
        ('{"x": 1, "n": {"m": 1}}', '{"x": 1, "n": {"m": "1"}}', "field 'n.m' is a number at first and a text in row"),
        ('{"x": 1, "l": [1]}', '{"x": 1, "l": [[1]]}', "field 'l' is a number at first and a list in row 3"),
        ('{"x": 1, "b": true}', '{"x": 1, "b": 1}', "field 'b' is true or false at first and a number in row 3"),
        ('{"x": 1}', '{"x": "1"}', "field 'x' is a number at first and a text in row 3"),
    ],
)
@pytest.mark.parametrize("passthrough", [(), ("*",)])
def test_a_field_of_several_kinds_is_the_error_of_its_file(
    tmp_path: Path, first: str, other: str, said: str, passthrough: tuple[str, ...]
) -> None:
    """Whether the job reads the field or not."""
    (tmp_path / "a.jsonl").write_text(f"\n{first}\n\n{first}\n{other}\n")

    with pytest.raises(InvalidRequest) as caught:
        planned(tmp_path, WHOLE, passthrough=passthrough)

    assert f"/a.jsonl' can't be read as jsonl: {said}" in caught.value.message


@pytest.mark.parametrize("types", [{}, {"n": "string"}])
def test_a_field_of_several_kinds_is_an_error_in_later_blocks(tmp_path: Path, types: dict[str, str]) -> None:
    """Even at the beginning of a block, and if the job declares a type."""
    line = f'{{"x": 1, "n": 1{" " * (BLOCK // 2 - 17)}}}\n'
    (tmp_path / "a.jsonl").write_text(line * 4 + '{"x": 1, "n": "1"}\n' + '{"x": 1}\n' * BLOCK)

    with pytest.raises(InvalidRequest, match=r"can't be read as jsonl: from row 5 on, a field has values of diff.* n "):
        planned(tmp_path, WHOLE, passthrough=("n",), types=types)


def test_fields_that_only_some_files_have_are_null_or_merged_where_all_are_copied(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "n": 1, "only": "a", "in": {"a": 1}, "none": null}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 2, "n": 2, "in": {"b": 2}, "none": {"a": 1}}\n')
    (tmp_path / "c.jsonl").write_text('{"x": 3, "n": 3, "new": true}\n')

    found = rows(tmp_path, WHOLE, passthrough=("*",))

    empty = {"only": None, "in": None, "none": None, "new": None}
    assert found == [
        {**empty, "x": 1, "n": 1, "only": "a", "in": {"a": 1, "b": None}},
        {**empty, "x": 2, "n": 2, "in": {"a": None, "b": 2}, "none": {"a": 1}},
        {**empty, "x": 3, "n": 3, "new": True},
    ]


@pytest.mark.parametrize("passthrough", ["n", "*"])
def test_a_field_whose_kind_differs_between_files_is_refused_where_it_is_copied(
    tmp_path: Path, passthrough: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "n": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 2, "n": "one"}\n')

    with pytest.raises(InvalidRequest, match=r"column 'n' is string in '.*/b.jsonl' and int64 in '.*/a.jsonl'"):
        planned(tmp_path, WHOLE, passthrough=(passthrough,))
    assert planned(tmp_path, WHOLE).rows == 2
    assert planned(tmp_path, WHOLE, passthrough=("*",), exclude=("n",)).rows == 2


@pytest.mark.parametrize("line", ["[1]", "5", '{"x": 1', '"text"', '{"x": 1e999}'])
def test_what_is_no_object_is_refused_as_before(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "n": 1}\n{"x": 1, "n": 2}\n' + line + "\n")

    with pytest.raises(InvalidRequest, match=r"/a.jsonl' can't be read as jsonl; is it damaged or cut off"):
        planned(tmp_path, WHOLE)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_json_lines_are_cut_at_their_ends(tmp_path: Path, end: str) -> None:
    """Of any kind, between blank ones, with characters of several bytes, and without one at the end of the file."""
    values = [f"é{number}" for number in range(3 * BLOCK)]
    (tmp_path / "a.jsonl").write_bytes(
        (end * BLOCK + end.join(f'{{"x": "{v}"}}{end}' for v in values)).rstrip().encode()
    )

    assert [row["x"] for row in rows(tmp_path, TEXT)] == values


def test_a_csv_row_may_go_beyond_the_first_block(tmp_path: Path) -> None:
    """With line ends in quotes, and with characters of several bytes where the block ends."""
    text = "é\n" * (BLOCK // 4) + "é"
    (tmp_path / "a.csv").write_text("id,x\n" + f'1,"{text}"\n' * 9)

    assert rows(tmp_path, TEXT) == [{"id": "1", "x": text}] * 9


def test_a_line_longer_than_a_block_is_named(tmp_path: Path) -> None:
    """A worker could not read it."""
    (tmp_path / "a.jsonl").write_text(f'{{"x": "{"a" * 3 * BLOCK}"}}\n')

    with pytest.raises(InvalidRequest, match=f"a line is longer than {BLOCK} bytes"):
        planned(tmp_path, TEXT)


def test_types_follow_from_what_a_column_is_for() -> None:
    """Of inputs, the key, and of neither where uses differ."""
    inputs = [tensor(name, kind, 1) for name, kind in (("a", "BYTES"), ("b", "FP16"), ("c", "BOOL"), ("d", "INT8"))]
    model = model_of([*inputs, tensor("e", "FP32", 2)])

    types = text_types(job_of({"e": ("d", "k"), "b": "f"}, key="id"), model)

    assert types.wanted == {
        "a": pa.string(),
        "f": pa.float64(),
        "c": pa.bool_(),
        "d": None,
        "k": pa.float64(),
    }
    assert types.is_copied("id")


def test_rows_of_json_lines_without_a_column_are_counted() -> None:
    """All columns that a job reads may be those of its folders' names."""
    table = read(read_lines, b'{"a": 1}\n{"a": 2}\n', pa.schema([]))

    assert [batch.num_rows for batch in table.combine_chunks().to_batches()] == [2]
