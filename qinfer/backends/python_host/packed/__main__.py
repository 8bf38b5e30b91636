"""Prepares a model's own environment in the model's process, and continues as the environment's Python.

`python -m qinfer.backends.python_host.packed <environment> <directory> <bytes> <files> <descriptors…> <parent>`

Args:
    environment: The archive, or a directory that is used unchanged.
    directory: The directory of unpacked archives.
    bytes, files: The limits of an archive.
    descriptors, parent: As in `qinfer.backends.python_host`.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from qinfer.backends.python_host.channel import Channel
from qinfer.backends.python_host.messages import EnvironmentReady, HostFailure
from qinfer.backends.python_host.packed import start
from qinfer.backends.python_host.packed.archive import ArchiveBounds
from qinfer.backends.python_host.packed.environments import Environments, with_libraries
from qinfer.errors import ModelLoadFailed

OLDEST = (3, 11)
"""The oldest Python that runs qinfer."""

OLDEST_MSGSPEC = (0, 20)
"""The oldest msgspec for it, as in pyproject.toml."""

PROBE_S = 120.0
"""Limits activating an environment, and starting its Python."""

_QINFER = Path(start.__file__).parents[3]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_PROBE = """
import importlib.util, json, sys, sysconfig
found = {}
for name in ("numpy", "msgspec"):
    if importlib.util.find_spec(name) is not None:
        try:
            from importlib.metadata import version
            found[name] = version(name)
        except ImportError:  # which a missing package's metadata raises, too
            found[name] = ""
print()
print(json.dumps([sys.version_info[:2], sysconfig.get_config_var("SOABI") or "", found]))
"""
"""Runs in any Python 3."""

_SHELLS = ("PWD", "OLDPWD", "SHLVL", "_")
"""The shell's own variables."""

_OTHERS = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX", "PS1")


class Interpreter(NamedTuple):
    """An environment's Python: version, ABI of extensions, and needed packages."""

    version: tuple[int, int]
    abi: str
    packages: dict[str, str]


def main(arguments: Sequence[str]) -> int:
    """Becomes the model's process; returns a status only on failure."""
    environment, directory, max_bytes, max_files, *descriptors, parent = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    channel = Channel(socket.socket(fileno=int(descriptors[0])))
    variables = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    variables["PYTHONNOUSERSITE"] = "1"
    try:
        store = Environments(Path(directory), ArchiveBounds(int(max_bytes), int(max_files)))
        archive = Path(environment)
        root = archive if archive.is_dir() else store.unpacked(archive, variables)
        variables = activated(root, variables)
        entered = with_libraries(root, variables)
        found = probed(root, entered)
        first = store.lend(_QINFER)
        last = str(store.lend(Path(msgspec.__path__[0]))) if lends(found) else ""
    except (ModelLoadFailed, OSError) as error:
        text = error.message if isinstance(error, ModelLoadFailed) else f"its environment: {error.strerror}"
        channel.send(HostFailure(text))
        with suppress(OSError, EOFError):
            channel.receive()  # the worker then ends this process
        return 1
    channel.send(EnvironmentReady())
    arguments = [variables.get("LD_LIBRARY_PATH", ""), str(first), last, *descriptors, parent]
    return _entered(str(root / "bin" / "python"), arguments, entered)


def activated(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables after an environment's `bin/activate`."""
    found, script = dict(variables), root / "bin" / "activate"
    if script.exists():  # as Triton does: conda's scripts set variables
        command = ["bash", "-c", '. "$0" >&2 && exec env -0', str(script)]
        try:
            ran = _ran(command, variables, root)
        except FileNotFoundError:
            raise ModelLoadFailed("its environment has a bin/activate, and there is no bash here to run it") from None
        except (subprocess.SubprocessError, OSError) as error:
            raise ModelLoadFailed(
                f"bin/activate of its environment failed ({type(error).__name__}); the worker's log says why"
            ) from None
        pairs = [entry.partition("=") for entry in os.fsdecode(ran).split("\0") if entry]
        found = {name: value for name, _, value in pairs if name not in _SHELLS or name in variables}
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if name in found:  # a venv records its place
                found[name] = str(root)
    found["PATH"] = ":".join(filter(None, (str(root / "bin"), found.get("PATH", ""))))
    return found


def probed(root: Path, variables: Mapping[str, str]) -> Interpreter:
    """Returns an environment's Python."""
    python = root / "bin" / "python"
    if not python.exists():
        raise ModelLoadFailed("its environment has no bin/python; pack a whole environment, from its root")
    try:
        ran = _ran([str(python), "-B", "-s", "-c", _PROBE], variables, root)
        version, abi, packages = json.loads(ran.splitlines()[-1])
    except PermissionError:
        raise ModelLoadFailed(
            "bin/python of its environment may not be executed: an object store keeps no permissions (use an archive, "
            ".tar.gz, there), and QINFER_REPOSITORY__CACHE_DIR must not be mounted noexec"
        ) from None
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        raise ModelLoadFailed(
            f"the Python of its environment does not run here ({type(error).__name__}); the worker's log says why"
        ) from None
    return Interpreter((version[0], version[1]), abi, packages)


def lends(found: Interpreter) -> bool:
    """Returns whether an environment needs the worker's msgspec."""
    theirs, ours = ("Python " + ".".join(map(str, version)) for version in (found.version, sys.version_info[:2]))
    if found.version < OLDEST:
        raise ModelLoadFailed(
            f"its environment has {theirs}, and models need Python 3.11 or newer; pack it again, preferably with "
            f"the worker's {ours}"
        )
    if "numpy" not in found.packages:
        raise ModelLoadFailed("its environment has no numpy, which each model needs; add it and pack it again")
    if "msgspec" in found.packages:
        release = tuple(int(part) for part in found.packages["msgspec"].split(".")[:2] if part.isdecimal())
        if release and release < OLDEST_MSGSPEC:
            raise ModelLoadFailed(
                f"its environment has msgspec {found.packages['msgspec']}, and models need "
                f"{'.'.join(map(str, OLDEST_MSGSPEC))} or newer; update it there, and pack it again"
            )
        return False
    if found.abi != sysconfig.get_config_var("SOABI"):
        raise ModelLoadFailed(
            f"its environment has {theirs} and no msgspec, and the worker's, for {ours}, does not fit; add msgspec to "
            f"it, or pack it again with {ours}"
        )
    return True


def _entered(python: str, arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    os.execve(python, [python, "-P", "-B", "-u", "-s", start.__file__, *arguments], variables)  # noqa: S606


def _ran(command: Sequence[str], variables: Mapping[str, str], root: Path) -> bytes:
    ran = subprocess.run(  # noqa: S603  the model's own
        command, env=variables, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=PROBE_S, check=True
    )
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
