"""The instants at which executions must have ended, in memory that a worker shares with the process that watches it.

    worker: DueTable ── a double for each instance ──▶ renewer: DueReader, `overdue`

A worker whose model holds the interpreter's lock can say nothing any more, so it notes beforehand until when it may be
silent: 8 bytes at the beginning of each execution, and at its end, without a call of the system. Instants are on the
monotonic clock, which the processes of a machine share. It imports nothing that takes time or memory.
"""

import mmap
import os
import threading
from collections.abc import Iterable, MutableSequence
from typing import cast

SLOTS = 1024
"""Instances that have a place; further ones are watched by the worker only."""

NAME_BYTES = 256
"""Longer names are cut."""

_DOUBLES = SLOTS * 8

GRACE_S = 5.0
"""How long after an instant the worker may take to give back what it holds and to end by itself."""


class DueTable:
    """The worker's side.

    Attributes:
        fd: The descriptor of the memory, for the process that reads it.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("qinfer-due")
        os.ftruncate(self.fd, _DOUBLES + SLOTS * NAME_BYTES)
        self._memory = mmap.mmap(self.fd, 0)
        self._due = cast("MutableSequence[float]", memoryview(self._memory)[:_DOUBLES].cast("d"))
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    def place(self, name: str) -> tuple[MutableSequence[float], int]:
        """Returns where an instance of that name notes its instant: a sequence, and the place in it."""
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
    """The other side.

    Args:
        fd: The descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._due = memoryview(self._memory)[:_DOUBLES].cast("d")

    def overdue(self, now_s: float) -> list[str]:
        """Returns the names of the instances whose instant, and the grace after it, is over."""
        return [self._name(place) for place in overdue(self._due, now_s)]

    def _name(self, place: int) -> str:
        begin = _DOUBLES + place * NAME_BYTES
        return self._memory[begin : begin + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


def overdue(due: Iterable[float], now_s: float) -> list[int]:
    """Returns the places of the instants that, with the grace, are over; 0 is no instant. Pure."""
    return [place for place, due_s in enumerate(due) if 0.0 < due_s < now_s - GRACE_S]
