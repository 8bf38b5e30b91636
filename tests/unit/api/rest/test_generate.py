"""Free-form JSON to an infer request, and a response to flat JSON."""

import json
from typing import Any

import numpy as np
import pytest

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import InvalidRequest, MalformedJson
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, from_numpy, pack_bytes, to_numpy
from qinfer.wire.json_pieces import GIANT_BYTES, JsonBounds
from qinfer_api.rest.infer import encode_generate, read_generate

INPUTS = (
    TensorSpec(name="text", datatype="BYTES", dims=(1,)),
    TensorSpec(name="numbers", datatype="FP32", dims=(2, -1)),
    TensorSpec(name="flag", datatype="BOOL", dims=(-1,), optional=True),
    TensorSpec(name="half", datatype="FP16", dims=(1,), optional=True),
)
SPEC = ModelSpec(name="m", backend="b", inputs=INPUTS, outputs=INPUTS)
BATCHED = ModelSpec(name="m", backend="b", inputs=INPUTS, outputs=INPUTS, max_batch_size=8)


def read(body: Any, spec: ModelSpec = SPEC) -> OutgoingRequest:
    return read_generate(json.dumps(body).encode(), "m", 2, spec, JsonBounds()).request


def arrays(request: OutgoingRequest) -> dict[str, Any]:
    return {tensor.name: to_numpy(tensor).tolist() for tensor in request.inputs}


def test_inputs_become_tensors_and_the_rest_parameters() -> None:
    """Wherever they are: beside or within `parameters`."""
    request = read(
        {
            "id": "7",
            "text": "hi",
            "flag": True,
            "seed": 1,
            "parameters": {"numbers": [1, 2, 3, 4], "id": "x", "hot": 0.5},
        }
    )

    assert arrays(request) == {"text": [b"hi"], "flag": [True], "numbers": [[1.0, 2.0], [3.0, 4.0]]}
    assert (request.model, request.version, request.client_id) == ("m", 2, "7")
    assert request.parameters == {"seed": 1, "id": "x", "hot": 0.5}


@pytest.mark.parametrize(
    ("data", "spec", "shape"),
    [
        ([1, 2], SPEC, (2, 1)),
        ([1, 2, 3, 4, 5, 6], SPEC, (2, 3)),
        ([], SPEC, (2, 0)),
        ([1, 2, 3, 4], BATCHED, (1, 2, 2)),
    ],
)
def test_the_shape_is_deduced(data: list[int], spec: ModelSpec, shape: tuple[int, ...]) -> None:
    """Fixed dimensions divide the number of elements; the innermost variable one takes the rest, others are 1."""
    assert read({"numbers": data}, spec).inputs[0].shape == shape


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (
            {"numbers": [1, 2, 3]},
            InvalidRequest,
            "The schema can not convert input 'numbers' to tensor with proper shape",
        ),
        ({"text": ["a", "b"]}, InvalidRequest, "The schema can not convert input 'text' to tensor with proper shape"),
        ({"numbers": [[1, 2], [3, 4]]}, MalformedJson, "Shape does not match true shape of 'data' field"),
        ({"numbers": ["1", "2"]}, MalformedJson, "attempt to access JSON non-number as double"),
        ({"numbers": {"a": 1}}, InvalidRequest, "can not convert input 'numbers'"),
        ({"half": 1}, InvalidRequest, "receiving FP16 data via JSON is not supported"),
        ({"seed": [1]}, InvalidRequest, "parameter 'seed' has invalid type"),
        ({"triton_x": 1}, InvalidRequest, "parameter keys starting with 'triton_' are reserved"),
        ({"text": "a", "parameters": {"text": "b"}}, InvalidRequest, "input 'text' already exists in request"),
        ({"parameters": 1}, MalformedJson, "Expected JSON object for keyword: 'parameters'"),
        ({"id": 1}, MalformedJson, "Unable to parse 'id'"),
        ([], MalformedJson, "attempt to get members for non-object"),
    ],
)
def test_bad_bodies(body: Any, error: type[Exception], text: str) -> None:
    """Each mistake has its text."""
    with pytest.raises(error, match=text):
        read(body)


def test_an_input_named_parameters_is_refused() -> None:
    """It would be two things."""
    spec = ModelSpec(
        name="m", backend="b", inputs=(TensorSpec(name="parameters", datatype="FP32", dims=(1,)),), outputs=()
    )

    with pytest.raises(InvalidRequest, match="Keyword 'parameters' for nested schema also given as input tensor name"):
        read({"parameters": {}}, spec)


def test_what_is_no_json_is_refused() -> None:
    """As in infer."""
    with pytest.raises(InvalidRequest, match="failed to parse the request JSON buffer"):
        read_generate(b"{", "m", 0, SPEC, JsonBounds())


def test_outputs_are_flat() -> None:
    """One element is a scalar; what the server tells is not replaced by what a model calls the same."""
    response = Response(
        request_id="r",
        model="m",
        version=3,
        outputs=(
            from_numpy("many", np.array([[1, 2], [3, 4]], np.int32)),
            from_numpy("nan", np.array([np.nan], np.float32)),
            Tensor("text", "BYTES", (1, 1), pack_bytes([b"hi"])),
            from_numpy("id", np.array([9], np.int32)),
            Tensor("none", "FP32", (0,), b""),
        ),
        parameters={"stop": True, "model_name": "x"},
    )

    assert encode_generate(response, "7") == (
        b'{"id":"7","model_name":"m","model_version":"3","many":[1,2,3,4],"nan":NaN,"text":"hi","none":[],"stop":true}'
    )
    assert b'"id":9' in encode_generate(response, "")


@pytest.mark.parametrize("size", [GIANT_BYTES, GIANT_BYTES + 2])
def test_a_text_of_any_length_is_one_element(size: int) -> None:
    text = "é" * (size // 2)

    assert arrays(read({"text": text, "numbers": [1, 2]}, BATCHED))["text"] == [[text.encode()]]
    assert arrays(read({"parameters": {"text": text}}))["text"] == [text.encode()]
