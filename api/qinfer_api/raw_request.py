"""Raw binary requests: a body that is nothing but the data of the one input of a model (reference §1.7).

Which input that is, its datatype and its shape come from the model's configuration (core `src/infer_request.cc`).
"""

import struct
from math import prod

from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec
from qinfer.tensors import DATATYPES, Bytes, Tensor
from qinfer.wire.outputs import OutputPlan
from qinfer_api.status import of_request

_LENGTH = struct.Struct("<I")
_PLAN = OutputPlan(binary=True)


def read_raw(body: Bytes, model: str, version: int, spec: ModelSpec) -> tuple[InferRequest, OutputPlan]:
    """Makes a request of a raw body; all outputs will return as binary data.

    A model with a batch dimension gets one row. That the bytes fill the shape is checked with the request.

    Args:
        body: The data, without its encoding.
        model: The model's name.
        version: The version asked for; 0 if none was.
        spec: The model.

    Raises:
        InvalidRequest: The model has several inputs, or the shape of its input can't be told from a number of bytes.
    """
    if len(spec.inputs) != 1:
        raise _refused(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} inputs in "
            f"'{spec.name}' model configuration"
        )
    (expected,) = spec.inputs
    variable = [position for position, size in enumerate(expected.dims) if size == -1]
    if len(variable) > 1:
        raise _refused(
            f"The shape of the raw input '{expected.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    shape, data = list(expected.dims), body
    fixed = prod(size for size in shape if size != -1)
    if expected.datatype == "BYTES":
        if variable or fixed != 1:
            raise _refused(f"For BYTE datatype raw input '{expected.name}', the model must have input shape [1]")
        data = _LENGTH.pack(len(body)) + body
    elif variable:
        shape[variable[0]] = len(body) // (fixed * DATATYPES[expected.datatype].itemsize)
    rows = (1,) if spec.max_batch_size else ()
    tensor = Tensor(expected.name, expected.datatype, (*rows, *shape), data)
    return InferRequest(model=model, inputs=(tensor,), version=version), _PLAN


def _refused(text: str) -> InvalidRequest:
    return InvalidRequest(of_request("") + text)
