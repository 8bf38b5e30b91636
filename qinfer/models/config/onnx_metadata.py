"""Reads the inputs and outputs of an ONNX file, without onnx or onnxruntime and without reading its weights.

An ONNX file is one protobuf message of which only a few small fields matter here, so the wire format is walked directly
(protobuf.dev/programming-guides/encoding): a length-delimited field that is not wanted is skipped by its length, and
the weights of a mapped or remote file are never read. Field numbers are from onnx.proto.
"""

from collections.abc import Iterator

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.repository.files import Blob

_DATATYPES = {  # TensorProto.DataType → wire datatype
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 5, 11, 12
_TENSOR_NAME = 8
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_ELEMENT, _TENSOR_SHAPE = 1, 2
_SHAPE_DIM = 1
_DIM_VALUE = 1


def read_onnx(blob: Blob, name: str) -> FileTensors:
    """Reads the declared inputs (without initializers) and outputs of an ONNX file.

    Args:
        blob: The file's bytes; few of them are looked at.
        name: The file's name, for messages.

    Raises:
        ModelLoadFailed: It is no ONNX model, or has an input or output that is not a tensor.
    """
    try:
        return _read(blob)
    except (ValueError, IndexError):
        raise ModelLoadFailed(f"'{name}' can't be read: it is not an ONNX model") from None


def _read(view: Blob) -> FileTensors:
    inputs: list[FileTensor] = []
    outputs: list[FileTensor] = []
    initializers: set[str] = set()
    graphs = [value for number, value in _fields(view) if number == _MODEL_GRAPH and not isinstance(value, int)]
    if len(graphs) != 1:
        raise ValueError("no graph")
    for number, value in _fields(graphs[0]):
        if isinstance(value, int):
            continue
        if number == _GRAPH_INITIALIZER:
            initializers.add(_text(value, _TENSOR_NAME))
        elif number == _GRAPH_INPUT:
            inputs.append(_tensor(value))
        elif number == _GRAPH_OUTPUT:
            outputs.append(_tensor(value))
    return FileTensors(inputs=tuple(t for t in inputs if t.name not in initializers), outputs=tuple(outputs))


def _tensor(value_info: Blob) -> FileTensor:
    name = _text(value_info, _VALUE_NAME)
    declared = _message(_message(value_info, _VALUE_TYPE) or memoryview(b""), _TYPE_TENSOR)
    if declared is None:
        raise ModelLoadFailed(f"'{name}' of the ONNX model is not a tensor")
    element = next((v for n, v in _fields(declared) if n == _TENSOR_ELEMENT and isinstance(v, int)), 0)
    if element not in _DATATYPES:
        raise ModelLoadFailed(f"'{name}' of the ONNX model has element type {element}, which the protocol can't carry")
    shape = _message(declared, _TENSOR_SHAPE)
    dims = None if shape is None else tuple(_dim(v) for n, v in _fields(shape) if n == _SHAPE_DIM)
    return FileTensor(name=name, datatype=_DATATYPES[element], dims=dims)


def _dim(dimension: int | Blob) -> int:
    if isinstance(dimension, int):
        raise ValueError("a dimension must be a message")
    size = next((v for n, v in _fields(dimension) if n == _DIM_VALUE and isinstance(v, int)), -1)
    return size if 0 < size < 1 << 63 else -1  # some exporters write 0 or -1 for an unknown size


def _message(view: Blob, wanted: int) -> Blob | None:
    return next((v for n, v in _fields(view) if n == wanted and not isinstance(v, int)), None)


def _text(view: Blob, wanted: int) -> str:
    found = _message(view, wanted)
    return "" if found is None else str(found.tobytes(), "utf-8")


def _fields(view: Blob) -> Iterator[tuple[int, int | Blob]]:
    """Walks a message: (field number, integer of a varint or the bytes of anything else)."""
    position, end = 0, len(view)
    while position < end:
        key, position = _varint(view, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = _varint(view, position)
            yield key >> 3, value
            continue
        if wire_type == 2:
            length, position = _varint(view, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError("groups do not occur in ONNX")
        if position + length > end:
            raise ValueError("cut off")
        yield key >> 3, view[position : position + length]
        position += length


def _varint(view: Blob, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("overlong integer")
