"""A model repository in a local directory."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qinfer.errors import ModelLoadFailed, SettingsError
from qinfer.repository.files import IGNORED, MAX_FILES, Blob, Listing, Ranges, Stamp

_WHOLE_BYTES = 16 * 2**20  # a smaller file is read at once
_PAGE_BYTES = 4096


class LocalFiles:
    """The files of a directory; keeps nothing between calls.

    Args:
        root: The directory.
    """

    is_remote = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def models(self) -> list[str]:
        """Returns the names of the directories, sorted; hidden ones are left out.

        Raises:
            SettingsError: The repository is not a directory that can be read.
        """
        try:
            with os.scandir(self._root) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
        except OSError as error:
            raise SettingsError(f"model repository '{self._root}' can't be read: {error.strerror}") from None

    def listings(self) -> dict[str, Listing | Exception]:
        """Returns what each directory holds, or why that can't be told, by name."""
        found: dict[str, Listing | Exception] = {}
        for name in self.models():
            try:
                listing = self.listing(name)
            except (OSError, ModelLoadFailed) as error:
                found[name] = error
                continue
            if listing is not None:  # else removed meanwhile
                found[name] = listing
        return found

    def listing(self, directory: str) -> Listing | None:
        """Returns what a directory holds; `None` when there is none of that name."""
        root = self._root / directory
        if not root.is_dir():
            return None
        files: dict[str, Stamp] = {}
        directories: set[str] = set()
        todo = [("", str(root))]
        while todo:
            prefix, path = todo.pop()
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        if entry.name != IGNORED and not _leads_back(entry, path):
                            directories.add(prefix + entry.name)
                            todo.append((f"{prefix}{entry.name}/", entry.path))
                    elif entry.is_file():
                        status = entry.stat()
                        files[prefix + entry.name] = Stamp(status.st_size, str(status.st_mtime_ns))
            if len(files) + len(directories) > MAX_FILES:
                raise ModelLoadFailed(f"its directory holds more than {MAX_FILES} files")
        return Listing(files, directories)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """Returns a file's content."""
        with (self._root / path).open("rb") as file:
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OSError(0, f"it is larger than {limit_bytes} bytes")
        return content

    @contextmanager
    def blob(self, path: str, size: int) -> Iterator[Blob]:
        """Opens a file, of which a large one is read only where it is looked at.

        It is not mapped: looking at a mapped file that was made shorter meanwhile, as by another that is copied over
        it, ends the process.
        """
        with (self._root / path).open("rb") as file:
            if size <= _WHOLE_BYTES:
                yield memoryview(file.read(size))
                return

            def fetch(begin: int, end: int) -> bytes:
                return os.pread(file.fileno(), end - begin, begin)

            yield Ranges(fetch, size, _PAGE_BYTES, sys.maxsize)

    def directory(self, path: str) -> Path | None:
        """Returns the directory itself."""
        return self._root / path

    def fetch(self, path: str, target: Path) -> None:
        """Copies a file."""
        shutil.copyfile(self._root / path, target)

    def write(self, path: str, content: bytes) -> None:
        """Writes a file, and the directories that it needs."""
        target = self._root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        except OSError as error:
            raise SettingsError(f"'{self._root}' can't be written: {error.strerror}") from None

    def remove(self, directory: str) -> None:
        """Removes a directory with all that it holds; one that is not there is no error."""
        shutil.rmtree(self._root / directory, ignore_errors=True)


def _leads_back(entry: os.DirEntry[str], parent: str) -> bool:
    """Tells whether a directory is a link to one that it is in, which would be walked for ever."""
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry.path)
    return f"{os.path.realpath(parent)}/".startswith(f"{target}/")
