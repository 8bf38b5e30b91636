"""Settings and checks that adapters share."""

import fcntl
import functools
import hashlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from qinfer.backends.triton_host.library import TritonFiles
from qinfer.errors import BackendUnavailable, ModelLoadFailed
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.observe.host import MemoryUse

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_READ_BYTES = 1 << 20
_ENGINES = Path("~/.cache/qinfer/engines")
_ENVIRONMENTS = Path("~/.cache/qinfer/environments")


class EnvironmentStore(NamedTuple):
    """The directory of unpacked environments, and each one's limits."""

    directory: Path
    max_bytes: int = 8 * 2**30
    max_files: int = 200_000


_engine_cache: list[Path] = []
_environments: list[EnvironmentStore] = []
_model_variables: dict[str, str] = {}
_triton_files: list[TritonFiles] = []
_terminal: list[str] = []


def count(spec: ModelSpec, parameter: str, default: int = 0) -> int:
    """Reads a whole number from the parameters."""
    text = spec.parameters.get(parameter)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ModelLoadFailed(f"parameter '{parameter}' of model '{spec.name}' is '{text}'; it must be a number >= 0")
    return int(text)


def flag(spec: ModelSpec, parameter: str, *, default: bool = False) -> bool:
    """Reads a switch: true, 1, yes, false, 0 or no."""
    return choice(spec, parameter, _FLAGS, default)


def choice(spec: ModelSpec, parameter: str, values: Mapping[str, T], default: T) -> T:
    """Reads one of several words from the parameters."""
    text = spec.parameters.get(parameter)
    if text is None:
        return default
    if text.lower() not in values:
        raise ModelLoadFailed(
            f"parameter '{parameter}' of model '{spec.name}' is '{text}'; it must be one of {', '.join(values)}"
        )
    return values[text.lower()]


def cores_each(spec: ModelSpec) -> int:
    """Returns this process's cores per model instance."""
    return max(usable_cores() // max(spec.instance_count, 1), 1)


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Returns the cores of this process, by its container's limit in `cgroup` (v1 or v2).

    More threads would use up the limit in each period's first moments.
    """
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota_us, period_us = " ".join((cgroup / name).read_text() for name in names).split()
            return max(min(cores, math.ceil(int(quota_us) / int(period_us))), 1) if int(quota_us) > 0 else cores
        except (OSError, ValueError, ZeroDivisionError):  # missing, or `max`
            continue
    return cores


def model_file(spec: ModelSpec, version_dir: Path, *defaults: str) -> Path:
    """Returns the configured model file, or an existing default."""
    names = (spec.filename,) if spec.filename not in ("", *defaults) else (spec.filename or defaults[0], *defaults)
    for name in names:
        if (path := version_dir / name).exists():
            return path
    raise ModelLoadFailed(f"model '{spec.name}' has no file '{names[0]}' in version {version_dir.name}")


def compare(
    spec: ModelSpec, kind: str, tensor: TensorSpec, found: Mapping[str, tuple[str, Sequence[int] | None]]
) -> None:
    """Checks a configured tensor against the model file: -1 is a variable dimension, `None` an unknown rank."""
    if tensor.name not in found:
        raise ModelLoadFailed(
            f"unexpected inference {kind} '{tensor.name}' for model '{spec.name}', "
            f"allowed {kind}s are: {', '.join(sorted(found))}"
        )
    where = f"model '{spec.name}', {kind} '{tensor.name}': the model has"
    datatype, dims = found[tensor.name]
    if datatype != tensor.datatype:
        raise ModelLoadFailed(f"{where} {datatype}, its configuration {tensor.datatype}")
    if dims is None or (kind == "output" and tensor.ragged):  # cut by its elements
        return
    expected = list(tensor.file_shape(batched=spec.max_batch_size > 0))
    if len(dims) != len(expected) or any(d != e and -1 not in (d, e) for d, e in zip(dims, expected, strict=True)):
        raise ModelLoadFailed(f"{where} shape {list(dims)}, its configuration {expected}")


@functools.lru_cache(maxsize=4096)
def say_once(model: str, field: str, reason: str) -> None:
    """Logs once in this process that a field of a model's `optimization` has no effect."""
    logger.warning("optimization has no effect", extra={"model": model, "field": field, "reason": reason})


def content_digest(files: Path, *texts: str) -> str:
    """Returns a hash of texts, and of the names and contents of all files of a directory."""
    digest = hashlib.sha256("\0".join(texts).encode())
    for path in sorted(p for p in files.rglob("*") if p.is_file()):
        digest.update(b"\0" + str(path.relative_to(files)).encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def build_once(spec: ModelSpec, what: str, target: Path, module: str, job: bytes) -> None:
    """Has a program make a file of the engine cache from `job`, its standard input, unless the file is there.

    One process builds a file at a time. The last line of a failed program's output is the reason.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        logger.info("building for the cache", extra={"model": spec.name, "what": what, "file": str(target)})
        command = [sys.executable, "-m", module]
        done = subprocess.run(  # noqa: S603  our own interpreter and module
            command, input=job, stderr=subprocess.PIPE, env=model_variables(), check=False
        )
    if done.returncode or not target.exists():
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        logger.error("build failed", extra={"what": what, "model": spec.name, "output": "\n".join(lines[-50:])})
        raise ModelLoadFailed(
            f"the {what} of model '{spec.name}' can't be built: "
            f"{lines[-1] if lines else f'the build ended with exit code {done.returncode}'}"
        )


def write_built(build: Callable[[], bytes], source: str, target: str) -> int:
    """Writes what `build` makes of a file, in the program of `build_once`; returns the program's exit code."""
    try:
        content = build()
    except Exception as error:  # noqa: BLE001  the boundary of the process: the last line of its output is the reason
        sys.stderr.write(f"\n{cleaned(error, Path(source)).replace(os.sep, ' ')}\n")
        return 1
    temporary = Path(f"{target}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(target)
    return 0


def use_engine_cache(directory: Path) -> None:
    """Sets the directory of compiled engines, once."""
    _engine_cache[:] = [directory]


def engine_cache() -> Path:
    """Returns the directory of compiled engines."""
    return _engine_cache[0] if _engine_cache else _ENGINES.expanduser()


def use_environments(cache_dir: str, max_bytes: int, max_files: int) -> None:
    """Sets the store of environments; by default, the user's cache."""
    directory = Path(cache_dir) / "environments" if cache_dir else _ENVIRONMENTS.expanduser()
    _environments[:] = [EnvironmentStore(directory.absolute(), max_bytes, max_files)]


def environments() -> EnvironmentStore:
    """Returns the store of models' environments."""
    return _environments[0] if _environments else EnvironmentStore(_ENVIRONMENTS.expanduser())


def use_model_variables(environment: Mapping[str, str]) -> None:
    """Sets the environment of models' processes, once."""
    _model_variables.clear()
    _model_variables.update(environment)


def model_variables() -> Mapping[str, str]:
    """Returns the environment of models' processes."""
    return _model_variables


def use_terminal(path: str) -> None:
    """Sets the terminal of models' processes, once."""
    _terminal[:] = [path] if path else []


@contextmanager
def open_streams() -> Iterator[tuple[int, int, int]]:
    """Opens stdin, stdout and stderr for a model's process: one pipe, or the terminal and a pipe for log records.

    Raises `BackendUnavailable` if the terminal can't be opened.
    """
    if not _terminal:
        yield subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
        return
    try:
        descriptor = os.open(_terminal[0], os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        raise BackendUnavailable(f"the terminal {_terminal[0]} can't be opened: {error.strerror}") from None
    try:
        yield descriptor, descriptor, subprocess.PIPE
    finally:
        os.close(descriptor)


def use_triton_files(files: TritonFiles) -> None:
    """Sets where Triton is, once."""
    _triton_files[:] = [files]


def triton_files() -> TritonFiles:
    """Returns where Triton is; by default, in the usual places."""
    return _triton_files[0] if _triton_files else TritonFiles()


def files_use(path: Path, device: Device) -> tuple[MemoryUse, ...]:
    """Returns the size of a version's files, as the weights'."""
    files = [file for file in path.parent.rglob("*") if file.is_file()]
    return (MemoryUse(device.kind.upper(), device.number, sum(file.stat().st_size for file in files)),)


def cleaned(error: BaseException, path: Path | None = None) -> str:
    """Returns a runtime's message without the model's path."""
    text = str(error)
    if path is not None:
        text = text.replace(str(path), path.name).replace(str(path.parent), "")
    return text.strip()
