"""Whatever a client sends to generate, it becomes a request that fits the model, or an error of ours."""

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qinfer.core.messages import Response
from qinfer.errors import QinferError
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.submission.validate import validate
from qinfer.wire.json_pieces import JsonBounds
from qinfer_api.rest.infer import encode_generate, read_generate

INPUTS = (
    TensorSpec(name="text", datatype="BYTES", dims=(-1,), optional=True),
    TensorSpec(name="numbers", datatype="FP32", dims=(2, -1), optional=True),
    TensorSpec(name="whole", datatype="UINT8", dims=(1,), optional=True),
    TensorSpec(name="flag", datatype="BOOL", dims=(-1, -1), optional=True),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6
)
KEYS = st.sampled_from([expected.name for expected in INPUTS] + ["id", "parameters", "other"]) | st.text()
BODIES = st.dictionaries(KEYS, VALUES) | VALUES


@given(body=BODIES, rows=st.sampled_from([0, 4]))
def test_any_json(body: Any, rows: int) -> None:
    """A request that was read is valid, and can be given back as JSON."""
    spec = ModelSpec(name="m", backend="b", inputs=INPUTS, outputs=INPUTS, max_batch_size=rows)
    with contextlib.suppress(QinferError):
        request = read_generate(json.dumps(body).encode(), "m", 0, spec, JsonBounds()).request
        response = Response(request_id="r", model="m", version=1, outputs=request.inputs, parameters=request.parameters)
        encode_generate(response, request.client_id)
        with contextlib.suppress(QinferError):  # an empty batch, and a batch of inputs that differ in rows
            validate(request, spec)


@given(text=st.binary())
def test_any_bytes(text: bytes) -> None:
    """No text makes it crash."""
    spec = ModelSpec(name="m", backend="b", inputs=INPUTS, outputs=INPUTS)
    with contextlib.suppress(QinferError):
        read_generate(text, "m", 0, spec, JsonBounds())
