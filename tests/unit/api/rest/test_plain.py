"""`POST /models/<name>`: plain JSON in and out, and its errors, which name the field."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest
from qinfer.models.config.to_spec import BASE64
from qinfer.models.sequence_spec import DirectSpec, SequenceSpec
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.wire.json_pieces import JsonBounds
from qinfer_api.rest.plain import PlainForm, PlainRequest, encode_plain, read_plain, with_models

SPEC = ModelSpec(
    name="m",
    backend="b",
    max_batch_size=8,
    inputs=(
        TensorSpec(name="text", datatype="BYTES", dims=(1,)),
        TensorSpec(name="x", datatype="FP32", dims=(2, -1), optional=True),
        TensorSpec(name="raw", datatype="BYTES", dims=(1,), optional=True),
        TensorSpec(name="k", datatype="INT8", dims=(1,), optional=True),
    ),
    outputs=(TensorSpec(name="y", datatype="FP32", dims=(2, 2)), TensorSpec(name="n", datatype="BYTES", dims=(1,))),
    parameters={BASE64: "raw,n"},
)
ONE = ModelSpec(name="one", backend="b", inputs=SPEC.inputs[:1], outputs=SPEC.outputs, decoupled=True)


SEQUENCE = ModelSpec(
    name="m",
    backend="b",
    inputs=SPEC.inputs[:1],
    outputs=(),
    max_batch_size=1,
    sequences=SequenceSpec(strategy=DirectSpec(), slots=1, max_rows=1),
)


def read(document: Any, spec: ModelSpec = SPEC) -> PlainRequest:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_plain(text, "m", 3, spec, JsonBounds())


def arrays(asked: PlainRequest) -> Mapping[str, Any]:
    return {tensor.name: to_numpy(tensor).tolist() for tensor in asked.request.inputs}


def test_lists_are_batches_and_single_values_are_one_item() -> None:
    batch = read({"text": ["é", ""], "x": [[[1, 2], [3, 4]]] * 2, "raw": ["YQ==", ""], "k": [1, -1]})
    one = read({"text": "é", "x": [[1, 2, 3], [4, 5, 6]]})

    assert arrays(batch) == {
        "text": [["é".encode()], [b""]],
        "x": [[[1, 2], [3, 4]]] * 2,
        "raw": [[b"a"], [b""]],
        "k": [[1], [-1]],
    }
    assert arrays(one) == {"text": [["é".encode()]], "x": [[[1, 2, 3], [4, 5, 6]]]}
    assert (batch.is_one, one.is_one) == (False, True)
    assert (one.request.model, one.request.version) == ("m", 3)


def test_null_leaves_an_optional_input_out() -> None:
    assert set(arrays(read({"text": "a", "x": None}))) == {"text"}


def test_a_model_without_batches_takes_one_item() -> None:
    asked = read({"text": "a"}, ONE)

    assert (arrays(asked), asked.is_one) == ({"text": [b"a"]}, False)


def test_members_of_a_sequence_are_flags() -> None:
    sequence = read({"text": "a", "sequence_id": 7, "sequence_start": True}, SEQUENCE).request.sequence

    assert sequence is not None
    assert (sequence.id, sequence.start, sequence.end) == (7, True, False)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"sequence_id": -7}, "field 'sequence_id' must be a string, or an integer of 0 or more"),
        ({"sequence_id": 7, "sequence_start": "yes"}, "field 'sequence_start' must be true or false"),
    ],
)
def test_a_wrong_member_of_a_sequence_is_named(flags: Mapping[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        read({"text": "a", **flags}, SEQUENCE)


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([1], 'the body must be a JSON object, such as {"text":["a"]}'),
        ({}, 'field \'text\' is missing; send, for example, {"text":["a"]}'),
        ({"text": None}, "field 'text' is missing"),
        ({"text": "a", "txt": 1}, "unknown field 'txt'; model 'm' takes text, x, raw, k"),
        (b'{"text":"a","text":"b"}', "field 'text' is given twice"),
        (b'{"text":"a","te\\u0078t":"b"}', "field 'text' is given twice"),
        (b'{"":5,"te\\u0078t":"b"}', "unknown field ''"),
        ({"text": 5}, "field 'text' must be a string, or a list of such items: attempt to access JSON non-string"),
        ({"text": [None]}, "field 'text' must be a string"),
        ({"text": {}}, "field 'text' must be a string"),
        ({"text": []}, "field 'text' is empty"),
        ({"text": [["a"]]}, "field 'text' must be a string, or a list of such items, got lists nested 2 deep"),
        ({"text": ["a", ["b"]]}, "field 'text' has lists of different lengths, or lists beside values"),
        ({"text": ["a"], "k": 1}, "field 'k' is one item and others are lists"),
        (
            {"text": "a", "k": 128},
            "field 'k' must be an integer, or a list of such items: input 'k' has a value outside",
        ),
        ({"text": "a", "k": 1.5}, "field 'k' must be an integer"),
        ({"text": "a", "k": True}, "field 'k' must be an integer"),
        (
            {"text": "a", "x": [1, 2]},
            "field 'x' must be a list of numbers of shape [2, -1], or a list of such items, got a list",
        ),
        ({"text": "a", "x": [[1, 2]]}, "got items of [1, 2]"),
        ({"text": "a", "x": [[1, 2], [3]]}, "field 'x' has lists of different lengths"),
        ({"text": "a", "raw": "?"}, "field 'raw' must be base64"),
        ({"text": "a", "raw": "YQ"}, "field 'raw' must be base64"),
    ],
)
def test_an_error_names_the_field(document: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(document)

    assert text in caught.value.message


LARGE = [[[float(number), 1.0], [2.0, 3.0]] for number in range(60_000)]


def test_large_arrays_are_read_in_pieces_and_must_be_even() -> None:
    uneven = [*LARGE[:-2], [[1.0], [2.0, 3.0]], [[1.0, 2.0, 3.0], [4.0, 5.0]]]

    asked = read({"text": ["a"] * len(LARGE), "x": LARGE})

    assert asked.request.inputs[1].shape == (60_000, 2, 2)
    assert arrays(asked)["x"][-1] == [[59_999.0, 1.0], [2.0, 3.0]]
    with pytest.raises(InvalidRequest, match="field 'x' has lists of different lengths"):
        read({"text": ["a"] * len(LARGE), "x": uneven})
    with pytest.raises(InvalidRequest, match="field 'x' has lists of different lengths"):
        read({"text": ["a"] * len(LARGE), "x": [*LARGE, 1.0]})


@pytest.mark.parametrize("size", [10**5, 3 * 10**6])
def test_large_texts_are_one_item_or_a_batch(size: int) -> None:
    assert arrays(read({"text": "é" * size})) == {"text": [[("é" * size).encode()]]}
    assert arrays(read({"text": ["a" * size, "b"]})) == {"text": [[b"a" * size], [b"b"]]}
    with pytest.raises(InvalidRequest, match="field 'k' must be an integer"):
        read({"text": "a", "k": "a" * size})


def test_outputs_have_the_form_of_the_inputs() -> None:
    y = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    n = Tensor("n", "BYTES", (2, 1), from_numpy("n", np.array([[b"\xff"], [b""]], object)).data)
    both = Response(request_id="r", model="m", version=1, outputs=(from_numpy("y", y), n))
    first = Response(
        request_id="r",
        model="m",
        version=1,
        outputs=(from_numpy("y", y[:1]), from_numpy("n", np.array([[b"\xff"]], object))),
    )

    assert json.loads(encode_plain(read({"text": ["a", "b"]}), both)) == {"y": y.tolist(), "n": ["/w==", ""]}
    assert json.loads(encode_plain(read({"text": "a"}), first)) == {"y": y[0].tolist(), "n": "/w=="}
    assert json.loads(encode_plain(read({"text": ["a"]}), first)) == {"y": y[:1].tolist(), "n": ["/w=="]}


def test_strings_of_several_dimensions_and_nothing() -> None:
    words = np.array([["a", "é"], ["", "d"]], object)
    outputs = (from_numpy("w", words), from_numpy("e", np.zeros((2, 0), np.float32)))

    answer = encode_plain(read({"text": ["a", "b"]}), Response(request_id="r", model="m", version=1, outputs=outputs))

    assert json.loads(answer) == {"w": [["a", "é"], ["", "d"]], "e": [[], []]}


SCALARS = ModelSpec(
    name="m",
    backend="b",
    max_batch_size=2,
    inputs=tuple(
        TensorSpec(name=datatype.lower(), datatype=datatype, dims=(1,), optional=True)
        for datatype in ("BYTES", "INT8", "UINT64", "FP32", "FP64", "BOOL")
    ),
    outputs=(TensorSpec(name="y", datatype="FP32", dims=(2,)), TensorSpec(name="n", datatype="BYTES", dims=(1,))),
    max_strings=1,
)
VALUES: Mapping[str, Sequence[bytes]] = {
    "bytes": (
        b'""',
        b'"a \\n \\\\ \\u0020"',
        '"é"'.encode(),
        b'"\\ud800"',
        b'"\xff"',
        b'["a","b"]',
        b'["a",["b"]]',
        b'"bytes"',
    ),
    "int8": (b"0", b"-0", b"127", b"128", b"1.0", b"1e0", b"[1,2]", b"[]", b"[1,2,3]", b"true", b"[null]"),
    "uint64": (b"-1", b"18446744073709551615", b"18446744073709551616"),
    "fp32": (b"1", b"-0", b"-0.0", b"1e39", b"1e-46", b"0.1", b"NaN", b'"1"', b"16777217", b"[1,2.5]", b"[1,true]"),
    "fp64": (b"1e400", b"9007199254740993", b"123456789012345678901234567890", b"5e-324", b"true"),
    "bool": (b"true", b"[true,false]", b"1", b"null", b"[[true]]", b"{}"),
}
BODIES = (
    *(b'{"%b": %b}' % (name.encode(), value) for name, values in VALUES.items() for value in values),
    b'{"bytes": "a", "int8": 1}',
    b'{"bytes": ["a"], "int8": 1}',
    b'{"bytes": ["a", "b"], "int8": [1]}',
    b'{"bytes": "a", "bytes": "b"}',
    b'{"bytes": "a", "byt\\u0065s": "b"}',
    b'{"bytes": "a", "other": "b"}',
    b"{}",
    b'{"bytes": null}',
    b'{"bytes": "a"',
    b'["bytes"]',
)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("bounds", [JsonBounds(), JsonBounds(depth=1), JsonBounds(nbytes=50)])
def test_usual_bodies_are_read_as_others(body: bytes, bounds: JsonBounds) -> None:
    found = PlainForm(SCALARS, bounds).read(body)

    if found is not None:
        asked = read_plain(body, "m", 3, SCALARS, bounds)
        assert found == (asked.request.inputs, asked.is_one)


def test_most_bodies_are_usual() -> None:
    form = PlainForm(SCALARS, JsonBounds())

    assert sum(form.read(body) is not None for body in BODIES) >= 20
    assert form.read(b'{"bytes": "a\\n", "fp64": 1}') is not None
    assert form.checked_rows == 1
    assert all(PlainForm(spec, JsonBounds()).read(b'{"text": "a"}') is None for spec in (SPEC, ONE, SEQUENCE))


@pytest.mark.parametrize("strict", [True, False])
def test_usual_answers_are_written_as_others(*, strict: bool) -> None:
    asked, form = read({"bytes": "a"}, SCALARS), PlainForm(SCALARS, JsonBounds())
    asked.strict = strict
    y = [from_numpy("y", np.array([row], np.float32)) for row in ([0.1, 1], [np.nan, np.inf], [1])]
    n = from_numpy("n", np.array([["é"]], object))

    for outputs, is_usual in (((y[0], n), True), ((n, y[1]), True), ((), True), ((n, y[2]), False)):
        response = Response(request_id="r", model="m", version=1, outputs=outputs)
        answer = form.encode(response, strict=strict)
        assert answer == (encode_plain(asked, response) if is_usual else None)


def test_the_document_shows_types_and_an_example_of_each_model() -> None:
    document = with_models(lambda: {"paths": {"/x": {}}}, lambda: {"m": SPEC, "one": ONE})()

    post = document["paths"]["/models/m"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert list(document["paths"]) == ["/x", "/models/m", "/models/one"]
    assert body["example"] == {"text": ["a"]}
    assert body["required"] == ["text"]
    assert body["properties"]["raw"]["anyOf"][1] == {"type": "string", "contentEncoding": "base64"}
    assert "text/event-stream" in document["paths"]["/models/one"]["post"]["responses"]["200"]["content"]
    read(body["example"])
