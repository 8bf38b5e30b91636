"""The memory of other processes of this machine, as a gateway or worker reads it, and shares its own with them."""

import asyncio
import errno
import logging
import mmap
import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from qinfer.core.messages import MemoryReference
from qinfer.errors import CorruptEntry, DeliveryError
from qinfer.segments.shelf import (
    CANT_READ,
    CHALLENGE_BYTES,
    GENERATION,
    MOST_GENERATIONS,
    SEGMENT,
    SUFFIX,
    Shelf,
    connected,
    is_own,
    peer_of,
    proof,
    socket_path,
)
from qinfer.segments.slabs import HEADER_BYTES

logger = logging.getLogger(__name__)

SCAN_EVERY_S = 1.0
"""A new process is found within this time; until then its tensors go through Redis."""

AGAIN_S = 10.0
"""Where a segment could not be mapped, for lack of memory or descriptors, its owner is left alone for so long."""

PROCESS_NAME = re.compile(r"[A-Za-z0-9-]{1,60}")  # never a path
_MOST_ENDED = 4096
OVER = "the request has ended where it was submitted"


class TensorsGone(DeliveryError):
    """The request has ended where it was submitted."""


class TensorsUnreachable(DeliveryError):
    """The process may live, and this one does not reach its memory."""


class TensorView(NamedTuple):
    """Tensors in the memory of a process; who copies them asks `is_current` afterwards."""

    memory: mmap.mmap
    reference: MemoryReference
    tensors: memoryview

    def is_current(self) -> bool:
        """Returns whether they still are the request's: a later use changes the generation before it writes."""
        (generation,) = GENERATION.unpack_from(self.memory, self.reference.offset)
        return bool(generation == self.reference.generation)


class _Owner(msgspec.Struct):
    connection: socket.socket
    segments: dict[int, mmap.mmap]
    is_proven: bool = False


class SegmentReader:
    """Reads tensors by reference: of processes whose names begin with one of `kinds`, to which this one is `name`.

    `own` has the memory of this process, if it reads that, too.
    """

    def __init__(self, directory: Path, name: str, kinds: tuple[str, ...], own: Shelf | None = None) -> None:
        self._directory = directory
        self._name = name
        self._kinds = kinds
        self._own = own
        self._own_name = "" if own is None else own.memory.owner
        self._confirmed: dict[str, list[int]] = {}
        self.secret = b""
        """Without it, no memory is asked for."""

        self._loop = asyncio.get_running_loop()
        self._owners: dict[str, _Owner] = {}
        self._ended: dict[str, None] = {}
        self._unreadable: dict[str, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        """Finds other processes until cancelled."""
        try:
            while True:
                self.scan()
                await asyncio.sleep(SCAN_EVERY_S)
        finally:
            for owner in list(self._owners):
                self._close(owner)

    def scan(self) -> None:
        """Connects to new processes."""
        with suppress(OSError):
            for entry in os.scandir(self._directory):
                owner = entry.name.removesuffix(SUFFIX)
                if (
                    owner != entry.name
                    and owner.startswith(self._kinds)
                    and owner != self._own_name
                    and owner not in self._owners
                    and owner not in self._ended
                ):
                    self._connect(owner)

    def is_near(self, owner: str) -> bool:
        """Returns whether a process is this one, or connected on this machine."""
        return owner in self._owners or owner == self._own_name

    def read(self, reference: MemoryReference) -> bytes:
        """Returns a copy of a request's tensors; raises as `view`."""
        view = self.view(reference)
        tensors = bytes(view.tensors)
        if not view.is_current():
            raise TensorsGone(OVER)
        return tensors

    def confirm(self, reference: MemoryReference) -> None:
        """Tells the owner that it may use the memory again, with the others of this turn of the loop."""
        if not self._confirmed:
            self._loop.call_soon(self._send_confirmations)
        self._confirmed.setdefault(reference.owner, []).append(reference.generation)

    def _send_confirmations(self) -> None:
        confirmed, self._confirmed = self._confirmed, {}
        for name, generations in confirmed.items():
            if self._own is not None and name == self._own_name:
                self._own.confirmed(generations)
                continue
            if (owner := self._owners.get(name)) is None:
                continue
            for begin in range(0, len(generations), MOST_GENERATIONS):
                part = generations[begin : begin + MOST_GENERATIONS]
                with suppress(OSError):  # the owner waits no longer
                    owner.connection.send(b"".join(map(GENERATION.pack, part)))

    def view(self, reference: MemoryReference) -> "TensorView":
        """Returns a request's tensors, to be copied.

        Raises:
            TensorsGone: The request, or the process that submitted it, has ended.
            TensorsUnreachable: The memory can't be reached, here and now.
            CorruptEntry: The reference leaves its segment.
        """
        owner = self._owners.get(reference.owner)
        memory = None if owner is None else owner.segments.get(reference.segment)
        if memory is None:
            memory = self._segment(reference)
        begin = reference.offset + HEADER_BYTES
        end = begin + reference.size
        if end > len(memory):
            raise CorruptEntry(f"tensors at {begin}:{end} leave a segment of {len(memory)} bytes")
        view = TensorView(memory, reference, memoryview(memory)[begin:end].toreadonly())
        if not view.is_current():
            raise TensorsGone(OVER)
        return view

    def _segment(self, reference: MemoryReference) -> mmap.mmap:
        name = reference.owner
        if not PROCESS_NAME.fullmatch(name):
            raise CorruptEntry(f"'{name[:80]}' is not the name of a process")
        if self._own is not None and name == self._own_name:
            own = self._own.memory.segments.get(reference.segment)
            if own is None:
                raise TensorsGone(f"{name} ends")
            return own.memory
        owner = self._owners.get(name)
        if owner is None and name not in self._ended:
            self._connect(name)
            owner = self._owners.get(name)
        if owner is not None and reference.segment not in owner.segments:
            self._receive(name)
            owner = self._owners.get(name)
        if name in self._ended:
            raise TensorsGone(f"{name} has ended")
        memory = None if owner is None else owner.segments.get(reference.segment)
        if memory is None:
            raise TensorsUnreachable(f"the memory of {name} can't be reached from this worker")
        return memory

    def _connect(self, name: str) -> bool:
        """Connects to a process; returns false if none listens there."""
        if not self.secret or name in self._unreadable:
            return True
        try:
            connection = connected(socket_path(self._directory, name))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # many connect to it now
            return True
        if not is_own(connection):
            connection.close()
            return True
        self._owners[name] = _Owner(connection, {})
        self._loop.add_reader(connection, self._receive, name)
        return True

    def _receive(self, name: str) -> None:
        """Maps the segments that have come; at the end of the connection, finds out whether the process has ended."""
        owner = self._owners[name]
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(owner.connection, CHALLENGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            try:
                if self._takes(owner, name, packet, descriptors):
                    continue
            except OSError as error:
                self._leave(name, owner, error)
                return
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._close(name)
            if owner.segments and not self._connect(name):  # without segments there are no references
                self._note_end(name)
            return

    def _takes(self, owner: _Owner, name: str, packet: bytes, descriptors: Sequence[int]) -> bool:
        """Answers a challenge, or maps a segment; returns false at the end of the connection."""
        if len(packet) == CHALLENGE_BYTES and not owner.is_proven:
            owner.is_proven = True
            process = peer_of(owner.connection).process
            with suppress(OSError):  # its end comes next
                owner.connection.send(proof(self.secret, packet, name, process, self._name))
            return True
        if len(packet) != SEGMENT.size:
            return False
        number, size = SEGMENT.unpack(packet)
        if not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        owner.segments[number] = mmap.mmap(descriptors[0], size, access=mmap.ACCESS_READ)
        return True

    def _leave(self, name: str, owner: _Owner, error: OSError) -> None:
        """Tells an owner that this process can't map its memory, and connects again later."""
        logger.warning("memory of another process not mapped", extra={"owner": name, "reason": error.strerror})
        with suppress(OSError):
            owner.connection.send(CANT_READ)
        self._close(name)
        self._unreadable[name] = self._loop.call_later(AGAIN_S, self._unreadable.pop, name)

    def _note_end(self, name: str) -> None:
        if len(self._ended) >= _MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[name] = None
        logger.info("process that shared its memory ended", extra={"owner": name})

    def _close(self, name: str) -> None:
        owner = self._owners.pop(name)
        self._loop.remove_reader(owner.connection)
        owner.connection.close()  # the segments end with their last view
