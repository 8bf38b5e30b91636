"""Shared memory of both kinds: clients on this host pass tensors in it instead of in bodies (reference §1.15).

- The extension is off by default: a client may read and overwrite any shared memory object that this process can open.
- Regions of system memory are read and written through descriptors, never mapped: a client that shortens a mapped
  object would kill this process (SIGBUS). `cuda_memory.py` has the regions on GPUs. Reads are copies, so that nothing
  changes under a request.
- As in Triton, an unregistered region stays open until the last request that uses it has ended. An accepted request
  uses it while its `RequestRegions`, which its output plan holds, is referenced.
"""

import os
import re
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from qinfer.errors import (
    AlreadyExists,
    InvalidRequest,
    PayloadTooLarge,
    RegionNotFound,
    RegionUnavailable,
)
from qinfer.tensors import Bytes
from qinfer.wire.outputs import no_shared_memory
from qinfer_api.cuda_memory import HANDLE_BYTES, CudaObject, driver

DIRECTORY = "/dev/shm"  # noqa: S108 - where `shm_open` of glibc and musl keeps its objects

MAX_REGIONS = 10_000
"""Each region has a descriptor; a tenant below its share may always register one."""

QUICK_BYTES = 256 * 1024
"""Inputs of so many bytes are copied faster than a thread is started."""

_MAX_UINT64 = 2**64 - 1
_MAX_DEVICE_ID = 2**31 - 1  # CUDA's `int`
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
_KEY = re.compile(r"/*(?!\.{1,2}$)[^/\0]{1,254}")


class Region(msgspec.Struct, frozen=True):
    """A registered region of system shared memory.

    Attributes:
        name: The name of the region in requests.
        key: The name of the shared memory object, as `shm_open` takes it.
        offset: Start of the region in the object, in bytes.
        byte_size: The size of the region, in bytes.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(msgspec.Struct, frozen=True):
    """A registered region of GPU memory.

    Attributes:
        name: The name in requests.
        device_id: CUDA's number of the GPU on the gateway's host.
        byte_size: The size of the region, in bytes.
    """

    name: str
    device_id: int
    byte_size: int


R = TypeVar("R", Region, CudaRegion)


class _SystemObject:
    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor

    def copy(self) -> "_SystemObject":
        """Keeps the object open when this one is closed."""
        return _SystemObject(self._name, os.dup(self._descriptor))

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, position: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], position)
            if not count:
                raise _shortened(self._name)
            target, position = target[count:], position + count

    def write(self, position: int, data: memoryview) -> None:
        """Writes data at a position."""
        if position + len(data) > os.fstat(self._descriptor).st_size:  # writing beyond the end would lengthen it again
            raise _shortened(self._name)
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], position + done)


class _OpenRegion:
    __slots__ = ("is_leaving", "memory", "region", "users")

    def __init__(self, region: Region | CudaRegion, memory: _SystemObject | CudaObject) -> None:
        self.region = region
        self.memory = memory
        self.users = 0
        self.is_leaving = False


class SharedMemory:
    """The regions of one tenant, or of callers without a key; thread-safe."""

    def __init__(self, *, allowed: bool, tenants: "dict[str, SharedMemory] | None" = None) -> None:
        self.allowed = allowed
        self._tenants = {"": self} if tenants is None else tenants
        self._regions: dict[str, _OpenRegion] = {}
        self._lock = threading.RLock()  # requests may end wherever memory is freed

    def for_tenant(self, tenant: str) -> "SharedMemory":
        """Returns the regions of a tenant."""
        known = self._tenants.get(tenant)
        return known or self._tenants.setdefault(tenant, SharedMemory(allowed=self.allowed, tenants=self._tenants))

    def check_allowed(self) -> None:
        """Checks that clients may use shared memory."""
        if not self.allowed:
            raise no_shared_memory()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Opens a region."""
        self.check_allowed()
        if not name:
            raise InvalidRequest("'region name' is necessary to register system shared memory region")
        if key.lstrip("/").startswith(_RESERVED_PREFIX):
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED_PREFIX}'"
            )
        with self._lock:
            self._check_free(name)
            descriptor = _open_object(name, key)
            try:
                if byte_size <= 0 or offset + byte_size > os.fstat(descriptor).st_size:
                    raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
            except BaseException:
                os.close(descriptor)
                raise
            self._regions[name] = _OpenRegion(Region(name, key, offset, byte_size), _SystemObject(name, descriptor))

    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Opens a region of GPU memory by its CUDA handle."""
        self.check_cuda(name)
        if len(handle) != HANDLE_BYTES:
            raise InvalidRequest("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        found = driver()
        assert found is not None, "it was checked"
        with self._lock:
            self._check_free(name)
        if byte_size <= 0 or not 0 <= device_id <= _MAX_DEVICE_ID:
            raise InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
        # Without the lock, for which requests wait on the event loop: the first use of a GPU takes long.
        memory = CudaObject(found, name, handle, device_id, byte_size)
        with self._lock:
            try:
                self._check_free(name)
            except BaseException:
                memory.close()
                raise
            self._regions[name] = _OpenRegion(CudaRegion(name, device_id, byte_size), memory)

    def check_cuda(self, name: str) -> None:
        """Checks that GPU memory may be registered."""
        self.check_allowed()
        if not name:
            raise InvalidRequest("'region name' is necessary to register cuda shared memory region")
        if driver() is None:
            raise InvalidRequest(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    def unregister(self, name: str = "", kind: type[Region | CudaRegion] = Region) -> None:
        """Closes a region, or all of a kind, once no request uses it; ignores an unknown name."""
        self.check_allowed()
        with self._lock:
            for each in [name] if name else list(self._regions):
                opened = self._regions.get(each)
                if opened is not None and isinstance(opened.region, kind):
                    self._release_region(each)

    def hold(self, names: Iterable[str]) -> list[_OpenRegion]:
        """Adds a user to each existing region, until `release`."""
        with self._lock:
            held = [self._regions[name] for name in names if name in self._regions]
            for opened in held:
                opened.users += 1
            return held

    def release(self, held: Iterable[_OpenRegion]) -> None:
        """Removes a user from each region."""
        with self._lock:
            for opened in held:
                opened.users -= 1
                if opened.is_leaving and not opened.users:
                    self._close(opened.region.name)

    def status(self, name: str = "") -> list[Region]:
        """Returns the registered regions, or the one of that name."""
        return self._status(name, Region, "system")

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """Returns the registered regions of GPU memory, or the one of that name."""
        return self._status(name, CudaRegion, "cuda")

    def _status(self, name: str, kind: type[R], told: str) -> list[R]:
        with self._lock:
            regions = [opened.region for opened in self._regions.values()]
        found = [region for region in regions if isinstance(region, kind) and name in ("", region.name)]
        if not name or found:
            return found
        if any(region.name == name for region in regions):
            is_of = "CUDA shared memory, not system" if kind is Region else "system shared memory, not CUDA"
            raise RegionNotFound(f"The region named '{name}' is registered as {is_of} shared memory")
        raise RegionNotFound(f"Unable to find {told} shared memory region: '{name}'")

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Checks that a region exists and contains these bytes."""
        with self._part(name, offset, byte_size):
            pass

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a region's part."""
        with self._part(name, offset, byte_size) as (memory, position):
            data = memoryview(bytearray(byte_size))
            memory.read(position, data)
            return data

    def read(self, name: str, offset: int, target: memoryview) -> None:
        """Copies a region's part."""
        with self._part(name, offset, len(target)) as (memory, position):
            memory.read(position, target)

    def is_on_gpu(self, name: str) -> bool:
        """Returns whether a region is on a GPU, whose copies may wait."""
        opened = self._regions.get(name)
        return opened is not None and isinstance(opened.region, CudaRegion)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region; raises as `view` does."""
        view = memoryview(data)
        with self._part(name, offset, len(view)) as (memory, position):
            memory.write(position, view)

    def limited(self, max_bytes: int, land: "Land | None" = None) -> "RequestRegions":
        """Returns the regions for a request that may copy `max_bytes`."""
        return RequestRegions(self, max_bytes, land)

    def close(self) -> None:
        """Closes the regions of all tenants."""
        for memory in self._tenants.values():
            with memory._lock:
                for name in list(memory._regions):
                    memory._close(name)

    def _check_free(self, name: str) -> None:
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if self._is_full():
            raise InvalidRequest(f"{MAX_REGIONS} shared memory regions are registered already; unregister some")

    def _is_full(self) -> bool:
        counts = [len(memory._regions) for memory in tuple(self._tenants.values())]
        own, sharing = len(self._regions), len([count for count in counts if count])
        return sum(counts) >= MAX_REGIONS and own * sharing >= MAX_REGIONS

    def _release_region(self, name: str) -> None:
        opened = self._regions.get(name)
        if opened is not None and opened.users:
            opened.is_leaving = True
        else:
            self._close(name)

    def _close(self, name: str) -> None:
        opened = self._regions.pop(name, None)
        if opened is not None:
            opened.memory.close()

    def _of_request(self, name: str) -> _OpenRegion:
        opened = self._regions.get(name)
        if opened is None:
            raise RegionNotFound(f"Unable to find shared memory region: '{name}'")
        return opened

    @contextmanager
    def _part(self, name: str, offset: int, byte_size: int) -> Iterator[tuple[_SystemObject | CudaObject, int]]:
        self.check_allowed()
        with self._lock:
            opened = self._of_request(name)
            region = opened.region
            if offset >= region.byte_size:
                raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
            if offset + byte_size > _MAX_UINT64:
                raise InvalidRequest(
                    f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value "
                    f"({_MAX_UINT64}) for region '{name}'"
                )
            if offset + byte_size > region.byte_size:
                raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")
            own = opened.memory.copy()
        try:
            yield own, offset + (region.offset if isinstance(region, Region) else 0)
        finally:
            own.close()


Land = Callable[[int], memoryview | None]
"""Takes so many bytes of memory that workers read, if there are."""


class TakesLong(Exception):
    """A thread is to read the inputs."""


class RequestRegions:
    """One request's regions; its inputs there are no larger than a body.

    On the event loop, `land` takes a large input, and `view` raises `TakesLong` for others.
    """

    def __init__(self, memory: SharedMemory, max_bytes: int, land: Land | None) -> None:
        self._memory = memory
        self._left_bytes = self._max_bytes = max_bytes
        self._quick_bytes = QUICK_BYTES
        self._land = land
        self._names: set[str] = set()

    @property
    def is_used(self) -> bool:
        """Whether the request uses any region."""
        return bool(self._names)

    def hold(self) -> None:
        """Keeps the regions open while this object lives."""
        weakref.finalize(self, self._memory.release, self._memory.hold(self._names)).atexit = False

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a region's part."""
        self._names.add(name)
        self._left_bytes -= byte_size
        if self._left_bytes < 0:
            raise PayloadTooLarge(
                f"inputs in shared memory of more than {self._max_bytes} bytes exceed the maximum allowed input size; "
                "raise QINFER_HTTP__MAX_INPUT_BYTES to accept them"
            )
        if self._land is not None:
            if self._memory.is_on_gpu(name):
                raise TakesLong
            target = self._land(byte_size)
            if target is not None:
                self._memory.read(name, offset, target)
                return target
            self._quick_bytes -= byte_size
            if self._quick_bytes < 0:
                raise TakesLong
        return self._memory.view(name, offset, byte_size)

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Checks a part as `SharedMemory.check` does."""
        self._names.add(name)
        self._memory.check(name, offset, byte_size)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region; see `SharedMemory.write`."""
        self._memory.write(name, offset, data)


def _open_object(name: str, key: str) -> int:
    """Opens only what `shm_open` would."""
    if not _KEY.fullmatch(key):
        raise InvalidRequest(f"failed to register shared memory region '{name}': invalid shm key '{key[:100]}'")
    refusal = RegionUnavailable(f"Unable to open shared memory region: '{key}'")
    try:
        descriptor = os.open(f"{DIRECTORY}/{key.lstrip('/')}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise refusal from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def _shortened(name: str) -> InvalidRequest:
    return InvalidRequest(f"the shared memory object of region '{name}' is shorter than when it was registered")
