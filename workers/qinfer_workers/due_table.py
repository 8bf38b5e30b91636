"""The instants at which executions must have ended, in memory shared with the process that watches the worker.

A worker whose model holds the GIL can't report anything, so it writes in advance until when it may be silent: 8 bytes
at the begin and end of each execution, without a system call. Instants are on the monotonic clock, which processes of a
machine share. The imports are cheap.
"""

import mmap
import os
import threading
from collections.abc import Iterable, MutableSequence
from typing import cast

SLOTS = 1024
"""Only the worker watches further instances."""

NAME_BYTES = 256

_DOUBLES = SLOTS * 8

GRACE_S = 5.0
"""Seconds that the worker has to give back its entries and end by itself."""


class DueTable:
    """The worker's side; the reader inherits the descriptor `fd`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("qinfer-due")
        os.ftruncate(self.fd, _DOUBLES + SLOTS * NAME_BYTES)
        self._memory = mmap.mmap(self.fd, 0)
        self._due = cast("MutableSequence[float]", memoryview(self._memory)[:_DOUBLES].cast("d"))
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    def place(self, name: str) -> tuple[MutableSequence[float], int]:
        """Returns an instance's sequence, and the index in it."""
        with self._lock:
            if not self._free:
                return [0.0], 0
            place = self._free.pop()
        begin = _DOUBLES + place * NAME_BYTES
        self._memory[begin : begin + NAME_BYTES] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        return self._due, place

    def free(self, place: tuple[MutableSequence[float], int]) -> None:
        """Takes a place back."""
        due, number = place
        if due is self._due:
            due[number] = 0.0
            with self._lock:
                self._free.append(number)


class DueReader:
    """The watching process's side."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._due = memoryview(self._memory)[:_DOUBLES].cast("d")

    def overdue(self, now_s: float) -> list[str]:
        """Returns the instances whose instant and grace have passed."""
        return [self._read_name(place) for place in overdue(self._due, now_s)]

    def _read_name(self, place: int) -> str:
        begin = _DOUBLES + place * NAME_BYTES
        return self._memory[begin : begin + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


def overdue(due: Iterable[float], now_s: float) -> list[int]:
    """Returns the indices of passed instants, after the grace; 0 is no instant. Pure."""
    return [place for place, due_s in enumerate(due) if 0.0 < due_s < now_s - GRACE_S]
