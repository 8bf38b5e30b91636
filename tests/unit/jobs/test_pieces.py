"""Parts that are made of pieces are the parts that would have been written at once."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.jobs.job import Output
from qinfer.jobs.parts import PartBroken, PartColumns, PartWriter, part_metadata, validate_part
from qinfer.jobs.plan import Shard
from qinfer.storage.open import store_for
from qinfer.tabular.schemas import without_views
from qinfer.tabular.spec import Range
from tests.unit.jobs.test_arrow_types import ARRAYS
from tests.unit.jobs.test_parts import FORMATS

SHARD = Shard(0, "part-00000", 6, (Range("file:///in", "e", -1, 0, 6, 0),))
CODES = pa.array([None, "bad", None, None, "bad", None], pa.string())
KINDS = {
    "seconds": pa.array([1, None, 3, 4, 5, 6], pa.timestamp("s", "Europe/Berlin")),
    "time": pa.array([1, None, 3, 4, 5, 6], pa.time32("s")),
    "half": pa.array([1.5, None, 3, 4, 5, 6], pa.float16()),
    "lists": pa.array([[1.0], None, [], [2.0, None], [3.0], [4.0]], pa.list_(pa.float32())),
    "large": pa.array([["a"], None, [], ["b", None], ["c,\"d\n"], ["e"]], pa.large_list(pa.large_string())),
    "fixed": pa.array([[1, 2], None, [3, 4], [5, 6], [7, 8], [9, 9]], pa.list_(pa.int8(), 2)),
    "struct": pa.array([{"a": 1}, None, {"a": None}, {"a": 4}, {"a": 5}, {"a": 6}], pa.struct([("a", pa.int16())])),
    "map": pa.array([[("k", 1)], None, [], [("k", 2)], [], []], pa.map_(pa.string(), pa.int32())),
    "words": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None, 1, 0], pa.int32()), pa.array(["a", "b"])),
    "decimal": pa.array([1, None, 3, 4, 5, 6], pa.decimal128(9, 2)),
    "bytes": pa.array([b"a", None, b"", b"\x00", b"c", b"d"], pa.binary()),
    "text, with \"quotes\"\n": pa.array(['1"', None, "\n", "", "ü", "NaN"], pa.string()),
    "duration": pa.array([1, None, 3, 4, 5, 6], pa.duration("s")),
}  # fmt: skip


def table(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({**columns, "error_code": CODES, "error_message": CODES})


def output_of(format_: str, compression: str) -> Output:
    return Output(url="file:///out", format=format_, compression=compression)  # type: ignore[arg-type]


def split_of(record: pa.RecordBatch, *, is_split: bool) -> PartColumns | None:
    return PartColumns(record.schema.names[:-2], record.schema.names) if is_split else None


def part(path: Path, record: pa.RecordBatch, output: Output, cuts: tuple[int, ...], *, is_split: bool) -> list[bytes]:
    """Writes a record, cut into pieces; returns the files."""
    metadata, split = part_metadata("job", SHARD, "h"), split_of(record, is_split=is_split)
    writer = PartWriter(path, record.schema, output, metadata, split)
    for begin, end in zip((0, *cuts), (*cuts, 6), strict=True):
        if not cuts:
            writer.write(record)
            continue
        piece = PartWriter(path.with_name(f"{path.name}.{begin}"), record.schema, output, metadata, split)
        piece.write(record.slice(begin, end - begin))
        piece.close_files()
        writer.add(piece.paths, piece.rows, piece.errors)
        piece.delete()
    writer.close()
    assert (writer.rows, writer.errors) == (6, 2)
    return [one.read_bytes() for one in writer.paths]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("format_", "compression"), FORMATS)
def test_a_part_of_pieces_has_the_rows_of_one_that_was_written_at_once(
    tmp_path: Path, format_: str, compression: str, *, is_split: bool
) -> None:
    kinds = dict(KINDS)
    if format_ == "parquet":
        kinds.pop("half")
    record, output = table(kinds), output_of(format_, compression)
    whole = part(tmp_path / "whole", record, output, (), is_split=is_split)
    pieces = part(tmp_path / "pieces", record, output, (1, 2, 4), is_split=is_split)

    assert len(pieces) == len(whole) == 1 + is_split
    for suffix in ("", ".failed")[: len(whole)]:
        one, other = (read(tmp_path / f"{name}{suffix}", output) for name in ("whole", "pieces"))
        assert one == other


def read(path: Path, output: Output) -> object:
    if output.format == "parquet":
        found = pq.read_table(path)
        return found.schema, found.to_pylist()
    if output.format == "arrow":
        found = pa.ipc.open_file(path).read_all()
        return found.schema, found.to_pylist()
    return pa.input_stream(str(path), compression=None if output.compression == "none" else output.compression).read()


@pytest.mark.parametrize("name", ARRAYS)
def test_every_type_that_parquet_takes_comes_back_from_a_piece(tmp_path: Path, name: str) -> None:
    values = ARRAYS[name]
    try:
        pq.write_table(pa.table({"a": values}), tmp_path / "try")
    except (pa.ArrowException, NotImplementedError):
        pytest.skip("Parquet does not take it, and jobs refuse it or convert it before")
    record = without_views(table({"a": pa.concat_arrays([values] * 6).slice(0, 6)}))
    output = output_of("parquet", "none")
    part(tmp_path / "whole", record, output, (), is_split=False)
    part(tmp_path / "pieces", record, output, (1, 4), is_split=False)

    assert read(tmp_path / "pieces", output) == read(tmp_path / "whole", output)


def test_a_piece_is_no_part(tmp_path: Path) -> None:
    """It says of itself that it has more rows than there are."""
    shard = Shard(0, "part.parquet", 6, SHARD.ranges)
    record = table({"a": KINDS["seconds"]})
    piece = PartWriter(
        tmp_path / "part.parquet", record.schema, output_of("parquet", "none"), part_metadata("job", shard, "h")
    )
    piece.write(record.slice(0, 2))
    piece.close_files()
    url = f"file://{tmp_path}/part.parquet"

    with pytest.raises(PartBroken, match="has 2 rows"):
        validate_part(store_for(url), url, shard, "job", "h")
