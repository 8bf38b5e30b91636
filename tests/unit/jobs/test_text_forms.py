"""CSV and JSON lines in any form: compressed, of other encodings and punctuation, cut at any place, read exactly."""

import bz2
import gzip
import io
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns import input_form
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import JobPlan, Shard, UnplannedJob, decode_plan, encode_plan
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader, SourceChanged
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import ModelSpec
from qinfer.storage.open import store_for
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import SourceBroken
from qinfer.tabular.spec import Csv
from qinfer.tabular.text_streams import row_blocks
from tests.support.jobs.bulk_data import ANY_FILE, model_of, tensor

ROWS = 300
SHARD_ROWS = 40
PACE = ShardPace(rows_per_s=0.0, shard_s=30.0, default_rows=100_000, max_rows=1_000_000)
NUMBER, TEXT = (model_of([tensor("x", datatype, 1)]) for datatype in ("FP64", "BYTES"))
COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.tabular.text_streams.BLOCK_BYTES", 256)
    monkeypatch.setattr("qinfer.tabular.text_rows.BLOCK_BYTES", 256)
    monkeypatch.setattr("qinfer.tabular.text_rows.CUT_BYTES", 700)


def planned(folder: Path, model: ModelSpec, *, per_part: int = SHARD_ROWS, **fields: Any) -> JobPlan:
    """Takes and plans a job of all files of a folder; the plan has been written and read."""
    output = Output(f"file://{folder}-out", rows_per_part=per_part)
    spec = JobSpec(model="m", inputs=(f"file://{folder}/*",), output=output, **fields)
    examine(spec, model, ANY_FILE)
    return decode_plan(encode_plan(make_plan(UnplannedJob("job-1", spec, model, "hash", ANY_FILE), PACE)))


def rows_of(plan: JobPlan, shard: Shard) -> list[dict[str, Any]]:
    """Returns what a worker reads of a shard."""
    schema, found = decode_schema(plan.schema), []
    with closing(ShardReader(shard, schema.names, schema, plan.spec)) as reader:
        while (batch := reader.read(1000)) is not None:
            found += batch.record.to_pylist()
            assert sum(segment.rows for segment in batch.segments) == batch.record.num_rows
    return found


def rows(folder: Path, model: ModelSpec, **fields: Any) -> list[dict[str, Any]]:
    """Returns what workers read of all files of a folder, several shards of each."""
    plan = planned(folder, model, **fields)
    found = [rows_of(plan, shard) for shard in plan.shards]
    assert [len(own) for own in found] == [shard.rows for shard in plan.shards]
    return [row for own in found for row in own]


def csv_of(separator: str = ",", point: str = ".", header: bool = True) -> str:  # noqa: FBT001, FBT002
    """Returns rows with line ends, separators and quotes within values."""
    lines = [f"x{separator}t"] if header else []
    lines += [f'{i}{point}5{separator}"é {i}{separator} ""a""\n"' for i in range(ROWS)]
    return "".join(f"{line}\n" for line in lines)


def text_of(number: int, separator: str = ",") -> str:
    return f'é {number}{separator} "a"\n'


EXPECTED = [{"x": i + 0.5, "t": text_of(i)} for i in range(ROWS)]


@pytest.mark.parametrize("extension", COMPRESS)
def test_each_shard_has_its_rows_of_csv(tmp_path: Path, extension: str) -> None:
    (tmp_path / f"a.csv{extension}").write_bytes(COMPRESS[extension](csv_of().encode()))

    assert rows(tmp_path, NUMBER) == EXPECTED


@pytest.mark.parametrize("extension", COMPRESS)
def test_each_shard_has_its_rows_of_json_lines(tmp_path: Path, extension: str) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in EXPECTED)
    (tmp_path / f"a.jsonl{extension}").write_bytes(COMPRESS[extension](lines.encode()))

    assert rows(tmp_path, NUMBER) == EXPECTED


@pytest.mark.parametrize("extension", COMPRESS)
def test_no_shard_begins_at_the_beginning_again(tmp_path: Path, extension: str) -> None:
    """Each begins at the last cut point before it: little is read for nothing."""
    (tmp_path / f"a.csv{extension}").write_bytes(COMPRESS[extension](csv_of().encode()))

    ranges = [shard.ranges[0] for shard in planned(tmp_path, NUMBER).shards]

    assert len({one.begin for one in ranges}) == len(ranges) > 4
    assert all(one.first_in_group < 2 * SHARD_ROWS for one in ranges)


def test_a_compressed_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    """Also where only its kept pieces are read."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(csv_of().encode()))
    plan = planned(tmp_path, NUMBER)
    path.write_bytes(gzip.compress(csv_of().encode() + b"1,b\n"))

    with pytest.raises(SourceChanged, match=r"a\.csv\.gz' has changed"):
        rows_of(plan, plan.shards[-1])


def test_pieces_that_are_gone_are_rows_that_are_missing(tmp_path: Path) -> None:
    """Never rows of another place."""
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(csv_of().encode()))
    plan = planned(tmp_path, NUMBER)
    store_for(f"file://{tmp_path}-out").delete_folder(input_form(plan.spec).kept_url)

    with pytest.raises(SourceBroken, match="rows less than it had"):
        rows_of(plan, plan.shards[-1])


def test_a_job_is_planned_twice(tmp_path: Path) -> None:
    """The second finds the pieces of the first, which may have died."""
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(csv_of().encode()))
    first = planned(tmp_path, NUMBER)
    job = UnplannedJob("job-1", first.spec, NUMBER, "hash", ANY_FILE)

    assert make_plan(job, PACE) == first


def test_members_of_a_compressed_file_follow_each_other(tmp_path: Path) -> None:
    """As `cat a.gz b.gz` and parallel compressors make them."""
    text = csv_of().encode()
    for extension, compress in list(COMPRESS.items())[1:]:
        (tmp_path / f"a.csv{extension}").write_bytes(compress(text[:100]) + compress(text[100:]))

    assert rows(tmp_path, NUMBER) == EXPECTED * 3


@pytest.mark.parametrize("extension", list(COMPRESS)[1:])
def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path, extension: str) -> None:
    data = COMPRESS[extension](csv_of().encode())
    (tmp_path / f"a.csv{extension}").write_bytes(data[: len(data) // 2])

    with pytest.raises(InvalidRequest, match=rf"a\.csv{extension}' can't be read as csv; is it damaged or cut off\?"):
        planned(tmp_path, NUMBER)


def test_another_name_has_its_compression_named(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_bytes(gzip.compress(csv_of().encode()))

    assert rows(tmp_path, NUMBER, input_format="csv", input_compression="gzip") == EXPECTED


def test_an_extension_may_say_too_much(tmp_path: Path) -> None:
    """Stores that decompress what they hand out leave it."""
    (tmp_path / "a.csv.gz").write_bytes(csv_of().encode())

    assert rows(tmp_path, NUMBER, input_compression="none") == EXPECTED
    with pytest.raises(InvalidRequest, match="it is not gzip, as its extension or 'input_compression' says"):
        planned(tmp_path, NUMBER)


def test_what_is_decompressed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.tabular.text_streams.MAX_DECODED_BYTES", 3000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(csv_of().encode()))

    with pytest.raises(InvalidRequest, match=r"a\.csv\.gz'.* has more than 3000 bytes when it is decompressed"):
        planned(tmp_path, NUMBER)


@pytest.mark.parametrize("encoding", ["latin-1", "windows-1252", "UTF8", "utf-8-sig"])
@pytest.mark.parametrize("extension", ["", ".gz"])
def test_csv_of_another_form(tmp_path: Path, encoding: str, extension: str) -> None:
    """Semicolons, decimal commas, no header, and an encoding."""
    text = csv_of(";", ",", header=False).encode(encoding)
    (tmp_path / f"a.csv{extension}").write_bytes(COMPRESS[extension](text))
    form = Csv(delimiter=";", decimal_point=",", encoding=encoding, header=False, column_names=("x", "t"))

    assert rows(tmp_path, NUMBER, csv=form) == [{"x": i + 0.5, "t": text_of(i, ";")} for i in range(ROWS)]


def test_columns_without_names_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("".join(f"{i},'a''{i},'\n" for i in range(ROWS)))
    form = Csv(header=False, quote="'")

    found = rows(tmp_path, NUMBER, csv=form, columns={"x": "f0"}, key="f1")

    assert found == [{"f0": i, "f1": f"a'{i},"} for i in range(ROWS)]


def test_quotes_mean_nothing_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\tt\n" + "".join(f'{i}\t"{i}\n' for i in range(ROWS)))

    found = rows(tmp_path, NUMBER, csv=Csv(quote="", delimiter="\t"))

    assert found == [{"x": i, "t": f'"{i}'} for i in range(ROWS)]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_byte_order_mark_is_no_value(tmp_path: Path, name: str) -> None:
    text = csv_of() if name == "a.csv" else "".join(json.dumps(row) + "\n" for row in EXPECTED)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())

    assert rows(tmp_path, NUMBER) == EXPECTED


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", gzip.compress(b"x\n1\n", mtime=0), "it is gzip; set 'input_compression' to gzip"),
        ("a.csv", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "it is an image; leave it out of 'inputs'"),
        ("a.csv", b"PK\x03\x04\x14\0", "it is a zip archive, or a file of Excel"),
        ("a.csv", b"PAR1\x15\x04", "it is Parquet; set 'input_format' to parquet"),
        ("a.csv", "x\n1\n".encode("utf-16"), "it is UTF-16 or UTF-32 text; convert it to UTF-8, as by iconv"),
        ("a.jsonl", b"\0\0\xfe\xff" + '{"x": 1}\n'.encode("utf-32-be"), "it is UTF-16 or UTF-32 text"),
        ("a.csv", "xé,t\n1,2\n".encode("latin-1"), "its first row is no UTF-8 text; set 'csv.encoding'"),
        ("a.json", b' \n [{"x": 1}]', r"it is a JSON array; .* jq -c '\.\[\]'"),
        ("a.csv.gz", gzip.compress(gzip.compress(b"x\n1\n", mtime=0), mtime=0), "it is gzip"),
    ],
)
def test_a_file_of_another_kind_is_named_with_the_remedy(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)

    with pytest.raises(InvalidRequest, match=said) as caught:
        planned(tmp_path, NUMBER)

    assert f"/{name}' can't be read" in caught.value.message
    assert caught.value.message.isprintable()


def test_a_row_of_another_length_is_named(tmp_path: Path) -> None:
    """By its place in the file, wherever blocks are cut."""
    (tmp_path / "a.csv").write_text("x,t\n" + "1,b\n" * 500 + "1\n")

    with pytest.raises(InvalidRequest, match=r"row 501, in line 502 or.* Expected 2 columns, got 1: 1"):
        planned(tmp_path, NUMBER)


def test_a_value_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """By its place in the file, whatever shard has it."""
    (tmp_path / "a.csv").write_text("t,x\n" + "b,1\n" * 500 + "b,one\n")
    plan = planned(tmp_path, NUMBER)

    with pytest.raises(SourceBroken, match=r"a\.csv' can't be read.* value 2 of row 501, in line 502 .*'one'"):
        rows_of(plan, plan.shards[-1])


cell = st.sampled_from(["1", "a", 'x"y', '"q,q"', '"l\nl"', '"a""b"', '""', '" "x', '"a"b"c', "", '"\r\n"', "é"])
end = st.sampled_from(["\n", "\r\n", "\r", "\n\n"])


@given(st.lists(st.tuples(cell, cell, end), min_size=1), st.integers(24, 80))
def test_rows_are_cut_where_the_parser_ends_them(cells: list[tuple[str, str, str]], block_bytes: int) -> None:
    text = "".join(f"{one},{other}{end}" for one, other, end in cells).encode()
    names = ["a", "b"]

    def parsed(data: bytes) -> list[dict[str, Any]]:
        if not data.strip(b"\r\n"):
            return []
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            pyarrow.csv.ReadOptions(column_names=names),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary())),
        )
        return list(table.to_pylist())

    blocks = list(row_blocks(io.BytesIO(text), Csv(), block_bytes))

    assert b"".join(blocks) == text
    assert [row for block in blocks for row in parsed(block)] == parsed(text)
