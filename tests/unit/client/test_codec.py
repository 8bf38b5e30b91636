"""The client's half of the protocol against the server's: what one encodes the other decodes."""

import copy
import json
import math
import pickle

import numpy as np
import pytest

from qinfer.client import InferResult
from qinfer.core.messages import Response, Scalar
from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.tensors import DATATYPES, Tensor, from_numpy, to_numpy
from qinfer.wire.kserve_client import decode_response, encode_request
from qinfer.wire.kserve_json import decode_infer, encode_infer
from qinfer.wire.outputs import OutputPlan

TEXTS = np.array([["a", "grüße"]], dtype=object)
ARRAYS = {
    name: np.arange(6).reshape(1, 6).astype(kind.numpy or "<f4") for name, kind in DATATYPES.items() if name != "BYTES"
}


def tensor(datatype: str) -> Tensor:
    return from_numpy("x", TEXTS) if datatype == "BYTES" else from_numpy("x", ARRAYS[datatype], datatype)


@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_every_datatype_arrives_as_binary(datatype: str) -> None:
    """The server sees the tensor that the client was given."""
    sent = tensor(datatype)

    body, length = encode_request([sent, sent], outputs=["y"], parameters={"priority": 2, "top_k": 5}, client_id="7")
    request, plan = decode_infer(body, length, "m", 1)

    assert [(t.datatype, t.shape, bytes(t.data)) for t in request.inputs] == [
        (datatype, sent.shape, bytes(sent.data))
    ] * 2
    assert (request.outputs, request.priority, request.client_id) == (("y",), 2, "7")
    assert request.parameters == {"top_k": 5}
    assert plan.binary


@pytest.mark.parametrize("datatype", [d for d in DATATYPES if d not in ("FP16", "BF16")])
def test_datatypes_arrive_as_json(datatype: str) -> None:
    """Without binary data all is JSON, and no binary output is asked for."""
    sent = tensor(datatype)

    body, length = encode_request([sent], binary=False)
    request, plan = decode_infer(body, None, "m", 1)

    assert length == len(body)
    assert to_numpy(request.inputs[0]).tolist() == to_numpy(sent).tolist()
    assert not plan.binary


def test_parameters_arrive_as_they_were() -> None:
    """NaN and infinities too, which JSON has as words with Triton."""
    given: dict[str, Scalar] = {
        "text": "é",
        "flag": True,
        "count": -(2**63),
        "share": 0.1,
        "most": math.inf,
        "least": -math.inf,
    }

    body, length = encode_request([tensor("FP32")], parameters={**given, "unknown": math.nan})
    request, _ = decode_infer(body, length, "m", 1)

    arrived = dict(request.parameters)
    unknown = arrived.pop("unknown")
    assert isinstance(unknown, float)
    assert math.isnan(unknown)
    assert arrived == given


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_json(datatype: str) -> None:
    """The protocol has no JSON form for them (reference §1.8)."""
    with pytest.raises(InvalidRequest, match=f"{datatype}, which JSON can't carry"):
        encode_request([tensor(datatype)], binary=False)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("datatype", [d for d in DATATYPES if d not in ("FP16", "BF16")])
def test_every_datatype_comes_back(datatype: str, *, binary: bool) -> None:
    """The client hands out the values that the server encodes, in each form."""
    sent = tensor(datatype)
    reply = encode_infer(
        Response(request_id="r", model="m", version=3, outputs=(sent,)), "7", OutputPlan(binary=binary)
    )

    result = InferResult(*decode_response(reply.body, reply.json_length))

    assert (result.model, result.version, result.id, list(result)) == ("m", 3, "7", ["x"])
    assert result["x"].tolist() == to_numpy(sent).tolist()
    assert result["x"].dtype == to_numpy(sent).dtype


def test_binary_and_json_outputs_may_mix() -> None:
    """Each output says for itself how it travels (reference §1.7)."""
    outputs = (from_numpy("a", np.array([1.5], "<f4")), from_numpy("b", np.array([2], "<i8")))
    plan = OutputPlan(binary=False, overrides={"b": True})
    reply = encode_infer(Response(request_id="r", model="m", version=1, outputs=outputs), "", plan)

    result = InferResult(*decode_response(reply.body, reply.json_length))

    assert {name: array.tolist() for name, array in result.items()} == {"a": [1.5], "b": [2]}


def test_special_numbers_are_read() -> None:
    """Triton writes NaN and Infinity as these words, which are no JSON."""
    output = from_numpy("y", np.array([np.nan, np.inf, -np.inf], "<f4"))
    reply = encode_infer(Response(request_id="r", model="m", version=1, outputs=(output,)), "", OutputPlan())

    result = InferResult(*decode_response(reply.body, reply.json_length))

    assert np.array_equal(result["y"], to_numpy(output), equal_nan=True)


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (b"<html>", None, "not an inference response"),
        (b"[1]", None, "not an inference response"),
        (b'{"outputs":[{"name":"y"}]}', None, "not an inference response"),
        (b"{}", 3, "says that 3 of them are JSON"),
        (
            b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}',
            92,
            "cut off",
        ),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[1]}]}', None, "can't be read as FP32"),
        (b'{"outputs":[{"name":"y","datatype":"BYTES","shape":[2],"data":["a"]}]}', None, "can't be read as BYTES"),
        (b'{"outputs":[{"name":"y","datatype":"FP8","shape":[1],"data":[1]}]}', None, "can't be read as FP8"),
        (b'{"outputs":[{"name":"y","datatype":"BYTES","shape":[1],"data":[1]}]}', None, "can't be read as BYTES"),
    ],
    ids=["html", "list", "fields", "length", "tail", "shape", "texts", "datatype", "type"],
)
def test_a_reply_that_is_none_is_said_to_be(body: bytes, length: int | None, message: str) -> None:
    """A proxy's page, or a connection cut in the middle, is no traceback."""
    with pytest.raises(OutputMismatch, match=message):
        decode_response(body, length)


def test_a_result_shows_its_outputs() -> None:
    """A result printed in a notebook says what it holds, not all of its numbers."""
    reply = json.dumps(
        {
            "model_name": "m",
            "model_version": "2",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]}],
        }
    ).encode()

    result = InferResult(*decode_response(reply, None))

    assert repr(result) == "<InferResult of m version 2: y: FP32 [1, 2]>"
    assert len(result) == 1


def test_a_result_can_be_pickled() -> None:
    """As names, numbers and bytes: what was pickled keeps no reply alive, and names one function of the package."""
    output = from_numpy("y", np.arange(4, dtype=np.float32).reshape(2, 2))
    text = from_numpy("t", TEXTS)
    sent = Response(request_id="r", model="m", version=3, outputs=(output, text))
    reply = encode_infer(sent, "7", OutputPlan(binary=True))
    result = InferResult(*decode_response(memoryview(reply.body), reply.json_length))

    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert (again.model, again.version, again.id) == ("m", 3, "7")
        assert [(t.name, t.datatype, t.shape) for t in again.tensors] == [("y", "FP32", (2, 2)), ("t", "BYTES", (1, 2))]
        assert again["y"].tolist() == result["y"].tolist()
        assert again["t"].tolist() == result["t"].tolist()
    assert all(type(tensor[3]) is bytes for tensor in result.__reduce__()[1][3])  # type: ignore[index]
