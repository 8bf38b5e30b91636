"""Responses of a model: `pb_utils.InferenceResponse`, returned by `execute` or sent by an `InferenceResponseSender`.

Rules and texts are Triton's (src/response_sender.cc of its python_backend). Any thread may use a sender at any time.
"""

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from math import prod
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qinfer.backends.python_host.channel import Joined
from qinfer.backends.python_host.errors import TritonError, TritonModelException, checked_parameters
from qinfer.backends.python_host.messages import Execute, ExecutedRows, HostAnswer, StreamedResponse, TensorMeta
from qinfer.backends.python_host.tensor import Tensor
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, Scalar
from qinfer.errors import QinferError
from qinfer.tensors import NUMPY_DATATYPES, Bytes

if TYPE_CHECKING:
    import asyncio

    from qinfer.backends.python_host.host import ModelHost


class Cause(NamedTuple):
    """An exception's text, and its traceback unless logged."""

    text: str
    trace: str = ""


_here = threading.local()


def of_this_thread() -> Cause | None:
    """Returns this thread's exception, if any."""
    return getattr(_here, "cause", None)


def watch(noted: Callable[[BaseException, str], Cause]) -> None:
    """Calls `noted` with exceptions of threads and futures, and the event."""

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            _here.cause = noted(args.exc_value, "a thread of the model raised")

    def in_future(future: "Future[Any]", error: BaseException | None) -> None:
        if error is not None:
            noted(error, "")
        set_exception(future, error)

    set_exception = Future.set_exception
    threading.excepthook = in_thread
    Future.set_exception = in_future  # type: ignore[method-assign, assignment]  # the only place that a pool tells it to


def watch_loop(loop: "asyncio.AbstractEventLoop", noted: Callable[[BaseException, str], Cause]) -> None:
    """Calls `noted` with unretrieved exceptions of tasks."""

    def in_task(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            noted(error, "a task of the model raised")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(in_task)


_MOST = 1000

_OTHERS = frozenset(("asyncio", "concurrent", "qinfer", "threading"))
"""Unsearched packages."""


def held(error: BaseException) -> Iterator[object]:
    """Yields the objects in an exception's frames."""
    seen: BaseException | None = error
    while seen is not None:
        trace: TracebackType | None = seen.__traceback__
        while trace is not None:
            # Reading a frame's variables makes the frame refer to them: for frames that hold the exception, a cycle.
            if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OTHERS:
                yield from _values(trace.tb_frame)
            trace = trace.tb_next
        seen = seen.__cause__ or seen.__context__


def _values(frame: FrameType) -> Iterator[object]:
    for value in list(frame.f_locals.values()):
        yield value
        if isinstance(value, Mapping):
            yield from islice(value.values(), _MOST)
        elif isinstance(value, list | tuple):
            yield from islice(value, _MOST)
        elif not isinstance(value, type | ModuleType | FunctionType):
            yield from islice(getattr(value, "__dict__", {}).values(), _MOST)


FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL"""

_CLOSED = "Unable to send response. Response sender has been closed."
ABANDONED = (
    "the model dropped the response sender of the request without the final flag; "
    "send the last response, or None, with TRITONSERVER_RESPONSE_COMPLETE_FINAL"
)
NO_RESPONSE = "the model returned no response to the request"


class InferenceResponse:
    """A response.

    Args:
        output_tensors: The outputs of the response.
        error: The error in place of outputs.
        parameters: Bools, ints and strings.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Scalar] | None = None,
    ) -> None:
        outputs = list(output_tensors)
        for tensor in outputs:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors are pb_utils.Tensor objects, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error is a pb_utils.TritonError, got {type(error).__name__}")
        self._outputs = outputs
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters else {}

    def output_tensors(self) -> list[Tensor]:
        """Returns the outputs of the response."""
        return self._outputs

    def has_error(self) -> bool:
        """Returns whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Returns the error."""
        return self._error

    def parameters(self) -> str:
        """Returns the parameters as JSON."""
        return json.dumps(self._parameters)

    def parameters_dict(self) -> dict[str, Scalar]:
        """Returns the parameters; not part of Triton's interface."""
        return self._parameters


def joined_rows(
    responses: Sequence[InferenceResponse | None], wanted: Container[str], narrow: Container[str]
) -> tuple[ExecutedRows, list[Joined]] | None:
    """Joins the outputs if they are alike, and neither strings nor BF16 (`narrow`)."""
    plain = [r._outputs for r in responses if r is not None and r._error is None and not r._parameters]
    if len(plain) < len(responses) or len({*map(len, plain)}) > 1:
        return None
    metas: list[TensorMeta] = []
    buffers: list[Joined] = []
    rows: list[int] | None = None
    for column in zip(*plain, strict=True):
        arrays = [tensor._array for tensor in column]
        kinds = {(t._name, t._datatype, t._array.dtype, t._array.ndim, t._array.shape[1:]) for t in column}
        name, datatype, dtype, ndim, tail = kinds.pop()
        wire = NUMPY_DATATYPES.get(dtype)
        if kinds or not ndim or wire is None or datatype is not None or name in narrow:
            return None
        counts = [len(array) for array in arrays]
        if rows is not None and counts != rows:
            return None
        rows = counts
        if name in wanted:
            metas.append(TensorMeta(name, wire, (sum(counts), *tail)))
            parts = [a if a.flags.c_contiguous else np.ascontiguousarray(a) for a in arrays if a.size]
            buffers.append(Joined(parts, sum(counts) * prod(tail) * dtype.itemsize))
    return (ExecutedRows(metas, rows), buffers) if metas and rows else None


class InferenceResponseSender:
    """Sends the responses to one request (`InferenceRequest.get_response_sender`).

    Dropping it without the final flag ends the request with an error; in Triton, the caller gets no answer.
    """

    __slots__ = ("_responses",)

    def __init__(self, responses: "SingleReply | ResponseStream") -> None:
        self._responses = responses

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Sends a response; waits while the window of the request is used up.

        Args:
            response: The response, or an error; `None` with the final flag = no more responses.
            flags: 0, or `TRITONSERVER_RESPONSE_COMPLETE_FINAL` with the last response.

        Raises:
            TritonModelException: The sender is closed, more would follow for a cancelled request, or a model that
                is not decoupled answers twice.
            TypeError: `response` is no `InferenceResponse`.
        """
        if flags not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response is a pb_utils.InferenceResponse object, got {type(response).__name__}")
        self._responses.send(response, final=flags == FINAL)

    def is_cancelled(self) -> bool:
        """Asks the worker whether the caller has left."""
        return self._responses.is_cancelled()

    def responses(self) -> "SingleReply | ResponseStream":
        """Returns the `SingleReply` or `ResponseStream` that takes the responses; Triton has no such method."""
        return self._responses

    def __del__(self) -> None:
        self._responses.abandon()


class SingleReply:
    """The only response; without one, `cause` or `missing` has the error's text."""

    def __init__(self, is_cancelled: Callable[[], bool] = bool, request_id: str = "") -> None:
        self.is_cancelled = is_cancelled
        self.request_id = request_id
        self.cause: Cause | None = None
        self.missing = ABANDONED
        self._sending = threading.Lock()
        self._response: InferenceResponse | None = None
        self._is_closed = False
        # The garbage collector may call only its `put`.
        self._settled: queue.SimpleQueue[None] = queue.SimpleQueue()

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Takes the response, or the final flag after it."""
        with self._sending:
            if response is not None and self._response is not None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and self._response is None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
            if self._is_closed:
                raise TritonModelException(_CLOSED)
            self._is_closed = final
            if response is not None:
                self._response = response
                self._settled.put(None)

    def abandon(self) -> None:
        """Ends a wait in `response`."""
        self.cause = self.cause or of_this_thread()
        self._settled.put(None)

    def response(self) -> InferenceResponse:
        """Waits for the response, or returns an error."""
        self._settled.get()
        if self._response is not None:
            return self._response
        return InferenceResponse(error=TritonError(self.missing if self.cause is None else self.cause.text))


class ResponseStream:
    """A decoupled model's responses to one request.

    `is_unwanted`: the worker has reported a cancellation, by `on_unwanted`, which must not wait. `cause` may explain a
    missing last response.
    """

    def __init__(self, host: "ModelHost", place: tuple[int, int], message: Execute, item: int) -> None:
        self.batch, self.item = place
        self.request_id = message.ids[item]
        self.cause: Cause | None = None
        self.is_closed = False
        self.is_unwanted = False
        self.on_unwanted: Callable[[], None] = lambda: None
        self._host = host
        self._outputs = message.asked(item).outputs
        self._window_bytes = message.window_bytes
        self._sent_bytes = self._on_way_bytes = 0
        self._on_way: deque[tuple[int, int]] = deque()
        self._sending = threading.Lock()
        """The lock that a response holds while it waits, so that later responses follow it."""

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Sends a response, once the window has room."""
        with self._sending:
            self._check_open()
            answer, buffers = HostAnswer([], {}), list[Bytes]()
            if response is not None:
                answer, buffers = self._encoded(response)
            size = sum(map(len, buffers))
            self._host.poll()
            self._take_room(size)
            self._check_open()
            if self.is_unwanted:
                if not final:
                    raise TritonModelException("Unable to send response. The request is cancelled.")
            else:
                self._host.send(StreamedResponse(self.batch, self.item, answer, final), buffers)
            if final:
                self.close()

    def is_cancelled(self) -> bool:
        """Asks the worker whether the caller has left."""
        return self.is_unwanted or self._host.is_cancelled(self.batch, self.item)

    def abandon(self) -> None:
        """Ends an open request with an error."""
        if not self.is_closed:
            cause = self.cause or of_this_thread() or Cause(ABANDONED)
            self.close(cause.text, cause.trace)

    def close(self, error: str | None = None, trace: str = "") -> None:
        """Refuses further responses; reports and logs an error."""
        self.is_closed = True
        self._host.end_stream(self, error, trace)

    def _encoded(self, response: InferenceResponse) -> tuple[HostAnswer, list[Bytes]]:
        try:
            return self._host.encoded(response, self._outputs)
        except QinferError as refused:
            raise TritonModelException(refused.message) from None

    def _check_open(self) -> None:
        if self.is_closed:
            raise TritonModelException(_CLOSED)

    def _take_room(self, size: int) -> None:
        if not size:
            return
        excess_bytes = self._on_way_bytes + size + RESPONSE_OVERHEAD_BYTES - self._window_bytes
        if self._window_bytes and excess_bytes > 0 and self._on_way and not self.is_unwanted:
            taken_bytes, cancelled = self._host.await_taken(self, self._needed_bytes(excess_bytes))
            self.is_unwanted = self.is_unwanted or cancelled
            while self._on_way and self._on_way[0][0] <= taken_bytes:
                self._on_way_bytes -= self._on_way.popleft()[1]
        self._sent_bytes += size
        self._on_way_bytes += size + RESPONSE_OVERHEAD_BYTES
        self._on_way.append((self._sent_bytes, size + RESPONSE_OVERHEAD_BYTES))

    def _needed_bytes(self, excess_bytes: int) -> int:
        for sent_bytes, used_bytes in self._on_way:
            excess_bytes -= used_bytes
            if excess_bytes <= 0:
                return sent_bytes
        return self._sent_bytes
