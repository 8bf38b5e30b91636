"""System shared memory: clients on this host pass tensors in it instead of in bodies (reference §1.15).

The registry is this process's own: a client registers its regions at each gateway that it talks to. It is off unless
the operator turns it on, for it lets every client name any shared memory object that this process may open, and so read
and overwrite what is not its own.

Regions are read and written through their descriptors and never mapped: a client that shortens a mapped object would
have the kernel kill this process (SIGBUS). What is read is a copy, so that nothing changes under a request.
"""

import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from qinfer.errors import AlreadyExists, InvalidRequest, PayloadTooLarge, RegionNotFound, UnsupportedFeature
from qinfer.tensors import Bytes
from qinfer.wire.outputs import no_shared_memory

DIRECTORY = "/dev/shm"  # noqa: S108 - where `shm_open` of glibc and musl keeps its objects

MAX_REGIONS = 10_000
"""Regions that may be registered at once: each takes a descriptor."""

_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_KEY = re.compile(r"/?(?!\.{1,2}$)[^/\0]{1,254}")


class Region(msgspec.Struct, frozen=True):
    """A registered region of system shared memory.

    Attributes:
        name: What requests call it.
        key: The name of the shared memory object, as `shm_open` takes it.
        offset: Where the region begins in the object, in bytes.
        byte_size: Its size.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemory:
    """The regions of one gateway; every method may be called from any thread.

    Args:
        allowed: Whether clients may use shared memory; every method raises `UnsupportedFeature` where they may not.
    """

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, tuple[Region, int]] = {}
        self._lock = threading.Lock()

    def check_allowed(self) -> None:
        """Makes sure that clients may use shared memory.

        Raises:
            UnsupportedFeature: They may not.
        """
        if not self.allowed:
            raise no_shared_memory()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Opens a region.

        Args:
            name: What requests will call it.
            key: The shared memory object's name.
            offset: Where it begins in the object, in bytes.
            byte_size: Its size.

        Raises:
            AlreadyExists: The name is taken.
            InvalidRequest: It has no name, there is no such object, or it ends before the region does.
            UnsupportedFeature: Shared memory is off.
        """
        self.check_allowed()
        if not name:
            raise InvalidRequest("'region name' is necessary to register system shared memory region")
        if key.removeprefix("/").startswith(_RESERVED_PREFIX):
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED_PREFIX}'"
            )
        with self._lock:
            if name in self._regions:
                raise AlreadyExists(f"shared memory region '{name}' already in manager")
            if len(self._regions) >= MAX_REGIONS:
                raise InvalidRequest(f"{MAX_REGIONS} shared memory regions are registered already; unregister some")
            descriptor = _open(key)
            try:
                if byte_size <= 0 or offset + byte_size > os.fstat(descriptor).st_size:
                    raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
            except BaseException:
                os.close(descriptor)
                raise
            self._regions[name] = Region(name, key, offset, byte_size), descriptor

    def unregister(self, name: str) -> None:
        """Closes a region; does nothing if there is none of that name."""
        self.check_allowed()
        with self._lock:
            self._close(name)

    def unregister_all(self) -> None:
        """Closes all regions."""
        self.check_allowed()
        self.close()

    def status(self, name: str = "") -> list[Region]:
        """Returns the registered regions, or the one of that name.

        Raises:
            RegionNotFound: There is none of that name.
            UnsupportedFeature: Shared memory is off.
        """
        self.check_allowed()
        with self._lock:
            if not name:
                return [region for region, _ in self._regions.values()]
            if name not in self._regions:
                raise RegionNotFound(f"Unable to find system shared memory region: '{name}'")
            return [self._regions[name][0]]

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Makes sure that a region has that part.

        Raises:
            RegionNotFound: No region has the name.
            InvalidRequest: It ends before.
            UnsupportedFeature: Shared memory is off.
        """
        with self._part(name, offset, byte_size):
            pass

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a part of a region, which later writes of the client do not change.

        Raises:
            RegionNotFound: No region has the name.
            InvalidRequest: It ends before, or its object was made shorter.
            UnsupportedFeature: Shared memory is off.
        """
        data = bytearray()
        with self._part(name, offset, byte_size) as (descriptor, position):
            while len(data) < byte_size:
                piece = os.pread(descriptor, byte_size - len(data), position + len(data))
                if not piece:
                    raise _shortened(name)
                data += piece
        return memoryview(data)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region.

        Raises:
            RegionNotFound: No region has the name.
            InvalidRequest: It ends before, or its object was made shorter.
            UnsupportedFeature: Shared memory is off.
        """
        view = memoryview(data)
        with self._part(name, offset, len(view)) as (descriptor, position):
            if position + len(view) > os.fstat(descriptor).st_size:  # writing beyond the end would lengthen it again
                raise _shortened(name)
            done = 0
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], position + done)

    def register_cuda(self) -> NoReturn:
        """Refuses: CUDA's shared memory is never taken.

        Raises:
            UnsupportedFeature: Always.
        """
        self.check_allowed()
        raise UnsupportedFeature("CUDA shared memory is not supported; use system shared memory, or send the tensors")

    def check_cuda(self, name: str = "") -> None:
        """Looks for a region of CUDA's memory, of which there are none; does nothing without a name.

        Clients that clear both kinds of memory at their start go on.

        Raises:
            RegionNotFound: There is none of that name.
            UnsupportedFeature: Shared memory is off.
        """
        self.check_allowed()
        if name:
            raise RegionNotFound(f"Unable to find cuda shared memory region: '{name}'")

    def limited(self, max_bytes: int) -> "Limited":
        """Returns the regions for the reading of one request, which may copy so many bytes from them."""
        return Limited(self, max_bytes)

    def close(self) -> None:
        """Closes all regions, also where shared memory is off."""
        with self._lock:
            for name in list(self._regions):
                self._close(name)

    def _close(self, name: str) -> None:
        _, descriptor = self._regions.pop(name, (None, -1))
        if descriptor >= 0:
            os.close(descriptor)

    @contextmanager
    def _part(self, name: str, offset: int, byte_size: int) -> Iterator[tuple[int, int]]:
        """Yields a descriptor of a region's object, which stays open if the region is unregistered, and a position."""
        self.check_allowed()
        with self._lock:
            region, descriptor = self._regions.get(name, (None, -1))
            if region is None:
                raise RegionNotFound(f"Unable to find shared memory region: '{name}'")
            if offset >= region.byte_size:
                raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
            if offset + byte_size > region.byte_size:
                raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")
            own = os.dup(descriptor)
        try:
            yield own, region.offset + offset
        finally:
            os.close(own)


class Limited:
    """Regions from which one request reads: all its inputs together are no larger than a body may be.

    Args:
        memory: The regions.
        max_bytes: What may be read.
    """

    def __init__(self, memory: SharedMemory, max_bytes: int) -> None:
        self._memory = memory
        self._left_bytes = self._max_bytes = max_bytes

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a part of a region.

        Raises:
            PayloadTooLarge: The request has read too much.
            QinferError: As `SharedMemory.view`.
        """
        self._left_bytes -= byte_size
        if self._left_bytes < 0:
            raise PayloadTooLarge(
                f"inputs in shared memory of more than {self._max_bytes} bytes exceed the maximum allowed input size; "
                "raise QINFER_HTTP__MAX_INPUT_BYTES to accept them"
            )
        return self._memory.view(name, offset, byte_size)

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Makes sure that a region has that part: see `SharedMemory.check`."""
        self._memory.check(name, offset, byte_size)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region: see `SharedMemory.write`."""
        self._memory.write(name, offset, data)


def _open(key: str) -> int:
    """Opens a shared memory object as `shm_open` does, and nothing else."""
    refusal = InvalidRequest(f"Unable to open shared memory region: '{key}'")
    if not _KEY.fullmatch(key):
        raise refusal
    try:
        descriptor = os.open(
            f"{DIRECTORY}/{key.removeprefix('/')}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except (OSError, ValueError):
        raise refusal from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def _shortened(name: str) -> InvalidRequest:
    return InvalidRequest(f"the shared memory object of region '{name}' is shorter than when it was registered")
