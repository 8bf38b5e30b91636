"""Bad infer requests: each mistake gets its error class and the protocol's text."""

import json
from typing import Any

import pytest

from qinfer.errors import InvalidRequest, MalformedJson, UnsupportedDatatype, UnsupportedFeature
from qinfer.tensors import to_numpy
from qinfer.wire.kserve_json import decode_infer


def _input(datatype: str = "FP32", shape: Any = (2,), **more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": shape, "datatype": datatype, **more}


def _body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def _with_parameters(**parameters: Any) -> bytes:
    return _body(_input(data=[1, 2]), parameters=parameters)


def _with_output(**parameters: Any) -> bytes:
    return _body(_input(data=[1, 2]), outputs=[{"name": "y", "parameters": parameters}])


BINARY = _body(_input(parameters={"binary_data_size": 8}))
JSON = _body(_input(data=[1, 2]))

UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
SIGNED = "attempt to access JSON non-signed-integer as signed-integer"
NUMBER = "attempt to access JSON non-number as double"
ONE_OF = "Input must set only one of the following fields"
NO_SHM = "Client shared memory is disabled"

BAD: list[tuple[bytes, int | None, type[Exception], str]] = [
    # no JSON
    (b"", None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b"{", None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b'{"inputs":[}', None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b'{"inputs":[]} x', None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b'{"id":"\xff","inputs":[]}', None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b'{"id":"\\ud800","inputs":[]}', None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b'{"id":"\\ud800","inputs":[NaN]}', None, InvalidRequest, "failed to parse the request JSON buffer"),
    (b'{"inputs":[' + b"[" * 200 + b"]" * 200 + b"]}", None, InvalidRequest, "JSON nesting depth exceeds maximum"),
    (b"[" * 100_000, None, InvalidRequest, "JSON nesting depth exceeds maximum"),
    (b'{"a":' * 101 + b"1" + b"}" * 101, None, InvalidRequest, r"maximum allowed limit \(100\)"),
    # wrong structure
    (b"[]", None, MalformedJson, "Unable to parse 'inputs'"),
    (b"{}", None, MalformedJson, "non-existing object member 'inputs'"),
    (b'{"inputs":{}}', None, MalformedJson, "non-array as array"),
    (b'{"inputs":[],"outputs":{}}', None, MalformedJson, "Unable to parse 'outputs'"),
    (b'{"inputs":[],"id":3}', None, MalformedJson, "Unable to parse 'id': attempt to access JSON non-string"),
    (b'{"inputs":[],"parameters":[]}', None, MalformedJson, "failed to get request params."),
    (b'{"inputs":[3]}', None, InvalidRequest, ONE_OF + ".*But no field is set"),
    (b'{"inputs":[],"outputs":[{}]}', None, MalformedJson, "Unable to parse 'name'"),
    (_body({"name": "x", "datatype": "FP32", "data": [1]}), None, MalformedJson, "Unable to parse 'shape'"),
    (_body({"shape": [1], "datatype": "FP32", "data": [1]}), None, MalformedJson, "Unable to parse 'name'"),
    (_body({"name": "x", "shape": [1], "data": [1]}), None, MalformedJson, "Unable to parse 'datatype'"),
    # shapes and datatypes
    (_body(_input(shape=[-1, 2], data=[1, 2])), None, MalformedJson, UNSIGNED),
    (_body(_input(shape=[1.5], data=[1, 2])), None, MalformedJson, UNSIGNED),
    (_body(_input(shape=[2**63], data=[1])), None, InvalidRequest, "larger than any tensor"),
    (_body(_input(shape=2, data=[1, 2])), None, MalformedJson, "Unable to parse 'shape'.*non-array"),
    (_body(_input("FP8", data=[1, 2])), None, UnsupportedDatatype, "invalid datatype for input x"),
    (
        _body(_input("FP16", data=[1, 2])),
        None,
        InvalidRequest,
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input x",
    ),
    (_body(_input("BF16", data=[1, 2])), None, InvalidRequest, "receiving BF16 data via JSON is not supported"),
    # data
    (_body(_input(data=[1])), None, MalformedJson, "Shape does not match true shape of 'data' field"),
    (_body(_input(data=[1, 2, 3])), None, MalformedJson, "Shape does not match true shape of 'data' field"),
    (_body(_input(data=[[1], [2], [3]])), None, MalformedJson, "Shape does not match true shape of 'data' field"),
    (_body(_input(data=5)), None, MalformedJson, "Unable to parse 'data': attempt to access JSON non-array as array"),
    (_body(_input(data=None)), None, MalformedJson, "non-array as array"),
    (_body(_input(data=[1, "2"])), None, MalformedJson, NUMBER),
    (_body(_input(data=[1, True])), None, MalformedJson, NUMBER),
    (_body(_input(data=[1, None])), None, MalformedJson, NUMBER),
    (_body(_input(data=[1, {}])), None, MalformedJson, NUMBER),
    (_body(_input(data=[1, 1e39])), None, InvalidRequest, "outside the range of FP32"),
    (_body(_input(data=[0, 0])).replace(b"[0, 0]", b"[0, 1e400]"), None, InvalidRequest, "failed to parse"),
    (_body(_input(data=[0, 0])).replace(b"[0, 0]", b"[NaN, 1e400]"), None, InvalidRequest, "Number too big"),
    (_body(_input("UINT8", data=[1, 300])), None, InvalidRequest, "outside the range of UINT8"),
    (_body(_input("UINT32", data=[1, -1])), None, MalformedJson, UNSIGNED),
    (_body(_input("UINT64", data=[1, 2**64])), None, InvalidRequest, "outside the range of UINT64"),
    (_body(_input("INT8", data=[1, -129])), None, InvalidRequest, "outside the range of INT8"),
    (_body(_input("INT64", data=[1, 2**63])), None, InvalidRequest, "outside the range of INT64"),
    (_body(_input("INT32", data=[1, 1.5])), None, MalformedJson, SIGNED),
    (_body(_input("INT32", data=[1, 1.0])), None, MalformedJson, SIGNED),
    (_body(_input("INT32", data=[1, True])), None, MalformedJson, SIGNED),
    (_body(_input("INT32", data=[1, 0])).replace(b"[1, 0]", b"[1, NaN]"), None, MalformedJson, SIGNED),
    (_body(_input("BOOL", data=[True, 1])), None, MalformedJson, "non-boolean as boolean"),
    (_body(_input("BYTES", data=["a", 1])), None, MalformedJson, "non-string as string"),
    # binary data
    (BINARY, None, InvalidRequest, "unexpected size for input 'x', expecting 8 additional bytes for model 'm'"),
    (BINARY + bytes(5), len(BINARY), InvalidRequest, "expecting 3 additional bytes for model 'm'"),
    (BINARY + bytes(9), len(BINARY), InvalidRequest, "unexpected additional input data for model 'm'"),
    (JSON + b"1", len(JSON), InvalidRequest, "unexpected additional input data"),
    (
        _body(_input(parameters={"binary_data_size": -1})),
        None,
        MalformedJson,
        "Unable to parse 'binary_data_size': " + UNSIGNED,
    ),
    (
        _body(_input(data=[1, 2], parameters={"binary_data_size": 8})),
        None,
        InvalidRequest,
        ONE_OF + ".*But set 'data' 'binary_data_size'",
    ),
    (_body(_input()), None, InvalidRequest, ONE_OF + ".*But no field is set"),
    (_body(_input(parameters={})), None, InvalidRequest, ONE_OF + ".*But no field is set"),
    (b"{}", -1, InvalidRequest, r"inference header size should be in range \(0, 2\), got: -1"),
    (b"{}", 3, InvalidRequest, r"inference header size should be in range \(0, 2\), got: 3"),
    # parameters
    (_with_parameters(triton_x=1), None, InvalidRequest, "parameter keys starting with 'triton_' are reserved"),
    (_with_parameters(x=None), None, InvalidRequest, "parameter 'x' has invalid type"),
    (_with_parameters(x=[1]), None, InvalidRequest, "parameter 'x' has invalid type"),
    (_with_parameters(x=2**63), None, InvalidRequest, "parameter 'x' has invalid type"),
    (_with_parameters(priority=-1), None, MalformedJson, "Unable to parse 'priority': " + UNSIGNED),
    (_with_parameters(priority=True), None, MalformedJson, "Unable to parse 'priority'"),
    (_with_parameters(timeout="1"), None, MalformedJson, "Unable to parse 'timeout': " + UNSIGNED),
    (_with_parameters(sequence_id=1.5), None, MalformedJson, "Unable to parse 'sequence_id'"),
    (_with_parameters(sequence_start=1), None, MalformedJson, "Unable to parse 'sequence_start'"),
    *[
        (
            _with_parameters(sequence_id=1, qinfer_step=step),
            None,
            InvalidRequest,
            f"parameter 'qinfer_step' is '{shown}'; number the requests of a sequence 1, 2, …",
        )
        for step, shown in [(0, "0"), (-1, "-1"), (2**53, str(2**53)), (1.5, "1.5"), ("1", "1"), (True, "True")]
    ],
    *[
        (_with_parameters(**of, qinfer_step=1), None, InvalidRequest, "send 'sequence_id' with it")
        for of in ({}, {"sequence_id": 0}, {"sequence_id": ""})
    ],
    (_with_parameters(binary_data_output=1), None, MalformedJson, "Unable to parse 'binary_data_output'"),
    # not offered
    (
        _body(_input(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8})),
        None,
        UnsupportedFeature,
        NO_SHM,
    ),
    (_with_output(shared_memory_region="r"), None, UnsupportedFeature, NO_SHM),
    (
        _with_output(shared_memory_region="r", classification=3),
        None,
        InvalidRequest,
        "Output can't set both 'shared_memory_region' and 'classification'",
    ),
    (
        _with_output(shared_memory_region="r", binary_data=True),
        None,
        InvalidRequest,
        "Output can't set both 'shared_memory_region' and 'binary_data'",
    ),
    (_with_output(classification=-1), None, MalformedJson, "Unable to set 'classification': " + UNSIGNED),
    (
        _with_output(shared_memory_region="r", shared_memory_offset=-1),
        None,
        MalformedJson,
        "Unable to parse 'shared_memory_offset': " + UNSIGNED,
    ),
    (
        _body(_input(parameters={"shared_memory_region": "r", "shared_memory_byte_size": "8"})),
        None,
        MalformedJson,
        "Unable to parse 'shared_memory_byte_size': " + UNSIGNED,
    ),
    (
        _body(_input(parameters={"shared_memory_region": 8})),
        None,
        MalformedJson,
        "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string",
    ),
    (
        _with_output(binary_data=1),
        None,
        MalformedJson,
        "Unable to parse 'binary_data': attempt to access JSON non-boolean",
    ),
]


@pytest.mark.parametrize(("body", "json_length", "error", "text"), BAD)
def test_bad_requests(body: bytes, json_length: int | None, error: type[Exception], text: str) -> None:
    """Each mistake gets its class and the protocol's text."""
    with pytest.raises(error, match=text) as caught:
        decode_infer(body, json_length, "m", 0)

    assert type(caught.value) is error


@pytest.mark.parametrize("rows", [99, 300])
def test_many_brackets_are_not_depth(rows: int) -> None:
    """Wide nested data, and brackets within strings, are no nesting."""
    data = [[1.0, 2.0]] * rows

    request, _ = decode_infer(_body(_input(shape=[rows, 2], data=data), id="[" * 200 + '\\"' + "{" * 200), None, "m", 0)

    assert to_numpy(request.inputs[0]).tolist() == data


def test_the_deepest_allowed_nesting() -> None:
    """Exactly the limit passes, one level more does not."""
    deep: Any = [1.0, 2.0]
    for _ in range(96):  # the request, `inputs`, the input and `data` itself make 100
        deep = [deep]

    request, _ = decode_infer(_body(_input(data=deep)), None, "m", 0)

    assert to_numpy(request.inputs[0]).tolist() == [1.0, 2.0]
    with pytest.raises(InvalidRequest, match="nesting depth"):
        decode_infer(_body(_input(data=[deep])), None, "m", 0)


@pytest.mark.parametrize("quotes", [2**17, 2**20])
@pytest.mark.parametrize("before", [b'NaN"', b'{"inputs":[{"name":"'])
def test_an_unterminated_string_of_quotes_is_refused_in_one_pass(before: bytes, quotes: int) -> None:
    """A scan that begins again at each quote would take minutes."""
    with pytest.raises(InvalidRequest, match="failed to parse the request JSON buffer"):
        decode_infer(before + b'\\"' * quotes, None, "m", 0)


def test_a_shape_of_very_many_dimensions_is_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match="the shape of input 'x' has 200000 dimensions, more than any tensor"):
        decode_infer(_body(_input(shape=[1] * 200_000, data=[1])), None, "m", 0)


def test_a_shape_of_many_large_dimensions_is_refused_early() -> None:
    """The number of its elements is never computed: it would have millions of digits."""
    with pytest.raises(InvalidRequest, match="causes total element count to exceed maximum size of"):
        decode_infer(_body(_input(shape=[2**62] * 10_000, data=[1])), None, "m", 0)
