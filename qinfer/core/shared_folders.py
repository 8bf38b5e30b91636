"""Folders that the processes of a machine share: each process holds those that it uses, and unused ones are removed.

A folder counts as long as its mark is there, a file that is made last. It is held by a shared lock, which ends with the
descriptor: at the latest with the process. The module imports nothing but the standard library.
"""

import fcntl
import os
import shutil
from pathlib import Path


def hold(folder: Path, mark: str) -> int | None:
    """Holds a folder, so that no process removes it; returns the descriptor, `None` where the folder does not count."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if (folder / mark).exists():
        return descriptor
    os.close(descriptor)  # the folder was removed during the wait for the lock, or is not ready
    return None


def used_at(path: Path) -> float:
    """Returns when a file or folder was changed or touched last, in seconds since 1970; 0 = it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_held(folder: Path) -> bool:
    """Tells whether a process holds a folder now."""
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
    """Removes a folder, unless a process holds it; without its mark, it no longer counts."""
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
