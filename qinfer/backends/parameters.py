"""A model as all adapters read and check it: numbers, switches, file, tensors, cores, engine cache, environments."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from qinfer.errors import ModelLoadFailed
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.observe.host import MemoryUse

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_ENGINES = Path("~/.cache/qinfer/engines")
_ENVIRONMENTS = Path("~/.cache/qinfer/environments")


class EnvironmentStore(NamedTuple):
    """Where environments of models are unpacked, and how large each may be."""

    directory: Path
    max_bytes: int = 8 * 2**30
    max_files: int = 200_000


_engine_cache: list[Path] = []
_environments: list[EnvironmentStore] = []
_model_variables: dict[str, str] = {}


def count(spec: ModelSpec, parameter: str, default: int = 0) -> int:
    """Reads a whole number of 0 or more from the parameters.

    Raises:
        ModelLoadFailed: The parameter is no such number.
    """
    text = spec.parameters.get(parameter)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ModelLoadFailed(f"parameter '{parameter}' of model '{spec.name}' is '{text}'; it must be a number >= 0")
    return int(text)


def flag(spec: ModelSpec, parameter: str, *, default: bool = False) -> bool:
    """Reads a switch from the parameters: true, 1, yes, false, 0 or no.

    Raises:
        ModelLoadFailed: The parameter is none of them.
    """
    return choice(spec, parameter, _FLAGS, default)


def choice(spec: ModelSpec, parameter: str, values: Mapping[str, T], default: T) -> T:
    """Reads one of several words, whose case does not matter, from the parameters.

    Args:
        spec: The model's configuration.
        parameter: The parameter's name.
        values: Lower-case word → what it means.
        default: The meaning of a parameter that is not there.

    Raises:
        ModelLoadFailed: The parameter is none of the words.
    """
    text = spec.parameters.get(parameter)
    if text is None:
        return default
    if text.lower() not in values:
        raise ModelLoadFailed(
            f"parameter '{parameter}' of model '{spec.name}' is '{text}'; it must be one of {', '.join(values)}"
        )
    return values[text.lower()]


def cores_each(spec: ModelSpec) -> int:
    """Returns this process's cores divided among the model's instances, which all compute at once; at least 1."""
    return max(usable_cores() // max(spec.instance_count, 1), 1)


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Returns how many cores this process may use at once: a container sees all, and its limit often allows fewer.

    With a thread for each core of the machine, the limit would be used up in the first moments of each period.

    Args:
        cgroup: Where the kernel tells the limit: `cpu.max`, or the files of cgroup v1.
    """
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota_us, period_us = " ".join((cgroup / name).read_text() for name in names).split()
            return max(min(cores, math.ceil(int(quota_us) / int(period_us))), 1) if int(quota_us) > 0 else cores
        except (OSError, ValueError, ZeroDivisionError):  # not there, or without a limit: `max`
            continue
    return cores


def model_file(spec: ModelSpec, version_dir: Path, *defaults: str) -> Path:
    """Returns the model file of a version: the configured one, or, if that is a default, the first that is there.

    Raises:
        ModelLoadFailed: There is none.
    """
    names = (spec.filename,) if spec.filename not in ("", *defaults) else (spec.filename or defaults[0], *defaults)
    for name in names:
        if (path := version_dir / name).exists():
            return path
    raise ModelLoadFailed(f"model '{spec.name}' has no file '{names[0]}' in version {version_dir.name}")


def compare(
    spec: ModelSpec, kind: str, tensor: TensorSpec, found: Mapping[str, tuple[str, Sequence[int] | None]]
) -> None:
    """Checks that a configured tensor exists in the model, of the same datatype and with compatible dimensions.

    Args:
        spec: The model's configuration.
        kind: `input` or `output`.
        tensor: The configured tensor.
        found: Name → datatype and dimensions of the model's tensors of that kind, -1 where one is variable; `None`
            where even their number is unknown.

    Raises:
        ModelLoadFailed: It does not, or has others.
    """
    if tensor.name not in found:
        raise ModelLoadFailed(
            f"unexpected inference {kind} '{tensor.name}' for model '{spec.name}', "
            f"allowed {kind}s are: {', '.join(sorted(found))}"
        )
    where = f"model '{spec.name}', {kind} '{tensor.name}': the model has"
    datatype, dims = found[tensor.name]
    if datatype != tensor.datatype:
        raise ModelLoadFailed(f"{where} {datatype}, its configuration {tensor.datatype}")
    if dims is None or (kind == "output" and tensor.ragged):  # which is cut by its elements, whatever its shape
        return
    expected = list(tensor.file_shape(batched=spec.max_batch_size > 0))
    if len(dims) != len(expected) or any(d != e and -1 not in (d, e) for d, e in zip(dims, expected, strict=True)):
        raise ModelLoadFailed(f"{where} shape {list(dims)}, its configuration {expected}")


def use_engine_cache(directory: Path) -> None:
    """Sets the directory of compiled engines of this process; called once, by the program that composes it."""
    _engine_cache[:] = [directory]


def engine_cache() -> Path:
    """Returns where compiled engines are kept between starts: a build takes minutes, and fits one GPU and version only.

    The directory need not exist: the one that was set, else one of the user's cache.
    """
    return _engine_cache[0] if _engine_cache else _ENGINES.expanduser()


def use_environments(cache_dir: str, max_bytes: int, max_files: int) -> None:
    """Sets where this process's models have their environments; called once, by the program that composes it.

    Args:
        cache_dir: The directory of all that this machine may lose; empty = the user's cache.
        max_bytes: Bytes of an environment.
        max_files: Files, directories and links of an environment.
    """
    directory = Path(cache_dir) / "environments" if cache_dir else _ENVIRONMENTS.expanduser()
    _environments[:] = [EnvironmentStore(directory.absolute(), max_bytes, max_files)]


def environments() -> EnvironmentStore:
    """Returns where environments of models are unpacked: as it was set, else in the user's cache."""
    return _environments[0] if _environments else EnvironmentStore(_ENVIRONMENTS.expanduser())


def use_model_variables(environment: Mapping[str, str]) -> None:
    """Sets the environment of models' processes; called once, by the program that composes this process.

    Args:
        environment: What `qinfer.core.environments.model_environment` returns.
    """
    _model_variables.clear()
    _model_variables.update(environment)


def model_variables() -> Mapping[str, str]:
    """Returns the environment of a process that runs a model's code or compiles a model; empty until it was set."""
    return _model_variables


def files_use(path: Path, device: Device) -> tuple[MemoryUse, ...]:
    """Returns the memory that a model's weights take: as much as the files of its version, where nothing else tells.

    Args:
        path: The model's file; what is beside it belongs to it.
        device: Where the weights are.
    """
    files = [file for file in path.parent.rglob("*") if file.is_file()]
    return (MemoryUse(device.kind.upper(), device.number, sum(file.stat().st_size for file in files)),)


def cleaned(error: BaseException, path: Path | None = None) -> str:
    """Returns a runtime's own words without the path of the model file, which clients must not read."""
    text = str(error)
    if path is not None:
        text = text.replace(str(path), path.name).replace(str(path.parent), "")
    return text.strip()
