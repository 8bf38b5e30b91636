"""Opens PyTorch's model files without unpickling objects: TorchScript, exported programs, AOTInductor packages.

`model.pt` is a TorchScript archive, whose objects are only those of the TorchScript language. `model.pt2` is an archive
of `torch.export.save` (a graph as JSON, weights as raw bytes) or of AOTInductor (compiled code). Such an archive may
hold pickled objects too; it is refused then, before anything of it is loaded.

None of these formats is safe against its author: a model file is a program.
"""

import inspect
import io
import json
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.export
from torch.export.passes import move_to_device_pass

from qinfer.errors import ModelLoadFailed

_deprecations = threading.Lock()  # changing warning filters is not safe in threads


class Opened(NamedTuple):
    """A model file, ready to be called.

    Attributes:
        call: Takes the input tensors, returns what the model returns.
        arguments: The names of `forward`'s arguments, in order; empty when the file does not tell.
        takes_dict: The only argument is a dictionary of tensors by name.
        kind: `torchscript`, `export` or `aoti`.
    """

    call: Callable[..., Any]
    arguments: tuple[str, ...]
    takes_dict: bool
    kind: str


def open_model(path: Path, device: torch.device) -> Opened:
    """Opens a model file on a device; blocking.

    Raises:
        ModelLoadFailed: It is none of the formats, holds pickled objects, or was compiled for another kind of device.
        Exception: What PyTorch raises when it can't read it.
    """
    if not zipfile.is_zipfile(path):
        raise ModelLoadFailed(
            f"'{path.name}' is not a PyTorch archive; save the model with torch.export.save or torch.jit.save"
        )
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if "constants.pkl" in names:
            return _torchscript(path, device)
        if any(name.startswith("data/aotinductor/") for name in names):
            refuse_pickle(archive, names)
            return _aoti(path, device)
        if any(name.startswith("models/") for name in names):
            refuse_pickle(archive, names)
            return _exported(path, device)
        if "data.pkl" in names:
            raise ModelLoadFailed(
                f"'{path.name}' is a pickled module or state dict, which is never loaded, because a pickle may run any "
                "code; save the model with torch.export.save or torch.jit.save"
            )
    raise ModelLoadFailed(f"'{path.name}' is of a format of PyTorch that is not known here; save the model anew")


def refuse_pickle(archive: zipfile.ZipFile, names: dict[str, str]) -> None:
    """Refuses an archive of `torch.export` with objects that only a full unpickling can read.

    Args:
        archive: The file.
        names: Path within the archive → the same with the archive's own first directory.

    Raises:
        ModelLoadFailed: It holds such objects; the message names the first.
    """
    for name, full in names.items():
        if name.endswith(("_weights_config.json", "_constants_config.json")):
            for tensor, entry in json.loads(archive.read(full)).get("config", {}).items():
                if entry.get("use_pickle") or "custom_obj" in str(entry.get("path_name", "")):
                    raise ModelLoadFailed(f"the model holds '{tensor}' as a pickled object, which is never loaded")
        elif name.startswith("data/sample_inputs/") and (raw := archive.read(full)):
            try:
                torch.load(io.BytesIO(raw), weights_only=True)
            except Exception as error:
                raise ModelLoadFailed(
                    "the model's sample inputs hold pickled objects, which are never loaded; export it with tensors"
                ) from error


def _torchscript(path: Path, device: torch.device) -> Opened:
    with _deprecations, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in favour of torch.export; the format goes on being read
        module = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]  # it is not annotated
    module.eval()
    arguments = module.forward.schema.arguments[1:]
    takes_dict = len(arguments) == 1 and arguments[0].type.kind() == "DictType"
    return Opened(module, tuple(a.name for a in arguments), takes_dict, "torchscript")


def _exported(path: Path, device: torch.device) -> Opened:
    program = torch.export.load(path)
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    module = program.module()
    return Opened(module, tuple(inspect.signature(module.forward).parameters), False, "export")


def _aoti(path: Path, device: torch.device) -> Opened:
    index = -1 if device.type == "cpu" else device.index or 0
    loaded = torch._inductor.aoti_load_package(str(path), device_index=index)  # the documented way, for all its name
    compiled_for = loaded.get_metadata().get("AOTI_DEVICE_KEY", device.type)
    if compiled_for != device.type:
        raise ModelLoadFailed(
            f"'{path.name}' was compiled for {compiled_for}, but its instance group is on {device.type}; "
            "compile it for that, or set the group's kind"
        )
    return Opened(loaded, (), False, "aoti")
