"""Unpacks the archive of an environment within bounds, and without paths or links that lead outside.

Early Pythons 3.11 lack `tarfile`'s filter `data`, and a later link can redirect a checked one; here links are made
last, when every link was found to lead inside.
"""

import gzip
import os
import resource
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

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
