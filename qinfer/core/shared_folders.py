"""Folders that the processes of a machine share: each holds the folders that it uses, and unused folders are removed.

A folder is complete once it has its mark, a file that is made last. A shared lock holds it, which ends with the
process.
"""

import fcntl
import os
import shutil
from pathlib import Path


def hold(folder: Path, mark: str) -> int | None:
    """Holds a complete folder; returns the descriptor."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if (folder / mark).exists():
        return descriptor
    os.close(descriptor)  # it was removed during the wait, or is incomplete
    return None


def used_at(path: Path) -> float:
    """Returns the last change, in seconds since 1970; 0 = missing."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_held(folder: Path) -> bool:
    """Returns whether a process holds a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_unused(folder: Path, mark: str) -> None:
    """Removes a folder that no process holds, its mark first."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / mark).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(descriptor)
