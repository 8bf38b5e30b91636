"""Checks of backends and GPUs. Each runtime is loaded in its own process, because it may crash."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from qinfer.backends.registry import ENTRY_POINT_GROUP
from qinfer.cli.checks.doctor import Finding, ok, problem, warning

_LIMIT_S = 90.0


class Runtime(NamedTuple):
    """A backend's runtime; `devices` is a Python expression."""

    module: str
    extra: str
    devices: str


RUNTIMES: Mapping[str, Runtime] = {
    "onnxruntime": Runtime(
        "onnxruntime",
        "onnx",
        "[p.removesuffix('ExecutionProvider') for p in onnxruntime.get_available_providers()]",
    ),
    "pytorch": Runtime(
        "torch", "torch", "['CPU', *(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))]"
    ),
    "tensorrt": Runtime("tensorrt", "tensorrt", "[]"),
    "openvino": Runtime("openvino", "openvino", "list(openvino.Core().available_devices)"),
}


class LoadedRuntime(NamedTuple):
    """The devices of a loaded runtime, or an error."""

    devices: tuple[str, ...]
    error: str = ""


def examine_backends(needed: Mapping[str, str], *, load: bool) -> Iterator[Finding]:
    """Yields a finding for each backend.

    `needed` maps backends to models that need them. Without `load`, only packages are searched.
    """
    installed = {name: runtime for name, runtime in RUNTIMES.items() if find_spec(runtime.module) is not None}
    with ThreadPoolExecutor(2, thread_name_prefix="runtimes") as threads:
        loaded = dict(zip(installed, threads.map(load_runtime, installed.values()), strict=True)) if load else {}
    packages = packages_distributions()
    for name, runtime in RUNTIMES.items():
        if name not in installed:
            yield _absent(name, runtime, needed.get(name, ""))
            continue
        text = " ".join([runtime.module, *map(version, packages.get(runtime.module, [])[:1])])
        if error := loaded.get(name, LoadedRuntime(())).error:
            remedy = f"reinstall it: pip install --force-reinstall 'qinfer-ml[{runtime.extra}]'"
            yield problem(f"backend {name}", f"{text} is installed and can't be loaded: {error}", remedy)
        else:
            devices = ", ".join(loaded[name].devices) if name in loaded else ""
            yield ok(f"backend {name}", f"{text}; {devices}" if devices else text)
    yield ok("backend python", f"Python {sys.version.split()[0]}, in processes of its own")
    for name in sorted(entry_points(group=ENTRY_POINT_GROUP).names):
        yield ok(f"backend {name}", "of another package")
    if not installed:
        yield warning(
            "backends",
            "no runtime is installed: a worker here runs python models only",
            "pip install 'qinfer-ml[onnx]'",
        )


def load_runtime(runtime: Runtime) -> LoadedRuntime:
    """Loads a runtime in its own process; blocking, for seconds."""
    code = f"import json, {runtime.module}; print(); print(json.dumps({runtime.devices}))"
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and words
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return LoadedRuntime((), f"loading takes more than {_LIMIT_S:g} s")
    if done.returncode < 0:
        return LoadedRuntime((), f"it crashes (signal {-done.returncode})")
    if done.returncode:
        return LoadedRuntime((), (done.stderr.strip().splitlines() or ["unknown"])[-1])
    return LoadedRuntime(tuple(map(str, json.loads(done.stdout.strip().splitlines()[-1]))))


def examine_gpus(dev: Path = Path("/dev")) -> Iterator[Finding]:
    """Yields a finding for each NVIDIA GPU, by the driver's own program."""
    here = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if not here:
        yield ok("GPU", "none")
        return
    fields = "name,driver_version,memory.used,memory.total"
    try:
        asked = subprocess.run(  # noqa: S603 - constants
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],  # noqa: S607
            capture_output=True, text=True, timeout=_LIMIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        yield problem("GPU", f"{', '.join(here)}; nvidia-smi does not answer", "install NVIDIA's driver")
        return
    for number, line in enumerate(asked.stdout.strip().splitlines()):
        name, driver, used, total = (*line.split(", "), *[""] * 4)[:4]
        yield ok(f"GPU {number}", f"{name}, driver {driver}, {used} of {total} used")
    if find_spec("pynvml") is None:
        yield warning("GPU", "there are no metrics of it", "pip install 'qinfer-ml[gpu]'")


def _absent(name: str, runtime: Runtime, model: str) -> Finding:
    remedy = f"pip install 'qinfer-ml[{runtime.extra}]'"
    if model:
        text = f"not installed here, and model '{model}' needs it where workers run"
        return warning(f"backend {name}", text, remedy)
    return ok(f"backend {name}", "not installed")
