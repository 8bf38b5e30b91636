"""Shared memory of both kinds: clients on this host pass tensors in it instead of in bodies (reference §1.15).

- The extension is off by default: a client may read and overwrite any shared memory object that this process can open.
- Regions of system memory are read and written through descriptors, never mapped: a client that shortens a mapped
  object would kill this process (SIGBUS). `cuda_memory.py` has the regions on GPUs. Reads are copies, so that nothing
  changes under a request.
- As in Triton, an unregistered region stays open until the last request that uses it has ended. A request uses it while
  its `RequestRegions`, which its output plan holds, is referenced.
"""

import os
import re
import stat
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import (
    AlreadyExists,
    InvalidRequest,
    PayloadTooLarge,
    QinferError,
    RegionNotFound,
    RegionUnavailable,
)
from qinfer.tensors import Bytes, Tensor
from qinfer.wire.frame import Repeats
from qinfer.wire.outputs import OutputPlan, no_shared_memory
from qinfer_api.cuda_memory import HANDLE_BYTES, CudaObject, driver

DIRECTORY = "/dev/shm"  # noqa: S108 - where `shm_open` of glibc and musl keeps its objects

MAX_REGIONS = 10_000
"""Each region has a descriptor; a tenant below its share may always register one."""

QUICK_BYTES = 256 * 1024
"""Inputs of so many bytes are copied faster than a thread is started."""

MOST_KNOWN_BYTES = 2048
_MAX_KNOWN = 256
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


P = ParamSpec("P")
T = TypeVar("T")


def forgets_regions(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function for a thread, whose errors keep no region open: idle threads of a pool keep the last one."""

    @wraps(function)
    def forgetful(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except QinferError as error:
            error.__context__ = None
            raise error.with_traceback(None) from None

    return forgetful


R = TypeVar("R", Region, CudaRegion)


class _SystemObject:
    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor

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
    """A region, open while it is registered or a request has it."""

    __slots__ = ("__weakref__", "begin", "memory", "region")

    def __init__(self, region: Region | CudaRegion, memory: _SystemObject | CudaObject) -> None:
        self.region, self.memory = region, memory
        self.begin = region.offset if isinstance(region, Region) else 0
        weakref.finalize(self, memory.close).atexit = False  # `_leaving` could return it in `__del__`

    def check(self, offset: int, byte_size: int) -> None:
        name, size = self.region.name, self.region.byte_size
        if offset >= size:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
        if offset + byte_size > _MAX_UINT64:
            raise InvalidRequest(
                f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value "
                f"({_MAX_UINT64}) for region '{name}'"
            )
        if offset + byte_size > size:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")

    def write(self, offset: int, data: Bytes) -> None:
        self.check(offset, len(data))
        self.memory.write(self.begin + offset, memoryview(data))


class SharedMemory:
    """The regions of one tenant, or of callers without a key; thread-safe.

    `texts` and `messages` are repeated requests of HTTP and gRPC, until a region is unregistered.
    """

    def __init__(self, *, allowed: bool, tenants: "dict[str, SharedMemory] | None" = None) -> None:
        self.allowed = allowed
        self._tenants = {"": self} if tenants is None else tenants
        self._regions: dict[str, _OpenRegion] = {}
        self._leaving = weakref.WeakValueDictionary[str, _OpenRegion]()
        self._lock = threading.Lock()
        self.texts: dict[bytes, KnownRequest] = {}
        self.messages: dict[bytes, KnownRequest] = {}
        self._repeats = Repeats()

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
                    self._forget()
                    self._leaving[each] = self._regions.pop(each)

    def status(self, name: str = "") -> list[Region]:
        """Returns the registered regions, or the one of that name."""
        return self._status(name, Region, "system")

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """Returns the registered regions of GPU memory, or the one of that name."""
        return self._status(name, CudaRegion, "cuda")

    def _status(self, name: str, kind: type[R], told: str) -> list[R]:
        with self._lock:
            regions = [opened.region for opened in (*self._regions.values(), *self._leaving.values())]
        found = [region for region in regions if isinstance(region, kind) and name in ("", region.name)]
        if not name or found:
            return found
        if any(region.name == name for region in regions):
            is_of = "CUDA shared memory, not system" if kind is Region else "system shared memory, not CUDA"
            raise RegionNotFound(f"The region named '{name}' is registered as {is_of} shared memory")
        raise RegionNotFound(f"Unable to find {told} shared memory region: '{name}'")

    def find(self, name: str) -> _OpenRegion:
        """Returns a region."""
        self.check_allowed()
        opened = self._regions.get(name) or self._leaving.get(name)
        if opened is None:
            raise RegionNotFound(f"Unable to find shared memory region: '{name}'")
        return opened

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Checks that a region exists and contains these bytes."""
        self.find(name).check(offset, byte_size)

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a region's part."""
        return RequestRegions(self, byte_size, None).view(name, offset, byte_size)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region; raises as `view` does."""
        self.find(name).write(offset, data)

    def limited(self, max_bytes: int, land: "Land | None" = None) -> "RequestRegions":
        """Returns the regions for a request that may copy `max_bytes`."""
        return RequestRegions(self, max_bytes, land)

    def remember(self, known: "dict[bytes, KnownRequest]", text: bytes, request: "KnownRequest") -> None:
        """Adds the second of equal requests, unless one of its regions is unregistered."""
        if not self._repeats.has(text):
            return
        with self._lock:
            if all(self._regions.get(name) is opened for name, opened in request.regions.used.items()):
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                known[text] = request

    def close(self) -> None:
        """Closes the regions of all tenants."""
        for memory in self._tenants.values():
            memory._forget()
            memory._regions.clear()

    def _forget(self) -> None:
        self.texts.clear()
        self.messages.clear()

    def _check_free(self, name: str) -> None:
        if name in self._regions or name in self._leaving:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if self._is_full():
            raise InvalidRequest(f"{MAX_REGIONS} shared memory regions are registered already; unregister some")

    def _is_full(self) -> bool:
        counts = [memory._count() for memory in tuple(self._tenants.values())]
        sharing = len([count for count in counts if count])
        return sum(counts) >= MAX_REGIONS and self._count() * sharing >= MAX_REGIONS

    def _count(self) -> int:
        return len(self._regions) + len(self._leaving)


_InputPlace = tuple[str, str, tuple[int, ...], _SystemObject | CudaObject, int, slice]

Land = Callable[[int], memoryview | None]
"""Takes so many bytes of memory that workers read, if there are."""


class TakesLong(Exception):
    """A thread is to read the inputs."""


class RequestRegions:
    """One request's regions, open while this object lives; its inputs there are no larger than a body.

    On the event loop, `land` takes a large input, and `view` raises `TakesLong` for others.
    """

    def __init__(self, memory: SharedMemory, max_bytes: int, land: Land | None) -> None:
        self._memory = memory
        self._left_bytes = self._max_bytes = max_bytes
        self._quick_bytes = QUICK_BYTES
        self._land = land
        self.used: dict[str, _OpenRegion] = {}
        self._read: list[tuple[_OpenRegion, int]] = []

    @property
    def are_on_gpu(self) -> bool:
        """Whether one is on a GPU."""
        return any(isinstance(opened.region, CudaRegion) for opened in self.used.values())

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Returns a copy of a region's part."""
        self._left_bytes -= byte_size
        if self._left_bytes < 0:
            raise PayloadTooLarge(
                f"inputs in shared memory of more than {self._max_bytes} bytes exceed the maximum allowed input size; "
                "raise QINFER_HTTP__MAX_INPUT_BYTES to accept them"
            )
        target: memoryview | None = None
        opened = self._use(name)
        opened.check(offset, byte_size)
        if self._land is not None:
            if isinstance(opened.region, CudaRegion):
                raise TakesLong
            target = self._land(byte_size)
            if target is None:
                self._quick_bytes -= byte_size
                if self._quick_bytes < 0:
                    raise TakesLong
        if target is None:
            target = memoryview(bytearray(byte_size))
        opened.memory.read(opened.begin + offset, target)
        self._read.append((opened, opened.begin + offset))
        return target

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Checks a part as `SharedMemory.check` does."""
        self._use(name).check(offset, byte_size)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region; see `SharedMemory.write`."""
        self._use(name).write(offset, data)

    def learn(
        self, known: "dict[bytes, KnownRequest]", text: Bytes, request: OutgoingRequest, plan: OutputPlan, version: str
    ) -> None:
        """Remembers a request if its text and the bytes in regions are all of it."""
        inputs = request.inputs
        if len(text) > MOST_KNOWN_BYTES or len(self._read) != len(inputs) or (plan.special and plan.ranks):
            return
        if request.parameters or request.priority or request.timeout_s or request.sequence is not None:
            return
        if any(tensor.datatype == "BYTES" for tensor in inputs):
            return
        places: list[_InputPlace] = []
        begin = 0
        for tensor, (opened, position) in zip(inputs, self._read, strict=True):
            end = begin + len(tensor.data)
            place = opened.memory, position, slice(begin, end)
            places.append((tensor.name, tensor.datatype, tensor.shape, *place))
            begin = end
        regions = RequestRegions(self._memory, self._max_bytes, None)
        regions.used = self.used
        plan = msgspec.structs.replace(plan, held=regions)
        about = request.model, version, request.client_id, request.outputs, plan
        self._memory.remember(known, bytes(text), KnownRequest(*about, regions, places, begin))

    def _use(self, name: str) -> _OpenRegion:
        opened = self.used.get(name)
        if opened is None:
            opened = self.used[name] = self._memory.find(name)
        return opened


class KnownRequest(NamedTuple):
    """A request that clients repeat; its inputs are read anew. `version` is of gRPC, unchecked."""

    model: str
    version: str
    client_id: str
    outputs: tuple[str, ...]
    plan: OutputPlan
    regions: RequestRegions
    inputs: list[_InputPlace]
    nbytes: int

    def read(self, model: str, version: int, land: Land) -> OutgoingRequest:
        """Returns the request; see `RequestRegions`."""
        target = land(self.nbytes)
        if target is None:
            if self.nbytes > QUICK_BYTES:
                raise TakesLong
            target = memoryview(bytearray(self.nbytes))
        inputs = []
        for name, datatype, shape, memory, position, place in self.inputs:
            data = target[place]
            memory.read(position, data)
            inputs.append(Tensor(name, datatype, shape, data))
        client_id, outputs = self.client_id, self.outputs
        return OutgoingRequest(model=model, inputs=tuple(inputs), version=version, client_id=client_id, outputs=outputs)


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
