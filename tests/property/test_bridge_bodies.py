"""Whatever a message holds, the bridge reads it as a request that fits the model, or refuses it with a reason."""

import contextlib
import gzip
import io
import json
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.submission.validate import validate
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.decode import BodyCodec
from qinfer_workers.bridge.replies import encode

INPUTS = (
    TensorSpec(name="X", datatype="FP32", dims=(2,), optional=True),
    TensorSpec(name="T", datatype="BYTES", dims=(1,), optional=True),
    TensorSpec(name="V", datatype="INT64", dims=(-1,), optional=True),
    TensorSpec(name="U", datatype="UINT8", dims=(-1, -1), optional=True),
    TensorSpec(name="F", datatype="BOOL", dims=(1,), optional=True),
)
MODELS = [ModelSpec(name="m", backend="b", inputs=INPUTS, outputs=INPUTS, max_batch_size=rows) for rows in (0, 4)]
CODECS = [
    BodyCodec(BodyOptions(input="T", max_bytes=2**16, reply=reply), model)
    for model in MODELS
    for reply in ("same", "kserve", "jsonl", "arrow")
]
OTHERS = [
    BodyCodec(BodyOptions(input="T", max_bytes=2**16, format=form, columns={"T": "T"}), MODELS[1])
    for form in ("auto", "row", "jsonl", "arrow", "raw", "kserve")
]
STREAM, FILE = "application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.file"
TYPES = ["", "application/json", "application/x-ndjson", "text/plain", "image/png", STREAM, FILE]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
NAMES = st.sampled_from([tensor.name for tensor in INPUTS])
ROWS = st.lists(st.dictionaries(NAMES, VALUES) | VALUES, max_size=5)


def arrow(columns: dict[str, Any], *, is_file: bool, compression: Any = None, rows: int | None = None) -> bytes:
    table = pa.table(columns)
    sink = io.BytesIO()
    make = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


def good_bodies() -> list[tuple[bytes, str, str]]:
    """Returns bodies that can be read, with their content type and encoding."""
    entry = {"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
    outputs = [{"name": "X", "parameters": {"classification": 1, "binary_data": False}}]
    kserve = json.dumps({"id": "q", "parameters": {"priority": 1}, "inputs": [entry], "outputs": outputs}).encode()
    lines = b'{"X": [1, 2], "T": "a", "V": []}\n{"X": [1, 2.5], "T": "b", "V": []}\n'
    texts = pa.array(["a", "bb"])
    columns = [
        {"X": pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), "T": texts.dictionary_encode(), "V": [[1], [2]]},
        {"X": [[1.5, 2.0]] * 2, "T": texts.cast(pa.string_view()), "F": [True, False], "pad": [{"a": 1}] * 2},
    ]
    ipc = [
        (arrow(each, is_file=kind == FILE, compression=compression, rows=rows), kind, "")
        for each in columns
        for kind in (STREAM, FILE)
        for compression, rows in ((None, None), ("zstd", 1), ("lz4", None))
    ]
    gzipped = (gzip.compress(kserve), "application/json", "gzip")
    return [(kserve, "application/json", ""), gzipped, (lines, "application/x-ndjson", ""), *ipc]


GOOD = good_bodies()
WORDS = [b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1\0\0\0", b"[", b'"', b"null"]


def check(codec: BodyCodec, body: bytes, content_type: str, encoding: str = "") -> bool:
    """Reads a body, and answers with its inputs as outputs; tells whether it was read."""
    decoded, reason = None, ""
    try:
        decoded = codec.decode(body, content_type, {}, encoding)
    except InvalidRequest as error:
        reason = error.message
    if decoded is None:
        assert 0 < len(reason) < 2000
        return False
    assert validate(decoded.request, codec.spec) == decoded.rows
    response = Response(request_id="r", model="m", version=1, outputs=decoded.request.inputs)
    with contextlib.suppress(InvalidRequest):  # what is no text can't be a row
        encode(decoded.reply, response, codec.spec)
    return True


def test_good_bodies_are_read() -> None:
    """Else the others would prove nothing."""
    assert all(check(CODECS[-1], *good) for good in GOOD)


@given(codec=st.sampled_from(CODECS + OTHERS), body=st.binary(), content_type=st.sampled_from(TYPES) | st.text())
def test_any_bytes(codec: BodyCodec, body: bytes, content_type: str) -> None:
    """No bytes make it crash, whatever they are said to be."""
    check(codec, body, content_type)


@given(codec=st.sampled_from(CODECS + OTHERS), rows=ROWS)
def test_any_rows(codec: BodyCodec, rows: list[Any]) -> None:
    """Rows of any JSON, as objects, as lines and in Arrow."""
    for row in rows:
        check(codec, json.dumps(row).encode(), "application/json")
    check(codec, b"\n".join(json.dumps(row).encode() for row in rows), "application/x-ndjson")
    names = sorted({name for row in rows if isinstance(row, dict) for name in row})
    columns = {name: [row.get(name) for row in rows if isinstance(row, dict)] for name in names}
    with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):  # values of several types
        check(codec, arrow(columns, is_file=False), STREAM)


@given(
    codec=st.sampled_from(CODECS + OTHERS),
    good=st.sampled_from(GOOD),
    place=st.floats(0, 1),
    word=st.sampled_from(WORDS) | st.binary(min_size=1, max_size=4),
    dropped=st.integers(0, 40),
)
def test_damaged_bodies(
    codec: BodyCodec, good: tuple[bytes, str, str], place: float, word: bytes, dropped: int
) -> None:
    """A body with bytes changed and others gone."""
    body, content_type, encoding = good
    start = int(place * len(body))
    check(codec, body[:start] + word + body[start + len(word) :], content_type, encoding)
    check(codec, body[:start] + body[start + dropped :], content_type, encoding)
    check(codec, body[:start], content_type, encoding)
