"""Directories as an object store: `file:///data/out/part-00000.parquet`.

A file is complete and on disk before `os.link`, which fails if the name is taken, gives it its name; one of another
file system is copied to the directory first. A process's first commit in a directory removes temporary files there that
are older than a day.
"""

import errno
import io
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qinfer.errors import StoreError
from qinfer.storage.store import BROKEN, Child, CommitOutcome, Stat, Store, mapped, not_empty
from qinfer.tensors import Bytes

LEFTOVER_S = 24 * 3600.0
"""Older temporary files have no owner."""

_TEMPORARY = re.compile(r"\.qinfer-[0-9a-f]{16}\.tmp")
_CHUNK_BYTES = 8 * 2**20
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def local_path(url: str) -> Path | None:
    """Returns the path of a `file://` URL, else `None`."""
    scheme, separator, path = url.partition("://")
    return Path(path.removeprefix("localhost")) if separator and scheme in ("file", "local") else None


class LocalStore(Store):
    """This machine's files, or those of a network file system with hard links."""

    def __init__(self) -> None:
        self._mode = 0o666 & ~_umask()
        self._swept: set[Path] = set()
        self._lock = threading.Lock()

    def commit_if_absent(self, local: Path, url: str) -> CommitOutcome:
        """Implements `Store.commit_if_absent`; the result may be a second name of `local`."""
        not_empty(local.stat().st_size, url)
        with mapped(url), local.open("rb") as source:
            final = _path(url)
            self._prepare(final.parent)
            if final.exists():
                return _exists(final)
            with suppress(PermissionError):  # the file belongs to another user, and is readable
                os.fchmod(source.fileno(), self._mode)  # spool files are private
            os.fsync(source.fileno())
            try:
                return _link(local, final)
            except OSError as error:
                if error.errno != errno.EXDEV and error.errno not in _NO_LINKS:
                    raise
            return self._create(source, final)

    def put_if_absent(self, data: bytes, url: str) -> CommitOutcome:
        """Implements `Store.put_if_absent`."""
        not_empty(len(data), url)
        with mapped(url):
            final = _path(url)
            self._prepare(final.parent)
            return self._create(io.BytesIO(data), final)

    def write(self, data: Bytes, url: str, *, synced: bool = False) -> None:
        """Implements `Store.write`."""
        with mapped(url), _written(_path(url), synced=synced) as file:
            file.write(data)

    def copy(self, url: str, to: str, *, synced: bool = False) -> None:
        """Implements `Store.copy`."""
        with mapped(url), _path(url).open("rb") as source, _written(_path(to), synced=synced) as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)

    def read_range(self, url: str, begin: int, end: int) -> bytes:
        """Implements `Store.read_range`."""
        with mapped(url), _path(url).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def fetch(self, url: str, target: Path) -> None:
        """Implements `Store.fetch`."""
        with mapped(url):
            shutil.copyfile(_path(url), target)

    def open(self, url: str, *, sequential: bool = False) -> BinaryIO:
        """Implements `Store.open`; a replaced file stays readable."""
        del sequential
        with mapped(url):
            return _path(url).open("rb")

    def stat(self, url: str) -> Stat | None:
        """Implements `Store.stat`."""
        with mapped(url):
            path = _path(url)
            try:
                return _stat(url, path.stat()) if path.is_file() else None
            except OSError as error:
                _raise(error)
                return None

    def children(self, folder: str) -> list[Child]:
        """Implements `Store.children`."""
        with mapped(folder):
            try:
                with os.scandir(_path(folder)) as entries:
                    return [Child(entry.name, entry.is_dir()) for entry in entries]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def scan(self, prefix: str) -> Iterator[Stat]:
        """Implements `Store.scan`, without names that begin with a dot."""
        base = prefix.rstrip("/")
        with mapped(prefix):
            root = _path(base)
            for directory, folders, names in os.walk(root, onerror=_raise):
                folders[:] = [name for name in folders if not name.startswith(".")]
                inner = Path(directory).relative_to(root).as_posix()
                for name in names:
                    if not name.startswith("."):
                        url = f"{base}/{name}" if inner == "." else f"{base}/{inner}/{name}"
                        with suppress(FileNotFoundError):  # deleted meanwhile, or a broken link
                            yield _stat(url, os.stat(os.path.join(directory, name)))

    def set_aside(self, url: str, etag: str = "") -> None:
        """Implements `Store.set_aside`."""
        with mapped(url):
            final = _path(url)
            before = self.stat(url)
            if before is None or (etag and not before.is_still(etag)):
                return
            content = _content(final)
            target = _reserved(final.parent / BROKEN, final.name)
            try:
                os.rename(final, target)
            except FileNotFoundError:
                target.unlink()
                return
            if etag and _content(target) != content:  # replaced in the last moment by a sound object
                with suppress(FileExistsError):
                    os.link(target, final)
                target.unlink()
            sync_path(target.parent)
            sync_path(final.parent)

    def delete(self, url: str) -> None:
        """Implements `Store.delete`."""
        with mapped(url), suppress(FileNotFoundError):
            _path(url).unlink()

    def delete_folder(self, url: str) -> None:
        """Implements `Store.delete_folder`."""
        with mapped(url), suppress(FileNotFoundError):
            shutil.rmtree(_path(url))

    def _create(self, source: BinaryIO, final: Path) -> CommitOutcome:
        temporary = final.parent / f".qinfer-{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
                file.flush()
                os.fsync(file.fileno())
            return _link(temporary, final)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StoreError(
                    f"the file system of '{final.parent}' makes no hard links, which exact results need; "
                    "use another directory"
                ) from None
            raise
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _prepare(self, directory: Path) -> None:
        """Removes old temporary files once per process."""
        with self._lock:
            if directory in self._swept and directory.is_dir():
                return
            self._swept.add(directory)
        _make(directory)
        before = time.time() - LEFTOVER_S
        with os.scandir(directory) as entries:
            for entry in entries:
                if _TEMPORARY.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        if entry.stat().st_mtime < before:
                            os.unlink(entry.path)


def _path(url: str) -> Path:
    path = local_path(url)
    if path is None or not path.is_absolute():
        raise StoreError(f"'{url}' is not an absolute path; expected file:///directory/file")
    return path


@contextmanager
def _written(path: Path, *, synced: bool) -> Iterator[BinaryIO]:
    """Opens a file to write, in a folder that is made if missing; a failed write leaves no part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        for directory in (path.parent, path.parent.parent) if synced else ():
            sync_path(directory)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def _stat(url: str, found: os.stat_result) -> Stat:
    return Stat(url, found.st_size, f"{found.st_mtime_ns}-{found.st_size}-{found.st_ctime_ns}")


def _content(path: Path) -> tuple[int, int, int]:
    """Marks that survive a rename, which sets the ctime."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _link(source: Path, final: Path) -> CommitOutcome:
    try:
        os.link(source, final)
    except FileExistsError:
        return _exists(final)
    sync_path(final.parent)
    return CommitOutcome.CREATED


def _exists(final: Path) -> CommitOutcome:
    """Syncs: the file's writer may have died before its name was on disk."""
    sync_path(final.parent)
    return CommitOutcome.EXISTS


def _reserved(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    number = 1
    while True:
        target = folder / f"{name}-{number}"
        try:
            target.open("xb").close()
        except FileExistsError:
            number += 1
        else:
            return target


def _make(directory: Path) -> None:
    """Creates directories that survive a power loss."""
    missing = [directory, *directory.parents]
    for path in reversed([path for path in missing if not path.exists()]):
        path.mkdir(exist_ok=True)
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Has a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError) and error.errno != errno.ENAMETOOLONG:
        raise error


def _umask() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
