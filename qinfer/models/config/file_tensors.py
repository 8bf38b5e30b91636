"""Inputs and outputs that a model file declares, read without the runtime of its format.

ONNX: the protobuf wire format (protobuf.dev/programming-guides/encoding) is walked, so that weights are never read.
Field numbers are from onnx.proto.

OpenVINO: in an IR (`model.xml`, versions 10 and 11) inputs are layers of type Parameter, outputs layers of type Result,
named by the port that their edge comes from (docs.openvino.ai, "OpenVINO IR format"), by `get_any_name`'s rule: the
alphabetically first.

PyTorch (ADR 0004): `model.pt2` of `torch.export.save` is an archive with the program as JSON. Inputs have the names of
`forward`'s arguments, outputs those of the returned dictionary, or Triton's `OUTPUT__<position>`. Numbers and names are
from torch/_export/serde/schema.py. TorchScript and AOTInductor files declare neither datatypes nor shapes.
"""

import io
import json
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.parsers import expat

from qinfer.errors import InvalidRequest, ModelLoadFailed
from qinfer.models.repository.files import Blob
from qinfer.wire.typed_contents import VARINT, fields_of, varint


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """An input or output; dims include the batch dimension; -1 is unknown, `None` = even their number is."""

    name: str
    datatype: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensors:
    """The tensors of a model file; `rows_agree` unless it says that variable first dimensions differ."""

    inputs: tuple[FileTensor, ...]
    outputs: tuple[FileTensor, ...]
    rows_agree: bool = True

    @property
    def batchable(self) -> bool:
        """Tells whether all first dimensions are variable, as for Triton."""
        return self.rows_agree and all(t.dims and t.dims[0] == -1 for t in self.inputs + self.outputs)


_ONNX_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 5, 11, 12
_TENSOR_NAME = 8
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR, _TYPE_SEQUENCE, _TYPE_MAP = 1, 4, 5
_TENSOR_ELEMENT, _TENSOR_SHAPE = 1, 2
_SHAPE_DIM = 1
_DIM_VALUE = 1


def read_onnx(blob: Blob, name: str) -> FileTensors:
    """Reads an ONNX file without initializers, or raises `ModelLoadFailed`."""
    try:
        return _read_onnx(blob)
    except (ValueError, InvalidRequest):
        raise ModelLoadFailed(f"'{name}' can't be read: it is not an ONNX model") from None


def _read_onnx(view: Blob) -> FileTensors:
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
            initializers.add(_text_field(value, _TENSOR_NAME))
        elif number == _GRAPH_INPUT:
            inputs.append(_onnx_tensor(value))
        elif number == _GRAPH_OUTPUT:
            outputs.append(_onnx_tensor(value))
    return FileTensors(inputs=tuple(t for t in inputs if t.name not in initializers), outputs=tuple(outputs))


def _onnx_tensor(value_info: Blob) -> FileTensor:
    name = _text_field(value_info, _VALUE_NAME)
    declared = _message(_message(value_info, _VALUE_TYPE) or memoryview(b""), _TYPE_TENSOR)
    if declared is None:
        kinds = {number for number, _ in _fields(_message(value_info, _VALUE_TYPE) or memoryview(b""))}
        # skl2onnx declares a classifier's probabilities so by default.
        is_zipped = bool(kinds & {_TYPE_SEQUENCE, _TYPE_MAP})
        remedy = "; of scikit-learn, convert it with options={'zipmap': False}" if is_zipped else ""
        raise ModelLoadFailed(f"'{name}' of the ONNX model is not a tensor{remedy}")
    element = next((v for n, v in _fields(declared) if n == _TENSOR_ELEMENT and isinstance(v, int)), 0)
    if element not in _ONNX_DATATYPES:
        raise ModelLoadFailed(f"'{name}' of the ONNX model has element type {element}, which the protocol can't carry")
    shape = _message(declared, _TENSOR_SHAPE)
    dims = None if shape is None else tuple(_dim(v) for n, v in _fields(shape) if n == _SHAPE_DIM)
    return FileTensor(name=name, datatype=_ONNX_DATATYPES[element], dims=dims)


def _dim(dimension: int | Blob) -> int:
    if isinstance(dimension, int):
        raise ValueError("a dimension must be a message")
    size = next((v for n, v in _fields(dimension) if n == _DIM_VALUE and isinstance(v, int)), -1)
    return size if 0 < size < 1 << 63 else -1  # some exporters write 0 or -1 for an unknown size


def _message(view: Blob, wanted: int) -> Blob | None:
    return next((v for n, v in _fields(view) if n == wanted and not isinstance(v, int)), None)


def _text_field(view: Blob, wanted: int) -> str:
    found = _message(view, wanted)
    return "" if found is None else str(found.tobytes(), "utf-8")


def _fields(view: Blob) -> Iterator[tuple[int, int | Blob]]:
    for _, tag, begin, end in fields_of(view):
        yield tag >> 3, varint(view, begin)[0] if tag & 7 == VARINT else view[begin:end]


OPENVINO_MAX_BYTES = 256 * 2**20

_OPENVINO_DATATYPES = {
    "FP64": "FP64", "FP32": "FP32", "FP16": "FP16", "BF16": "BF16", "I8": "INT8", "I16": "INT16", "I32": "INT32",
    "I64": "INT64", "U8": "UINT8", "U16": "UINT16", "U32": "UINT32", "U64": "UINT64", "BOOL": "BOOL",
    "BOOLEAN": "BOOL", "STRING": "BYTES",
}  # fmt: skip
_UNKNOWN_RANK = "..."
_PATH_OF_LAYER = ["net", "layers", "layer"]
_NAME_SEPARATOR = re.compile(r"(?<!\\),")


class _Port(NamedTuple):
    precision: str
    names: str
    dims: list[int]


class _OpenvinoReader:
    """Skips the deeper graphs of loop bodies."""

    def __init__(self) -> None:
        self.inputs: dict[str, str] = {}
        self.outputs: dict[str, None] = {}
        self.names: dict[str, str] = {}
        self.ports: dict[tuple[str, str], _Port] = {}
        self.edges: dict[str, tuple[str, str]] = {}  # target layer → source layer and port
        self._path: list[str] = []
        self._layer = ""
        self._port: _Port | None = None
        self._text = ""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._path.append(tag)
        self._text = ""
        path = self._path
        if path == _PATH_OF_LAYER:
            self._layer = attributes["id"]
            self.names[self._layer] = attributes.get("name", "")
            if attributes["type"] == "Parameter":
                self.inputs[self._layer] = ""
            elif attributes["type"] == "Result":
                self.outputs[self._layer] = None
        elif path[:3] == _PATH_OF_LAYER and path[3:] == ["data"] and self._layer in self.inputs:
            self.inputs[self._layer] = attributes.get("shape", "")
        elif path[:3] == _PATH_OF_LAYER and path[3:] in (["input", "port"], ["output", "port"]):
            self._port = _Port(attributes.get("precision", ""), attributes.get("names", ""), [])
            self.ports[self._layer, attributes["id"]] = self._port
        elif path == ["net", "edges", "edge"]:
            self.edges.setdefault(attributes["to-layer"], (attributes["from-layer"], attributes["from-port"]))

    def text(self, text: str) -> None:
        self._text += text

    def end(self, tag: str) -> None:
        if tag == "dim" and self._port is not None and len(self._path) == len(_PATH_OF_LAYER) + 3:
            self._port.dims.append(max(int(self._text), -1))
        elif tag == "port":
            self._port = None
        self._path.pop()


def read_openvino(content: bytes, name: str) -> FileTensors:
    """Reads an OpenVINO IR, or raises `ModelLoadFailed`."""
    reader = _OpenvinoReader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.StartDoctypeDeclHandler = _refuse_doctype
    try:
        parser.Parse(content, True)
        if not reader.inputs and not reader.outputs:
            raise ValueError("no layers")
        return FileTensors(
            inputs=tuple(_openvino_input(reader, layer) for layer in reader.inputs),
            outputs=tuple(_openvino_output(reader, layer) for layer in reader.outputs),
        )
    except (expat.ExpatError, KeyError, ValueError):
        raise ModelLoadFailed(f"'{name}' can't be read: it is not an OpenVINO IR of version 10 or 11") from None


def _refuse_doctype(*_: object) -> None:
    """Refuses a document type, which no IR has: it might define entities that grow without bound."""
    raise ValueError("document type")


def _openvino_input(reader: _OpenvinoReader, layer: str) -> FileTensor:
    port = next((port for (of, _), port in reader.ports.items() if of == layer), None)
    if port is None:
        raise ValueError("a parameter without a port")
    dims = None if reader.inputs[layer] == _UNKNOWN_RANK else tuple(port.dims)
    return _openvino_tensor(_any_name(port.names) or reader.names[layer], port, dims)


def _openvino_output(reader: _OpenvinoReader, layer: str) -> FileTensor:
    """Returns the tensor of a Result, which without dimensions is a scalar or of unknown rank."""
    producer, number = reader.edges[layer]
    port = reader.ports[producer, number]
    return _openvino_tensor(_any_name(port.names) or reader.names[producer], port, tuple(port.dims) or None)


def _openvino_tensor(name: str, port: _Port, dims: tuple[int, ...] | None) -> FileTensor:
    if port.precision.upper() not in _OPENVINO_DATATYPES:
        raise ModelLoadFailed(
            f"'{name}' of the OpenVINO model has element type '{port.precision}', which the protocol can't carry"
        )
    return FileTensor(name=name, datatype=_OPENVINO_DATATYPES[port.precision.upper()], dims=dims)


def _any_name(names: str) -> str:
    return min((name.replace("\\,", ",") for name in _NAME_SEPARATOR.split(names)), default="")


_TORCH_MAX_BYTES = 64 * 2**20
_FEWEST_ROWS = 4
_TORCH_DATATYPES = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
_SYMBOL = re.compile(r"Symbol\('(\w+)'[^)]*\)")
_FORWARD = re.compile(r"def forward\(self: [^,)]+,?\s*(?P<arguments>[^)]*)\)")
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class UncertainError(Exception):
    """The file does not declare its tensors, for this reason."""


def read_torch(blob: Blob, name: str) -> FileTensors:
    """Reads a file's tensors, or raises `UncertainError` or `ModelLoadFailed`."""
    try:
        with zipfile.ZipFile(_BlobFile(blob)) as archive:
            paths = {path.partition("/")[2]: path for path in archive.namelist()}
            programs = [path for path in paths if re.fullmatch(r"models/[^/]+\.json", path)]
            if "constants.pkl" in paths:
                raise UncertainError(_told_by_script(archive, paths))
            if len(programs) != 1:
                raise UncertainError(f"'{name}' does not declare it")
            return _program(json.loads(_read_member(archive, paths[programs[0]])))
    except _UNREADABLE:
        raise UncertainError(f"'{name}' does not declare it in a known form") from None


class _BlobFile(io.RawIOBase):
    def __init__(self, blob: Blob) -> None:
        self._blob, self._at = blob, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._blob)}[whence], 0)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._blob) if size is None or size < 0 else self._at + size
        content = self._blob[self._at : end].tobytes()
        self._at += len(content)
        return content


def _read_member(archive: zipfile.ZipFile, path: str) -> bytes:
    member = archive.getinfo(path)
    if member.file_size > _TORCH_MAX_BYTES or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("not as PyTorch writes it")
    return archive.read(path)


def _program(saved: Any) -> FileTensors:
    module = saved["graph_module"]
    (root,) = (call["signature"] for call in module["module_call_graph"] if call["fqn"] == "")
    values, signature = module["graph"]["tensor_values"], module["signature"]
    inputs = list(_arguments(signature["input_specs"], "user_input"))
    outputs = list(_arguments(signature["output_specs"], "user_output"))
    names = root["forward_arg_names"]
    if len(names) != len(inputs) or _depth(json.loads(root["in_spec"])[1]) > _FLAT_INPUTS:
        raise UncertainError("the arguments of the model are lists or dictionaries")
    returned = _returned_names(json.loads(root["out_spec"])[1], len(outputs))
    rows = {_first_size(values[name]) for name in (*inputs, *outputs)}
    return FileTensors(
        inputs=tuple(_torch_tensor(name, values[value]) for name, value in zip(names, inputs, strict=True)),
        outputs=tuple(_torch_tensor(name, values[value]) for name, value in zip(returned, outputs, strict=True)),
        rows_agree=len(rows) == 1 and _may_be_batch(rows.pop(), saved["range_constraints"]),
    )


_FLAT_INPUTS = 2  # the pair of positional and keyword arguments, and each argument


def _depth(spec: Any) -> int:
    return 1 + max(map(_depth, spec["children_spec"]), default=-1)


def _arguments(specs: Sequence[Any], kind: str) -> Iterator[str]:
    for spec in specs:
        if kind in spec:
            if "as_tensor" not in spec[kind]["arg"]:
                raise UncertainError("some arguments or results of the model are not tensors")
            yield spec[kind]["arg"]["as_tensor"]["name"]


def _returned_names(spec: Any, count: int) -> list[str]:
    if _depth(spec) > 1:
        raise UncertainError("the model returns nested lists or dictionaries")
    names = json.loads(spec["context"]) if (spec["type"] or "").endswith("dict") else None
    return names if isinstance(names, list) else [f"OUTPUT__{position}" for position in range(count)]


def _torch_tensor(name: str, value: Any) -> FileTensor:
    if value["dtype"] not in _TORCH_DATATYPES:
        raise ModelLoadFailed(
            f"'{name}' of the model has element type {value['dtype']}, which the protocol can't carry"
        )
    dims = tuple(size.get("as_int", -1) for size in value["sizes"])
    return FileTensor(name=name, datatype=_TORCH_DATATYPES[value["dtype"]], dims=dims)


def _first_size(value: Any) -> str:
    sizes = value["sizes"]
    return str(sizes[0].get("as_expr", {}).get("expr_str", "")) if sizes else ""


def _may_be_batch(expression: str, ranges: Any) -> bool:
    symbol = _SYMBOL.fullmatch(expression)
    if symbol is None:
        return False
    most = ranges.get(symbol[1], {}).get("max_val")
    return most is None or most >= _FEWEST_ROWS


def _told_by_script(archive: zipfile.ZipFile, paths: dict[str, str]) -> str:
    """Returns the arguments of `forward`; the pickle is not executed."""
    codes = pickletools.genops(_read_member(archive, paths["data.pkl"]))
    kind = next((str(argument) for code, argument, _ in codes if code.name == "GLOBAL"), "")
    module, _, name = kind.partition(" ")
    source = _read_member(archive, paths[f"code/{module.replace('.', '/')}.py"]).decode()
    found = _FORWARD.search(source, source.index(f"class {name}("))
    arguments = "" if found is None else " ".join(found["arguments"].split())
    return f"TorchScript declares neither datatypes nor shapes (its arguments: {arguments or 'unknown'})"
