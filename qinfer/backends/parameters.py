"""Parameters that all adapters read from a model's configuration in the same way: numbers, switches, file, cores."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from qinfer.errors import ModelLoadFailed
from qinfer.models.spec import ModelSpec

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


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


def cleaned(error: BaseException, path: Path | None = None) -> str:
    """Returns a runtime's own words without the path of the model file, which clients must not read."""
    text = str(error)
    if path is not None:
        text = text.replace(str(path), path.name).replace(str(path.parent), "")
    return text.strip()
