"""Triton's core by its C API: a server with one model, requests and their responses.

Owns the declarations and the lifetimes of the library's objects; knows nothing of batches.
https://github.com/triton-inference-server/core/blob/main/include/triton/core/tritonserver.h
"""

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from math import prod
from typing import Any, NamedTuple

import numpy as np

from qinfer.backends.python_host.tensor import NUMBERS, Array
from qinfer.core.messages import Scalar
from qinfer.tensors import DATATYPES, Bytes, Tensor

_MAJOR = 1
"""TRITONSERVER_API_VERSION_MAJOR: minor versions only add functions."""

_EXPLICIT = 2  # TRITONSERVER_MODEL_CONTROL_EXPLICIT
_CPU = 0  # TRITONSERVER_MEMORY_CPU
_FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
_INTERNAL = 1  # TRITONSERVER_ERROR_INTERNAL
_PROMETHEUS = 0  # TRITONSERVER_METRIC_PROMETHEUS
_MAX_RANK = 32  # numpy's limit before version 2
_DATATYPES = {number: name for name, number in NUMBERS.items()}

_OUT = POINTER(c_void_p)
_TEXT = POINTER(c_char_p)

_ALLOCATE = ctypes.CFUNCTYPE(
    *(c_void_p, c_void_p, c_char_p, c_size_t, c_int, c_int64, c_void_p),
    *(_OUT, _OUT, POINTER(c_int), POINTER(c_int64)),
)
_FREE = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int64)
_RELEASED = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_void_p)
_RESPONDED = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_void_p)

_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "ApiVersion": (POINTER(c_uint32), POINTER(c_uint32)),
    "ServerOptionsNew": (_OUT,),
    "ServerOptionsDelete": (c_void_p,),
    "ServerOptionsSetModelRepositoryPath": (c_void_p, c_char_p),
    "ServerOptionsSetModelControlMode": (c_void_p, c_int),
    "ServerOptionsSetStrictModelConfig": (c_void_p, c_bool),
    "ServerOptionsSetBackendDirectory": (c_void_p, c_char_p),
    "ServerOptionsSetBackendConfig": (c_void_p, c_char_p, c_char_p, c_char_p),
    "ServerOptionsSetPinnedMemoryPoolByteSize": (c_void_p, c_uint64),
    "ServerOptionsSetModelLoadRetryCount": (c_void_p, c_uint32),
    "ServerOptionsSetExitTimeout": (c_void_p, c_uint32),
    "ServerOptionsSetLogInfo": (c_void_p, c_bool),
    "ServerOptionsSetGpuMetrics": (c_void_p, c_bool),
    "ServerOptionsSetCpuMetrics": (c_void_p, c_bool),
    "ServerNew": (_OUT, c_void_p),
    "ServerDelete": (c_void_p,),
    "ServerLoadModel": (c_void_p, c_char_p),
    "ServerInferAsync": (c_void_p, c_void_p, c_void_p),
    "ServerMetrics": (c_void_p, _OUT),
    "MetricsFormatted": (c_void_p, c_int, _TEXT, POINTER(c_size_t)),
    "MetricsDelete": (c_void_p,),
    "ResponseAllocatorNew": (_OUT, _ALLOCATE, _FREE, c_void_p),
    "InferenceRequestNew": (_OUT, c_void_p, c_char_p, c_int64),
    "InferenceRequestDelete": (c_void_p,),
    "InferenceRequestSetId": (c_void_p, c_char_p),
    "InferenceRequestSetFlags": (c_void_p, c_uint32),
    "InferenceRequestSetCorrelationId": (c_void_p, c_uint64),
    "InferenceRequestSetCorrelationIdString": (c_void_p, c_char_p),
    "InferenceRequestSetTimeoutMicroseconds": (c_void_p, c_uint64),
    "InferenceRequestAddInput": (c_void_p, c_char_p, c_int, POINTER(c_int64), c_uint64),
    "InferenceRequestAppendInputData": (c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_int64),
    "InferenceRequestAddRequestedOutput": (c_void_p, c_char_p),
    "InferenceRequestSetStringParameter": (c_void_p, c_char_p, c_char_p),
    "InferenceRequestSetIntParameter": (c_void_p, c_char_p, c_int64),
    "InferenceRequestSetBoolParameter": (c_void_p, c_char_p, c_bool),
    "InferenceRequestSetDoubleParameter": (c_void_p, c_char_p, c_double),
    "InferenceRequestSetReleaseCallback": (c_void_p, _RELEASED, c_void_p),
    "InferenceRequestSetResponseCallback": (c_void_p, c_void_p, c_void_p, _RESPONDED, c_void_p),
    "InferenceRequestCancel": (c_void_p,),
    "InferenceResponseError": (c_void_p,),
    "InferenceResponseDelete": (c_void_p,),
    "InferenceResponseOutputCount": (c_void_p, POINTER(c_uint32)),
    "InferenceResponseOutput": (
        *(c_void_p, c_uint32, _TEXT, POINTER(c_int), POINTER(POINTER(c_int64)), POINTER(c_uint64)),
        *(_OUT, POINTER(c_size_t), POINTER(c_int), POINTER(c_int64), _OUT),
    ),
    "InferenceResponseParameterCount": (c_void_p, POINTER(c_uint32)),
    "InferenceResponseParameter": (c_void_p, c_uint32, _TEXT, POINTER(c_int), _OUT),
}
"""The functions, without `TRITONSERVER_`; each returns an error or NULL."""

_PARAMETERS: Sequence[Callable[[int], Scalar]] = (
    lambda place: ctypes.string_at(place).decode(errors="replace"),
    lambda place: c_int64.from_address(place).value,
    lambda place: c_bool.from_address(place).value,
    lambda place: "",
    lambda place: c_double.from_address(place).value,
)
"""Readers of a response's parameters, by TRITONSERVER_ParameterType: string, int, bool, bytes (none), double."""


class CoreError(Exception):
    """An error of the core or its backend, with Triton's code."""

    def __init__(self, text: str, code: int = _INTERNAL) -> None:
        super().__init__(text)
        self.code = code


class CoreResponse(NamedTuple):
    """A response: outputs and parameters, or an error; neither = the final flag alone."""

    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, Scalar] = {}
    error: CoreError | None = None


class CoreRequest(NamedTuple):
    """A request to the model; `outputs` empty = all, `correlation_id` 0 or empty = no sequence."""

    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    request_id: str = ""
    parameters: Mapping[str, Scalar] = {}
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0


Respond = Callable[[CoreResponse | None, bool], None]
"""Takes a response (`None` = no response), and whether it is the final one; called from the core's threads."""


class _Pending:
    """A request in the core; `inputs` and `buffers` are memory that the core reads and writes."""

    __slots__ = ("buffers", "inputs", "is_ended", "is_released", "request", "respond")

    def __init__(self, request: int, inputs: Sequence[object], respond: Respond) -> None:
        self.request = request
        self.inputs = inputs
        self.respond = respond
        self.buffers: dict[int, Array] = {}
        self.is_released = self.is_ended = False


class Core:
    """A server of the core with one model, loaded by `load`.

    Args:
        library: `libtritonserver.so`.
        repository: The directory with the model's directory.
        backends: The directory of backends.
        failed: Called with an exception in a callback, which the core must not see.
    """

    def __init__(self, library: str, repository: str, backends: str, failed: Callable[[BaseException], None]) -> None:
        # Backends find the core's functions in the global scope.
        self._functions = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._failed = failed
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._model = b""
        self._error_new = self._declare("ErrorNew", (c_int, c_char_p), c_void_p)
        self._error_text = self._declare("ErrorMessage", (c_void_p,), c_char_p)
        self._error_code = self._declare("ErrorCode", (c_void_p,), c_int)
        self._error_delete = self._declare("ErrorDelete", (c_void_p,), None)
        self._calls = {name: self._declare(name, types, c_void_p) for name, types in _SIGNATURES.items()}
        major, minor = c_uint32(), c_uint32()
        self._call("ApiVersion", byref(major), byref(minor))
        if major.value != _MAJOR:
            raise CoreError(
                f"{library} has version {major.value}.{minor.value} of Triton's C API; {_MAJOR}.x is needed"
            )
        # ctypes doesn't keep callbacks alive.
        self._callbacks = _ALLOCATE(self._allocate), _FREE(self._free), _RELEASED(self._on_release)
        self._responded = _RESPONDED(self._on_response)
        self._server = self._started(repository, backends)
        self._allocator = self._made("ResponseAllocatorNew", *self._callbacks[:2], None)

    def load(self, model: str) -> None:
        """Loads the model, or raises `CoreError`."""
        self._model = model.encode()
        self._call("ServerLoadModel", self._server, self._model)

    def start_request(self, asked: CoreRequest, respond: Respond) -> int:
        """Begins a request and returns its number; raises `CoreError` if the core refuses it."""
        request = self._made("InferenceRequestNew", self._server, self._model, -1)
        number = next(self._numbers)
        kept = [np.frombuffer(tensor.data, np.uint8) for tensor in asked.inputs]
        try:
            self._fill(request, asked, kept)
            self._call("InferenceRequestSetReleaseCallback", request, self._callbacks[2], number)
            self._call("InferenceRequestSetResponseCallback", request, self._allocator, number, self._responded, number)
            self._pending[number] = _Pending(request, kept, respond)
            self._call("ServerInferAsync", self._server, request, None)
        except BaseException:
            self._pending.pop(number, None)
            self._call("InferenceRequestDelete", request)
            raise
        return number

    def cancel(self, number: int) -> None:
        """Asks the backend to end a request; unknown numbers are ignored."""
        with self._lock:  # so that the request is not deleted meanwhile
            pending = self._pending.get(number)
            if pending is not None:
                self._call("InferenceRequestCancel", pending.request)

    def metrics(self) -> str:
        """Returns the metrics of the core and its backends, in Prometheus' text format."""
        metrics, base, size = c_void_p(), c_char_p(), c_size_t()
        self._call("ServerMetrics", self._server, byref(metrics))
        try:
            self._call("MetricsFormatted", metrics, _PROMETHEUS, byref(base), byref(size))
            return ctypes.string_at(base, size.value).decode()
        finally:
            self._call("MetricsDelete", metrics)

    def close(self) -> None:
        """Unloads the model and ends the server; waits for open requests for a time."""
        self._call("ServerDelete", self._server)

    def _started(self, repository: str, backends: str) -> int:
        options = self._made("ServerOptionsNew")
        settings: Sequence[tuple[Any, ...]] = (
            ("ModelRepositoryPath", repository.encode()),
            ("ModelControlMode", _EXPLICIT),
            ("StrictModelConfig", False),
            ("BackendDirectory", backends.encode()),
            ("PinnedMemoryPoolByteSize", 0),
            # Version 2.51 leaves the count unset: a broken model would be loaded for ever.
            ("ModelLoadRetryCount", 0),
            ("ExitTimeout", 5),
            ("GpuMetrics", False),
            ("CpuMetrics", False),
            # The server's own lines of its start are of no use; a backend's lines are.
            ("LogInfo", False),
        )
        try:
            for name, *values in settings:
                self._call(f"ServerOptionsSet{name}", options, *values)
            server = self._made("ServerNew", options)
            self._call("ServerOptionsSetLogInfo", options, True)
            return server
        finally:
            self._call("ServerOptionsDelete", options)

    def _fill(self, request: int, asked: CoreRequest, kept: Sequence[Array]) -> None:
        call = self._call
        if asked.request_id:
            call("InferenceRequestSetId", request, asked.request_id.encode())
        if asked.correlation_id:
            if isinstance(asked.correlation_id, str):
                call("InferenceRequestSetCorrelationIdString", request, asked.correlation_id.encode())
            else:
                call("InferenceRequestSetCorrelationId", request, asked.correlation_id)
        if asked.flags:
            call("InferenceRequestSetFlags", request, asked.flags)
        if asked.timeout_us:
            call("InferenceRequestSetTimeoutMicroseconds", request, asked.timeout_us)
        for tensor, data in zip(asked.inputs, kept, strict=True):
            name, shape = tensor.name.encode(), tensor.shape
            dims = (c_int64 * len(shape))(*shape)
            call("InferenceRequestAddInput", request, name, NUMBERS[tensor.datatype], dims, len(shape))
            call("InferenceRequestAppendInputData", request, name, data.ctypes.data, data.nbytes, _CPU, 0)
        for output in asked.outputs:
            call("InferenceRequestAddRequestedOutput", request, output.encode())
        for key, value in asked.parameters.items():
            self._set_parameter(request, key.encode(), value)

    def _set_parameter(self, request: int, key: bytes, value: Scalar) -> None:
        if isinstance(value, bool):
            self._call("InferenceRequestSetBoolParameter", request, key, value)
        elif isinstance(value, int):
            self._call("InferenceRequestSetIntParameter", request, key, value)
        elif isinstance(value, float):
            self._call("InferenceRequestSetDoubleParameter", request, key, value)
        else:
            self._call("InferenceRequestSetStringParameter", request, key, value.encode())

    def _allocate(  # noqa: PLR0913, PLR0917  the parameters are Triton's
        self,
        allocator: int,
        name: bytes,
        size: int,
        kind: int,
        device: int,
        number: int,
        buffer: Any,
        of_buffer: Any,
        actual_kind: Any,
        actual_device: Any,
    ) -> int | None:
        """Gives a response host memory for an output."""
        del allocator, name, kind, device
        try:
            actual_kind[0], actual_device[0] = _CPU, 0
            of_buffer[0], buffer[0] = None, None
            if size:
                data = np.empty(size, np.uint8)
                self._pending[number].buffers[data.ctypes.data] = data
                buffer[0] = data.ctypes.data
        except BaseException as error:  # noqa: BLE001  the boundary to the core
            return int(self._error_new(_INTERNAL, f"no memory for an output of {size} bytes: {error}".encode()))
        return None

    def _free(
        self, allocator: int, buffer: int | None, of_buffer: int, size: int, kind: int, device: int
    ) -> int | None:
        """Leaves the memory to Python, which frees it with its last use."""
        del allocator, buffer, of_buffer, size, kind, device
        return None

    def _on_release(self, request: int, flags: int, number: int) -> None:
        del request, flags
        try:
            self._ended(number, "is_released")
        except BaseException as error:  # noqa: BLE001  the boundary to the core
            self._failed(error)

    def _on_response(self, response: int | None, flags: int, number: int) -> None:
        is_final = bool(flags & _FINAL)
        try:
            pending = self._pending[number]
            answer: CoreResponse | None = None
            if response is not None:
                try:
                    answer = self._read(response, pending)
                except CoreError as error:
                    answer = CoreResponse(error=error)
                except Exception as error:  # noqa: BLE001  without an answer, its batch would wait until it is killed
                    self._failed(error)
                    answer = CoreResponse(error=CoreError(f"the backend's response can't be read: {error}"))
                finally:
                    self._call("InferenceResponseDelete", response)
            if is_final:
                self._ended(number, "is_ended")
            pending.respond(answer, is_final)
        except BaseException as error:  # noqa: BLE001  the boundary to the core
            self._failed(error)

    def _ended(self, number: int, part: str) -> None:
        """Deletes a request that is released and has its final response: until then, it may be cancelled."""
        with self._lock:
            pending = self._pending[number]
            setattr(pending, part, True)
            if pending.is_released:
                pending.inputs = ()
                if pending.is_ended:
                    del self._pending[number]
                    self._call("InferenceRequestDelete", pending.request)

    def _read(self, response: int, pending: _Pending) -> CoreResponse:
        self._call("InferenceResponseError", response, owned=False)
        count = c_uint32()
        self._call("InferenceResponseOutputCount", response, byref(count))
        outputs = [self._output(response, index, pending) for index in range(count.value)]
        self._call("InferenceResponseParameterCount", response, byref(count))
        return CoreResponse(outputs, dict(self._parameter(response, index) for index in range(count.value)))

    def _output(self, response: int, index: int, pending: _Pending) -> Tensor:
        name, kind, dims, rank = c_char_p(), c_int(), POINTER(c_int64)(), c_uint64()
        base, size, memory, device, ours = c_void_p(), c_size_t(), c_int(), c_int64(), c_void_p()
        self._call(
            *("InferenceResponseOutput", response, index, byref(name), byref(kind), byref(dims), byref(rank)),
            *(byref(base), byref(size), byref(memory), byref(device), byref(ours)),
        )
        shape, datatype = tuple(dims[: rank.value]), _DATATYPES.get(kind.value, "")
        title = (name.value or b"").decode(errors="replace")
        data: Bytes = b""
        if size.value:
            data = pending.buffers.pop(base.value or 0)[: size.value].data
        itemsize = DATATYPES[datatype].itemsize if datatype else 0
        is_possible = datatype and len(shape) <= _MAX_RANK and min(shape, default=0) >= 0
        if not is_possible or (itemsize and itemsize * prod(shape) != size.value):
            raise CoreError(
                f"output '{title}' has {size.value} bytes, which are no {datatype or 'known datatype'} of shape {shape}"
            )
        return Tensor(title, datatype, shape, data)

    def _parameter(self, response: int, index: int) -> tuple[str, Scalar]:
        name, kind, value = c_char_p(), c_int(), c_void_p()
        self._call("InferenceResponseParameter", response, index, byref(name), byref(kind), byref(value))
        return (name.value or b"").decode(errors="replace"), _PARAMETERS[kind.value](value.value or 0)

    def _made(self, name: str, *arguments: Any) -> int:
        """Returns the object that a function makes; its place is the first argument."""
        made = c_void_p()
        self._call(name, byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: Any, owned: bool = True) -> None:
        """Calls a function, and raises its error; an error that is not `owned` belongs to a response."""
        error = self._calls[name](*arguments)
        if error is None:
            return
        text, code = (self._error_text(error) or b"").decode(errors="replace"), self._error_code(error)
        if owned:
            self._error_delete(error)
        raise CoreError(text, code)

    def _declare(self, name: str, arguments: Sequence[Any], result: Any) -> Any:
        function = self._functions[f"TRITONSERVER_{name}"]
        function.argtypes, function.restype = arguments, result
        return function
