"""Inputs and outputs that a PyTorch file declares, read without PyTorch (ADR 0004).

`model.pt2` of `torch.export.save` is an archive with the program as JSON. Inputs have the names of `forward`'s
arguments, outputs those of the returned dictionary, or Triton's `OUTPUT__<position>`. Numbers and names are from
torch/_export/serde/schema.py. TorchScript and AOTInductor files declare neither datatypes nor shapes.
"""

import io
import json
import pickletools
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.repository.files import Blob

_MAX_BYTES = 64 * 2**20
_FEWEST_ROWS = 4
_DATATYPES = {
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
    if member.file_size > _MAX_BYTES or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
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
    rows = {_first(values[name]) for name in (*inputs, *outputs)}
    return FileTensors(
        inputs=tuple(_file_tensor(name, values[value]) for name, value in zip(names, inputs, strict=True)),
        outputs=tuple(_file_tensor(name, values[value]) for name, value in zip(returned, outputs, strict=True)),
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


def _file_tensor(name: str, value: Any) -> FileTensor:
    if value["dtype"] not in _DATATYPES:
        raise ModelLoadFailed(
            f"'{name}' of the model has element type {value['dtype']}, which the protocol can't carry"
        )
    dims = tuple(size.get("as_int", -1) for size in value["sizes"])
    return FileTensor(name=name, datatype=_DATATYPES[value["dtype"]], dims=dims)


def _first(value: Any) -> str:
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
