"""Bodies of rows: JSON lines and Arrow become one request, or are refused with the row and the reason."""

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import to_numpy
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.decode import BodyCodec
from tests.support.jobs.arrow_bytes import stream_of_one_name

LINES = "application/x-ndjson"
REMEDY = "; 'null' of its input can give it a value"
STREAM, FILE = "application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.file"
NUMBERS = TensorSpec(name="X", datatype="FP32", dims=(2,))
TEXT = TensorSpec(name="T", datatype="BYTES", dims=(1,))
OUTPUTS = (TensorSpec(name="Y", datatype="FP32", dims=(2,)),)


def codec(*inputs: TensorSpec, rows: int = 4, **options: Any) -> BodyCodec:
    spec = ModelSpec(name="m", backend="b", inputs=inputs or (NUMBERS,), outputs=OUTPUTS, max_batch_size=rows)
    return BodyCodec(BodyOptions(**options), spec)


def lines(*rows: Any) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def arrow(
    columns: Any, content_type: str = STREAM, *, compression: Any = None, chunk: int | None = None, metadata: Any = None
) -> bytes:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    table = table.replace_schema_metadata(metadata)
    sink = io.BytesIO()
    make = pa.ipc.new_file if content_type == FILE else pa.ipc.new_stream
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return sink.getvalue()


def values(body: bytes, content_type: str, reader: BodyCodec) -> dict[str, Any]:
    request = reader.decode(body, content_type).request
    return {tensor.name: to_numpy(tensor).tolist() for tensor in request.inputs}


def why(body: bytes, content_type: str = LINES, reader: BodyCodec | None = None) -> str:
    """Returns the reason that a body is refused for."""
    with pytest.raises(InvalidRequest) as refused:
        (reader or codec()).decode(body, content_type)
    return refused.value.message


@pytest.mark.parametrize("content_type", [LINES, "application/jsonl", "application/x-jsonlines; charset=utf-8"])
def test_json_lines(content_type: str) -> None:
    """Each line is a row; blank lines are none, and other columns are left alone."""
    body = b'{"X": [1, 2.5], "id": 7}\r\n\n  \n{"id": {}, "X": [3, 4]}\n'

    decoded = codec().decode(body, content_type)

    assert to_numpy(decoded.request.inputs[0]).tolist() == [[1, 2.5], [3, 4]]
    assert (decoded.rows, decoded.reply.form) == (2, "jsonl")


@pytest.mark.parametrize("content_type", ["application/json", "text/json; charset=utf-8", "", "application/data"])
def test_a_json_object_is_a_row_where_the_route_maps_columns(content_type: str) -> None:
    """Over several lines, too; a KServe request is still one, by its `inputs`."""
    reader = codec(TEXT, columns={"T": "text"})
    kserve = b'{"inputs": [{"name": "T", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}'

    decoded = reader.decode(b' {"text": "a",\n "task": {"inputs": 7}}\n', content_type)

    assert (values(kserve, content_type, reader), decoded.rows, decoded.reply.form) == ({"T": [[b"a"]]}, 1, "json")
    assert to_numpy(decoded.request.inputs[0]).tolist() == [[b"a"]]
    assert reader.decode(kserve, content_type).reply.form == "kserve"


@pytest.mark.parametrize(
    ("form", "body", "reply"),
    [
        ("row", b'{"T": "a", "inputs": 1}', "json"),
        ("jsonl", b'{"T": "a"}\n', "jsonl"),
        ("kserve", b'{"inputs": [{"name": "T", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}', "kserve"),
        ("raw", b"a", "kserve"),
        ("arrow", arrow({"T": ["a"]}), "arrow-stream"),
        ("arrow", arrow({"T": ["a"]}, FILE), "arrow-file"),
    ],
)
@pytest.mark.parametrize("content_type", ["", "application/json", "image/png", LINES, STREAM])
def test_the_format_of_a_route_counts_more_than_content_types(
    form: str, body: bytes, reply: str, content_type: str
) -> None:
    decoded = codec(TEXT, format=form).decode(body, content_type)

    assert to_numpy(decoded.request.inputs[0]).tolist() == [[b"a"]]
    assert decoded.reply.form == reply


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (b'{"text": "a"}', {}, "expected a KServe request, which has 'inputs', and got a JSON object that has text;"),
        (b"{}", {"format": "kserve"}, "and got a JSON object that has none; to read it as a row, map its members"),
        (
            b'{"text": 1',
            {"columns": {"T": "text"}},
            "expected a JSON object, which is one row: Input data was truncated",
        ),
        (b'{"T": "a"}\n{"T": "b"}', {"format": "row"}, "one row: JSON is malformed: trailing characters"),
        (b'[{"T": "a"}]', {"format": "row"}, "one row: Expected `object`, got `array`"),
        (b'{"other": "a"}', {"columns": {"T": "text"}}, "row 1 lacks 'text', which input 'T' is made of; it has other"),
        (b"[" * 10**5, {"format": "row"}, "nesting depth"),
        (b'{"a": ' * 10**5, {"columns": {"T": "text"}}, "nesting depth"),
    ],
)
def test_a_refusal_says_what_was_expected_and_what_came(body: bytes, options: dict[str, Any], reason: str) -> None:
    assert reason in why(body, "application/json", codec(TEXT, **options))


def test_columns_of_a_route() -> None:
    """Several columns are one input's elements; texts stay texts whatever they look like."""
    reader = codec(NUMBERS, TEXT, columns={"X": ["a", "b"], "T": "day"})
    body = lines({"a": 1, "b": 2, "day": "2024-01-01"}, {"a": 3, "b": 0.5, "day": ""})

    assert values(body, LINES, reader) == {"X": [[1, 2], [3, 0.5]], "T": [[b"2024-01-01"], [b""]]}


def test_shapes_of_a_route() -> None:
    """Flat lists get the shape that the route says."""
    tensor = TensorSpec(name="X", datatype="INT64", dims=(-1, 2))
    reader = codec(tensor, columns={"X": {"columns": ["flat"], "shape": [2, 2]}})

    assert values(lines({"flat": [1, 2, 3, 4]}), LINES, reader) == {"X": [[[1, 2], [3, 4]]]}


def test_optional_inputs_may_be_left_out() -> None:
    """Those that no row has a column for."""
    optional = TensorSpec(name="T", datatype="BYTES", dims=(1,), optional=True)
    reader = codec(NUMBERS, optional)

    assert values(lines({"X": [1, 2]}), LINES, reader) == {"X": [[1, 2]]}
    assert values(arrow({"X": [[1, 2]]}), STREAM, reader) == {"X": [[1, 2]]}
    assert "row 2 lacks 'T'" in why(lines({"X": [1, 2], "T": "a"}, {"X": [1, 2]}), LINES, reader)
    assert "no column for an input" in why(lines({"z": 1}), LINES, codec(optional))
    assert "no column for an input" in why(arrow({"z": [1]}), STREAM, codec(optional))


def test_models_without_a_batch_dimension_take_one_row() -> None:
    """And their tensors have no rows."""
    assert values(lines({"X": [1, 2]}), LINES, codec(rows=0)) == {"X": [1, 2]}
    assert "more rows than the 1 that the model takes" in why(lines({"X": [1, 2]}, {"X": [1, 2]}), LINES, codec(rows=0))


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "UINT64", "FP16", "BF16", "FP64"])
def test_every_datatype(datatype: str) -> None:
    """Whole numbers of 0 and 1 are any of them."""
    reader = codec(TensorSpec(name="X", datatype=datatype, dims=(2,)))

    assert values(lines({"X": [0, 1]}), LINES, reader) == {"X": [[0, 1]]}
    assert values(arrow({"X": pa.array([[0, 1]], pa.list_(pa.int8()))}), STREAM, reader) == {"X": [[0, 1]]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no body"),
        (b"\n \n", "no rows"),
        (b"[1]", "row 1 is no JSON object"),
        (b'{"X": [1, 2]}\n{"X"', "row 2 is no JSON object"),
        (b'{"X": [1, 2]}\nnull', "row 2 is no JSON object"),
        (b'{"X": "\xff"}', "row 1 is no JSON object"),
        (b'{"X": "\\ud800"}', "row 1 is no JSON object"),
        (b'{"X": ' + b"[" * 200 + b"]" * 200 + b"}", "row 1: JSON nesting depth"),
        (b'{"X": ' * 50_000, "row 1: JSON nesting depth"),
        (lines({"Z": 1}), "row 1 lacks 'X', which input 'X' is made of; it has Z"),
        (lines({"X": [1, 2]}, {"X": None}), f"row 2: column 'X' is null{REMEDY}"),
        (lines({"X": [1, 2]}, {"X": [1]}), "row 2: column 'X' has a list of 1, not 2"),
        (lines({"X": [1, 2]}, {"X": "a"}), "row 2: 'X' does not fit the rows before"),
        (lines({"X": [1, 2]}, {"X": [1, "a"]}), "row 2: 'X' does not fit the rows before"),
        (lines({"X": [1, 2]}, {"X": [1, None]}), f"row 2: column 'X' has a null in its list{REMEDY}"),
        (lines({"X": [1, 1e300]}), "row 1: column 'X' has the value 1e+300, which FP32 can't hold; convert the column"),
        (lines({"X": {"a": 1}}), "is of type struct"),
        (lines({"X": [1, True]}), "row 1: 'X' does not fit the rows before, or is mixed in itself"),
        (lines({"X": "a"}), "is of type string, which does not fit input 'X' of FP32"),
        (lines(*[{"X": [1, 2]}] * 5), "more rows than the 4"),
        (lines({"X": [1, 10**40]}), "row 1: 'X' does not fit"),
        (lines(*[{"X": [1]}] * 3), "row 1: column 'X' has a list of 1, not 2 (and 2 more rows can't be used)"),
    ],
)
def test_bad_json_lines(body: bytes, reason: str) -> None:
    """A row that can't be used refuses the message, with its number."""
    assert reason in why(body)


def test_rows_of_different_shapes() -> None:
    """One request has one shape."""
    reader = codec(TensorSpec(name="X", datatype="INT64", dims=(-1,)))

    assert "row 3 has another shape than row 1" in why(lines({"X": [1]}, {"X": [2]}, {"X": [1, 2]}), LINES, reader)
    assert values(lines({"X": []}, {"X": []}), LINES, reader) == {"X": [[], []]}


@pytest.mark.parametrize("content_type", [STREAM, FILE])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("chunk", [None, 1])
def test_arrow(content_type: str, compression: str | None, chunk: int | None) -> None:
    """Streams and files, in one record batch or several, compressed or not."""
    columns = {"pad": ["x"] * 3, "X": [[1, 2], [3, 4], [5, 6]], "T": pa.array(["a", "b", "a"]).dictionary_encode()}
    body = arrow(columns, content_type, compression=compression, chunk=chunk)

    assert values(body, content_type, codec(NUMBERS, TEXT)) == {
        "X": [[1, 2], [3, 4], [5, 6]],
        "T": [[b"a"], [b"b"], [b"a"]],
    }
    form = codec(NUMBERS, TEXT).decode(body, content_type).reply.form
    assert form == ("arrow-file" if content_type == FILE else "arrow-stream")


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_arrow_texts(kind: pa.DataType) -> None:
    """Texts of any type; a null refuses the message."""
    body = arrow({"T": pa.array(["a", "b" * 30]).cast(kind)})

    assert values(body, STREAM, codec(TEXT)) == {"T": [[b"a"], [b"b" * 30]]}
    nulls = arrow({"T": pa.array(["a", None]).cast(kind)})
    assert why(nulls, STREAM, codec(TEXT)) == f"row 2: column 'T' is null{REMEDY}"


@pytest.mark.parametrize("content_type", [STREAM, FILE])
def test_truncated_arrow(content_type: str) -> None:
    """However much is missing."""
    body = arrow({"X": [[1.0, 2.0]] * 3, "T": ["a"] * 3}, content_type, chunk=1)
    whole = codec(NUMBERS, TEXT).decode(body, content_type).rows
    reader = codec(NUMBERS, TEXT)
    for end in range(1, len(body) - 1, 3):
        try:
            rows = reader.decode(body[:end], content_type).rows
        except InvalidRequest:
            continue
        assert (content_type, rows <= whole) == (STREAM, True)  # a stream may end behind any of its batches


LIES = [
    (arrow({"Z": [1]}), STREAM, "input 'X' is made of column 'X', which the inputs lack; they have Z"),
    (arrow({"X": [1.0]}), STREAM, "column 'X' makes 1 element"),
    (arrow({"X": ["a"]}), STREAM, "is of type string, which does not fit"),
    (arrow(pa.table([[1], [2]], names=["X", "X"])), STREAM, "2 columns named 'X'"),
    (arrow({"X": [[1, 2]] * 5}), STREAM, "more rows than the 4"),
    (arrow({"X": [[1, 2]] * 5}, chunk=1), STREAM, "more rows than the 4"),
    (arrow({"X": pa.array([], pa.list_(pa.int8()))}), STREAM, "no rows"),
    (arrow({"X": [[1, 2]]}), FILE, "no Arrow file"),
    (arrow({"X": [[1, 2]]}, FILE), STREAM, "no Arrow stream"),
    (b"\xff\xff\xff\xff\xff\xff\xff\x7f", STREAM, "no Arrow stream"),
    (b"ARROW1\0\0", FILE, "no Arrow file"),
    (b"ARROW1\0\0" + b"\xff\xff\xff\x7fARROW1", FILE, "no Arrow file"),
    (arrow({"X": pa.array([[1, 2]], pa.list_view(pa.int8()))}), STREAM, "or plain lists"),
    (arrow({"X": [{"a": 1}]}), STREAM, "is of type struct<"),
    (stream_of_one_name("x" * 2**17, 2000), STREAM, "its schema takes too much memory"),
    (b"ARROW1\0\0" + stream_of_one_name("x" * 2**17, 2000) + b"ARROW1", FILE, "its schema takes too much memory"),
    (b"ARROW1\0\0" + arrow({"X": [[1, 2]]}), FILE, "does not end as Arrow's file format does"),
]


def test_an_arrow_file_without_the_mark_at_its_streams_end() -> None:
    """Some writers leave it out, as readers of files do not need it."""
    body = arrow({"X": [[1, 2], [3, 4]]}, FILE)
    begin = len(body) - 10 - int.from_bytes(body[-10:-6], "little")
    mark = b"\xff\xff\xff\xff\0\0\0\0"
    assert body[begin - len(mark) : begin] == mark

    assert values(body[: begin - len(mark)] + body[begin:], FILE, codec()) == {"X": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(("body", "content_type", "reason"), LIES)
def test_bad_arrow(body: bytes, content_type: str, reason: str) -> None:
    """Wrong columns, wrong sizes, and what is no Arrow at all."""
    assert reason in why(body, content_type)


def test_large_metadata_is_no_harm() -> None:
    """It is passed over."""
    body = arrow({"X": [[1, 2]]}, metadata={"k" * 1000: "v" * 2**20})

    assert values(body, STREAM, codec()) == {"X": [[1, 2]]}


@pytest.mark.parametrize("content_type", [STREAM, FILE])
def test_compressed_arrow_that_grows(content_type: str) -> None:
    """What it becomes is known before it is unpacked."""
    body = arrow({"X": [[1, 2]], "T": ["a" * 2**20]}, content_type, compression="zstd")

    assert len(body) < 2**16
    assert "more than 65536 bytes when it is unpacked" in why(body, content_type, codec(NUMBERS, TEXT, max_bytes=2**16))


def test_dictionaries_that_grow() -> None:
    """Few bytes may stand for many."""
    body = arrow({"T": pa.array(["a" * 20_000] * 4).dictionary_encode()})

    assert len(body) < 50_000
    reason = "more than 50000 bytes when they are unpacked"
    assert reason in why(body, STREAM, codec(TEXT, max_bytes=50_000))


def test_lists_of_nothing_that_grow() -> None:
    """Nulls in lists of a fixed size take no bytes at all."""
    body = arrow({"X": pa.FixedSizeListArray.from_arrays(pa.nulls(2**27), 2**26)})
    tensor = TensorSpec(name="X", datatype="FP32", dims=(-1,))

    assert len(body) < 1000
    assert "when they are unpacked" in why(body, STREAM, codec(tensor))


def test_arrow_with_damaged_offsets() -> None:
    """They would lead anywhere in memory."""
    body = arrow({"T": ["abc", "def"]})
    offsets = np.array([0, 3, 6], np.int32).tobytes()
    assert body.count(offsets) == 1

    damaged = body.replace(offsets, np.array([0, 2**30, 6], np.int32).tobytes())

    assert "damaged" in why(damaged, STREAM, codec(TEXT))


@pytest.mark.parametrize("content_type", [STREAM, FILE])
def test_too_many_record_batches(content_type: str) -> None:
    """Empty ones are counted, too."""
    empty = pa.record_batch({"X": pa.array([], pa.list_(pa.int8()))})
    sink = io.BytesIO()
    with (pa.ipc.new_file if content_type == FILE else pa.ipc.new_stream)(sink, empty.schema) as writer:
        for _ in range(1026):
            writer.write_batch(empty)

    assert "more than 1024 record batches" in why(sink.getvalue(), content_type)
