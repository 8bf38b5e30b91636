"""Checks a request against its model, in Triton's order and with Triton's texts (core `src/infer_request.cc`).

A quick check accepts an ordinary request in half a microsecond; the slow path names mistakes. The caller prefixes the
request id.
"""

import struct
from collections.abc import Sequence
from math import prod

from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import DATATYPES, Tensor

_LENGTH = struct.Struct("<I")
_MAX_ELEMENTS = 2**56  # of a shape whose dimensions of 0 count as 1: no array can have more
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def validate(request: InferRequest, spec: ModelSpec, max_rows: int = 0) -> int:
    """Checks a request's tensors; returns its rows."""
    if request.outputs:
        _check_outputs(request.outputs, spec)
    rows = _plain_rows(request.inputs, spec)
    if rows:
        return rows
    pairs = _pair(request.inputs, spec)
    batch_size = _batch_size(request.inputs, spec, max_rows or spec.max_batch_size) if spec.max_batch_size else 0
    strings = 0
    for tensor, expected in pairs:
        dims = _checked_dims(tensor, expected, spec)
        # Triton drops a batch dimension of 0 here: an empty batch has too few elements.
        count = prod(tensor.shape) if batch_size or not spec.max_batch_size else prod(dims)
        if tensor.datatype == "BYTES":
            strings += count
            _check_count(strings, spec)
            _check_strings(tensor, count, spec.name)
        else:
            size = count * DATATYPES[tensor.datatype].itemsize
            if tensor.nbytes != size:
                raise InvalidRequest(
                    f"input byte size mismatch for input '{tensor.name}' for model '{spec.name}'. "
                    f"Expected {size}, got {tensor.nbytes}"
                )
    if spec.max_batch_size and not batch_size:
        raise InvalidRequest(f"inference request batch-size must be > 0 for '{spec.name}'")
    return batch_size or 1


def check_announced(name: str, datatype: str, shape: Sequence[int], spec: ModelSpec) -> None:
    """Checks an input before its elements are decoded."""
    tensor = Tensor(name, datatype, tuple(shape), b"")
    expected = next((one for one in spec.inputs if one.name == name), None)
    if expected is None:
        raise _unexpected(name, spec)
    if spec.max_batch_size:
        _batch_size((tensor,), spec, spec.max_request_rows)
    _checked_dims(tensor, expected, spec)
    if datatype == "BYTES":
        _check_count(prod(shape), spec)


def _checked_dims(tensor: Tensor, expected: TensorSpec, spec: ModelSpec) -> Sequence[int]:
    if tensor.datatype != expected.datatype:
        raise InvalidRequest(
            f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model '{spec.name}' expects "
            f"'{expected.datatype}'"
        )
    dims = tensor.shape[1:] if spec.max_batch_size else tensor.shape
    if dims != expected.dims or -1 in dims:
        _check_shape(tensor, dims, expected, spec)
    return dims


def _unexpected(name: str, spec: ModelSpec) -> InvalidRequest:
    return InvalidRequest(f"unexpected inference input '{name}' for model '{spec.name}'")


def are_declared(outputs: Sequence[Tensor], request: InferRequest, spec: ModelSpec) -> bool:
    """Tells whether outputs are exactly the requested outputs."""
    wanted = request.outputs or [output.name for output in spec.outputs]
    rows = request.inputs[0].shape[:1] if spec.max_batch_size and request.inputs else ()
    declared = {output.name: output for output in spec.outputs}
    if sorted(tensor.name for tensor in outputs) != sorted(wanted):
        return False
    for tensor in outputs:
        output = declared[tensor.name]
        lead, dims = tensor.shape[: len(rows)], tensor.shape[len(rows) :]
        if tensor.datatype != output.datatype or lead != rows or not _fits(dims, output.dims):
            return False
    return True


def _plain_rows(inputs: Sequence[Tensor], spec: ModelSpec) -> int:
    """Returns the rows of an ordinary valid request; 0 says nothing."""
    max_rows = spec.max_batch_size
    if len(inputs) != len(spec.inputs):
        return 0
    rows = 0 if max_rows else 1
    for position, expected in enumerate(spec.inputs):
        tensor = inputs[position]
        shape, dims, datatype = tensor.shape, expected.dims, tensor.datatype
        if tensor.name != expected.name or datatype != expected.datatype or datatype == "BYTES" or -1 in dims:
            return 0
        if max_rows:
            if not shape or shape[1:] != dims or (position and shape[0] != rows):
                return 0
            rows = shape[0]
        elif shape != dims:
            return 0
        if len(tensor.data) != prod(shape) * DATATYPES[datatype].itemsize:
            return 0
    return rows if 0 < rows <= (max_rows or 1) else 0


def _pair(inputs: Sequence[Tensor], spec: ModelSpec) -> list[tuple[Tensor, TensorSpec]]:
    if [tensor.name for tensor in inputs] == [expected.name for expected in spec.inputs]:
        return list(zip(inputs, spec.inputs, strict=True))
    given: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name in given:
            raise InvalidRequest(f"input '{tensor.name}' already exists in request")
        given[tensor.name] = tensor
    required = sum(not expected.optional for expected in spec.inputs)
    if not required <= len(given) <= len(spec.inputs):
        raise _wrong_count(list(given), required, spec)
    known = {expected.name: expected for expected in spec.inputs}
    for name in given:
        if name not in known:
            raise _unexpected(name, spec)
    missing = [e.name for e in spec.inputs if not e.optional and e.name not in given]
    if missing:
        raise _wrong_count(list(given), required, spec)
    return [(tensor, known[name]) for name, tensor in given.items()]


def _wrong_count(given: list[str], required: int, spec: ModelSpec) -> InvalidRequest:
    most = len(spec.inputs)
    expected = f"{most} inputs" if most == required else f"number of inputs between {required} and {most}"
    missing = [e.name for e in spec.inputs if not e.optional and e.name not in given]
    return InvalidRequest(
        f"expected {expected} but got {len(given)} inputs for model '{spec.name}'. Got input(s) {_quoted(given)}, "
        f"but missing required input(s) {_quoted(missing)}. Please provide all required input(s)."
    )


def _quoted(names: list[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _check_outputs(outputs: Sequence[str], spec: ModelSpec) -> None:
    if spec.outputs and outputs == (spec.outputs[0].name,):
        return
    known = [output.name for output in spec.outputs]
    for position, name in enumerate(outputs):
        if name in outputs[:position]:
            raise InvalidRequest(f"output '{name}' already exists in request")
        if name not in known:
            raise InvalidRequest(f"unexpected inference output '{name}' for model '{spec.name}'")


def _batch_size(inputs: Sequence[Tensor], spec: ModelSpec, max_rows: int) -> int:
    batch_size = inputs[0].shape[0] if inputs and inputs[0].shape else 0
    for tensor in inputs:
        if not tensor.shape:
            raise InvalidRequest(
                f"input '{tensor.name}' has no shape but model requires batch dimension for '{spec.name}'"
            )
        if tensor.shape[0] != batch_size:
            raise InvalidRequest(f"input '{tensor.name}' batch size does not match other inputs for '{spec.name}'")
    if batch_size > max_rows:
        raise InvalidRequest(f"inference request batch-size must be <= {max_rows} for '{spec.name}'")
    return batch_size


def _check_shape(tensor: Tensor, dims: Sequence[int], expected: TensorSpec, spec: ModelSpec) -> None:
    if min(tensor.shape, default=0) < 0:
        raise InvalidRequest(
            f"All input dimensions should be specified for input '{tensor.name}' for model '{spec.name}', "
            f"got {_dims(tensor.shape)}"
        )
    if _fits(dims, expected.dims):
        if 0 in tensor.shape and prod(size or 1 for size in tensor.shape) > _MAX_ELEMENTS:
            raise InvalidRequest(
                f"input '{tensor.name}' for model '{spec.name}' has a shape larger than any tensor can be: "
                f"{_dims(tensor.shape)}"
            )
        return
    full = (-1, *expected.dims) if spec.max_batch_size else expected.dims
    note = _BATCH_NOTE if spec.max_batch_size else ""
    raise InvalidRequest(
        f"unexpected shape for input '{tensor.name}' for model '{spec.name}'. "
        f"Expected {_dims(full)}, got {_dims(tensor.shape)}.{note}"
    )


def _fits(dims: Sequence[int], declared: Sequence[int]) -> bool:
    return len(dims) == len(declared) and all(want in (-1, got) for got, want in zip(dims, declared, strict=True))


def _dims(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def _check_count(strings: int, spec: ModelSpec) -> None:
    if strings > spec.max_strings:
        raise PayloadTooLarge(
            f"the request has at least {strings} strings for model '{spec.name}', which takes {spec.max_strings} at a "
            "time (QINFER_LIMITS__MAX_STRINGS, or qinfer.max_strings in its configuration); send fewer"
        )


def _check_strings(tensor: Tensor, expected: int, model: str) -> None:
    data, end = tensor.data, tensor.nbytes
    where = f"for inference input '{tensor.name}' for model '{model}'"
    position = count = 0
    while position < end:
        if count >= expected:
            raise InvalidRequest(f"unexpected number of string elements {count + 1} {where}, expecting {expected}")
        if position + 4 > end:
            raise InvalidRequest(
                f"incomplete string length indicator {where}, expecting 4 bytes but only {end - position} bytes "
                "available. Please make sure the string length indicator is in one buffer."
            )
        (length,) = _LENGTH.unpack_from(data, position)
        position += 4 + length
        if position > end:
            raise InvalidRequest(
                f"incomplete string data {where}, expecting string of length {length} but only "
                f"{end - position + length} bytes available."
            )
        count += 1
    if count != expected:
        raise InvalidRequest(f"expected {expected} string elements {where}, got {count}")
