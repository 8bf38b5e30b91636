"""Triton's files on this machine, and the model as its core gets it: a directory of links, and a configuration.

Owns the search for `libtritonserver.so` and for backends. Nothing of them is loaded here.
https://github.com/triton-inference-server/backend#how-can-i-develop-my-own-triton-backend
"""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from google.protobuf import text_format

from qinfer.errors import BackendUnavailable, ModelLoadFailed
from qinfer.models.config.message import ModelConfig, from_json, model_config_pb2
from qinfer.models.config.to_spec import PREFIX
from qinfer.models.spec import Device, ModelSpec

DIRECTORY = Path("/opt/tritonserver")
"""Triton's directory in NVIDIA's images."""

REMEDY = (
    "on Linux, x86-64, with glibc 2.35 or newer, run: pip install nvidia-pytriton==0.7.0; in NVIDIA's image, set "
    "QINFER_WORKER__TRITON_DIRECTORY if Triton is not in /opt/tritonserver"
)

_IDLE_MARGIN_US = 1_000_000
"""The time by which a sequence lives longer in the core, so that only qinfer ends sequences."""


class TritonFiles(NamedTuple):
    """The settings that say where Triton is; empty = the usual places."""

    directory: str = ""
    backends: str = ""

    def library(self) -> Path | None:
        """Returns `libtritonserver.so`, under whichever name."""
        return next((path.resolve() for root in self._roots() for path in _libraries(root) if path.is_file()), None)

    def backend_directories(self) -> list[Path]:
        """Returns the existing directories of backends; the core uses the first one."""
        named = [Path(self.backends)] if self.backends else [root / "backends" for root in self._roots()]
        return [path for path in named if path.is_dir()]

    def backends_there(self) -> Iterator[tuple[str, Path]]:
        """Yields the backends in the directory of backends, by name."""
        for directory in self.backend_directories()[:1]:
            for path in sorted(directory.iterdir()):
                if (found := _in_directory(path, path.name)) is not None:
                    yield path.name, found

    def _roots(self) -> list[Path]:
        if self.directory:
            return [Path(self.directory).resolve()]
        wheel = find_spec("pytriton")
        places: Sequence[str] = (wheel.submodule_search_locations if wheel is not None else None) or ()
        return [root for root in (DIRECTORY, *(Path(place) / "tritonserver" for place in places)) if root.is_dir()]


def _libraries(root: Path) -> Iterator[Path]:
    yield from (root / "lib" / "libtritonserver.so", root / "libtritonserver.so")
    # nvidia-pytriton: its library has a hash in its name.
    yield from sorted((root.parent.parent / "nvidia_pytriton.libs").glob("libtritonserver-*.so"))


def _in_directory(directory: Path, backend: str) -> Path | None:
    """Returns a backend's library, or the `model.py` of one written in Python."""
    files = (directory / f"libtriton_{backend}.so", directory / "model.py")
    return next((path for path in files if path.is_file()), None)


def find_backend(files: TritonFiles, backend: str, version_dir: Path) -> Path | None:
    """Returns a backend's library, as Triton searches it: in the version's, the model's and the backends' directory."""
    if "/" in backend or backend.startswith("."):
        return None
    name = f"libtriton_{backend}.so"
    beside = (path for directory in (version_dir, version_dir.parent) if (path := directory / name).is_file())
    shared = (_in_directory(directory / backend, backend) for directory in files.backend_directories()[:1])
    return next((path for path in (*beside, *shared) if path is not None), None)


class Placed(NamedTuple):
    """A model as the core gets it."""

    library: Path
    repository: Path
    backends: Path
    search_path: str


def place(files: TritonFiles, spec: ModelSpec, version_dir: Path, device: Device, cache: Path) -> Placed:
    """Makes a directory of links in `cache`, or finds it there: its name is a hash of its content."""
    library = files.library()
    if library is None:
        raise BackendUnavailable(
            f"backend '{spec.backend}' runs in Triton's core, and libtritonserver.so is not on this machine; {REMEDY}"
        )
    if spec.sequences is not None and spec.sequences.states:
        raise ModelLoadFailed(
            f"model '{spec.name}': backend '{spec.backend}' can't have implicit states ('state' of "
            "'sequence_batching') in qinfer; keep the state in the backend, by correlation ID"
        )
    version_dir = version_dir.absolute()
    beside = [path for path in version_dir.parent.iterdir() if path.name not in ("config.pbtxt", "configs")]
    model = [version_dir, *sorted(path for path in beside if not path.name.isdecimal())]
    config = text_format.MessageToString(core_config(from_json(spec.config_json), int(version_dir.name), device))
    texts = (str(library), spec.name, config, *map(str, model))
    root = cache / hashlib.sha256("\0".join(texts).encode()).hexdigest()
    own = root / "models" / spec.name
    # The dynamic linker finds the file under the name that backends need, and sees that it is loaded already.
    links = {root / "lib" / "libtritonserver.so": library} | {own / path.name: path for path in model}
    for directory in (root / "lib", own, root / "backends"):
        directory.mkdir(parents=True, exist_ok=True)
    for link, target in links.items():
        with suppress(FileExistsError):
            link.symlink_to(target)
    written = root / f"config.{os.getpid()}.{threading.get_ident()}"
    written.write_text(config)
    written.replace(own / "config.pbtxt")
    backends = next(iter(files.backend_directories()), root / "backends")
    return Placed(library, root / "models", backends, f"{root / 'lib'}{os.pathsep}{library.parent}")


def core_config(config: ModelConfig, version: int, device: Device) -> ModelConfig:
    """Returns a model's configuration for the core of one instance: queue, cache and warm-up are qinfer's.

    The core merges the requests that come together, which are one batch of qinfer's, and waits for no others. It keeps
    the sequences of its batcher, because that makes the control inputs.
    """
    made = ModelConfig()
    made.CopyFrom(config)
    for part in ("response_cache", "model_warmup", "model_repository_agents", "instance_group", "version_policy"):
        made.ClearField(part)
    made.version_policy.specific.versions.append(version)
    _set_instance(made, config, device)
    for port in (*made.input, *made.output):
        if port.HasField("reshape"):  # qinfer has done it
            port.dims[:] = port.reshape.shape
            port.ClearField("reshape")
    for name in [name for name in made.parameters if name.startswith(PREFIX)]:
        del made.parameters[name]
    if config.HasField("dynamic_batching"):
        made.ClearField("dynamic_batching")
        if config.max_batch_size > 1:
            made.dynamic_batching.max_queue_delay_microseconds = 0
    if config.HasField("sequence_batching"):
        batching = made.sequence_batching
        batching.max_sequence_idle_microseconds += _IDLE_MARGIN_US
        if batching.HasField("direct"):
            batching.direct.max_queue_delay_microseconds = 0
            batching.direct.minimum_slot_utilization = 0
        if batching.HasField("oldest"):
            batching.oldest.max_queue_delay_microseconds = 0
            del batching.oldest.preferred_batch_size[:]
    return made


def _set_instance(made: ModelConfig, config: ModelConfig, device: Device) -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    on_gpu = device.kind == "gpu"
    groups = [g for g in config.instance_group if not g.passive and (device.number in g.gpus if on_gpu else not g.gpus)]
    group = made.instance_group.add()
    if groups:
        group.CopyFrom(groups[0])
    group.ClearField("rate_limiter")
    group.count = 1
    group.kind = kinds.KIND_GPU if on_gpu else kinds.KIND_CPU
    group.gpus[:] = [device.number] if on_gpu else []
