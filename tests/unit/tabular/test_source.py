"""The files that a job's URLs name, and what their footers say: of real files."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from qinfer.errors import InputMissing, InvalidRequest, StoreUnavailable
from qinfer.storage.open import store_for
from qinfer.tabular.source import FileFormat, Footer, find_files, format_of, read_footer
from tests.support.jobs.bulk_data import write

TABLE = pa.table({"id": [1, 2, 3, 4, 5], "x": [0.5, None, 1.5, 2.5, 3.5], "v": [[1.0], None, [2.0, 3.0], [], [4.0]]})
NESTED = pa.table(
    {"s": [{"a": 1, "b": [{"c": "d"}]}, None], "m": pa.array([[("k", 1)], []], pa.map_("string", "int8"))}
)


def url_of(path: Path) -> str:
    return f"file://{path}"


def footer_of(path: Path, format_: FileFormat) -> Footer:
    (file,) = find_files([url_of(path)])
    return read_footer(file, format_)


def names(folder: Path, *patterns: str) -> list[str]:
    files = find_files([f"{url_of(folder)}/{pattern}" for pattern in patterns])
    return [file.url.removeprefix(f"{url_of(folder)}/") for file in files]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    for name in ("b.parquet", "a.parquet", "c.csv", "_SUCCESS", "_plan.json", ".a.crc", "10.parquet", "2.parquet"):
        (tmp_path / name).write_text(name)
    for name in ("2025/01/x.parquet", "2025/02/x.parquet", "2025/02/_broken/y.parquet", "2026/x.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["*.parquet"], ["10.parquet", "2.parquet", "a.parquet", "b.parquet"]),
        (["[ab].parquet"], ["a.parquet", "b.parquet"]),
        (["[!ab].parquet"], ["2.parquet"]),
        (["[a-c].*"], ["a.parquet", "b.parquet", "c.csv"]),
        (["*"], ["10.parquet", "2.parquet", "a.parquet", "b.parquet", "c.csv"]),
        (["_*"], ["_SUCCESS", "_plan.json"]),
        (["*/*.parquet"], ["2026/x.parquet"]),
        (["202*/0*/x.parquet"], ["2025/01/x.parquet", "2025/02/x.parquet"]),
        (["2025/**/*.parquet"], ["2025/01/x.parquet", "2025/02/x.parquet"]),
        (["2026/**/*.parquet"], ["2026/x.parquet"]),
        (["2025/**"], ["2025/01/x.parquet", "2025/02/x.parquet"]),
        (["**/[0-9]*/**/x*t"], ["2025/01/x.parquet", "2025/02/x.parquet", "2026/x.parquet"]),
        (["*a*r*t"], ["10.parquet", "2.parquet", "a.parquet", "b.parquet"]),
        (["2025"], ["2025/01/x.parquet", "2025/02/x.parquet"]),
        (["b.parquet", "a.parquet"], ["b.parquet", "a.parquet"]),
        (["c.csv", "[ab]*", "*.parquet"], ["c.csv", "a.parquet", "b.parquet", "10.parquet", "2.parquet"]),
    ],
)
def test_patterns_name_files_in_a_fixed_order(lake: Path, patterns: list[str], found: list[str]) -> None:
    """Inputs in their order, names sorted within one, each file once; what readers of a folder skip is left out."""
    assert names(lake, *patterns) == found


@pytest.mark.parametrize("pattern", ["*a" * 200 + "b", "**/" * 60 + "x/b"])
def test_no_pattern_takes_long_to_compare(tmp_path: Path, pattern: str) -> None:
    """One that tries every place of every star would outlive the test."""
    folder = tmp_path / "/".join("a" * 30)
    folder.mkdir(parents=True)
    (folder / "c").touch()
    (tmp_path / ("a" * 250)).touch()

    with pytest.raises(InvalidRequest, match="no file matches"):
        names(tmp_path, pattern)


def test_a_folder_is_looked_at_until_there_is_enough(lake: Path) -> None:
    """Whatever more is in it; but each pattern has to have a file."""
    parquet, plans = f"{url_of(lake)}/*.parquet", f"{url_of(lake)}/_plan*"

    assert len(find_files([parquet], enough=1)) == 1
    assert find_files([parquet, plans], enough=1)[-1].url == f"{url_of(lake)}/_plan.json"


def test_a_listing_that_takes_too_long_is_given_up(lake: Path) -> None:
    """It says what to do."""
    with pytest.raises(StoreUnavailable, match=f"below '{url_of(lake)}' takes too long; name files or folders"):
        find_files([f"{url_of(lake)}/*.parquet"], within_s=-1.0)


def test_a_name_with_brackets_is_found_as_it_is(tmp_path: Path) -> None:
    """A file of that very name goes before the pattern."""
    (tmp_path / "x[1].parquet").write_text("one")
    (tmp_path / "x1.parquet").write_text("two")
    assert names(tmp_path, "x[1].parquet") == ["x[1].parquet"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.orc", r"no file matches the input 'file://.*/\*\.orc'; '\*' stands for"),
        ("missing.parquet", r"input 'file://.*/missing.parquet' does not exist"),
        ("[z-a].parquet", r"is not a valid pattern; write a range such as \[0-9\]"),
        ("nothing/*.parquet", r"no file matches"),
    ],
)
def test_what_names_no_file_is_refused_with_its_url(lake: Path, pattern: str, said: str) -> None:
    """And with what could be meant."""
    with pytest.raises(InvalidRequest, match=said):
        names(lake, "a.parquet", pattern)


@pytest.mark.parametrize("name", ["missing.parquet", "*.orc", "nothing/*.parquet", "empty"])
def test_an_input_that_is_missing_has_an_error_of_its_own(lake: Path, name: str) -> None:
    (lake / "empty").mkdir()

    with pytest.raises(InputMissing):
        names(lake, "a.parquet", name)


def test_an_empty_folder_is_said_to_be_one(lake: Path) -> None:
    (lake / "empty").mkdir()

    with pytest.raises(InputMissing, match=r"input 'file://.*/empty' is a folder without files"):
        names(lake, "empty")


def test_a_changed_file_has_another_etag(tmp_path: Path) -> None:
    """By its time and size."""
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n")
    before = find_files([url_of(path)])[0]
    path.write_text("x\n12\n")
    after = find_files([url_of(path)])[0]
    assert (before.size_bytes, after.size_bytes) == (4, 5)
    assert before.etag != after.etag


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("x.parquet", "parquet"),
        ("x.PQ", "parquet"),
        ("x.feather", "arrow"),
        ("a.b.csv", "csv"),
        ("x.ndjson", "jsonl"),
        ("x.json", "jsonl"),
        ("x.csv.GZ", "csv"),
        ("x.jsonl.zst", "jsonl"),
        ("x.csv.bz2", "csv"),
    ],
)
def test_extensions_tell_formats(name: str, format_: str) -> None:
    """Unless the job says another."""
    assert format_of(f"s3://lake/{name}", "") == format_
    assert format_of(f"s3://lake/{name}", "csv") == "csv"


@pytest.mark.parametrize("name", ["x", "x.parquet.gz", "x.d/part-0", "x.parquet.bak"])
def test_other_extensions_ask_for_the_format(name: str) -> None:
    """With the field that names it."""
    with pytest.raises(InvalidRequest, match=rf"'s3://lake/{name}' names no format; set 'input_format'"):
        format_of(f"s3://lake/{name}", "")


def test_a_parquet_footer_tells_its_row_groups(tmp_path: Path) -> None:
    """Their rows, and the columns as Arrow has them."""
    path = tmp_path / "x.parquet"
    pq.write_table(TABLE, path, row_group_size=2)
    footer = footer_of(path, "parquet")
    assert (footer.rows, footer.groups) == (5, (2, 2, 1))
    assert footer.schema.equals(TABLE.schema)


@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_an_arrow_footer_tells_its_record_batches(tmp_path: Path, compression: str) -> None:
    """Without reading them; empty ones count."""
    path = tmp_path / "x.arrow"
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1, 0], pa.int8()), ["a", "b"])
    table = TABLE.append_column("word", words)
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "uncompressed" else compression)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        for begin, rows in ((0, 2), (2, 0), (2, 3)):
            writer.write_batch(table.slice(begin, rows).combine_chunks().to_batches()[0] if rows else _none(table))
    footer = footer_of(path, "arrow")
    assert (footer.rows, footer.groups) == (5, (2, 0, 3))
    assert footer.schema.equals(table.schema)
    assert pa.ipc.open_file(path).read_all().num_rows == 5


def _none(table: pa.Table) -> pa.RecordBatch:
    arrays = [pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), ["a", "b"])]
    return pa.record_batch([pa.array([], f.type) for f in table.schema][:-1] + arrays, schema=table.schema)


def test_large_record_batches_are_counted_one_by_one(tmp_path: Path) -> None:
    """So much as each of them is a request of its own."""
    path = tmp_path / "x.feather"
    table = pa.table({"x": pa.array(range(200_000), pa.int64())})
    pa.feather.write_feather(table, str(path), compression="uncompressed", chunksize=70_000)
    assert footer_of(path, "arrow").groups == (70_000, 70_000, 60_000)


def test_csv_rows_are_counted_as_they_are_read(tmp_path: Path) -> None:
    """Line ends in quotes are no rows, nor are blank lines; values are not looked at."""
    path = tmp_path / "x.csv"
    path.write_text('id,text\n1,"two\nlines"\n\n2,b\nthree,c\n')
    footer = footer_of(path, "csv")
    assert (footer.rows, footer.groups) == (3, None)
    assert footer.schema.names == ["id", "text"]


def test_json_lines_are_counted_as_they_are_read(tmp_path: Path) -> None:
    """Fields that come later do not matter to the count."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1, "v": [1, 2]}\n\n{"id": 2, "v": null}\n{"id": 3, "v": [], "w": "x"}')
    footer = footer_of(path, "jsonl")
    assert (footer.rows, footer.groups) == (3, None)
    assert footer.schema.field("v").type == pa.list_(pa.int64())


def test_nested_columns_are_read(tmp_path: Path) -> None:
    """They can be copied to the output, whatever they are."""
    path = tmp_path / "x.parquet"
    pq.write_table(NESTED, path)
    assert footer_of(path, "parquet").schema.equals(NESTED.schema)


def test_files_without_rows_have_columns(tmp_path: Path) -> None:
    """Of each format but JSON lines."""
    none = TABLE.slice(0, 0)
    pq.write_table(none, tmp_path / "x.parquet")
    pa.feather.write_feather(none, str(tmp_path / "x.arrow"))
    (tmp_path / "x.csv").write_text("id,x,v\n")
    (tmp_path / "x.jsonl").write_text("\n\n")
    formats: dict[str, FileFormat] = {"x.parquet": "parquet", "x.arrow": "arrow", "x.csv": "csv"}
    for name, format_ in formats.items():
        footer = footer_of(tmp_path / name, format_)
        assert (footer.rows, footer.schema.names) == (0, ["id", "x", "v"])
    assert footer_of(tmp_path / "x.jsonl", "jsonl")[1:3] == (0, None)


@pytest.mark.parametrize(("format_", "groups"), [("csv", None), ("jsonl", None), ("parquet", ()), ("arrow", ())])
def test_empty_files_have_neither(tmp_path: Path, format_: FileFormat, groups: tuple[int, ...] | None) -> None:
    """They are no error: tools that write folders leave them."""
    (tmp_path / "x").touch()
    footer = footer_of(tmp_path / "x", format_)
    assert (footer.schema.names, footer.rows, footer.groups) == ([], 0, groups)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Cut off, of another format, garbage, or what pyarrow ends the process at."""
    pq.write_table(TABLE, tmp_path / "good.parquet")
    pa.feather.write_feather(TABLE, str(tmp_path / "good.arrow"))
    parquet, arrow = (tmp_path / "good.parquet").read_bytes(), (tmp_path / "good.arrow").read_bytes()
    write(tmp_path / "top.arrow", pa.table({"a name": [1]}))
    write(tmp_path / "nested.arrow", pa.table({"a": [{"a name": 1}]}))
    top, nested = (
        (tmp_path / f"{name}.arrow").read_bytes().replace(b"a name", b"a\xffname") for name in ("top", "nested")
    )
    cases: list[tuple[FileFormat, bytes, str]] = [
        ("arrow", top, r"can't be read as arrow.* can't decode byte 0xff"),
        ("arrow", nested, r"can't be read as arrow.* can't decode byte 0xff"),
        ("parquet", parquet[:-10], r"can't be read as parquet; is it damaged or cut off\?"),
        ("parquet", parquet[: len(parquet) // 2], r"can't be read as parquet"),
        ("parquet", parquet[:-60] + bytes(52) + parquet[-8:], r"can't be read as parquet"),
        ("parquet", arrow, r"can't be read as parquet"),
        ("arrow", arrow[:-10], r"can't be read as arrow"),
        ("arrow", arrow[: len(arrow) // 2], r"can't be read as arrow"),
        ("arrow", parquet, r"can't be read as arrow"),
        ("csv", b"a,b\n1,2\n3\n", r"can't be read as csv"),
        ("csv", gzip.compress(b"a,b\n1,2\n"), r"can't be read as csv"),
        ("jsonl", b'{"a": 1}\n{"a": ', r"can't be read as jsonl"),
        ("jsonl", b"[1, 2]\n", r"can't be read as jsonl"),
        ("csv", b'"\n"' + b",a" * 10_000 + b"\n1", r"can't be read as csv.* names more than 10000 columns"),
        ("jsonl", b"null\n", r"can't be read as jsonl.* a line is null"),
        ("jsonl", b" \r\n\tnull", r"can't be read as jsonl.* a line is null"),
        ("jsonl", b'{"a": ' + b"[" * 200_000, r"can't be read as jsonl.* a line is nested deeper than 100 levels"),
        ("jsonl", b'{"a": 1}\n' * 600_000 + b"null\n", r"can't be read as jsonl.* a line is null"),
    ]
    for number, (format_, content, said) in enumerate(cases):
        path = tmp_path / f"bad-{number}"
        path.write_bytes(content)
        with pytest.raises(InvalidRequest, match=rf"'file://.*/bad-{number}' {said}"):
            footer_of(path, format_)


def test_a_schema_is_read_without_the_rows(tmp_path: Path) -> None:
    """Creation of a job needs no more; a later line that is broken is found by planning."""
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "1,2\n" * 2_000_000 + "3\n")
    (file,) = find_files([url_of(path)])
    assert read_footer(file, "csv", columns_only=True).schema.names == ["a", "b"]
    with pytest.raises(InvalidRequest, match="can't be read as csv"):
        read_footer(file, "csv")


def test_the_store_of_a_url_opens_it(tmp_path: Path) -> None:
    """The etag that a plan keeps is the one that workers compare with."""
    path = tmp_path / "x.parquet"
    pq.write_table(TABLE, path)
    (file,) = find_files([url_of(path)])
    assert store_for(file.url).stat(file.url) == file


@pytest.mark.parametrize("zeros", [1, 10, 512, 300_000])
@pytest.mark.parametrize("members", [1, 3])
def test_zeros_behind_the_last_member_of_gzip_are_padding(tmp_path: Path, members: int, zeros: int) -> None:
    """As tapes and block devices leave them."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(b"".join([gzip.compress(b"x\n"), *[gzip.compress(b"1\n")] * members, b"\0" * zeros]))

    assert footer_of(path, "csv").rows == members


@pytest.mark.parametrize("more", [b"\0\0x", b"\x1f\x8b", gzip.compress(b"1\n", mtime=0)[:-4], b"x"])
def test_other_bytes_behind_the_last_member_of_gzip_are_an_error(tmp_path: Path, more: bytes) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"x\n1\n") + more)

    with pytest.raises(InvalidRequest, match=r"a.csv.gz' can't be read as csv"):
        footer_of(path, "csv")


def test_a_folder_whose_name_could_be_a_pattern_is_read(tmp_path: Path) -> None:
    for folder in ("run[1]", "run1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.csv").write_text("x\n1\n")

    assert names(tmp_path, "run[1]") == ["run[1]/a.csv"]
    assert names(tmp_path, "run[1]/*.csv") == ["run1/a.csv"]
