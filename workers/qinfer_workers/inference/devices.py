"""The devices of a worker, and of a model's instances."""

import re
from collections.abc import Collection
from pathlib import Path

from qinfer.errors import ModelLoadFailed
from qinfer.models.spec import Device, InstanceSpec, ModelSpec

_GPU = re.compile(r"nvidia\d+")


def gpus_here(allowed: tuple[int, ...] | None, visible: str | None, dev: Path = Path("/dev")) -> tuple[int, ...]:
    """Returns this worker's GPUs by CUDA's numbers: `allowed`, or those `visible` to CUDA, or all."""
    if allowed is not None:
        return tuple(sorted(set(allowed)))
    if visible is not None:
        listed = [part.strip() for part in visible.split(",")]
        return tuple(range(next((n for n, part in enumerate(listed) if part in ("", "-1")), len(listed))))
    if not dev.is_dir():
        return ()
    return tuple(range(sum(_GPU.fullmatch(entry.name) is not None for entry in dev.iterdir())))


def known_as(gpus: Collection[int], visible: str | None) -> dict[int, str]:
    """Returns CUDA's number → NVML id (index or UUID)."""
    listed = [part.strip() for part in visible.split(",")] if visible else []
    return {number: listed[number] if number < len(listed) else str(number) for number in gpus}


def named(gpus: Collection[int]) -> str:
    """Returns the devices as the heartbeat lists them: `cpu, gpu 0, gpu 1`."""
    return ", ".join(["cpu", *(f"gpu {number}" for number in gpus)])


def groups_of(spec: ModelSpec, gpus: Collection[int]) -> list[InstanceSpec]:
    """Returns the instance groups on devices of this worker."""
    return [group for group in spec.instances if group.device.kind == "cpu" or group.device.number in gpus]


def devices_of(spec: ModelSpec, gpus: Collection[int]) -> tuple[Device, ...]:
    """Returns the device of each instance of this worker."""
    devices = tuple(group.device for group in groups_of(spec, gpus) for _ in range(group.count))
    if not devices:
        numbers = sorted({group.device.number for group in spec.instances})
        needs = f"GPU {' or '.join(map(str, numbers))}" if numbers else "an instance group that is not passive"
        has = ", ".join(f"GPU {number}" for number in sorted(gpus)) or "no GPU"
        raise ModelLoadFailed(f"model '{spec.name}' needs {needs}; this worker has {has}")
    return devices
