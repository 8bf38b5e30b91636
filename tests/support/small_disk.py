"""A small file system in memory, in a mount namespace that needs no root: a disk that can be full."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from qinfer.testing import wait_until


class SmallDisk:
    """See the module docstring; a test that can't have one is skipped.

    Args:
        folder: Where processes in its namespace see it; the folder must exist.
        size: How large it is, as mount(8) has it.
        spaces: Further namespaces, as unshare(1) has them: `net`.

    Attributes:
        home: The folder.
        seen: Where processes outside of the namespace see it.
    """

    def __init__(self, folder: Path, size: str, spaces: Sequence[str] = ()) -> None:
        if not shutil.which("unshare") or not shutil.which("nsenter"):
            pytest.skip("there is no unshare and nsenter (util-linux)")
        self.home = folder
        mount = f'mount -t tmpfs -o size={size} none "$0" && touch "$0/mounted" && exec cat'
        self._spaces = [f"--{space}" for space in ("user", "mount", *spaces)]
        command = ["unshare", "--map-root-user", *self._spaces, "sh", "-c", mount, str(folder)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        self.seen = Path(f"/proc/{self._holder.pid}/root{folder}")
        wait_until(lambda: self._holder.poll() is not None or (self.seen / "mounted").exists())
        if self._holder.poll() is not None:
            said = self._holder.communicate()[1].decode().strip()
            pytest.skip(f"no file system can be mounted in a namespace here: {said}")

    def enter(self) -> list[str]:
        """Returns the beginning of a command that runs where the disk is."""
        return ["nsenter", *self._spaces, "--preserve-credentials", "--target", str(self._holder.pid)]

    def fill(self, left_bytes: int = 0) -> None:
        """Takes up the room but for so many bytes."""
        state = os.statvfs(self.seen)
        room = state.f_bavail * state.f_frsize - left_bytes
        with (self.seen / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while room > 0:  # others may write meanwhile: it is full then, too
                room -= file.write(bytes(min(room, 65_536)))

    @property
    def is_full(self) -> bool:
        return (self.seen / "ballast").exists()

    def make_room(self) -> None:
        (self.seen / "ballast").unlink()

    def close(self) -> None:
        self._holder.communicate()
