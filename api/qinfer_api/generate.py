"""The generate extension: free-form JSON to an infer request, and a response to flat JSON (reference §1.18).

A key that is an input of the model becomes a tensor, any other a parameter; the members of an object `parameters` are
taken the same way. The answer has each output under its own name.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import InvalidRequest, MalformedJson
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, element_count
from qinfer.wire.kserve_exact import load, read_input
from qinfer.wire.kserve_json import check_depth, elements, pack
from qinfer.wire.kserve_parameters import custom_parameter

_NESTED = "parameters"
_ID = "id"


def read_generate(text: bytes, model: str, version: int, spec: ModelSpec, max_depth: int) -> InferRequest:
    """Decodes a generate request.

    Args:
        text: The body.
        model: The model's name.
        version: The version asked for; 0 if none was.
        spec: The model.
        max_depth: Deepest JSON nesting allowed.

    Raises:
        InvalidRequest: It is no JSON, or an input's elements do not make a tensor of its shape.
        MalformedJson: A JSON value has the wrong type.
    """
    document = _load(text, max_depth)
    inputs = {expected.name: expected for expected in spec.inputs}
    if _NESTED in document and _NESTED in inputs:
        raise InvalidRequest(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Scalar] = {}
    for members in (document, document.get(_NESTED, {})):
        for key, value in members.items():
            if key in inputs:
                if key in tensors:
                    raise InvalidRequest(f"input '{key}' already exists in request")
                tensors[key] = _tensor(inputs[key], value, batched=spec.max_batch_size > 0)
            elif members is not document or key not in (_ID, _NESTED):
                parameters[key] = custom_parameter(key, value)
    return InferRequest(
        model=model,
        inputs=tuple(tensors.values()),
        version=version,
        client_id=document.get(_ID, ""),
        parameters=parameters,
    )


def encode_generate(response: Response, client_id: str) -> bytes:
    """Encodes a response that carries outputs; an output of one element becomes a scalar.

    What the server tells has precedence over the response's parameters, and these over outputs of the same name.

    Raises:
        InvalidRequest: An output can't travel as JSON.
        OutputMismatch: An output's bytes do not fill its shape.
    """
    told: dict[str, Any] = {_ID: client_id} if client_id else {}
    told |= {"model_name": response.model, "model_version": str(response.version)}
    members: Mapping[str, Any] = {**response.parameters, **told}
    outputs = {tensor.name: msgspec.Raw(_value(tensor)) for tensor in response.outputs if tensor.name not in members}
    return msgspec.json.encode({**told, **outputs, **members})


def _load(text: bytes, max_depth: int) -> dict[str, Any]:
    """Parses a body, and checks the types of the members with a meaning."""
    check_depth(text, max_depth)
    document = load(text, max_depth)
    if not isinstance(document, dict):
        raise MalformedJson("attempt to get members for non-object")
    if not isinstance(document.get(_ID, ""), str):
        raise MalformedJson("Unable to parse 'id': attempt to access JSON non-string as string")
    if not isinstance(document.get(_NESTED, {}), dict):
        raise MalformedJson(f"Expected JSON object for keyword: '{_NESTED}'")
    return document


def _value(tensor: Tensor) -> bytes:
    text = elements(tensor)
    return text[1:-1] if element_count(tensor.shape) == 1 else text


def _tensor(expected: TensorSpec, value: Any, *, batched: bool) -> Tensor:
    data = value if isinstance(value, list) else [value]
    shape = _shape(expected, len(data), batched=batched)
    entry = read_input({"name": expected.name, "datatype": expected.datatype, "shape": shape, "data": data})
    return Tensor(expected.name, expected.datatype, tuple(shape), pack(entry))


def _shape(expected: TensorSpec, count: int, *, batched: bool) -> list[int]:
    """Finds a shape of `count` elements: fixed dimensions divide it, the innermost variable one takes the rest."""
    shape = [-1, *expected.dims] if batched else list(expected.dims)
    for size in shape:
        if size != -1:
            if not size or count % size:
                raise _unfit(expected.name)
            count //= size
    for position in reversed(range(len(shape))):
        if shape[position] == -1:
            shape[position], count = count, 1
    if count != 1:
        raise _unfit(expected.name)
    return shape


def _unfit(name: str) -> InvalidRequest:
    return InvalidRequest(f"The schema can not convert input '{name}' to tensor with proper shape")
