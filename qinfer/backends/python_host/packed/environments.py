"""Unpacked environments on this machine, which all its workers share.

    <directory>/<hash of the archive>/env/…     the environment
    <directory>/<hash of the archive>/ready     its bytes; made last: without it, the environment is incomplete
    <directory>/known/<hash of a stamp>         the hash of an archive with this stamp, which need not be read again
    <directory>/lent/<hash>/<package>           a link to a package of the worker

Processes hold a shared lock on their environment. One process at a time unpacks and removes; if it is killed, the next
process removes the incomplete environment.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from qinfer.backends.python_host.packed.archive import ArchiveBounds, unpack
from qinfer.core.shared_folders import hold, is_held, remove_unused, used_at
from qinfer.errors import ModelLoadFailed

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
