"""Files that are made to cost memory, and what a job makes of each.

A value that is stored once and meant a thousand times, a size in a header that is not true, a row without end.
"""

import gzip
import io
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.jobs import parquet_bytes as raw
from tests.support.jobs.arrow_bytes import file_of_one_name, text_of_one_name

MIB = 2**20
VALUE = b"v" * (3 * MIB)
LARGE = b"w" * (23 * MIB)
TOO_LARGE = "the row takes more than 11184810 bytes when it is decoded"
TOO_MUCH = "takes more memory than a worker may use to read it; write smaller pages and dictionaries, or raise"
NULL = "column 'x' is null; 'null' of its input can give it a value"
NUMBERS = ("INT64", (1,))
TEXT = ("BYTES", (1,))
TEXTS = ("BYTES", (-1,))
NUMBERS_LIST = ("INT64", (-1,))


class Hostile(NamedTuple):
    """A file, and what becomes of it.

    Attributes:
        extension: Its format.
        data: Makes its content.
        of: Datatype and dimensions of the input that its column `x` is.
        rows: The rows of the output; 0 = the file is refused.
        failed: How many of them failed.
        message: What the first error says.
        copies: Whether its other columns are copied where a whole server scores it.
    """

    extension: str
    data: Callable[[], bytes]
    of: tuple[str, tuple[int, ...]] = TEXT
    rows: int = 0
    failed: int = 0
    message: str = ""
    copies: bool = True


def parquet(values: pa.Array, **more: Any) -> bytes:
    """Returns a Parquet file without a hint that its columns were dictionaries."""
    sink = io.BytesIO()
    options = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 2**30, **more}
    pq.write_table(pa.table({"x": values, "k": range(len(values))}), sink, **options)
    return sink.getvalue()


def arrow(values: pa.Array, codec: str | None = "lz4", **others: pa.Array) -> bytes:
    """Returns an Arrow file of one record batch."""
    sink, table = io.BytesIO(), pa.table({"x": values, "k": range(len(values)), **others})
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def one_of(*values: Any, count: int, kind: pa.DataType | None = None) -> pa.DictionaryArray:
    """Returns a dictionary whose values come in turn."""
    numbers = [index % len(values) for index in range(count)]
    return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), pa.array(values, kind))


def lying(data: bytes, length: int) -> bytes:
    """Returns an Arrow file whose buffers of one length say that they become a terabyte."""
    return data.replace(struct.pack("<q", length), struct.pack("<q", 2**40))


def shared_lists(size: int, count: int) -> pa.Array:
    """Returns lists that are all the same items."""
    offsets, sizes = pa.array([0] * count, pa.int32()), pa.array([size] * count, pa.int32())
    return pa.ListViewArray.from_arrays(offsets, sizes, pa.array(range(size), pa.int64()))


def views_of(value: bytes, count: int) -> pa.Array:
    view = struct.pack("<i4sii", len(value), value[:4], 0, 0)
    return pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(view * count), pa.py_buffer(value)])


def lists_of(values: pa.Array, size: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(0, len(values) + 1, size), pa.int32()), values)


def texts(*pages: raw.Page, rows: int) -> bytes:
    return raw.parquet(rows, raw.column("x", raw.BYTE_ARRAY, pages))


def repeated(*values: bytes, indices: bytes, rows: int) -> bytes:
    dictionary = raw.Page(raw.plain(*values), len(values), kind=raw.DICTIONARY_PAGE)
    return texts(dictionary, raw.Page(indices, rows, raw.RLE_DICTIONARY), rows=rows)


def number_lists(*runs: tuple[int, int], rows: int) -> bytes:
    """Returns a Parquet file of lists of zeros; runs are those of its repetition levels."""
    count = sum(length for length, _ in runs)
    dictionary = raw.Page(bytes(8), 1, kind=raw.DICTIONARY_PAGE)
    page = raw.Page(raw.levels(*runs) + raw.levels((count, 1)) + raw.run(count, 0), count, raw.RLE_DICTIONARY)
    return raw.parquet(rows, raw.lists("x", raw.INT64, [dictionary, page]))


def prefixed(value: bytes, count: int) -> bytes:
    """Returns texts that are all the same, in the encoding DELTA_BYTE_ARRAY."""
    prefixes, suffixes = [0] + [len(value)] * (count - 1), [len(value)] + [0] * (count - 1)
    return raw.delta(prefixes) + raw.delta(suffixes) + value


def table_head(columns: int) -> bytes:
    """Returns the first line of a CSV file: `x`, and columns that are copied."""
    return b",".join([b"x", *(b"k%d" % number for number in range(columns))]) + b"\n"


def object_of(fields: int, prefix: str = "k") -> bytes:
    """Returns a line with `x`, and fields that are copied where the prefix is `k`."""
    return json.dumps({"x": "a", **{f"{prefix}{number}": 1 for number in range(fields)}}).encode() + b"\n"


def bomb(compression: str, piece: bytes, times: int) -> bytes:
    """Returns a compressed file whose text is a line with `x`, and then one piece again and again."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, compression) as file:
        file.write(b"x\n")
        for _ in range(times):
            file.write(piece)
    return bytes(sink.getvalue())


def column_chunks(groups: int, columns: int) -> bytes:
    """Returns a Parquet file that has little but a footer."""
    chunk = raw.thrift({2: (raw.I64, 0)})
    group = raw.thrift({1: (raw.LIST, (raw.STRUCT, [chunk] * columns)), 2: (raw.I64, 0), 3: (raw.I64, 0)})
    return raw.parquet(1, extra={4: (raw.LIST, (raw.STRUCT, [group] * groups))})


def with_schema(text: bytes, *, in_order: bool) -> bytes:
    """Returns a Parquet file that says what its Arrow schema is; in Thrift, the value may also come before its key."""
    key, value = raw.thrift({1: (raw.BINARY, b"ARROW:schema")})[:-1], raw.thrift({2: (raw.BINARY, text)})[:-1]
    pair = raw.thrift({1: (raw.BINARY, b"ARROW:schema"), 2: (raw.BINARY, text)})
    # A field number of its own, in two bytes, where it is no step from the one before.
    pair = pair if in_order else value + b"\x08\x02" + key[1:] + b"\0"
    leaf = raw.column("x", raw.BYTE_ARRAY, [raw.Page(raw.plain(b"a"), 1)])
    return raw.parquet(1, leaf, extra={5: (raw.LIST, (raw.STRUCT, [pair]))})


FILES: Mapping[str, Hostile] = {
    "Parquet: a long value in a dictionary": Hostile("parquet", lambda: parquet(one_of(VALUE, count=100)), TEXT, 100),
    "Parquet: a long value in a dictionary that is read as one": Hostile(
        "parquet", lambda: parquet(one_of(VALUE, count=100), store_schema=True), TEXT, 100
    ),
    "Parquet: a value in a dictionary that is too long": Hostile(
        "parquet", lambda: parquet(one_of(LARGE, b"a", count=80)), TEXT, 80, 40, TOO_LARGE
    ),
    "Parquet: long values in lists": Hostile(
        "parquet", lambda: parquet(lists_of(one_of(VALUE, count=100), 2)), TEXTS, 50
    ),
    "Parquet: a list that is too long": Hostile(
        "parquet", lambda: parquet(lists_of(one_of(VALUE, count=100), 50)), TEXTS, message=TOO_MUCH
    ),
    "Parquet: a long value twice in a dictionary": Hostile(
        "parquet",
        lambda: repeated(VALUE, VALUE, indices=raw.run(200, 1), rows=200),
        TEXT,
        200,
    ),
    "Parquet: an index beyond the dictionary": Hostile(
        "parquet", lambda: repeated(VALUE, b"a", indices=raw.run(200, 2, 2), rows=200), message="can't be read"
    ),
    "Parquet: a page that says it becomes 2 GiB": Hostile(
        "parquet",
        lambda: texts(raw.Page(raw.plain(b"a"), 1, declared=2**31 - 1), rows=1),
        TEXT,
        1,
    ),
    "Parquet: a page that says it has 2 GiB": Hostile(
        "parquet",
        lambda: texts(raw.Page(raw.plain(b"a"), 1, stored=2**31 - 1), rows=1),
        message=TOO_MUCH,
    ),
    "Parquet: a page that becomes fewer than no bytes": Hostile(
        "parquet", lambda: texts(raw.Page(raw.plain(b"a"), 1, declared=-1), rows=1), message="can't be read"
    ),
    "Parquet: a page of -1 values": Hostile(
        "parquet", lambda: texts(raw.Page(raw.plain(b"a"), -1), rows=1), message="rows less than it had"
    ),
    "Parquet: a page that is honestly too large": Hostile(
        "parquet",
        lambda: parquet(pa.array([b"v" * (70 * MIB)] * 2), use_dictionary=False),
        message=TOO_MUCH,
    ),
    "Parquet: many columns of numbers in runs": Hostile(
        "parquet",
        lambda: raw.parquet(
            300_000,
            *(
                raw.column(
                    name,
                    raw.INT64,
                    [
                        raw.Page(bytes(8), 1, kind=raw.DICTIONARY_PAGE),
                        raw.Page(raw.run(300_000, 0), 300_000, raw.RLE_DICTIONARY),
                    ],
                )
                for name in ("x", "k")
            ),
        ),
        NUMBERS,
        300_000,
    ),
    "Parquet: one list of a hundred million numbers": Hostile(
        "parquet",
        lambda: number_lists((1, 0), (100_000_000 - 1, 1), rows=1),
        NUMBERS_LIST,
        message=TOO_MUCH,
    ),
    "Parquet: a long list behind many short ones": Hostile(
        "parquet",
        lambda: number_lists((1_000, 0), (6_000_000, 1), rows=1_000),
        NUMBERS_LIST,
        1_000,
        1,
        TOO_LARGE,
    ),
    "Parquet: lists of numbers in runs": Hostile(
        "parquet", lambda: number_lists(*[(1, 0), (99_999, 1)] * 200, rows=200), NUMBERS_LIST, 200
    ),
    "Parquet: texts that each begin with the one before": Hostile(
        "parquet", lambda: texts(raw.Page(prefixed(VALUE, 100), 100, raw.DELTA_BYTE_ARRAY), rows=100), TEXT, 100
    ),
    "Parquet: a footer that is larger than the file": Hostile(
        "parquet", lambda: b"PAR1" + b"\xff\xff\xff\x7fPAR1", message="can't be read as parquet"
    ),
    "Parquet: a million column chunks of three bytes each": Hostile(
        "parquet", lambda: column_chunks(1, 1_000_000), message="can't be read as parquet"
    ),
    "Parquet: row groups of many column chunks of three bytes each": Hostile(
        "parquet", lambda: column_chunks(20, 50_000), message="can't be read as parquet"
    ),
    "Parquet: an Arrow schema of columns that share a name of a megabyte": Hostile(
        "parquet",
        lambda: with_schema(text_of_one_name("x" * MIB, 2000), in_order=True),
        message="died",
    ),
    "Parquet: such a schema in front of its key": Hostile(
        "parquet",
        lambda: with_schema(text_of_one_name("x" * MIB, 2000), in_order=False),
        message="died",
    ),
    "Arrow: columns that share a name of a megabyte": Hostile(
        "arrow", lambda: file_of_one_name("x" * MIB, 2000), message="died"
    ),
    "Arrow: a footer of a million record batches": Hostile(
        "arrow",
        lambda: b"ARROW1\0\0" + bytes(24_000_000) + struct.pack("<i", 24_000_000) + b"ARROW1",
        message="its footer has 24000000 bytes",
    ),
    "Arrow: a long value in a dictionary": Hostile("arrow", lambda: arrow(one_of(VALUE, count=100)), TEXT, 100),
    "Arrow: a value in a dictionary that is too long": Hostile(
        "arrow", lambda: arrow(one_of(LARGE, b"a", count=80)), TEXT, 80, 40, TOO_LARGE
    ),
    "Arrow: a long value in a run": Hostile(
        "arrow",
        lambda: arrow(pa.RunEndEncodedArray.from_arrays(pa.array([100], pa.int32()), pa.array([VALUE]))),
        TEXT,
        100,
    ),
    "Arrow: long values in lists": Hostile("arrow", lambda: arrow(lists_of(one_of(VALUE, count=100), 2)), TEXTS, 50),
    "Arrow: a buffer that says it becomes a terabyte": Hostile(
        "arrow", lambda: lying(arrow(pa.array([VALUE])), len(VALUE)), message="can't be read"
    ),
    "Arrow: a dictionary that says it becomes a terabyte": Hostile(
        "arrow", lambda: lying(arrow(one_of(VALUE, count=2)), len(VALUE)), message="can't be read"
    ),
    "Arrow: a record batch that is honestly too large": Hostile(
        "arrow", lambda: arrow(pa.array([b"v" * (70 * MIB)] * 2)), TEXT, 2, 2, TOO_LARGE
    ),
    "Arrow: a large column that is not read": Hostile(
        "arrow", lambda: arrow(pa.array([b"x", b"y"]), other=pa.array([b"v" * (70 * MIB)] * 2)), TEXT, 2, copies=False
    ),
    "Arrow: a run of a list that is too long": Hostile(
        "arrow",
        lambda: arrow(
            lists_of(pa.RunEndEncodedArray.from_arrays(pa.array([2**30], pa.int32()), pa.array([b"a"])), 2**29)
        ),
        TEXTS,
        message="can't be read",
    ),
    "Arrow: nulls without end in a list": Hostile(
        "arrow", lambda: arrow(lists_of(pa.nulls(2**30), 2**29)), TEXTS, 2, 2, TOO_LARGE
    ),
    "Arrow: lists that share their items": Hostile(
        "arrow", lambda: arrow(shared_lists(1_000_000, 100)), NUMBERS_LIST, 100
    ),
    "Arrow: views of one long value": Hostile("arrow", lambda: arrow(views_of(VALUE, 100)), TEXT, 100),
    "CSV: a line without an end": Hostile("csv", lambda: b"x\n" + b"v" * (9 * MIB), message="can't be read"),
    "CSV: a quote without an end": Hostile("csv", lambda: b'x\n"' + b"v\n" * (5 * MIB), message="can't be read"),
    "CSV: a million columns": Hostile(
        "csv", lambda: b",".join([b"x"] * 1_000_000) + b"\n", message="names more than 10000"
    ),
    "CSV: nothing but commas": Hostile("csv", lambda: table_head(1000) + (b"," * 1000 + b"\n") * 4000, TEXT, 4000),
    "CSV: a null byte": Hostile("csv", lambda: b"x\n\0\n", TEXT, 1),
    "JSON lines: a line without an end": Hostile(
        "jsonl", lambda: b'{"x": "' + b"v" * (9 * MIB), message="can't be read"
    ),
    "JSON lines: lists within lists": Hostile(
        "jsonl", lambda: b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", message="nested"
    ),
    "JSON lines: a million empty lists": Hostile(
        "jsonl", lambda: b'{"x": [' + b"[]," * 1_000_000 + b"[]]}\n", TEXTS, message="type"
    ),
    "JSON lines: columns that only the first line has": Hostile(
        "jsonl", lambda: object_of(500) + b"{}\n" * 60_000, TEXT, 60_001, 60_000, NULL
    ),
    "JSON lines: a hundred thousand fields": Hostile(
        "jsonl", lambda: object_of(100_000, "y"), message="its lines have more than 10000 fields"
    ),
    "JSON lines: null": Hostile("jsonl", lambda: b"null\n" * 1000, message="a line is null"),
    "gzip: a gibibyte of zeros": Hostile(
        "csv.gz", lambda: bomb("gzip", bytes(MIB), 1024), message="a line is longer than"
    ),
    "gzip: line ends without end": Hostile("csv.gz", lambda: bomb("gzip", b"\n" * MIB, 64), TEXT, 0, 0, ""),
    "gzip: many rows in few bytes": Hostile("csv.gz", lambda: bomb("gzip", b"a" * 1000 + b"\n", 60_000), TEXT, 60_000),
    "gzip: two members": Hostile("csv.gz", lambda: gzip.compress(b"x\na\n") + gzip.compress(b"b\nc\n"), TEXT, 3),
    "gzip: cut off": Hostile(
        "csv.gz", lambda: gzip.compress(b"x\n" + b"a\n" * 10**6)[:-100], message="Truncated compressed stream"
    ),
    "gzip: garbage behind the end": Hostile(
        "csv.gz", lambda: gzip.compress(b"x\na\n") + b"garbage", message="can't be read as csv"
    ),
    "gzip: within gzip": Hostile("csv.gz", lambda: gzip.compress(gzip.compress(b"x\na\n")), message="it is gzip; set"),
    "zstd: a gibibyte of zeros": Hostile(
        "csv.zst",
        lambda: bomb("zstd", bytes(MIB), 1024),
        message="a line is longer than",
    ),
    "bz2: a quarter of a gibibyte of zeros": Hostile(
        "csv.bz2", lambda: bomb("bz2", bytes(MIB), 256), message="a line is longer than"
    ),
    "a file of nothing": Hostile("parquet", lambda: b"", message="are empty"),
}
