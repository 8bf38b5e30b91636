"""Replies of the bridge: KServe, JSON lines, Arrow, errors."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, OutputMismatch, QinferError
from qinfer.models.config.to_spec import BINARY_OUTPUTS
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, from_numpy
from qinfer.wire.outputs import OutputPlan
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.decode import BodyCodec
from qinfer_workers.bridge.replies import EncodedReply, ReplyEncoding, encode, encode_error

ROWS = b'{"X": 1}\n{"X": 2}'
KSERVE = b'{"id": "q", "inputs": [{"name": "X", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}]%b}'
TYPES = {
    "kserve": "application/json",
    "jsonl": "application/x-ndjson",
    "arrow": "application/vnd.apache.arrow.stream",
}


def f4(values: Any) -> Any:
    return np.array(values, "<f4")


def i1(values: Any) -> Any:
    return np.array(values, "i1")


def spec(*outputs: TensorSpec, rows: int = 8, parameters: Any = None) -> ModelSpec:
    inputs = (TensorSpec(name="X", datatype="FP32", dims=(1,)),)
    return ModelSpec(
        name="m", backend="b", inputs=inputs, outputs=outputs, max_batch_size=rows, parameters=parameters or {}
    )


def output(datatype: str, *dims: int, name: str = "Y", labels: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, dims=dims, labels=labels)


def response(**outputs: Any) -> Response:
    made = tuple(v if isinstance(v, Tensor) else from_numpy(name, np.array(v)) for name, v in outputs.items())
    return Response(request_id="r", model="m", version=3, outputs=made)


def reply(model: ModelSpec, form: Any = "same", body: bytes = ROWS, content_type: str = "") -> ReplyEncoding:
    kind = content_type or (TYPES["kserve"] if body.startswith(b'{"id"') else TYPES["jsonl"])
    return BodyCodec(BodyOptions(reply=form), model).decode(body, kind).reply


def table(encoded: EncodedReply) -> pa.Table:
    is_file = encoded.content_type.endswith("file")
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(encoded.body).read_all()


def test_kserve() -> None:
    """As over HTTP, with the request's id."""
    encoded = encode(reply(spec(output("FP32", 1)), body=KSERVE % b""), response(Y=f4([[1], [2.5]])))

    assert (encoded.content_type, encoded.headers) == ("application/json", {})
    assert json.loads(encoded.body) == {
        "id": "q",
        "model_name": "m",
        "model_version": "3",
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": [2, 1], "data": [1.0, 2.5]}],
    }


def test_binary_outputs_follow_the_json() -> None:
    """A header tells where they begin."""
    body = KSERVE % b', "parameters": {"binary_data_output": true}'

    encoded = encode(reply(spec(output("FP32", 1)), body=body), response(Y=f4([[1], [2]])))

    length = int(encoded.headers["inference-header-content-length"])
    assert encoded.content_type == "application/octet-stream"
    assert json.loads(encoded.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert encoded.body[length:] == f4([1, 2]).tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("Y", "FP16", (2, 1), b"abcd"),
        Tensor("Y", "BF16", (2, 1), b"abcd"),
        Tensor("Y", "BYTES", (1,), b"\1\0\0\0\xff"),
    ],
)
def test_what_json_can_not_carry_is_binary(tensor: Tensor) -> None:
    """The prediction is there, and reaches whoever asked; the other outputs stay JSON."""
    encoded = encode(reply(spec(output("FP32", 1)), body=KSERVE % b""), response(Z=i1([1]), Y=tensor))

    length = int(encoded.headers["inference-header-content-length"])
    first, second = json.loads(encoded.body[:length])["outputs"]
    assert (first["data"], second["parameters"]) == ([1], {"binary_data_size": len(tensor.data)})
    assert encoded.body[length:] == tensor.data


@pytest.mark.parametrize(("letters", "known"), [(1, False), (9999, True), (9999, False)])
def test_classes(letters: int, known: bool) -> None:  # noqa: FBT001
    """Their names are kept with the request; many names are those of the model's configuration, if that is known."""
    cat, dog = "c" * letters, "d" * letters
    model = spec(output("FP32", 2, labels=(cat, dog)))
    body = KSERVE % b', "outputs": [{"name": "Y", "parameters": {"classification": 1}}]'

    encoded = encode(reply(model, body=body), response(Y=f4([[1, 2], [3, 0]])), model if known else None)

    (told,) = json.loads(encoded.body)["outputs"]
    ends = (f":1:{dog}", f":0:{cat}") if known or letters == 1 else (":1", ":0")
    assert [text[text.index(":") :] for text in told["data"]] == list(ends)


@pytest.mark.parametrize(
    ("form", "body", "expected"),
    [
        ("same", ROWS, TYPES["jsonl"]),
        ("kserve", ROWS, TYPES["kserve"]),
        ("arrow", ROWS, TYPES["arrow"]),
        ("same", KSERVE % b"", TYPES["kserve"]),
        ("jsonl", KSERVE % b"", TYPES["jsonl"]),
    ],
)
def test_the_form_of_a_reply(form: str, body: bytes, expected: str) -> None:
    """As the request, or as the route says."""
    assert encode(reply(spec(output("FP32", 1)), form, body), response(Y=f4([[1], [2]]))).content_type == expected


def test_json_lines() -> None:
    """An object for each row: values, lists, lists in lists; NaN is null."""
    model = spec(output("INT64", 1), output("FP32", 1, 2, name="P"), output("BYTES", -1, name="T"))
    texts = np.array([[b"a"], ["é".encode()]], object)

    encoded = encode(reply(model), response(Y=[[7], [8]], P=f4([[[1, np.nan]], [[2, 3]]]), T=texts))

    assert [json.loads(line) for line in encoded.body.splitlines()] == [
        {"Y": 7, "P": [[1.0, None]], "T": ["a"]},
        {"Y": 8, "P": [[2.0, 3.0]], "T": ["é"]},
    ]


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_models_without_a_batch_dimension_have_one_row(form: str) -> None:
    """Whatever the shape of their outputs."""
    encoded = encode(reply(spec(output("INT64", 2), rows=0), form, b'{"X": 1}'), response(Y=[7, 8]))

    rows = table(encoded).to_pylist() if form == "arrow" else [json.loads(encoded.body)]
    assert rows == [{"Y": [7, 8]}]


def test_arrow() -> None:
    """Columns as those of a bulk job's output: plain ones, and lists whose size is in the type unless it varies."""
    model = spec(
        output("INT8", 1), output("FP32", 2, -1, name="P"), output("BYTES", 1, name="T"), output("BF16", 2, name="B")
    )
    texts = np.array([["a"], ["b"]], object)
    half = from_numpy("B", f4([[1, 2], [3, 4]]), "BF16")

    made = table(
        encode(reply(model, "arrow"), response(Y=i1([[7], [8]]), P=np.zeros((2, 2, 3), "f4"), T=texts, B=half))
    )

    assert made.schema.field("Y").type == pa.int8()
    assert str(made.schema.field("P").type) == "fixed_size_list<element: list<element: float not null> not null>[2]"
    assert made.schema.field("T").type == pa.string()
    made.validate(full=True)
    assert made.to_pylist()[1] == {"Y": 8, "P": [[0.0] * 3] * 2, "T": "b", "B": [3.0, 4.0]}


def test_arrow_files() -> None:
    """A file is answered by a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("X", pa.float32())])) as writer:
        writer.write_table(pa.table({"X": pa.array([1, 2], pa.float32())}))
    body = sink.getvalue().to_pybytes()

    encoded = encode(
        reply(spec(output("INT8", 1)), "arrow", body, "application/vnd.apache.arrow.file"),
        response(Y=i1([[7], [8]])),
    )

    assert encoded.content_type == "application/vnd.apache.arrow.file"
    assert table(encoded).to_pydict() == {"Y": [7, 8]}


def test_bytes_that_are_no_text() -> None:
    """Rows can't carry them, but as columns that the model's configuration says are binary."""
    answer = response(Y=np.array([[b"a"], [b"\xff"]], object))
    model = spec(output("BYTES", 1))

    for form in ("jsonl", "arrow"):
        with pytest.raises(InvalidRequest, match="output 'Y' has bytes that are not UTF-8"):
            encode(reply(model, form), answer)
    named = spec(output("BYTES", 1), rows=8, parameters={BINARY_OUTPUTS: "Y"})
    assert table(encode(reply(named, "arrow"), answer)).to_pydict() == {"Y": [b"a", b"\xff"]}


@pytest.mark.parametrize("form", ["kserve", "jsonl", "arrow"])
def test_outputs_that_do_not_fit(form: str) -> None:
    """Bytes that do not fill a shape are the model's mistake, as everywhere."""
    with pytest.raises(QinferError):
        encode(reply(spec(output("FP32", 1)), form), response(Y=Tensor("Y", "FP32", (2, 1), b"123")))


def test_outputs_of_different_rows() -> None:
    """They make no rows."""
    with pytest.raises(OutputMismatch, match="'Y' 1, 'Z' 2"):
        encode(reply(spec(output("INT64", 1)), "jsonl"), response(Y=[[1]], Z=[[1], [2]]))


def test_errors() -> None:
    """KServe's, with the id where the request had one."""
    assert json.loads(encode_error("it failed", "q").body) == {"error": "it failed", "id": "q"}
    assert encode_error("it failed") == EncodedReply("application/json", b'{"error":"it failed"}')


def test_plans_are_kept_only_where_needed() -> None:
    """The notes of an ordinary request are a few bytes."""
    model = spec(output("FP32", 1))

    assert reply(model, body=KSERVE % b"") == ReplyEncoding(client_id="q")
    assert reply(model, body=KSERVE % b', "parameters": {"binary_data_output": true}').plan == OutputPlan(binary=True)
