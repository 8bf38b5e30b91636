"""The models of apps as a model repository: a configuration for each, and a `model.py` that names app and object."""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from google.protobuf import text_format

from qinfer.errors import ModelLoadFailed
from qinfer.functions.app import sources_of
from qinfer.functions.examine import Declared, examine
from qinfer.models.config.message import ModelConfig
from qinfer.models.config.to_spec import BASE64, DEFAULT_TIMEOUT, SPLIT
from qinfer.tensors import DATATYPES

_MODEL = '''"""Runs a model of an app; generated. The SHA-256 of its sources is {digest}."""

from qinfer.functions.hosted import serves

TritonPythonModel = serves({path!r}, {name!r}, __file__)
'''


def configuration(declared: Declared) -> ModelConfig:
    """Returns the configuration that the hints and options of a function say."""
    options, signature = declared.options, declared.signature
    config = ModelConfig(name=options.name, backend="python")
    for of, given in ((config.input, signature.inputs), (config.output, signature.outputs)):
        for port in given:
            added = of.add(name=port.name, dims=port.dims, data_type=DATATYPES[port.datatype].config)
            if port.optional:
                added.optional = True
    config.instance_group.add(count=options.instances)
    if signature.is_decoupled:
        config.model_transaction_policy.decoupled = True
    else:
        config.max_batch_size = options.max_batch_size
        if signature.has_state:
            config.sequence_batching.oldest.SetInParent()  # `direct` would call the function for rows of no request
            config.sequence_batching.max_sequence_idle_microseconds = round(options.idle_s * 1e6)
        else:
            config.parameters[SPLIT].string_value = "true"
            config.dynamic_batching.max_queue_delay_microseconds = round(options.max_delay_ms * 1000)
    binary = [port.name for port in (*signature.inputs, *signature.outputs) if port.kind in ("bytes", "image")]
    if binary:
        config.parameters[BASE64].string_value = ",".join(dict.fromkeys(binary))
    if options.timeout_s:
        config.parameters[DEFAULT_TIMEOUT].string_value = f"{options.timeout_s:g}"
    return config


def write_repository(
    apps: Iterable[str], root: Path, environment: Mapping[str, str], *, is_dev: bool = False
) -> Sequence[Declared]:
    """Makes `root` the repository of the models of apps, and returns them; unchanged files are not touched.

    For a developer, each model has one instance and no timeout. Raises `ModelLoadFailed`.
    """
    declared = [model for app in apps for model in examine(app, environment)]
    named: dict[str, Declared] = {}
    for model in declared:
        name = model.options.name
        if (other := named.setdefault(name, model)) is not model:
            places = f"{other.path}:{other.name} and {model.path}:{model.name}"
            raise ModelLoadFailed(f"two models of apps are named '{name}', {places}; name one by @qinfer.model(name=…)")
    root.mkdir(parents=True, exist_ok=True)
    for old in root.iterdir():
        if old.name not in named:
            shutil.rmtree(old, ignore_errors=True)
    for name, model in named.items():
        options = replace(model.options, instances=1, timeout_s=0.0) if is_dev else model.options
        write_model(msgspec.structs.replace(model, options=options), root / name)
    return declared


def build_repository(app: str, root: Path, environment: Mapping[str, str]) -> Sequence[Declared]:
    """Adds the models of an app, with copies of its sources, to a repository; Triton's Python backend loads it, too.

    Raises `ModelLoadFailed`.
    """
    declared = examine(app, environment)
    for model in declared:
        name, file = model.options.name, root / model.options.name / "1" / "model.py"
        if halves := [p.name for p in (*model.signature.inputs, *model.signature.outputs) if p.datatype == "BF16"]:
            why = f"'{halves[0]}' is BF16, of which Triton's Python backend makes no arrays; write FP32"
            raise ModelLoadFailed(f"model '{name}' can't be built: {why}")
        if (root / name).exists() and not (file.is_file() and file.read_text().startswith(_MODEL.partition("{")[0])):
            raise ModelLoadFailed(f"{root / name} is there, and no model that was built; remove it, or rename '{name}'")
    for model in declared:
        path, version = Path(model.path), root / model.options.name / "1"
        copies = version / "app" / path.name
        shutil.rmtree(copies.parent, ignore_errors=True)
        for source in sources_of(path):
            copy = copies / source.relative_to(path) if path.is_dir() else copies.parent / source.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
        write_model(msgspec.structs.replace(model, path=str(copies)), version.parent, f"app/{path.name}")
    return declared


def write_model(declared: Declared, directory: Path, shown: str = "") -> None:
    """Writes a model's directory; `shown` is the app's path from the version on."""
    digest = hashlib.sha256()
    for source in sources_of(Path(declared.path)):
        digest.update(b"%d\n%b" % (source.stat().st_size, source.read_bytes()))
    model = _MODEL.format(name=declared.name, digest=digest.hexdigest(), path=shown or declared.path)
    _write(directory / "config.pbtxt", text_format.MessageToString(configuration(declared)))
    _write(directory / "1" / "model.py", model)


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    os.replace(draft, path)


def main(root: str, *apps: str) -> int:
    """Writes the repository of `qinfer dev` again; an error goes to stdout."""
    try:
        write_repository(apps, Path(root), os.environ, is_dev=True)
    except ModelLoadFailed as error:
        sys.stdout.write(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
