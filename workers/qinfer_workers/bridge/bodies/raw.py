"""Bodies that are nothing but the data of one input: an image or a text as one element, or a vector of bytes. Pure.

Which input, and what shape, follows from the model's configuration, as for Triton's raw binary requests.
"""

import struct
from math import prod

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import shown
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import DATATYPES, Bytes, Tensor

_LENGTH = struct.Struct("<I")


class RawInput:
    """Makes tensors of raw bodies; one for each model.

    Args:
        name: The input that bodies are for, of any datatype; empty = the model's only one of BYTES or UINT8.
        spec: The model.

    Raises:
        InvalidRequest: There is no such input, or a number of bytes tells too little of its shape.
    """

    def __init__(self, name: str, spec: ModelSpec) -> None:
        self._tensor: TensorSpec | None = None
        self._row = (1,) if spec.max_batch_size else ()
        self._problem = ""
        if name:
            self._tensor = _named(name, spec)
            self._problem = _shape_problem(self._tensor)
            if self._problem:
                raise InvalidRequest(f"field 'input' is '{shown(name)}', and {self._problem}")
            return
        fitting = [tensor for tensor in spec.inputs if tensor.datatype in ("BYTES", "UINT8")]
        fitting = [tensor for tensor in fitting if not tensor.optional] or fitting
        if len(fitting) != 1:
            number = f"{len(fitting)} inputs" if fitting else "no input"
            remedy = "name one in field 'input' of the route's 'body'" if fitting else "send KServe JSON or rows"
            self._problem = f"model '{spec.name}' has {number} of BYTES or UINT8 to take it; {remedy}"
        else:
            (self._tensor,) = fitting
            self._problem = _shape_problem(self._tensor)

    def tensor(self, body: Bytes) -> Tensor:
        """Makes the tensor of a body; whether the bytes fill its shape is checked with the request.

        Raises:
            InvalidRequest: The model has no one input for raw bodies.
        """
        expected = self._tensor
        if expected is None or self._problem:
            raise InvalidRequest(f"the body is raw data, and {self._problem}")
        if expected.datatype == "BYTES":
            shape = (*self._row, *(1 for _ in expected.dims))
            return Tensor(expected.name, "BYTES", shape, b"".join((_LENGTH.pack(len(body)), body)))
        row = prod(dim for dim in expected.dims if dim != -1) * DATATYPES[expected.datatype].itemsize
        dims = tuple(len(body) // row if dim == -1 else dim for dim in expected.dims)
        return Tensor(expected.name, expected.datatype, (*self._row, *dims), body)


def _named(name: str, spec: ModelSpec) -> TensorSpec:
    for tensor in spec.inputs:
        if tensor.name == name:
            return tensor
    there = ", ".join(tensor.name for tensor in spec.inputs)
    raise InvalidRequest(f"field 'input' is '{shown(name)}', which model '{spec.name}' lacks; it has {there}")


def _shape_problem(tensor: TensorSpec) -> str:
    """Says why no body can fill an input; empty = one can."""
    where = f"input '{tensor.name}' has the dimensions {list(tensor.dims)}"
    if tensor.datatype == "BYTES" and any(dim not in (-1, 1) for dim in tensor.dims):
        return f"{where}, more than one element; send KServe JSON or rows"
    if tensor.datatype != "BYTES" and tensor.dims.count(-1) > 1:
        return f"{where}, which a number of bytes does not tell; send KServe JSON or rows"
    return ""
