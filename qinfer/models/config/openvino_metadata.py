"""Reads the inputs and outputs of an OpenVINO IR (`model.xml`, versions 10 and 11), without the runtime.

Inputs are the layers of type Parameter, outputs those of type Result; a Result's tensor has its name from the port that
an edge leads from (docs.openvino.ai, "OpenVINO IR format"). Of several names of a tensor the first in the alphabet
counts, as for `get_any_name`.
"""

import re
from typing import NamedTuple
from xml.parsers import expat

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.file_tensors import FileTensor, FileTensors

MAX_BYTES = 256 * 2**20

_DATATYPES = {
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


class _Reader:
    """Collects layers, ports and edges; the graphs of loop bodies, which lie deeper, are passed over."""

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[str, str]] = {}  # layer → name, shape
        self.outputs: dict[str, str] = {}  # layer → name
        self.names: dict[str, str] = {}
        self.ports: dict[tuple[str, str], _Port] = {}
        self.edges: dict[str, tuple[str, str]] = {}  # layer that an edge leads to → layer and port it comes from
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
                self.inputs[self._layer] = (attributes.get("name", ""), "")
            elif attributes["type"] == "Result":
                self.outputs[self._layer] = attributes.get("name", "")
        elif path[:3] == _PATH_OF_LAYER and path[3:] == ["data"] and self._layer in self.inputs:
            self.inputs[self._layer] = (self.inputs[self._layer][0], attributes.get("shape", ""))
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
    """Reads the declared inputs and outputs of an IR.

    Args:
        content: The text of `model.xml`.
        name: The file's name, for messages.

    Raises:
        ModelLoadFailed: It is no IR, or has an input or output of an element type that the protocol can't carry.
    """
    reader = _Reader()
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
            inputs=tuple(_input(reader, layer) for layer in reader.inputs),
            outputs=tuple(_output(reader, layer) for layer in reader.outputs),
        )
    except (expat.ExpatError, KeyError, ValueError):
        raise ModelLoadFailed(f"'{name}' can't be read: it is not an OpenVINO IR of version 10 or 11") from None


def _refuse_doctype(*_: object) -> None:
    """An IR has no document type; one that has may define entities that grow without bound."""
    raise ValueError("document type")


def _input(reader: _Reader, layer: str) -> FileTensor:
    name, shape = reader.inputs[layer]
    port = next((port for (of, _), port in reader.ports.items() if of == layer), None)
    if port is None:
        raise ValueError("a parameter without a port")
    dims = None if shape == _UNKNOWN_RANK else tuple(port.dims)
    return _tensor(_any_name(port.names) or name, port, dims)


def _output(reader: _Reader, layer: str) -> FileTensor:
    """Reads a Result; one without dimensions is a scalar or of unknown rank, which the file does not tell apart."""
    producer, number = reader.edges[layer]
    port = reader.ports[producer, number]
    return _tensor(_any_name(port.names) or reader.names[producer], port, tuple(port.dims) or None)


def _tensor(name: str, port: _Port, dims: tuple[int, ...] | None) -> FileTensor:
    if port.precision.upper() not in _DATATYPES:
        raise ModelLoadFailed(
            f"'{name}' of the OpenVINO model has element type '{port.precision}', which the protocol can't carry"
        )
    return FileTensor(name=name, datatype=_DATATYPES[port.precision.upper()], dims=dims)


def _any_name(names: str) -> str:
    return min((name.replace("\\,", ",") for name in _NAME_SEPARATOR.split(names)), default="")
