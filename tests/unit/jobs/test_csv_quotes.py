"""Quotes in CSV: escaped ones stand for themselves, and a row whose quotes do not balance is an error, not a text."""

import csv
import gzip
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import UnplannedJob
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.spec import Csv
from qinfer.tabular.text_streams import guessed_escape, unescaped
from tests.support.jobs.bulk_data import ANY_FILE, model_of, tensor

MODEL = model_of([tensor("x", "INT64", 1)])
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)
SPARK = "part-00000-0aa8ee81-6e1c-4e53-8b0a-59ffbd5b4f0c-c000.csv"
BALANCE = "the quotes of a value do not balance"


def rows(folder: Path, **fields: Any) -> tuple[list[Any], dict[int, str]]:
    """Returns the texts that workers read of all files of a folder, and the errors of rows, by their numbers."""
    output = Output(f"file://{folder}-out", rows_per_part=40)
    spec = JobSpec(model="m", inputs=(f"file://{folder}/*",), output=output, passthrough=("t",), **fields)
    spec = examine(spec, MODEL, ANY_FILE).spec
    plan = make_plan(UnplannedJob("job-1", spec, MODEL, "hash", ANY_FILE), PACE)
    schema = decode_schema(plan.schema)
    texts: list[Any] = []
    faults: dict[int, str] = {}
    for shard in plan.shards:
        with closing(ShardReader(shard, schema.names, schema, plan.spec)) as reader:
            while (batch := reader.read(7)) is not None:
                for fault in batch.faults:
                    numbers = range(len(texts) + fault.first, len(texts) + fault.first + fault.rows)
                    faults |= dict.fromkeys(numbers, fault.message)
                texts += batch.record.column("t").to_pylist()
    assert len(texts) == plan.rows
    return texts, faults


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("text_rows", "text_streams", "planning"):
        name = f"qinfer.jobs.{module}" if module == "planning" else f"qinfer.tabular.{module}"
        monkeypatch.setattr(f"{name}.BLOCK_BYTES", 256)
    monkeypatch.setattr("qinfer.tabular.text_rows.CUT_BYTES", 700)


ESCAPED = r'1,"she said \"hi\""'
TEXT = 'she said "hi"'


@pytest.mark.parametrize("extension", ["", ".gz"])
@pytest.mark.parametrize("repeats", [1, 200])
@pytest.mark.parametrize("name", ["a.csv", SPARK])
def test_an_escape_that_the_first_file_shows_is_taken(tmp_path: Path, name: str, repeats: int, extension: str) -> None:
    data = "".join(f"{line}\n" for line in ["x,t", *[ESCAPED, '2,"a\n, \\\\ b"', r"3,C:\temp"] * repeats]).encode()
    (tmp_path / f"{name}{extension}").write_bytes(gzip.compress(data) if extension else data)

    texts, faults = rows(tmp_path)

    assert texts == [TEXT, "a\n, \\ b", r"C:\temp"] * repeats
    assert not faults


@pytest.mark.parametrize("form", [Csv(escape="none"), Csv(escape="^")])
def test_rows_whose_quotes_do_not_balance_are_errors_of_their_own(tmp_path: Path, form: Csv) -> None:
    lines = ["x,t", *['0,"a ""b"""', ESCAPED, ESCAPED, '2,5" wide', '3,"a"b', '4,"fine"'] * 50]
    (tmp_path / "a.csv").write_text("\n".join(lines))

    texts, faults = rows(tmp_path, csv=form)

    assert texts == ['a "b"', None, None, '5" wide', None, "fine"] * 50
    assert sorted(faults) == [6 * i + n for i in range(50) for n in (1, 2, 4)]
    assert all(BALANCE in message for message in faults.values())


def test_a_quote_that_does_not_end_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,t\n1,fine\n2,"open\n3,fine\n')

    texts, faults = rows(tmp_path)

    assert texts == ["fine", None, "fine"]
    assert list(faults) == [1]


def test_two_quotes_and_a_backslash_before_the_last_are_no_escape(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,t\n1,"C:\\"\n2,"a ""b"""\n3,"\\\\server"\n')

    assert rows(tmp_path) == (["C:\\", 'a "b"', "\\\\server"], {})


def test_a_header_whose_quotes_do_not_balance_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x,"t"a\n1,b\n')

    with pytest.raises(InvalidRequest, match=f"its first row can't be read: {BALANCE}"):
        rows(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "escape"),
    [
        ("a.csv", r'1,"a\"b"', "\\"),
        ("a.csv", r'1,"a\\b"', ""),
        (SPARK, r'1,"a\\b"', "\\"),
        (SPARK, '1,"a ""b"""', ""),
        (SPARK, '1,"C:\\"', ""),
        ("a.csv", '1,"a"b', ""),
    ],
)
def test_an_escape_is_guessed_where_it_is_sure(name: str, text: str, escape: str) -> None:
    assert guessed_escape(f"file:///in/{name}", f"x,t\n{text}\n".encode(), Csv(), is_whole=True) == escape


@given(st.lists(st.text('ab"\\,\n', max_size=8), min_size=1))
def test_what_spark_writes_is_what_it_was(values: list[str]) -> None:
    """Quotes and backslashes are escaped within quotes."""

    def written(value: str) -> str:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if set(value) & set('",\n') else value

    text = "".join(f"1,{written(value)}\n" for value in values)

    plain = unescaped(text.encode(), Csv(escape="\\")).decode()

    assert [row[1] for row in csv.reader(io.StringIO(plain, newline=""), strict=True)] == values
