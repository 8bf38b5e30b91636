"""A model's own environment (`EXECUTION_ENV_PATH`): unpacked, activated, and entered by the model's process.

`python -m qinfer.backends.python_host.packed <environment> <directory> <bytes> <files> <descriptors…> <parent>`

Args:
    environment: The archive, or a directory that is used unchanged.
    directory: The directory of unpacked archives.
    bytes, files: The limits of an archive.
    descriptors, parent: As in `qinfer.backends.python_host`.

The process replaces itself by the environment's Python (`exec`), which runs `start.py`. The worker receives
`EnvironmentReady` or `HostFailure`. All workers of a machine share the unpacked environments:

    <directory>/<hash of the archive>/env/…     the environment
    <directory>/<hash of the archive>/ready     its bytes; made last: without it, the environment is incomplete
    <directory>/known/<hash of a stamp>         the hash of an archive with this stamp, which need not be read again
    <directory>/lent/<hash>/<package>           a link to a package of the worker

Processes hold a shared lock on their environment. One process at a time unpacks and removes; if it is killed, the next
process removes the incomplete environment.

Early Pythons 3.11 lack `tarfile`'s filter `data`, and a later link can redirect a checked one; here links are made
last, when every link was found to lead inside.
"""

import ctypes
import errno
import fcntl
import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from qinfer.backends.python_host.channel import Channel
from qinfer.backends.python_host.messages import EnvironmentReady, HostFailure
from qinfer.core.shared_folders import hold, is_held, remove_unused, used_at
from qinfer.errors import ModelLoadFailed

_GZIP = b"\x1f\x8b"
_PIECE_BYTES = 2**20
_END_BYTES = 1024
"""Two blocks of zeros (POSIX.1-2017, pax, ustar interchange format)."""

_MAX_HOPS = 40
"""The most links that Linux follows (path_resolution(7))."""

_MAX_LINK_BYTES = 4095
_MEMORY_BYTES = 2**30
"""The memory for headers, which `tarfile` reads whole."""


class ArchiveBounds(NamedTuple):
    """An archive's most decompressed bytes, and members."""

    max_bytes: int
    max_members: int


class _DecompressedFile:
    """The decompressed archive, and its last bytes."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = self._left_bytes = max_bytes
        self.last = b""

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._left_bytes -= len(content)
        if self._left_bytes < 0:
            raise ModelLoadFailed(
                f"the archive of its environment has more than {self._max_bytes} bytes when unpacked "
                "(QINFER_WORKER__MAX_ENVIRONMENT_BYTES)"
            )
        self.last = (self.last + content[-_END_BYTES:])[-_END_BYTES:]
        return content


def unpack(archive: BinaryIO, target: Path, bounds: ArchiveBounds) -> int:
    """Unpacks an archive; returns the number of members. An error leaves those before it."""
    is_packed = archive.read(len(_GZIP)) == _GZIP
    archive.seek(0)
    stream = _DecompressedFile(gzip.GzipFile(fileobj=archive) if is_packed else archive, bounds.max_bytes)  # type: ignore[arg-type]
    try:
        with _bounded_memory():
            return _unpack(stream, target, bounds.max_members)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, OverflowError, MemoryError) as error:
        raise ModelLoadFailed(
            f"the archive of its environment is damaged, or no .tar.gz ({type(error).__name__}: {error})"
        ) from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ModelLoadFailed("the archive of its environment has members in the way of one another") from None


def _unpack(stream: _DecompressedFile, target: Path, max_members: int) -> int:
    links: dict[tuple[str, ...], str] = {}
    members = 0
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_PIECE_BYTES) as tar:  # type: ignore[call-overload]
        while (member := tar.next()) is not None:
            members += 1
            if members > max_members:
                raise ModelLoadFailed(
                    f"the archive of its environment has more than {max_members} members "
                    "(QINFER_WORKER__MAX_ENVIRONMENT_FILES)"
                )
            _write_member(tar, member, target, links)
            tar.members = []
    while stream.read(_PIECE_BYTES):  # a checksum ends it
        pass
    if not members or len(stream.last) < _END_BYTES or any(stream.last):
        raise EOFError("it was cut off")
    for parts in links:
        if leads_out(parts, links):
            raise _member_error(
                "/".join(parts),
                "is a link that leads out of it; use conda-pack, or make the environment by python -m venv --copies",
            )
        if any(parts[:depth] in links for depth in range(1, len(parts))):
            raise _member_error("/".join(parts), "lies behind a link")
    for parts, goal in links.items():
        path = target.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(goal)
    return members


def _write_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, links: dict[tuple[str, ...], str]
) -> None:
    parts = _inside(member.name, member.name)
    path = target.joinpath(*parts)
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    if not parts:
        raise _member_error(member.name, "is no directory")
    links.pop(parts, None)
    if member.issym():
        if not 0 < len(os.fsencode(member.linkname)) <= _MAX_LINK_BYTES or "\0" in member.linkname:
            raise _member_error(member.name, "is a link with an invalid target")
        links[parts] = member.linkname
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if member.islnk():
        source = _inside(member.linkname, member.name)
        if source in links:
            links[parts] = links[source]
            return
        try:
            path.hardlink_to(target.joinpath(*source))
        except (FileNotFoundError, PermissionError):
            raise _member_error(member.name, "is a link to a file that is not before it") from None
        return
    content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise _member_error(member.name, "is neither file, directory nor link")
    mode = 0o700 if member.mode & 0o100 else 0o600
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, _PIECE_BYTES)
        file.flush()
        os.utime(descriptor, (member.mtime, member.mtime))  # byte code needs its source's time


def _inside(name: str, member: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _member_error(member, "leads out of it")
    return parts


def leads_out(parts: tuple[str, ...], links: Mapping[tuple[str, ...], str]) -> bool:
    """Returns whether a path leads out, or in circles."""
    todo, done, hops = list(reversed(parts)), list[str](), 0
    while todo:
        part = todo.pop()
        if part == "..":
            if not done:
                return True
            done.pop()
        elif part not in ("", "."):
            done.append(part)
            goal = links.get(tuple(done))
            if goal is not None:
                hops += 1
                if goal.startswith("/") or hops > _MAX_HOPS:
                    return True
                done.pop()
                todo.extend(reversed(goal.split("/")))
    return False


def _member_error(member: str, why: str) -> ModelLoadFailed:
    shown = member.encode(errors="backslashreplace").decode()[:200]
    return ModelLoadFailed(f"the archive of its environment has a member '{shown}', which {why}")


@contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _data_bytes() + _MEMORY_BYTES
    lowest = min(limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """Returns the data size as `RLIMIT_DATA` counts it (proc(5), `statm`)."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


UNUSED_S = 86400.0
"""The time after which an unused environment is removed."""

READY = "ready"
_KNOWN, _LENT, _LOCK = "known", "lent", ".lock"
_SETTLED_S = 2.0
"""Clocks are coarse: a newer stamp does not identify an archive."""

_DIGEST_LENGTH = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Environments:
    """The environments of one directory, which need not exist.

    `bounds` limits an archive, and all unused environments together.
    """

    def __init__(self, directory: Path, bounds: ArchiveBounds) -> None:
        self._root = directory
        self._bounds = bounds
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ModelLoadFailed(
                "the directory of unpacked environments belongs to another user, or others can write to it; "
                "QINFER_REPOSITORY__CACHE_DIR says where it is"
            )

    def unpacked(self, archive: Path, variables: Mapping[str, str]) -> Path:
        """Returns an archive's environment, perhaps unpacked now."""
        try:
            with archive.open("rb") as file:
                home = self._root / self._digest(file)
                if not _hold(home):
                    with (self._root / _LOCK).open("w") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX)
                        if not _hold(home):
                            self._make(home, file, variables)
                            _hold(home)
            os.utime(home)
        except OSError as error:
            raise ModelLoadFailed(f"the archive of its environment can't be unpacked: {error.strerror}") from None
        return home / "env"

    def lend(self, package: Path) -> Path:
        """Returns a directory with only a link to a package."""
        directory = self._root / _LENT / hashlib.sha256(os.fsencode(package)).hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            (directory / package.name).symlink_to(package)
        return directory

    def _digest(self, file: BufferedReader) -> str:
        """Returns an archive's hash, by its stamp if that is known."""
        stamp = _stamp(file)
        note = self._root / _KNOWN / hashlib.sha256(stamp.encode()).hexdigest()
        with suppress(FileNotFoundError):
            if len(known := note.read_text()) == _DIGEST_LENGTH:
                return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        if _stamp(file) == stamp and os.fstat(file.fileno()).st_ctime < time.time() - _SETTLED_S:
            with suppress(OSError):  # the disk may be full
                note.parent.mkdir(exist_ok=True, mode=0o700)
                partial = note.with_name(f".{os.getpid()}")
                partial.write_text(digest)
                partial.rename(note)
        return digest

    def _make(self, home: Path, file: BufferedReader, variables: Mapping[str, str]) -> None:
        """Unpacks the environment under its lock; if the disk is full, removes unused environments first."""
        began_s = time.monotonic()
        for unused_s in (UNUSED_S, 0.0):
            self._sweep(unused_s)
            shutil.rmtree(home, ignore_errors=True)
            try:
                members = self._unpacked(home, file, variables)
                break
            except (OSError, ModelLoadFailed) as error:
                shutil.rmtree(home, ignore_errors=True)
                if getattr(error, "errno", 0) not in _FULL or not unused_s:
                    raise
        print(f"environment unpacked: {members} members in {time.monotonic() - began_s:.1f} s")  # noqa: T201  the model's log

    def _unpacked(self, home: Path, file: BufferedReader, variables: Mapping[str, str]) -> int:
        stamp = _stamp(file)
        file.seek(0)
        mask = os.umask(0o077)
        try:
            (home / "env").mkdir(parents=True)
            members = unpack(file, home / "env", self._bounds)
        finally:
            os.umask(mask)
        if _stamp(file) != stamp:
            raise ModelLoadFailed("the archive of its environment was changed while it was unpacked")
        script = home / "env" / "bin" / "conda-unpack"
        if script.is_file():
            command = [str(home / "env" / "bin" / "python"), "-B", "-s", str(script)]
            inner = with_libraries(home / "env", variables)
            if subprocess.run(command, env=inner, stdin=subprocess.DEVNULL, check=False).returncode:  # noqa: S603
                raise ModelLoadFailed("conda-unpack of its environment failed; the log says why")
        with (home / READY).with_suffix(".new").open("w") as ready:
            # After a crash, the name must not exist without the files' content.
            ready.write(str(_bytes_of(home / "env")))
            ready.flush()
            ctypes.CDLL(None).syncfs(ready.fileno())
            Path(ready.name).rename(home / READY)
        return members

    def _sweep(self, unused_s: float) -> None:
        """Removes incomplete and long unused environments, and the oldest unused environments above the bound."""
        limit, unused_bytes = time.time() - unused_s, 0
        homes = [home for home in self._root.iterdir() if home.name not in (_KNOWN, _LENT, _LOCK)]
        for home in sorted(homes, key=used_at, reverse=True):
            is_old = not (home / READY).exists() or used_at(home) <= limit
            if not is_old and not is_held(home):
                unused_bytes += int((home / READY).read_text() or 0)
            if is_old or unused_bytes > self._bounds.max_bytes:
                remove_unused(home, READY)
        for note in (self._root / _KNOWN).glob("[!.]*"):  # others are being written
            if used_at(note) <= limit and not (self._root / note.read_text()).exists():
                note.unlink(missing_ok=True)


def with_libraries(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for an environment's libraries, as in Triton."""
    libraries = ":".join(filter(None, (str(root / "lib"), variables.get("LD_LIBRARY_PATH", ""))))
    return {**variables, "LD_LIBRARY_PATH": libraries}


def _bytes_of(directory: Path) -> int:
    paths = (os.path.join(place, name) for place, _, names in os.walk(directory) for name in names)
    return sum(os.lstat(path).st_size for path in paths)


def _stamp(file: BufferedReader) -> str:
    status = os.fstat(file.fileno())
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _hold(home: Path) -> bool:
    """Holds the environment for this process and its children; returns whether it is ready."""
    descriptor = hold(home, READY)
    if descriptor is not None:
        os.set_inheritable(descriptor, True)
    return descriptor is not None


OLDEST = (3, 11)
"""The oldest Python that runs qinfer."""

OLDEST_MSGSPEC = (0, 20)
"""The oldest msgspec for it, as in pyproject.toml."""

PROBE_S = 120.0
"""Limits activating an environment, and starting its Python."""

_QINFER = Path(__file__).parents[2]
_START = Path(__file__).with_name("start.py")
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
    python = str(root / "bin" / "python")
    return os.execve(python, [python, "-P", "-B", "-u", "-s", str(_START), *arguments], entered)  # noqa: S606


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


def _ran(command: Sequence[str], variables: Mapping[str, str], root: Path) -> bytes:
    ran = subprocess.run(  # noqa: S603  the model's own
        command, env=variables, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=PROBE_S, check=True
    )
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
