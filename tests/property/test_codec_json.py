"""Infer JSON under Hypothesis: values survive, and rubbish is a `RequestError` at worst."""

import contextlib
import json
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, RequestError
from qinfer.tensors import DATATYPES, Tensor, from_numpy, to_numpy
from qinfer.wire import kserve_exact
from qinfer.wire.json_scan import check_depth
from qinfer.wire.kserve_json import decode_infer, encode_infer
from qinfer.wire.outputs import OutputPlan

NUMPY = {d.name: np.dtype(d.numpy) for d in DATATYPES.values() if d.numpy}
JSON_TYPES = [name for name in NUMPY if name != "FP16"]


@st.composite
def arrays(draw: st.DrawFn, names: list[str]) -> Any:
    """Any array of the datatypes, of rank 0 to 3, zeros in the shape included."""
    dtype = NUMPY[draw(st.sampled_from(names))]
    return draw(npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))


@given(arrays(list(NUMPY)))
def test_arrays_survive_as_tensors(array: Any) -> None:
    """Array → tensor → array is the identity for every numeric datatype, scalars and empty ones included."""
    back = to_numpy(from_numpy("x", array))

    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(arrays(JSON_TYPES), st.booleans())
def test_arrays_survive_json(array: Any, nested: bool) -> None:  # noqa: FBT001  # drawn
    """Array → request JSON, flat or nested → tensor → reply JSON → array is the identity, NaN and infinities too."""
    tensor = from_numpy("x", array)
    data = array.tolist() if nested and array.ndim else array.ravel().tolist()
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": array.shape, "datatype": tensor.datatype, "data": data}]}
    ).encode()

    (decoded,) = decode_infer(body, None, "m", 0)[0].inputs
    reply = encode_infer(Response(request_id="r", outputs=(decoded,)), "", OutputPlan())

    assert np.array_equal(to_numpy(decoded), array, equal_nan=array.dtype.kind == "f")
    answer = np.array(json.loads(reply.body)["outputs"][0]["data"], dtype=array.dtype).reshape(array.shape)
    assert np.array_equal(answer, array, equal_nan=array.dtype.kind == "f")


_IDS = st.one_of(st.integers(-1, 2), st.just(2**64), st.text(max_size=2), st.booleans(), st.just(1.0))
_FLAGS = st.one_of(st.booleans(), st.integers(0, 1), st.just("true"))
_PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "sequence_id": _IDS,
        "sequence_start": _FLAGS,
        "sequence_end": _FLAGS,
        "qinfer_step": st.one_of(st.integers(-1, 2), st.just(2**53), st.booleans()),
        "binary_data_output": _FLAGS,
        "priority": st.integers(0, 1),
        "own": st.integers(0, 1),
    },
)


@given(_PARAMETERS)
def test_a_usual_step_is_read_as_any_parameters_are(parameters: dict[str, Any]) -> None:
    """Both readers give the same flags and form, or the usual one leaves the parameters to the other."""

    def told() -> object:
        fields: dict[str, Any] = {}
        try:
            return kserve_exact.apply_parameters(parameters, fields), fields
        except RequestError as error:
            return type(error), error.message

    with mock.patch.object(kserve_exact, "_usual_step", return_value=None):
        exact = told()

    assert told() == exact


@given(arrays(list(NUMPY)))
def test_arrays_survive_binary(array: Any) -> None:
    """Array → binary reply → bytes is the identity, and the sizes add up; one without elements is all JSON."""
    tensor = from_numpy("x", array)

    reply = encode_infer(Response(request_id="r", outputs=(tensor,)), "id", OutputPlan(binary=True))

    assert (reply.json_length is None) == (tensor.nbytes == 0)
    length = len(reply.body) if reply.json_length is None else reply.json_length
    (output,) = json.loads(reply.body[:length])["outputs"]
    assert output["parameters"]["binary_data_size"] == tensor.nbytes
    assert reply.body[length:] == array.tobytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)
INPUT = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=3) | JSON,
        "datatype": st.sampled_from([*DATATYPES, "FP8"]) | JSON,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON,
        "data": st.lists(st.integers() | st.floats() | st.booleans() | st.text(max_size=2), max_size=4) | JSON,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "shared_memory_region"]), st.integers(-1, 9) | JSON, max_size=2
        )
        | JSON,
    },
)
REQUEST = st.fixed_dictionaries(
    {"inputs": st.lists(INPUT, max_size=2) | JSON},
    optional={
        "id": st.text(max_size=3) | JSON,
        "outputs": JSON,
        "parameters": st.dictionaries(st.sampled_from(["priority", "timeout", "sequence_id", "c"]), JSON) | JSON,
    },
)


@given(REQUEST | JSON, st.binary(max_size=12), st.booleans())
def test_any_json_is_a_request_error_at_worst(document: Any, tail: bytes, binary: bool) -> None:  # noqa: FBT001
    """Whatever the JSON says, nothing but a `RequestError` comes out."""
    text = json.dumps(document).encode()
    with contextlib.suppress(RequestError):
        decode_infer(text + tail if binary else text, len(text) if binary else None, "m", 0)


@given(st.binary(max_size=60) | st.text('{}[]",:\\NaInf0123.eE-', max_size=60).map(str.encode))
def test_any_bytes_are_a_request_error_at_worst(body: bytes) -> None:
    """Rubbish raises nothing but a `RequestError`."""
    with contextlib.suppress(RequestError):
        decode_infer(body, None, "m", 0)


def _depth(document: Any) -> int:
    if isinstance(document, dict):
        document = list(document.values())
    return 1 + max(map(_depth, document), default=0) if isinstance(document, list) else 0


@given(JSON, st.integers(1, 4))
def test_depth_is_exact(document: Any, limit: int) -> None:
    """Exactly the documents deeper than the limit are refused, whatever their strings hold."""
    too_deep = False
    try:
        check_depth(json.dumps([document, '[{"\\']).encode(), limit)
    except InvalidRequest:
        too_deep = True

    assert too_deep == (_depth([document]) > limit)


@given(st.lists(st.binary(max_size=6), max_size=5))
def test_bytes_tensors_survive(elements: list[bytes]) -> None:
    """BYTES elements of any content survive array → tensor → array."""
    array = np.array([*elements, None], dtype=object)[:-1]

    tensor = from_numpy("x", array)

    assert isinstance(tensor, Tensor)
    assert to_numpy(tensor).tolist() == elements
